"""Packed rows against TRL's padded ones: losses, gradients, metrics."""

import sys
from pathlib import Path

import pytest
import torch
import trlx_hybrid
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from trl import RLOOConfig
from trlx_hybrid.testing.models import tiny_model
from trlx_hybrid_training import attention
from trlx_hybrid_training.packing import Pack

sys.path.insert(0, str(Path(__file__).parent))
from scripted import difference, lora, masked

GRPO, RLOO = trlx_hybrid.GRPOTrainer, trlx_hybrid.RLOOTrainer
BOUND = 1e-5
PLAIN = {"optim": "sgd", "learning_rate": 0.05}  # weights then differ by what gradients differ by
ALONE = {"balanced": False}
TOKENS = {"vllm_importance_sampling_mode": "token_truncate"}

CASES = {
    **{loss: {"loss_type": loss} for loss in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo")},
    "vespo": {"loss_type": "vespo", **TOKENS},
    **{f"scale {scale}": {"scale_rewards": scale} for scale in ("group", "batch", "none")},
    "truncated ones masked": {"mask_truncated_completions": True},
    "high entropy": {"top_entropy_quantile": 0.3701},
    "entropy bonus": {"entropy_coef": 0.1},
    "two iterations": {"num_iterations": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
    "KL": {"beta": 0.1, "peft_config": lora(), "num_iterations": 2},
    "tool masks": {"rollout_func": masked},
    "sequences": {"importance_sampling_level": "sequence", "loss_type": "grpo"},
    "no checkpointing": {"gradient_checkpointing": False},
    "temperature": {"temperature": 0.7},
    "experts": {
        "model": lambda: tiny_model("qwen3_moe", num_experts=4, num_experts_per_tok=2, output_router_logits=True)
    },
    "llama": {"model": lambda: tiny_model("llama")},
    "RLOO": {"config_class": RLOOConfig, "beta": 0.0},
    "RLOO, KL": {"config_class": RLOOConfig, "beta": 0.1, "peft_config": lora(), "num_iterations": 2},
}


@pytest.mark.parametrize("case", CASES)
def test_packed_is_what_padded_is(compared, noisy, case):
    given = CASES[case]
    trainer = RLOO if "config_class" in given else GRPO
    padded, packed = compared(trainer, ALONE, noisy, **PLAIN | given)
    gap, weights = difference(packed, padded)
    assert gap < BOUND
    assert weights < BOUND
    assert sum(packed.forwards) == 1  # the comparison
    assert packed.trainer.session.scoring.padded_because is None


def test_a_reference_model_of_its_own_is_packed_as_well(compared, noisy, tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    given = PLAIN | {"model": lambda: AutoModelForCausalLM.from_pretrained(tmp_path / "model"), "beta": 0.1}
    padded, packed = compared(GRPO, {}, noisy, **given)
    assert packed.trainer.ref_model is not None
    assert max(difference(packed, padded)) < BOUND
    assert sum(packed.forwards) == 2  # a comparison for each


def test_rows_that_vllm_sampled_are_held_against_packed_ones(compared):
    """Its weights are the policy's own, and its log-probs within the bound of fp32."""
    engine = {"engine": "vllm", "engine_options": {"max_model_len": 64}}
    padded, packed = compared(GRPO, ALONE, engine, **PLAIN | {"num_iterations": 2})
    assert max(difference(packed, padded)) < BOUND
    assert 0 < packed.logs[0]["sampling/sampling_logp_difference/max"] < BOUND
    assert packed.forwards == (1, 0)


def test_adapters_with_dropout_and_autocast_are_packed(compared, noisy):
    """In 16 bits, where TRL's two ways differ by rounding, and the comparison is made without dropout."""
    given = {"peft_config": lora(lora_dropout=0.1), "bf16": True}
    _, packed = compared(GRPO, {}, noisy, **given)
    assert packed.trainer.session.scoring.padded_because is None
    assert packed.forwards == (1, 0)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_of_either_kind(compared, noisy, reentrant):
    given = PLAIN | {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    padded, packed = compared(GRPO, {}, noisy, **given)
    assert max(difference(packed, padded)) < BOUND


def test_packed_rows_are_computed_without_padding(compared, noisy):
    """And so the metrics say; the first comparison of both ways is not counted."""
    apart = {"shared_prompts": False}
    given = PLAIN | {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    padded, packed = (
        [log for log in run.trainer.state.log_history if "loss" in log] for run in compared(GRPO, apart, noisy, **given)
    )
    for theirs, mine in zip(padded, packed, strict=True):
        assert mine["hybrid/step/padded_tokens"] == mine["hybrid/step/tokens"] == theirs["hybrid/step/tokens"]
        assert theirs["hybrid/step/padded_tokens"] > theirs["hybrid/step/tokens"]


def test_a_run_that_packs_says_so_and_leaves_the_model_as_it_was(run, noisy, scripted, capsys):
    given = {"hybrid": noisy | {"scoring": "packed"}, "plugins": [scripted], "max_steps": 1}
    finished = run(GRPO, **given)
    config = finished.trainer.model.config
    assert config._attn_implementation == "trlx_packed"
    finished.close()
    assert config._attn_implementation == "sdpa"
    said = capsys.readouterr().err
    assert "· scoring=packed (HybridConfig.scoring)" in said
    assert "scoring: rows are packed, shared prompts once, attention by sdpa, row by row" in said


def test_two_trainers_on_one_model_both_pack(run, noisy, scripted):
    """And the end of the first leaves the second's rows where they are."""
    model = tiny_model()
    given = {"hybrid": noisy | {"scoring": "packed"}, "plugins": [scripted], "model": model, "max_steps": 1}
    first, second = run(GRPO, **given), run(GRPO, **given, train=False)
    first.close()
    second.trainer.train()
    assert second.trainer.session.scoring.padded_because is None
    assert model.config._attn_implementation == "trlx_packed"
    second.close()
    assert model.config._attn_implementation == "sdpa"


def gpt2():
    """Counts positions from the padding on: TRL's padded rows are others than a row alone."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=98, n_embd=64, n_layer=2, n_head=2, n_positions=256))


def windowed():
    layers = ["sliding_attention", "full_attention"]
    return tiny_model("qwen3", layer_types=layers, use_sliding_window=True, sliding_window=8)


def unfinished_first(prompts, trainer):
    """A rollout of the user's: no completion of the first step ends."""
    end = [1] if trainer.state.global_step else [14]
    ids = [[5 + i, *range(10, 12 + i % 3), *end] for i in range(len(prompts))]
    return {
        "prompt_ids": [trainer.processing_class(prompt)["input_ids"] for prompt in prompts],
        "completion_ids": ids,
        "logprobs": [[-4.5] * len(row) for row in ids],
    }


def test_rows_of_which_none_is_scored_prove_nothing(compared, noisy):
    """They stay padded, and the next ones are compared."""
    given = PLAIN | {"mask_truncated_completions": True, "rollout_func": unfinished_first}
    padded, packed = compared(GRPO, ALONE, noisy, **given)
    assert max(difference(packed, padded)) < BOUND
    assert packed.forwards == (2, 1)  # two comparisons, and the loss of the rows that prove nothing
    assert packed.trainer.session.scoring.padded_because is None


STATES = {"mamba_d_state": 16, "mamba_chunk_size": 16}  # by default they would take most of the time
REFUSED = {
    "windows": ({"model": windowed}, "its layers are sliding_attention"),
    "windows everywhere": (
        {"model": lambda: tiny_model("mistral", sliding_window=8)},
        "its layers are sliding_attention",
    ),
    "recurrent layers": (
        {"model": lambda: tiny_model("falcon_h1", mamba_d_ssm=64, mamba_n_heads=2, **STATES)},
        "state-space",
    ),
    "noise on embeddings": ({"neftune_noise_alpha": 5.0}, "NEFTune's noise depends on"),
    "eager attention": ({"model": lambda: tiny_model(attn_implementation="eager")}, "'eager' takes no packed rows"),
    "positions by length": (
        {
            "model": lambda: tiny_model(
                "llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
            )
        },
        "its dynamic positions depend on how long a batch is",
    ),
    "adapters that begin within a row": (
        {"peft_config": lora(alora_invocation_tokens=[5], task_type="CAUSAL_LM")},
        "its adapter begins at tokens of each row",
    ),
    "positions from the padding on": ({"model": gpt2}, "its positions are not rotary"),
    "layers that drop arguments": ({"model": lambda: tiny_model("nemotron")}, "pass on no arguments of the attention"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_packed_stays_padded_and_the_run_says_why(compared, case, capsys, caplog):
    """With TRL's own generation: of an architecture, an engine would ask more."""
    given, reason = REFUSED[case]
    padded, ours = compared(GRPO, {"deferred": False}, num_iterations=2, max_steps=1, **given)
    assert reason in ours.trainer.session.scoring.padded_because
    said = capsys.readouterr().err + caplog.text
    assert "ows stay padded: " in said
    assert reason in said
    assert ours.logs == padded.logs
    assert all(torch.equal(w, padded.weights()[name]) for name, w in ours.weights().items())


ONE_BY_ONE = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}


@pytest.mark.parametrize(("options", "given"), [({}, {}), ({"shared_prompts": False}, ONE_BY_ONE)], ids=["rows", "row"])
def test_rows_that_attend_to_each_other_are_found_in_the_first_step(
    compared, noisy, monkeypatch, caplog, options, given
):
    """Also where the first packs have one row each: those of an evaluation and of joined micro-batches have more."""
    whole = attention.attention

    def leaky(*args, segments=None, prefixes=(), **kwargs):
        return whole(*args, segments=None if segments is None else (sum(segments),), **kwargs)

    monkeypatch.setattr(attention, "attention", leaky)
    padded, ours = compared(GRPO, ALONE | options, noisy, **given)
    assert "Rows stay padded: packed and padded log-probs differ by up to" in caplog.text
    assert ours.logs == padded.logs


def test_rows_of_any_shape_come_back_where_they_were():
    ids = torch.tensor([[0, 0, 5, 6, 7, 8, 9], [0, 3, 4, 5, 6, 0, 0], [1, 2, 3, 4, 4, 4, 4]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0, 0]])  # the last one masked
    pack = Pack.of(ids, mask, 4)
    assert pack.input_ids.tolist() == [[5, 6, 7, 8, 9, 3, 4, 5, 6, 1, 2, 3]]
    assert pack.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]]
    assert pack.labels.tolist() == [[6, 7, 8, 9, -100, -100, 5, 6, -100, -100, -100, -100]]
    assert pack.ends.tolist() == [0, 5, 9, 12]
    assert pack.rows((pack.labels * (pack.labels > 0)).float()).tolist() == [[6, 7, 8, 9], [5, 6, 0, 0], [0, 0, 0, 0]]
    mask[1, :3] = 0
    assert Pack.of(ids, mask, 4) is None  # nothing comes before its first token
