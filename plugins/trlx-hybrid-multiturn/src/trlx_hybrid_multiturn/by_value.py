"""Which functions go to a process by reference, and which by value: a reference must lead to the same code there."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import cloudpickle  # type: ignore[import-untyped]


@contextlib.contextmanager
def by_value_if_needed(function: Callable[..., Any]) -> Iterator[None]:
    """Pickle the contents of the function's module where a process could not import it, such as a test's.

    cloudpickle does so by itself for `__main__` only.
    """
    module = sys.modules.get(getattr(innermost(function), "__module__", None) or "")
    if (
        module is None
        or module.__name__ == "__main__"
        or module.__name__ in cloudpickle.list_registry_pickle_by_value()
        or _importable(module.__name__)
    ):
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _importable(name: str) -> bool:
    """Whether a fresh interpreter finds this module. `importlib.util.find_spec` only says what is loaded here.

    A folder without `__init__.py` counts as a package to Python. One in the current directory is found or not by how
    the trainer was started, and one by the module's own name is some other thing: both are no.
    """
    path: Sequence[str] | None = None
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        package = ".".join(parts[:i])
        specs = (finder.find_spec(package, path) for finder in sys.meta_path)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None:
            return False
        folders = spec.submodule_search_locations
        if folders is not None and spec.origin is None and (i == len(parts) or _here(folders)):
            return False
        path = getattr(sys.modules.get(package), "__path__", folders)
    return True


def _here(folders: Iterable[str]) -> bool:
    """Whether any of these lies in the current directory."""
    here = os.path.realpath(os.curdir)
    return any(os.path.dirname(os.path.realpath(folder)) == here for folder in folders)


def innermost(function: Callable[..., Any]) -> Callable[..., Any]:
    """What partial applications were made of."""
    while isinstance(function, functools.partial):
        function = function.func
    return function
