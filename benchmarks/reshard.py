"""Milliseconds to bring FSDP2's shards into tensor-parallel engines, against gathering every tensor on every rank.

Each case is a set of processes, one per GPU, with a policy under FSDP2 and a vLLM engine of the given size in each. All
arms write into the same engines, in turn: `gather` streams full tensors into vLLM's loader one after the other, as TRL
does; `gather-bucketed` all-gathers 256 MiB at a time in the engine's dtype, as verl does; `reshard` moves what each
rank lacks. Before each turn the engines sleep and wake, and hold NaN; after it the bits of all arms must be equal. A
turn begins and ends with a barrier and counts the slowest rank; the ranks' agreement on plan and version is part of it.
The bandwidths of NVLink and of a device copy are measured in the same processes.

Each case is written as soon as it is measured, and a case that fails loses none of the others. With `--add`, one
command per case makes one file:

    python -m benchmarks.reshard --gpus 4 --pairs 4,2 --dtypes bfloat16 --add
    python -m benchmarks.reshard --gpus 4 --pairs 4,4 --dtypes bfloat16 --model 70b --add
    python -m benchmarks.reshard --gpus 4 --pairs 4,4 --dtypes bfloat16 --model 30b-a3b --add
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trlx_hybrid.testing.processes import free_port

from .harness import Measurement
from .result import Result, accelerator, publish_each

CASE_SECONDS = 420.0
WARMUP = 2
LAYERS = {"70b": 20, "30b-a3b": 12}
"""The default number of layers of large models, so that policy, engine and arms fit beside each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One policy and its engines.

    Attributes:
        model: a name of `trlx_hybrid_reshard.planner.architectures`, or "tiny" for a CPU.
        ranks: ranks of FSDP.
        tp: ranks of each engine.
        dtype: dtype of the policy; the engines are in bf16.
        layers: replaces the shape's own number of layers; 0 keeps it.
    """

    model: str
    ranks: int
    tp: int
    dtype: str = "bfloat16"
    layers: int = 0

    @property
    def name(self) -> str:
        """The name in the table."""
        model = f"{self.model}-{self.layers}-layers" if self.layers else self.model
        master = ", fp32 master" if self.dtype == "float32" else ""
        return f"{model} ({self.ranks},{self.tp}){master}"

    @property
    def metric(self) -> str:
        """The name in the names of metrics."""
        master = "_fp32" * (self.dtype == "float32")
        model = "" if self.model in ("7b", "tiny") else f"_{self.model.replace('-', '_')}"
        return f"{self.ranks}_{self.tp}{master}{model}" + f"_{self.layers}_layers" * bool(self.layers)


PAIRS = {4: ((4, 4), (4, 2), (4, 1)), 2: ((2, 2), (2, 1))}
"""The pairs (ranks, tp) by the number of GPUs."""


def measure(case: Case, repetitions: int, unrecorded: bool = False) -> dict[str, Any]:
    """Run the processes of one case, and return what rank 0 wrote.

    Raises:
        RuntimeError: a process failed; with the end of its output.
    """
    port = str(free_port())
    with tempfile.TemporaryDirectory(prefix="benchmark-reshard-") as folder:
        order = json.dumps(
            {"case": asdict(case), "repetitions": repetitions, "warmup": WARMUP, "folder": folder}
            | {"unrecorded": unrecorded}
        )
        common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(case.ranks)}
        common.setdefault("VLLM_ALLREDUCE_USE_FLASHINFER", "0")  # or its kernels are compiled first
        common.setdefault("OMP_NUM_THREADS", "1")
        processes = []
        for rank in range(case.ranks):
            log = (Path(folder) / f"rank{rank}.log").open("w")
            environment = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, "-m", "benchmarks.reshard_rank", order]
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        try:
            codes = [process.wait(timeout=CASE_SECONDS) for process in processes]
        except subprocess.TimeoutExpired:
            codes = [-1]
        finally:
            for process in processes:
                process.kill()
        if any(codes):
            logs = [(Path(folder) / f"rank{rank}.log").read_text()[-3000:] for rank in range(case.ranks)]
            raise RuntimeError(f"{case.name} failed with {codes}:\n" + "\n\n".join(logs))
        found: dict[str, Any] = json.loads((Path(folder) / "found.json").read_text())
        return found


def metrics_of(case: Case, found: dict[str, Any]) -> dict[str, float]:
    """Return medians in milliseconds, the floor at the bandwidth that was reached, and memory in MiB."""
    medians = {arm: Measurement(arm, tuple(seconds)).median * 1e3 for arm, seconds in found["seconds"].items()}
    metrics = {f"{arm.replace('-', '_')}_ms_{case.metric}": ms for arm, ms in medians.items()}
    metrics |= {
        f"{arm.replace('-', '_')}_peak_mib_{case.metric}": peak / 2**20 for arm, peak in found["peak_bytes"].items()
    }
    worst = max(max(received, sent) for received, sent in found["moved_bytes"])
    metrics[f"floor_ms_{case.metric}"] = worst / found["point_to_point_bytes_per_second"] * 1e3
    metrics[f"received_gb_worst_rank_{case.metric}"] = max(received for received, _ in found["moved_bytes"]) / 1e9
    return metrics


def run(case: Case, repetitions: int, unrecorded: bool = False) -> Result:
    """Measure one case."""
    found = measure(case, repetitions, unrecorded)
    return Result(
        benchmark="reshard_tiny" if case.model == "tiny" else "reshard",
        device=accelerator(),
        peer="gather",
        measurements=[Measurement(arm, tuple(seconds), case.name) for arm, seconds in found["seconds"].items()],
        metrics=metrics_of(case, found),
        settings={
            "warmup": WARMUP,
            "cases": {case.name: {key: value for key, value in found.items() if key != "seconds"}},
        },
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reshard", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="7b", help="as of `trlx-hybrid reshard-plan`, or tiny (default: 7b)")
    parser.add_argument("--layers", type=int, help="number of layers (default: the model's; 20 of 70b, 12 of 30b-a3b)")
    parser.add_argument("--gpus", type=int, choices=sorted(PAIRS), default=2, help="number of GPUs (default: 2)")
    parser.add_argument("--pairs", nargs="+", metavar="RANKS,TP", help="e.g. 4,2 (default: all)")
    dtypes = ("bfloat16", "float32")
    parser.add_argument("--dtypes", nargs="+", choices=dtypes, default=dtypes, help="of the policy (default: both)")
    parser.add_argument("--repetitions", type=int, default=10, help="of each arm (default: 10)")
    parser.add_argument("--unrecorded", action="store_true", help="one arm more: every copy launched by itself")
    parser.add_argument("--add", action="store_true", help="keep the other cases of this commit's result file")
    given = parser.parse_args(argv)
    pairs = PAIRS[given.gpus]
    if given.pairs:
        pairs = tuple((int(n), int(t)) for n, t in (pair.split(",") for pair in given.pairs))
    layers = LAYERS.get(given.model, 0) if given.layers is None else given.layers
    cases = [
        Case(model=given.model, layers=layers, ranks=n, tp=t, dtype=dtype)
        for (n, t), dtype in itertools.product(pairs, given.dtypes)
    ]
    measured = {case.name: functools.partial(run, case, given.repetitions, given.unrecorded) for case in cases}
    publish_each(measured, add=given.add)


if __name__ == "__main__":
    main()
