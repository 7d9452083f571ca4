"""Requests of OpenAI's chat completions: each parameter is honoured, overridden, without effect, or refused by name."""

import io
import socket
import time
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor

import anthropic
import httpx
import openai
import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from PIL import Image
from trlx_hybrid_multiturn.gateway import chat, messages, responses, server
from trlx_hybrid_multiturn.gateway.asked import Said, compared
from trlx_hybrid_multiturn.gateway.errors import RefusedError
from trlx_hybrid_multiturn.gateway.seat import Ended, Seat, Turn
from trlx_hybrid_multiturn.gateway.server import LARGEST, gateway
from trlx_hybrid_multiturn.gateway.tree import Tree

ASKED = {"model": "any", "messages": [{"role": "user", "content": "hello"}]}


def test_no_parameter_of_the_official_client_is_ignored():
    known = {*chat.HONOURED, *chat.OVERRIDDEN, *chat.WITHOUT_EFFECT}
    for name in CompletionCreateParamsBase.__annotations__:
        assert chat.read(ASKED | {name: None} | ASKED).messages
        if name not in known:
            with pytest.raises(RefusedError, match=name) as caught:
                chat.read(ASKED | {name: "something"})
            assert caught.value.parameter == name


@pytest.mark.parametrize("name", chat.NEUTRAL)
def test_values_that_change_nothing_are_served(name):
    for value in chat.NEUTRAL[name]:
        assert chat.read(ASKED | {name: value}).messages == [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "robot", "content": ""}]}, "its role is none of"),
        ({"messages": [{"role": ["user"], "content": ""}]}, "its role is none of"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "taken as base64 only"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "content of type 'input_audio'"),
        ({"messages": [{"role": "user", "content": ["hello"]}]}, "content of type None"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "lone surrogate"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "tool_calls cannot be read"),
        ({"tools": [{"type": "custom"}]}, "only functions"),
        ({"max_tokens": 0}, "1 or more"),
        ({"n": 0}, "1 or more"),
        ({"logprobs": 1}, "true or false"),
        ({"top_logprobs": 2}, "top_logprobs=2 is not served here, only 0"),
        ({"stop": [""]}, "a list of texts"),
        ({"stop": 3}, "a list of texts"),
    ],
)
def test_what_cannot_be_served_is_named(changed, reason):
    with pytest.raises(RefusedError, match=reason):
        chat.read(ASKED | changed)


def test_what_the_run_overrides_is_kept_for_the_log():
    given = {"temperature": 0.3, "seed": 1, "max_tokens": 9, "max_completion_tokens": 5, "tool_choice": "required"}
    asked = chat.read(ASKED | given)
    assert asked.overridden == {"temperature": 0.3, "seed": 1, "tool_choice": "required"}
    assert asked.max_tokens == 5
    assert not chat.read(ASKED | {"tool_choice": "auto"}).overridden
    asked = chat.read(ASKED | {"tools": [{"type": "function", "function": {"name": "add", "strict": True}}]})
    assert asked.overridden == {"strict": True}
    assert asked.tools == [{"type": "function", "function": {"name": "add"}}]


