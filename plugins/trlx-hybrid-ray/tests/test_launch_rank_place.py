"""Ranks follow nodes and devices, and each knows its node's devices, its own being number LOCAL_RANK."""

from hypothesis import given
from hypothesis import strategies as st
from trlx_hybrid_ray.launch.job import Job
from trlx_hybrid_ray.launch.rank_place import ROLE, places, role_of
from trlx_hybrid_ray.node import Node
from trlx_hybrid_ray.placement import Placement
from trlx_hybrid_ray.resolve import resolve


@given(st.integers(1, 3), st.integers(1, 4), st.booleans(), st.randoms())
def test_every_rank_is_where_its_variables_say(nodes, per_node, gpus, random):
    job = Job(script="s.py", folder="/", nodes=nodes, processes_per_node=per_node, gpus=gpus)
    cluster = [
        Node(id=f"{i:06x}", address=f"10.0.0.{i}", cpus=8, gpus=4, free_cpus=8, free_gpus=4) for i in range(nodes + 1)
    ]
    random.shuffle(cluster)
    found = resolve(cluster, [role_of(job)])
    assert isinstance(found, Placement)
    given_gpus = []  # as Ray deals them out: in no order
    for group in found.groups:
        ids = random.sample(["0", "3", "10", "9"], len(group))
        given_gpus.append([[gpu] if gpus else [] for gpu in ids])
    settled = found.settled(given_gpus)
    ranks = places(settled.of(ROLE))
    assert [place.rank for place in ranks] == list(range(nodes * per_node))
    assert {(p.world, p.local_world, p.nodes) for p in ranks} == {(nodes * per_node, per_node, nodes)}
    assert len({place.node for place in ranks}) == nodes
    for place in ranks:
        assert place.rank == place.node_rank * per_node + place.local_rank
        assert place.node == ranks[place.node_rank * per_node].node
        bundle = settled.groups[place.group][place.bundle]
        assert bundle.node == place.node
        if gpus:
            assert bundle.gpu_ids == (place.node_devices[place.local_rank],)
            assert list(place.node_devices) == sorted(place.node_devices, key=int)
        else:
            assert place.node_devices == ()
