"""What a run says about itself when it starts."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .session import Session


def package_version() -> str:
    """Version of the installed host."""
    try:
        return version("trlx-hybrid")
    except PackageNotFoundError:  # a source tree on sys.path
        return "0+source"


def header(session: Session) -> list[str]:
    """The header: one line of what runs and why, the memory, what the weight sync notes, then what plugins add."""
    selection = session.selection
    plugins = ", ".join(str(p) for p in session.host.plugins) or "none"
    if selection.engine is None or selection.rollout is None:
        slots = [f"engine=transformers ({selection.stock_reason}): generation is TRL's own"]
    else:
        weights = session.weights.name if session.weights else "?"
        slots = [str(selection.engine), f"weights={weights} ({session.weights_why})", str(selection.rollout)]
    if session.adviser is not None:
        slots.append(f"advantages=plugin {session.adviser.name} ({session.adviser.distribution})")
    lines = [" · ".join([f"trlx_hybrid {package_version()}", f"plugins: {plugins}", *slots])]
    lines += session.memory.table()
    note = session.weights.note() if session.weights is not None else None
    if note is not None:
        lines.append(note)
    for added in session.host.call("trlx_report_header", session=session):
        lines += [added] if isinstance(added, str) else list(added)
    return lines


def announce(session: Session) -> None:
    """Print the header, on rank 0, to stderr: stdout belongs to the script."""
    lines = header(session)  # on every rank: a plugin may answer with a collective
    if session.ranks.rank == 0:
        print("\n".join(lines), file=sys.stderr, flush=True)
