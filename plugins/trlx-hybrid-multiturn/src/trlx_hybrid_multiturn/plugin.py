"""The hooks that register the multi-turn rollout. The file imports little: loading every plugin must stay cheap."""

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
    """Register the rollout `multi_turn`."""
    registry.offer(
        "rollout",
        "multi_turn",
        "trlx_hybrid_multiturn.multi_turn:MultiTurn",
        options=MultiTurnOptions,
        needs={"streams"},
        converses=True,
        summary="multi-turn rollouts with tools, each trajectory asynchronous",
    )


@hookimpl
def trlx_configure(session: Session) -> None:
    """Pass the older option `rollout_options["record"]` on to the plugin `trajectories`, which does the recording."""
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
    """Return a note for the run's header if it chose `multi_turn` without tools and without an environment."""
    from trlx_hybrid.plugins.selection import PLAYED

    selection = session.selection
    rollout = selection.rollout
    plays = selection.tools or selection.environment is not None or (rollout is not None and rollout.why == PLAYED)
    if rollout is None or not isinstance(rollout.options, MultiTurnOptions) or plays:
        return None
    return "note: rollout=multi_turn, and the trainer has no tools: only a rollout_func of its own takes several turns."
