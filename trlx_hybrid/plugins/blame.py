"""Attribution of errors: an error raised by the code of a plugin's component names the component, and says what to
do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from ..errors import ComponentError, HybridError

CALLED_BACK = "_trlx_hybrid_called_back"
"""Attribute that marks an error raised by a function that a component was given to call."""


class Blamed(Protocol):
    """The component that an error is attributed to; its text names the component and its plugin."""

    @property
    def way_out(self) -> str:
        """A sentence that says what the user can do about a fault of this component."""


@contextmanager
def blaming(component: Blamed | None, method: str) -> Iterator[None]:
    """Attribute errors raised inside the context to a component's method.

    Args:
        component: the component, or None where it is not known: errors then stay as they are.

    Raises:
        ComponentError: the method raised; the message names the component, its plugin, the method and what to do.
    """
    try:
        yield
    except (HybridError, MemoryError):  # these already say what to do
        raise
    except Exception as error:
        if component is None or _out_of_memory(error):  # the memory ledger reports these
            raise
        if getattr(error, CALLED_BACK, False):
            error.add_note(f"Raised in what the {component} called in its `{method}`.")
            raise
        told = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ComponentError(f"The {component} failed in `{method}`: {told}. {component.way_out}") from error


@contextmanager
def called_back() -> Iterator[None]:
    """Mark errors raised inside the context as not the component's own: they come from what it was given to call, such
    as a model's forward pass."""
    try:
        yield
    except Exception as error:
        with suppress(AttributeError):  # errors of compiled classes may take no attributes
            setattr(error, CALLED_BACK, True)
        raise


def asked(component: Blamed | None, part: object, method: str, *given: Any, **named: Any) -> Any:
    """Call a method of an object that a component has built, and return its answer.

    Raises:
        ComponentError: as for `blaming`.
    """
    with blaming(component, method):
        return getattr(part, method)(*given, **named)


def asked_text(component: Blamed | None, part: object, method: str, *given: Any) -> str | None:
    """Call a method that returns a text or None, and return its answer.

    Raises:
        ComponentError: as for `blaming`, or the answer is neither a text nor None.
    """
    answer = asked(component, part, method, *given)
    if answer is not None and not isinstance(answer, str):
        raise fault(component, method, f"{answer!r:.80}", "None or a text")
    return answer


def fault(component: Blamed | None, method: str, found: str, wanted: str) -> ComponentError:
    """Return an error that says what a method returned, and what was expected."""
    who, way_out = ("component", "") if component is None else (str(component), f" {component.way_out}")
    return ComponentError(f"The {who} returned {found} from `{method}`, where {wanted} was expected.{way_out}")


def _out_of_memory(error: Exception) -> bool:
    torch = sys.modules.get("torch")  # every process loads this module, but not all need torch
    return torch is not None and isinstance(error, torch.OutOfMemoryError)
