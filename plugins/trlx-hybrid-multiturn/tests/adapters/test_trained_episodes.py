"""A trainer with vLLM plays the episodes of servers whose packages clash with its own: each runs among its own."""

import contextlib
import json
import subprocess
from pathlib import Path

import pytest
import trlx_hybrid
from datasets import Dataset
from trlx_hybrid.testing.chat import chat_tokenizer, chatty_model
from trlx_hybrid.testing.processes import free_port
from trlx_hybrid_multiturn import episode_reward, episodes
from trlx_hybrid_multiturn.adapters.openenv import from_openenv
from trlx_hybrid_multiturn.adapters.verifiers import from_verifiers
from trlx_hybrid_multiturn.gateway import agents

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
pytestmark = pytest.mark.slow


def interpreter(name):
    python = ROOT / f".venv-{name}" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"make test-adapters makes .venv-{name}")
    return str(python)


@pytest.fixture
def train(run):
    """A step on these episodes, with a model that says one of `turns`: the columns that reward functions received."""

    def start(rollout, rows, turns, same=False):
        tokenizer, seen = chat_tokenizer(turns), {}

        def remember(completions, **columns):
            seen.update(columns)
            return [None] * len(completions)

        done = run(
            trlx_hybrid.GRPOTrainer,
            model=chatty_model(tokenizer, turns),
            processing_class=tokenizer,
            train_dataset=Dataset.from_list(rows),
            reward_funcs=[episode_reward, remember],
            rollout_func=rollout,
            hybrid={"engine": "vllm", "rollout": "multi_turn"},
            max_completion_length=400,
            vllm_max_model_length=800,
            max_steps=1,
            num_generations=2,  # so that four tasks are in the batch, which allow for different numbers of turns
            temperature=0.1,  # a game that is told no number ends with an error
        )
        assert done.trainer.state.log_history[0]["hybrid/trajectories/failed"] == 0
        said = [[m["content"] for m in messages if m["role"] == "assistant"] for messages in seen["episode_messages"]]
        assert same or len({len(each) for each in said}) > 1
        return seen, said

    return start


@pytest.mark.parametrize("how", ["environment", "agent"])
def test_verifiers(train, how):
    with contextlib.chdir(HERE):
        words = from_verifiers("number_words", python=interpreter("verifiers"))
    rollout = episodes(words) if how == "environment" else agents(words.agent)
    seen, said = train(rollout, words.rows(), ["zero", "one", "two", "three", "four", "five", "No idea."])
    for task, reward, texts in zip(map(json.loads, seen["task"]), seen["episode_reward"], said, strict=True):
        assert len(texts) == task["attempts"] or texts[-1] == task["word"]
        assert reward == 2.0 * (texts[-1] == task["word"]) - 0.5 * (len(texts) - 1)
    words.close()


@pytest.mark.parametrize("taskset", ["two_speakers", "same_question"])
def test_two_agents_of_verifiers_are_branches(train, taskset):
    """Each speaks in a conversation of its own, with the trained model; also where both are asked the same."""
    with contextlib.chdir(HERE):
        riddles = from_verifiers(taskset, python=interpreter("verifiers"))
    seen, said = train(agents(riddles.agent), riddles.rows(4), ["What is it?", "A stone."], same=True)
    assert {len(texts) for texts in said} == {2}
    assert all(reward is None for reward in seen["episode_reward"])
    riddles.close()


def test_openenv(train):
    port = str(free_port())
    server = subprocess.Popen([interpreter("openenv"), str(HERE / "openenv_game.py"), port, "8"])
    try:
        game = from_openenv(f"http://127.0.0.1:{port}", columns=["seed"], connect_seconds=60)
        rows = [{"prompt": [{"role": "user", "content": ""}], "seed": seed} for seed in range(8)]
        seen, said = train(episodes(game), rows, [str(number) for number in range(10)])
    finally:
        server.terminate()
        server.wait(30)
    for seed, reward, texts in zip(seen["seed"], seen["episode_reward"], said, strict=True):
        right = texts[-1] == str(seed * 7 % 10)
        assert right or len(texts) == 4
        assert reward == right - 0.25 * (len(texts) - right)
