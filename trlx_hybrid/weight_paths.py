"""Which weight sync serves a run: the one that was chosen, or the cheapest that does not refuse."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import ComponentError

if TYPE_CHECKING:
    from .protocols import WeightSync
    from .session import Session


def choose(session: Session) -> tuple[WeightSync, str]:
    """The chosen weight sync, or the first in order that does not refuse; and why.

    Raises:
        ComponentError: the chosen one refuses, or all do. Says why.
    """
    chosen = session.selection.weights
    if chosen is not None:
        sync: WeightSync = chosen.component.build(session, chosen.options)
        reason = sync.refuses()
        if reason is not None:
            raise ComponentError(f"weights={sync.name!r} cannot serve this run: {reason} Or let weights='auto' choose.")
        return sync, chosen.why
    refusals: list[str] = []
    for path in session.selection.paths:
        component = path.component
        reason = component.unavailable()
        if reason is None:
            sync = component.build(session, path.options)
            reason = sync.refuses()
            if reason is None:
                return sync, "; ".join(["auto", *refusals])
        refusals.append(f"not {component.name}: {reason}")
    raise ComponentError("No weight sync can serve this run. " + " ".join(refusals))
