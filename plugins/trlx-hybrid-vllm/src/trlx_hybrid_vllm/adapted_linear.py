"""Linear layers with one adapter: the base's weight and A in one product, and B in one kernel.

vLLM 0.31 serves many adapters at once. Beside x·Wᵀ, it clears a buffer, computes x·Aᵀ into it, and adds the product of
that with Bᵀ: three kernels a layer, 10 µs, which are 1.14 of the 3.56 ms that an H200 takes for a decode step of 40
rows (Qwen2's shape of 1.5B with rank 16, a CUDA profile). A policy has one adapter. Its A lies right under W here, in
spare rows of the same memory, some 1% of it; so one product gives both, and one kernel adds B.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import linear
from vllm import envs
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.utils.torch_utils import direct_register_custom_op

from .internals import may_replace

LARGEST = 64
"""Rank. B has a column for each spare row, which are those of all parts of a fused layer: at large ranks that takes
more memory, and time, than it saves."""
MULTIPLE = 16
"""Of the spare rows: a product's rows begin at multiples of 32 bytes."""
ROWS, DEPTH = 64, 64
"""Of a weight, that one program computes; and how many of the spare ones it reads at once."""
PLAIN = (ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear, ReplicatedLinear)
"""Layers that compute x·Wᵀ and nothing else of their own."""
ROUNDING = 2**-8
"""Of bf16, relative."""
LIBRARY = torch.library.Library("trlx_hybrid", "FRAGMENT")  # type: ignore[no-untyped-call]


# --- what is computed -------------------------------------------------------------------------------------------------


