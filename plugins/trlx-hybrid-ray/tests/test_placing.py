"""Placements on a real cluster of two simulated nodes: what is reserved, where it landed, and what is refused."""

import threading
import time

import pytest
from trlx_hybrid_ray import claims
from trlx_hybrid_ray.errors import PlacementError
from trlx_hybrid_ray.node import alive
from trlx_hybrid_ray.placing import place, reserved
from trlx_hybrid_ray.role import Role

GPUS = 16  # of each node


@pytest.fixture
def holding(two_nodes):
    """Reserves resources the way somebody else would; returns the placement group."""
    import ray
    from ray.util.placement_group import placement_group

    def hold(node, name="", **resources):
        group = placement_group([resources], bundle_label_selector=[{"ray.io/node-id": node}], name=name)
        assert group.wait(30)
        return group

    settled(two_nodes, dict.fromkeys(two_nodes.nodes, (GPUS, 32)))
    yield hold
    assert ray.is_initialized()


def settled(cluster, expected):
    """Waits until Ray reports that much (GPUs, CPUs) as free by node: it does so a moment late."""
    for _ in range(300):
        free = {node.id: (node.free_gpus, node.free_cpus) for node in alive()}
        if free == expected:
            return
        time.sleep(0.1)
    raise AssertionError(f"{free} is free instead of {expected}")


def seen(placed, role):
    """(node id, GPU ids) that a task in each slot of a role sees."""
    import ray

    @ray.remote(max_calls=0)
    def look():
        return ray.get_runtime_context().get_node_id(), tuple(map(str, ray.get_gpu_ids()))

    return [
        ray.get(look.options(**placed.options(slot, reachable=False)).remote(), timeout=60)
        for slot in placed.placement.of(role)
    ]


def test_engines_of_four_stay_on_a_node_where_ray_hands_bundles_out_unsorted(two_nodes, holding):
    """OpenRLHF #889: 4 bundles in a row were taken for 4 GPUs of a node; Ray gives them out in no promised order."""
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

    head, _ = two_nodes.nodes
    half = holding(head, GPU=8)
    naive = placement_group([{"CPU": 1, "GPU": 1}] * 24, strategy="PACK")
    assert naive.wait(30)
    nodes = placement_group_table(naive)["bundles_to_node_id"]
    assert any(len({nodes[4 * i + j] for j in range(4)}) > 1 for i in range(6)), "the trap is not set any more"
    remove_placement_group(naive)

    roles = [
        Role(name="trainer", replicas=24, gpus=1),
        Role(name="engine", replicas=6, size=4, gpus=1, cpus=0, colocate_with="trainer"),
    ]
    with reserved(roles, show=None) as placed:
        found = seen(placed, "engine")
        assert found == [(slot.node, slot.gpu_ids) for slot in placed.placement.of("engine")]
        assert found == seen(placed, "trainer")
        for engine in range(6):
            workers = found[4 * engine : 4 * engine + 4]
            assert len({node for node, _ in workers}) == 1
        order = [(two_nodes.nodes.index(node), int(gpu)) for node, (gpu,) in found]
        by_node = [[gpu for node, gpu in order if node == number] for number in (0, 1)]
        assert [len(gpus) for gpus in by_node] == [8, 16]
        assert all(gpus == sorted(set(gpus)) for gpus in by_node)
    remove_placement_group(half)


def test_every_engine_of_four_starts_beside_the_trainers(two_nodes, holding):
    """OpenRLHF #958: with TP=4 in a hybrid run, one engine per node started and the others waited for ever.

    Engines are started as vLLM's Ray executor starts them: an actor in the first bundle, which starts a worker in each
    bundle of VLLM_RAY_BUNDLE_INDICES with its share of the GPU, while trainers hold theirs.
    """
    import ray

    @ray.remote(num_cpus=0)
    class Trainer:
        def home(self):
            return ray.get_runtime_context().get_node_id(), ray.get_gpu_ids()

    @ray.remote
    class Engine:
        def start(self):
            import os

            from ray.util import get_current_placement_group
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

            group = get_current_placement_group()
            share = float(os.environ["VLLM_RAY_PER_WORKER_GPUS"])
            self.workers = [
                Trainer.options(
                    num_gpus=share,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, int(index)),
                ).remote()
                for index in os.environ["VLLM_RAY_BUNDLE_INDICES"].split(",")
            ]
            own = ray.get_runtime_context().get_node_id()
            return own, ray.get([worker.home.remote() for worker in self.workers])

    roles = [
        Role(name="trainer", replicas=8, gpus=1, strategy="spread"),
        Role(name="engine", replicas=2, size=4, gpus=1, cpus=0, colocate_with="trainer"),
    ]
    with reserved(roles, show=None) as placed:
        slots = placed.placement.of("trainer")
        trainers = [Trainer.options(**placed.options(slot, reachable=False)).remote() for slot in slots]
        engines = [Engine.options(**placed.engine("engine", replica)).remote() for replica in range(2)]
        homes = ray.get([trainer.home.remote() for trainer in trainers], timeout=120)
        started = ray.get([engine.start.remote() for engine in engines], timeout=120)
    assert [home for _, workers in started for home in workers] == homes
    for driver, workers in started:
        assert {node for node, _ in workers} == {driver}
    assert {node for node, _ in started} == set(two_nodes.nodes)


