"""The replay, as a pure function, and tiny runs of the benchmark that rests on it."""

import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trlx_hybrid.testing.processes import Script

from benchmarks import replay
from benchmarks.goals import load
from benchmarks.multiturn import CASES, summary
from benchmarks.replay import StepCost, StepTime, Trace, asynchronous, critical_path, lock_step

ROOT = Path(__file__).parent.parent
seconds = st.floats(0.0, 10.0)
costs = st.builds(StepCost, base=seconds, per_request=seconds, per_prompt_token=st.floats(0.0, 0.1))


@st.composite
def traces(draw):
    turns = draw(st.integers(1, 4))
    rows = range(draw(st.integers(1, 6)))
    several = {"min_size": turns, "max_size": turns}
    return Trace(
        tokens=[draw(st.lists(st.integers(1, 6), **several)) for _ in rows],
        latencies=[draw(st.lists(seconds, **several))[1:] for _ in rows],
        prompts=[draw(st.lists(st.integers(0, 40), **several)) for _ in rows] if draw(st.booleans()) else (),
    )


# --- the replay -----------------------------------------------------------------------------------------------------


@given(traces(), costs)
def test_nothing_is_faster_than_the_longest_trajectory_or_the_engines_work(trace, cost):
    work = cost.per_request * sum(map(sum, trace.tokens)) + cost.per_prompt_token * sum(map(sum, trace.prompts))
    bound = max(critical_path(trace, cost), work) - 1e-6
    assert bound <= asynchronous(trace, cost)
    assert bound <= lock_step(trace, cost) <= lock_step(trace, cost, concurrent=False) + 1e-6


@given(traces(), costs)
def test_lock_step_gains_at_most_the_waits_at_steps_edges(trace, cost):
    """Who becomes ready during a step waits for its end; in lock-step all stand ready together."""
    turns, fresh = len(trace.tokens[0]), sum(map(sum, trace.prompts))
    longest_step = cost(len(trace.tokens), fresh)
    assert asynchronous(trace, cost) <= lock_step(trace, cost) + (turns - 1) * longest_step + 1e-6


@given(traces(), st.floats(0.0, 1.0))
def test_without_latencies_and_with_equal_turns_nobody_waits(trace, base):
    equal = Trace(tokens=[trace.tokens[0]] * 3, latencies=[[0.0] * len(trace.latencies[0])] * 3)
    cost = StepCost(base=base, per_request=0.5)
    expected = sum(trace.tokens[0]) * (base + 3 * 0.5)
    assert asynchronous(equal, cost) == pytest.approx(expected)
    assert lock_step(equal, cost) == lock_step(equal, cost, concurrent=False) == pytest.approx(expected)


def test_one_trajectory_takes_its_critical_path():
    trace = Trace(tokens=[[3, 2]], latencies=[[5.0]], prompts=[[10, 4]])
    cost = StepCost(base=1.0, per_request=0.5, per_prompt_token=0.1)
    assert asynchronous(trace, cost) == lock_step(trace, cost) == critical_path(trace, cost)
    assert critical_path(trace, cost) == pytest.approx(5 * 1.5 + 14 * 0.1 + 5.0)


def test_a_slow_tool_holds_only_its_own_trajectory():
    """Two trajectories whose tools are slow in different turns."""
    trace = Trace(tokens=[[2, 2, 2], [2, 2, 2]], latencies=[[10.0, 0.0], [0.0, 10.0]])
    cost = StepCost(base=1.0, per_request=0.0)
    assert lock_step(trace, cost) == 6 + 20
    assert lock_step(trace, cost, concurrent=False) == 6 + 20
    assert asynchronous(trace, cost) == 6 + 10


def test_tools_one_after_another_take_their_sum():
    trace = Trace(tokens=[[1, 1], [1, 1]], latencies=[[3.0], [4.0]])
    cost = StepCost(base=1.0, per_request=0.25)
    assert lock_step(trace, cost, concurrent=False) - lock_step(trace, cost) == 3.0


