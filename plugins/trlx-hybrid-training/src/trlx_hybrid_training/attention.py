"""Attention over rows packed into a single sequence, as an implementation that transformers can choose by name.

It is registered under a name of its own (`NAME`), because a layer looks its implementation up by the name in the
config, even when gradient checkpointing runs the layer again in the backward pass. Calls from other code, such as
generation by the model itself, come without `segments`, the lengths of the packed rows, and get what "sdpa" gives them.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .autocasting import autocast_now
from .comparison import difference
from .whole_rows import WholeRows, whole, whole_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

NAME = "trlx_packed"

LONG = 8192
"""The number of tokens from which a row is computed by itself, by cuDNN on a GPU of compute capability 9."""

COMPARED = 512
"""The number of tokens on which cuDNN's attention is compared."""

_packing: ContextVar[list[int | None] | None] = ContextVar("packing", default=None)


def register() -> None:
    """Register this module's attention and its mask function with transformers, under the name `NAME`."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


@contextmanager
def packing() -> Iterator[list[int | None]]:
    """A context for a forward pass of packed rows, in which transformers builds no attention mask. The mask would have
    N × N entries, for N tokens of all rows together. Its value is a list, to which each layer that computes attention
    adds its sliding window: a number of tokens, or None."""
    windows: list[int | None] = []
    token = _packing.set(windows)
    try:
        yield windows
    finally:
        _packing.reset(token)


def mask(**kwargs: object) -> Tensor | None:
    """Return the attention mask that a model of transformers asks for: None inside `packing` (a forward pass of packed
    rows), else the mask that transformers makes for "sdpa".

    Args:
        kwargs: the keyword arguments that transformers gives to a mask function.
    """
    return None if _packing.get() is not None else sdpa_mask(**kwargs)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    segments: Sequence[int] | None = None,
    prefixes: Sequence[tuple[int, int]] = (),
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    indices: WholeRows | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Compute causal attention within each segment, and to the prefix that it shares with another segment.

    A segment is the part of the sequence that belongs to one packed row: the whole row, or what follows a prefix that
    another row begins with.

    Args:
        module: the model's attention layer.
        query, key, value: (1, heads, N, head size), N tokens of all segments.
        attention_mask: the mask for rows that are not packed.
        dropout: probability.
        scaling: the factor of the scores; None for that of torch.
        sliding_window: the number of tokens that each token sees, itself included; None for all before it.
        segments: lengths of the segments, N in all; None for rows that are not packed.
        prefixes: for each segment, the number of the row that begins with its prefix, and the prefix's length in
            tokens: 0 where it has none. Empty where no segment has one. That row may itself have a prefix.
        cu_seq_lens_q: where the segments end, (rows + 1,) int32, from 0.
        cu_seq_lens_k: where they would end if each had its prefix before it, (rows + 1,) int32, from 0.
        max_length_q: length of the longest segment.
        max_length_k: length of the longest segment with its prefix.
        indices: the indices of whole rows, where the caller has them already. Torch's kernel for rows of different
            lengths then reads the rows' ends alone, and `segments` and `prefixes` may be empty.
        kwargs: other arguments that transformers gives to an attention, such as `is_causal`.

    Returns:
        (1, N, heads, head size), and None in place of attention weights.

    Raises:
        NotImplementedError: the layer asks for more than a causal mask, or does not say where rows end.
    """
    windows = _packing.get()
    if segments is None:
        if windows is not None:
            raise NotImplementedError("its layers pass on no arguments of the attention")
        given, kwargs["sliding_window"] = (query, key, value, attention_mask), sliding_window
        plain: tuple[Tensor, None] = sdpa_attention_forward(module, *given, dropout=dropout, scaling=scaling, **kwargs)
        return plain
    if windows is not None:
        windows.append(sliding_window)
    for name in ("position_bias", "s_aux", "softcap"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"its attention takes {name}")
    if not kwargs.get("is_causal", getattr(module, "is_causal", True)):
        raise NotImplementedError("its attention is not causal")
    if dropout == 0.0 and has_kernel(query, value):
        if sliding_window == 1:  # on an H200 with torch 2.11 it computes something else
            raise NotImplementedError("torch's kernel for ragged rows has no window of one token")
        long = long_rows(segments, prefixes) if indices is None and sliding_window is None else ()
        if long and cudnn_agrees(query.shape[1], key.shape[1], query.shape[-1], _computed_in(query), query.device):
            known = tuple(prefixes) or tuple((row, 0) for row in range(len(segments)))
            return _with_long_rows(query, key, value, tuple(segments), known, long, scaling), None
        ends, longest = (cu_seq_lens_q, cu_seq_lens_k), (max_length_q, max_length_k)
        rows = indices or whole_rows(tuple(segments), tuple(prefixes), key.device)
        return _varlen(query, key, value, rows, ends, longest, scaling, sliding_window), None
    grouped = key.shape[1] != query.shape[1]
    if grouped and query.is_cuda and _computed_in(query) == torch.float32:  # else a row's attention weights are kept
        key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], dim=1) for t in (key, value))
        grouped = False
    rows = whole_rows(tuple(segments), tuple(prefixes), key.device)
    key, value = (whole(tensor, rows, dim=2) for tensor in (key, value))
    lengths = list(segments if rows is None else rows.lengths)
    outs = []
    of_rows = (torch.split(t, n, dim=2) for t, n in ((query, list(segments)), (key, lengths), (value, lengths)))
    for q, k, v in zip(*of_rows, strict=True):
        prefix = k.shape[2] - q.shape[2]
        windowed = sliding_window is not None and sliding_window < k.shape[2]
        # A mask is kept for the backward pass, and so are queries of zeros: of a few queries, the mask is smaller.
        few = prefix > 0 and q.device.type == "cpu" and q.shape[2] < q.shape[1] * q.shape[3]
        if windowed or few:
            seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=k.device).tril(prefix)
            if sliding_window is not None:
                seen = seen.triu(prefix + 1 - sliding_window)
            outs.append(
                nn.functional.scaled_dot_product_attention(
                    q, k, v, attn_mask=seen, dropout_p=dropout, scale=scaling, enable_gqa=grouped
                )
            )
            continue
        if prefix:  # these queries are zeros, and their outputs are dropped
            q = nn.functional.pad(q, (0, 0, prefix, 0))
        out = nn.functional.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, scale=scaling, is_causal=True, enable_gqa=grouped
        )
        outs.append(out[:, :, prefix:])
    return torch.cat(outs, dim=2).transpose(1, 2).contiguous(), None


