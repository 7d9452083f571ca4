"""Advice to a running job: only what moves less, in figures that the tool gives too."""

import pytest
from trlx_hybrid_reshard.layouts import MeshLayout, Parameter
from trlx_hybrid_reshard.plan import plan
from trlx_hybrid_reshard.planner.advice import ALWAYS, advice_for_run
from trlx_hybrid_reshard.planner.architectures import SHAPES, describe

LARGE = Parameter(name="large", shape=(4096, 64), tp_dim=0)


def said(shape, train, rollout):
    """As the weight sync asks: by where one large parameter lies."""
    return advice_for_run(SHAPES[shape], train.sharding(LARGE), rollout.sharding(LARGE), 2)


def received(shape, train, rollout):
    model = describe(SHAPES[shape])
    return max(int(plan(model, train, rollout.served(), rank).receives.sum()) for rank in range(train.world)) / 1e9


def test_a_wider_engine_and_other_shard_dimensions_with_their_figures():
    text = said("7b", MeshLayout(fsdp=4), MeshLayout(dp=2, tp=2))
    wider = received("7b", MeshLayout(fsdp=4), MeshLayout(tp=4))
    now = received("7b", MeshLayout(fsdp=4), MeshLayout(dp=2, tp=2))
    assert (
        f"An engine of tp=4 would leave the rank that receives the most {wider:.3g} GB, instead of {now:.3g} GB."
        in text
    )
    assert text.endswith(ALWAYS)


def test_sizes_that_do_not_divide_the_model_are_no_advice():
    """28 heads: of the divisors of 8, tp=8 is not to be had."""
    text = said("7b", MeshLayout(fsdp=8), MeshLayout(dp=8))
    assert "tp=4" in text
    assert "tp=8" not in text


@pytest.mark.parametrize("train", [MeshLayout(fsdp=4), MeshLayout(dp=4)])
def test_where_nothing_helps_nothing_is_promised(train):
    """At tp=4 of 4 with ideal shards, and where every rank has all of the model."""
    shape = "1.5b" if train.dp == 4 else "8b"
    text = said(shape, train, MeshLayout(tp=4))
    assert "engine of" not in text
    assert text.endswith(ALWAYS)


def test_an_unknown_architecture_gets_the_general_advice():
    whole = MeshLayout(fsdp=2).sharding(LARGE)
    assert advice_for_run({"model_type": "novel"}, whole, whole, 2) == ALWAYS
