"""An HTML page about a run, in a single file that loads nothing from elsewhere: a timeline of phases, trajectories,
curves of metrics, weight syncs and memory."""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from html import escape
from pathlib import Path
from statistics import median

from trlx_hybrid.errors import HybridError

from .choice import TOKENS, choose
from .events import ACTIVITIES, FOLDER, SETTING, TRAJECTORIES, Events, Span, read_events
from .page import article, contents, document, legend, packaged, part
from .record import JsonObject, Recorded, RecordError, read
from .view import number, number_of, sections, visible

POINTS = 2000  # of a curve, at most
SPANS = 40_000  # in the timeline, at most: the last ones
RANKS = 8  # that have a curve each; of more, the smallest, the median and the largest are drawn
LONGEST = 1200  # characters of a text that is shown without its tokens
MIB = 1 << 20
LICENCE = "uPlot 1.6.32, which draws the curves, and this licence of it:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """A chart of the page: a group of logged metrics that are drawn together.

    Attributes:
        title: the chart's title, with the unit in brackets.
        names: patterns (`fnmatch`) that match the metrics' names in the trainer's log.
        missing: a hint that is shown if none of the metrics was logged: which trainers or settings log them. Without a
            hint, nothing is shown.
    """

    title: str
    names: tuple[str, ...]
    missing: str = ""


FIRST = (
    Curves(title="reward", names=("reward", "rewards/*/mean"), missing="GRPO and RLOO log it"),
    Curves(
        title="completion length (tokens)",
        names=("completions/mean_length", "completions/min_length", "completions/max_length"),
        missing="the trainers that generate log it",
    ),
    Curves(title="entropy (nats)", names=("entropy",), missing="GRPO logs it"),
    Curves(
        title="log-prob gap between engine and trainer (nats)",
        names=("sampling/sampling_logp_difference/*",),
        missing="GRPO logs it with an engine and vllm_importance_sampling_correction=True",
    ),
    Curves(title="loss", names=("loss",), missing="every trainer logs it, at each of its logging_steps"),
    Curves(title="KL to the reference model (nats)", names=("kl",), missing="set beta above 0"),
)
TOGETHER = (
    Curves(title="hybrid/staleness (optimizer steps)", names=("hybrid/staleness/*",)),
    Curves(title="hybrid/in_flight (share)", names=("hybrid/in_flight/occupancy", "hybrid/in_flight/alone")),
)
UNITS = {"seconds": "seconds", "bytes": "bytes", "mib": "MiB", "length": "tokens", "ratio": "ratio"}
NOT_DRAWN = ("epoch", "step", "total_flos", "train_*", "eval_runtime", "*_per_second")

Series = dict[str, dict[int, float | None]]  # by name, the value at each step


def as_report(run: Path) -> str:
    """Return the HTML page about a run.

    Args:
        run: the `output_dir` of the run, which may still be going on.

    Raises:
        HybridError: there is no such folder, or it holds nothing that a run has recorded.
    """
    if not run.is_dir():
        raise HybridError(f"{run} is no folder. Give the output_dir of a run.")
    events = read_events(run)
    logs, source = (events.logs, "") if events.logs else _of_checkpoint(run)
    trajectories = _trajectory_file(run, events)
    if not events.starts and not logs and trajectories is None:
        raise HybridError(f"{run} holds no recording of a run. Start it with {SETTING}, and give its output_dir.")
    groups = curves(logs)
    data: JsonObject = {"charts": [], "colours": list(ACTIVITIES)}
    parts = [
        *_part("timeline", "Timeline", _timeline(events, data)),
        *_part("trajectories", "Trajectories", _trajectories(trajectories)),
        *_part("curves", "Curves", _curves(groups, source, data)),
        *_part("syncs", "Weight syncs", _syncs(events, data)),
        *_part("memory", "Memory", _memory(events, data)),
    ]
    title = (run.resolve().name or str(run)) + " · run report"
    links = {p: f'<a href="#{p}">{p}</a>' for p in ("timeline", "trajectories", "curves", "syncs", "memory")}
    links["syncs"] = '<a href="#syncs">weight syncs</a>'
    body = [
        *_head(title, run, events, logs),
        f'<nav class="parts">{" ".join(links.values())}</nav>',
        "<main>",
        *parts,
        "</main>",
        f'<script type="application/json" id="data">{_json(data)}</script>',
    ]
    notice = f"/* {LICENCE}\n\n{packaged('uplot/LICENSE').strip()} */\n"
    plot = notice + packaged("uplot/uPlot.iife.min.js").partition("\n")[2]  # its first line is an address
    styles = [packaged("uplot/uPlot.min.css"), packaged("page.css"), packaged("report.css")]
    return document(title, body, styles=styles, scripts=[plot, packaged("page.js"), packaged("report.js")])


def _json(data: object) -> str:
    """Return data as strict JSON for a script element. Each `<` is escaped, so that no text in the data can end the
    element."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _part(name: str, title: str, lines: Iterable[str]) -> Iterator[str]:
    yield f'<div class="part" id="{name}">\n<h2>{title}</h2>'
    yield from lines
    yield "</div>"


