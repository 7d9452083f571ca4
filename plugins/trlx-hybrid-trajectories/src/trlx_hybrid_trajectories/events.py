"""The events of a run, such as the begin of a phase or a weight sync. Each rank writes its own events as lines of JSON
to a file in the folder `report` of the run's `output_dir`. This module also reads them, for report and trace."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from trlx_hybrid.errors import ConfigError, HybridError

from .record import JsonObject, OptionalLines, as_json_number

if TYPE_CHECKING:
    from trlx_hybrid.contract.protocols import Run
    from trlx_hybrid.contract.types import SyncReport

FOLDER, TRAJECTORIES = "report", "trajectories.jsonl"
SETTING = 'plugin_options={"trajectories": {"report": True}}'
ACTIVITIES = {
    "setup": "from the trainer's construction to the first rollout",
    "wake": "the engine wakes, trainer state leaves",
    "sync": "weights go to the engine and are checked",
    "rollout": "sampling",
    "sleep": "the engine sleeps, trainer state returns",
    "scoring": "rewards and log-probs",
    "train": "loss, optimizer, and what the trainer does besides",
    "idle": "after training",
}
"""The activities of a rank, such as "sync": an explanation for each name. An activity lasts until the rank records the
next one."""
SETTINGS = (
    *("learning_rate", "num_generations", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("max_completion_length", "temperature", "beta", "loss_type"),
)
"""Names of the training arguments that the report shows."""


def folder_of(session: Run) -> Path:
    """Return the folder for the run's events: `report` in its `output_dir`.

    Raises:
        ConfigError: the trainer has no `output_dir`.
    """
    output_dir = getattr(session.args, "output_dir", None)
    if not output_dir:
        raise ConfigError("trajectories: report=True needs a folder of the run: set output_dir in its arguments.")
    return Path(output_dir) / FOLDER


class EventLog:
    """Writes the events of this rank to its file, `report/rank<rank>.jsonl` in the run's `output_dir`.

    The time of an event is read from the host's clock, in seconds since 1970, when the event is written. Work on the
    GPU is not waited for, and may still be running at that time.

    Args:
        session: the run.
        trajectories: path of the file to which the run's trajectories are written, for the report to find it.

    Raises:
        RecordError: the file cannot be written to.
    """

    def __init__(self, session: Run, trajectories: str) -> None:
        rank = session.ranks.rank
        self._lines = OptionalLines(
            folder_of(session) / f"rank{rank}.jsonl",
            "Events of the run report",
            note=_lost,
        )
        self._error = getattr(sys, "last_value", None)  # an error of an earlier cell of a notebook
        self._header_written = rank != 0
        facts = _facts(session) | {"trajectories": trajectories} if rank == 0 else {}
        self.write("start", rank=rank, world=session.ranks.world, **facts)
        self.now("setup", session)

    def write(self, event: str, **fields: object) -> None:
        """Write one event. If the disk is full, the event is lost; the number of lost events is written with the next
        event.

        Args:
            event: kind of the event: "start", "header" (the lines printed when the run starts), "now" (an activity
                begins), "sync" (a weight sync has ended), "log" (the trainer logs metrics) or "end".
            fields: further fields of the line, values that JSON can hold.
        """
        self._lines.add([_line({"event": event, "time": round(time.time(), 4)} | fields)])

    def now(self, activity: str, session: Run, **fields: object) -> None:
        """Record that this rank now begins an activity. This also ends the rank's activity before it.

        Args:
            activity: a name in `ACTIVITIES`.
            session: the run.
            fields: further fields of the line, values that JSON can hold.
        """
        if session.header_lines and not self._header_written:
            self._header_written = True
            self.write("header", lines=session.header_lines)
        self.write("now", name=activity, step=session.step, training=session.training, **fields)

    def synced(self, report: SyncReport, session: Run) -> None:
        """Record a weight sync that has ended, and that the rank goes on with the activity "wake" (waking the engine).

        Args:
            report: seconds, bytes and checks of the weight sync.
            session: the run.
        """
        figures = {k: as_json_number(v) if isinstance(v, float) else v for k, v in asdict(report).items()}
        self.write("sync", step=session.step, **figures)
        self.now("wake", session)

    def logged(self, metrics: Mapping[str, object], session: Run) -> None:
        """Record the metrics that the trainer logs, on rank 0 only, leaving out those that are not numbers.

        Metrics with "train_runtime" are those that the trainer logs at the end of training. After them it is also
        recorded that this rank's activity (what it is doing, a name in `ACTIVITIES`) is now "idle".

        Args:
            metrics: the logged metrics, by name.
            session: the run.
        """
        if session.ranks.rank == 0:
            numbers = {k: as_json_number(v) for k, v in metrics.items() if isinstance(v, int | float)}
            self.write("log", step=session.step, metrics=numbers)
        if "train_runtime" in metrics:
            self.now("idle", session)

    def end(self) -> None:
        """Record that the run is closed, with the error that ended it, if there is one, and close the file."""
        error = sys.exc_info()[1] or getattr(sys, "last_value", None)
        told = None if error is None or error is self._error else f"{type(error).__name__}: {error}"
        self.write("end", error=told)
        self._lines.close()


def _line(row: JsonObject) -> str:
    return json.dumps(row, allow_nan=False, separators=(",", ":"))


def _lost(count: int) -> str:
    return _line({"event": "lost", "time": round(time.time(), 4), "count": count})


def _facts(session: Run) -> JsonObject:
    import torch
    from trlx_hybrid.commands.doctor import installed, system

    policy, args = session.policy, session.args
    parameters = [(getattr(p, "ds_numel", p.numel()) * p.element_size(), p) for p in policy.module.parameters()]
    cuda = policy.device.type == "cuda"
    return {
        "model": getattr(policy.base.config, "_name_or_path", "") or policy.architecture,
        "architecture": policy.architecture,
        "dtype": str(policy.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(policy.device) if cuda else policy.device.type,
        "policy_bytes": sum(nbytes for nbytes, _ in parameters),
        "trainable_bytes": sum(nbytes for nbytes, p in parameters if p.requires_grad),
        "max_steps": int(getattr(args, "max_steps", -1)),
        "settings": {name: getattr(args, name) for name in SETTINGS if getattr(args, name, None) is not None},
        "versions": installed() | {"python": system()["python"]},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """An interval of time in which one rank had one activity.

    Attributes:
        start: number of the run's launch in which the interval lies; a resumed run has several, counted from 0.
        rank: the rank.
        name: the activity, a name in `ACTIVITIES`.
        begin, end: the interval, in seconds since 1970.
        step: the number of optimizer steps done when the interval began.
        training: False during an evaluation.
    """

    start: int
    rank: int
    name: str
    begin: float
    end: float
    step: int
    training: bool


@dataclass(slots=True, kw_only=True)
class Events:
    """All events that a run has recorded, as they are read from its files.

    A run that is resumed from a checkpoint is launched several times; each launch is called a start. Of steps that a
    later start has repeated, only the later start's events are kept.

    Attributes:
        starts: for each start, what rank 0 recorded about the run (model, settings, versions and so on), the start's
            time, and as "last" the time of its last event, in seconds since 1970.
        header: the lines that the trainer printed when the last start began: its components, predicted memory, notes.
        logs: (optimizer step, metrics) for each line that the trainer logged.
        syncs: (rank, recorded line) for each weight sync; the line is a parsed JSON object.
        held: (rank, recorded line) for each phase that began; the line's "held" has the bytes that each owner of memory
            held.
        spans: the intervals of all starts and ranks.
        errors: for each rank whose last start ended with an error, the error's class and text.
        ended: whether rank 0's last start was closed, rather than killed.
        broken: how many lines could not be read; a run that is killed may leave a half-written line.
        lost: how many events a full disk has lost, as far as later events could report it.
    """

    starts: list[JsonObject] = field(default_factory=list)
    header: list[str] = field(default_factory=list)
    logs: list[tuple[int, JsonObject]] = field(default_factory=list)
    syncs: list[tuple[int, JsonObject]] = field(default_factory=list)
    held: list[tuple[int, JsonObject]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)
    ended: bool = False
    broken: int = 0
    lost: int = 0


def read_events(run: Path) -> Events:
    """Read the events of a run. A run that recorded none has an empty `Events`.

    If the last start had fewer ranks than an earlier one, only the spans of the missing ranks are returned.

    Args:
        run: the `output_dir` of the run.

    Raises:
        HybridError: a file cannot be read.
    """
    found = Events()
    files = {int(f.stem[4:]): f for f in (run / FOLDER).glob("rank*.jsonl") if f.stem[4:].isdecimal()}
    for rank, file in sorted(files.items()):
        starts: list[list[JsonObject]] = []
        for row in _rows(file, found):
            if row["event"] == "lost":
                found.lost += int(row.get("count", 0))
                continue
            if row["event"] == "start":
                starts.append([])
            if starts:
                starts[-1].append(row)
        kept: list[JsonObject] = []
        for number, rows in enumerate(starts):
            found.spans += _spans(number, rank, rows)
            kept = [*_before(kept, rows), *rows]
        if rank == 0:
            found.starts = [rows[0] | {"last": rows[-1]["time"]} for rows in starts]
            found.logs = [(row["step"], row["metrics"]) for row in kept if row["event"] == "log"]
            found.header = next((row["lines"] for row in reversed(kept) if row["event"] == "header"), [])
            found.ended = bool(starts) and starts[-1][-1]["event"] == "end"
        found.syncs += [(rank, row) for row in kept if row["event"] == "sync"]
        found.held += [(rank, row) for row in kept if row.get("held")]
        last = starts[-1][-1] if starts else {}
        if last.get("error"):
            found.errors[rank] = str(last["error"])
    world = found.starts[-1].get("world", 0) if found.starts else 0
    found.syncs = [(rank, row) for rank, row in found.syncs if rank < world]
    found.held = [(rank, row) for rank, row in found.held if rank < world]
    found.errors = {rank: error for rank, error in found.errors.items() if rank < world}
    return found


def _rows(file: Path, found: Events) -> Iterator[JsonObject]:
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise HybridError(f"cannot read {file}: {error.strerror}.") from error
    for line in filter(None, lines):
        try:
            row = json.loads(line)
            whole = isinstance(row, dict) and {"event", "time"} <= row.keys()
        except ValueError:
            whole = False
        if whole:
            yield row
        else:
            found.broken += 1


def _spans(start: int, rank: int, rows: list[JsonObject]) -> Iterator[Span]:
    """Yield one rank's spans (intervals with an activity) in one launch of the run. Each span lasts until the rank's
    next activity begins, and the last one until the rank's last event.

    Args:
        start: number of the launch, from 0.
        rank: the rank.
        rows: the lines that the rank recorded in this launch; not empty.
    """
    said = [row for row in rows if row["event"] == "now"]
    ends = [row["time"] for row in said[1:]] + [rows[-1]["time"]]
    for row, end in zip(said, ends, strict=True):
        who = {"start": start, "rank": rank, "name": row["name"], "step": row["step"], "training": row["training"]}
        yield Span(begin=row["time"], end=max(end, row["time"]), **who)


def _before(kept: list[JsonObject], rows: list[JsonObject]) -> Iterator[JsonObject]:
    """Yield those lines of a run's earlier launches that remain valid after a later launch, which was resumed from a
    checkpoint: the lines of steps before the first step that the later launch trained.

    The metrics of step n are logged with the number n + 1, so for lines with metrics the bound is higher by one.

    Args:
        kept: the lines of the earlier launches that are valid so far.
        rows: the lines of the later launch. If it trained no step, all of `kept` are yielded.
    """
    sampled = [row["step"] for row in rows if row["event"] == "now" and row["name"] == "rollout" and row["training"]]
    logged = [row["step"] - 1 for row in rows if row["event"] == "log" and "loss" in row["metrics"]]
    first = min(sampled or logged, default=None)
    return (r for r in kept if first is None or r.get("step", 0) < first + (r["event"] == "log"))


def trace(events: Events, title: str) -> JsonObject:
    """Return a run's spans (intervals with an activity) in the Trace Event Format, which Perfetto and chrome://tracing
    open, with one track per rank.

    Args:
        events: the run's events.
        title: the name that the viewer shows for the run.

    Returns:
        The content of the JSON file; times are in microseconds since the first span.
    """
    origin = min((span.begin for span in events.spans), default=0.0)
    rows: list[JsonObject] = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": title}}]
    for rank in sorted({span.rank for span in events.spans}):
        rows.append({"ph": "M", "pid": 0, "tid": rank, "name": "thread_name", "args": {"name": f"rank {rank}"}})
    for span in events.spans:
        times = {"ts": round((span.begin - origin) * 1e6), "dur": round((span.end - span.begin) * 1e6)}
        args = {"step": span.step, "training": span.training, "start": span.start}
        rows.append({"ph": "X", "pid": 0, "tid": span.rank, "name": span.name, **times, "args": args})
    return {"traceEvents": rows, "displayTimeUnit": "ms"}
