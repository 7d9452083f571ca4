"""Placement groups on a real cluster of two simulated nodes: what is reserved, in which order, and what is refused."""

import itertools
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trlx_hybrid.errors import ConfigError
from trlx_hybrid_ray.errors import PlacementError
from trlx_hybrid_ray.placement import STRATEGIES, Node, PlacementRequest, alive_nodes, reserve

GPUS, CPUS = 16, 32  # of each node


def node(number, cpus=8.0, gpus=4.0, free_gpus=None):
    free = gpus if free_gpus is None else free_gpus
    return Node(id=f"{number:056x}", address=f"10.0.0.{number}", cpus=cpus, gpus=gpus, free_cpus=cpus, free_gpus=free)


# --- what fits ------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=4),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from(STRATEGIES),
)
def test_what_is_said_to_fit_is_what_a_search_finds(free, replicas, size, strategy):
    request = PlacementRequest(name="r", replicas=replicas, size=size, gpus=1, cpus=0, strategy=strategy)
    found = False
    for places in itertools.product(range(len(free)), repeat=replicas):
        used = [places.count(number) for number in range(len(free))]
        if any(count * size > gpus for count, gpus in zip(used, free, strict=True)):
            continue
        found = (
            found
            or {
                "pack": True,
                "spread": True,
                "strict_pack": len(set(places)) == 1,
                "strict_spread": max(used) == 1,
            }[strategy]
        )
    nodes = [node(number, free_gpus=gpus) for number, gpus in enumerate(free)]
    assert request.fits(nodes, empty=False) == found


