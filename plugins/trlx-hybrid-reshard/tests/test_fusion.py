"""Places in fused parameters."""

from trlx_hybrid_reshard.fusion import fused_rows
from trlx_hybrid_reshard.layouts import Layout
from trlx_hybrid_reshard.planner.architectures import SHAPES, describe


def places(shape, tp, part):
    found = fused_rows(describe(SHAPES[shape]), Layout(tp=tp), tp - 1)
    return [
        (place.start, place.rows) for name, place in found.items() if part in place.engine and name.endswith("weight")
    ]


def test_query_key_and_value_follow_each_other():
    # 28 query heads and 4 key-value heads of 128: 14 and 2 on each of two ranks, 7 and 1 on each of four.
    assert places("7b", 2, "qkv") == [(0, 1792), (1792, 256), (2048, 256)]
    assert places("7b", 4, "qkv") == [(0, 896), (896, 128), (1024, 128)]


def test_a_shared_key_value_head_takes_its_full_size():
    assert places("70b", 16, "qkv") == [(0, 512), (512, 128), (640, 128)]


def test_gate_lies_above_up():
    assert places("7b", 2, "gate_up") == [(0, 9472), (9472, 9472)]


def test_biases_are_fused_like_their_weights():
    found = fused_rows(describe(SHAPES["7b"]), Layout(tp=2), 0)
    bias, weight = (found[f"model.layers.{{}}.self_attn.v_proj.{suffix}"] for suffix in ("bias", "weight"))
    assert (bias.start, bias.rows) == (weight.start, weight.rows)
    assert bias.engine.endswith("qkv_proj.bias")
