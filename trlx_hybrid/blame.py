"""Attribution of errors: an error raised by the code of a plugin's component names the component, and says what to
do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from .errors import ComponentError, HybridError

CALLED_BACK = "_trlx_hybrid_called_back"
"""The attribute that `called_back` sets on an error to say that it is not the component's fault: it was raised by a
function that the component was given to call."""


class Blamed(Protocol):
    """A component to which an error can be attributed. `str()` of a component names the component and its plugin."""

    @property
    def way_out(self) -> str:
        """A sentence that says what the user can do about a fault of this component."""


@contextmanager
def blaming(component: Blamed | None, method: str) -> Iterator[None]:
    """Return a context that attributes errors raised inside to a component's method.

    Errors of this package and out-of-memory errors stay as they are.

    Args:
        component: the component, or None where it is not known: errors then stay as they are.
        method: name of the method that is called inside.

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
    """Return a context for code that a component calls but did not write, such as a model's forward pass. Errors raised
    inside are marked, so that `blaming` does not attribute them to the component."""
    try:
        yield
    except Exception as error:
        with suppress(AttributeError):  # errors of compiled classes may take no attributes
            setattr(error, CALLED_BACK, True)
        raise


def asked(component: Blamed | None, part: object, method: str, *given: Any, **named: Any) -> Any:
    """Call a method of an object that a component has built, and return its result.

    Args:
        component: the component, or None where it is not known.
        part: the object.
        method: name of the method; `given` and `named` are its arguments.

    Raises:
        ComponentError: the method raised, see `blaming`.
    """
    with blaming(component, method):
        return getattr(part, method)(*given, **named)


def asked_text(component: Blamed | None, part: object, method: str, *given: Any) -> str | None:
    """Call a method, which must return a text or None, of an object that a component has built, and return its result.

    Args:
        component: the component, or None where it is not known.
        part: the object.
        method: name of the method; `given` are its arguments.

    Raises:
        ComponentError: the method raised, or returned something else.
    """
    answer = asked(component, part, method, *given)
    if answer is not None and not isinstance(answer, str):
        raise fault(component, method, f"{answer!r:.80}", "None or a text")
    return answer


def fault(component: Blamed | None, method: str, found: str, wanted: str) -> ComponentError:
    """Return the error for a method of a component that returned something unexpected.

    Args:
        found: what it returned, as text.
        wanted: what was expected, as text.
    """
    who, way_out = ("component", "") if component is None else (str(component), f" {component.way_out}")
    return ComponentError(f"The {who} returned {found} from `{method}`, where {wanted} was expected.{way_out}")


def _out_of_memory(error: Exception) -> bool:
    torch = sys.modules.get("torch")  # every process loads this module, but not all need torch
    return torch is not None and isinstance(error, torch.OutOfMemoryError)
