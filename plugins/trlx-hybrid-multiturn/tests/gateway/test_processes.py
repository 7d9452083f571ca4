"""Agents in processes: they are trained as in the trainer's process, and what goes wrong in a process is named."""

import functools
import gc
import importlib
import itertools
import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from PIL import Image
from trlx_hybrid.errors import ConfigError
from trlx_hybrid.interprocess import plain_data
from trlx_hybrid_multiturn.gateway import agents, command
from trlx_hybrid_multiturn.gateway.agent_worker import fields_of
from trlx_hybrid_multiturn.gateway.asked import Asked
from trlx_hybrid_multiturn.gateway.host import Begun
from trlx_hybrid_multiturn.gateway.processes import ProcessHost

ROOT = Path(__file__).parents[4]


@pytest.fixture
def played(monkeypatch):
    """Agents in a module that a process can import by its name, as one beside a script."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "support"))
    return importlib.import_module("agents")


@pytest.mark.parametrize("name", ["adds", "rewrites", "counts"])
def test_tokens_masks_log_probs_and_rewards_are_those_of_the_trainers_process(train, played, name):
    agent = getattr(played, name)
    given = {"max_completion_length": 800, "options": {"max_trajectories": 1}}
    done, mine = train(agents(agent), **given)
    other, theirs = train(agents(agent, processes=2), **given)
    for one, same in zip(itertools.chain(*mine), itertools.chain(*theirs), strict=True):
        assert (one.prompt_ids, one.completion_ids) == (same.prompt_ids, same.completion_ids)
        assert (one.loss_mask, one.logprobs, one.reward) == (same.loss_mask, same.logprobs, same.reward)
    for log, again in zip(done.trainer.state.log_history, other.trainer.state.log_history, strict=True):
        for name in ("loss", "grad_norm", "hybrid/agents/branches", "hybrid/turns/max", "hybrid/trajectories/failed"):
            assert log.get(name) == again.get(name)


def test_episodes_are_spread_over_the_processes_which_serve_all_batches(train, played):
    _, batches = train(agents(played.is_numbered, processes=3))
    rewards = [trajectory.reward for batch in batches for trajectory in batch]
    assert len(rewards) == 16
    processes = set(rewards)
    assert len(processes) == 3
    assert os.getpid() not in processes
    assert sorted(map(rewards[:8].count, processes)) == [2, 3, 3]


PROGRAM = """
import json, sys
from openai import OpenAI
with OpenAI() as client:
    print(client.chat.completions.create(model="policy", messages=json.load(sys.stdin)["prompt"]).id)
