"""Linear layers with one LoRA adapter in two kernels: the first computes x·Wᵀ and x·Aᵀ in one matrix product, and the
second adds (x·Aᵀ)·Bᵀ.

vLLM 0.31 serves many adapters at once. In addition to x·Wᵀ, it runs three kernels for each layer: they clear a buffer,
compute x·Aᵀ into it, and add (x·Aᵀ)·Bᵀ to the output. The three kernels of a layer take 10 µs on an H200. A decode step
of 40 rows takes 3.56 ms there, and these kernels take 1.14 ms of it (Qwen2's shape of 1.5B with rank 16, a CUDA
profile).

A policy has one adapter. Here its A lies in spare rows of W's memory, directly behind W's last row, so that one product
gives both x·Wᵀ and x·Aᵀ. The spare rows add about 1% to W's memory.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from vllm import envs
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.utils.torch_utils import direct_register_custom_op

from . import Patch, may_replace, replaced

PATCHES = (
    Patch(
        of=(
            "vllm.model_executor.layers.linear.UnquantizedLinearMethod.create_weights",
            "vllm.lora.model_manager.from_layer",
        ),
        when="while an engine with LoRA slots for one adapter is built",
        why="For one adapter vLLM launches three kernels a layer beside the product: 1.14 of 3.56 ms of a decode step.",
        until="vLLM computes a single adapter in the base's product",
    ),
)

LARGEST = 64
"""The largest adapter rank for which A is kept under the weight. Above it, A's rows are no longer few beside W's."""
PARTS = 4
"""The largest number of modules that a fused layer may consist of, each with its own A and B; Mamba's have more."""
MULTIPLE = 16
"""The number of spare rows for A is rounded up to a multiple of this, so that a product's rows are 32-byte aligned."""
ROWS = 64
"""The number of a weight's rows that one program of the Triton kernel computes."""
PLAIN = (ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear, ReplicatedLinear)
"""Classes of vLLM's layers that compute x·Wᵀ and nothing else of their own, and so can be replaced."""
ROUNDING = 2**-8
"""The relative rounding error of bf16."""
library: Callable[..., torch.library.Library] = torch.library.Library
LIBRARY = library("trlx_hybrid", "FRAGMENT")


# --- what is computed -------------------------------------------------------------------------------------------------


def adapted_linear(x: Tensor, weight: Tensor, b: Tensor, sizes: list[int], bias: Tensor | None = None) -> Tensor:
    """Compute x·(W + B·A)ᵀ + bias, the output of a linear layer with its LoRA adapter; B includes the scaling.

    Args:
        x: (..., columns).
        weight: (rows + spare, columns), W with A in the spare rows under it. A layer that fuses several parts, each
            with its own A, has one A under the other.
        b: (rows, rank), scaling * B.
        sizes: rows of each part of a fused layer; their sum is `rows`.
        bias: (rows,).

    Returns:
        (..., rows).
    """
    product = linear(x, weight)
    rows = product.view(-1, product.shape[-1])
    return (with_b if rows.is_cuda else with_b_in_torch)(rows, b, sizes, bias).view(*x.shape[:-1], len(b))


def _shape_of(x: Tensor, weight: Tensor, b: Tensor, sizes: list[int], bias: Tensor | None = None) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(b))


direct_register_custom_op("adapted_linear", adapted_linear, fake_impl=_shape_of, target_lib=LIBRARY)


def with_b_in_torch(product: Tensor, b: Tensor, sizes: list[int], bias: Tensor | None) -> Tensor:
    """Add the adapter's and the bias's share to a layer's output: x·Wᵀ + (x·Aᵀ)·Bᵀ + bias, in torch.

    For any dtype and device; `with_b` is the Triton version, with the same arguments and result.

    Args:
        product: (tokens, rows + spare): x·Wᵀ, then in the spare columns x·Aᵀ for each part of a fused layer, `rank`
            columns each, and padding.
        b: (rows, rank), which includes the adapter's scaling.
        sizes: rows of each part of a fused layer, such as q, k and v; their sum is `rows`.
        bias: (rows,), or None.

    Returns:
        (tokens, rows).
    """
    base, low = product[:, : len(b)], product[:, len(b) :]
    its = torch.split(base if bias is None else base + bias, sizes, 1), torch.split(low, b.shape[1], 1)
    parts = zip(*its, torch.split(b, sizes), strict=False)  # the last A may be followed by spare rows
    return torch.cat([torch.addmm(plain, xa, part.t()) for plain, xa, part in parts], 1)


