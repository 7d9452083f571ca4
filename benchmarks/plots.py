"""The plots and tables of real weights that learn, made from what `benchmarks.real` has measured.

    python -m benchmarks.plots

It writes docs/assets/real-full.svg and docs/assets/real-lora.svg, of the kinds that were measured, such plots of other
tasks than sums (docs/assets/real_tool-full.svg), and what stands between the marks `<!-- real -->` and
`<!-- /real -->` of README, docs/index.md and docs/benchmarks.md. The first two show sums alone.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from .real import ARMS, KINDS, SMOOTHED, named
from .real_tasks import TASKS
from .result import RESULTS

ROOT = RESULTS.parents[1]
PAGES = ("README.md", "docs/index.md", "docs/benchmarks.md")
DEVICE = "nvidia-h200"
"""The device whose result is shown."""

NAMES = {"trl": "TRL", "tuned": "TRL, tuned", "import": "trlx_hybrid", "all": "all of it"}
TRAINED = {"full": "all weights", "lora": "LoRA"}
FIRST = {
    "seconds_to_50%": "half of the reward",
    "seconds_to_90%": "90% of it",
    "step_seconds": "one step",
    "startup_seconds": "start-up",
}
"""The rows of a first page's table, by the metrics they show."""

ALL = {
    "seconds_to_50%": "half of the reward",
    "seconds_to_70%": "70% of it",
    "seconds_to_90%": "90% of it",
    "step_seconds": "one step",
    "startup_seconds": "start-up",
    "reward": "reward of the last ten steps",
    "held_out": "accuracy on questions that were held out",
    "gap": "log-prob gap of engine and trainer, nats",
    "steps_that_overlap": "share of steps in which the seeds' rewards overlap with TRL's",
}
TOLD = {
    "sums": "Sums of two numbers",
    "reasoning-gym": "Sums and differences of reasoning-gym",
    "tool": "Sums with a calculator as a tool",
}
"""The tasks as headings of a page."""

PLACE = re.compile(r"(?<=<!-- real -->\n).*?(?=<!-- /real -->)", re.DOTALL)
WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 52, 622, 84, 336
STYLE = """.page{fill:#fff}text{fill:#1f2328;font:19px system-ui,sans-serif}.rule{stroke:#d8dee4}
.trl{stroke:#b3490b}.tuned{stroke:#6b7280}.import{stroke:#1d4ed8}.all{stroke:#15803d}
@media(prefers-color-scheme:dark){.page{fill:#0d1117}text{fill:#e6edf3}.rule{stroke:#30363d}
.trl{stroke:#f0883e}.tuned{stroke:#a3aab5}.import{stroke:#6ea8fe}.all{stroke:#4ade80}}
circle{fill:none;stroke-width:2}
polyline{fill:none;stroke-linejoin:round}.run{stroke-width:1.4;opacity:.45}.median{stroke-width:3.4}
.end{text-anchor:end}.middle{text-anchor:middle}"""

Line = list[tuple[float, float]]
Runs = Mapping[str, Sequence[Mapping[str, Any]]]


def line(curves: Mapping[str, Any]) -> Line:
    """Return a run as pairs: seconds of training, and the mean reward of the last `SMOOTHED` steps."""
    rewards, seconds = curves["reward"], list(itertools.accumulate(curves["seconds"]))
    return [(seconds[n - 1], statistics.fmean(rewards[n - SMOOTHED : n])) for n in range(SMOOTHED, len(rewards) + 1)]


def held_out(curves: Mapping[str, Any]) -> Line:
    """Return the accuracy of a run on held-out questions as pairs: seconds of training, and the accuracy."""
    seconds = list(itertools.accumulate(curves["seconds"]))
    steps, accuracies = curves.get("held_out_steps", ()), curves.get("held_out_accuracy", ())
    return [(seconds[step - 1], accuracy) for step, accuracy in zip(steps, accuracies, strict=True)]


