"""Episodes of a real verifiers environment, in a process of its own."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest
from trlx_hybrid.errors import ConfigError
from trlx_hybrid_multiturn.adapters.verifiers import from_verifiers

HERE = Path(__file__).parent
PATIENCE = 60


@pytest.fixture(scope="module")
def start():
    """Starts processes among the tasksets of this folder; at the end they have ended."""
    started = []

    def begin(taskset, **given):
        with contextlib.chdir(HERE):
            started.append(from_verifiers(taskset, **given))
        return started[-1]

    yield begin
    for each in started:
        each.close()
        assert each._process._process.returncode is not None


@pytest.fixture(scope="module")
def words(start):
    return start("number_words")


def task(row, **changes):
    return row | {"task": json.dumps(json.loads(row["task"]) | changes)}


def late(row, shown):
    """Knows a word at the second attempt for every other task, else at the third."""
    data = json.loads(row["task"])
    return f" {data['word']}\n" if len(shown) > 1 + data["idx"] % 2 else "No idea."


def test_tasks_are_rows(words):
    rows = words.rows()
    assert [row["prompt"][-1] for row in rows] == [
        {"role": "user", "content": f"What is {number} in words?"} for number in range(8)
    ]
    assert [row["prompt"][0] for row in rows[1::2]] == [{"role": "system", "content": "Answer with one word."}] * 4
    assert [json.loads(row["task"])["idx"] for row in rows] == list(range(8))
    assert words.rows(3) == rows[:3]


def test_episodes_and_their_rewards(play, words):
    rows = words.rows()
    for _ in range(2):
        for row, found in zip(rows, play(words, rows, late), strict=True):
            data = json.loads(row["task"])
            turns = min(data["attempts"], 2 + data["idx"] % 2)
            right = turns == 2 + data["idx"] % 2
            hint = [{"role": "user", "content": f"It has {len(data['word'])} letters."}]
            assert (found.lost, found.done) == (None, True)
            assert found.shown == [None] + [hint] * (turns - 1)
            assert found.rewards == [None] * (turns - 1) + [2.0 * right - 0.5 * (turns - 1)]


def test_settings_reach_the_environment(play, start):
    words = start("number_words", env={"agent": {"max_turns": 2}})
    (found,) = play(words, [task(words.rows()[2], attempts=9)], lambda row, shown: "No idea.")
    assert (found.rewards, found.done, found.lost) == ([None, -0.5], True, None)


@pytest.mark.parametrize(
    ("fails", "cause"),
    [
        ("scoring", "the episode failed: TaskError: task WordTask scoring: ValueError: no score"),
        ("hint", "the episode failed: ValueError: the game broke"),
    ],
)
def test_a_task_that_fails_ends_its_trajectory_with_its_error(play, words, fails, cause):
    rows = [task(words.rows()[2], fails=fails), words.rows()[2]]
    lost, other = play(words, rows, lambda row, shown: "No idea.")
    told = "environment 'Verifiers.step' raised ServerError: The verifiers process refused 'step': "
    assert lost.lost.startswith(told + cause)
    assert other.done


def test_a_step_past_its_deadline_ends_its_trajectory_only(play, words):
    rows = [task(words.rows()[2], fails="hangs"), words.rows()[2]]
    lost, other = play(words, rows, lambda row, shown: "No idea.", tool_timeout=5.0)
    assert lost.lost == "environment 'Verifiers.step' did not return within 5 s; it was cancelled."
    assert other.done


def test_an_episode_that_the_trainer_leaves_is_given_up(play, words):
    row = task(words.rows()[2], attempts=100)
    (left,) = play(words, [row], lambda row, shown: "No idea.", turns=3)
    assert (left.done, left.lost, left.rewards) == (False, None, [None] * 3)
    assert all(found.done for found in play(words, words.rows(), late))


def test_rows_of_something_else_are_refused(play, words):
    (lost,) = play(words, [words.rows()[0] | {"prompt": [{"role": "user", "content": "Hello"}]}], late)
    assert "The environment asks the model something else than the row's prompt" in lost.lost


def test_two_agents_with_the_trained_model_are_refused(play, start):
    two = start("two_speakers")
    with pytest.raises(ConfigError, match="has no end; say how many tasks to take"):
        two.rows()
    (lost,) = play(two, two.rows(1), lambda row, shown: "What is it?")
    assert "the agents 'asks' and 'solves' both speak with the trained model" in lost.lost
    assert "from_verifiers(env={'solves': {'model': …, 'client': {'base_url': …}}})" in lost.lost


def test_what_cannot_start_is_refused_with_the_way_out(start, tmp_path):
    venv.create(tmp_path / "bare", symlinks=True)
    python = str(tmp_path / "bare" / "bin" / "python")
    with pytest.raises(ConfigError, match=rf"Install it: {python} -m pip install 'verifiers==0\.4\.\*'"):
        start("number_words", python=python)
    with pytest.raises(ConfigError, match=r"python='/nowhere/python'\) cannot be started"):
        start("number_words", python="/nowhere/python")
    with pytest.raises(ConfigError, match=r"cannot play taskset 'no_words': ModuleNotFoundError: .*not found"):
        start("no_words")
    with pytest.raises(ConfigError, match=r"did not start within 0.01 s; .* start_seconds waits longer"):
        start("number_words", start_seconds=0.01)


def test_the_process_ends_with_a_killed_trainer():
    script = (
        "import time; from trlx_hybrid_multiturn.adapters.verifiers import from_verifiers\n"
        "words = from_verifiers('number_words'); print(words._process._process.pid, flush=True); time.sleep(1000)"
    )
    # The process finds its tasksets in the folder that the trainer was started in, packages where the trainer does.
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path if path)
    environment = os.environ | {"PYTHONPATH": paths}
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=HERE, env=environment, stdout=subprocess.PIPE, text=True
    ) as trainer:
        pid = int(trainer.stdout.readline())
        os.kill(pid, 0)
        trainer.send_signal(signal.SIGKILL)
    end = time.monotonic() + PATIENCE
    while Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
        assert time.monotonic() < end
        time.sleep(0.05)
