"""Attention of packed rows: each row's own, and anything else is sdpa's."""

from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from trlx_hybrid.testing.models import tiny_model
from trlx_hybrid_training import attention as packed_attention
from trlx_hybrid_training import packing
from trlx_hybrid_training.attention import _varlen, attention, has_kernel
from trlx_hybrid_training.whole_rows import whole_rows

LAYER = SimpleNamespace(is_causal=True, num_key_value_groups=2)
ALONE = {"segments": (5, 1, 9), "prefixes": ((0, 0), (1, 0), (2, 0))}
SHARED = {"segments": (9, 3, 4, 1, 6, 70), "prefixes": ((0, 0), (0, 5), (2, 0), (0, 5), (2, 3), (0, 5))}
LATE = {"segments": (9, 140), "prefixes": ((0, 0), (0, 5))}  # more queries than numbers in one of them
ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch's kernel for ragged rows runs on GPUs")


def packed(segments, prefixes, device="cpu"):
    """What tells the layer of these segments."""
    whole = [own + prefix for own, (_, prefix) in zip(segments, prefixes, strict=True)]
    ends = [torch.tensor([0, *accumulate(n)], dtype=torch.int32, device=device) for n in (segments, whole)]
    return {
        "segments": segments,
        "prefixes": prefixes,
        "cu_seq_lens_q": ends[0],
        "cu_seq_lens_k": ends[1],
        "max_length_q": max(segments),
        "max_length_k": max(whole),
    }


def tensors(case, dtype=torch.float32, device="cpu"):
    torch.manual_seed(0)
    shapes = [(1, heads, sum(case["segments"]), 32) for heads in (4, 2, 2)]
    return [torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes]


def alone(query, key, value, segments, prefixes, window=None):
    """Each row for itself, with a mask that says which of its keys come first, and which are too far away."""
    queries, keys, values = (tensor.split(segments, dim=2) for tensor in (query, key, value))
    outs = []
    for row, (first, prefix) in enumerate(prefixes):
        k, v = (torch.cat([of[first][:, :, :prefix], of[row]], dim=2) for of in (keys, values))
        mask = torch.ones(segments[row], segments[row] + prefix, dtype=torch.bool, device=k.device).tril(prefix)
        mask = mask if window is None else mask.triu(prefix + 1 - window)
        outs.append(sdpa_attention_forward(LAYER, queries[row], k, v, mask[None, None], scaling=0.2)[0])
    return torch.cat(outs, dim=1)


def difference(case, dtype, device="cpu", window=None):
    """Of outputs and gradients, relative to their size."""
    given = packed(**case, device=device)
    results = []
    for compute in (
        lambda *qkv: alone(*qkv, **case, window=window),
        lambda *qkv: attention(LAYER, *qkv, None, scaling=0.2, sliding_window=window, **given)[0],
    ):
        qkv = tensors(case, dtype, device)
        out = compute(*qkv)
        out.float().square().sum().backward()
        results.append([out, *(t.grad for t in qkv)])
    pairs = [(a.detach(), b.detach()) for a, b in zip(*results, strict=True)]
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)


def windows(*sizes):
    return pytest.mark.parametrize("window", sizes, ids=lambda window: f"window {window}")


@windows(None, 1, 4, 100)
@pytest.mark.parametrize("case", [ALONE, SHARED, LATE], ids=["alone", "shared", "late"])
def test_rows_attend_to_themselves_and_to_the_prefix_that_they_share(case, window):
    assert difference(case, torch.float32, window=window) < 1e-6


@pytest.mark.parametrize(("case", "queries"), [(SHARED, [9, 3, 4, 1, 6, 70]), (LATE, [9, 145])], ids=["few", "many"])
def test_a_prefix_is_computed_once_where_few_queries_follow(case, queries, monkeypatch):
    """On a CPU. Many queries have zeros before them, which take less memory than a mask."""
    seen, stock = [], torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda query, *args, **given: seen.append(query.shape[2]) or stock(query, *args, **given),
    )
    attention(LAYER, *tensors(case), None, scaling=0.2, **packed(**case))
    assert seen == queries


