"""The pluggy hooks of this package. The file imports little, because every process loads every plugin."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from trlx_hybrid.plugins.hookspecs import hookimpl

from .options import MultiTurnOptions

if TYPE_CHECKING:
    from trlx_hybrid.plugins.registry import Registry
    from trlx_hybrid.session import Session

logger = logging.getLogger(__name__)


@hookimpl
def trlx_register(registry: Registry) -> None:
    """Register the class `MultiTurn` as the rollout component `multi_turn`. It needs an engine with `streams`, that is,
    one that takes requests one at a time."""
    registry.offer(
        "rollout",
        "multi_turn",
        "trlx_hybrid_multiturn.multi_turn:MultiTurn",
        options=MultiTurnOptions,
        needs={"streams"},
        converses=True,
        interrupts=True,
        summary="multi-turn rollouts with tools, each trajectory asynchronous",
    )


@hookimpl
def trlx_configure(session: Session) -> None:
    """Pass the older options `record` and `record_limit` of `rollout_options` on to the plugin `trajectories`, which
    writes the run's trajectories to a file."""
    rollout = session.selection.rollout
    options = rollout.options if rollout is not None else None
    if not isinstance(options, MultiTurnOptions) or options.record is None:
        return
    recording = {"trajectories": {"record": options.record, "record_limit": options.record_limit}}
    if session.ranks.rank == 0:
        logger.warning("rollout_options 'record' works for every rollout now: plugin_options=%r.", recording)
    session.host.require(recording, "rollout_options 'record' (pip install trlx-hybrid-trajectories)")
    session.config.plugin_options = session.config.options("plugin") | recording


@hookimpl
def trlx_report_header(session: Session) -> str | None:
    """Return a line to print when the run starts: a note that it uses the rollout `multi_turn` although the trainer has
    neither tools nor an environment. None if there is nothing to note."""
    from trlx_hybrid.plugins.selection import PLAYED

    selection = session.selection
    rollout = selection.rollout
    plays = selection.tools or selection.environment is not None or (rollout is not None and rollout.why == PLAYED)
    if rollout is None or not isinstance(rollout.options, MultiTurnOptions) or plays:
        return None
    return "note: rollout=multi_turn, and the trainer has no tools: only a rollout_func of its own takes several turns."