def test_who_becomes_ready_during_a_step_joins_the_next():
    trace = Trace(tokens=[[1, 1], [4]], latencies=[[0.5], []])
    assert asynchronous(trace, StepCost(base=1.0, per_request=0.0)) == 4.0  # ready at 1.5, samples from 2 to 3
    assert asynchronous(trace, StepCost(base=0.0, per_request=1.0)) == 6.0  # ready at 2.5, samples from 3 to 5


def test_drawn_traces_are_the_same_every_time_and_as_asked():
    trace = replay.draw(200, 5, tokens=16, latency=0.1)
    assert trace == replay.draw(200, 5, tokens=16, latency=0.1) != replay.draw(200, 5, tokens=16, latency=0.1, seed=1)
    latencies = sorted(value for row in trace.latencies for value in row)
    assert len(latencies) == 200 * 4
    assert latencies[400] == pytest.approx(0.1, rel=0.2)
    logs = [math.log(value / 0.1) for value in latencies]
    assert sum(value**2 for value in logs) / len(logs) == pytest.approx(1.0, rel=0.2)
    assert {count for row in trace.tokens for count in row} == set(range(8, 25))


@given(costs)
def test_a_fit_finds_the_cost_that_steps_were_made_of(cost):
    steps = [StepTime(n, p, cost(n, p)) for n in (1, 4, 16, 64) for p in (0, 0, 32 * n)]
    found = replay.fit(steps, prompts=True)
    assert [found(s.requests, s.prompt_tokens) for s in steps] == pytest.approx([s.seconds for s in steps], abs=1e-6)
    assert replay.fit(steps, prompts=False).per_prompt_token == 0.0


# --- the benchmark --------------------------------------------------------------------------------------------------


def test_the_worst_case_is_what_goals_speak_of():
    metrics = {}
    for case, share, predicted in (("64x5", 0.95, 1.5), ("256x10", 0.85, 2.2)):
        for suffix in ("", "_with_prompts"):
            metrics |= {f"share_of_optimum{suffix}_{case}": share, f"predicted_ratio{suffix}_{case}": predicted}
        metrics |= {f"ratio_{case}": 2.0, f"prefix_share_{case}": share}
    found = summary(metrics)
    assert (found["share_of_optimum"], found["prefix_share"]) == (0.85, 0.85)
    assert found["ratio_deviation"] == pytest.approx(0.25)
    wanted = {goal.metric for goal in load() if goal.benchmark == "multiturn" and goal.device.startswith("cpu")}
    assert wanted <= set(found)


def test_all_cases_of_the_issue_are_run():
    assert set(CASES) == {(n, turns) for n in (64, 256) for turns in (3, 5, 10)}


TINY_RUN = """
import sys
from pathlib import Path
from benchmarks.multiturn import run_rollouts
if __name__ == "__main__":
    result = run_rollouts([(8, 3)], tokens=8, latency=0.02, repetitions=1, stock=True)
    result.publish(Path(sys.argv[1]))
"""


@pytest.mark.slow
def test_a_tiny_run_leaves_a_complete_result(tmp_path):
    """In a process of its own, which the engine and its threads end with. Its arms' tokens are compared inside."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "BENCH_COMMIT": "none"}
    (tmp_path / "run.py").write_text(TINY_RUN)
    done = Script(tmp_path / "run.py", tmp_path, environment=environment).wait(400)
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = tmp_path.glob("multiturn_part-cpu-*.json")
    result = json.loads(file.read_text())
    arms = {(m["case"], m["arm"]) for m in result["measurements"]}
    assert arms == {("8x3", arm) for arm in ("lock_step", "multi_turn", "trl_loop")} | {
        ("computing 8x3", arm) for arm in ("tool_free", "threads", "processes")
    }
    metrics = result["metrics"]
    assert 0.1 < metrics["share_of_optimum"] < 3.0  # a busy machine says nothing exact
    assert metrics["prefix_share"] == pytest.approx(1.0, abs=0.1)
    assert metrics["step_inflation_threads"] > 0.3 < metrics["step_inflation_processes"]
