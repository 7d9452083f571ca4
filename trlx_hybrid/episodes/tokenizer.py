"""Copies of tokenizers whose truncation and padding no other code can change, not even a tool in another thread; and a
comparison of what a tokenizer returns for two conversations."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_backends: WeakKeyDictionary[Any, tuple[Any, int, Any]] = WeakKeyDictionary()
"""The private copies, by tokenizer: the tokenizer's own backend, how many tokens it had when it was copied, and the
copy."""


def own_tokenizer(shared: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a shallow copy of a tokenizer, or of a processor with its tokenizer, that has its own backend of the
    `tokenizers` library, for callers that neither truncate nor pad.

    Truncation and padding are state of the backend, which each call of a fast tokenizer sets anew. A tool that
    truncates with the trainer's tokenizer, in another thread, would cut what the caller encodes.

    The backend is copied again only when a token is added; everything else is the shared tokenizer's current state. A
    tokenizer without such a backend is returned itself.
    """
    inner = getattr(shared, "tokenizer", shared)
    backend = getattr(inner, "_tokenizer", None)
    if not getattr(inner, "is_fast", False) or backend is None:
        return shared
    known, size, own = _backends.get(inner, (None, 0, None))
    if known is not backend or size != len(inner):
        own = copy.deepcopy(backend)
        own.no_truncation()
        own.no_padding()
        _backends[inner] = backend, len(inner), own
    tokenizer = copy.copy(inner)
    tokenizer._tokenizer = own
    if inner is shared:
        return tokenizer
    processor = copy.copy(shared)
    processor.tokenizer = tokenizer
    return processor


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of tokens with which two sequences begin alike.

    A chat template turns all messages into one sequence. The token at which a message begins is found by comparing the
    sequences of two conversations that differ only from this message on.
    """
    differ = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))