@ON_GPU
@windows(None, 2, 4, 100)
@pytest.mark.parametrize("case", [ALONE, SHARED], ids=["alone", "shared"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_kernel_for_ragged_rows(dtype, case, window):
    """Its causal mask, and its window, end at the last key where a row has more keys than queries."""
    assert has_kernel(*tensors(case, dtype, "cuda")[:2]) == (dtype is not torch.float32)
    bound = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-5}[dtype]
    assert difference(case, dtype, "cuda", window) < bound


@ON_GPU
def test_a_window_of_one_token_is_refused_where_the_kernel_would_compute_it():
    with pytest.raises(NotImplementedError, match="window of one token"):
        difference(ALONE, torch.bfloat16, "cuda", window=1)
    assert difference(ALONE, torch.float32, "cuda", window=1) < 1e-5


def test_a_shared_prefix_has_the_same_gradient_each_time():
    def gradients():
        qkv = tensors(SHARED)
        attention(LAYER, *qkv, None, **packed(**SHARED))[0].square().sum().backward()
        return [tensor.grad for tensor in qkv]

    assert all(torch.equal(a, b) for a, b in zip(gradients(), gradients(), strict=True))


def test_the_kernel_takes_and_keeps_as_few_heads_of_keys_as_there_are():
    """By the shapes that the installed torch computes without a GPU."""
    kept = []
    whole_rows.cache_clear()  # the others' indices are no fake tensors, and these are
    with FakeTensorMode(), saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        told, qkv = packed(**SHARED), tensors(SHARED, torch.bfloat16)
        ends = [(told[f"{name}_q"], told[f"{name}_k"]) for name in ("cu_seq_lens", "max_length")]
        out = _varlen(*qkv, whole_rows(told["segments"], told["prefixes"], qkv[0].device), *ends, 0.2)
        out.float().sum().backward()
    whole_rows.cache_clear()
    assert out.shape == (1, 93, 4, 32)
    assert kept.count((93 + 18, 2, 32)) == 2
    assert kept.count((93, 4, 32)) == 2  # queries and outputs
    assert all(tensor.grad.shape == tensor.shape for tensor in qkv)


def by_row(query, key, value, ends_q, ends_k, *longest, scale=None, window_size=None, **grouped):
    """Stands for torch's kernel for ragged rows, which runs on GPUs: each row by itself."""
    outs = []
    for row in range(len(ends_q) - 1):
        of = [
            tensor[ends[row] : ends[row + 1]].transpose(0, 1)[None]
            for tensor, ends in ((query, ends_q), (key, ends_k), (value, ends_k))
        ]
        mask = torch.ones(of[0].shape[2], of[1].shape[2], dtype=torch.bool).tril(of[1].shape[2] - of[0].shape[2])
        out = torch.nn.functional.scaled_dot_product_attention(*of, attn_mask=mask, scale=scale, enable_gqa=True)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


LONG = {
    "alone": ALONE,
    "one of one": {"segments": (9,), "prefixes": ((0, 0),)},
    "shared": SHARED,
    "a prefix of a long row": {"segments": (90, 3, 40, 7), "prefixes": ((0, 0), (0, 88), (2, 0), (2, 5))},
    "a trie": {"segments": (20, 6, 5, 4, 30), "prefixes": ((0, 0), (0, 12), (1, 15), (0, 3), (4, 0))},
}


@pytest.mark.parametrize("case", LONG)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_long_rows_that_a_kernel_of_their_own_computes(monkeypatch, case, dtype):
    """Beside the others, which may begin with a part of a long row. A CPU has neither kernel; both are stood for."""
    own = []

    def one_row(query, key, value, scaling):
        own.append(query.shape[2])
        grouped = {"scale": scaling, "enable_gqa": True, "is_causal": True}
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, **grouped)

    def computed():
        qkv = tensors(LONG[case], dtype)
        out = attention(LAYER, *qkv, None, scaling=0.2, **packed(**LONG[case]))[0]
        return [out.detach(), *torch.autograd.grad(out.square().sum(), qkv)]

    row_by_row = computed()
    monkeypatch.setattr(packed_attention, "LONG", 9)
    monkeypatch.setattr(packed_attention, "has_kernel", lambda query, value: True)
    monkeypatch.setattr(packed_attention, "cudnn_agrees", lambda *_: True)
    monkeypatch.setattr(packed_attention, "_by_cudnn", one_row)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", by_row)
    for ours, theirs in zip(computed(), row_by_row, strict=True):
        assert (ours - theirs).abs().max() < 1e-6 * theirs.abs().max()
    alone = zip(LONG[case]["segments"], LONG[case]["prefixes"], strict=True)
    assert own == [tokens for tokens, (_, prefix) in alone if tokens >= 9 and not prefix]


