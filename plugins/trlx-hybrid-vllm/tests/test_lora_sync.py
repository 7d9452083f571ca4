"""PEFT adapters through a whole training run: unmerged, from memory, exact at every step."""

from pathlib import Path

import pytest
import torch
import trlx_hybrid
from peft import LoraConfig
from transformers import TrainerCallback
from trlx_hybrid import hookimpl
from trlx_hybrid.testing.models import tiny_model
from trlx_hybrid.testing.processes import rank_reports
from trlx_hybrid_vllm.private.adapted_linear import Joined
from trlx_hybrid_vllm.private.engine import model_of
from vllm import SamplingParams

from tests.support.agreement import gap

ADAPTER = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "init_lora_weights": "gaussian"}


class Syncs:
    """The bytes of every sync."""

    def __init__(self):
        self.bytes = []

    @hookimpl
    def trlx_sync_end(self, report):
        self.bytes.append(report.bytes)


class EveryStep(TrainerCallback):
    """Measures after every optimizer step, and whether a sync changes the trainer's adapter."""

    def __init__(self):
        self.gaps = []

    def on_step_end(self, *args, **kwargs):
        model = self.session.policy.module
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.gaps.append(gap(self.session))
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("sleep", [False, True], ids=["awake", "sleep"])
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
def test_the_engine_follows_the_unmerged_adapter_at_every_step(run, architecture, sleep):
    callback = EveryStep()
    finished = run(
        trlx_hybrid.GRPOTrainer,
        model=tiny_model(architecture, tied=True),
        peft_config=LoraConfig(**ADAPTER),
        callbacks=[callback],
        use_vllm=True,
        vllm_enable_sleep_mode=sleep,
        max_steps=4,
        train=False,
    )
    session = callback.session = finished.trainer.session
    start = finished.weights()
    finished.trainer.train()
    assert session.weights.name == "lora"
    assert len(callback.gaps) == 4
    assert max(callback.gaps) < 1e-5
    assert any(not torch.equal(p, start[name]) for name, p in finished.weights().items())


def test_only_the_adapter_moves_and_the_base_is_one_memory(run):
    syncs = Syncs()
    finished = run(trlx_hybrid.GRPOTrainer, peft_config=LoraConfig(**ADAPTER), use_vllm=True, plugins=[syncs])
    model, session = finished.trainer.model, finished.trainer.session
    adapter = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert syncs.bytes[1:] == [adapter, adapter]
    blocks = [range(t.data_ptr(), t.data_ptr() + t.nbytes) for t in session.live_engine.resident("weights")]
    for p in model.parameters():
        assert any(p.data_ptr() in block for block in blocks) != p.requires_grad


def test_a_base_in_another_dtype_is_copied_once(run):
    syncs = Syncs()
    finished = run(
        trlx_hybrid.GRPOTrainer,
        peft_config=LoraConfig(**ADAPTER),
        use_vllm=True,
        plugins=[syncs],
        hybrid={"engine_options": {"dtype": "bfloat16"}},
    )
    adapter = sum(p.nbytes for p in finished.trainer.model.parameters() if p.requires_grad)
    assert finished.trainer.session.weights.name == "lora"
    assert syncs.bytes[0] > 10 * adapter
    assert syncs.bytes[1:] == [adapter, adapter]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
    ],
)
def test_what_the_slots_cannot_hold_is_merged_and_the_header_says_why(run, capfd, config, reason):
    finished = run(trlx_hybrid.GRPOTrainer, peft_config=LoraConfig(**ADAPTER, **config), use_vllm=True, max_steps=1)
    header = capfd.readouterr().err
    assert "weights=gather (auto; not alias: " in header
    assert reason in header.partition("not lora: ")[2].partition(";")[0]
    assert gap(finished.trainer.session) < 1e-5


def test_a_rollout_that_calls_vllm_itself_is_served_by_the_adapter(run):
    def rollout(prompts, trainer):
        ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        given = [{"prompt_token_ids": prompt} for prompt in ids]
        outputs = trainer.vllm_generation.llm.generate(given, SamplingParams(max_tokens=8, logprobs=0), use_tqdm=False)
        sampled = [output.outputs[0] for output in outputs]
        logprobs = [[next(iter(position.values())).logprob for position in one.logprobs] for one in sampled]
        return {"prompt_ids": ids, "completion_ids": [list(one.token_ids) for one in sampled], "logprobs": logprobs}

    adapter = LoraConfig(**ADAPTER)
    given = {"use_vllm": True, "learning_rate": 3e-2, "max_steps": 3}
    finished = run(trlx_hybrid.GRPOTrainer, peft_config=adapter, rollout_func=rollout, **given)
    assert finished.trainer.session.weights.name == "lora"
    gaps = [log["sampling/sampling_logp_difference/max"] for log in finished.trainer.state.log_history if "loss" in log]
    assert len(gaps) == 3
    assert max(gaps) < 1e-5


