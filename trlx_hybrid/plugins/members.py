"""Whether a component is what its protocol says: all that is required, nothing misspelt, arguments as they are given.

Everything is told from the object alone, when it is made: what a run would call later is not called here.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from ..errors import nearest
from ..protocols import Algorithm, Engine, EnvironmentArguments

OPTIONAL = {
    "Engine": {"peers_lost", "untested", "stream", "regions", "weights_written", "leave"},
    "WeightSync": {"keeps_weights", "open", "note", "put_back", "forget", "check", "release"},
    "Rollout": {"converses", "tells", "converse", "close"},
    "Scoring": {"deferred", "balanced", "joins", "micro_batches", "joined", "note", "close"},
    "Algorithm": {name for name in vars(Algorithm) if not name.startswith("_")},
    "EnvironmentArguments": {field.name for field in fields(EnvironmentArguments)},
}
"""Members that a component of that protocol may inherit; an engine may be without them as well."""

ACTS = ("draw", "keep", "observe", "rewards", "advantages", "loss")
"""Methods of an algorithm by which it changes or sees anything."""

ALIKE = 0.8
"""From which similarity on, as difflib counts it, a name is taken for another one misspelt, as by a letter too many."""


def missing_members(built: object, protocol: type[Any]) -> list[str]:
    """What the protocol requires and the object lacks. What it inherits from the protocol itself, it lacks, unless that
    is optional."""
    stubs = _members(protocol)
    optional = OPTIONAL.get(protocol.__name__, set())
    required = {*protocol.__annotations__, *stubs} - optional
    stubbed = {name for name in required & stubs.keys() if not overrides(built, name, protocol)}
    expected = required if protocol is Engine else required | optional
    return sorted(stubbed | {name for name in expected if not hasattr(built, name)})


def mistaken_members(built: object, protocol: type[Any]) -> str | None:
    """Say what nobody would call, or cannot be called as it will be; None where all is well.

    Args:
        built: has all that the protocol requires.
    """
    problem = next((p for p in (*_misspelt(built, protocol), *_uncallable(built, protocol))), None)
    if problem is None and protocol is Algorithm and not _acts(built):
        problem = f"none of {', '.join(ACTS)}, so it would change nothing. Write one of these methods"
    return problem


def overrides(built: object, name: str, protocol: type[Any]) -> bool:
    """Whether the object has this member of its own: of its class, or set on the object itself."""
    found = getattr(built, name, None)
    return getattr(found, "__func__", found) is not vars(protocol).get(name)


def accepts(function: Any, *given: Any, **named: Any) -> bool:
    """Whether a function can be called so; True where Python does not know its arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return callable(function)
    try:
        signature.bind(*given, **named)
    except TypeError:
        return False
    return True


def described(function: Any) -> str:
    """Its arguments as it declares them, for a message."""
    return str(inspect.signature(function))


def _members(protocol: type[Any]) -> dict[str, Any]:
    return {name: value for name, value in vars(protocol).items() if not name.startswith("_")}


def _misspelt(built: object, protocol: type[Any]) -> Iterator[str]:
    """Members whose names are almost those of what the object inherits or lacks."""
    stubs = _members(protocol)
    left = {name for name in stubs if not hasattr(built, name) or not overrides(built, name, protocol)}
    for kind in type(built).__mro__:
        if kind is protocol or kind is object:
            return
        for name, value in vars(kind).items():
            if name.startswith("_") or name in stubs or name in protocol.__annotations__:
                continue
            method = inspect.isroutine(value)
            near = nearest(name, [stub for stub in left if inspect.isroutine(stubs[stub]) == method], ALIKE)
            if near:
                yield (
                    f"{name!r}, which nothing reads, and no {near!r} of its own. Call it {near!r}, or, if it is "
                    f"something else, _{name}"
                )


def _uncallable(built: object, protocol: type[Any]) -> Iterator[str]:
    """Methods that do not take what they are given: by position what is required, by name what is not."""
    for name, stub in _members(protocol).items():
        if not inspect.isroutine(stub) or not hasattr(built, name) or not overrides(built, name, protocol):
            continue
        method = getattr(built, name)
        if method is None:  # left out by hand
            continue
        if not callable(method):
            yield f"a {name!r} that is a {type(method).__name__}, where a method is called. Write one"
            continue
        parameters = list(inspect.signature(stub).parameters.values())[1:]
        required = [p.name for p in parameters if p.default is p.empty]
        named = {p.name: p.default for p in parameters if p.default is not p.empty}
        if not accepts(method, *required, **named):
            call = ", ".join([*required, *(f"{key}={value!r}" for key, value in named.items())])
            yield f"{name}{described(method)}, which is called as {name}({call}). Take these arguments"


def _acts(algorithm: Any) -> bool:
    samples_more = algorithm.rounds != Algorithm.rounds or algorithm.oversampling != Algorithm.oversampling
    return samples_more or any(overrides(algorithm, method, Algorithm) for method in ACTS)