def _of_checkpoint(run: Path) -> tuple[list[tuple[int, JsonObject]], str]:
    """Read what the trainer logged from the newest checkpoint, for a run that has not recorded events.

    Args:
        run: the `output_dir` of the run.

    Returns:
        A list of (optimizer step, metrics) for each line that was logged, and a sentence that names the source; an
        empty list and "" if there is no checkpoint.

    Raises:
        HybridError: the checkpoint's `trainer_state.json` cannot be read.
    """
    files = sorted(run.glob("**/trainer_state.json"), key=lambda file: file.stat().st_mtime)
    if not files:
        return [], ""
    try:
        history = json.loads(files[-1].read_text())["log_history"]
        logs = [(int(line["step"]), {k: v for k, v in line.items() if k != "step"}) for line in history]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HybridError(f"cannot read {files[-1]}: {error}. Remove it, or report on another run.") from error
    return logs, f"From {files[-1].relative_to(run)}, up to that checkpoint. {SETTING} records every line."


# --- the head -------------------------------------------------------------------------------------------------------


def _head(title: str, run: Path, events: Events, logs: list[tuple[int, JsonObject]]) -> Iterator[str]:
    first = events.starts[-1] if events.starts else {}
    facts = [("status", _status(events, logs)), ("model", _model(first))]
    steps = max((step for step, _ in logs), default=None)
    if steps is None and events.spans:
        steps = max(span.step for span in events.spans)
    planned = f" of {first['max_steps']}" if first.get("max_steps", -1) > 0 else ""
    facts.append(("steps", f"{steps}{planned}" if steps is not None else ""))
    if events.starts:
        starts = len(events.starts)
        seconds = sum(start["last"] - start["time"] for start in events.starts)
        facts.append(("time", _duration(seconds) + (f" in {starts} starts" if starts > 1 else "")))
        facts.append(("started", _moment(events.starts[0]["time"])))
        facts.append(("ranks", f"{first['world']} × {first['device']}"))
        facts.append(("settings", ", ".join(f"{k}={v}" for k, v in first["settings"].items())))
        facts.append(("versions", ", ".join(f"{k} {v}" for k, v in first["versions"].items())))
    yield '<header class="page">' + part("heading", title=title, lede=str(run)) + part("facts_of_run", facts=facts)
    if not events.starts:
        yield _absent(f"What ran, its phases, weight syncs and memory were not recorded: {SETTING} records them.")
    if events.broken:
        yield _absent(f"{number_of(events.broken, 'line')} of the recording left out: a killed run leaves half a line.")
    if events.lost:
        yield _absent(f"{number_of(events.lost, 'event')} lost: the disk was full. Times and curves have gaps there.")
    if events.header:
        header = escape(visible("\n".join(events.header)))
        yield f"<details><summary>header of the run</summary><pre>{header}</pre></details>"
    yield "</header>"


