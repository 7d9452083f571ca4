"""Adapters as far as they go without the packages they are for; tests/adapters has the rest."""

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import websockets
from hypothesis import given
from hypothesis import strategies as st
from trlx_hybrid.contract.conversation import opening
from trlx_hybrid.errors import ConfigError
from trlx_hybrid_multiturn import Step
from trlx_hybrid_multiturn.adapters.connection import Connection, ServerError
from trlx_hybrid_multiturn.adapters.openenv import action_field, from_openenv, observation_field
from trlx_hybrid_multiturn.adapters.reasoning_gym import from_reasoning_gym, last_answer
from trlx_hybrid_multiturn.adapters.verifiers import from_verifiers, remainder

TEXT, NUMBER, MAYBE = {"type": "string"}, {"type": "integer"}, {"anyOf": [{"type": "string"}, {"type": "null"}]}


def action(required, **properties):
    return {"properties": properties | {"metadata": {"type": "object"}}, "required": required}


def test_importing_adapters_imports_no_package_of_theirs():
    code = (
        "import sys\nfrom trlx_hybrid_multiturn.adapters import openenv, verifiers, reasoning_gym\n"
        "heavy = {'websockets', 'verifiers', 'openenv', 'reasoning_gym', 'torch', 'trl', 'datasets'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("schema", "field"),
    [
        (action(["message"], message=TEXT), "message"),
        (action(["code"], code=TEXT, language=TEXT), "code"),
        (action([], guess=MAYBE, tries=NUMBER), "guess"),
    ],
)
def test_the_only_text_of_an_action_takes_the_completion(schema, field):
    assert action_field(schema, None, "the server") == field


@pytest.mark.parametrize(
    ("schema", "given", "message"),
    [
        (action(["a", "b"], a=TEXT, b=TEXT), None, "have the fields a, b: say which one takes the completion"),
        (action(["a"], a=NUMBER), None, "have the fields a: say which one takes the completion"),
        ({}, None, "have the fields none"),
        (action(["a", "b"], a=TEXT, b=NUMBER), "a", "need b beside 'a': give action=a function"),
        (action(["message"], message=TEXT), "mesage", r"no field 'mesage'. Did you mean 'message'\?"),
        (
            action(["tool_name"], type=TEXT, tool_name=TEXT, arguments={"type": "object"}),
            None,
            "call MCP tools.*action=a",
        ),
        (action(["message"], message=TEXT), "metadata", r"no field 'metadata'. Fields: message\."),
    ],
)
def test_actions_that_no_completion_makes_are_refused(schema, given, message):
    with pytest.raises(ConfigError, match=message):
        action_field(schema, given, "the server")


def test_the_only_text_of_an_observation_is_shown():
    schema = {"properties": {"done": {}, "reward": {}, "metadata": {}, "text": TEXT, "length": NUMBER}}
    assert observation_field(schema, None, "the server") == "text"
    assert observation_field(schema, "length", "the server") == "length"
    schema["properties"]["stderr"] = TEXT
    with pytest.raises(ConfigError, match="have the fields text, length, stderr: say which one the model is shown"):
        observation_field(schema, None, "the server")


def test_an_mcp_tools_name_is_not_shown():
    """As openenv 0.10 describes what its MCP environments answer."""
    schema = {"properties": {"done": {}, "tool_name": TEXT, "result": {}, "error": {"type": "object"}}}
    with pytest.raises(ConfigError, match="have the fields tool_name, result, error: say which one the model is shown"):
        observation_field(schema, None, "the server")


messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": st.text(max_size=3)}),
    min_size=1,
    max_size=4,
)


@given(prompt=messages, more=messages, suffix=st.text(max_size=3))
def test_a_remainder_makes_of_the_prompt_what_is_asked(prompt, more, suffix):
    longer = [*prompt[:-1], prompt[-1] | {"content": prompt[-1]["content"] + suffix}]
    for asked in (prompt, prompt + more, longer):
        assert opening(prompt, remainder(prompt, asked)) == asked


@given(prompt=messages, asked=messages)
def test_a_remainder_is_exact_or_refused(prompt, asked):
    with contextlib.suppress(ServerError):
        assert opening(prompt, remainder(prompt, asked)) == asked


