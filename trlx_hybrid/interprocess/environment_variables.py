"""A context manager that undoes changes of environment variables, which some libraries set by themselves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def restored(*prefixes: str) -> Iterator[None]:
    """Restore on exit all environment variables whose names begin with one of the prefixes; remove those that were
    added."""

    def own() -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name.startswith(prefixes)}

    before = own()
    try:
        yield
    finally:
        for name in own().keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
