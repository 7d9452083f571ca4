"""A prompt that rows share is computed once, and nothing else changes."""

import sys
from pathlib import Path

import pytest
import torch
import trlx_hybrid
from datasets import Dataset
from trl.trainer.utils import add_fused_lm_head
from trlx_hybrid.testing.models import tiny_model
from trlx_hybrid_training import attention
from trlx_hybrid_training.packing import Pack

sys.path.insert(0, str(Path(__file__).parent))
from scripted import difference, lora, masked

GRPO = trlx_hybrid.GRPOTrainer
BOUND = 1e-5
PLAIN = {"optim": "sgd", "learning_rate": 0.05}  # weights then differ by what gradients differ by
LENGTH = 40
COMPLETION = 9
A, B, OTHER, ONE = list(range(10, 34)), list(range(50, 57)), [9, *range(11, 34)], [40]
ROWS = [(A, 9), (B, 4), (A, 1), (OTHER, 5), (ONE, 7), (A, 0), (ONE, 3), (OTHER, 9), ([41, 42], 6), (B, 0)]
"""Prompts, and tokens of completions: groups of three and two, a single row, prompts of one token, and completions that
are masked whole."""


def padded():
    """As TRL pads them: input ids, attention mask."""
    draw = torch.Generator().manual_seed(0)
    width = max(len(prompt) for prompt, _ in ROWS)
    ids, mask = torch.zeros(len(ROWS), width + COMPLETION, dtype=torch.long), []
    for row, (prompt, tokens) in enumerate(ROWS):
        ids[row, width - len(prompt) : width] = torch.tensor(prompt)
        ids[row, width:] = torch.randint(3, 98, (COMPLETION,), generator=draw)
        mask.append([0] * (width - len(prompt)) + [1] * (len(prompt) + tokens) + [0] * (COMPLETION - tokens))
    return ids, torch.tensor(mask)


def scored(model, pack):
    """Log-probs and entropies of completions, (10, 9)."""
    ids, mask = padded()
    if pack is None:
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, :-COMPLETION] = -100
        outputs = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
        return outputs.log_probs[:, -COMPLETION:], outputs.entropy[:, -COMPLETION:]
    own = {"segments": pack.segments, "prefixes": pack.prefixes}
    with attention.packing():
        outputs = model(**pack.inputs, **own, shift_labels=pack.labels, fused_lm_head=True)
    return pack.rows(outputs.log_probs), pack.rows(outputs.entropy)


