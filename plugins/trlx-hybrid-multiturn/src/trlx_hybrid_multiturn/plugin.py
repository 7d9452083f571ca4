"""What this distribution offers. Imports little: loading every plugin must stay cheap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trlx_hybrid.plugins.hookspecs import hookimpl

from .options import MultiTurnOptions

if TYPE_CHECKING:
    from trlx_hybrid.plugins.registry import Registry
    from trlx_hybrid.session import Session
    from trlx_hybrid.types import Trajectory

    from .multi_turn import MultiTurn


def _multi_turn(session: Session, options: MultiTurnOptions) -> MultiTurn:
    from .multi_turn import MultiTurn

    return MultiTurn(session, options)


@hookimpl
def trlx_register(registry: Registry) -> None:
    """Offer the rollout."""
    registry.offer(
        "rollout",
        "multi_turn",
        _multi_turn,
        options=MultiTurnOptions,
        summary="conversations with tools, each trajectory on its own clock",
    )


@hookimpl
def trlx_rollout_end(session: Session, trajectories: Sequence[Trajectory]) -> None:
    """Record some of this rank's trajectories, where the options name a file."""
    rollout = session.selection.rollout
    options = rollout.options if rollout is not None else None
    if isinstance(options, MultiTurnOptions) and options.record is not None and session.ranks.rank == 0:
        from .record import append

        append(
            options.record,
            trajectories,
            session.policy.processing_class,
            step=session.step,
            limit=options.record_limit,
            training=session.training,
        )


@hookimpl
def trlx_report_header(session: Session) -> str | None:
    """Say so where a run chose conversations and has nobody to converse with."""
    rollout = session.selection.rollout
    if rollout is None or rollout.component.name != "multi_turn" or session.selection.tools:
        return None
    return "note: rollout=multi_turn, and the trainer has no tools: only a rollout_func of its own takes several turns."


@hookimpl
def trlx_command(commands: Any) -> None:
    """Add `trlx-hybrid trajectories`."""
    from .trajectories_cli import add_command

    add_command(commands)
