"""Which rows share a micro-batch: planned from lengths and prompts alone."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from trlx_hybrid_training.micro_batches import RowLengths, equal_tokens, fewest_tokens


def rows(count, prompts, tokens_of_prompt, completions):
    """Rows of prompts that are named by numbers."""
    alike = [prompts.index(prompt) for prompt in prompts]
    prefixes = [tokens_of_prompt[prompt] - 1 for prompt in prompts]
    tokens = [prefix + 1 + completion for prefix, completion in zip(prefixes, completions, strict=True)]
    return RowLengths(tokens, alike, prefixes), count


@st.composite
def rollouts(draw):
    count, size = draw(st.integers(1, 6)), draw(st.integers(1, 12))
    prompts = draw(st.lists(st.integers(0, 7), min_size=count * size, max_size=count * size))
    tokens_of_prompt = draw(st.lists(st.integers(1, 4096), min_size=8, max_size=8))
    completions = draw(st.lists(st.integers(0, 2048), min_size=count * size, max_size=count * size))
    return rows(count, prompts, tokens_of_prompt, completions)


def held(groups, lengths, count):
    """Each row is in one group, and as many in each."""
    assert sorted(row for group in groups for row in group) == list(range(len(lengths.tokens)))
    assert {len(group) for group in groups} == {len(lengths.tokens) // count}


@given(rollouts())
def test_groups_hold_each_row_once_and_none_has_much_more_than_another(rollout):
    lengths, count = rollout
    groups = equal_tokens(lengths.tokens, count)
    held(groups, lengths, count)
    sums = [sum(lengths.tokens[row] for row in group) for group in groups]
    assert max(sums) - min(sums) <= max(lengths.tokens)


@given(rollouts())
def test_rows_of_a_prompt_stay_together_where_no_group_becomes_larger_than_it_was_without_sharing(rollout):
    lengths, count = rollout
    apart, groups = equal_tokens(lengths.tokens, count), fewest_tokens(lengths, count)
    held(groups, lengths, count)
    packed = [lengths.packed(group) for group in groups]
    assert max(packed) <= max(sum(lengths.tokens[row] for row in group) for group in apart)
    assert sum(packed) <= sum(lengths.packed(group) for group in apart)


def test_long_prompts_are_computed_once():
    lengths, count = rows(4, [0, 1, 2, 3] * 4, [100, 110, 90, 100], [10, 20, 30, 40] * 4)
    groups = fewest_tokens(lengths, count)
    assert sorted(map(tuple, groups)) == [(first, first + 4, first + 8, first + 12) for first in range(4)]
    assert sum(map(lengths.packed, groups)) == sum(lengths.tokens) - 3 * sum(n - 1 for n in (100, 110, 90, 100))


def test_a_prompt_with_more_rows_than_a_micro_batch_takes_is_computed_once_in_each():
    lengths, count = rows(4, [0] * 8 + [1] * 8, [100, 100], [10, 20, 30, 40] * 4)
    groups = fewest_tokens(lengths, count)
    assert [len({lengths.alike[row] for row in group}) for group in groups] == [1, 1, 1, 1]
    assert {lengths.packed(group) for group in groups} == {99 + 4 * 1 + 10 + 20 + 30 + 40}


def test_half_a_prompts_rows_stay_together_where_all_of_them_would_be_too_many():
    """All long completions belong to one prompt, and a micro-batch of them alone would be the largest by far."""
    lengths, count = rows(2, [0] * 4 + [1] * 4, [100, 100], [1000] * 4 + [10] * 4)
    groups = fewest_tokens(lengths, count)
    assert [sorted(lengths.alike[row] for row in group) for group in groups] == [[0, 0, 4, 4]] * 2


def test_short_prompts_leave_tokens_as_equal_as_they_were():
    lengths, count = rows(4, [0, 1, 2, 3] * 4, [5, 5, 5, 5], [100, 200, 300, 400] * 4)
    assert fewest_tokens(lengths, count) == equal_tokens(lengths.tokens, count)


def test_prompts_are_alike_where_all_their_tokens_are():
    prompts = torch.tensor([[-1, 5, 6], [5, 5, 6], [-1, 5, 6], [0, 5, 6], [-1, -1, 6], [5, 5, 6]])
    lengths = RowLengths.of(prompts, [5, 6, 7, 8, 9, 10])
    assert lengths.alike == [0, 1, 0, 3, 4, 1]
    assert lengths.prefixes == [1, 2, 1, 2, 0, 2]
    assert lengths.packed(range(6), below=1.0) == 45 - 1 - 2
    assert lengths.packed(range(6)) == 45  # less than a tenth would be saved
    assert lengths.packed([0, 2], below=1.0) == 11
    assert lengths.packed([0, 1], below=1.0) == 11