def test_messages_are_the_same_however_clients_write_them():
    call = {"type": "function", "function": {"name": "add", "arguments": {"b": 2, "a": 1}}}
    said = {"role": "assistant", "content": " yes\n", "tool_calls": [call]}
    sent = {"role": "assistant", "content": [{"type": "text", "text": "yes"}], "reasoning_content": "hm"}
    sent["tool_calls"] = [{"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a":1,"b": 2}'}}]
    (read,) = chat.read(ASKED | {"messages": [sent]}).messages
    assert compared(read) == compared(said)


# --- the server -------------------------------------------------------------------------------------------------------


@pytest.fixture
def seat():
    here = gateway()
    seat = Seat(here.loop, lambda asked: len(asked.messages), Tree(ASKED["messages"]))
    secret, url = here.open(seat)
    yield seat, url
    here.close(secret)


def answering(seat, *texts):
    """Answer requests with these texts, in the thread in which they arrive; returns the events."""
    events, texts = [], list(texts)

    def take(event):
        events.append(event)
        if isinstance(event, Turn):
            message = {"role": "assistant", "content": texts.pop(0)}
            seat.take(take)
            seat.answer(event, Said(message=message, length=False, prompt_ids=[1], token_ids=[2]))

    seat.take(take)
    return events


def ask(url, messages, **more):
    return httpx.post(f"{url}/chat/completions", json=ASKED | {"messages": messages} | more, timeout=30)


def test_a_conversation_is_continued_and_a_request_that_comes_again_gets_the_same_answer(seat):
    seat, url = seat
    events = answering(seat, "one", "two")
    first = ASKED["messages"]
    answers = [ask(url, first).json()["choices"][0]["message"]["content"] for _ in range(2)]
    later = [*first, {"role": "assistant", "content": "one "}, {"role": "user", "content": "more"}]
    answers += [ask(url, later).json()["choices"][0]["message"]["content"] for _ in range(2)]
    assert answers == ["one", "one", "two", "two"]
    assert [event.place.new for event in events] == [first, [{"role": "user", "content": "more"}]]


def test_a_history_that_was_rewritten_begins_a_branch_and_the_first_can_be_continued(seat):
    seat, url = seat
    events = answering(seat, "one", "two", "three", "four")
    first, other = ASKED["messages"], [{"role": "user", "content": "another"}]
    assert ask(url, first).status_code == ask(url, other).status_code == 200
    told = [{"role": "assistant", "content": "one"}, {"role": "user", "content": "more"}]
    assert ask(url, [*first, *told]).json()["choices"][0]["message"]["content"] == "three"
    assert ask(url, other, tools=[{"type": "function", "function": {"name": "add"}}]).status_code == 200
    assert [(event.place.branch, len(event.place.new)) for event in events] == [(0, 1), (1, 1), (0, 1), (2, 1)]


def test_where_episodes_have_one_branch_another_is_refused_and_the_episode_knows():
    here = gateway()
    seat = Seat(here.loop, lambda asked: len(asked.messages), Tree(branching=False))
    secret, url = here.open(seat)
    events = answering(seat, "one")
    assert ask(url, ASKED["messages"]).status_code == 200
    refused = ask(url, [{"role": "user", "content": "another"}])
    here.close(secret)
    assert refused.status_code == 400
    assert "one conversation for an episode" in refused.json()["error"]["message"]
    seat.ended(1.0)
    assert isinstance(events[-1], Ended)
    assert events[-1].reward is None
    assert "one conversation" in events[-1].failure


def test_requests_after_the_end_are_refused(seat):
    seat, url = seat
    seat.end(RefusedError("The episode is over.", status=410))
    answer = ask(url, ASKED["messages"])
    assert (answer.status_code, answer.json()["error"]["message"]) == (410, "The episode is over.")


def test_nobody_else_can_ask_and_nothing_can_be_too_large(seat):
    _, url = seat
    wrong = url.replace(url.split("/")[3], "guessed")
    assert ask(wrong, ASKED["messages"]).status_code == 404
    assert httpx.get(f"{wrong}/models").status_code == 404
    assert httpx.get(f"{url}/models").json()["data"][0]["id"] == "policy"
    assert httpx.post(f"{url}/chat/completions", content=b"{").status_code == 400
    assert (
        httpx.post(f"{url}/chat/completions", content=b"[]").json()["error"]["message"] == "The body is no JSON object."
    )
    try:
        large = httpx.post(f"{url}/chat/completions", content=b" " * (LARGEST + 1), timeout=60)
    except httpx.WriteError:
        return  # the server may close the connection before all is sent
    assert large.status_code == 413


def test_small_answers_are_sent_at_once(seat):
    """Else the system keeps the second part of each until the client has confirmed the first, for 40 ms."""
    _, url = seat
    with httpx.Client() as client:
        assert client.get(f"{url}/models").status_code == 200
        open_ones = [*gateway()._server.server_state.connections]
        sockets = [connection.transport.get_extra_info("socket") for connection in open_ones]
        assert sockets
        assert all(each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for each in sockets)


def test_a_client_that_goes_away_leaves_its_answer_for_the_next_time(seat):
    seat, url = seat
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/chat/completions", json=ASKED, timeout=0.5)
    answering(seat, "late")
    assert ask(url, ASKED["messages"]).json()["choices"][0]["message"]["content"] == "late"


def streams(url):
    """What each official client reads of a streamed answer, in a thread that gives up after a second of silence."""
    client = openai.OpenAI(base_url=url, api_key="none", timeout=1.0, max_retries=0)
    other = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="none", timeout=1.0, max_retries=0)
    said = ASKED["messages"]

    def by_chat():
        chunks = client.chat.completions.create(model="any", messages=said, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    def by_responses():
        with client.responses.stream(model="any", input=said) as stream:
            return stream.get_final_response().output_text

    def by_messages():
        with other.messages.stream(model="any", max_tokens=9, messages=said) as stream:
            return stream.get_final_text()

    return {"chat": by_chat, "responses": by_responses, "messages": by_messages}


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_a_client_that_streams_waits_as_long_as_the_engine_sleeps(seat, monkeypatch, api):
    """A silent connection would be given up after a second."""
    monkeypatch.setattr(server, "QUIET_SECONDS", 0.3)
    seat, url = seat
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(streams(url)[api])
        time.sleep(2.5)
        assert not waiting.done()
        answering(seat, "at last")
        assert waiting.result(20) == "at last"
    assert seat.heard


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_an_error_after_a_stream_has_begun_is_raised_by_the_client(seat, monkeypatch, api):
    monkeypatch.setattr(server, "QUIET_SECONDS", 0.3)
    seat, url = seat
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(streams(url)[api])
        time.sleep(1.5)
        seat.end(RefusedError("The episode is over.", status=410))
        with pytest.raises((openai.APIError, anthropic.APIError), match="The episode is over"):
            waiting.result(20)


# --- images -----------------------------------------------------------------------------------------------------------


def picture(file_format="png", size=(3, 2)):
    """A file in base64."""
    Image.new("RGB", size, (1, 2, 3)).save(file := io.BytesIO(), file_format)
    return b64encode(file.getvalue()).decode()


def shown(read, body):
    """The content of the last message that a request has, with pixels for images."""
    (*_, message) = read(body).messages
    blocks = message["content"]
    return [block["text"] if block["type"] == "text" else block["image"].getpixel((0, 0)) for block in blocks]


def test_images_of_all_apis_are_read():
    url, text = f"data:image/png;base64,{picture()}", {"type": "text", "text": "see"}
    asked = {"messages": [{"role": "user", "content": [text, {"type": "image_url", "image_url": {"url": url}}]}]}
    assert shown(chat.read, asked) == ["see", (1, 2, 3)]
    items = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "see"}]
    assert shown(responses.read, {"input": [{"role": "user", "content": items}]}) == [(1, 2, 3), "see"]
    source = {"type": "base64", "media_type": "image/png", "data": picture()}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image", "source": source}, text]}
    assert shown(messages.read, {"messages": [{"role": "user", "content": [result]}]}) == [(1, 2, 3), "see"]


@pytest.mark.parametrize(
    ("role", "image", "reason"),
    [
        ("user", {"url": "https://example.org/a.png"}, "none is fetched"),
        ("user", {"url": "data:image/png;base64,AAAA"}, "an image cannot be read"),
        ("user", {"url": 3}, "taken as base64 only"),
        ("user", "data", "taken as base64 only"),
        ("assistant", {"url": f"data:image/png;base64,{picture()}"}, "content of type 'image_url' is not served"),
        ("user", {"url": f"data:image/png;base64,{picture(size=(9000, 9000))}"}, "more than"),
    ],
)
def test_images_that_cannot_be_taken_are_refused(role, image, reason):
    content = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": image}]
    with pytest.raises(RefusedError, match=reason):
        chat.read(ASKED | {"messages": [{"role": role, "content": content}]})


def test_an_image_is_the_same_however_its_file_is_written():
    def read(file_format):
        url = f"data:image/{file_format};base64,{picture(file_format)}"
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": " see"}]
        return chat.read(ASKED | {"messages": [{"role": "user", "content": content}]}).compared

    assert read("png") == read("bmp")
