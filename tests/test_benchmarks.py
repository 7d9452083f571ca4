"""The harness: who runs when, what is written, and how goals are held."""

import functools
import importlib
import json
import math
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch

from benchmarks import BENCHMARKS, capacity, capacity_run, real, result, rollout
from benchmarks.__main__ import main
from benchmarks.child import ANSWER, PROGRESS
from benchmarks.goals import GOALS, ROOT, load, measured_code, module_of, stale
from benchmarks.harness import Arm, Measurement, Timed, UnequalResultsError, alternate
from benchmarks.lengths import Lengths, batches
from benchmarks.result import Result
from benchmarks.scale import Variant
from benchmarks.worker import Worker, WorkerError, wait_until_built

GOALS_FILE = """
[[goal]]
benchmark = "rollout"
device = "nvidia-*"
metric = "speedup"
at_least = 1.8

[[goal]]
benchmark = "host"
metric = "overhead_ms"
at_most = 1.0
"""


@pytest.fixture
def example():
    return Result(
        benchmark="rollout",
        device="nvidia-test",
        peer="slow",
        measurements=[Measurement("slow", (3.0, 2.0, 4.0), "8x8"), Measurement("fast", (1.0, 1.0, 2.0), "8x8")],
        metrics={"speedup": 3.0},
        settings={"model": "tiny"},
    )


@pytest.fixture
def check(tmp_path, capsys):
    """Runs `benchmarks check` on GOALS_FILE and the given {file: (device, metrics)}; (exit status, what it printed)."""
    (tmp_path / "goals.toml").write_text(GOALS_FILE)

    def run(results, *names):
        for benchmark, device, metrics in results:
            content = {"benchmark": benchmark, "device": device, "metrics": metrics}
            (tmp_path / f"{benchmark}-{device}.json").write_text(json.dumps(content))
        status = main(["check", *names], goals=tmp_path / "goals.toml", results=tmp_path)
        out, err = capsys.readouterr()
        return status, out + err

    return run


# --- the turns ------------------------------------------------------------------------------------------------------


def test_arms_take_turns_and_warm_up_is_not_measured():
    calls = []
    arms = [Arm(name, lambda turn, name=name: calls.append((name, turn))) for name in ("a", "b")]
    measurements = alternate(arms, warmup=1, repetitions=2, case="small")
    assert calls == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert [(m.arm, m.case, len(m.seconds)) for m in measurements] == [("a", "small", 2), ("b", "small", 2)]


def test_the_clock_is_read_with_an_idle_device():
    order = []
    alternate(
        [Arm("a", lambda turn: order.append("run"))],
        warmup=0,
        repetitions=1,
        synchronise=lambda: order.append("synchronise"),
    )
    assert order == ["synchronise", "run", "synchronise"]


def test_time_is_wall_time_unless_the_arm_knows_better():
    arms = [Arm("slept", lambda turn: time.sleep(0.02)), Arm("timed", lambda turn: Timed(7.0))]
    slept, timed = alternate(arms, warmup=0, repetitions=1)
    assert 0.02 <= slept.seconds[0] < 20.0
    assert timed.seconds == (7.0,)


def test_unequal_results_fail_and_name_the_arms_and_the_round():
    arms = [Arm("one", lambda turn: [turn]), Arm("other", lambda turn: [min(turn, 1)])]
    with pytest.raises(UnequalResultsError, match=r"round 2.*'other'.*'one'.*\[1\].*\[2\]"):
        alternate(arms, warmup=1, repetitions=3)


def test_a_result_of_none_is_not_compared():
    arms = [Arm("one", lambda turn: 1), Arm("silent", lambda turn: None)]
    assert len(alternate(arms, warmup=0, repetitions=1)) == 2


# --- the result -----------------------------------------------------------------------------------------------------


def test_the_file_holds_every_repetition_in_order_and_where_it_was_measured(example, tmp_path, capsys):
    file = example.publish(tmp_path)
    written = json.loads(file.read_text())
    assert file.name == "rollout-nvidia-test.json"
    assert written["measurements"][1] == {
        "case": "8x8",
        "arm": "fast",
        "seconds": [1.0, 1.0, 2.0],
        "median": 1.0,
        "min": 1.0,
        "max": 2.0,
        "ratio": 3.0,
    }
    assert written["measurements"][0]["ratio"] == 1.0
    assert (written["benchmark"], written["device"], written["peer"]) == ("rollout", "nvidia-test", "slow")
    assert (written["metrics"], written["settings"]) == ({"speedup": 3.0}, {"model": "tiny"})
    assert {"torch", "trl", "transformers", "accelerate", "trlx-hybrid"} <= set(written["versions"])
    printed = capsys.readouterr().out
    assert "fast" in printed
    assert "3.00" in printed
    assert str(file) in printed


