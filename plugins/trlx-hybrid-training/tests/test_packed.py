"""Packed rows against TRL's padded ones: losses, gradients, metrics."""

import sys
from pathlib import Path

import pytest
import torch
import trlx_hybrid
from datasets import Dataset
from peft import PromptTuningConfig
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GPT2Model,
    modeling_flash_attention_utils,
)
from trl import RLOOConfig
from trlx_hybrid.errors import ConfigError
from trlx_hybrid.testing.chat import chat_tokenizer
from trlx_hybrid.testing.models import tiny_model, tiny_vision_model
from trlx_hybrid_training import attention
from trlx_hybrid_training.packing import Pack

from tests.support.vision import counted_squares

sys.path.insert(0, str(Path(__file__).parent))
from scripted import Scripted, difference, gradients, lora, masked

GRPO, RLOO = trlx_hybrid.GRPOTrainer, trlx_hybrid.RLOOTrainer
BOUND = 1e-5
PLAIN = {"optim": "sgd", "learning_rate": 0.05, "max_grad_norm": 1e9}  # so that nothing is clipped
ALONE = {"balanced": False}
TOKENS = {"vllm_importance_sampling_mode": "token_truncate"}
AGAIN = {"num_iterations": 2}  # in the second step, the ratio to the old log-probs is not 1
LOSSES = "grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo"
SEQUENCES = {"importance_sampling_level": "sequence"}

CASES = {
    **{loss: AGAIN | {"loss_type": loss} for loss in LOSSES},
    "vespo": AGAIN | {"loss_type": "vespo", **TOKENS},
    **{f"scale {scale}": {"scale_rewards": scale} for scale in ("group", "batch", "none")},
    "truncated ones masked": {"mask_truncated_completions": True, "max_completion_length": 4},  # with 12, one seldom is
    "high entropy": {"top_entropy_quantile": 0.3701},
    "entropy bonus": {"entropy_coef": 0.1},
    "two iterations": {"num_iterations": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
    "KL": {"beta": 0.1, "peft_config": lora(), "num_iterations": 2},
    "tool masks": {"rollout_func": masked},
    "sequences": SEQUENCES | {"loss_type": "grpo"},
    "luspo, sequences": SEQUENCES | {"loss_type": "luspo"},
    "no checkpointing": {"gradient_checkpointing": False},
    "temperature": {"temperature": 0.7},
    "experts": {
        "model": lambda: tiny_model("qwen3_moe", num_experts=4, num_experts_per_tok=2, output_router_logits=True)
    },
    "llama": {"model": lambda: tiny_model("llama")},
    "windows": {"model": lambda: windowed()},
    "windows, Gemma 3": {"model": lambda: tiny_model("gemma3_text", sliding_window=6)},
    "windows everywhere": {"model": lambda: tiny_model("mistral", sliding_window=6)},
    "GPT-2": {"model": lambda: tiny_model("gpt2", tied=True)},
    "RLOO": {"config_class": RLOOConfig, "beta": 0.0},
    "RLOO, KL": {"config_class": RLOOConfig, "beta": 0.1, "peft_config": lora(), "num_iterations": 2},
}


@pytest.mark.parametrize("case", CASES)
def test_packed_is_what_padded_is(compared, noisy, case):
    given = CASES[case]
    trainer = RLOO if "config_class" in given else GRPO
    padded, packed = compared(trainer, ALONE, noisy, **PLAIN | given)
    assert_same(padded, packed)
    assert sum(packed.forwards) == 1  # the comparison
    if given.get("mask_truncated_completions"):
        assert 0 < padded.logs[0]["completions/clipped_ratio"] < 1


def assert_same(padded, packed):
    """What was logged, the gradients of each step, and the weights that they lead to."""
    assert packed.trainer.session.scoring.padded_because is None
    assert max(difference(packed, padded)) < BOUND
    gaps = gradients(packed, padded)
    assert gaps[0][0] < BOUND  # at the same weights
    assert all(gap < BOUND * max(1, largest) for gap, largest in gaps), gaps


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a * b


@pytest.mark.parametrize("given", [{}, SEQUENCES | {"loss_type": "luspo"}], ids=["dapo", "luspo, sequences"])
def test_conversations_with_tools(compared, noisy, monkeypatch, given):
    """What a tool answered is read and not trained, and rows share the tools' descriptions."""
    texts = [f'<tool_call>\n{{"name": "multiply", "arguments": {{"a": {n}, "b": 7}}}}\n</tool_call>' for n in (6, 123)]
    tokenizer = chat_tokenizer([*texts, "42"])
    ids = tokenizer.convert_tokens_to_ids([*texts, "42"])
    monkeypatch.setattr(Scripted, "turns", [[turn, tokenizer.eos_token_id] for turn in ids])
    monkeypatch.setattr(Scripted, "max_model_len", 1024)
    config = {"vocab_size": len(tokenizer), "max_position_embeddings": 1024}
    questions = [[{"role": "user", "content": f"what is {number}?"}] for number in range(16)]
    given = given | {
        "model": lambda: tiny_model(**config, eos_token_id=tokenizer.eos_token_id),
        "processing_class": tokenizer,
        "train_dataset": Dataset.from_dict({"prompt": questions}),
        "tools": [multiply],
        "max_tool_calling_iterations": 2,
        "max_completion_length": 256,
        "max_steps": 1,
    }
    padded, packed = compared(GRPO, ALONE, noisy, **PLAIN | given)
    assert_same(padded, packed)
    assert sum(packed.forwards) == 1
    assert padded.logs[0]["tools/call_frequency"] > 0.5
    assert padded.logs[0]["tools/failure_frequency"] == 0


@pytest.fixture
def flash(monkeypatch):
    """Flash attention as transformers calls it, but for the kernels themselves, which run on GPUs; and what passes with
    gradients told the one of ragged rows: where these end, and how long the longest is."""
    told = []

    def ragged(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False):
        assert causal
        assert torch.equal(cu_seqlens_q, cu_seqlens_k)
        if torch.is_grad_enabled():
            told.append((cu_seqlens_q.tolist(), max_seqlen_q, max_seqlen_k))
        rows = [tensor.split(cu_seqlens_q.diff().tolist()) for tensor in (q, k, v)]
        return torch.cat([whole(*(t[None] for t in row), softmax_scale, causal)[0] for row in zip(*rows, strict=True)])

    def whole(q, k, v, softmax_scale=None, causal=False):
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        attended = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, scale=softmax_scale, is_causal=causal, enable_gqa=True
        )
        return attended.transpose(1, 2)

    library = modeling_flash_attention_utils
    for name, found in {
        "_loaded_implementation": "flash_attention_2",
        "_flash_fn": whole,
        "_flash_varlen_fn": ragged,
        "_pad_fn": library._pad_input,
        "_unpad_fn": library._unpad_input,
        "_process_flash_kwargs_fn": library._lazy_define_process_function(ragged),
    }.items():
        monkeypatch.setattr(library, name, found)
    return told