"""


def test_programs_and_functions_run_there(train, played):
    program = command([sys.executable, "-c", PROGRAM], reward=lambda row, output: float(len(output)))
    for agent in (program, played.asks):
        _, batches = train(agents(agent, processes=1), max_steps=1)
        assert all(trajectory.reward >= 1 for trajectory in batches[0])


def test_a_crashed_process_loses_its_episodes_only_and_the_next_batch_gets_another(train, played, caplog, tmp_path):
    agent = functools.partial(played.dies_once, folder=str(tmp_path))
    done, batches = train(agents(agent, processes=4), options={"max_failed": 0.5})
    failed = [log["hybrid/trajectories/failed"] for log in done.trainer.state.log_history if "loss" in log]
    assert failed[0] in (1, 2)  # of eight episodes on four processes
    assert failed[1] == 0
    assert len({trajectory.reward for trajectory in batches[1]}) == 4
    assert "the agents' process crashed its process: SIGKILL" in caplog.text


def test_an_agent_that_never_ends_is_ended_and_what_it_heard_is_kept(train, played, tmp_path):
    agent = functools.partial(played.never_ends, folder=str(tmp_path))
    done, batches = train(agents(agent, processes=2), max_steps=1, options={"max_seconds": 8.0})
    assert done.trainer.state.log_history[0]["hybrid/trajectories/failed"] == 0
    assert all(any(trajectory.loss_mask) for trajectory in batches[0])
    late = threading.Event()
    while len([*tmp_path.iterdir()]) < 8:  # the test's own limit of time ends this
        late.wait(0.05)


def test_an_agent_that_cannot_be_sent_is_refused_at_once(played):
    lock = threading.Lock()

    async def agent(base_url, row):
        lock.acquire()

    with pytest.raises(ConfigError, match=r"agents\(processes=2\): the agent cannot be sent to a process .*lock"):
        agents(agent, processes=2)
    with pytest.raises(ConfigError, match=r"processes=-1"):
        agents(played.adds, processes=-1)


class Unloadable:
    """An agent that raises where it is loaded."""

    def __reduce__(self):
        return int, ("seven",)

    def __call__(self, base_url, row):
        raise AssertionError


def test_an_agent_that_cannot_be_loaded_there_is_named(train):
    with pytest.raises(ConfigError, match=r"processes=1\): the agent cannot be loaded .* ValueError.*'seven'"):
        train(agents(Unloadable(), processes=1))


def test_requests_keep_their_images_and_lose_what_was_said():
    image = Image.new("RGB", (3, 2), "red")
    shown = [{"type": "image", "image": image}, {"type": "text", "text": "What?"}]
    asked = Asked(messages=[{"role": "user", "content": shown}], tools=[{"type": "function"}], overridden={"seed": 1})
    for whole in (True, False):
        fields = plain_data.loads(plain_data.dumps(fields_of(asked, whole=whole), classes=False), classes=False)
        again = Asked(**fields)
        assert again.messages[0]["content"][0]["image"].tobytes() == image.tobytes()
        assert (again.form, again.overridden) == (asked.form, asked.overridden)
    plain = Asked(messages=[{"role": "user", "content": "What?"}])
    assert fields_of(plain, whole=False)["messages"] == []
    assert fields_of(plain, whole=True)["messages"] == plain.messages


SCRIPT = """
from datasets import Dataset
from trl import GRPOConfig
from trlx_hybrid import GRPOTrainer, HybridConfig
from trlx_hybrid.testing.chat import chat_tokenizer, chatty_model
from trlx_hybrid_multiturn.gateway import agents, episode_reward
from tests.support.agents import QUESTIONS, TURNS


async def solve(base_url, row):  # of a script without a guard, which a process never imports
    from tests.support.agents import CLIENT

    client = CLIENT.with_options(base_url=base_url)
    done = await client.chat.completions.create(model="any", messages=row["prompt"])
    return float(len(done.choices[0].message.content))


tokenizer = chat_tokenizer(TURNS)
args = GRPOConfig(
    "run", max_steps=2, per_device_train_batch_size=4, num_generations=4, max_completion_length=50, use_cpu=True,
    bf16=False, report_to=[], save_strategy="no", logging_steps=1,
)
trainer = GRPOTrainer(
    model=chatty_model(tokenizer, TURNS), processing_class=tokenizer, args=args, reward_funcs=episode_reward,
    train_dataset=Dataset.from_dict({"prompt": QUESTIONS}), rollout_func=agents(solve, processes=2),
    hybrid=HybridConfig(engine="vllm", engine_options={"max_model_len": 512}),
)
trainer.train()
import psutil
print("processes", [p.pid for p in psutil.Process().children(recursive=True) if "agent_process" in str(p.cmdline())])
"""


@pytest.mark.slow
def test_a_script_without_a_guard_ends_with_its_processes(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("processes"))
    numbers = [int(number) for number in line.removeprefix("processes [").removesuffix("]").split(",")]
    assert len(numbers) == 4  # each with its supervisor
    assert not any(psutil.pid_exists(number) for number in numbers)


def test_processes_end_with_their_host(played):
    host = ProcessHost(played.asks, 1)
    host.prepare(3)
    seat = host.begin(Begun({"prompt": []}, [], True, len))
    process = seat.process
    assert process.how_it_ended() is None
    host.end(seat)
    del host, seat
    gc.collect()
    assert process.how_it_ended() is not None