def with_b(product: Tensor, b: Tensor, sizes: list[int], bias: Tensor | None) -> Tensor:
    """Add the adapter's and the bias's share to a layer's output: x·Wᵀ + (x·Aᵀ)·Bᵀ + bias, in one Triton kernel.

    The kernel sums in float32.

    Args:
        product: (tokens, rows + spare): x·Wᵀ, then in the spare columns x·Aᵀ for each part of a fused layer, `rank`
            columns each, and padding.
        b: (rows, rank), which includes the adapter's scaling.
        sizes: rows of each part of a fused layer; at most `PARTS` (4) parts.
        bias: (rows,), or None.

    Returns:
        (tokens, rows), contiguous.
    """
    tokens, (rows, rank) = len(product), b.shape
    out = product.new_empty(tokens, rows)
    height = min(max(16, triton.next_power_of_2(tokens)), 64)
    grid = triton.cdiv(tokens, height), sum(triton.cdiv(size, ROWS) for size in sizes)
    _, second, third, fourth, *_ = [*itertools.accumulate(sizes, initial=0), *[rows] * PARTS]
    exact = "ieee" if product.dtype == torch.float32 else "tf32"
    _with_b[grid](
        out, product, b, b if bias is None else bias, tokens, product.stride(0), rows, second, third, fourth,
        HEIGHT=height, ROWS=ROWS, RANK=rank, DEPTH=max(16, triton.next_power_of_2(rank)),
        BIASED=bias is not None, PRECISION=exact,
    )  # fmt: skip
    return out


kernel: Callable[[Callable[..., None]], Any] = triton.jit(do_not_specialize=["tokens"])


@kernel
def _with_b(  # type: ignore[no-untyped-def]
    out, product, b, bias, tokens, stride, rows, second, third, fourth,
    HEIGHT: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr, DEPTH: tl.constexpr,  # noqa: N803
    BIASED: tl.constexpr, PRECISION: tl.constexpr,  # noqa: N803
):  # fmt: skip
    # A program computes rows of one part. `second` is the row at which the second part begins; it is the number of rows
    # where there is no second part. These are the numbers of programs before each part:
    before_second = tl.cdiv(second, ROWS)
    before_third = before_second + tl.cdiv(third - second, ROWS)
    before_fourth = before_third + tl.cdiv(fourth - third, ROWS)
    program = tl.program_id(1)
    part, begin, end = 0, program * ROWS, second
    if program >= before_fourth:
        part, begin, end = 3, fourth + (program - before_fourth) * ROWS, rows
    elif program >= before_third:
        part, begin, end = 2, third + (program - before_third) * ROWS, fourth
    elif program >= before_second:
        part, begin, end = 1, second + (program - before_second) * ROWS, third

    token = tl.program_id(0).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)
    row, depth = begin + tl.arange(0, ROWS), tl.arange(0, DEPTH)
    here = (token < tokens)[:, None] & (row < end)[None, :]
    low = tl.load(
        product + token[:, None] * stride + rows + part * RANK + depth[None, :],
        mask=(token < tokens)[:, None] & (depth < RANK)[None, :],
        other=0.0,
    )
    high = tl.load(
        b + row[None, :] * RANK + depth[:, None], mask=(row < end)[None, :] & (depth < RANK)[:, None], other=0.0
    )
    total = tl.load(product + token[:, None] * stride + row[None, :], mask=here, other=0.0).to(tl.float32)
    if BIASED:
        total += tl.load(bias + row, mask=row < end, other=0.0).to(tl.float32)[None, :]
    total += tl.dot(low, high, input_precision=PRECISION)
    tl.store(out + token[:, None] * rows + row[None, :], total.to(out.dtype.element_ty), mask=here)


