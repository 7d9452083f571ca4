"""The grouping of logged metrics into charts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from .record import JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """A chart of the page: a group of logged metrics that are drawn together.

    Attributes:
        title: the chart's title, with the unit in brackets.
        names: patterns (`fnmatch`) that match the metrics' names in the trainer's log.
        missing: what to set so that the trainer logs these metrics, shown where it did not log them.
    """

    title: str
    names: tuple[str, ...]
    missing: str


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
UNITS = {"seconds": "seconds", "bytes": "bytes", "mib": "MiB", "length": "tokens", "ratio": "ratio"}
NOT_DRAWN = ("epoch", "step", "total_flos", "train_*", "eval_runtime", "*_per_second")

Series = dict[str, dict[int, float | None]]  # by name, the value at each step


def curves(logs: Sequence[tuple[int, JsonObject]]) -> dict[str, Series]:
    """Group the logged metrics into charts.

    The charts of `FIRST` come first. The metrics that these do not show share a chart with others of the same prefix,
    the part of the name before its last "/". If the prefix begins with "hybrid", they must also have the same unit.
    Metrics of evaluations (`eval_…`) are drawn in the charts of the training metrics.

    Args:
        logs: optimizer step and metrics of each line that the trainer logged.

    Returns:
        The values of each metric by name and step, by the title of the chart. NaN and infinities become None.
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
    for group in FIRST:
        if any(fnmatchcase(name, pattern) for pattern in group.names):
            return group.title
    folder, _, last = name.rpartition("/")
    unit = UNITS.get(last.rpartition("_")[2], "")
    if folder and (unit or not name.startswith("hybrid")):
        return f"{folder} ({unit})" if unit else folder
    return name
