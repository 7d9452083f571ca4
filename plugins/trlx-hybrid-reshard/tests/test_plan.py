"""Byte counts: against an oracle on real arrays, against each other, and against figures known by hand."""

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from trlx_hybrid.errors import ConfigError
from trlx_hybrid_reshard.layouts import MeshLayout, Model, Parameter
from trlx_hybrid_reshard.plan import plan
from trlx_hybrid_reshard.planner.architectures import SHAPES, describe

sys.path.insert(0, str(Path(__file__).parent))
from worlds import Permuted, held, reshards


def elements(array):
    """The numbers of the elements a rank holds, padding left out; None is nothing."""
    return set() if array is None else set(array.ravel().tolist()) - {-1}


def plans(model, source, target, ranks_per_node=0):
    return [plan(model, source, target, r, ranks_per_node=ranks_per_node) for r in range(source.world)]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(reshards())
def test_no_byte_more_than_the_floor_in_either_direction(reshard):
    model, train, rollout, node = reshard
    for source, target in ((train, rollout), (rollout, train)):
        for rank, one in enumerate(plans(model, source, target, node)):
            for c in one.classes:
                has, wants = (held(layout, c.parameter, rank) for layout in (source, target))
                missing = len(elements(wants) - elements(has)) * model.itemsize
                assert c.receives.sum() == missing == c.floor
                assert c.local == len(elements(wants) & elements(has)) * model.itemsize
                assert c.zero == (0 if wants is None else int((wants == -1).sum())) * model.itemsize


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(reshards())
def test_both_ends_of_a_transfer_find_the_same_bytes(reshard):
    model, train, rollout, node = reshard
    for source, target in ((train, rollout), (rollout, train)):
        made = plans(model, source, target, node)
        for c in range(len(model.parameters)):
            received = np.array([one.classes[c].receives for one in made])
            sent = np.array([one.classes[c].sends for one in made])
            assert (received == sent.T).all()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(reshards())
def test_a_byte_crosses_nodes_only_if_its_own_node_has_it_not(reshard):
    model, train, rollout, node = reshard
    for source, target in ((train, rollout), (rollout, train)):
        for one in plans(model, source, target, node):
            home = np.flatnonzero(one.node == one.node[one.rank])
            for c in one.classes:
                on_node = set().union(*(elements(held(source, c.parameter, int(r))) for r in home))
                away = elements(held(target, c.parameter, one.rank)) - on_node
                assert c.receives[one.node != one.node[one.rank]].sum() == len(away) * model.itemsize


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(reshards())
def test_send_floors_add_up_to_what_is_received(reshard):
    model, train, rollout, node = reshard
    made = plans(model, train, rollout, node)
    slack = len(model.parameters) * train.world * model.itemsize  # shares are rounded down, once per class and rank
    total = sum(one.floor_bytes for one in made)
    assert total - slack <= sum(one.send_floor_bytes for one in made) <= total


FIGURES = [
    ("as is (4,2)", {"fsdp": 4}, 2, 7.051),
    ("permuted (4,2)", {"fsdp": 4, "mesh": (0, 2, 1, 3)}, 2, 4.373),
    (
        "permuted and row-parallel weights on dimension 1",
        {
            "fsdp": 4,
            "mesh": (0, 2, 1, 3),
            "shard_dims": tuple(
                (f"model.layers.{{}}.{name}.weight", 1) for name in ("self_attn.o_proj", "mlp.down_proj")
            ),
        },
        2,
        3.808,
    ),
    ("(4,4)", {"fsdp": 4}, 4, 0.848),
    ("(4,1)", {"fsdp": 4}, 1, 11.423),
    ("(2,2)", {"fsdp": 2}, 2, 1.131),
]


def layout_of(**given):
    return (Permuted if "mesh" in given else MeshLayout)(**given)


@pytest.mark.parametrize(("train", "tp", "gigabytes"), [f[1:] for f in FIGURES], ids=[f[0] for f in FIGURES])
def test_the_worst_rank_of_a_7b_model(train, tp, gigabytes):
    model, layout = describe(SHAPES["7b"]), layout_of(**train)
    made = plans(model, layout, MeshLayout(tp=tp).served().over(layout.world))
    assert max(int(one.receives.sum()) for one in made) / 1e9 == pytest.approx(gigabytes, abs=5e-4)


