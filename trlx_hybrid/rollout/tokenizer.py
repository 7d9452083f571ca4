"""A private copy of a tokenizer, whose state no other code can change."""

from __future__ import annotations

import copy
from typing import Any
from weakref import WeakKeyDictionary

_backends: WeakKeyDictionary[Any, tuple[Any, int, Any]] = WeakKeyDictionary()
"""Private backends by tokenizer: the shared backend, how many tokens it had, and our copy of it."""


def own_tokenizer(shared: Any) -> Any:
    """Return the tokenizer, or the processor around it, with a private backend; for callers that neither truncate nor
    pad.

    Truncation and padding are state of the `tokenizers` library's backend, which each call of a fast tokenizer sets for
    itself. A tool that truncates with the trainer's tokenizer, in a thread, would cut what is being encoded here.

    The backend is copied again only when a token is added; all else is the shared tokenizer's current state. A
    tokenizer without such a backend is returned as it is.
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