def runs_here() -> bool:
    """Return whether the Triton kernel of `with_b` computes the same as torch on this GPU, after running it for a test.
    The kernel adds the product with an adapter's B to a layer's output. If the result is False, torch must be used
    instead.

    On a CPU the result is always True: the kernel is not used there.
    """
    if not current_platform.is_cuda_alike():
        return True
    device = torch.device("cuda", torch.cuda.current_device())
    return may_replace("Adapters are", lambda: _apart(device), ROUNDING)


@functools.cache
def _apart(device: torch.device) -> float:
    """Return the largest relative difference between two computations of an adapted layer's output from random inputs:
    the Triton kernel's (`with_b`) and torch's (`with_b_in_torch`).

    The inputs have few, some and many tokens; layers are single or fused of several (as q, k and v are), with or
    without a bias.
    """
    generator = torch.Generator(device).manual_seed(0)
    largest = 0.0
    for tokens, sizes, rank, biased in ((1, [128], 16, True), (20, [96, 20, 20], 16, False), (70, [64, 64], 32, True)):
        rows = sum(sizes)
        shapes = (tokens, rows + len(sizes) * rank), (rows, rank), (rows,)
        product, b, bias = (torch.randn(s, generator=generator, device=device).bfloat16() for s in shapes)
        ours = with_b(product, b, sizes, bias if biased else None)
        theirs = with_b_in_torch(product.float(), b.float(), sizes, bias.float() if biased else None)
        largest = max(largest, float((ours.float() - theirs).abs().max() / theirs.abs().max()))
    return largest


# --- where it lies ----------------------------------------------------------------------------------------------------