WINDOWS = {"sliding_window": 5, "use_sliding_window": True}
MODELS = {
    "grouped heads": {},
    "as many keys as queries": {"num_key_value_heads": 4},
    "one key for all": {"architecture": "llama", "num_key_value_heads": 1},
    "windows": {**WINDOWS, "layer_types": ["sliding_attention", "full_attention"]},
    "windows everywhere": {"architecture": "mistral", "sliding_window": 5},
    "windows and positions by layer": {"architecture": "gemma3_text", "sliding_window": 5},
    "experts": {"architecture": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["kept", "checkpointing", "reentrant"])
@pytest.mark.parametrize("case", MODELS)
def test_scores_and_gradients_are_those_of_padded_rows(case, checkpointing):
    attention.register()
    pack = Pack.of(*padded(), COMPLETION, shared_below=1.0)
    results = []
    for given in (None, pack):
        model = tiny_model(**MODELS[case]).train()
        add_fused_lm_head(model, outputs=("log_probs", "entropy"))
        if checkpointing is not None:
            model.gradient_checkpointing_enable({"use_reentrant": not checkpointing})
            model.enable_input_require_grads()
        if given is not None:
            model.config._attn_implementation = attention.NAME
        log_probs, entropies = scored(model, given)
        weights = torch.linspace(-1, 1, log_probs.numel()).view_as(log_probs)
        (weights * (log_probs + 0.1 * entropies)).sum().backward()
        gradients = [p.grad / p.grad.abs().max().clamp(min=1) for p in model.parameters()]
        results.append([log_probs.detach(), entropies.detach(), *gradients])
    mask = padded()[1][:, -COMPLETION:].bool()
    assert (results[1][0][~mask] == 0).all()
    assert max(float((a - b).abs().max()) for a, b in zip(*results, strict=True)) < BOUND


def test_a_pack_holds_the_tokens_of_a_prompt_once_and_its_last_one_for_each_row():
    ids, mask = padded()
    pack = Pack.of(ids, mask, COMPLETION, shared_below=1.0)
    assert pack.lengths == [len(prompt) + tokens for prompt, tokens in ROWS]
    assert pack.prefixes == ((0, 0), (1, 0), (0, 23), (3, 0), (4, 0), (0, 23), (4, 0), (3, 23), (8, 0), (1, 6))
    assert pack.segments == (33, 11, 2, 29, 8, 1, 4, 10, 8, 1)
    assert pack.input_ids.shape == (1, sum(pack.segments))
    assert pack.ends.tolist() == [0, 33, 44, 46, 75, 83, 84, 88, 98, 106, 107]
    assert pack.whole_ends.tolist()[-1] == sum(pack.lengths)
    third = slice(44, 46)
    assert pack.input_ids[0, third].tolist() == [A[-1], int(ids[2, 24])]
    assert pack.position_ids[0, third].tolist() == [23, 24]
    assert pack.labels[0, third].tolist() == [int(ids[2, 24]), -100]
    labels = (pack.labels >= 0) * pack.labels
    assert torch.equal(pack.rows(labels), (ids * mask)[:, -COMPLETION:])


TREE = [(A, 9), (A, 9), (OTHER, 2), ([*A[:5], 7], 3)]
"""The first rows of a trie: two with one prompt, one whose prompt has nothing in common, and one with a part of it."""


def tree(seed):
    """Rows of which some continue the completions of others, in any order: ids and mask as TRL pads them, and the
    rows."""
    draw = torch.Generator().manual_seed(seed)

    def some(tokens):
        return torch.randint(3, 9, (tokens,), generator=draw).tolist()

    rows = [(list(prompt), some(tokens)) for prompt, tokens in TREE]
    for _ in range(6):
        prompt, completion = rows[int(torch.randint(len(rows), (1,), generator=draw))]
        kept = int(torch.randint(1, len(completion) + 1, (1,), generator=draw))
        rows.append(([*prompt, *completion[:kept], *some(1 + seed % 2)], some(int(torch.randint(1, 10, (1,))))))
    rows = [rows[row] for row in torch.randperm(len(rows), generator=draw).tolist()]
    width = max(len(prompt) for prompt, _ in rows)
    ids, mask = torch.zeros(len(rows), width + COMPLETION, dtype=torch.long), torch.zeros(len(rows), width + COMPLETION)
    for row, (prompt, completion) in enumerate(rows):
        held = slice(width - len(prompt), width + len(completion))
        ids[row, held], mask[row, held] = torch.tensor(prompt + completion), 1
    return ids, mask.long(), rows


@pytest.mark.parametrize("seed", range(8))
def test_a_trie_computes_each_token_once_however_many_rows_hold_it(seed):
    """Counted by another way: a token is computed for each different beginning of a row that ends with it; the last
    token of a prompt, and those of completions, for each row."""
    ids, mask, rows = tree(seed)
    pack = Pack.of(ids, mask, COMPLETION, shared_below=1.0, trie_below=lambda tokens: 1.0)
    shorter = sorted(range(len(rows)), key=lambda row: (len(rows[row][0]), row))
    held, needed = set(), 0
    for prompt, completion in (rows[row] for row in shorter):
        whole = [*prompt, *completion]
        beginnings = [tuple(whole[:end]) for end in range(1, len(whole) + 1)]
        needed += sum(end >= len(prompt) or part not in held for end, part in enumerate(beginnings, 1))
        held.update(beginnings)
    assert pack.input_ids.shape[1] == needed < int(mask.sum())
    assert torch.equal(pack.rows((pack.labels >= 0) * pack.labels), (ids * mask)[:, -COMPLETION:])


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointing"])
@pytest.mark.parametrize("case", MODELS)
def test_scores_and_gradients_of_a_trie_are_those_of_padded_rows(case, checkpointing, monkeypatch):
    attention.register()
    ids, mask, _ = tree(3)
    monkeypatch.setattr(sys.modules[__name__], "padded", lambda: (ids, mask))
    trie = Pack.of(ids, mask, COMPLETION, shared_below=1.0, trie_below=lambda tokens: 1.0)
    assert trie.trie
    assert any(tokens and trie.prefixes[other][1] for other, tokens in trie.prefixes)
    results = []
    for given in (None, trie):
        model = tiny_model(**MODELS[case]).train()
        add_fused_lm_head(model, outputs=("log_probs", "entropy"))
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if given is not None:
            model.config._attn_implementation = attention.NAME
        log_probs, entropies = scored(model, given)
        weights = torch.linspace(-1, 1, log_probs.numel()).view_as(log_probs) * mask[:, -COMPLETION:]
        (weights * (log_probs + 0.1 * entropies)).sum().backward()
        gradients = [p.grad / p.grad.abs().max().clamp(min=1) for p in model.parameters()]
        results.append([log_probs.detach() * mask[:, -COMPLETION:], *gradients])
    assert max(float((a - b).abs().max()) for a, b in zip(*results, strict=True)) < BOUND


def test_a_trie_is_made_only_where_it_pays():
    ids, mask, _ = tree(0)
    prompts = Pack.of(ids, mask, COMPLETION, shared_below=1.0)
    trie = Pack.of(ids, mask, COMPLETION, shared_below=1.0, trie_below=lambda tokens: 1.0)
    share = sum(trie.segments) / sum(prompts.segments)
    assert Pack.of(ids, mask, COMPLETION, shared_below=1.0, trie_below=lambda tokens: share + 0.01).trie
    apart = Pack.of(ids, mask, COMPLETION, shared_below=1.0, trie_below=lambda tokens: share - 0.01)
    assert (apart.trie, apart.segments) == (False, prompts.segments)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CPU has nothing to wait for")
def test_packing_waits_for_the_device_once(recwarn):
    ids, mask = (tensor.cuda() for tensor in padded())
    torch.cuda.set_sync_debug_mode("warn")
    try:
        pack = Pack.of(ids, mask, COMPLETION, shared_below=1.0)
        scores = torch.zeros(1, sum(pack.segments), device="cuda", requires_grad=True)
        pack.rows(scores).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [f"{w.filename}:{w.lineno}" for w in recwarn if "called a synchronizing CUDA operation" in str(w.message)]
    assert len(waits) == 1, waits


def test_prompts_are_shared_only_where_it_pays():
    ids = torch.arange(3, 23).repeat(2, 1)
    ids[1, 3:] += 20
    mask = torch.ones_like(ids)
    assert Pack.of(ids, mask, 17, shared_below=0.9).segments == (20, 20)  # 38 of 40 would be left
    assert Pack.of(ids, mask, 17, shared_below=1.0).segments == (20, 18)
    ids[1, :15] = ids[0, :15]
    assert Pack.of(ids, mask, 5, shared_below=0.9).segments == (20, 6)
    assert Pack.of(ids, mask, 5, shared_below=0.0).segments == (20, 20)


@pytest.fixture
def long_prompts():
    """Each of 40 tokens."""
    texts = [f"sort {i * 7919 % 1000:03d}".ljust(LENGTH - 1, "abcdefghij"[i % 10]) + "=" for i in range(32)]
    return Dataset.from_dict({"prompt": texts})


@pytest.fixture
def counting():
    """`counting(**config)` makes models that add up the real tokens of each of their forward passes with gradients, one
    list for each model made."""
    counted = []

    def made(**config):
        model = tiny_model(**config)
        counted.append([])

        def count(module, args, kwargs, tokens=counted[-1]):
            if torch.is_grad_enabled() and "input_ids" in kwargs:
                mask = kwargs.get("attention_mask")
                tokens.append(int(kwargs["input_ids"].numel() if mask is None else mask.sum()))

        model.register_forward_pre_hook(count, with_kwargs=True)
        return model

    made.counted = counted
    return made


CASES = {
    "one micro-batch": {},
    "KL, adapters, two iterations": {"beta": 0.1, "peft_config": lora(), "num_iterations": 2, "max_steps": 3},
    "tool masks": {"rollout_func": masked},
    "entropies": {"top_entropy_quantile": 0.3701, "mask_truncated_completions": True},
    "micro-batches": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4},
    "micro-batches of more rows than a prompt has": {"gradient_accumulation_steps": 2, "num_generations": 2},
    "micro-batches of fewer": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    "experts, balanced by nothing": {
        "architecture": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.0,
    },
}
MODEL = ("architecture", "num_experts", "num_experts_per_tok")


