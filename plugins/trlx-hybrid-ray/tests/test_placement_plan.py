"""Plans of where workers go, without Ray."""

from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from trlx_hybrid.errors import ConfigError
from trlx_hybrid_ray.errors import PlacementError
from trlx_hybrid_ray.node import Node
from trlx_hybrid_ray.placement import Placement
from trlx_hybrid_ray.placement_map import drawn
from trlx_hybrid_ray.refusal import Refusal
from trlx_hybrid_ray.resolve import resolve
from trlx_hybrid_ray.role import Role


def node(number, *, gpus=4.0, cpus=64.0, free_gpus=None, free_cpus=None):
    return Node(
        id=f"{number:02x}" * 14,
        address=f"10.0.0.{number}",
        cpus=cpus,
        gpus=gpus,
        free_cpus=cpus if free_cpus is None else free_cpus,
        free_gpus=gpus if free_gpus is None else free_gpus,
    )


def landed(placement, *, backwards=False):
    """The same with GPU ids as a node might deal them out: each bundle the lowest or the highest that is left."""
    left = {n.id: list(range(int(n.gpus) - 1, -1, -1)) for n in placement.nodes}
    given = []
    for group in placement.groups:
        ids = []
        for bundle in group:
            count = -int(-bundle.gpus // 1)
            ids.append([str(left[bundle.node].pop(0 if backwards else -1)) for _ in range(count)])
        given.append(ids)
    return placement.settled(given)


def placed(nodes, *roles, backwards=False):
    found = resolve(nodes, roles)
    assert isinstance(found, Placement), found.report()
    return landed(found, backwards=backwards)


def homes(placement, role):
    """(last number of the node's address, GPU ids) by rank."""
    return [(int(s.address.split(".")[-1]), ",".join(s.gpu_ids)) for s in placement.of(role)]


TRAINERS = Role(name="trainer", replicas=8, gpus=1)
ENGINES = Role(name="engine", replicas=2, size=4, gpus=1)


def test_the_run_of_the_issue_two_nodes_of_four_gpus():
    """2 nodes × 4 GPUs: engines of TP=4 on the trainers' GPUs, a reward model on half a GPU, 32 environment CPUs."""
    nodes = [node(1, gpus=5), node(2, gpus=5)]
    placement = placed(
        nodes,
        TRAINERS,
        replace(ENGINES, colocate_with="trainer"),
        Role(name="reward", gpus=0.5),
        Role(name="environment", replicas=32, strategy="spread"),
    )
    assert homes(placement, "trainer") == [(n, str(g)) for n in (1, 2) for g in range(4)]
    assert homes(placement, "engine") == homes(placement, "trainer")
    assert Counter(n for n, _ in homes(placement, "environment")) == {1: 16, 2: 16}
    assert homes(placement, "reward") == [(1, "4")]
    assert len(placement.groups) == 2
    assert [s.gpus for s in placement.of("trainer")] == [s.gpus for s in placement.of("engine")] == [0.5] * 8


@pytest.mark.parametrize("backwards", [False, True])
def test_ranks_follow_node_and_gpu_id_whatever_gpus_ray_gives(backwards):
    placement = placed([node(2), node(1)], TRAINERS, backwards=backwards)
    assert homes(placement, "trainer") == [(n, str(g)) for n in (1, 2) for g in range(4)]
    engines = placed([node(2), node(1)], ENGINES, backwards=backwards)
    assert homes(engines, "engine") == [(n, str(g)) for n in (1, 2) for g in range(4)]


def test_gpu_ten_comes_after_gpu_nine():
    placement = placed([node(1, gpus=12)], Role(name="trainer", replicas=12, gpus=1), backwards=True)
    assert [g for _, g in homes(placement, "trainer")] == [str(g) for g in range(12)]


def test_two_halves_share_a_gpu_and_a_third_takes_another():
    placement = placed([node(1)], Role(name="reward", replicas=3, gpus=0.5))
    assert [len(group) for group in placement.groups] == [2]
    assert [bundle.gpus for bundle in placement.groups[0]] == [1.0, 0.5]
    assert [slot.bundle for slot in placement.of("reward")] == [0, 0, 1]


def test_a_half_takes_what_somebody_else_left_of_a_gpu():
    placement = placed([node(1, free_gpus=1.5)], Role(name="trainer", gpus=1), Role(name="reward", gpus=0.5))
    assert [bundle.gpus for bundle in placement.groups[0]] == [1.0, 0.5]
    assert isinstance(resolve([node(1, free_gpus=1.5)], [Role(name="trainer", replicas=2, gpus=0.75)]), Refusal)


def test_shares_of_a_gpu_never_add_up_to_more_than_it():
    roles = [Role(name="trainer", gpus=1)] + [
        Role(name=f"guest{i}", gpus=g, colocate_with="trainer") for i, g in enumerate((1, 0.5, 0.3))
    ]
    placement = placed([node(1)], *roles)
    shares = [slot.gpus for slot in placement.slots]
    assert 0.999 <= sum(shares) <= 1
    assert shares[0] == shares[1] > shares[2] > shares[3] > 0


def test_an_engine_is_not_cut_although_its_trainers_could_be():
    """6 free GPUs on each node: 8 trainers alone would be packed 6 + 2; with engines of 4 on them they go 4 + 4."""
    nodes = [node(1, gpus=6), node(2, gpus=6)]
    assert Counter(n for n, _ in homes(placed(nodes, TRAINERS), "trainer")) == {1: 6, 2: 2}
    placement = placed(nodes, TRAINERS, replace(ENGINES, colocate_with="trainer"))
    assert Counter(n for n, _ in homes(placement, "trainer")) == {1: 4, 2: 4}


def test_a_refusal_names_who_is_short_and_by_how_much():
    found = resolve([node(1), node(2, free_gpus=1)], [TRAINERS])
    assert "8 GPUs are asked for, 5 of 8 are free" in found.reason
    assert not found.hopeless
    found = resolve([node(1), node(2)], [replace(TRAINERS, replicas=9)])
    assert "9 GPUs are asked for, the cluster has 8" in found.reason
    assert found.hopeless
    found = resolve([node(1, free_cpus=3)], [Role(name="environment", replicas=4)])
    assert "4 CPUs are asked for, 3 of 64 are free" in found.reason
    found = resolve([node(1), node(2)], [replace(ENGINES, replicas=1, size=8)])
    assert "One replica of engine takes 8 GPUs" in found.reason
    assert "may_span_nodes" in found.reason
    assert found.hopeless
    found = resolve([node(1, free_gpus=3), node(2, free_gpus=3)], [replace(ENGINES, replicas=1)])
    assert "not together" in found.reason
    assert not found.hopeless
    found = resolve([node(1), node(2)], [replace(TRAINERS, replicas=5, strategy="strict_pack")])
    assert "strategy='strict_pack' of role 'trainer'" in found.reason
    found = resolve([node(1)], [replace(TRAINERS, replicas=1, node="10.0.0.7")])
    assert "'10.0.0.7', and the cluster has no such node: 10.0.0.1 (010101)" in found.reason
    assert "no nodes" in resolve([], [TRAINERS]).reason


def test_the_table_of_a_refusal_accounts_for_every_gpu():
    from trlx_hybrid_ray.claims import Claim

    nodes = [node(1, free_gpus=1, free_cpus=60), node(2)]
    found = resolve(nodes, [TRAINERS, replace(ENGINES, colocate_with="trainer")])
    report = found.report([Claim("run 7f (pid 1 of u@h), trainer", nodes[0].id, 2.0, 2.0)])
    rows = [" ".join(line.split()) for line in report.splitlines()]
    assert "trainer 8 8 8" in rows
    assert "engine 2 × 4 with trainer 0 8" in rows
    assert "in all 8 16" in rows
    held = "run 7f (pid 1 of u@h), trainer: 2 GPUs, 2 CPUs; unknown holder: 1 GPU, 2 CPUs"
    assert f"10.0.0.1 (010101) 1 of 4 60 of 64 {held}" in rows
    assert "10.0.0.2 (020202) 4 of 4 64 of 64 nobody" in rows


def test_a_replica_spans_nodes_only_if_asked_and_only_if_it_must():
    big = replace(ENGINES, replicas=1, size=6)
    assert isinstance(resolve([node(1), node(2)], [big]), Refusal)
    placement = placed([node(1), node(2)], replace(big, may_span_nodes=True))
    assert Counter(n for n, _ in homes(placement, "engine")) == {1: 4, 2: 2}
    assert len({slot.group for slot in placement.slots}) == 1, "vLLM's Ray executor takes one placement group"
    assert placement.engine("engine", 0).bundles == (0, 1, 2, 3, 4, 5)
    assert "over several nodes, as asked: engine 0" in drawn(placement)
    roomy = placed([node(1), node(2, gpus=8)], replace(big, may_span_nodes=True))
    assert {n for n, _ in homes(roomy, "engine")} == {2}


def test_the_engine_of_a_replica_is_built_on_the_node_of_its_workers():
    placement = placed([node(1), node(2)], TRAINERS, replace(ENGINES, colocate_with="trainer"), backwards=True)
    second = placement.engine("engine", 1)
    workers = placement.of("engine")[4:]
    assert second.bundles == tuple(slot.bundle for slot in workers)
    assert second.environment["VLLM_RAY_BUNDLE_INDICES"] == ",".join(map(str, second.bundles))
    assert second.environment["VLLM_RAY_PER_WORKER_GPUS"] == "0.5"
    assert {placement.groups[second.group][b].node for b in second.bundles} == {node(2).id}
    with pytest.raises(ConfigError, match="no replica 2"):
        placement.engine("engine", 2)
    with pytest.raises(ConfigError, match=r"No role 'engines' was placed\. Roles: trainer, engine"):
        placement.of("engines")


def test_an_engine_over_several_placement_groups_is_no_engine_for_ray():
    spanning = replace(ENGINES, replicas=1, size=8, colocate_with="trainer", may_span_nodes=True)
    placement = placed([node(1), node(2)], TRAINERS, spanning)
    with pytest.raises(PlacementError, match="several nodes' placement groups"):
        placement.engine("engine", 0)


def test_strategies():
    nodes = [node(1), node(2), node(3)]
    where = {
        strategy: Counter(n for n, _ in homes(placed(nodes, Role(name="r", replicas=3, strategy=strategy)), "r"))
        for strategy in ("pack", "spread", "strict_pack", "strict_spread")
    }
    assert where["pack"] == where["strict_pack"] == {1: 3}
    assert where["spread"] == where["strict_spread"] == {1: 1, 2: 1, 3: 1}
    tight = [node(1), node(2, free_gpus=2), node(3)]
    assert {n for n, _ in homes(placed(tight, Role(name="r", replicas=2, gpus=1)), "r")} == {2}
    asked = Role(name="r", replicas=2, node="10.0.0.3")
    assert {n for n, _ in homes(placed(nodes, asked), "r")} == {3}
    assert {n for n, _ in homes(placed(nodes, replace(asked, node="030303")), "r")} == {3}


def test_settling_refuses_gpus_that_cannot_be():
    placement = resolve([node(1)], [replace(TRAINERS, replicas=2)])
    with pytest.raises(PlacementError, match="reserves 1 GPUs, and Ray gave it \\[\\]"):
        placement.settled([[["0"], []]])
    with pytest.raises(PlacementError, match="GPU 3 of node 010101 to two bundles"):
        placement.settled([[["3"], ["3"]]])


def test_the_map_shows_every_gpu_and_who_lives_there():
    placement = placed(
        [node(1, gpus=5), node(2, gpus=5)],
        TRAINERS,
        replace(ENGINES, colocate_with="trainer"),
        Role(name="reward", gpus=0.5),
        Role(name="environment", replicas=4, strategy="spread"),
    )
    assert drawn(placement).splitlines() == [
        "placement",
        "  10.0.0.1 (010101)  4.5 of 5 GPUs, 11 of 64 CPUs",
        "    GPU 0    trainer 0, engine 0.0",
        "    GPU 1    trainer 1, engine 0.1",
        "    GPU 2    trainer 2, engine 0.2",
        "    GPU 3    trainer 3, engine 0.3",
        "    GPU 4 ×0.5 reward 0",
        "    CPU      environment 0-1",
        "  10.0.0.2 (020202)  4 of 5 GPUs, 10 of 64 CPUs",
        "    GPU 0    trainer 4, engine 1.0",
        "    GPU 1    trainer 5, engine 1.1",
        "    GPU 2    trainer 6, engine 1.2",
        "    GPU 3    trainer 7, engine 1.3",
        "    CPU      environment 2-3",
    ]


WRONG = [
    ([{"name": "r", "replicas": 0}], "replicas=0 of size=1"),
    ([{"name": "r", "gpus": 1.5}], "above 1, Ray gives whole GPUs only"),
    ([{"name": "r", "gpus": -1}], "must not be negative"),
    ([{"name": "r", "cpus": 0}], "asks for no CPU and no GPU"),
    ([{"name": "r", "strategy": "even"}], "choose one of pack"),
    ([{"name": "r"}, {"name": "r"}], "Two roles are called 'r'"),
    ([{"name": "trainer"}, {"name": "e", "colocate_with": "trainr"}], "Did you mean 'trainer'"),
    ([{"name": "a"}, {"name": "b", "colocate_with": "a"}, {"name": "c", "colocate_with": "b"}], "name 'a' in both"),
    (
        [{"name": "a"}, {"name": "b", "replicas": 2, "colocate_with": "a"}],
        "has 2 workers, 'a' that it is colocated with 1",
    ),
    ([{"name": "a"}, {"name": "b", "gpus": 1, "colocate_with": "a"}], "cannot share bundles of 0 GPUs"),
    ([{"name": "a", "gpus": 2}, {"name": "b", "gpus": 1, "colocate_with": "a"}], "both take up to one GPU"),
    ([{"name": "a"}, {"name": "b", "colocate_with": "a", "node": "n"}], "give node= and strategy= to that one"),
    ([{"name": "a", "gpus": 0.5, "may_span_nodes": True}], "may_span_nodes"),
    ([], "No role"),
]


@pytest.mark.parametrize(("roles", "message"), WRONG, ids=[w[1][:30] for w in WRONG])
def test_roles_that_no_cluster_could_satisfy(roles, message):
    with pytest.raises(ConfigError, match=message):
        resolve([node(1)], [Role(**role) for role in roles])


fractions = st.sampled_from([0, 0, 1, 1, 1, 2, 0.5, 0.25])
sizes = st.sampled_from([1, 1, 2, 4])
strategies = st.sampled_from(["pack", "spread"])


@st.composite
def requests(draw):
    """(nodes, roles) of which about half fit."""
    nodes = []
    for number in range(draw(st.integers(1, 4))):
        gpus, cpus = draw(st.integers(0, 8)), draw(st.integers(2, 16))
        free = min(gpus, draw(st.sampled_from([gpus, gpus, gpus / 2, 1.5])))
        idle = draw(st.sampled_from([cpus, cpus, cpus, cpus // 2, 1, 0]))
        nodes.append(node(number + 1, gpus=gpus, cpus=cpus, free_gpus=free, free_cpus=idle))
    roles = []
    for number in range(draw(st.integers(1, 3))):
        gpus = draw(fractions)
        given = {"name": f"role{number}", "replicas": draw(st.sampled_from([1, 1, 2, 3])), "size": draw(sizes)}
        host = draw(st.sampled_from([None, *(r for r in roles if r.colocate_with is None and r.gpus in (0, 1))]))
        if host is not None and given["replicas"] * given["size"] <= host.workers:
            roles.append(Role(colocate_with=host.name, gpus=host.gpus, cpus=draw(st.sampled_from([0, 1])), **given))
        else:
            span = draw(st.booleans()) and gpus == int(gpus)
            strategy = draw(st.sampled_from(["pack", "pack", "spread", "strict_pack", "strict_spread"]))
            roles.append(Role(gpus=gpus, cpus=1, strategy=strategy, may_span_nodes=span, **given))
    return nodes, roles


@settings(max_examples=400, deadline=None)
@given(requests())
def test_a_placement_keeps_every_promise(request):
    nodes, roles = request
    found = resolve(nodes, roles)
    assume(isinstance(found, Placement))
    by_role = {role.name: role for role in roles}
    assert [(s.role, s.rank) for s in found.slots] == [(r.name, rank) for r in roles for rank in range(r.workers)]
    free = {n.id: n for n in nodes}
    for what in ("cpus", "gpus"):  # never more than is free
        used = Counter()
        for group in found.groups:
            for bundle in group:
                used[bundle.node] += getattr(bundle, what)
        assert all(amount <= getattr(free[n], f"free_{what}") + 1e-6 for n, amount in used.items())
    tenants = defaultdict(list)
    for slot in found.slots:
        assert found.groups[slot.group][slot.bundle].node == slot.node
        tenants[slot.group, slot.bundle].append(slot)
    assert len(tenants) == sum(map(len, found.groups))
    for (group, index), living in tenants.items():
        bundle = found.groups[group][index]
        assert sum(s.gpus for s in living) <= bundle.gpus + 1e-9
        assert sum(s.cpus for s in living) == pytest.approx(bundle.cpus)
        assert bundle.gpus <= 1 or bundle.gpus == int(bundle.gpus)
    for role in roles:
        slots = found.of(role.name)
        nodes_of = [{s.node for s in slots if s.replica == i} for i in range(role.replicas)]
        assert role.may_span_nodes or all(len(n) == 1 for n in nodes_of)
        if role.strategy == "strict_pack":
            assert len(set().union(*nodes_of)) == 1
        if role.strategy == "strict_spread" and not any(r.colocate_with == role.name for r in roles):
            assert role.may_span_nodes or len(set().union(*nodes_of)) == role.replicas
        if role.colocate_with:
            hosts = found.of(role.colocate_with)
            assert all((s.group, s.bundle) == (hosts[s.rank].group, hosts[s.rank].bundle) for s in slots)
        elif not any(r.colocate_with == role.name for r in by_role.values()):
            order = [found.nodes.index(free[s.node]) for s in slots]
            assert order == sorted(order)


@settings(max_examples=100, deadline=None)
@given(requests(), st.randoms())
def test_shuffled_nodes_change_nothing(request, random):
    nodes, roles = request
    shuffled = random.sample(nodes, len(nodes))
    assert resolve(shuffled, roles) == resolve(nodes, roles)


def possible(free, blocks):
    """Whether blocks of (GPUs, CPUs) fit into nodes of (GPUs, CPUs), by trying everything."""
    if not blocks:
        return True
    (gpus, cpus), *others = blocks
    for i, (g, c) in enumerate(free):
        if g >= gpus and c >= cpus and possible([*free[:i], (g - gpus, c - cpus), *free[i + 1 :]], others):
            return True
    return False


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), min_size=1, max_size=3),
    st.lists(
        st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 3]), st.sampled_from([0, 1, 2]), strategies),
        min_size=1,
        max_size=3,
    ),
)
def test_what_fits_is_never_refused(free, asked):
    nodes = [node(i + 1, gpus=g, cpus=c) for i, (g, c) in enumerate(free)]
    roles = [
        Role(name=f"role{i}", replicas=replicas, size=size, gpus=gpus, cpus=1, strategy=strategy)
        for i, (replicas, size, gpus, strategy) in enumerate(asked)
    ]
    blocks = [(size * gpus, size) for replicas, size, gpus, _ in asked for _ in range(replicas)]
    assert isinstance(resolve(nodes, roles), Placement) == possible(free, sorted(blocks, reverse=True))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("free", [(8, 8), (4, 4, 4, 4), (7, 1, 5, 3), (16,), (6, 6)])
def test_every_small_cluster_of_whole_gpus(count, size, free):
    """Exhaustive: engines fit exactly when the nodes have room for them one by one, and none is cut."""
    nodes = [node(i + 1, gpus=g) for i, g in enumerate(free)]
    found = resolve(nodes, [Role(name="engine", replicas=count, size=size, gpus=1)])
    assert isinstance(found, Placement) == (count <= sum(g // size for g in free))
    if isinstance(found, Placement):
        assert all(len({s.node for s in found.slots if s.replica == i}) == 1 for i in range(count))


def test_more_nodes_than_pythons_stack_is_deep():
    nodes = [replace(node(1, gpus=8), id=f"{i:056x}", address=f"10.1.{i // 250}.{i % 250}") for i in range(1200)]
    placement = resolve(nodes, [Role(name="engine", replicas=1200, size=8, gpus=1)])
    assert len(placement.groups) == 1200