def has_kernel(query: Tensor, value: Tensor) -> bool:
    """Return whether torch's kernel for rows of different lengths (`varlen_attn`) can compute this attention: on a GPU,
    in 16 bits, with a suitable head size.

    Args:
        query, value: (1, heads, N, head size).
    """
    if query.is_meta:  # where memory is forecast: kernels for other sizes keep the same tensors
        return True
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
    enabled, dtype = autocast_now(query.device.type)
    return dtype if enabled else query.dtype


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: WholeRows | None,
    ends: tuple[Any, Any],
    longest: tuple[Any, Any],
    scaling: float | None,
    window: int | None = None,
) -> Tensor:
    """Compute the attention with torch's kernel for rows of different lengths (`varlen_attn`).

    Args:
        query, key, value: (1, heads, N, head size), N tokens of all segments.
        rows: the indices of whole rows; None where no row shares a prompt.
        ends: `cu_seq_lens_q` and `cu_seq_lens_k` of `attention`.
        longest: `max_length_q` and `max_length_k` of `attention`.
        scaling: the factor of the scores; None for that of torch.
        window: the number of tokens that each token sees, itself included; None for all before it.

    Returns:
        (1, N, heads, head size).

    Since 2.1, flash attention aligns the causal mask of unequal lengths to the last query and the last key. torch does
    not document this for its function; a test checks it.
    """
    from torch.nn.attention.varlen import varlen_attn

    dtype = _computed_in(query)
    q, k, v = (tensor[0].transpose(0, 1).to(dtype) for tensor in (query, key, value))
    k, v = (whole(tensor, rows, dim=0) for tensor in (k, v))
    q, k, v = (tensor.contiguous() for tensor in (q, k, v))
    seen = (-1 if window is None else window - 1, 0)
    out: Any = varlen_attn(q, k, v, *ends, *longest, scale=scaling, window_size=seen, **_grouped())
    packed: Tensor = out[None]
    return packed