def test_ratios_compare_within_a_case():
    small, large = Measurement("slow", (2.0,), "small"), Measurement("slow", (8.0,), "large")
    fast = Measurement("fast", (4.0,), "large")
    measured = Result(benchmark="b", device="d", peer="slow", measurements=[small, large, fast], metrics={})
    assert measured.ratio(fast) == 2.0


def test_a_copy_without_git_is_told_its_commit(monkeypatch, tmp_path):
    monkeypatch.setattr(result, "RESULTS", tmp_path / "results")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.delenv("BENCH_COMMIT", raising=False)
    assert result.commit() is None
    monkeypatch.setenv("BENCH_COMMIT", "abc")
    assert result.commit() == "abc"


def test_each_case_says_at_which_commit_and_on_which_machine_it_was_measured(example, tmp_path, monkeypatch):
    monkeypatch.setenv("BENCH_COMMIT", "abc")
    monkeypatch.setattr(result, "driver", lambda: "580.65.06")
    at = json.loads(example.publish(tmp_path).read_text())["measured_at"]
    assert at == {"8x8": {"commit": "abc", "cpu": result.cpu_model(), "driver": "580.65.06"}}
    assert result.cpu_model()


def test_a_case_is_added_whatever_else_is_installed_by_now(example, tmp_path, monkeypatch):
    monkeypatch.setattr(result, "versions", lambda: {"torch": "2.11.0"})
    example.publish(tmp_path)
    monkeypatch.setattr(result, "versions", lambda: {"torch": "2.11.0", "ray": "2.60.0"})
    file = replace(example, measurements=[Measurement("slow", (3.0,), "16x8")]).publish(tmp_path, add=True)
    written = json.loads(file.read_text())
    assert [m["case"] for m in written["measurements"]] == ["8x8", "8x8", "16x8"]
    assert written["versions"] == {"torch": "2.11.0", "ray": "2.60.0"}


def test_what_cannot_be_added_is_kept_beside(example, tmp_path, monkeypatch):
    monkeypatch.setattr(result, "versions", lambda: {"torch": "2.11.0"})
    before = example.publish(tmp_path).read_text()
    monkeypatch.setattr(result, "versions", lambda: {"torch": "2.13.0"})
    with pytest.raises(ValueError, match=r"another torch: 2\.11\.0, now 2\.13\.0.*json\.new"):
        example.publish(tmp_path, add=True)
    kept = json.loads((tmp_path / "rollout-nvidia-test.json.new").read_text())
    assert kept["versions"] == {"torch": "2.13.0"}
    assert (tmp_path / "rollout-nvidia-test.json").read_text() == before


