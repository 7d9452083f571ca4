"""What a tool returned, as the model is shown it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .outcome import Outcome


class UnshowableError(Exception):
    """A tool's result cannot be turned into a string, so the model cannot be shown it."""


def as_shown(value: Any) -> Any:
    """A tool's result as TRL shows it: content blocks as they are, all else as a string."""
    if isinstance(value, list):
        return value
    try:
        return str(value)
    except Exception as error:
        raise UnshowableError(
            f"the result, a {type(value).__qualname__}, cannot be turned into a string: {type(error).__name__}: {error}"
        ) from error


def shown_call(
    tool: Callable[..., Any], arguments: Mapping[str, Any], ahead: Callable[[Any], None] = lambda value: None
) -> Any:
    """Call it; `ahead` is given what will be shown."""
    value = as_shown(tool(**arguments))
    ahead(value)
    return value


def shown_outcome(outcome: Outcome) -> Outcome:
    """The same for a result that came from another process."""
    if outcome.error is not None or outcome.lost is not None:
        return outcome
    value, error = None, None
    try:
        value = as_shown(outcome.value)
    except UnshowableError as unshowable:
        error = unshowable
    return Outcome(value=value, error=error, seconds=outcome.seconds, cpu_seconds=outcome.cpu_seconds)
