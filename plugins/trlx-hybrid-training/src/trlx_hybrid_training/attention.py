"""Attention over rows packed into a single sequence, as an implementation that transformers can choose by name.

It is registered under a name of its own (`NAME`), because a layer looks its implementation up by the name in the
config, even when gradient checkpointing runs the layer again in the backward pass. Calls from other code, such as
generation by the model itself, come without `segments`, the lengths of the packed rows, and get what "sdpa" gives them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "trlx_packed"

_packing: ContextVar[bool] = ContextVar("packing", default=False)


def register() -> None:
    """Register this module's attention and its mask function with transformers, under the name `NAME`."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


@contextmanager
def packing() -> Iterator[None]:
    """A context for a forward pass of packed rows, in which transformers builds no attention mask. The mask would have
    N × N entries, for N tokens of all rows together."""
    token = _packing.set(True)
    try:
        yield
    finally:
        _packing.reset(token)


def mask(**kwargs: object) -> Tensor | None:
    """Return the attention mask that a model of transformers asks for: None inside `packing` (a forward pass of packed
    rows), else that of "sdpa".

    Args:
        kwargs: the keyword arguments that transformers gives to a mask function.
    """
    return None if _packing.get() else sdpa_mask(**kwargs)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    segments: Sequence[int] | None = None,
    prefixes: Sequence[tuple[int, int]] = (),
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Compute causal attention within each segment, and to the prefix that it shares with another segment.

    A segment is the part of the sequence that belongs to one packed row: the whole row, or what follows a prompt that
    stands in the segment of another row.

    Args:
        module: the model's attention layer.
        query, key, value: (1, heads, N, head size), N tokens of all segments.
        attention_mask: the mask for rows that are not packed.
        dropout: probability.
        scaling: the factor of the scores; None for that of torch.
        segments: lengths of the segments, N in all; None for rows that are not packed.
        prefixes: for each segment, the number of the segment that begins with its prefix, and the prefix's length in
            tokens: 0 where it has none. Empty where no segment has one.
        cu_seq_lens_q: where the segments end, (rows + 1,) int32, from 0.
        cu_seq_lens_k: where they would end if each had its prefix before it, (rows + 1,) int32, from 0.
        max_length_q: length of the longest segment.
        max_length_k: length of the longest segment with its prefix.
        kwargs: other arguments that transformers gives to an attention, such as `is_causal`.

    Returns:
        (1, N, heads, head size), and None in place of attention weights.

    Raises:
        NotImplementedError: the layer asks for more than a causal mask, or does not say where rows end.
    """
    if segments is None:
        if _packing.get():
            raise NotImplementedError("its layers pass on no arguments of the attention")
        given = query, key, value, attention_mask
        plain: tuple[Tensor, None] = sdpa_attention_forward(module, *given, dropout=dropout, scaling=scaling, **kwargs)
        return plain
    for name in ("position_bias", "s_aux", "sliding_window", "softcap"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"its attention takes {name}")
    if not kwargs.get("is_causal", getattr(module, "is_causal", True)):
        raise NotImplementedError("its attention is not causal")
    if dropout == 0.0 and has_kernel(query, value):
        ends, longest = (cu_seq_lens_q, cu_seq_lens_k), (max_length_q, max_length_k)
        return _varlen(query, key, value, segments, prefixes, ends, longest, scaling), None
    grouped = key.shape[1] != query.shape[1]
    if grouped and query.is_cuda and _computed_in(query) == torch.float32:  # else a row's attention weights are kept
        key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], dim=1) for t in (key, value))
        grouped = False
    keys, values = (_attended(tensor, segments, prefixes, dim=2) for tensor in (key, value))
    outs = []
    for q, *of_row in zip(torch.split(query, list(segments), dim=2), keys, values, strict=True):
        k, v = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=2) for parts in of_row)
        prefix = k.shape[2] - q.shape[2]
        if prefix:  # its queries are zeros and their outputs dropped: a mask would be kept for the backward pass
            q = nn.functional.pad(q, (0, 0, prefix, 0))
        out = nn.functional.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, scale=scaling, is_causal=True, enable_gqa=grouped
        )
        outs.append(out[:, :, prefix:])
    return torch.cat(outs, dim=2).transpose(1, 2).contiguous(), None


def _attended(
    tensor: Tensor, segments: Sequence[int], prefixes: Sequence[tuple[int, int]], dim: int
) -> list[list[Tensor]]:
    """Split keys or values by segments (the part of the sequence that belongs to one packed row). Returns for each
    segment a list: the keys or values of its prefix, if it has one, and its own.

    Args:
        tensor: keys or values of all tokens.
        segments: lengths of the segments.
        prefixes: for each segment, the number of the segment that begins with its prefix, and the prefix's length.
        dim: the dimension of the tokens.

    The copies of a prefix come from one broadcast, whose backward pass sums the gradients of all rows at once: always
    in the same order, and rounded once.
    """
    own = torch.split(tensor, list(segments), dim)
    if not prefixes:
        return [[part] for part in own]
    copies = {}
    for other, tokens in set(prefixes):
        if tokens:
            prefix = own[other].narrow(dim, 0, tokens)
            copies[other] = iter(prefix.expand(prefixes.count((other, tokens)), *prefix.shape).unbind())
    return [
        [next(copies[other]), part] if tokens else [part] for part, (other, tokens) in zip(own, prefixes, strict=True)
    ]


def has_kernel(query: Tensor, value: Tensor) -> bool:
    """Return whether torch's kernel for rows of different lengths (`varlen_attn`) can compute this attention: on a GPU,
    in 16 bits, with a suitable head size.

    Args:
        query, value: (1, heads, N, head size).
    """
    dtype = _computed_in(query)
    fits = kernel_takes(query.shape[-1], value.shape[-1])
    return dtype in (torch.float16, torch.bfloat16) and fits and kernel_on(query.device)


def kernel_takes(query: int, value: int) -> bool:
    """Return whether torch's kernel for rows of different lengths (`varlen_attn`) supports these sizes of a query head
    and of a value head."""
    return query == value <= 256 and query % 8 == 0


def kernel_on(device: torch.device) -> bool:
    """Return whether torch's kernel for rows of different lengths (`varlen_attn`) runs on this device: an NVIDIA GPU of
    compute capability 8.0 or more."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def _computed_in(query: Tensor) -> torch.dtype:
    """Return the dtype that autocast would cast the query to for `scaled_dot_product_attention`.

    Autocast does not know `varlen_attn`, so its inputs are cast to this dtype by hand.
    """
    kind = query.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Sequence[int],
    prefixes: Sequence[tuple[int, int]],
    ends: tuple[Any, Any],
    longest: tuple[Any, Any],
    scaling: float | None,
) -> Tensor:
    """Compute the attention with torch's kernel for rows of different lengths (`varlen_attn`).

    Args:
        query, key, value: (1, heads, N, head size), N tokens of all segments.
        segments: lengths of the segments (the part of the sequence that belongs to one packed row).
        prefixes: for each segment, the number of the segment that begins with its prefix, and the prefix's length.
        ends: `cu_seq_lens_q` and `cu_seq_lens_k` of `attention`.
        longest: `max_length_q` and `max_length_k` of `attention`.
        scaling: the factor of the scores; None for that of torch.

    Returns:
        (1, N, heads, head size).

    Since 2.1, flash attention aligns the causal mask of unequal lengths to the last query and the last key. torch does
    not document this for its function; a test checks it.
    """
    from torch.nn.attention.varlen import varlen_attn

    dtype = _computed_in(query)
    q, k, v = (tensor[0].transpose(0, 1).to(dtype) for tensor in (query, key, value))
    if any(tokens for _, tokens in prefixes):
        k, v = (torch.cat([t for parts in _attended(x, segments, prefixes, dim=0) for t in parts]) for x in (k, v))
    q, k, v = (tensor.contiguous() for tensor in (q, k, v))
    out: Any = varlen_attn(q, k, v, *ends, *longest, scale=scaling, window_size=(-1, 0), **_grouped())
    packed: Tensor = out[None]
    return packed


@functools.cache
def _grouped() -> dict[str, Any]:
    """Return the keyword argument with which `varlen_attn` takes fewer key heads than query heads.

    The dictionary is empty for torch 2.11, whose `varlen_attn` does so without an argument.
    """
    from torch.nn.attention.varlen import varlen_attn

    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def loaded_with(model: PreTrainedModel) -> str:
    """Return the name of the attention implementation that the model was loaded with, even where `choose` has replaced
    it."""
    name: str = model.config._attn_implementation
    return "sdpa" if name == NAME else name


def choose(model: PreTrainedModel) -> str | None:
    """Make the model's layers use this module's attention, if the model was loaded with "sdpa". Models with flash
    attention stay as they are, because it takes packed rows itself.

    Returns:
        The name of the attention that was replaced, or None if nothing changed.
    """
    if loaded_with(model) == "sdpa":
        model.config._attn_implementation = NAME
        return "sdpa"
    return None
