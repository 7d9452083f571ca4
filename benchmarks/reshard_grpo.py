"""Seconds of GRPO steps with FSDP2 and a tensor-parallel vLLM in the same processes, and what resharding has of them.

One process per GPU, started by `accelerate launch`. The model has random weights, kept in fp32 and computed with in
bf16. The first step, in which the engine is built and proven, is left out of the medians.

    python -m benchmarks.reshard_grpo --processes 4 --tp 2 --add
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .harness import Measurement
from .result import Result, accelerator
from .rollout import SCALES

LAUNCH = {
    "num_machines": 1,
    "mixed_precision": "bf16",
    "dynamo_backend": "no",
    "main_process_port": 0,
    "fsdp_version": 2,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_transformer_layer_cls_to_wrap": "Qwen2DecoderLayer",
    "fsdp_reshard_after_forward": "true",
    "fsdp_cpu_ram_efficient_loading": "false",
}
"""What `accelerate config` would have asked for."""

LAUNCH_SECONDS = 540.0


def measure(order: Mapping[str, Any]) -> dict[str, Any]:
    """Train in so many processes; what rank 0 wrote, see `reshard_grpo_rank`.

    Raises:
        RuntimeError: a process failed; its output was shown.
    """
    flags = [part for name, value in LAUNCH.items() for part in (f"--{name}", str(value))]
    processes = ["--num_processes", str(order["processes"])]
    command = [sys.executable, "-m", "accelerate.commands.launch", "--use_fsdp", *processes, *flags]
    environment = dict(os.environ)
    environment.setdefault("VLLM_ALLREDUCE_USE_FLASHINFER", "0")  # or its kernels are compiled first
    with tempfile.TemporaryDirectory(prefix="benchmark-reshard-grpo-") as folder:
        module = ["-m", "benchmarks.reshard_grpo_rank", json.dumps({**order, "folder": folder})]
        ended = subprocess.run([*command, *module], env=environment, timeout=LAUNCH_SECONDS, check=False)
        if ended.returncode:
            raise RuntimeError(f"Training ended with exit code {ended.returncode}.")
        found: dict[str, Any] = json.loads((Path(folder) / "found.json").read_text())
        return found


def result_of(order: Mapping[str, Any], found: Mapping[str, Any]) -> Result:
    """Medians of all steps but the first, extremes of the log-probs' gap over all of them."""
    case, name = f"({order['processes']},{order['tp']})", f"{order['processes']}_{order['tp']}"
    steps, later = found["steps"], found["steps"][1:]
    return Result(
        benchmark="reshard_grpo" if order["model"] == "1.5b" else f"reshard_grpo_{order['model']}",
        device=accelerator(),
        peer="step",
        measurements=[
            Measurement("step", tuple(step["seconds"] for step in later), case),
            Measurement("reshard", tuple(step["reshard_seconds"] for step in later), case),
        ],
        metrics={
            f"reshard_ms_{name}": statistics.median(step["reshard_seconds"] for step in later) * 1e3,
            f"reshard_share_{name}": statistics.median(step["share"] for step in later),
            f"logprob_gap_mean_{name}": max(step["gap_mean"] for step in steps),
            f"logprob_gap_max_{name}": max(step["gap_max"] for step in steps),
            f"reward_first_{name}": steps[0]["reward"],
            f"reward_last_{name}": steps[-1]["reward"],
        },
        settings={"cases": {case: {**order, **found}}},
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reshard_grpo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", choices=sorted(SCALES), default="1.5b", help="tiny is small enough for a CPU")
    parser.add_argument("--processes", type=int, default=4, help="as many as GPUs; default 4")
    parser.add_argument("--tp", type=int, default=2, help="ranks of each engine; default 2")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=128, help="of each completion")
    parser.add_argument("--graphs", action="store_true", help="with CUDA graphs: a slower start, faster steps")
    parser.add_argument("--kv-cache-mib", type=int, default=4096)
    parser.add_argument("--add", action="store_true", help="keep the other cases of this commit's result file")
    given = vars(parser.parse_args(argv))
    add = given.pop("add")
    found = measure(given)
    for number, step in enumerate(found["steps"], start=1):
        print(f"step {number}: " + ", ".join(f"{name} = {value:.4g}" for name, value in step.items()))
    result_of(given, found).publish(add=add)


if __name__ == "__main__":
    main()
