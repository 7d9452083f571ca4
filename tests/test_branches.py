"""Rows of several branches: each branch is scored as a row of its own, and its scores come back to its tokens."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trlx_hybrid.contract.protocols import Scores
from trlx_hybrid.trl.scoring.branches import Parts

TOKENS = st.lists(st.integers(1, 99), min_size=1, max_size=5)
ROW = st.tuples(TOKENS, TOKENS, st.lists(st.tuples(TOKENS, TOKENS), max_size=3))


def rows_of(rows):
    """The rows as TRL pads them, and where their later branches begin."""
    wide = [[*first, *(token for prompt, said in later for token in (*prompt, *said))] for _, first, later in rows]
    widest, longest = max(len(prompt) for prompt, *_ in rows), max(map(len, wide)) + 1
    ids, mask, begins = [], [], torch.zeros(len(rows), longest, dtype=torch.int32)
    for number, ((prompt, first, later), completion) in enumerate(zip(rows, wide, strict=True)):
        before, after = widest - len(prompt), longest - len(completion)
        ids.append([0] * before + prompt + completion + [0] * after)
        mask.append([0] * before + [1] * (len(prompt) + len(completion)) + [0] * after)
        at = len(first)
        for told, said in later:
            begins[number, at] = len(told)
            at += len(told) + len(said)
    return torch.tensor(ids), torch.tensor(mask), begins


@given(st.lists(ROW, min_size=1, max_size=4))
def test_parts_are_the_branches_and_scores_come_back_to_their_tokens(rows):
    ids, mask, begins = rows_of(rows)
    parts = Parts.of(ids, mask, begins)
    length = parts.completion_length
    seen = [(p, s) for prompt, first, later in rows for p, s in [(prompt, first), *later]]
    found = zip(parts.input_ids, parts.attention_mask.bool(), strict=True)
    assert [(i[:-length][m[:-length]].tolist(), i[-length:][m[-length:]].tolist()) for i, m in found] == seen
    tokens = parts.input_ids[:, -length:].double().requires_grad_()
    back = parts.rows(Scores(tokens, tokens, None))
    for number, (_, first, later) in enumerate(rows):
        wanted = [*first, *(token for told, said in later for token in [*[0] * len(told), *said])]
        assert back.log_probs[number].tolist() == [*wanted, *[0] * (begins.shape[1] - len(wanted))]
    back.log_probs.sum().backward()
    assert tokens.grad.tolist() == parts.attention_mask[:, -length:].tolist()
    assert back.entropies.equal(back.log_probs)


def test_a_row_whose_completion_is_masked_whole_has_no_scores():
    ids, mask, begins = rows_of([([5], [6, 7], []), ([5], [8], [([9], [4])])])
    mask[1, 1:] = 0
    parts = Parts.of(ids, mask, begins)
    assert len(parts.input_ids) == 2
    back = parts.rows(Scores(torch.ones(2, parts.completion_length), None, None))
    assert back.log_probs.sum(1).tolist() == pytest.approx([2, 0])