@ON_GPU
@pytest.mark.parametrize("tokens", [8192, 8191], ids=["long", "not long"])
def test_long_rows_on_a_gpu(tokens):
    case = {"segments": (tokens, 100, 500), "prefixes": ((0, 0), (0, 8000), (2, 0))}
    assert difference(case, torch.bfloat16, "cuda") < 2e-2


@ON_GPU
def test_cudnn_computes_like_the_kernel_for_ragged_rows_on_a_hopper():
    """Within a checkpoint, too, whose hooks must not see the comparison."""
    device = torch.device("cuda", 0)
    seen = []
    packed_attention.cudnn_agrees.cache_clear()
    with saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t), torch.no_grad():
        agrees = packed_attention.cudnn_agrees(32, 8, 128, torch.bfloat16, device)
    assert agrees == (torch.cuda.get_device_capability(device)[0] == 9)
    assert not seen


@ON_GPU
def test_autocast_decides_what_the_kernel_computes_in():
    with torch.autocast("cuda", dtype=torch.bfloat16):
        given = tensors(SHARED, torch.float32, "cuda")
        assert has_kernel(*given[:2])
        out, _ = attention(LAYER, *given, None, scaling=0.2, **packed(**SHARED, device="cuda"))
    assert out.dtype is torch.bfloat16


def test_rows_that_are_not_packed_are_sdpas():
    given = [t.detach() for t in tensors(ALONE)]
    mask = torch.ones(1, 1, 15, 15, dtype=torch.bool).tril()
    assert torch.equal(attention(LAYER, *given, mask)[0], sdpa_attention_forward(LAYER, *given, mask)[0])
    assert torch.equal(attention(LAYER, *given, None)[0], sdpa_attention_forward(LAYER, *given, None)[0])


@pytest.mark.parametrize("name", ["position_bias", "s_aux", "softcap"])
def test_what_a_layer_asks_for_beside_is_refused(name):
    with pytest.raises(NotImplementedError, match=name):
        attention(LAYER, *tensors(ALONE), None, **packed(**ALONE), **{name: 1.0})
    with pytest.raises(NotImplementedError, match="not causal"):
        attention(SimpleNamespace(is_causal=False), *tensors(ALONE), None, **packed(**ALONE))


@pytest.mark.parametrize(
    ("architecture", "config", "named"),
    [
        ("qwen3", {"head_dim": 32}, "torch's kernel for ragged rows"),
        ("qwen3", {"head_dim": 36}, "sdpa, row by row"),
        ("deepseek_v3", {}, "sdpa, row by row"),  # whose keys have more elements than values
    ],
)
def test_the_report_names_the_kernel_that_takes_the_models_heads(monkeypatch, architecture, config, named):
    monkeypatch.setattr(packing, "kernel_on", lambda device: True)
    model = tiny_model(architecture, dtype=torch.bfloat16, **config)
    policy = SimpleNamespace(base=model, dtype=torch.bfloat16, device="cuda")
    session = SimpleNamespace(policy=policy, args=SimpleNamespace(bf16=True, fp16=False))
    assert packing.attention_name(session) == named