@pytest.mark.parametrize("case", CASES)
def test_a_run_with_long_prompts_is_what_it_is_with_padded_rows(compared, noisy, long_prompts, counting, case):
    given = PLAIN | {"train_dataset": long_prompts} | CASES[case]
    config = {name: given.pop(name) for name in MODEL if name in given}
    runs = compared(GRPO, {}, noisy, model=lambda: counting(**config), **given)
    same = "loss", "grad_norm", "reward", "kl", "sampling/sampling_logp_difference/max"
    for padded, packed in zip(*(finished.logs for finished in runs), strict=True):
        for name in padded if given.get("gradient_accumulation_steps", 1) == 1 else padded.keys() & same:
            assert packed[name] == pytest.approx(padded[name], abs=BOUND, rel=BOUND), name
    assert difference(*runs)[1] < BOUND
    args, (real, computed) = runs[0].trainer.args, counting.counted
    assert len(real) == len(computed)
    rows = args.per_device_train_batch_size
    together = max(1, rows // args.num_generations)  # prompts of a micro-batch
    assert sum(computed) == sum(real) - len(real) * (rows - together) * (LENGTH - 1)
    assert sum(computed) < 0.8 * sum(real)
    given = [log["hybrid/step/padded_tokens"] for log in runs[1].trainer.state.log_history if "loss" in log]
    assert sum(given) == sum(computed)


def test_the_load_balance_of_experts_counts_all_tokens(compared, noisy, long_prompts, counting):
    """So nothing is shared where the loss has it."""
    experts = {"architecture": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}
    given = PLAIN | {"train_dataset": long_prompts}
    runs = compared(GRPO, {}, noisy, model=lambda: counting(**experts), **given)
    assert "aux_loss" in runs[0].logs[0]
    assert max(difference(*runs)) < BOUND
    real, computed = counting.counted
    assert real == computed


def test_prompts_are_computed_for_each_row_where_the_options_say_so(compared, noisy, long_prompts, counting, capsys):
    given = PLAIN | {"train_dataset": long_prompts, "max_steps": 1}
    runs = compared(GRPO, {"shared_prompts": False}, noisy, model=lambda: counting(), **given)
    assert max(difference(*runs)) < BOUND
    real, computed = counting.counted
    assert real == computed
    assert "scoring: rows are packed, attention by" in capsys.readouterr().err


@pytest.mark.parametrize("distinct", [True, False], ids=["of prompts of their own", "of one prompt"])
def test_rows_that_lost_their_prompt_are_found_in_the_first_step(compared, noisy, monkeypatch, caplog, distinct):
    whole = attention.whole_rows

    def forgetful(segments, prefixes, device):
        rows = whole(segments, prefixes, device)
        if rows is None:
            return None
        shared = torch.cat([of_group.shared for of_group in rows.copies])
        return rows._replace(sources=torch.where(torch.isin(rows.sources, shared), 0, rows.sources))

    def different(prompts, trainer):
        answer = masked(prompts, trainer)
        return answer | {"prompt_ids": [[*range(20 + row, 40 + row)] for row in range(len(prompts))]}

    monkeypatch.setattr(attention, "whole_rows", forgetful)
    given = {"rollout_func": different if distinct else masked}
    padded, ours = compared(GRPO, {}, noisy, **given)
    assert "Rows stay padded: packed and padded log-probs differ by up to" in caplog.text
    assert ours.logs == padded.logs