def test_a_machine_without_a_gpu_has_no_driver(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert result.driver() is None
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 580.65.06; echo 580.65.06\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert result.driver() == "580.65.06"


# --- the goals ------------------------------------------------------------------------------------------------------

MET = [("rollout", "nvidia-a", {"speedup": 1.8}), ("host", "cpu-2-cores", {"overhead_ms": 1.0})]


def test_check_passes_when_all_goals_are_met(check):
    status, printed = check(MET)
    assert status == 0
    assert "2 goals" in printed


def test_check_names_each_missed_goal(check):
    status, printed = check(
        [("rollout", "nvidia-a", {"speedup": 1.7}), ("host", "cpu-2-cores", {"overhead_ms": float("nan")})]
    )
    assert status == 1
    assert "rollout on nvidia-a: speedup is 1.7, goal at least 1.8" in printed
    assert "host on cpu-2-cores: overhead_ms is nan, goal at most 1" in printed


def test_every_device_must_meet_the_goal(check):
    status, printed = check([*MET, ("rollout", "nvidia-b", {"speedup": 1.0})])
    assert status == 1
    assert "nvidia-b" in printed
    assert "nvidia-a" not in printed


@pytest.mark.parametrize(
    "results",
    [
        pytest.param([], id="no result"),
        pytest.param([("rollout", "cpu-2-cores", {"speedup": 9.0})], id="another device"),
        pytest.param([("rollout_tiny", "nvidia-a", {"speedup": 9.0})], id="another benchmark"),
        pytest.param([("rollout", "nvidia-a", {"other": 9.0})], id="another metric"),
    ],
)
def test_what_was_not_measured_is_missed(check, results):
    status, printed = check(results, "rollout")
    assert status == 1
    assert "speedup not measured, goal at least 1.8" in printed


def test_check_can_be_told_what_to_check(check):
    status, _ = check([MET[1]], "host")
    assert status == 0


def test_an_unknown_benchmark_is_refused_with_the_nearest_name(check, capsys):
    with pytest.raises(SystemExit) as exit_:
        check([], "rolout")
    assert exit_.value.code == 2
    assert "no benchmark 'rolout'. Did you mean 'rollout'?" in capsys.readouterr().err


def test_goals_are_about_benchmarks_that_exist():
    assert {module_of(goal.benchmark) for goal in load(GOALS)} <= set(BENCHMARKS)
    assert (module_of("capacity_kv"), module_of("reshard_plan"), module_of("steps")) == (
        "capacity",
        "reshard_plan",
        "steps",
    )


@pytest.mark.parametrize("bounds", ["", "at_least = 1\nat_most = 2"])
def test_a_goal_has_one_bound(tmp_path, bounds):
    file = tmp_path / "goals.toml"
    file.write_text(f'[[goal]]\nbenchmark = "host"\nmetric = "m"\n{bounds}\n')
    with pytest.raises(ValueError, match="exactly one"):
        load(file)


def test_every_benchmark_is_listed_and_runnable(capsys):
    assert main([]) == 0
    listed = capsys.readouterr().out
    for name in BENCHMARKS:
        assert name in listed
        assert callable(importlib.import_module(f"benchmarks.{name}").main)


# --- results and the code that they measured ------------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path):
    """A repository with two files, measured at its first commit; `change` commits another change of one of them."""

    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def change(file):
        (root / file).parent.mkdir(exist_ok=True)
        with (root / file).open("a") as out:
            out.write("x")
        git("add", ".")
        git("commit", "-qm", file)
        return git("rev-parse", "HEAD")

    def publish(**content):
        (tmp_path / "rollout-gpu.json").write_text(json.dumps({"benchmark": "rollout", "device": "gpu", **content}))

    def found():
        return list(stale(["rollout", "host"], {"rollout": ["src", "other.py"], "host": ["docs"]}, tmp_path, root))

    root = tmp_path / "repository"
    root.mkdir()
    git("init", "-q")
    return SimpleNamespace(change=change, publish=publish, found=found)


def test_a_result_is_stale_once_a_commit_has_changed_what_it_measures(repository):
    first = repository.change("src/engine.py")
    repository.publish(commit=first)
    repository.change("docs/page.md")
    assert repository.found() == []
    last = repository.change("src/engine.py")
    (line,) = repository.found()
    assert line.startswith(f"rollout on gpu: measured at {first[:7]}; its code was changed since by {last[:7]}")
    repository.publish(commit=last)
    assert repository.found() == []


def test_each_case_is_as_old_as_its_own_commit(repository):
    old, new = repository.change("other.py"), repository.change("src/engine.py")
    repository.publish(commit=new, measured_at={"full": {"commit": new}, "lora": {"commit": old}, "x": {"commit": old}})
    (line,) = repository.found()
    assert line.startswith(f"rollout on gpu (lora, x): measured at {old[:7]}")


@pytest.mark.parametrize(
    ("commit", "why"), [("0" * 40, "git does not know here"), (None, "does not say at which commit")]
)
def test_a_result_that_cannot_be_dated_is_stale(repository, commit, why):
    repository.change("src/engine.py")
    repository.publish(commit=commit)
    (line,) = repository.found()
    assert why in line


def test_check_fails_on_a_stale_result(check, tmp_path):
    with (tmp_path / "goals.toml").open("a") as file:
        file.write('\n[code]\nrollout = ["benchmarks"]\n')
    status, printed = check(MET)  # they say no commit
    assert status == 1
    assert "STALE   rollout on nvidia-a" in printed
    assert "1 results are older" in printed
    assert check(MET, "host")[0] == 0


def test_every_benchmark_with_a_goal_names_code_that_exists():
    code = measured_code()
    assert {module_of(goal.benchmark) for goal in load(GOALS)} <= set(code)
    missing = {path for paths in code.values() for path in paths if not (ROOT / path).exists()}
    assert not missing


# --- what is measured -----------------------------------------------------------------------------------------------


def test_lengths_are_drawn_once_for_all_arms():
    lengths = Lengths(sequences=4000, longest=2048, median=512, sigma=0.8)
    drawn = lengths.draw(3)
    assert drawn == Lengths(sequences=4000, longest=2048, median=512, sigma=0.8).draw(3)
    assert drawn != lengths.draw(4)
    assert (min(drawn) >= 1, max(drawn)) == (True, 2048)
    assert sorted(drawn)[2000] == pytest.approx(512, rel=0.05)
    assert sum(tokens == 2048 for tokens in drawn) / 4000 == pytest.approx(0.042, abs=0.01)  # beyond 1.73 σ
    following = batches(lengths)
    assert [following(), following()] == [lengths.draw(0), lengths.draw(1)]
    assert Lengths(sequences=3, longest=5).draw(0) == [5, 5, 5]
    assert (lengths.name, Lengths(sequences=3, longest=5).name) == ("4000xlognormal512", "3x5")


# --- workers --------------------------------------------------------------------------------------------------------


def test_a_worker_answers_from_a_process_of_its_own():
    with Worker("third", Fraction, 1, 3) as worker:
        wait_until_built([worker], 60)
        assert worker.call("limit_denominator", 2, seconds=60) == Fraction(1, 3).limit_denominator(2)


@pytest.mark.parametrize(
    ("factory", "arguments", "message"),
    [
        pytest.param(int, ("x",), "ValueError: invalid literal", id="raises"),
        pytest.param(os._exit, (3,), "died in its building with exit code 3", id="dies"),
        pytest.param(time.sleep, (60,), "Not built within 2 s: broken", id="hangs"),
    ],
)
def test_a_worker_that_cannot_be_built_says_why(factory, arguments, message):
    with pytest.raises(WorkerError, match=message), Worker("broken", factory, *arguments) as worker:
        wait_until_built([worker], 2 if factory is time.sleep else 60)


def test_a_call_has_a_deadline_and_the_process_is_gone_afterwards():
    worker = Worker("waiting", threading.Event)

    def wait_too_long():
        with worker:
            wait_until_built([worker], 60)
            worker.call("wait", 60, seconds=0.5)

    with pytest.raises(WorkerError, match=r"did not answer wait\(60,\) within 0.5 s"):
        wait_too_long()
    assert not worker._process.is_alive()


# --- capacity -------------------------------------------------------------------------------------------------------


@pytest.fixture
def child(tmp_path, monkeypatch):
    """Makes `capacity.attempt` run a shell script in the place of a trainer."""

    def write(script):
        file = tmp_path / "child"
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(file))
        return lambda seconds: capacity.attempt("hybrid", "tiny", None, 0, str(tmp_path), seconds)

    return write