def _status(events: Events, logs: list[tuple[int, JsonObject]]) -> str:
    if not events.starts:
        return "not known"
    if events.errors:
        rank, error = min(events.errors.items())
        return f"stopped by an error on rank {rank}: {error}"
    last = max(span.begin for span in events.spans) if events.spans else 0.0
    if any(span.name == "idle" and span.start == len(events.starts) - 1 for span in events.spans):
        return "finished"
    if events.ended:
        return "closed before training was over"
    last = max(last, events.starts[-1]["last"])
    return f"running, or killed: the last event is of {_moment(last)}"


def _model(first: JsonObject) -> str:
    if not first:
        return ""
    trained = first["trainable_bytes"]
    share = "" if trained == first["policy_bytes"] else f", {_mib(trained)} MiB of it trained"
    names = dict.fromkeys((first["model"], first["architecture"], first["dtype"]))  # without a name it is the class
    return f"{', '.join(names)}, {_mib(first['policy_bytes'])} MiB{share}"


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def _duration(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest:.0f} s" if minutes else f"{rest:.1f} s"


def _mib(nbytes: float) -> str:
    return number(nbytes / MIB)


def _absent(text: str) -> str:
    return f'<p class="absent">{escape(text)}</p>'


# --- curves ---------------------------------------------------------------------------------------------------------


def curves(logs: Sequence[tuple[int, JsonObject]]) -> dict[str, Series]:
    """Group the logged metrics into charts.

    The charts of `FIRST` come first. Other metrics share a chart of `TOGETHER`, or one if their names have the same
    prefix, which is the part before the last "/". If the prefix begins with "hybrid", they must also have the same
    unit. Metrics of evaluations (`eval_…`) are drawn in the charts of the training metrics.

    Args:
        logs: (optimizer step, metrics) for each line that the trainer logged.

    Returns:
        For each chart's title, the metrics drawn in it: by the metric's name, a dict from steps to values. NaN and
        infinities become None.
    """
    found: dict[str, Series] = {group.title: {} for group in FIRST}
    others: dict[str, Series] = {}
    for step, metrics in logs:
        for name, value in metrics.items():
            if not isinstance(value, int | float | str) or any(fnmatchcase(name, p) for p in NOT_DRAWN):
                continue
            try:
                drawn = float(value)
            except ValueError:
                continue
            title = _title(name.removeprefix("eval_"))
            series = found[title] if title in found else others.setdefault(title, {})
            series.setdefault(name, {})[step] = drawn if math.isfinite(drawn) else None
    return found | dict(sorted(others.items()))


def _title(name: str) -> str:
    for group in (*FIRST, *TOGETHER):
        if any(fnmatchcase(name, pattern) for pattern in group.names):
            return group.title
    folder, _, last = name.rpartition("/")
    unit = UNITS.get(last.rpartition("_")[2], "")
    if folder and (unit or not name.startswith("hybrid")):
        return f"{folder} ({unit})" if unit else folder
    return name


def _chart(title: str, series: Series, data: JsonObject, axis: str = "step") -> str:
    steps = sorted({step for values in series.values() for step in values})
    every = math.ceil(len(steps) / POINTS) or 1
    thinned = steps[::every] if steps[-1:] == steps[::every][-1:] else [*steps[::every], steps[-1]]
    values = [[name, [_rounded(found.get(step)) for step in thinned]] for name, found in series.items()]
    data["charts"].append({"title": title, "axis": axis, "x": thinned, "series": values})
    note = f" <small>every {every} steps</small>" if every > 1 else ""
    number_ = len(data["charts"]) - 1
    caption = f"<figcaption>{escape(visible(title))}{note}</figcaption>"
    return f'<figure class="chart">{caption}<div class="plot" data-chart="{number_}"></div></figure>'


