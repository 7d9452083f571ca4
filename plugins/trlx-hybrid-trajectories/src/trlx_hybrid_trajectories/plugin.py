"""The hooks and options of the plugin `trajectories`. The module imports little, because every process loads every
plugin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from trlx_hybrid.errors import ConfigError
from trlx_hybrid.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    from trlx_hybrid.contract.protocols import Run
    from trlx_hybrid.contract.types import Phase, SyncReport, Trajectory

    from .events import EventLog
    from .record import OptionalLines

_files: WeakKeyDictionary[Run, OptionalLines] = WeakKeyDictionary()  # of the runs whose trajectories are recorded here
_logs: WeakKeyDictionary[Run, EventLog] = WeakKeyDictionary()  # of the runs that record for a report


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoriesOptions:
    """Options of this plugin, set as `HybridConfig.plugin_options["trajectories"]`.

    Attributes:
        record: path of a file to which rank 0's trajectories are appended, one line of JSON each, for `trlx-hybrid
            trajectories`. This works in training and evaluation, with every engine and rollout. If None, nothing is
            recorded, unless `report` is set: then the file is `report/trajectories.jsonl` in the run's `output_dir`.
        record_limit: the largest number of trajectories that are recorded of each batch, at least 1. The first ones are
            recorded.
        report: whether each rank records its phases, weight syncs and memory, and rank 0 what the trainer logs, for
            `trlx-hybrid report`. The files are in the folder `report` of the run's `output_dir`.
    """

    record: str | None = None
    record_limit: int = 8
    report: bool = False

    def __post_init__(self) -> None:
        if self.record_limit < 1:
            raise ConfigError(f"trajectories: record_limit must be 1 or more, got {self.record_limit}.")

    def file(self, session: Run) -> str | None:
        """Return the path of the file to which the run's trajectories are written, or None if they are not recorded.

        Raises:
            ConfigError: the file belongs in the run's `output_dir`, and the trainer has none.
        """
        if self.record is not None or not self.report:
            return self.record
        from .events import TRAJECTORIES, folder_of

        return str(folder_of(session) / TRAJECTORIES)


@hookimpl
def trlx_configure(session: Run) -> None:
    """Open the files in which the run's trajectories and events are recorded, as far as the options ask for them, so
    that wrong options and unwritable files raise before anything is sampled."""
    options = session.config.options_of("trajectories", TrajectoriesOptions)
    file = options.file(session)
    if file is not None and session.ranks.rank == 0:
        _file_of(session, file)
    if options.report:
        from .events import EventLog

        _logs[session] = EventLog(session, str(file))


def _file_of(session: Run, path: str) -> OptionalLines:
    from .record import OptionalLines

    if session not in _files:
        _files[session] = OptionalLines(path, "Recorded trajectories")
    return _files[session]


@hookimpl
def trlx_leave_phase(session: Run, phase: Phase) -> None:
    """Record, for the run's report, what the rank does after the phase: "wake" (wake the engine) after training,
    "sleep" (put it to sleep) after a rollout."""
    if session in _logs:
        _logs[session].now("wake" if phase.value == "train" else "sleep", session)


@hookimpl
def trlx_enter_phase(session: Run, phase: Phase) -> None:
    """Record, for the run's report, that the phase begins, and how many bytes each owner of memory (policy, optimizer,
    engine and so on) holds in it."""
    if session in _logs:
        held = dict(session.held_bytes.get(phase, {}))
        _logs[session].now("scoring" if phase.value == "train" else "rollout", session, phase=phase.value, held=held)


@hookimpl
def trlx_sync_start(session: Run) -> None:
    """Record, for the run's report, that a weight sync begins."""
    if session in _logs:
        _logs[session].now("sync", session)


@hookimpl
def trlx_sync_end(session: Run, report: SyncReport) -> None:
    """Record, for the run's report, that a weight sync has ended: its seconds, bytes, and what was verified."""
    if session in _logs:
        _logs[session].synced(report, session)


@hookimpl
def trlx_rollout_end(session: Run, trajectories: Sequence[Trajectory]) -> None:
    """Write the rollout's trajectories on rank 0 to the file of trajectories, if the options ask for it, and log how
    many were lost because the disk was full."""
    options = session.config.options_of("trajectories", TrajectoriesOptions)
    path = options.file(session)  # read again: `multi_turn` may have added it, from its older option
    if path is not None and session.ranks.rank == 0:
        from .record import lines_of

        tokenizer, limit, file = session.policy.processing_class, options.record_limit, _file_of(session, path)
        file.add(lines_of(trajectories, tokenizer, step=session.step, limit=limit, training=session.training))
        if file.lost:
            session.metrics["hybrid/trajectories_lost"] = float(file.lost)
    if session in _logs and session.engine is not None:
        _logs[session].now("train", session)


@hookimpl
def trlx_log(session: Run, metrics: dict[str, float]) -> None:
    """Record, for the run's report, the metrics that the trainer logs."""
    if session in _logs:
        _logs[session].logged(metrics, session)


@hookimpl
def trlx_unconfigure(session: Run) -> None:
    """Close the files in which the run was recorded."""
    file = _files.pop(session, None)
    if file is not None:
        file.close()
    log = _logs.pop(session, None)
    if log is not None:
        log.end()


@hookimpl
def trlx_command(commands: Any) -> None:
    """Add the commands `trlx-hybrid trajectories` and `trlx-hybrid report`."""
    from .cli import add_command, add_report

    add_command(commands)
    add_report(commands)