def test_a_trainer_answers_although_a_helper_outlives_it(child):
    attempt = child(f"echo noise >&2; sleep 60 & echo '{ANSWER}{{\"kv_tokens\": 3}}'")
    started = time.monotonic()
    assert attempt(50) == {"kv_tokens": 3}
    assert time.monotonic() - started < 30


def test_a_trainer_that_takes_too_long_tells_where_it_stood(child, capfd):
    found = child(f"echo '{PROGRESS}2 s: model built' >&2; sleep 60")(3)
    assert found["timed_out"]
    assert found["ended"] == "no answer within 3 s"
    assert found["after"] == "2 s: model built"
    assert "hybrid tiny: 2 s: model built" in capfd.readouterr().err


def test_a_trainer_that_fails_leaves_its_last_words(child):
    found = child("echo out of memory >&2; exit 3")(50)
    assert (found["ended"], found["timed_out"], found["last_lines"]) == ("exit code 3", False, ["out of memory"])


def test_a_step_that_breaks_the_model_is_not_measured():
    stepping = importlib.import_module("benchmarks.stepping")
    log = functools.partial(stepping._Pausing(None).on_log, None, SimpleNamespace(global_step=3), None)
    log(logs={"grad_norm": 2.0})
    log(logs={"train_runtime": 2.0})
    with pytest.raises(FloatingPointError, match="norm of step 3 is nan"):
        log(logs={"grad_norm": math.nan})


