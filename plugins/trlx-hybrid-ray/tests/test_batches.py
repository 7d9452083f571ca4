"""Batches cut and joined, without workers."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trlx_hybrid_ray.workers.batch import Chunks, join, rows_of, split
from trlx_hybrid_ray.workers.failure import DispatchError

sys.path.insert(0, str(Path(__file__).parent))
from group_workers import Frozen, Open, alike, batches

sizes = {"rows": st.integers(0, 40), "parts": st.integers(1, 9)}


@given(**sizes)
def test_chunks_cover_the_batch_in_order_and_differ_by_at_most_one(rows, parts):
    chunks = Chunks.of(rows, parts)
    assert [row for part in chunks.rows for row in part] == list(range(rows))
    assert max(chunks.real) - min(chunks.real) <= 1
    assert chunks.sizes == chunks.real
    assert not chunks.padded


@given(**sizes)
def test_padded_chunks_have_one_size_and_the_mask_says_what_is_real(rows, parts):
    chunks = Chunks.of(rows, parts, padded=True)
    assert chunks.real == Chunks.of(rows, parts).real
    assert set(chunks.sizes) == {max(chunks.real)}
    for size, real, mask in zip(chunks.sizes, chunks.real, chunks.masks()):
        assert mask.tolist() == [True] * real + [False] * (size - real)


@given(batches(), st.integers(1, 6), st.booleans())
def test_join_undoes_split(case, parts, padded):
    rows, batch = case
    assert rows_of(batch) == rows
    chunks = Chunks.of(rows, parts, padded=padded)
    cut = split(batch, chunks)
    assert [rows_of(chunk) for chunk in cut] == list(chunks.sizes)
    assert alike(join(cut, chunks), batch)


@given(st.integers(1, 20), st.integers(1, 9))
def test_padding_repeats_rows_of_the_batch(rows, parts):
    batch = torch.arange(rows)
    chunks = Chunks.of(rows, parts, padded=True)
    for chunk, own, real in zip(split(batch, chunks), chunks.rows, chunks.real):
        assert chunk[:real].tolist() == list(own)
        assert all(value == (own[-1] if real else rows - 1) for value in chunk[real:].tolist())


def test_a_chunk_of_a_tensor_does_not_drag_the_rest_along():
    (first, _) = split(torch.zeros(1000, 10), Chunks.of(1000, 2))
    assert first.untyped_storage().nbytes() == 500 * 10 * 4


def test_splitting_builds_no_dataclass_anew():
    cut = split({"open": Open([1, 2])}, Chunks.of(2, 2))
    assert [(chunk["open"].ids, chunk["open"].built) for chunk in cut] == [([1], 1), ([2], 1)]


def test_results_may_have_other_numbers_of_rows_without_padding():
    assert join([[1, 1, 2, 2], [], [3]], Chunks.of(3, 3)) == [1, 1, 2, 2, 3]


def test_an_empty_chunk_does_not_decide_the_dtype():
    joined = join([np.array([1, 2], dtype=np.int64), np.array([])])
    assert joined.dtype == np.int64
    assert join([torch.zeros(0), torch.zeros(2, 3, dtype=torch.int32)]).dtype == torch.int32


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        pytest.param({"a": [1, 2], "b": torch.zeros(3)}, r"\['a'\] has 2 and the batch\['b'\] has 3", id="rows differ"),
        pytest.param({"a": 1, "b": "text"}, "holds no list, tensor or array", id="no rows"),
        pytest.param(torch.tensor(1.0), "holds no list, tensor or array", id="no dimensions"),
        pytest.param(
            ([1], SimpleNamespace(x=1)), r"the batch\[1\] is a SimpleNamespace, which has no rows", id="object"
        ),
        pytest.param(([1], {1, 2}), r"the batch\[1\] is a set", id="set"),
    ],
)
def test_what_cannot_be_cut_is_named(batch, message):
    with pytest.raises(DispatchError, match=message):
        rows_of(batch)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        pytest.param([{"a": [1]}, {"b": [1]}], r"of chunk 0 is dict of \['a'\], of chunk 1 dict of \['b'\]", id="keys"),
        pytest.param([[1], (1,)], "of chunk 0 is list, of chunk 1 tuple", id="types"),
        pytest.param(
            [Frozen([1]), Frozen(None)], r"the result\['ids'\] of chunk 0 is list, of chunk 1 None", id="None"
        ),
        pytest.param([{"loss": 0.5}, {"loss": 0.25}], r"\['loss'\] has no rows and differs, 0.5 .* 0.25", id="scalars"),
    ],
)
def test_results_that_are_not_alike_are_refused(parts, message):
    with pytest.raises(DispatchError, match=message):
        join(parts)


def test_padding_cannot_be_taken_off_results_of_another_length():
    with pytest.raises(DispatchError, match=r"the result of chunk 1 has 1 rows for 2 given.*without `pad`"):
        join([[1, 2], [3]], Chunks.of(3, 2, padded=True))


def test_equal_values_without_rows_are_joined_to_one():
    nan = float("nan")
    assert join([(None, 3, "x"), (None, 3, "x")]) == (None, 3, "x")
    assert join([nan, float("nan")]) != nan
    assert torch.equal(join([torch.tensor(2.0), torch.tensor(2.0)]), torch.tensor(2.0))