def median(lines: Sequence[Line]) -> Line:
    """Return the median of several runs: of the seconds and of the rewards at each step."""
    return [(statistics.median(s for s, _ in at), statistics.median(r for _, r in at)) for at in zip(*lines)]


def ticks(end: float) -> range:
    """Return at most seven round numbers from 0 to `end`, equally far apart."""
    steps = (digit * 10**power for power in range(9) for digit in (1, 2, 5))
    return range(0, int(end) + 1, next(step for step in steps if end <= 6.5 * step))


def plot(kind: str, runs: Runs, device: str) -> str:
    """Return an SVG of reward over seconds of training: a thin line for each run, a bold one for the median of an arm,
    and a circle for the median of its accuracy on held-out questions.

    It has colours for a reader's light and dark scheme.
    """
    lines = {arm: [line(curves) for curves in runs[arm]] for arm in ARMS if arm in runs}
    accuracies = {arm: median([held_out(curves) for curves in runs[arm]]) for arm in lines}
    end = max(seconds for found in lines.values() for one in found for seconds, _ in one)

    def placed(seconds: float, reward: float) -> tuple[float, float]:
        return LEFT + (RIGHT - LEFT) * seconds / end, BOTTOM - (BOTTOM - TOP) * reward

    def drawn(of: str, arm: str, points: Line) -> str:
        at = (f"{x:.1f},{y:.1f}" for x, y in itertools.starmap(placed, points))
        return f'<polyline class="{of} {arm}" points="{" ".join(at)}"/>'

    def circles(arm: str, points: Line) -> Iterator[str]:
        for x, y in itertools.starmap(placed, points):
            yield f'<circle class="{arm}" cx="{x:.1f}" cy="{y:.1f}" r="5"/>'

    box = f'viewBox="0 0 {WIDTH} {HEIGHT}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" {box}>',
            f"<title>Reward over seconds of training: {', '.join(NAMES[arm] for arm in lines)}</title>",
            f'<style>{STYLE}</style><rect class="page" width="{WIDTH}" height="{HEIGHT}"/>',
            f'<text x="14" y="28">Reward ({TRAINED[kind]}, one {shown(device)}); ○ held-out accuracy</text>',
            *axes(end),
            *key(lines),
            *(drawn("run", arm, one) for arm, found in lines.items() for one in found),
            *(drawn("median", arm, median(found)) for arm, found in lines.items()),
            *(circle for arm, points in accuracies.items() for circle in circles(arm, points)),
            "</svg>\n",
        ]
    )


def axes(end: float) -> Iterator[str]:
    """Yield the rules of rewards from 0 to 1, and the numbers of both axes."""
    for fifth in range(6):
        y = BOTTOM - (BOTTOM - TOP) * fifth / 5
        yield f'<path class="rule" d="M{LEFT} {y:.1f}H{RIGHT}"/>'
        yield f'<text class="end" x="{LEFT - 8}" y="{y + 6:.1f}">{fifth / 5:g}</text>'
    for second in ticks(end):
        x = LEFT + (RIGHT - LEFT) * second / end
        yield f'<text class="middle" x="{x:.1f}" y="{BOTTOM + 24}">{second}</text>'
    yield f'<text class="end" x="{RIGHT}" y="{BOTTOM + 50}">seconds of training</text>'


def key(arms: Iterable[str]) -> Iterator[str]:
    """Yield the name of each arm, beside a piece of its line."""
    for number, arm in enumerate(arms):
        x = LEFT + number * 150
        yield f'<path class="median {arm}" d="M{x} 54h26"/><text x="{x + 34}" y="60">{NAMES[arm]}</text>'


