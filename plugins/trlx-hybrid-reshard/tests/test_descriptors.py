"""The slices, carried out on arrays: poisoned targets, every element written once, and back again."""

import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trlx_hybrid_reshard.buckets import bucketed
from trlx_hybrid_reshard.descriptors import lower
from trlx_hybrid_reshard.layouts import MeshLayout
from trlx_hybrid_reshard.plan import plan
from trlx_hybrid_reshard.planner.architectures import SHAPES, describe

sys.path.insert(0, str(Path(__file__).parent))
from worlds import held, reshards

POISON = -7


def window(slice_, corner, array):
    """The box of `slice_` that starts at `corner`, as a view of a rank's array of one class."""
    dims = array.ndim - 1
    size = (slice_["stop"] - slice_["start"])[:dims]
    ranges = tuple(slice(int(a), int(a + n)) for a, n in zip(corner[:dims], size))
    return (slice_["layer"], *ranges)


def carry_out(model, source, target, node, arrays, capacity):
    """Every rank's targets, how often each element was written, and the elements received by each rank.

    Sender and receiver know only their own slices; a message is matched by its place in the order of the pair.
    """
    buckets = bucketed(model, source, target, capacity)
    lowered = [lower(plan(model, source, target, r, ranks_per_node=node), buckets) for r in range(source.world)]
    first = [[_first(layout, p) for p in model.parameters] for layout in (source, target)]
    messages = defaultdict(list)
    for rank, one in enumerate(lowered):
        for s in one.sends:
            at = _local_layer(s, first[0], rank)
            box = arrays[rank][s["parameter"]][window(at, at["here"], arrays[rank][s["parameter"]])]
            messages[rank, int(s["peer"]), int(s["bucket"])].append(box)
    results, written, received = [], [], []
    for rank, one in enumerate(lowered):
        shaped = [held(target, p, rank) for p in model.parameters]
        result = [None if a is None else np.full_like(a, POISON) for a in shaped]
        count = [None if a is None else np.zeros_like(a) for a in shaped]
        elements = 0

        def write(s, value, result=result, count=count, rank=rank):
            at = _local_layer(s, first[1], rank)
            place = window(at, at["here"], result[s["parameter"]])
            result[s["parameter"]][place] = value
            count[s["parameter"]][place] += 1

        for s in one.receives:
            box = messages[int(s["peer"]), rank, int(s["bucket"])].pop(0)
            elements += box.size
            write(s, box)
        for s, there in zip(one.copies, one.there):
            at = _local_layer(s, first[0], rank)
            write(s, arrays[rank][s["parameter"]][window(at, there, arrays[rank][s["parameter"]])])
        for values, into, times in zip(shaped, result, count):
            if values is not None:  # padding is not moved
                into[values == -1] = -1
                times[values == -1] += 1
        results.append(result)
        written.append(count)
        received.append(elements)
    assert not any(messages.values()), "something was sent that nobody received"
    return results, written, received


def _first(layout, parameter):
    """(world,), the first layer of the class that each rank holds."""
    sharding = layout.sharding(parameter)
    return sharding.parts[0][sharding.coordinates[0], 0, 0]


def _local_layer(s, first, rank):
    moved = s.copy()
    moved["layer"] -= first[s["parameter"]][rank]
    return moved


def same(left, right):
    return all((a is None and b is None) or np.array_equal(a, b) for a, b in zip(left, right, strict=True))


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(reshards(), st.sampled_from([24, 100, 1 << 28]))
def test_every_element_is_written_once_and_the_round_trip_is_the_identity(reshard, capacity):
    model, train, rollout, node = reshard
    arrays = [[held(train, p, r) for p in model.parameters] for r in range(train.world)]
    served, written, received = carry_out(model, train, rollout, node, arrays, capacity)
    for rank in range(train.world):
        wanted = [held(rollout, p, rank) for p in model.parameters]
        assert same(served[rank], wanted)
        assert all(c is None or (c == 1).all() for c in written[rank])
        assert received[rank] * 2 == plan(model, train, rollout, rank, ranks_per_node=node).floor_bytes
    back, written, _ = carry_out(model, rollout, train, node, served, capacity)
    for rank in range(train.world):
        assert same(back[rank], arrays[rank])
        assert all(c is None or (c == 1).all() for c in written[rank])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(reshards())
def test_the_slices_are_the_bytes_of_the_plan_peer_by_peer(reshard):
    model, train, rollout, node = reshard
    for source, target in ((train, rollout), (rollout, train)):
        buckets = bucketed(model, source, target)
        for rank in range(train.world):
            made = plan(model, source, target, rank, ranks_per_node=node)
            slices = lower(made, buckets)
            assert all((np.diff(s["bucket"]) >= 0).all() for s in (slices.receives, slices.sends))
            assert (by_peer(slices.receives, train.world) == made.receives).all()
            assert (by_peer(slices.sends, train.world) == made.sends).all()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(reshards())
def test_what_a_rank_packs_has_its_place_in_the_buckets(reshard):
    """What goes to several ranks is packed once."""
    model, train, rollout, node = reshard
    for source, target in ((train, rollout), (rollout, train)):
        buckets = bucketed(model, source, target, 1 << 40, cast=True)
        assert buckets.count == 1
        for rank in range(train.world):
            sends = lower(plan(model, source, target, rank, ranks_per_node=node), buckets).sends
            packed = {tuple(s[name].tobytes() for name in CONTENT): 2 * (s["stop"] - s["start"]).prod() for s in sends}
            assert sum(packed.values()) <= buckets.staged


CONTENT = ("parameter", "layer", "start", "stop")


def by_peer(slices, world):
    sizes = (slices["stop"] - slices["start"]).prod(axis=1) * 2
    return np.bincount(slices["peer"], weights=sizes, minlength=world)


def in_buckets(slices):
    sizes = (slices["stop"] - slices["start"]).prod(axis=1) * 2
    return np.bincount(slices["bucket"], weights=sizes) if len(sizes) else np.zeros(1)


@pytest.mark.parametrize(("n", "t"), [(4, 1), (4, 2), (4, 4), (8, 2)])
def test_no_rank_receives_more_than_a_bucket_at_a_time(n, t):
    model = describe(SHAPES["7b" if t < 8 else "70b"])
    train, rollout = MeshLayout(fsdp=n), MeshLayout(tp=t).served().over(n)
    buckets = bucketed(model, train, rollout)
    assert buckets.peak_bytes <= 512 << 20
    for rank in range(n):
        slices = lower(plan(model, train, rollout, rank), buckets)
        assert in_buckets(slices.receives).max() <= 256 << 20


def test_what_is_larger_than_a_bucket_keeps_every_rank_receiving():
    model = describe(SHAPES["7b"])
    train, rollout = MeshLayout(fsdp=8), MeshLayout(tp=2).served().over(8)
    buckets = bucketed(model, train, rollout, 64 << 20)
    assert buckets.rounds[0] > 1
    slices = lower(plan(model, train, rollout, 0), buckets).receives
    embedding = slices[slices["parameter"] == 0]
    peers = [set(embedding["peer"][embedding["bucket"] == b]) for b in set(embedding["bucket"])]
    assert all(p == peers[0] for p in peers)