def test_a_replica_over_two_nodes_is_one_placement_group(two_nodes, holding):
    with reserved([Role(name="engine", size=24, gpus=1, may_span_nodes=True)], show=None) as placed:
        assert len(placed.groups) == 1
        place = placed.placement.engine("engine", 0)
        assert sorted(place.bundles) == list(range(24))
        nodes = [node for node, _ in seen(placed, "engine")]
        assert nodes == [slot.node for slot in placed.placement.of("engine")]
        assert len(set(nodes)) == 2
        assert nodes == sorted(nodes, key=nodes.index), "ranks of a node follow each other"


def test_two_halves_are_given_the_same_gpu(two_nodes, holding):
    roles = [Role(name="reward", gpus=0.5), Role(name="judge", gpus=0.5), Role(name="trainer", gpus=1)]
    with reserved(roles, show=None) as placed:
        (reward,), (judge,), (trainer,) = (seen(placed, role.name) for role in roles)
        assert reward == judge
        assert trainer != reward
        assert len(placed.groups) == 1


def test_the_map_is_shown_before_anything_starts(two_nodes, holding):
    shown = []
    with reserved([Role(name="trainer", replicas=2, gpus=1)], show=shown.append) as placed:
        (text,) = shown
        ids = [slot.gpu_ids[0] for slot in placed.placement.of("trainer")]
        for rank, gpu in enumerate(ids):
            assert f"GPU {gpu}".ljust(8) + f" trainer {rank}" in text


def test_what_no_cluster_of_this_size_can_hold_is_refused_at_once(two_nodes, holding):
    started = time.monotonic()
    with pytest.raises(PlacementError, match="33 GPUs are asked for, the cluster has 32") as caught:
        place([Role(name="trainer", replicas=33, gpus=1)])
    assert time.monotonic() - started < 10, "what the product promises"
    assert "16 of 16" in str(caught.value)
    with pytest.raises(PlacementError, match="takes 20 GPUs and 20 CPUs of one node"):
        place([Role(name="engine", size=20, gpus=1)])


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
    mine = place([Role(name="trainer", replicas=4, gpus=1, node=head)], run="earlier", show=None)
    expected = {head: (GPUS - 6, 28.0), other: (GPUS - 3, 32.0)}
    settled(two_nodes, expected)
    with pytest.raises(PlacementError) as caught:
        place([Role(name="trainer", replicas=24, gpus=1)], deadline=0.5)
    text = str(caught.value)
    assert "24 GPUs are asked for, 23 of 32 are free" in text
    (first,) = [line for line in text.splitlines() if head[:6] in line]
    assert 'placement group "somebody\'s": 2 GPUs' in first
    assert "run earlier (pid " in first
    assert "), trainer: 4 GPUs, 4 CPUs" in first
    (second,) = [line for line in text.splitlines() if other[:6] in line]
    assert "unknown holder: 3 GPUs" in second
    assert "Nothing changed within 0.5 s" in text
    settled(two_nodes, expected)
    mine.remove()
    ray.kill(squatter)


def test_what_others_give_back_in_time_is_waited_for(two_nodes, holding):
    head, other = two_nodes.nodes
    first = place([Role(name="trainer", replicas=32, gpus=1)], show=None)
    settled(two_nodes, {head: (0, 16.0), other: (0, 16.0)})
    timer = threading.Timer(0.5, first.remove)
    timer.start()
    second = place([Role(name="trainer", replicas=32, gpus=1)], deadline=60, show=None)
    timer.join()
    assert len(second.placement.slots) == 32
    second.remove()


def test_claims_end_with_what_they_claim(two_nodes, holding):
    head, other = two_nodes.nodes
    with reserved([Role(name="trainer", gpus=1, node=head)], run="mine", show=None):
        (claim,) = claims.read()
        assert (claim.node, claim.gpus, claim.cpus) == (head, 1.0, 1.0)
        assert claim.holder.startswith("run mine (pid ")
    settled(two_nodes, {head: (GPUS, 32.0), other: (GPUS, 32.0)})
    assert claims.read() == []


def test_a_group_that_waits_claims_nothing():
    waiting = {"state": "PENDING", "name": "n", "bundles": {0: {"GPU": 1.0}}, "bundles_to_node_id": {0: ""}}
    unnamed = {"state": "CREATED", "name": "", "bundles": {0: {"CPU": 2.0}}, "bundles_to_node_id": {0: "aa"}}
    found = claims.from_groups({"0123456789": waiting, "abcdef0123": unnamed})
    assert found == [claims.Claim("placement group abcdef01 without a name", "aa", 0.0, 2.0)]