def adapted_linear(x: Tensor, weight: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """x·(W + B·A)ᵀ + bias.

    Args:
        x: (..., columns).
        weight: (rows + spare, columns), W with A under it.
        b: (rows, spare). Of a layer that fuses several, each with an A of its own, it is block-diagonal.
        bias: (rows,).

    Returns:
        (..., rows).
    """
    product = linear(x, weight)
    rows = product.view(-1, product.shape[-1])
    return (with_b if rows.is_cuda else with_b_in_torch)(rows, b, bias).view(*x.shape[:-1], len(b))


def _shape_of(x: Tensor, weight: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(b))


direct_register_custom_op("adapted_linear", adapted_linear, fake_impl=_shape_of, target_lib=LIBRARY)


def with_b_in_torch(product: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """As `with_b`, in any dtype and on any device."""
    base, low = product[:, : len(b)], product[:, len(b) :]
    return torch.addmm(base if bias is None else base + bias, low, b.t())


def with_b(product: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """x·Wᵀ plus x·Aᵀ·Bᵀ plus the bias, summed in float32.

    Args:
        product: (tokens, rows + spare), x·Wᵀ and beside it x·Aᵀ.
        b: (rows, spare).

    Returns:
        (tokens, rows), contiguous.
    """
    tokens, (rows, spare) = len(product), b.shape
    out = product.new_empty(tokens, rows)
    height = min(max(16, triton.next_power_of_2(tokens)), 64)
    grid = triton.cdiv(tokens, height), triton.cdiv(rows, ROWS)
    exact = "ieee" if product.dtype == torch.float32 else "tf32"
    _with_b[grid](
        out, product, b, b if bias is None else bias, tokens, product.stride(0), rows, spare,
        HEIGHT=height, ROWS=ROWS, DEPTH=DEPTH if spare > DEPTH else max(16, triton.next_power_of_2(spare)),
        BIASED=bias is not None, PRECISION=exact,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def _with_b(  # type: ignore[no-untyped-def]
    out, product, b, bias, tokens, stride, rows, spare,
    HEIGHT: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,  # noqa: N803
    BIASED: tl.constexpr, PRECISION: tl.constexpr,  # noqa: N803
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)
    row, depth = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, DEPTH)
    here = (token < tokens)[:, None] & (row < rows)[None, :]
    total = tl.load(product + token[:, None] * stride + row[None, :], mask=here, other=0.0).to(tl.float32)
    if BIASED:
        total += tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)[None, :]
    for start in range(0, spare, DEPTH):
        place = start + depth
        low = tl.load(
            product + token[:, None] * stride + rows + place[None, :],
            mask=(token < tokens)[:, None] & (place < spare)[None, :],
            other=0.0,
        )
        high = tl.load(
            b + row[None, :] * spare + place[:, None], mask=(row < rows)[None, :] & (place < spare)[:, None], other=0.0
        )
        total += tl.dot(low, high, input_precision=PRECISION)
    tl.store(out + token[:, None] * rows + row[None, :], total.to(out.dtype.element_ty), mask=here)


def runs_here() -> bool:
    """Whether the kernel computes here what torch computes, on random numbers; on a CPU torch does it."""
    if not current_platform.is_cuda_alike():
        return True
    device = torch.device("cuda", torch.cuda.current_device())
    return may_replace("Adapters are", lambda: _apart(device), ROUNDING)


@functools.cache
def _apart(device: torch.device) -> float:
    """The largest relative difference between the kernel and torch: for few, some and many tokens, with one and several
    parts, with a bias and without."""
    generator = torch.Generator(device).manual_seed(0)
    largest = 0.0
    for tokens, rows, spare, biased in ((1, 128, 16, True), (20, 136, 48, False), (70, 128, 96, True)):
        shapes = (tokens, rows + spare), (rows, spare), (rows,)
        product, b, bias = (torch.randn(s, generator=generator, device=device).bfloat16() for s in shapes)
        ours = with_b(product, b, bias if biased else None)
        theirs = with_b_in_torch(product.float(), b.float(), bias.float() if biased else None)
        largest = max(largest, float((ours.float() - theirs).abs().max() / theirs.abs().max()))
    return largest


# --- where it lies ----------------------------------------------------------------------------------------------------


class Joined:
    """Mixed into vLLM's class of an adapted layer.

    Attributes:
        joined_weight: see `adapted_linear`. The layer's weight is its first rows, vLLM's slots of A are the others.
        joined_b: vLLM's slots of B are its blocks.
    """

    joined_weight: Tensor
    joined_b: Tensor

    def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """In the place of vLLM's product and kernels for many adapters."""
        return torch.ops.trlx_hybrid.adapted_linear(x, self.joined_weight, self.joined_b, bias)  # type: ignore[no-any-return]

    def reset_lora(self, index: int) -> None:
        """Clear the slots, and what lies between them."""
        self.joined_weight[len(self.joined_b) :].zero_()
        self.joined_b.zero_()


@contextmanager
def adapters_under_weights(rank: int | None) -> Iterator[bool]:
    """Around the start of an engine: its adapted layers are `Joined`, where they can be.

    Args:
        rank: of vLLM's slots; None for an engine whose slots are not those of the policy's one adapter.

    Yields:
        Whether layers will be.
    """
    otherwise = envs.VLLM_LORA_ENABLE_DUAL_STREAM or envs.VLLM_BATCH_INVARIANT
    if rank is None or rank > LARGEST or otherwise or not runs_here():
        yield False
    else:
        from vllm.lora import model_manager

        with (
            patch.object(UnquantizedLinearMethod, "create_weights", with_spare_rows(rank)),
            patch.object(model_manager, "from_layer", joining(model_manager.from_layer)),
        ):
            yield True


def clear_adapters(model: torch.nn.Module) -> None:
    """After the weights' memory was lost: what lies there now is anything, and every request is computed with it. An
    engine that holds an adapter is written anew before it samples; one with slots that no weight sync fills is not."""
    for module in model.modules():
        if isinstance(module, Joined):
            module.reset_lora(0)


def with_spare_rows(rank: int) -> Callable[..., None]:
    """`UnquantizedLinearMethod.create_weights` whose memory has rows left under the weight, for an A of each part."""
    plain = UnquantizedLinearMethod.create_weights

    @functools.wraps(plain)
    def create_weights(
        method: Any,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        spare = spare_rows(len(output_partition_sizes), rank)
        plain(method, layer, input_size_per_partition, [*output_partition_sizes, spare], *args, **kwargs)
        layer.weight.data = layer.weight.data[: sum(output_partition_sizes)]

    return create_weights


def spare_rows(parts: int, rank: int) -> int:
    """How many rows as many A take."""
    return -(-parts * rank // MULTIPLE) * MULTIPLE


def joining(plain: Callable[..., torch.nn.Module]) -> Callable[..., torch.nn.Module]:
    """vLLM's `from_layer`, which wraps a layer and gives it slots; those of one adapter lie with the weight then."""

    @functools.wraps(plain)
    def from_layer(*args: Any, **kwargs: Any) -> torch.nn.Module:
        layer = plain(*args, **kwargs)
        if isinstance(layer, BaseLinearLayerWithLoRA) and type(layer.base_layer) in PLAIN:
            join(layer)
        return layer

    return from_layer


def join(layer: Any) -> None:
    """Make a wrapped layer with slots for one adapter `Joined`; not where its weight is quantised."""
    base, slots_a, slots_b = layer.base_layer, layer.lora_a_stacked, layer.lora_b_stacked
    weight, (*_, rank, columns) = base.weight.data, slots_a[0].shape
    rows, spare = len(weight), spare_rows(len(slots_a), rank)
    left = weight.untyped_storage().nbytes() // weight.element_size() - weight.storage_offset() - weight.numel()
    if (
        type(base.quant_method) is not UnquantizedLinearMethod
        or slots_a[0].dtype != weight.dtype
        or (rows, columns) != (sum(b.shape[2] for b in slots_b), weight.shape[1])
        or left < spare * columns
    ):
        return
    layer.joined_weight = weight.as_strided((rows + spare, columns), (columns, 1))
    layer.joined_b = weight.new_zeros(rows, spare)
    layer.lora_a_stacked = tuple(a[None, None] for a in layer.joined_weight[rows:].split(rank)[: len(slots_a)])
    parts = layer.joined_b.split([b.shape[2] for b in slots_b])
    layer.lora_b_stacked = tuple(
        part[:, number * rank : (number + 1) * rank][None, None] for number, part in enumerate(parts)
    )
    layer.__class__ = type(f"Joined{type(layer).__name__}", (Joined, type(layer)), {})
    layer.reset_lora(0)


def between_slots(layer: Any) -> list[Tensor]:
    """What must stay zero in a `Joined` layer beside its slots."""
    if not isinstance(layer, Joined):
        return []
    wrapper: Any = layer
    rank, sizes = wrapper.lora_a_stacked[0].shape[2], [b.shape[2] for b in wrapper.lora_b_stacked]
    used = rank * len(sizes)
    found = [layer.joined_weight[len(layer.joined_b) + used :], layer.joined_b[:, used:]]
    for number, part in enumerate(wrapper.joined_b[:, :used].split(sizes)):
        found += [part[:, : number * rank], part[:, (number + 1) * rank :]]
    return [t for t in found if t.numel()]
