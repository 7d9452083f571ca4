"""What this distribution offers. Imports little: loading every plugin must stay cheap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trlx_hybrid.errors import ConfigError
from trlx_hybrid.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    from trlx_hybrid.protocols import Run
    from trlx_hybrid.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoriesOptions:
    """`HybridConfig.plugin_options["trajectories"]`.

    Attributes:
        record: a file that trajectories are appended to, one JSON line each, for `trlx-hybrid trajectories`. Those of
            rank 0, with whatever engine and rollout, of training and evaluation. None records nothing.
        record_limit: how many of each batch, the first ones; at least 1.
    """

    record: str | None = None
    record_limit: int = 8

    def __post_init__(self) -> None:
        if self.record_limit < 1:
            raise ConfigError(f"trajectories: record_limit must be 1 or more, got {self.record_limit}.")


@hookimpl
def trlx_configure(session: Run) -> None:
    """Refuse wrong options, and a file that cannot be written to, before anything is sampled."""
    options = session.config.options_of("trajectories", TrajectoriesOptions)
    if options.record is not None and session.ranks.rank == 0:
        from .record import opened

        opened(options.record).close()


@hookimpl
def trlx_rollout_end(session: Run, trajectories: Sequence[Trajectory]) -> None:
    """Record some of this rank's trajectories, where the options name a file."""
    options = session.config.options_of("trajectories", TrajectoriesOptions)
    if options.record is None or session.ranks.rank != 0:
        return
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
def trlx_command(commands: Any) -> None:
    """Add `trlx-hybrid trajectories`."""
    from .cli import add_command

    add_command(commands)