class Joined:
    """A mixin for vLLM's classes of LoRA layers, which keeps A under the weight and computes with `adapted_linear`.

    Attributes:
        joined_weight: (rows + spare, columns). The first `rows` rows are the layer's weight. The spare rows hold the
            adapter's A; vLLM's slots, the tensors into which vLLM writes A, are views of them.
        joined_b: (rows, rank), the memory of vLLM's slots of B.
        joined_sizes: rows of each part of a fused layer.
    """

    joined_weight: Tensor
    joined_b: Tensor
    joined_sizes: list[int]

    def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute the layer's output for `x`, in place of vLLM's product and its kernels for many adapters."""
        operator: Callable[..., Tensor] = torch.ops.trlx_hybrid.adapted_linear
        return operator(x, self.joined_weight, self.joined_b, self.joined_sizes, bias)

    def reset_lora(self, index: int) -> None:
        """Set the adapter's A and B to zero. A lies in the rows of `joined_weight` below the layer's weight, all of
        which are zeroed. vLLM calls this when it sets or removes an adapter.

        Args:
            index: the number of vLLM's LoRA slot; always 0, as there is one adapter.
        """
        self.joined_weight[len(self.joined_b) :].zero_()
        self.joined_b.zero_()


@contextmanager
def adapters_under_weights(rank: int | None) -> Iterator[bool]:
    """Make an engine that is built inside this context compute x·Wᵀ and x·Aᵀ of its LoRA layers in one product.

    Its plain linear layers become `Joined` (A lies under the weight); layers of other kinds, such as quantised ones,
    stay vLLM's.

    Args:
        rank: the LoRA rank for which vLLM allocates A and B; None for an engine without adapters or with several.

    Yields:
        Whether layers will be `Joined`. False if `rank` is None or above `LARGEST`, if the Triton kernel does not run
        on this GPU or computes other values than torch, and in vLLM's dual-stream and batch-invariant modes.
    """
    otherwise = envs.VLLM_LORA_ENABLE_DUAL_STREAM or envs.VLLM_BATCH_INVARIANT
    if rank is None or rank > LARGEST or otherwise or not runs_here():
        yield False
    else:
        from vllm.lora import model_manager

        with (
            replaced(UnquantizedLinearMethod, "create_weights", with_spare_rows(rank)),
            replaced(model_manager, "from_layer", joining(model_manager.from_layer)),
        ):
            yield True


def clear_adapters(model: torch.nn.Module) -> None:
    """Zero A and B in all `Joined` layers (LoRA layers that hold A in rows under the weight). Called after a sleep that
    freed the memory of the weights and of A and B.

    The memory holds arbitrary bits after waking, and every request is computed with A and B, adapter or not. If the
    engine has an adapter, the next weight sync writes its A and B; if it has none, nothing else would write them.
    """
    for module in model.modules():
        if isinstance(module, Joined):
            module.reset_lora(0)


def with_spare_rows(rank: int) -> Callable[..., None]:
    """Return a version of vLLM's `create_weights` that allocates spare rows under each layer's weight W, to hold the
    LoRA matrix A, so that one product computes x·Wᵀ and x·Aᵀ.

    Args:
        rank: the LoRA rank, which is the number of rows of A.
    """
    plain = UnquantizedLinearMethod.create_weights

    @functools.wraps(plain)
    def create_weights(
        method: UnquantizedLinearMethod,
        layer: LinearBase,
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
    """Return how many spare rows a layer needs for A: `rank` for each of the `parts` that it fuses, rounded up."""
    return -(-parts * rank // MULTIPLE) * MULTIPLE


def joining(plain: Callable[..., torch.nn.Module]) -> Callable[..., torch.nn.Module]:
    """Return a version of vLLM's `from_layer` that also makes the layer compute with its A under its weight (`join`).

    Args:
        plain: vLLM's own function, which wraps a layer for LoRA and allocates its A and B.
    """

    @functools.wraps(plain)
    def from_layer(*args: Any, **kwargs: Any) -> torch.nn.Module:
        layer = plain(*args, **kwargs)
        if isinstance(layer, BaseLinearLayerWithLoRA) and type(layer.base_layer) in PLAIN:
            join(layer)
        return layer

    return from_layer


def join(layer: BaseLinearLayerWithLoRA) -> None:
    """Move the A of one of vLLM's LoRA layers into the spare rows behind its weight's last row, and change the layer's
    class in place to a subclass of `Joined`. The layer then computes x·Wᵀ and x·Aᵀ in one matrix product.

    Does nothing if the weight is quantised or has no spare rows, if A has another dtype or another shape than the
    weight needs, or if the layer fuses more than `PARTS` parts.
    """
    base, slots_a, slots_b = layer.base_layer, layer.lora_a_stacked, layer.lora_b_stacked
    weight, (*_, rank, columns) = base.weight.data, slots_a[0].shape
    rows, spare, sizes = len(weight), spare_rows(len(slots_a), rank), [b.shape[2] for b in slots_b]
    left = weight.untyped_storage().nbytes() // weight.element_size() - weight.storage_offset() - weight.numel()
    if (
        type(base.quant_method) is not UnquantizedLinearMethod
        or slots_a[0].dtype != weight.dtype
        or (rows, columns) != (sum(sizes), weight.shape[1])
        or len(sizes) > PARTS
        or left < spare * columns
    ):
        return
    layer.joined_weight = weight.as_strided((rows + spare, columns), (columns, 1))
    layer.joined_b, layer.joined_sizes = weight.new_zeros(rows, rank), sizes
    layer.lora_a_stacked = tuple(a[None, None] for a in layer.joined_weight[rows:].split(rank)[: len(sizes)])
    layer.lora_b_stacked = tuple(part[None, None] for part in layer.joined_b.split(sizes))
    layer.__class__ = type(f"Joined{type(layer).__name__}", (Joined, type(layer)), {})
    layer.reset_lora(0)


def beside_slots(layer: BaseLinearLayerWithLoRA) -> list[Tensor]:
    """Return, in a list of at most one tensor, the rows that the LoRA matrix A leaves unfilled in a `Joined` layer.

    Such a layer has A in spare rows behind its weight. The number of spare rows is rounded up, so some rows may remain
    unfilled; they must stay zero. The list is empty if no row is unfilled, or if the layer is not `Joined`.
    """
    if not isinstance(layer, Joined):
        return []
    rows, rank = layer.joined_b.shape
    left = layer.joined_weight[rows + rank * len(layer.joined_sizes) :]
    return [left] if left.numel() else []
