"""A recording of torch's profiler, written as two tables: the time of part of a step on the device and on the CPU."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROWS = 40
WAITS = (
    "cudaMalloc",
    "cudaFree",
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaMemcpyAsync",
    "cudaLaunchKernel",
)


class Profile:
    """One recording of torch's profiler.

    Args:
        file: path without suffix; the tables are written to `.txt`, the trace for chrome://tracing to `.json.gz`.
    """

    def __init__(self, file: Path) -> None:
        from torch.profiler import ProfilerActivity, profile

        self._file = file
        self._profile: Any = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])

    def start(self) -> None:
        """Start the recording, of this thread and of the device."""
        self._profile.start()

    def stop(self) -> None:
        """Stop the recording, and write the tables and the trace."""
        self._profile.stop()
        events, averages = self._profile.events(), self._profile.key_averages()
        spans = [(e.time_range.start, e.time_range.end) for e in events]
        device = [(e.time_range.start, e.time_range.end) for e in events if e.device_type.name == "CUDA"]
        seconds = (max(end for _, end in spans) - min(start for start, _ in spans)) / 1e6
        lines = [f"{seconds:.3f} s, of which the device is busy for {covered(device) / 1e6:.3f} s"]
        lines += [f"{a.key}: {a.count} calls, {a.cpu_time_total / 1e6:.3f} s" for a in averages if a.key in WAITS]
        for column in ("self_device_time_total", "self_cpu_time_total"):
            lines.append(averages.table(sort_by=column, row_limit=ROWS, max_name_column_width=90))
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.with_suffix(".txt").write_text("\n".join(lines) + "\n")
        self._profile.export_chrome_trace(str(self._file.with_suffix(".json.gz")))


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