@pytest.fixture
def serve():
    """Serves real websockets on a loop in another thread: `answers` takes a request's text, and its connection."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    gone = threading.Event()

    def start(answers):
        async def handler(connection):
            try:
                async for request in connection:
                    await answers(connection, request)
            finally:
                gone.set()

        async def begin():
            return await websockets.serve(handler, "127.0.0.1", 0, max_size=None)

        servers.append(asyncio.run_coroutine_threadsafe(begin(), loop).result(30))
        return f"ws://127.0.0.1:{servers[-1].sockets[0].getsockname()[1]}", gone

    async def end():
        for server in servers:
            server.close()
            await server.wait_closed()

    servers = []
    yield start
    asyncio.run_coroutine_threadsafe(end(), loop).result(30)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(30)
    loop.close()


def asked(url, data):
    async def ask():
        connection = await Connection.open(url, "The server", 30)
        try:
            return await connection.ask("step", data)
        finally:
            await connection.close()

    return asyncio.run(ask())


def test_a_request_and_its_answer(serve):
    async def answer(connection, request):
        message = json.loads(request)
        if message == {"type": "close"}:
            return await connection.close()
        return await connection.send(json.dumps({"type": "observation", "data": message}))

    url, gone = serve(answer)
    assert asked(url, {"guess": "é" * 3_000_000}) == {"type": "step", "data": {"guess": "é" * 3_000_000}}
    assert gone.wait(30)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ('{"type": "error", "data": {"message": "no", "code": "EXECUTION_ERROR"}}', r"refused 'step': no \(EXECUTION"),
        ('{"type": "error"}', "refused 'step': it gave no reason"),
        ("<html>", "answered 'step' with something else than JSON"),
        (None, "closed the connection amid 'step'"),
    ],
)
def test_a_server_that_does_not_answer_is_named(serve, reply, message):
    async def answer(connection, request):
        if reply is not None:
            await connection.send(reply)
        await connection.close()

    with pytest.raises(ServerError, match=f"^The server {message}"):
        asked(serve(answer)[0], {})


def test_a_request_that_is_given_up_ends_the_connection(serve):
    async def give_up(url):
        connection = await Connection.open(url, "The server", 30)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(connection.ask("step", {}), 0.1)

    url, gone = serve(lambda connection, request: asyncio.sleep(0))  # takes it, and says nothing
    asyncio.run(give_up(url))
    assert gone.wait(30)


def test_nobody_there():
    with pytest.raises(ConfigError, match=r"No OpenEnv server answered at http://127.0.0.1:9 within 0 s \(.*refused"):
        from_openenv("127.0.0.1:9", connect_seconds=0)
    with pytest.raises(ServerError, match="The server accepts no connection"):
        asked("ws://127.0.0.1:9", {})
    with pytest.raises(ConfigError, match="needs action= and observation="):
        from_openenv(lambda: None, action="message")


def test_verifiers_has_to_be_installed_where_it_is_to_run():
    way_out = rf"No module named 'verifiers'.*{sys.executable} -m pip install 'verifiers==0\.4\.\*'"
    with pytest.raises(ConfigError, match=way_out):
        from_verifiers("words")


# --- reasoning-gym --------------------------------------------------------------------------------------------------


def test_a_wrong_answer_may_be_mended() -> None:
    gym = from_reasoning_gym("chain_sum", size=5, attempts=2, min_terms=2, max_terms=2)
    row = gym.dataset()[3]
    assert row["prompt"] == [{"role": "user", "content": gym.tasks[3]["question"]}]
    environment = gym()
    assert environment.reset(row) is None
    assert environment.step("no idea") == Step(observation="That is not right. Try again.")
    assert environment.step(f"<think>x</think> {gym.tasks[3]['answer']} ") == Step(done=True, reward=1.0)


@pytest.mark.parametrize("name", ["pool_matrix", "list_functions"])
def test_the_task_that_is_scored_is_the_one_that_was_asked(name: str) -> None:
    """Both kinds come out differently when they are made again: one draws from NumPy's generator, one keeps a state."""
    before = np.random.get_state()[1].tolist()
    gym = from_reasoning_gym(name, size=20, seed=1, attempts=1)
    assert np.random.get_state()[1].tolist() == before
    rows = gym.dataset()
    assert [row["prompt"] for row in rows] == [
        row["prompt"] for row in from_reasoning_gym(name, size=20, seed=1).dataset()
    ]

    def asked_and_scored(row: dict) -> bool:
        environment = gym()
        environment.reset(row)
        same = environment._task["question"] == row["prompt"][0]["content"]
        return same and environment.step(environment._task["answer"]) == Step(done=True, reward=1.0)

    with ThreadPoolExecutor(16) as threads:
        assert all(threads.map(asked_and_scored, list(rows) * 5))


def test_attempts_end() -> None:
    gym = from_reasoning_gym("chain_sum", size=2, attempts=1)
    environment = gym()
    environment.reset(gym.dataset()[0])
    step = environment.step("no idea")
    assert step.done
    assert step.reward is not None
    assert step.reward < 0.1


@pytest.mark.parametrize(
    "completion", ["42", " 42\n", "<think>41</think>\n42", "so <answer>42</answer>.", "<answer>41</answer><answer> 42"]
)
def test_last_answer(completion: str) -> None:
    assert last_answer(completion) == "42"


def test_unknown_tasks_and_settings_are_refused() -> None:
    for settings in (
        {"name": "no_such_tasks"},
        {"name": "chain_sum", "digits": 3},
        {"name": "chain_sum", "min_terms": 0},
    ):
        with pytest.raises(ConfigError, match="reasoning-gym makes no tasks"):
            from_reasoning_gym(**settings)
    with pytest.raises(ConfigError, match="at least one attempt"):
        from_reasoning_gym("chain_sum", attempts=0)
