"""Who gets what, and what becomes of the results, without workers."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trlx_hybrid.errors import ConfigError
from trlx_hybrid_ray.workers.dispatch import collect, dealt, restricted, whole
from trlx_hybrid_ray.workers.failure import DispatchError
from trlx_hybrid_ray.workers.grid import Grid
from trlx_hybrid_ray.workers.reduction import reduce
from trlx_hybrid_ray.workers.register import register, rules

grids = st.builds(lambda replicas, tp: Grid(replicas * tp, tp), st.integers(1, 6), st.integers(1, 4))


def rule(dispatch, **settings):
    class Worker:
        @register(dispatch, **settings)
        def method(self, first=None, mask=None): ...

    return rules(Worker)["method"]


def received(deal):
    """By rank, the parcel it gets."""
    return {rank: deal.parcels[deal.parcel_of[position]] for position, rank in enumerate(deal.ranks)}


# --- who gets what --------------------------------------------------------------------------------------------------


@given(grids)
def test_everyone_or_rank_zero_gets_whole_arguments(grid):
    everyone = list(range(grid.ranks))
    for dispatch, ranks, counted in (
        ("broadcast", everyone, [0]),
        ("one_to_all", everyone, everyone),
        ("rank_zero", [0], [0]),
    ):
        deal = whole(rule(dispatch), grid)
        assert list(deal.ranks) == ranks
        assert [deal.ranks[position] for position in deal.collected] == counted
        assert not deal.parcels


@given(grids)
def test_all_to_all_gives_every_rank_its_item(grid):
    deal = dealt(rule("all_to_all"), grid, [f"item {rank}" for rank in range(grid.ranks)])
    assert received(deal) == {rank: f"item {rank}" for rank in range(grid.ranks)}
    assert collect(rule("all_to_all"), deal, list(range(grid.ranks))) == list(range(grid.ranks))


@given(grids)
def test_replicate_gives_all_ranks_of_a_replica_the_same_item(grid):
    deal = dealt(rule("replicate"), grid, [f"item {replica}" for replica in range(grid.replicas)])
    assert received(deal) == {rank: f"item {rank // grid.tensor_parallel}" for rank in range(grid.ranks)}
    firsts = [replica * grid.tensor_parallel for replica in range(grid.replicas)]
    assert collect(rule("replicate"), deal, list(range(grid.ranks))) == firsts


@given(grids, st.integers(0, 30), st.booleans())
def test_scatter_gives_replicas_their_rows_and_gathers_those_of_their_first_ranks(grid, rows, padded):
    given_rule = rule("scatter", pad="mask" if padded else None)
    deal = dealt(given_rule, grid, list(range(rows)))
    chunks = received(deal)
    by_replica = [chunks[replica * grid.tensor_parallel] for replica in range(grid.replicas)]
    assert all(chunks[rank] == by_replica[rank // grid.tensor_parallel] for rank in range(grid.ranks))
    masks = [k["mask"] for k in deal.keywords] if padded else [[True] * len(chunk) for chunk in by_replica]
    kept = [row for chunk, mask in zip(by_replica, masks) for row, real in zip(chunk, mask, strict=True) if real]
    assert kept == list(range(rows))
    answers = [[10 * row for row in chunks[r]] if r % grid.tensor_parallel == 0 else None for r in range(grid.ranks)]
    assert collect(given_rule, deal, answers) == [10 * row for row in range(rows)]


@given(grids, st.integers(0, 30), st.data())
def test_a_relay_gets_the_parcels_of_its_ranks_and_no_others(grid, rows, data):
    deal = dealt(rule("scatter", pad="mask"), grid, list(range(rows)))
    positions = sorted(data.draw(st.sets(st.integers(0, grid.ranks - 1))))
    part = restricted(deal, positions)
    assert received(part) == {rank: received(deal)[rank] for rank in positions}
    assert len(part.parcels) == len({rank // grid.tensor_parallel for rank in positions})
    masks = {rank: part.keywords[part.parcel_of[p]]["mask"].tolist() for p, rank in enumerate(part.ranks)}
    assert masks == {rank: deal.keywords[deal.parcel_of[rank]]["mask"].tolist() for rank in positions}


@pytest.mark.parametrize(
    ("dispatch", "first", "message"),
    [
        pytest.param("all_to_all", [1, 2], "each of the 4 workers, and it got 2 items", id="too few"),
        pytest.param("replicate", [1, 2, 3, 4], "each of the 2 replicas, and it got 4 items", id="too many"),
        pytest.param("all_to_all", {"a": 1}, "and it got a dict", id="no list"),
    ],
)
def test_a_wrong_number_of_items_is_refused(dispatch, first, message):
    with pytest.raises(DispatchError, match=message):
        dealt(rule(dispatch), Grid(4, 2), first)


@pytest.mark.parametrize(("ranks", "tensor_parallel"), [(4, 3), (0, 1), (4, 0), (2, 4)])
def test_a_grid_must_divide(ranks, tensor_parallel):
    with pytest.raises(ConfigError, match=f"tensor_parallel={tensor_parallel}"):
        Grid(ranks, tensor_parallel)


# --- reductions -----------------------------------------------------------------------------------------------------


@given(grids, st.lists(st.floats(-100, 100), min_size=1, max_size=30), st.sampled_from(["sum", "mean", "min", "max"]))
def test_reductions_of_chunks_are_those_of_the_batch(grid, rows, how):
    whole_batch = {"sum": math.fsum, "mean": lambda v: math.fsum(v) / len(v), "min": min, "max": max}[how]
    given_rule = rule("reduce", reduction=how)
    deal = dealt(given_rule, grid, rows)
    chunks = received(deal)
    answers = [whole_batch(chunks[r]) if chunks[r] else float("nan") for r in range(grid.ranks)]
    assert collect(given_rule, deal, answers) == pytest.approx(whole_batch(rows))


def test_reductions_reach_into_nested_results_and_keep_dtypes():
    results = [
        {"loss": 1.0, "sizes": [1, 2], "grad": (torch.tensor([1, 2]), np.array([0.5], dtype=np.float32))},
        {"loss": 4.0, "sizes": [3, 4], "grad": (torch.tensor([5, 0]), np.array([2.0], dtype=np.float32))},
    ]
    summed = reduce("sum", results, [1, 1])
    assert (summed["loss"], summed["sizes"]) == (5.0, [4, 6])
    assert summed["grad"][0].tolist() == [6, 2]
    assert summed["grad"][0].dtype == torch.int64
    assert summed["grad"][1].dtype == np.float32
    assert reduce("mean", results, [1, 2])["loss"] == 3.0
    assert reduce("max", results, [1, 1])["grad"][0].tolist() == [5, 2]
    assert reduce("min", results, [1, 1])["grad"][1].tolist() == [0.5]


def test_a_function_reduces_as_it_likes():
    assert reduce(sorted, ["b", "a"], [1, 1]) == ["a", "b"]


@pytest.mark.parametrize(
    ("results", "message"),
    [
        pytest.param([{"a": "x"}, {"a": "y"}], r"the result\['a'\] of replica 0 is a str, which has no sum", id="text"),
        pytest.param([torch.zeros(2), torch.zeros(1)], "another shape on replica 1", id="shapes that would broadcast"),
    ],
)
def test_what_cannot_be_reduced_is_named(results, message):
    with pytest.raises(DispatchError, match=message):
        reduce("sum", results, [1, 1])


# --- what may be registered -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param({"dispatch": "scater"}, "Did you mean 'scatter'", id="unknown mode"),
        pytest.param(
            {"dispatch": "scatter", "execute": "async"}, "execute='async' is not one of", id="unknown execution"
        ),
        pytest.param({"dispatch": "broadcast", "execute": "stream"}, "one result and nothing to stream", id="stream"),
        pytest.param({"dispatch": "broadcast", "pad": "mask"}, "batches that are split", id="pad without batch"),
        pytest.param({"dispatch": "scatter", "pad": "msk"}, "no parameter 'msk' to take the mask", id="no mask"),
        pytest.param({"dispatch": "scatter", "pad": "first"}, "no parameter 'first' to take the mask", id="no default"),
        pytest.param(
            {"dispatch": "reduce", "reduction": "avg"}, "reduction='avg' is not one of", id="unknown reduction"
        ),
        pytest.param({"dispatch": "scatter", "deadline": 0}, "seconds above 0", id="deadline"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):

        class Worker:
            @register(**settings)
            def method(self, first, mask=None): ...


def test_methods_that_cannot_be_registered_are_refused():
    async def later(self, first): ...

    def items(self, first):
        yield first

    def nothing(self): ...

    for method, message in ((later, "coroutine"), (items, "generator"), (nothing, "no first argument"), (3, "a int")):
        with pytest.raises(ConfigError, match=message):
            register("scatter")(method)


def test_rules_are_inherited_and_overridden():
    class Base:
        @register("broadcast")
        def kept(self): ...

        @register("broadcast")
        def changed(self): ...

    class Derived(Base):
        @register("one_to_all")
        def changed(self): ...

    assert {name: found.dispatch for name, found in rules(Derived).items()} == {
        "kept": "broadcast",
        "changed": "one_to_all",
    }


def test_a_class_without_registered_methods_is_refused():
    with pytest.raises(ConfigError, match="int has no registered method"):
        rules(int)
