"""Whose error it was: what code of a plugin's component raises says so, and what to do about it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from ..errors import ComponentError, HybridError

if TYPE_CHECKING:
    from .registry import Component

CALLED_BACK = "_trlx_hybrid_called_back"
"""Attribute of an error that a component met in what it was given to call."""


@contextmanager
def blaming(component: Component | None, method: str) -> Iterator[None]:
    """Inside, the method of a component that somebody else than this package offers is called.

    Args:
        component: None where nobody knows which it is: errors then stay as they are.

    Raises:
        ComponentError: it raised; names the component, its plugin, the method and the way out.
    """
    try:
        yield
    except (HybridError, MemoryError):  # which say themselves what to do
        raise
    except Exception as error:
        if component is None or _out_of_memory(error):  # told by whoever counts memory
            raise
        if getattr(error, CALLED_BACK, False):
            error.add_note(f"Raised in what the {component} called in its `{method}`.")
            raise
        told = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ComponentError(f"The {component} failed in `{method}`: {told}. {component.way_out}") from error


@contextmanager
def called_back() -> Iterator[None]:
    """Inside is what a component was given to call, as a model's forward pass: what raises is not its own error."""
    try:
        yield
    except Exception as error:
        with suppress(AttributeError):  # an error of a compiled class may take none
            setattr(error, CALLED_BACK, True)
        raise


def asked(component: Component | None, part: object, method: str, *given: Any, **named: Any) -> Any:
    """Call a method of what a component has built, and return its answer.

    Raises:
        ComponentError: as in `blaming`.
    """
    with blaming(component, method):
        return getattr(part, method)(*given, **named)


def asked_text(component: Component | None, part: object, method: str, *given: Any) -> str | None:
    """Call a method that answers with a text or None, and return its answer.

    Raises:
        ComponentError: as in `blaming`, or the answer is something else.
    """
    answer = asked(component, part, method, *given)
    if answer is not None and not isinstance(answer, str):
        raise fault(component, method, f"{answer!r:.80}", "None or a text")
    return answer


def fault(component: Component | None, method: str, found: str, wanted: str) -> ComponentError:
    """Return the error that says what a method answered, and what was expected of it."""
    who, way_out = ("component", "") if component is None else (str(component), f" {component.way_out}")
    return ComponentError(f"The {who} returned {found} from `{method}`, where {wanted} was expected.{way_out}")


def _out_of_memory(error: Exception) -> bool:
    torch = sys.modules.get("torch")  # every process loads this module, and not all need torch
    return torch is not None and isinstance(error, torch.OutOfMemoryError)
