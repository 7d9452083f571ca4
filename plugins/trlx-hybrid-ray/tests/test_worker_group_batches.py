"""What a group is called with: batches split and joined, methods registered. Without workers."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trlx_hybrid.errors import ConfigError
from trlx_hybrid_ray.errors import DispatchError
from trlx_hybrid_ray.worker_group.batch import join, row_ranges, rows_of, split
from trlx_hybrid_ray.worker_group.registration import register, registered

sys.path.insert(0, str(Path(__file__).parent))
from group_workers import Frozen, Open, alike, batches

sizes = {"rows": st.integers(0, 40), "parts": st.integers(1, 9)}


@given(**sizes)
def test_chunks_cover_the_batch_in_order_and_differ_by_at_most_one(rows, parts):
    ranges = row_ranges(rows, parts)
    assert [row for part in ranges for row in part] == list(range(rows))
    assert len(ranges) == parts
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


@given(batches(), st.integers(1, 6))
def test_join_undoes_split(case, parts):
    rows, batch = case
    assert rows_of(batch) == rows
    ranges = row_ranges(rows, parts)
    cut = split(batch, ranges)
    assert [rows_of(chunk) for chunk in cut] == [len(part) for part in ranges]
    assert alike(join(cut), batch)


def test_a_chunk_of_a_tensor_does_not_drag_the_rest_along():
    (first, _) = split(torch.zeros(1000, 10), row_ranges(1000, 2))
    assert first.untyped_storage().nbytes() == 500 * 10 * 4


def test_splitting_builds_no_dataclass_anew():
    cut = split({"open": Open([1, 2])}, row_ranges(2, 2))
    assert [(chunk["open"].ids, chunk["open"].built) for chunk in cut] == [([1], 1), ([2], 1)]


def test_results_may_have_other_numbers_of_rows():
    assert join([[1, 1, 2, 2], [], [3]]) == [1, 1, 2, 2, 3]


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


def test_equal_values_without_rows_are_joined_to_one():
    nan = float("nan")
    assert join([(None, 3, "x"), (None, 3, "x")]) == (None, 3, "x")
    assert join([nan, float("nan")]) != nan
    assert torch.equal(join([torch.tensor(2.0), torch.tensor(2.0)]), torch.tensor(2.0))


# --- what may be registered -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param({"dispatch": "scater"}, "Did you mean 'scatter'", id="unknown mode"),
        pytest.param(
            {"dispatch": "scatter", "execute": "async"}, "execute='async' is not one of", id="unknown execution"
        ),
        pytest.param({"dispatch": "scatter", "deadline": 0}, "seconds above 0", id="deadline"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):

        class Worker:
            @register(**settings)
            def method(self, first): ...


def test_methods_that_cannot_be_registered_are_refused():
    async def later(self, first): ...

    def items(self, first):
        yield first

    def nothing(self): ...

    for method, message in ((later, "coroutine"), (items, "generator"), (nothing, "no first argument"), (3, "a int")):
        with pytest.raises(ConfigError, match=message):
            register("scatter")(method)


def test_registrations_are_inherited_and_overridden():
    class Base:
        @register("broadcast")
        def kept(self): ...

        @register("broadcast")
        def changed(self): ...

    class Derived(Base):
        @register("one_to_all")
        def changed(self): ...

    assert {name: found.dispatch for name, found in registered(Derived).items()} == {
        "kept": "broadcast",
        "changed": "one_to_all",
    }


def test_a_class_without_registered_methods_is_refused():
    with pytest.raises(ConfigError, match="int has no registered method"):
        registered(int)
