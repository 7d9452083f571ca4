"""Attention of packed rows: each row's own, and anything else is sdpa's."""

from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from trlx_hybrid_training.attention import attention, has_kernel

LENGTHS = (5, 1, 9)
LAYER = SimpleNamespace(is_causal=True, num_key_value_groups=2)
ENDS = {"segments": LENGTHS, "cu_seq_lens_q": torch.tensor([0, 5, 6, 15], dtype=torch.int32), "max_length_q": 9}


def tensors(dtype=torch.float32, device="cpu"):
    torch.manual_seed(0)
    shapes = [(1, heads, sum(LENGTHS), 32) for heads in (4, 2, 2)]
    return [torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes]


def alone(query, key, value):
    """Each row for itself."""
    rows = zip(*(t.split(LENGTHS, dim=2) for t in (query, key, value)), strict=True)
    return torch.cat([sdpa_attention_forward(LAYER, q, k, v, None, scaling=0.2)[0] for q, k, v in rows], dim=1)


def difference(dtype, device="cpu"):
    """Of outputs and gradients, relative to their size."""
    ends = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in ENDS.items()}
    results = []
    for compute in (alone, lambda *qkv: attention(LAYER, *qkv, None, scaling=0.2, sliding_window=None, **ends)[0]):
        given = tensors(dtype, device)
        out = compute(*given)
        out.float().square().sum().backward()
        results.append([out, *(t.grad for t in given)])
    pairs = [(a.detach(), b.detach()) for a, b in zip(*results, strict=True)]
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)


def test_rows_attend_to_themselves():
    assert difference(torch.float32) < 1e-6


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch's kernel for ragged rows runs on GPUs")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_kernel_for_ragged_rows(dtype):
    assert has_kernel(*tensors(dtype, "cuda")[:2]) == (dtype is not torch.float32)
    assert difference(dtype, "cuda") < {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-5}[dtype]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch's kernel for ragged rows runs on GPUs")
def test_autocast_decides_what_the_kernel_computes_in():
    ends = {k: v.to("cuda") if isinstance(v, torch.Tensor) else v for k, v in ENDS.items()}
    with torch.autocast("cuda", dtype=torch.bfloat16):
        given = tensors(torch.float32, "cuda")
        assert has_kernel(*given[:2])
        out, _ = attention(LAYER, *given, None, scaling=0.2, **ends)
    assert out.dtype is torch.bfloat16


def test_rows_that_are_not_packed_are_sdpas():
    given = [t.detach() for t in tensors()]
    mask = torch.ones(1, 1, 15, 15, dtype=torch.bool).tril()
    assert torch.equal(attention(LAYER, *given, mask)[0], sdpa_attention_forward(LAYER, *given, mask)[0])
    assert torch.equal(attention(LAYER, *given, None)[0], sdpa_attention_forward(LAYER, *given, None)[0])


@pytest.mark.parametrize("name", ["position_bias", "s_aux", "sliding_window", "softcap"])
def test_what_a_layer_asks_for_beside_is_refused(name):
    with pytest.raises(NotImplementedError, match=name):
        attention(LAYER, *tensors(), None, **ENDS, **{name: 1.0})
    with pytest.raises(NotImplementedError, match="not causal"):
        attention(SimpleNamespace(is_causal=False), *tensors(), None, **ENDS)