def table(result: Mapping[str, Any], rows: Mapping[str, str]) -> str:
    """Return a table of a result's metrics, medians over the seeds: a row for each kind and metric, a column an arm."""
    metrics, runs = result["metrics"], measured(result)
    arms = [arm for arm in ARMS if any(arm in found for found in runs.values())]
    names = NAMES | {"import": "here"}
    lines = ["| seconds | " + " | ".join(names[arm] for arm in arms) + " |", "|---|" + "---|" * len(arms)]
    for kind in runs:
        for metric, told in rows.items():
            cells = (number(metrics, f"{metric}_{arm}_{kind}") for arm in arms)
            lines.append(f"| {TRAINED[kind]}: {told} | {' | '.join(cells)} |")
    return "\n".join(lines)


def number(metrics: Mapping[str, float], name: str) -> str:
    """Return a metric in two or three digits, with the number of runs that never reached the reward."""
    never = int(metrics.get(name.replace("seconds_to", "never_at"), 0)) if name.startswith("seconds_to") else 0
    if name not in metrics:
        return "never" if never else "–"
    value = metrics[name]
    return (f"{value:.0f}" if value >= 10 else f"{value:.2f}") + (f" ({never} never)" if never else "")


def shown(device: str) -> str:
    """Return the name of a result's device as its maker spells it, without what follows."""
    return device.removeprefix("nvidia-").partition("-")[0].upper()


def block(result: Mapping[str, Any], prefix: str = "") -> str:
    """Return what a first page shows: a plot, the table, and what they are; `prefix` leads from the page to docs."""
    (kind, *_) = measured(result)
    seeds = max(len(found) for found in measured(result)[kind].values())
    told = (
        f"SmolLM2-135M-Instruct learns such sums, {seeds} seeds of each; the table has medians. *Tuned* is without "
        "sleep mode and gradient checkpointing, which a model this small allows: "
        f"[how it was measured]({prefix}benchmarks.md#real-weights)."
    )
    return f"{picture(kind, prefix)}\n\n{table(result, FIRST)}\n\n{told}"


def picture(kind: str, prefix: str = "", task: str = "sums") -> str:
    """Return a plot as Markdown."""
    return f"![Reward over seconds of training, {TRAINED[kind]}]({prefix}assets/{image(kind, task)})"


def image(kind: str, task: str) -> str:
    """Return the file name of a plot."""
    return f"{named(task)}-{kind}.svg"


def measured(result: Mapping[str, Any]) -> dict[str, Runs]:
    """Return the runs of each kind."""
    runs = result["settings"]["curves"]
    return {kind: runs[kind] for kind in KINDS if kind in runs}


def whole(task: str, result: Mapping[str, Any]) -> str:
    """Return all that is shown of a task: a heading, plots, the table, and the runs that never reached a reward."""
    pictures = [picture(kind, task=task) for kind in measured(result)]
    lost = "\n".join(f"- {told}" for told in result["settings"].get("never", ()))
    return "\n\n".join(filter(None, [f"#### {TOLD[task]}", *pictures, table(result, ALL), lost]))


def written(results: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return the files that show the results of tasks, and their text. Sums are among these tasks."""
    files = {
        f"docs/assets/{image(kind, task)}": plot(kind, found, result["device"])
        for task, result in results.items()
        for kind, found in measured(result).items()
    }
    every = "\n\n".join(itertools.starmap(whole, results.items()))
    sums = results["sums"]
    for page, text in zip(PAGES, (block(sums, "docs/"), block(sums), every), strict=True):
        files[page] = PLACE.sub(f"{text}\n", (ROOT / page).read_text())
    return files


def committed() -> dict[str, Any]:
    """Return the results that there are of the device that is shown, by task, in the order of the tasks."""
    files = {task: RESULTS / f"{named(task)}-{DEVICE}.json" for task in TASKS}
    return {task: json.loads(file.read_text()) for task, file in files.items() if file.exists()}


def main() -> None:
    results = committed()
    if "sums" not in results:
        raise SystemExit(
            f"There is no {RESULTS / f'real-{DEVICE}.json'}: `python -m benchmarks.real FOLDER` measures it on such a "
            "device."
        )
    for name, text in written(results).items():
        (ROOT / name).write_text(text)


if __name__ == "__main__":
    main()