@pytest.mark.parametrize("weights", ["alias", "copy", "gather", "lora"])
def test_a_callback_that_syncs_and_calls_vllm_samples_from_the_newest_weights(run, weights):
    """As with TRL's own `vllm_generation`; and the run is the one that it would be without."""
    seen = []

    class Asks(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            generation, policy = self.trainer.vllm_generation, self.trainer.session.policy
            generation.sync_weights()
            sampling = SamplingParams(max_tokens=8, logprobs=0, seed=1, ignore_eos=True)
            (output,) = generation.llm.generate({"prompt_token_ids": [5, 6, 7]}, sampling, use_tqdm=False)
            ids, positions = output.outputs[0].token_ids, output.outputs[0].logprobs
            sampled = torch.tensor([position[i].logprob for i, position in zip(ids, positions, strict=True)])
            seen.append(float((sampled - policy.log_probs([5, 6, 7], list(ids), temperature=1.0)).abs().max()))

    logs = []
    for callbacks in ([], [Asks()]):
        adapter = {"peft_config": LoraConfig(**ADAPTER)} if weights == "lora" else {}
        given = {"hybrid": {"engine": "vllm", "weights": weights}, "learning_rate": 3e-2} | adapter
        finished = run(trlx_hybrid.GRPOTrainer, callbacks=callbacks, train=False, **given)
        for callback in callbacks:
            callback.trainer = finished.trainer
        finished.trainer.train()
        finished.close()
        logs.append(finished.logs)
    assert len(seen) == 3
    assert max(seen) < 1e-5
    assert logs[0] == logs[1]


# --- several ranks ----------------------------------------------------------------------------------------------------

SCRIPT = Path(__file__).parent / "scripts" / "lora_distributed.py"


@pytest.mark.parametrize(
    ("mode", "size", "shape"),
    [
        ("fsdp", 2, []),
        pytest.param("fsdp", 2, ["architecture=qwen3_moe"], marks=pytest.mark.slow),  # attention is adapted
        pytest.param("fsdp", 1, [], marks=pytest.mark.slow),
        pytest.param("ddp", 2, ["num_key_value_heads=1"], marks=pytest.mark.slow),  # which both ranks then have
    ],
    ids=["sharded, sliced", "experts, sharded, sliced", "sharded", "sliced"],
)
def test_over_two_ranks_only_the_adapter_moves_and_the_engine_computes_what_the_unmerged_model_does(
    tmp_path, mode, size, shape
):
    for report in rank_reports(SCRIPT, tmp_path, mode, size, *shape, count=2):
        assert report["sharded"] == (report["parameters"] if mode == "fsdp" else 0)
        assert report["engine_weights"] == report["whole"] * 2 // size
        assert report["why"].startswith("auto; not alias: ")
        first, *others = report["syncs"]
        assert len(others) == 3
        assert first[1] > 10 * report["adapter"]  # the base, once, also with sleep on
        for weights, moved, verified, nats, unchanged in report["syncs"]:
            assert weights == "lora"
            assert verified >= 2 * (8 if "architecture=qwen3_moe" in shape else 14)
            assert nats < 1e-5
            assert unchanged
            assert moved == report["adapter"] or moved == first[1]
        assert {moved for _, moved, *_ in others} == {report["adapter"]}
        assert any(report["losses"])


def test_slots_that_no_sync_fills_change_nothing_after_a_sleep(run):
    """vLLM fuses what this adapter takes for one layer, so its slots are there, and the adapter comes merged."""
    finished = run(
        trlx_hybrid.GRPOTrainer,
        model=tiny_model("glm4"),
        peft_config=LoraConfig(**ADAPTER | {"target_modules": ["q_proj", "gate_up_proj"]}),
        use_vllm=True,
        vllm_enable_sleep_mode=True,
        max_steps=3,
    )
    session = finished.trainer.session
    assert session.weights.name == "gather"
    layers = [module for module in model_of(session.live_engine.llm).modules() if isinstance(module, Joined)]
    assert layers
    with session.rollout_phase(True):
        assert not any(t.any() for layer in layers for t in (*layer.lora_a_stacked, layer.joined_b))
    assert gap(session) < 1e-5