def test_the_best_layout_is_at_the_dense_floor():
    model = describe(SHAPES["7b"])
    layout = layout_of(**FIGURES[2][1])
    worst = max(int(one.receives.sum()) for one in plans(model, layout, MeshLayout(tp=2).served().over(4)))
    assert worst == pytest.approx((1 / 2 - 1 / 4) * model.bytes, rel=1e-3)  # norms are on both TP ranks


def test_experts_have_no_overlap_to_save():
    model = describe(SHAPES["30b-a3b"])
    made = plans(model, MeshLayout(fsdp=4), MeshLayout(tp=4).served())
    for one in made:
        experts = [c for c in one.classes if c.parameter.kind == "expert"]
        size = sum(c.parameter.elements for c in experts) * model.itemsize
        assert sum(int(c.receives.sum()) for c in experts) == size * 3 // 16  # (1 − 1/4) / 4


def test_expert_parallel_engines_take_the_shards_as_they_are():
    model = describe(SHAPES["30b-a3b"])
    one = plan(model, MeshLayout(fsdp=4), MeshLayout(tp=4, ep=4).served(), 1)
    assert sum(c.floor for c in one.classes if c.parameter.kind == "expert") == 0


def test_replicas_share_the_sending():
    model = describe(SHAPES["1.5b"])
    made = plans(model, MeshLayout(dp=4, fsdp=2), MeshLayout(tp=2).served().over(8))
    sent = [int(one.sends.sum()) for one in made]
    assert max(sent) - min(sent) < 0.02 * max(sent)
    fair = [one.send_floor_bytes for one in made]
    assert max(abs(a - b) for a, b in zip(sent, fair)) < 0.02 * max(sent)


def test_replicas_share_what_only_one_layer_has():
    """Eight copies on one node, each asked by its neighbours: the queue decides, since no layer follows."""
    embedding = Parameter(name="embed", shape=(64, 4), tp_dim=0)
    model = Model(name="one", parameters=(embedding,))
    sent = [int(one.sends.sum()) for one in plans(model, MeshLayout(dp=8, fsdp=2), MeshLayout(dp=16))]
    assert max(sent) == min(sent) == 64 * 4 * 2 // 2


def test_ddp_moves_nothing():
    one = plan(describe(SHAPES["7b"]), MeshLayout(dp=4), MeshLayout(tp=4).served(), 2)
    assert (one.receives.sum(), one.sends.sum()) == (0, 0)
    assert one.totals()["local_copy_bytes"] > 0


def test_pipeline_stages_receive_only_their_layers():
    model = describe(SHAPES["70b"])
    first, last = (plan(model, MeshLayout(fsdp=8), MeshLayout(tp=4, pp=2).served(), r) for r in (0, 7))
    named = {c.parameter.name: c for c in first.classes}
    assert named["lm_head.weight"].floor == 0 < named["model.embed_tokens.weight"].floor
    assert {c.parameter.name: c for c in last.classes}["lm_head.weight"].floor > 0
    assert first.floor_bytes + first.totals()["local_copy_bytes"] == pytest.approx(model.bytes / 8, rel=0.01)


def test_a_tied_embedding_goes_to_both_ends_of_the_pipeline():
    model = describe(SHAPES["0.6b"])
    made = plans(model, MeshLayout(fsdp=3), MeshLayout(pp=3).served())
    sizes = [one.classes[0].floor + one.classes[0].local for one in made]
    assert sizes == [151936 * 1024 * 2, 0, 151936 * 1024 * 2]


def test_layouts_of_other_worlds_are_refused_with_the_way_out():
    with pytest.raises(ConfigError, match=r"fsdp=8 takes 8, tp=4 takes 4\..*more replicas with dp"):
        plan(describe(SHAPES["7b"]), MeshLayout(fsdp=8), MeshLayout(tp=4), 0)


def test_a_source_that_lost_bytes_is_named():
    class Partial(MeshLayout):
        """Half of the rows are nowhere."""

        def sharding(self, parameter):
            sharding = MeshLayout.sharding(self, parameter)
            sharding.parts[1][0] = 0
            return sharding

    model = Model(name="one", parameters=(Parameter(name="weight", shape=(4, 2)),))
    message = r"Rank 1 lacks 4 elements of weight, and the other ranks hold only 0 of them"
    with pytest.raises(ConfigError, match=message):
        plan(model, Partial(fsdp=2), MeshLayout(dp=2), 1)