def _rounded(value: float | None) -> float | int | None:
    if value is None:
        return None
    short = float(f"{value:.5g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def _curves(groups: dict[str, Series], source: str, data: JsonObject) -> Iterator[str]:
    if not any(groups.values()):
        yield _absent(f"Nothing was logged yet: {SETTING} records what the trainer logs, each logging_steps.")
        return
    if source:
        yield _absent(source)
    first = [group.title for group in FIRST]
    hybrid = [title for title in groups if title.startswith("hybrid")]
    others = [title for title in groups if title not in first + hybrid]
    for heading, titles in (("", first), ("of trlx_hybrid", hybrid), ("other metrics", others)):
        if any(groups[title] for title in titles):
            yield (f"<h3>{heading}</h3>" if heading else "") + '<div class="charts">'
            yield from (_chart(title, groups[title], data) for title in titles if groups[title])
            yield "</div>"
    missing = [f"{group.title} ({group.missing})" for group in FIRST if not groups[group.title]]
    if missing:
        yield _absent(f"Not logged: {'; '.join(missing)}.")


# --- timeline -------------------------------------------------------------------------------------------------------


def _timeline(events: Events, data: JsonObject) -> Iterator[str]:
    last = len(events.starts) - 1
    world = events.starts[-1]["world"] if events.starts else 0
    started = {span.rank: span.start for span in events.spans}  # each rank's last start
    spans = [span for span in events.spans if span.rank < world and span.start == started[span.rank]]
    if not spans:
        yield _absent(f"No phases were recorded: {SETTING} records them.")
        return
    if not any(span.name == "rollout" for span in spans):
        why = "there was no rollout yet, or TRL generates, which has none: use_vllm=True or HybridConfig.engine"
        yield _absent(f"No phases: {why} chooses an engine.")
        return
    used = [name for name in ACTIVITIES if any(span.name == name for span in spans)]
    chips = (f'<div><dt><i class="chip p-{n}"></i>{n}</dt><dd>{ACTIVITIES[n]}</dd></div>' for n in used)
    yield f'<dl class="chips">{"".join(chips)}</dl>'
    drawn = sorted(spans, key=lambda span: span.begin)[-SPANS:]
    origin = min(span.begin for span in drawn)
    notes = [f"of the last of {last + 1} starts"] if last else []
    notes += [f"the last {SPANS} of {len(spans)} spans"] if len(spans) > SPANS else []
    note = f" <small>{'; '.join(notes)}; --trace has all</small>" if notes else ""
    ranks = sorted({span.rank for span in drawn})
    data["timeline"] = {"ranks": ranks, "rows": [_row([s for s in drawn if s.rank == r], origin) for r in ranks]}
    yield f"<figure><figcaption>what each rank did, by seconds since {_moment(origin)}{note}</figcaption>"
    yield '<div class="plot" id="spans"></div><p class="at">Drag to zoom.</p>'
    views = ("last steps", "earlier", "later", "all")
    yield "".join(f'<button type="button">{view}</button>' for view in views) + "</figure>"
    heads = ["seconds, by rank", *used, "sum"]
    yield part("table", heads=heads, rows=[_seconds(spans, rank, used) for rank in ranks])


def _row(spans: list[Span], origin: float) -> dict[str, list[int]]:
    """Return one rank's spans (intervals with an activity) as the page's script draws them in the timeline.

    Args:
        spans: the rank's spans, in order.
        origin: the time at which the timeline begins, in seconds since 1970.

    Returns:
        Lists with a number for each span: "begin" and "end", in milliseconds since `origin`; "what", the place of the
        span's activity in `ACTIVITIES`; and "step", the optimizer step, or -1 - step for an evaluation.
    """
    names = list(ACTIVITIES)
    return {
        "begin": [round((span.begin - origin) * 1000) for span in spans],
        "end": [round((span.end - origin) * 1000) for span in spans],
        "what": [names.index(span.name) for span in spans],
        "step": [span.step if span.training else -1 - span.step for span in spans],
    }


def _seconds(spans: list[Span], rank: int, used: list[str]) -> list[str]:
    took = {name: sum(s.end - s.begin for s in spans if s.rank == rank and s.name == name) for name in used}
    whole = sum(took.values())
    return [f"rank {rank}", *(f"{number(t)} ({t / whole if whole else 0:.0%})" for t in took.values()), number(whole)]


# --- weight syncs ---------------------------------------------------------------------------------------------------


def _syncs(events: Events, data: JsonObject) -> Iterator[str]:
    if not events.syncs:
        why = "TRL's own generation has none" if events.starts else f"{SETTING} records them"
        yield _absent(f"No weight sync was recorded: {why}.")
        return
    by_rank: dict[int, list[JsonObject]] = defaultdict(list)
    for rank, row in events.syncs:
        by_rank[rank].append(row)
    first = events.starts[-1] if events.starts else {}
    policy, trained = first.get("policy_bytes", 0), first.get("trainable_bytes", 0)
    frozen = f", {_mib(trained)} MiB of them trained" if trained != policy else ""
    kinds = ", ".join(sorted({row["weights"] for _, row in events.syncs}))
    verified = max(row["verified"] for _, row in events.syncs)
    yield f"<p>Path: {escape(kinds)}. The policy has {_mib(policy)} MiB{frozen}. "
    yield f"At most {number_of(verified, 'tensor')} of a sync were compared with the engine's.</p>"
    heads = ["rank", "syncs", "seconds, first", "seconds, median", "seconds, largest"]
    heads += ["MiB, median", "of the policy", "GB/s, median"]
    yield part("table", heads=heads, rows=[_sync_row(rank, rows, policy) for rank, rows in by_rank.items()])
    yield '<div class="charts">'
    for title, key, scale in (("seconds of a sync", "seconds", 1.0), ("MiB handed to the engine", "bytes", 1 / MIB)):
        values = {rank: {row["step"]: row[key] * scale for row in rows} for rank, rows in by_rank.items()}
        yield _chart(title, _per_rank(values), data)
    gaps = {row["step"]: float(row["logprob_gap"]) for row in by_rank[min(by_rank)] if row["logprob_gap"] is not None}
    if gaps:
        finite = {step: gap if math.isfinite(gap) else None for step, gap in gaps.items()}
        yield _chart("log-prob gap on the probe sequence (nats)", {f"rank {min(by_rank)}": finite}, data)
    yield "</div>"
    yield _absent("Seconds are those of the transfer; the timeline's sync holds its checks as well.")


def _sync_row(rank: int, rows: list[JsonObject], policy: int) -> list[str]:
    seconds, moved = [row["seconds"] for row in rows], median(row["bytes"] for row in rows)
    rate = median(row["bytes"] / row["seconds"] / 1e9 if row["seconds"] > 0 else 0.0 for row in rows)
    took = [number(value) for value in (seconds[0], median(seconds), max(seconds))]
    share = f"{moved / policy:.0%}" if policy else "–"
    return [f"rank {rank}", str(len(rows)), *took, _mib(moved), share, number(rate)]


def _per_rank(values: dict[int, dict[int, float]]) -> Series:
    """Return the curves of a quantity that each rank measures: one per rank, or, for more than `RANKS` ranks, the
    smallest, the median and the largest value over the ranks. A curve is a dict from steps to values, by its name.

    Args:
        values: for each rank, a dict from steps to the measured values.
    """
    if len(values) <= RANKS:
        return {f"rank {rank}": dict(found) for rank, found in values.items()}
    at: dict[int, list[float]] = defaultdict(list)
    for found in values.values():
        for step, value in found.items():
            at[step].append(value)
    over = (("smallest of the ranks", min), ("median", median), ("largest", max))
    return {name: {step: float(of(v)) for step, v in sorted(at.items())} for name, of in over}


# --- memory ---------------------------------------------------------------------------------------------------------


def _memory(events: Events, data: JsonObject) -> Iterator[str]:
    if not events.held:
        why = "TRL's own generation has no phases" if events.starts else f"{SETTING} records it"
        yield _absent(f"No memory was measured: {why}.")
        return
    phases = list(dict.fromkeys(row["phase"] for _, row in events.held))
    owners = [owner for owner in events.held[0][1]["held"] if any(row["held"].get(owner) for _, row in events.held)]
    if not owners:
        yield _absent("No owner held memory on the device of the policy.")
        return
    most: dict[tuple[str, str], tuple[int, int]] = {}
    for rank, row in events.held:
        for owner, held in [*row["held"].items(), ("all owners", sum(row["held"].values()))]:
            most[owner, row["phase"]] = max(most.get((owner, row["phase"]), (0, 0)), (held, -rank))
    yield "<p>The most that an owner held when a phase began, in MiB, and the rank where that was.</p>"
    rows = (
        [owner, *(_most(*most[owner, phase]) if (owner, phase) in most else "–" for phase in phases)]
        for owner in [*owners, "all owners"]
    )
    yield part("table", heads=["owner", *phases], rows=rows)
    largest = -max(most["all owners", phase] for phase in phases)[1]
    yield '<div class="charts">'
    for phase in phases:
        series: Series = {owner: {} for owner in owners}
        for rank, row in events.held:
            if rank == largest and row["phase"] == phase:
                for owner in owners:
                    series[owner][row["step"]] = row["held"].get(owner, 0) / MIB
        yield _chart(f"MiB in {phase}, rank {largest}", {o: v for o, v in series.items() if v}, data)
    yield "</div>"


def _most(held: int, rank: int) -> str:
    return f"{_mib(held)} (rank {-rank})" if held else "0"


# --- trajectories ---------------------------------------------------------------------------------------------------


def _trajectory_file(run: Path, events: Events) -> Path | None:
    named = [Path(start["trajectories"]) for start in reversed(events.starts) if start.get("trajectories")]
    moved = [run / FOLDER / file.name for file in named] + [run / file.name for file in named]
    places = [*named, *moved, run / FOLDER / TRAJECTORIES, run / TRAJECTORIES]
    return next((file for file in places if file.is_file()), None)


def _trajectories(file: Path | None) -> Iterator[str]:
    if file is None:
        yield _absent(f"No trajectories were recorded: {SETTING} records them, or record=FILE in its place.")
        return
    broken: list[int] = []
    try:
        chosen = choose(read(file, broken))
        wanted = {line for lines in [*chosen.lists.values(), *chosen.again] for line in lines}
        recorded = {one.line: one for one in read(file, []) if one.line in wanted}
    except RecordError as error:
        yield _absent(str(error))
        return
    if not chosen.total:
        yield _absent(f"{file} holds no trajectories yet.")
        return
    whole = f"{number_of(chosen.total, 'trajectory', 'trajectories')}, {chosen.failed} failed"
    yield f"<p>{whole}, in <code>{escape(visible(str(file)))}</code>; these are some of them. "
    yield "<code>trlx-hybrid trajectories</code> shows any.</p>"
    if broken:
        yield _absent(f"{number_of(len(broken), 'line')} left out: a killed run leaves half a line.")
    if chosen.long:
        yield _absent(f"{chosen.long} left out for their length: this page shows {TOKENS} tokens.")
    yield legend()
    for name, lines in chosen.lists.items():
        if lines:
            yield f"<h3>{name}</h3>"
            yield contents([recorded[line] for line in lines], list(recorded.values()))
    yield "<h3>prompts that came again</h3>"
    if not chosen.again:
        yield _absent("None among those that were recorded. record_limit records more of each batch.")
    for lines in chosen.again:
        yield _again([recorded[line] for line in lines])
    for line in sorted({line for lines in chosen.lists.values() for line in lines}):
        yield article(recorded[line])


def _again(found: list[Recorded]) -> str:
    """Return the HTML of a prompt that was sampled at several steps, with its completion and reward at each step.

    Args:
        found: the prompt's trajectories, in the order of their steps.
    """
    prompt = "".join(span.text for section in sections(found[0])[:1] for span in section.spans)
    rows = []
    for one in found:
        pieces, left = [], LONGEST
        for section in sections(one)[1:] if one.prompt_ids else sections(one):
            text = _cut("".join(span.text for span in section.spans), left)
            left = max(0, left - len(text))
            pieces.append((section.kind, text))
        rows.append((one, pieces))
    return part("again", prompt=_cut(prompt, 160), rewards=" → ".join(number(one.reward) for one in found), rows=rows)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: max(0, length - 1)] + "…"