def test_prompts_that_begin_with_any_word_have_gradients_in_a_deep_model(tmp_path):
    tiny = rollout.SCALES["tiny"]
    deep = replace(tiny, config={**tiny.config, "num_hidden_layers": 28})
    rollout.write_model(tmp_path, deep)
    model, _ = importlib.import_module("benchmarks.building").load(str(tmp_path), Variant())
    ids = torch.arange(24).view(3, 8)  # 0 is the word that TRL pads with
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_a_checkpoint_of_zeros_reads_as_one_and_takes_no_room(tmp_path):
    from safetensors.torch import load_file

    tensors = {"a": torch.ones(1024, 1024, dtype=torch.bfloat16), "b": torch.ones(3)}
    capacity_run.write_zeros(tmp_path / "model.safetensors", tensors)
    read = load_file(tmp_path / "model.safetensors")
    assert {name: (t.shape, t.dtype, int(t.count_nonzero())) for name, t in read.items()} == {
        name: (t.shape, t.dtype, 0) for name, t in tensors.items()
    }
    status = (tmp_path / "model.safetensors").stat()
    assert status.st_blocks * 512 < status.st_size / 10


def test_seconds_to_a_reward_are_those_of_the_steps_until_its_mean_is_reached():
    def curves(second, rewards, seed=0):
        seconds = [second] * len(rewards)
        return {"seed": seed, "startup": 10.0, "held_out": 0.5, "seconds": seconds, "reward": rewards}

    rising = [step / 20 for step in range(21)]  # the last ten have 0.775 in the mean
    runs = {"full": {"trl": [curves(3.0, rising)], "import": [curves(0.5, rising), curves(0.25, [0.0] * 21, 1)]}}
    found = real.metrics_of(runs)
    assert found["step_seconds_trl_full"] == 3.0
    assert found["reward_trl_full"] == pytest.approx(0.775)
    final = min(found["reward_trl_full"], found["reward_import_full"])
    steps = next(n for n in range(5, 22) if sum(rising[n - 5 : n]) / 5 >= 0.9 * final)
    assert found["seconds_to_90%_trl_full"] == pytest.approx(3.0 * steps)
    assert found["seconds_from_start_to_90%_trl_full"] == pytest.approx(10.0 + 3.0 * steps)
    assert found["seconds_to_90%_import_full"] == pytest.approx(0.5 * steps)
    assert (found["never_at_90%_trl_full"], found["never_at_90%_import_full"]) == (0, 1)
    assert real.reached(runs["full"]["trl"][0], 2.0) is None
    assert found["steps_that_overlap_import_full"] == 1.0  # TRL's one seed lies between ours
    lost = [f"full, import, seed 1: never {share} of the final reward" for share in ("50%", "70%", "90%")]
    assert real.never(runs) == lost


def test_runs_of_real_weights_are_added_to_those_of_equal_sizes(tmp_path, monkeypatch):
    def trained(run):
        return {"startup": 10.0, "held_out": 0.5, "seconds": [1.0 + run.seed] * 20, "reward": [0.5] * 20}

    monkeypatch.setattr(real, "train", trained)
    monkeypatch.setattr(real, "RESULTS", tmp_path)
    monkeypatch.setattr(result.Result.publish, "__defaults__", (tmp_path,))
    sizes = {"task": "sums", "steps": {"full": 20, "lora": 20}, "sequences": 8, "longest": 4}
    real.measure("real", "model", ["full"], ["trl", "import"], [1, 0], {}, sizes)
    runs = real.earlier("real", sizes, tmp_path)
    real.measure("real", "model", ["full"], ["import"], [2, 1], runs, sizes)
    runs = real.earlier("real", sizes, tmp_path)
    assert {arm: [run["seed"] for run in found] for arm, found in runs["full"].items()} == {
        "trl": [0, 1],
        "import": [0, 1, 2],
    }
    with pytest.raises(SystemExit, match=r"its sequences are 8, and now 16\. Measure all again, without --add"):
        real.earlier("real", sizes | {"sequences": 16}, tmp_path)
    real.measure("real_in_flight", "model", ["full"], ["import", "staleness-2"], [0], {}, sizes)
    found = json.loads((tmp_path / f"real_in_flight-{result.accelerator()}.json").read_text())
    assert (found["peer"], found["metrics"]["steps_that_overlap_staleness-2_full"]) == ("import", 1.0)
    assert real.earlier("real", sizes, tmp_path) == runs  # they are no arms of the other comparison
