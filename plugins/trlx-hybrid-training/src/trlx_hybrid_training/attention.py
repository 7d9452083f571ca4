"""Attention over rows packed into a single sequence, as an implementation that transformers can choose by name.

It is registered under a name of its own (`NAME`), because a layer looks its implementation up by the name in the
config, even when gradient checkpointing runs the layer again in the backward pass. Calls from other code, such as
generation by the model itself, come without `segments`, the lengths of the packed rows, and get what "sdpa" gives them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

if TYPE_CHECKING:
    import numpy.typing as npt
    from transformers import PreTrainedModel

NAME = "trlx_packed"

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
        if sliding_window is not None and sliding_window < k.shape[2]:
            seen = torch.ones(k.shape[2], k.shape[2], dtype=torch.bool, device=k.device).tril().triu(1 - sliding_window)
            outs.append(
                nn.functional.scaled_dot_product_attention(
                    q, k, v, attn_mask=seen[prefix:], dropout_p=dropout, scale=scaling, enable_gqa=grouped
                )
            )
            continue
        if prefix:  # its queries are zeros and their outputs dropped: a mask would be kept for the backward pass
            q = nn.functional.pad(q, (0, 0, prefix, 0))
        out = nn.functional.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, scale=scaling, is_causal=True, enable_gqa=grouped
        )
        outs.append(out[:, :, prefix:])
    return torch.cat(outs, dim=2).transpose(1, 2).contiguous(), None


class Copies(NamedTuple):
    """The copies of some tokens of the packed sequence in whole rows.

    Attributes:
        shared: (S,) int64, the places of the tokens in the sequence.
        places: (n, S) int64, for each of them its places in the whole rows that share it; 0 where fewer than n rows
            share it.
        missing: (n, S) bool, True where `places` names no place; None if it names a place everywhere.
    """

    shared: Tensor
    places: Tensor
    missing: Tensor | None


class WholeRows(NamedTuple):
    """Indices by which one operation copies the keys (or the values) of packed rows to whole rows. In whole rows, each
    row has its own copy of what it shares with others.

    Attributes:
        lengths: the number of tokens of each whole row; M in all.
        sources: (M,) int64, for each token of the whole rows its place in the packed sequence of N tokens.
        own: (N,) int64, for each token of the sequence its place in the whole row that it stands in.
        copies: the tokens that are copied, each in one of these groups.
    """

    lengths: tuple[int, ...]
    sources: Tensor
    own: Tensor
    copies: tuple[Copies, ...]


class Room(NamedTuple):
    """Sizes to which `whole_rows` fills its indices up, so that packs with different prompts have equal shapes.

    Attributes:
        copied: how many more tokens the whole rows have than the packed sequence.
        shared: S of `Copies`.
        copies: n of `Copies`.
    """

    copied: int
    shared: int
    copies: int


@functools.lru_cache(maxsize=8)
def whole_rows(
    segments: tuple[int, ...], prefixes: tuple[tuple[int, int], ...], device: torch.device, room: Room | None = None
) -> WholeRows | None:
    """Return the indices that copy packed rows with these segments and prefixes (see `attention`) to whole rows; None
    where no segment has a prefix and no room is given. All layers of a forward pass use the same indices, so the last
    results are kept.

    Args:
        device: where the indices are needed.
        room: sizes that the indices are to have. What fills them up copies the sequence's first token behind the last
            row, where no query sees it and its gradient is not used.
    """
    if room is None and not any(tokens for _, tokens in prefixes):
        return None
    lengths = tuple(own + tokens for own, (_, tokens) in zip(segments, prefixes, strict=True))
    whole_starts = [0, *accumulate(lengths)]
    of_rows = _sources(segments, prefixes)
    own = [
        np.arange(start + tokens, start + length)
        for start, length, (_, tokens) in zip(whole_starts, lengths, prefixes, strict=False)
    ]
    tokens = np.concatenate([source[:tokens] for source, (_, tokens) in zip(of_rows, prefixes, strict=True)])
    places = np.concatenate([np.arange(tokens) + start for start, (_, tokens) in zip(whole_starts, prefixes)])
    order = np.argsort(tokens, kind="stable")
    tokens, places = tokens[order], places[order]
    shared, begins, counts = np.unique(tokens, return_index=True, return_counts=True)
    nested = any(tokens and prefixes[other][1] for other, tokens in prefixes)
    sizes = np.full(len(counts), counts.max(initial=1))
    if nested:  # a token near the root of a trie has many copies, and one near its leaves few
        sizes = 1 << np.ceil(np.log2(counts)).astype(int)
    groups = []
    for size in np.unique(sizes):
        chosen = np.flatnonzero(sizes == size)
        copies = np.full((size, len(chosen)), -1)
        for copy in range(size):
            there = counts[chosen] > copy
            copies[copy, there] = places[begins[chosen[there]] + copy]
        groups.append((shared[chosen], copies))
    sources = np.concatenate(of_rows)
    if room is not None:
        ((of_group, copies),) = groups or [(np.zeros(0, int), np.zeros((0, 0), int))]
        groups = [
            (
                np.pad(of_group, (0, room.shared - len(of_group))),
                np.pad(
                    copies,
                    ((0, room.copies - copies.shape[0]), (0, room.shared - copies.shape[1])),
                    constant_values=-1,
                ),
            )
        ]
        sources = np.pad(sources, (0, sum(segments) + room.copied - len(sources)))

    def moved(array: npt.NDArray[Any]) -> Tensor:
        return torch.tensor(array).to(device, non_blocking=True)

    def copied(shared: npt.NDArray[Any], copies: npt.NDArray[Any]) -> Copies:
        missing = copies < 0
        kept = moved(missing) if room is not None or missing.any() else None
        return Copies(moved(shared), moved(copies.clip(0)), kept)

    return WholeRows(
        lengths,
        sources=moved(sources),
        own=moved(np.concatenate(own)),
        copies=tuple(copied(*group) for group in groups),
    )


def _sources(segments: tuple[int, ...], prefixes: tuple[tuple[int, int], ...]) -> list[npt.NDArray[Any]]:
    """Return the places in the packed sequence of each whole row's tokens.

    Args:
        segments, prefixes: see `attention`.
    """
    starts = [0, *accumulate(segments)]
    known: dict[int, npt.NDArray[Any]] = {}
    for row in range(len(segments)):
        waiting = [row]
        while waiting:
            at = waiting[-1]
            other, tokens = prefixes[at]
            if tokens and other not in known:
                waiting.append(other)
                continue
            before = known[other][:tokens] if tokens else np.zeros(0, int)
            known[at] = np.concatenate([before, np.arange(starts[at], starts[at + 1])])
            waiting.pop()
    return [known[row] for row in range(len(segments))]


def whole(packed: Tensor, rows: WholeRows | None, dim: int) -> Tensor:
    """Return the keys or values of packed rows as whole rows, in which each row has its own copy of a shared prompt.
    Where no row shares a prompt, return the same tensor.

    Args:
        packed: keys or values of the N tokens of the packed sequence.
        rows: the indices; None where no row shares a prompt.
        dim: the dimension of the tokens.
    """
    if rows is None:
        return packed
    gather: Callable[..., Tensor] = _Whole.apply
    return gather(packed, rows, dim)


class _Whole(torch.autograd.Function):
    """The autograd function of `whole`, which copies keys or values of packed rows to whole rows. Its backward pass
    sums the gradients of a token's copies in one operation: always in the same order, and rounded once."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, rows: WholeRows, dim: int) -> Tensor:
        ctx.rows, ctx.dim = rows, dim
        return packed.index_select(dim, rows.sources)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        rows, dim = ctx.rows, ctx.dim
        packed = grad.index_select(dim, rows.own)
        for of_group in rows.copies:
            shape = grad.shape[:dim] + of_group.places.shape + grad.shape[dim + 1 :]
            copied = grad.index_select(dim, of_group.places.flatten()).view(shape)
            if of_group.missing is not None:
                missing = of_group.missing.view([1] * dim + [*of_group.missing.shape] + [1] * (grad.ndim - dim - 1))
                copied = copied.masked_fill(missing, 0)
            packed.index_add_(dim, of_group.shared, copied.sum(dim))
        return packed, None, None


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
