"""The pure parts of the benchmark of worker groups, and a tiny run of it."""

import json
import math
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.goals import load
from benchmarks.harness import Arm
from benchmarks.ray_dispatch import ACTORS, FEWEST, PAYLOADS, bounds, paired, summary, upper_bound

ROOT = Path(__file__).parent.parent


def test_the_bound_is_the_order_statistic_of_the_sign_test():
    assert upper_bound(range(1, 21)) == 15  # P(Bin(20, 1/2) <= 13) = 0.942, <= 14: 0.979
    assert upper_bound([5.0] * 5) == 5.0
    assert upper_bound([1.0, 2.0]) == math.inf


def test_the_bound_covers_the_median_as_often_as_it_says():
    draw = random.Random(0)
    trials = [upper_bound([draw.expovariate(1.0) for _ in range(41)]) for _ in range(2000)]
    covered = statistics.fmean(bound >= math.log(2) for bound in trials)
    assert 0.94 <= covered <= 0.985


def test_bounds_are_of_pairs():
    raw = [1.0, 10.0, 100.0] * 7
    found = bounds(raw, [1.05 * seconds for seconds in raw])
    assert found["ratio_bound"] == pytest.approx(1.05)
    assert found["extra_ms_bound"] >= 500.0


def test_the_worst_case_is_what_goals_speak_of():
    metrics = {}
    for actors in ACTORS:
        for name in PAYLOADS:
            for method, worse in (("length", 0.0), ("same", 0.01)):
                case = f"{method}_{actors}_{name.replace(' ', '')}"
                metrics |= {f"ratio_bound_{case}": 1.0 + worse, f"extra_ms_bound_{case}": actors / 100 + worse}
    found = summary(metrics)
    assert found == {
        "ratio_16_actors": 1.01,
        "ratio_32_actors": 1.01,
        "extra_ms_1_actors": 0.02,
        "extra_ms_4_actors": 0.05,
    }
    wanted = {goal.metric for goal in load() if goal.benchmark == "ray_dispatch"}
    assert wanted == {*found, "driver_calls_above_nodes_1024"}


def test_arms_take_turns_in_going_first_and_are_repeated_often_enough_for_a_bound():
    calls = []
    arms = [Arm(name, lambda turn, name=name: calls.append(name)) for name in ("a", "b")]
    measured = paired(arms, 0.0, "case")
    assert [(m.arm, m.case, len(m.seconds)) for m in measured] == [("a", "case", FEWEST), ("b", "case", FEWEST)]
    assert calls[-4:] in (["a", "b", "b", "a"], ["b", "a", "a", "b"])
    assert upper_bound(measured[0].seconds) < math.inf


TINY_RUN = """
import sys
from pathlib import Path
from benchmarks.ray_dispatch import run
if __name__ == "__main__":
    run([2], ["1 KiB", "1 MiB"], 0.1, 64).publish(Path(sys.argv[1]))
"""


@pytest.mark.slow
def test_a_tiny_run_leaves_a_complete_result(tmp_path):
    """In a process of its own, which the cluster ends with. Its arms' results are compared inside."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "BENCH_COMMIT": "none"}
    command = [sys.executable, "-c", TINY_RUN, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = tmp_path.glob("ray_dispatch_part-cpu-*.json")
    result = json.loads(file.read_text())
    cases = {f"{method} 2 × {name}" for method in ("length", "same") for name in ("1 KiB", "1 MiB")}
    assert {(m["case"], m["arm"]) for m in result["measurements"]} == {
        (case, arm) for case in cases for arm in ("raw Ray", "worker group")
    }
    assert result["metrics"]["driver_calls_above_nodes_1024"] == 0
    assert 0 < result["metrics"]["ratio_bound_length_2_1KiB"] < 10  # a busy machine says nothing exact