def long_rows(segments: Sequence[int], prefixes: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Return the numbers of the rows that a kernel for one row may compute: long ones without a prefix.

    Args:
        segments, prefixes: see `attention`.
    """
    return tuple(row for row, own in enumerate(segments) if own >= LONG and not (prefixes and prefixes[row][1]))


@functools.cache
def cudnn_agrees(heads: int, key_heads: int, size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether cuDNN's attention computes causal rows like torch's kernel for ragged rows, forward and backward,
    which is asked once, on random numbers.

    For a row of 16,384 tokens, cuDNN's takes 0.54 times as long on an H200, and 0.60 times for one of 131,072 (torch
    2.11, 32 heads of queries and 8 of keys of 128 elements). So it is used on GPUs of compute capability 9.

    Args:
        heads, key_heads: the numbers of heads of queries, and of keys and values.
        size: the size of a head.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    if torch.are_deterministic_algorithms_enabled():
        return False
    draw = torch.Generator(device).manual_seed(0)
    found, ends = [], torch.tensor([0, COMPARED], dtype=torch.int32, device=device)
    drawn = [torch.randn(1, COMPARED, n, size, generator=draw, device=device) for n in (heads, key_heads, key_heads)]
    plain = saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)  # not those of a checkpoint around it
    with plain, torch.enable_grad(), torch.autocast(device.type, enabled=False):
        for by_cudnn in (True, False):
            q, k, v = (tensor.to(dtype).transpose(1, 2).requires_grad_() for tensor in drawn)
            try:
                if by_cudnn:
                    out = _by_cudnn(q, k, v, None).transpose(1, 2)
                else:
                    out = _varlen(q, k, v, None, (ends, ends), (COMPARED, COMPARED), None)
                found.append([out.detach(), *torch.autograd.grad(out.float().square().sum(), (q, k, v))])
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                logger.info("Long rows are not computed by cuDNN: %s", error)
                return False
    apart = difference(found[0], found[1], dtype)
    if apart is not None:
        logger.warning("Long rows are not computed by cuDNN: it is %.2g of the largest value apart.", apart)
    return apart is None


def _by_cudnn(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Compute causal attention of one row with cuDNN.

    Args:
        query, key, value: (1, heads, n, head size), of one dtype.
        scaling: the factor of the scores; None for that of torch.

    Returns:
        (1, heads, n, head size).
    """
    grouped = key.shape[1] != query.shape[1]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped
        )


def _with_long_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: tuple[int, ...],
    prefixes: tuple[tuple[int, int], ...],
    long: tuple[int, ...],
    scaling: float | None,
) -> Tensor:
    """Compute the attention of long rows one by one with cuDNN, and that of all other rows together with torch's kernel
    for rows of different lengths.

    Args:
        query, key, value: (1, heads, N, head size), N tokens of all segments.
        segments, prefixes: see `attention`.
        long: the numbers of the long rows, none of which has a prefix.
        scaling: the factor of the scores; None for that of torch.

    Returns:
        (1, N, heads, head size).
    """
    query, key, value = (tensor.to(_computed_in(query)) for tensor in (query, key, value))
    queries, keys, values = (torch.split(tensor, list(segments), dim=2) for tensor in (query, key, value))
    outs = {row: _by_cudnn(queries[row], keys[row], values[row], scaling).transpose(1, 2) for row in long}
    if others := [row for row in range(len(segments)) if row not in outs]:
        rows = whole_rows(segments, prefixes, key.device, without=long)
        assert rows is not None
        lengths = tuple(segments[row] for row in others), tuple(rows.lengths[row] for row in others)
        ends = tuple(_ends(each, key.device) for each in lengths)
        together = torch.cat([queries[row] for row in others], dim=2)
        out = _varlen(together, key, value, rows, (ends[0], ends[1]), (max(lengths[0]), max(lengths[1])), scaling)
        outs |= zip(others, torch.split(out, list(lengths[0]), dim=1), strict=True)
    return torch.cat([outs[row] for row in range(len(segments))], dim=1)


@functools.lru_cache(maxsize=8)
def _ends(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device, non_blocking=True)


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
