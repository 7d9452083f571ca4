"""kill -9 of environments' and rewards' workers at random moments of a rollout: nothing else is disturbed by it.

`FAULT_SEEDS=50` runs as many seeds, each phase at least five times.
"""

import functools
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from trlx_hybrid_ray.remote import remote_reward

sys.path.insert(0, str(Path(__file__).parent))
import test_remote_episodes
from test_remote_episodes import ROWS, TOOLS, Counter, Rig, first_tool

SEEDS = int(os.environ.get("FAULT_SEEDS", "3"))
PHASES = ("reset", "add", "later", "get_reward", "score")
WINDOW = 0.3  # seconds that a call takes in which somebody is going to be killed
ENDS_IN = 30.0


@pytest.fixture(scope="module", autouse=True)
def nodes(session_cluster):
    """Actors do not find test modules, so they get classes by value."""
    from ray import cloudpickle

    modules = [sys.modules[__name__], test_remote_episodes]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    yield session_cluster
    for module in modules:
        cloudpickle.unregister_pickle_by_value(module)


def announce(plan, row, phase):
    """Leave word of this process, and linger, where somebody waits for it."""
    mark = plan.with_name(f"{phase}.{row}")
    if json.loads(plan.read_text()).get(str(row)) == phase and not mark.exists():
        mark.with_suffix(".part").write_text(str(os.getpid()))
        mark.with_suffix(".part").rename(mark)
        time.sleep(WINDOW)
        mark.with_suffix(".over").touch()


class Victim(Counter):
    def reset(self, start, **row):
        announce(Path(self._plan), start, "reset")
        super().reset(start, **row)

    def _meet_fate(self, where):
        announce(Path(self._plan), self.start, where)


def score(completion_ids, start, plan, **columns):
    for row in start:
        announce(Path(plan), row, "score")
    return [len(ids) + row / 10 for ids, row in zip(completion_ids, start)]


@pytest.fixture(scope="module")
def rig(nodes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    plan = folder / "plan.json"
    plan.write_text("{}")
    drop = ["trainer_state", "environments", "log_extra", "log_metric"]
    with remote_reward(functools.partial(score, plan=str(plan)), workers=2, drop=drop, cpus=0.1) as reward:
        rig = Rig(folder, environment=Victim, reward_funcs=[reward])
        yield rig
        rig.trainer.session.close()
        rig.environments.close()


@pytest.fixture(scope="module")
def undisturbed(rig):
    return rig.roll({})


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS))
def test_what_a_killed_worker_takes_with_it(rig, undisturbed, seed, record_property):
    draw, (rows, rewards) = random.Random(seed), undisturbed
    phase = PHASES[seed % len(PHASES)]
    called = [first_tool(messages) for _, _, messages in rows]
    victim = draw.choice([i for i in range(ROWS) if phase not in TOOLS or called[i] == phase])
    mark, pause, killed = rig.plan.with_name(f"{phase}.{victim}"), draw.random() * 1.2 * WINDOW, []

    def strike():
        until = time.monotonic() + 60
        while not mark.exists() and time.monotonic() < until:
            time.sleep(0.005)
        time.sleep(pause)
        os.kill(int(mark.read_text()), signal.SIGKILL)
        killed.append(time.monotonic())

    killer = threading.Thread(target=strike, daemon=True)
    killer.start()
    after, scored = rig.roll({str(victim): phase})
    ended = time.monotonic()
    killer.join()
    mark.unlink()
    late = (over := mark.with_suffix(".over")).exists()
    over.unlink(missing_ok=True)
    failure = rig.trainer._run.batch.conversations[victim].failure
    outcome = "masked" if failure else "unscored" if scored[victim] != rewards[victim] else "untouched"
    record_property("phase", phase)
    record_property("outcome", outcome)
    record_property("seconds", ended - killed[0])
    assert ended - killed[0] < ENDS_IN
    others = [i for i in range(ROWS) if i != victim]
    assert [after[i] for i in others] == [rows[i] for i in others]
    assert [scored[i] for i in others] == [rewards[i] for i in others]
    if outcome == "masked":
        _, mask, _ = after[victim]
        assert set(mask) == {0}
        assert "EnvironmentLostError" in failure
        assert scored[victim] == (None, None)  # a row that broke off counts for nothing, whatever could be scored of it
    else:
        assert after[victim] == rows[victim]
        assert scored[victim] in (rewards[victim], (rewards[victim][0], None))
    # What had not begun begins again elsewhere. A kill that came after the call may have met the next one.
    assert phase in (*TOOLS, "get_reward") or late or outcome == "untouched"
    again, scored_again = rig.roll({})
    assert [i for i in range(ROWS) if again[i] != rows[i]] == []
    assert scored_again == rewards