def test_flash_attention_that_transformers_finds_is_told_where_rows_end(compared, noisy, flash):
    def model():
        made = tiny_model()
        made.config._attn_implementation = "flash_attention_2"  # which no model is loaded with where no GPU is
        return made

    padded, packed = compared(GRPO, {}, noisy, **PLAIN | {"model": model})
    assert_same(padded, packed)
    assert sum(packed.forwards) == 1
    assert packed.trainer.model.config._attn_implementation == "flash_attention_2"
    half = len(flash) // 2
    assert flash[half:] == flash[:half] != []  # as transformers tells it of padded rows
    assert {type(longest) for _, *both in flash for longest in both} == {int}  # made of positions, it is a tensor


def test_a_reference_model_of_its_own_is_packed_as_well(compared, noisy, tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    given = PLAIN | {"model": lambda: AutoModelForCausalLM.from_pretrained(tmp_path / "model"), "beta": 0.1}
    padded, packed = compared(GRPO, {}, noisy, **given)
    assert packed.trainer.ref_model is not None
    assert max(difference(packed, padded)) < BOUND
    assert sum(packed.forwards) == 2  # a comparison for each


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
def test_rows_that_vllm_sampled_are_held_against_packed_ones(compared, architecture):
    """Its weights are the policy's own, and its log-probs within the bound of fp32, whatever counts positions."""
    engine = {"engine": "vllm", "engine_options": {"max_model_len": 64}}
    given = {"num_iterations": 2, "model": lambda: tiny_model(architecture)}
    padded, packed = compared(GRPO, ALONE, engine, **PLAIN | given)
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


class Untold(GPT2Model):
    """Takes no positions."""

    def forward(self, input_ids=None, attention_mask=None, use_cache=None, **kwargs):
        return super().forward(input_ids, attention_mask=attention_mask, use_cache=use_cache)


def untold():
    """Counts positions from the padding on, whatever one does."""
    model = tiny_model("gpt2")
    model.transformer.__class__ = Untold
    return model


def falcon():
    """Has layers of its own for each kind of attention."""
    torch.manual_seed(0)
    config = {"vocab_size": 98, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return FalconForCausalLM(FalconConfig(**config, pad_token_id=0, eos_token_id=1, bos_token_id=2))


def windowed():
    layers = ["sliding_attention", "full_attention"]
    return tiny_model("qwen3", layer_types=layers, use_sliding_window=True, sliding_window=8)


def silent():
    """Knows its windows from masks alone."""
    model = windowed()
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None
    return model


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
    padded, packed = compared(GRPO, ALONE, noisy, untrained=1, **given)
    assert max(difference(packed, padded)) < BOUND
    assert packed.forwards == (2, 1)  # two comparisons, and the loss of the rows that prove nothing
    assert packed.trainer.session.scoring.padded_because is None


EQUALS = 32  # a token that all prompts have
STATES = {"mamba_d_state": 16, "mamba_chunk_size": 16}  # by default they would take most of the time
REFUSED = {
    "windows that its layers do not name": ({"model": silent}, "its layers do not name their sliding windows"),
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
        {"peft_config": lora(alora_invocation_tokens=[EQUALS], task_type="CAUSAL_LM")},
        "its adapter begins at tokens of each row",
    ),
    "positions that nobody can tell it": ({"model": untold}, "it takes no positions"),
    "layers that drop arguments": ({"model": lambda: tiny_model("nemotron")}, "pass on no arguments of the attention"),
    "sinks": (
        {"model": lambda: tiny_model("gpt_oss", layer_types=["full_attention"] * 2)},
        "its attention has sinks",
    ),
    "layers for each attention": ({"model": falcon}, "its attention cannot be chosen"),
    "tokens before the prompt": (
        {"peft_config": lambda: PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)},
        "its adapter puts tokens before the prompt",
    ),
    "compiled layers": ({"torch_compile": True}, "torch_compile would compile it anew for every length"),
    "continuous batching": (
        {
            "use_transformers_continuous_batching": True,
            # By default it takes half of the memory.
            "transformers_continuous_batching_config": {"num_blocks": 16, "max_batch_tokens": 64},
        },
        "continuous batching chooses another attention",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_packed_stays_padded_and_the_run_says_why(compared, case, capsys, caplog):
    """With TRL's own generation: of an architecture, an engine would ask more."""
    assert_refused(compared, *REFUSED[case], capsys, caplog)


def test_a_model_that_cannot_be_told_positions_is_refused_for_that(run, noisy, scripted):
    """Before an engine is built: it would score other rows than were sampled, and the engine be blamed."""
    with pytest.raises(
        ConfigError, match=r"GPT2LMHeadModel counts positions from the padding on: .* no `position_ids`"
    ):
        run(GRPO, hybrid=noisy, plugins=[scripted], model=untold(), max_steps=1)


def test_a_model_that_takes_images_stays_padded(compared, capsys, caplog):
    pytest.importorskip("torchvision", reason="the processors of vision-language models need torchvision")
    given = {
        "model": lambda: tiny_vision_model()[0],
        "processing_class": tiny_vision_model()[1],
        "train_dataset": counted_squares("qwen2_5_vl"),
    }
    assert_refused(compared, given, "it takes images", capsys, caplog)


def assert_refused(compared, given, reason, capsys, caplog):
    with torch.compiler.set_stance("force_eager"):  # compiling takes seconds
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


def test_a_window_is_compared_beyond_the_first_rows(compared, noisy, monkeypatch, caplog):
    """A kernel that took windows otherwise would be found, though all rows of the first step are shorter."""
    plain = attention.attention

    def wider(*args, sliding_window=None, segments=None, **given):
        more = sliding_window and sliding_window + (segments is not None)
        found = plain(*args, sliding_window=more, segments=segments, **given)
        if windows := attention._packing.get():
            windows[-1] = sliding_window  # it says what it should have taken
        return found

    given = {"model": lambda: tiny_model("gemma3_text", sliding_window=60), **PLAIN}
    padded, packed = compared(GRPO, ALONE, noisy, **given)
    assert_same(padded, packed)
    monkeypatch.setattr(attention, "attention", wider)
    caplog.clear()
    padded, packed = compared(GRPO, ALONE, noisy, **given)
    assert "Rows stay padded: packed and padded log-probs differ" in caplog.text
    assert packed.logs == padded.logs
