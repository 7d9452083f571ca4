"""The pure parts of the benchmarks of weight sync, offload and whole steps; what they time is not timed here."""

import dataclasses
import json

import pytest
import torch

from benchmarks import offload, result, rollout, step, tail, weight_sync
from benchmarks.digest import digest
from benchmarks.goals import GOALS, load
from benchmarks.harness import Measurement
from benchmarks.lengths import Lengths
from benchmarks.result import Result
from benchmarks.rollout import SCALES
from benchmarks.scale import Variant
from benchmarks.worker import Worker, WorkerError

# --- the digest -----------------------------------------------------------------------------------------------------


def weights(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return {"first": torch.randn(40, 30).to(dtype), "second": torch.randn(7).to(dtype)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equal_bits_have_equal_digests_in_any_order(dtype):
    named = weights(dtype)
    copied = {name: named[name].clone() for name in reversed(named)}
    assert digest(named.items()) == digest(copied.items())


def exchanged(named):
    named["first"][0, :2] = named["first"][0, :2].flip(0)


def moved_by_one(named):
    named["first"] = named["first"].flatten().roll(1).reshape(40, 30)


def last_bit(named):
    bits = named["second"].view(torch.int16)
    bits[6] ^= 1


def minus_zero(named):
    named["first"][3, 3] = -0.0


def renamed(named):
    named["third"] = named.pop("second")


@pytest.mark.parametrize("change", [exchanged, moved_by_one, last_bit, minus_zero, renamed])
def test_a_change_changes_the_digest(change):
    named, same = weights(), weights()
    named["first"][3, 3] = same["first"][3, 3] = 0.0
    change(named)
    assert digest(named.items()) != digest(same.items())


def test_swapped_tensors_change_the_digest():
    a, b = torch.zeros(8), torch.ones(8)
    assert digest([("a", a), ("b", b)]) != digest([("a", b), ("b", a)])


# --- the metrics ----------------------------------------------------------------------------------------------------


def measured(case, **seconds):
    return [Measurement(arm.replace("_", "-"), (value,), case) for arm, value in seconds.items()]


def test_weight_sync_metrics_bear_the_names_that_the_goals_use():
    measurements = [
        *measured("bf16", trl=0.1, gather=0.05, alias=0.0005),
        *measured("bf16-phase", trl=0.1, gather=0.06, alias=0.001),
        *measured("fp32-master", trl=0.1, gather=0.05, copy=0.004),
        *measured("lora-r16", trl=0.1, gather=0.05, lora=0.003),
        *measured("tool-turn", trl=0.4, trl_awake=0.03, hybrid=0.035, hybrid_awake=0.03),
        *(
            m
            for case in ("kv-at-once", "kv-idle")
            for m in measured(f"{case}-release", trl=0.3, level_1=2, hybrid=0.03)
        ),
        *(
            m
            for case in ("kv-at-once", "kv-idle")
            for m in measured(f"{case}-restore", trl=0.3, level_1=2, hybrid=0.09)
        ),
    ]
    findings = {"trl-bf16": {"drift": 0.1}, "alias-bf16": {"bytes": 0.0}, "gather-lora-r16": {"bytes": 7.0}}
    metrics = weight_sync.metrics_of(measurements, findings)
    assert metrics["sync_ms_alias"] == pytest.approx(0.5)
    assert metrics["phase_sync_ms_alias"] == pytest.approx(1.0)
    assert metrics["sync_ms_trl_fp32_master"] == pytest.approx(100)
    assert (metrics["sync_bytes_alias"], metrics["sync_bytes_gather_lora_r16"]) == (0.0, 7.0)
    assert metrics["tool_turn_extra_ms_hybrid"] == pytest.approx(5)
    assert metrics["tool_turn_extra_ms_trl"] == pytest.approx(370)
    assert (metrics["kv_restore_ms"], metrics["kv_restore_ms_level_1"]) == (pytest.approx(90), pytest.approx(2000))
    assert wanted("weight_sync") <= set(metrics)


def test_offload_takes_the_worse_direction_and_the_share_of_the_return_that_shows():
    measurements = [
        *measured("out", raw=1.0, offload=1.25),
        *measured("free", offload=0.01),
        *measured("back", raw=1.0, offload=1.1),
        *measured("compute", alone=1.0, return_under=1.1, return_first=1.5),
    ]
    metrics = offload.metrics_of(measurements, 50 * 10**9)
    assert metrics["offload_gb_per_second_out"] == pytest.approx(40)
    assert metrics["offload_bandwidth_share"] == pytest.approx(0.8)
    assert metrics["offload_stall_share"] == pytest.approx(0.2)
    assert wanted("offload") <= set(metrics)


def test_step_metrics_and_splits():
    cases = [*step.KINDS, *(f"{kind}-{name}" for kind in step.KINDS for name in ("lognormal", "lognormal-256"))]
    measurements = [m for case in cases for m in measured(case, trl=3.0, tuned=2.0, hybrid=1.0)]
    training = {"trl": 2.0, "tuned": 1.0, "hybrid": 0.5}
    splits = {
        f"{arm} {case}": {
            "training": seconds,
            "training_mfu": 0.1 / seconds,
            "tokens_in_loss": 300.0 if arm != "hybrid" else 100.0,
            "tokens_real": 100.0,
        }
        for case in cases
        for arm, seconds in training.items()
    }
    metrics = step.metrics_of(measurements, splits)
    assert (metrics["step_speedup_full"], metrics["step_speedup_over_tuned_lora-lognormal"]) == (3.0, 2.0)
    assert metrics["training_seconds_hybrid_full"] == 0.5
    assert metrics["training_mfu_hybrid_full"] == 0.2
    assert (metrics["tokens_per_real_token_trl_full"], metrics["tokens_per_real_token_hybrid_full"]) == (3.0, 1.0)
    assert wanted("step") <= set(metrics)
    for split in splits.values():  # on a device whose peak is not known
        del split["training_mfu"]
    assert not any("mfu" in name for name in step.metrics_of(measurements, splits))
    splits = [{"sync_weights": 1.0, "device_bytes_in_use": 5}, {"device_bytes_in_use": 7}, {"sync_weights": 3.0}]
    assert step.summary(splits) == {"sync_weights": 1.0, "device_bytes_in_use": 7}


def test_rollout_metrics_count_the_tokens_of_each_round():
    lengths = Lengths(sequences=8, longest=64, median=16, sigma=0.8)
    rounds = tuple(sum(lengths.draw(turn)) / 100 for turn in (1, 2, 3))  # turn 0 warms up
    measurements = [Measurement(arm, rounds, lengths.name) for arm in ("trl", "tuned", "seedless")]
    measurements.append(Measurement("hybrid", tuple(seconds / 2 for seconds in rounds), lengths.name))
    metrics = rollout.metrics_of(measurements, [lengths])
    assert metrics["tokens_per_second_trl_8xlognormal16"] == pytest.approx(100)
    assert (metrics["speedup_8xlognormal16"], metrics["speedup_over_tuned_8xlognormal16"]) == (2.0, 2.0)


@pytest.mark.parametrize(
    ("text", "tries"),
    [("CUDA out of memory. Tried to allocate 2 GiB", 2), ("CUDA error: an illegal memory access", 1)],
)
def test_a_setting_that_does_not_fit_is_told_from_one_that_fails(text, tries):
    built = []

    def build(variant):
        built.append(Worker("tuned", getattr, object(), text))  # AttributeError: 'object' object has no attribute '…'
        return built[-1]

    with pytest.raises(WorkerError, match=text):
        step.first_that_fits(build, [Variant(), Variant(sleep=True)], lambda worker: worker.call("step", 0, seconds=60))
    assert len(built) == tries
    assert not any(worker._process.is_alive() for worker in built)


@pytest.mark.slow
def test_a_tiny_step_with_drawn_lengths(tmp_path):
    """Real trainers; that all arms sampled the same lengths is checked inside."""
    profiles = tmp_path / "profiles"
    result = step.run(
        tmp_path, "tiny", "lora", "lognormal", turns=step.Turns(warmup=3, measured=2, rounds=1), profiles=str(profiles)
    )
    found = json.loads(result.publish(tmp_path).read_text())
    assert "aten::mm" in (profiles / "lora-lognormal.txt").read_text()
    assert (profiles / "lora-lognormal.json.gz").stat().st_size
    assert {(m["case"], m["arm"]) for m in found["measurements"]} == {
        ("lora-lognormal", arm) for arm in step.CONTESTANTS
    }
    tuned = {"sleep_mode": False, "gradient_checkpointing": False, "detokenize": False}
    assert found["settings"]["cases"]["lora-lognormal"]["tuned"] == tuned
    lengths = step.LENGTHS["tiny"]["lognormal"]
    drawn = [lengths.draw(turn) for turn in (3, 4)]  # after the rounds that warm up
    prompt = found["settings"]["prompt_tokens"]
    for arm in ("trl", "tuned", "hybrid"):
        spans = found["settings"]["medians_by_span"][f"{arm} lora-lognormal"]
        assert spans["tokens_real"] == sum(prompt + sum(each) / len(each) for each in drawn) / 2 * lengths.sequences
        assert 0 < spans["training"] < spans["training"] + spans["rollout"]
        assert spans["training_flops_per_second"] > 0
    for arm in ("trl", "tuned"):  # which pad to the longest row
        spans = found["settings"]["medians_by_span"][f"{arm} lora-lognormal"]
        padded = sum(prompt + max(each) for each in drawn) / 2 * lengths.sequences
        assert spans["tokens_in_loss"] == spans["tokens_without_gradients"] == padded
        assert found["metrics"][f"tokens_per_real_token_{arm}_lora-lognormal"] == padded / spans["tokens_real"]


@pytest.mark.slow
def test_a_tiny_tail(tmp_path):
    """That rows scored while others are sampled have the same log-probs afterwards is checked inside."""
    found = json.loads(tail.run("tiny", repetitions=1).publish(tmp_path).read_text())
    assert {m["arm"] for m in found["measurements"]} == {"apart", "together"}
    assert found["settings"]["rows_scored"] == 14  # of 16
    for arm in ("apart", "together"):
        assert found["metrics"][f"launching_{arm}"] > 0
    assert found["metrics"]["scoring_apart"] > found["metrics"]["scoring_together"]  # which has begun before


@pytest.mark.slow
def test_a_tiny_rollout_in_all_arms(tmp_path):
    """Greedy tokens, and the lengths of all arms, are compared inside."""
    found = json.loads(rollout.run("tiny", repetitions=1).publish(tmp_path).read_text())
    arms = {(m["case"], m["arm"]) for m in found["measurements"]}
    cases = ("8x64", "32x64", "8xlognormal16")
    assert arms == {(case, arm) for case in cases for arm in ("trl", "tuned", "hybrid", "seedless")}
    assert found["metrics"]["greedy_agreement"] == 1.0


def wanted(benchmark):
    return {goal.metric for goal in load(GOALS) if goal.benchmark == benchmark}


# --- the rest -------------------------------------------------------------------------------------------------------


def test_a_case_without_the_peer_has_no_ratio():
    alone = Measurement("other", (1.0,), "case")
    assert Result(benchmark="b", device="d", peer="peer", measurements=[alone], metrics={}).ratio(alone) is None


def test_a_run_adds_its_cases_to_those_of_the_same_versions(tmp_path, monkeypatch):
    def publish(case, seconds, add):
        kinds = {"split": {case: 1}, "model": "tiny"}
        measurements = [Measurement("peer", (seconds,), case)]
        metrics = {f"seconds_{case}": seconds}
        return json.loads(
            Result(benchmark="b", device="d", peer="peer", measurements=measurements, metrics=metrics, settings=kinds)
            .publish(tmp_path, add=add)
            .read_text()
        )

    monkeypatch.setenv("BENCH_COMMIT", "one")
    publish("full", 1.0, add=True)
    publish("lora", 2.0, add=True)
    both = publish("full", 3.0, add=True)
    assert [(m["case"], m["median"]) for m in both["measurements"]] == [("lora", 2.0), ("full", 3.0)]
    assert both["metrics"] == {"seconds_full": 3.0, "seconds_lora": 2.0}
    assert both["settings"] == {"split": {"full": 1, "lora": 1}, "model": "tiny"}
    monkeypatch.setenv("BENCH_COMMIT", "two")
    later = publish("lora", 2.5, add=True)
    assert {case: at["commit"] for case, at in later["measured_at"].items()} == {"full": "one", "lora": "two"}
    monkeypatch.setattr(result, "versions", lambda: {"trl": "2"})
    with pytest.raises(ValueError, match=r"another trl: .*, now 2\."):
        publish("lora", 2.0, add=True)
    assert len(publish("lora", 2.0, add=False)["measurements"]) == 1


def test_the_offloaded_shapes_are_the_models():
    from transformers import AutoConfig, AutoModelForCausalLM

    for scale in SCALES.values():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **scale.config))
        expected = sorted(tuple(p.shape) for p in model.parameters())
        assert sorted(offload.shapes(scale.config)) == expected


def test_every_arm_of_a_model_differs_in_its_weights_alone():
    for variant, paths in weight_sync.MODELS.values():
        assert paths[:2] == ("trl", "gather")
        assert dataclasses.replace(variant, model_dtype="bfloat16", lora_rank=0) == weight_sync.BASE


def test_raw_copies_and_state_return_on_a_cpu():
    state = offload.OptimizerState([(8, 4), (4,)], torch.device("cpu"))
    state.leave()
    state.free()
    with pytest.raises(RuntimeError, match="other bits"):
        state.check()
    state.offload.return_all()
    state.check()
    raw = offload.RawCopies(100, torch.device("cpu"))
    raw.leave()
    raw.come_back()
    state.arena.close()