def test_tenths_add_up():
    """0.1 three times is more than 0.3 to a computer, and not to Ray."""
    assert PlacementRequest(name="r", replicas=3, gpus=0.1, cpus=0).fits([node(1, gpus=0.3)], empty=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"replicas": 0}, "0 replicas of 1 are no workers"),
        ({"size": 0}, "1 replicas of 0 are no workers"),
        ({"cpus": -1}, "ask for some of either"),
        ({"cpus": 0}, "ask for some of either"),
        ({"gpus": 1.5}, "whole GPUs only"),
        ({"gpus": 0.5, "size": 3}, "whole GPUs only"),
        ({"strategy": "packed"}, "choose one of pack, strict_pack"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        PlacementRequest(name="trainer", **settings)


# --- on a cluster ---------------------------------------------------------------------------------------------------


@pytest.fixture
def holding(two_nodes):
    """Reserves resources the way somebody else would; returns the placement group."""
    from ray.util.placement_group import placement_group

    def hold(node, name="", **resources):
        group = placement_group([resources], bundle_label_selector=[{"ray.io/node-id": node}], name=name)
        assert group.wait(30)
        return group

    settled(dict.fromkeys(two_nodes.nodes, (GPUS, CPUS)))
    return hold


def settled(expected):
    """Waits until Ray reports that much (GPUs, CPUs) as free by node: it does so a moment late."""
    for _ in range(1200):
        free = {node.id: (node.free_gpus, node.free_cpus) for node in alive_nodes()}
        if free == expected:
            return
        time.sleep(0.1)
    raise AssertionError(f"{free} is free instead of {expected}")


def seen(placed):
    """(node id, GPU ids) that a task of each rank sees."""
    import ray

    look = ray.remote(lambda: (ray.get_runtime_context().get_node_id(), tuple(map(str, ray.get_gpu_ids()))))
    return [ray.get(look.options(**placed.options(rank)).remote(), timeout=60) for rank in range(len(placed))]


def test_replicas_of_four_stay_on_a_node_where_ray_hands_bundles_out_unsorted(two_nodes, holding):
    """OpenRLHF #889: 4 bundles in a row were taken for 4 GPUs of a node; Ray gives them out in no promised order."""
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

    head, _ = two_nodes.nodes
    half = holding(head, GPU=8)
    naive = placement_group([{"CPU": 1, "GPU": 1}] * 24, strategy="PACK")
    assert naive.wait(30)
    nodes = placement_group_table(naive)["bundles_to_node_id"]
    assert any(len({nodes[4 * i + j] for j in range(4)}) > 1 for i in range(6)), "the trap is not set any more"
    remove_placement_group(naive)
    with reserve(PlacementRequest(name="engine", replicas=6, size=4, gpus=1), deadline=60) as placed:
        owners = [(placed.bundle(rank).node, placed.gpus(rank)) for rank in range(24)]
        for replica in range(6):
            assert len({owner.id for owner, _ in owners[4 * replica : 4 * replica + 4]}) == 1
        assert owners == sorted(owners, key=lambda owner: (owner[0].order, int(owner[1][0])))
        assert len(set(owners)) == 24
    remove_placement_group(half)


def test_each_rank_is_where_the_placement_says(two_nodes, holding):
    with reserve(PlacementRequest(name="trainer", replicas=6, gpus=1, strategy="spread")) as placed:
        assert seen(placed) == [(placed.bundle(rank).node.id, placed.gpus(rank)) for rank in range(6)]
        assert {bundle.node.id for bundle in placed.bundles} == set(two_nodes.nodes)


def test_halves_are_given_the_same_gpu(two_nodes, holding):
    with (
        reserve(PlacementRequest(name="reward", gpus=0.5)) as one,
        reserve(PlacementRequest(name="judge", gpus=0.5)) as other,
    ):
        assert len(one.gpus(0)) == 1
        assert seen(one) == [(one.bundle(0).node.id, one.gpus(0))]
        assert seen(other) == [(other.bundle(0).node.id, other.gpus(0))]


@pytest.mark.parametrize("how", ["id", "beginning", "labels"])
def test_nodes_are_chosen(two_nodes, holding, how):
    _, other = two_nodes.nodes
    chosen = {
        "id": {"nodes": (other,)},
        "beginning": {"nodes": (other[:8],)},
        "labels": {"labels": {"ray.io/node-id": other}},
    }
    with reserve(PlacementRequest(name="trainer", replicas=3, gpus=1, **chosen[how])) as placed:
        assert {bundle.node.id for bundle in placed.bundles} == {other}


def test_the_map_is_shown_before_anything_starts(two_nodes, holding):
    shown = []
    with reserve(
        PlacementRequest(name="rank", replicas=2, size=2, gpus=1, strategy="strict_spread"), show=shown.append
    ) as placed:
        for number, (line, bundle) in enumerate(zip(shown[0].splitlines(), placed.bundles, strict=True)):
            ranks = f"{2 * number}-{2 * number + 1}"
            assert line == f"rank {ranks} on node {bundle.node.name}, GPU {', '.join(bundle.gpus)}"


def test_what_no_cluster_of_this_size_can_hold_is_refused_at_once(two_nodes, holding):
    started = time.monotonic()
    with pytest.raises(PlacementError, match="trainer: 33 GPUs are asked for, the cluster has 32") as caught:
        reserve(PlacementRequest(name="trainer", replicas=33, gpus=1))
    assert "16 of 16" in str(caught.value)
    with pytest.raises(PlacementError, match="1 times 20 CPUs and 20 GPUs, each on one node"):
        reserve(PlacementRequest(name="engine", size=20, gpus=1))
    with pytest.raises(PlacementError, match=r"the cluster has no node '10\.9\.9\.9'. It has 127"):
        reserve(PlacementRequest(name="engine", nodes=("10.9.9.9",)))
    assert time.monotonic() - started < 10, "what the product promises"


def test_who_holds_what_is_in_the_refusal_and_nothing_stays_reserved(two_nodes, holding):
    import ray

    head, other = two_nodes.nodes
    holding(head, GPU=2, name="somebody's")

    @ray.remote(num_gpus=3, num_cpus=0)
    class Squatter:
        def there(self):
            return True

    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    squatter = Squatter.options(scheduling_strategy=NodeAffinitySchedulingStrategy(other, soft=False)).remote()
    assert ray.get(squatter.there.remote(), timeout=60)
    mine = reserve(PlacementRequest(name="earlier", replicas=4, gpus=1, nodes=(head,)))
    expected = {head: (GPUS - 6, CPUS - 4), other: (GPUS - 3, CPUS)}
    settled(expected)
    started = time.monotonic()
    with pytest.raises(PlacementError) as caught:
        reserve(PlacementRequest(name="trainer", replicas=24, gpus=1), deadline=2)
    assert time.monotonic() - started < 10
    text = str(caught.value)
    assert "trainer: 24 GPUs are asked for, 23 of 32 are free" in text
    (first,) = [line for line in text.splitlines() if head[:6] in line]
    assert "somebody's: 2 GPUs" in first
    assert "earlier, pid " in first
    assert "): 4 GPUs, 4 CPUs" in first
    (second,) = [line for line in text.splitlines() if other[:6] in line]
    assert "unknown holder: 3 GPUs" in second
    assert "Nothing changed within 2 s" in text
    settled(expected)
    mine.remove()
    ray.kill(squatter)


def test_what_others_give_back_in_time_is_waited_for(two_nodes, holding):
    first = reserve(PlacementRequest(name="first", replicas=32, cpus=1, strategy="spread"))
    settled(dict.fromkeys(two_nodes.nodes, (GPUS, CPUS - 16)))
    timer = threading.Timer(1.5, first.remove)
    timer.start()
    with reserve(PlacementRequest(name="second", replicas=64, cpus=1), deadline=60) as second:
        assert len(second) == 64
    timer.join()


def test_two_at_once_are_both_served_or_refused_whole(two_nodes, holding):
    """Each wants three quarters of the cluster: one gets it, the other is told who has it."""
    outcomes = []

    def ask():
        try:
            outcomes.append(
                reserve(PlacementRequest(name="all", replicas=2, cpus=24, strategy="strict_spread"), deadline=6)
            )
        except PlacementError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (refused,) = [outcome for outcome in outcomes if isinstance(outcome, PlacementError)]
    assert "all, pid" in str(refused)
    (served,) = [outcome for outcome in outcomes if not isinstance(outcome, PlacementError)]
    served.remove()
