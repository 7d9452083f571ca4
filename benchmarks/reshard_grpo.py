"""Seconds of GRPO steps with FSDP2 and a tensor-parallel vLLM in the same processes, and the share of resharding.

There is one process per GPU, started by `accelerate launch`. The model has random weights, stored in fp32, and computes
in bf16. The first step, in which the engine is built and proven, is left out of the medians.

With both launchers the benchmark runs under each, and compares sampled tokens, rewards, losses and gradient norms of
all ranks, digit by digit. That takes attention with deterministic gradients, such as eager attention.

    python -m benchmarks.reshard_grpo --processes 4 --tp 2 --add
    python -m benchmarks.reshard_grpo --processes 4 --tp 2 --attention eager --launchers accelerate trlx-hybrid --add
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

import torch

from .harness import Measurement
from .result import Result, accelerator
from .rollout import SCALES

CONFIG = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "mixed_precision": "bf16",
    "num_machines": 1,
    "machine_rank": 0,
    "main_process_port": 0,
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "Qwen2DecoderLayer",
        "fsdp_reshard_after_forward": True,
        "fsdp_cpu_ram_efficient_loading": False,
    },
}
"""The configuration that `accelerate config` would have written."""

LAUNCH_SECONDS = 540.0
LAUNCHERS = ("accelerate", "trlx-hybrid")
SCRIPT = """import json, sys
from benchmarks.reshard_grpo_rank import main
main(json.loads(sys.argv[1]))
"""
SHOWN = ("seconds", "reshard_seconds", "share", "received_gb", "reward", "loss", "gap_mean", "gap_max")
COMPARED = ("sampled", "reward", "loss", "grad_norm")


def command(launcher: str, processes: int, config: Path) -> list[str]:
    """Return a command that starts a script in `processes` processes."""
    python, file = [sys.executable, "-m"], ["--config_file", str(config)]
    if launcher == "accelerate":
        return [*python, "accelerate.commands.launch", "--num_processes", str(processes), *file]
    places = ["--gpus-per-node"] if torch.cuda.is_available() else ["--cpu", "--processes-per-node"]
    return [*python, "trlx_hybrid", "launch", *places, str(processes), *file]


def measure(order: Mapping[str, Any], launcher: str) -> dict[str, Any]:
    """Train in the processes that the order asks for, and return what rank 0 wrote, see `reshard_grpo_rank`.

    Raises:
        RuntimeError: a process failed; its output was shown.
    """
    environment = dict(os.environ)
    environment.setdefault("VLLM_ALLREDUCE_USE_FLASHINFER", "0")  # or its kernels are compiled first
    root = str(Path(__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory(prefix="benchmark-reshard-grpo-") as folder:
        script, config = Path(folder) / "train.py", Path(folder) / "accelerate.yaml"
        script.write_text(SCRIPT)
        cpu = not torch.cuda.is_available()
        config.write_text(json.dumps(CONFIG | {"num_processes": order["processes"], "use_cpu": cpu}))
        arguments = [str(script), json.dumps({**order, "folder": folder})]
        launch = command(launcher, order["processes"], config)
        ended = subprocess.run([*launch, *arguments], env=environment, timeout=LAUNCH_SECONDS, check=False)
        if ended.returncode:
            raise RuntimeError(f"Training under {launcher} ended with exit code {ended.returncode}.")
        found: dict[str, Any] = json.loads((Path(folder) / "found.json").read_text())
        return found


def alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> int:
    """Return how many steps, from the first on, are alike on every rank, to the last digit.

    Compared are samples, rewards, losses and gradient norms.
    """
    same = [all(a[name] == b[name] for name in COMPARED) for a, b in zip(one["steps"], other["steps"], strict=True)]
    return [*same, False].index(False)


def result_of(order: Mapping[str, Any], found: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> Result:
    """Return the result: medians of all steps but the first, extremes of the log-prob gap over all, and equal steps."""
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
            **{f"steps_alike_{name}": float(alike(found, other)) for other in others},
        },
        settings={"cases": {case: {**order, **found}}},
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reshard_grpo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", choices=sorted(SCALES), default="1.5b", help="tiny is for a CPU (default: 1.5b)")
    parser.add_argument("--processes", type=int, default=4, help="ranks, one per GPU (default: 4)")
    parser.add_argument("--tp", type=int, default=2, help="ranks of each engine (default: 2)")
    parser.add_argument("--steps", type=int, default=10, help="GRPO steps (default: 10)")
    parser.add_argument("--tokens", type=int, default=128, help="of each completion (default: 128)")
    parser.add_argument("--graphs", action="store_true", help="with CUDA graphs: a slower start, faster steps")
    parser.add_argument("--kv-cache-mib", type=int, default=4096, help="KV cache of each engine (default: 4096)")
    parser.add_argument("--attention", default="sdpa", help="attn_implementation of the trainer (default: sdpa)")
    launchers = ["accelerate"]
    parser.add_argument("--launchers", nargs="+", choices=LAUNCHERS, default=launchers, help="(default: accelerate)")
    parser.add_argument("--add", action="store_true", help="keep the other cases of this commit's result file")
    given = vars(parser.parse_args(argv))
    add, launchers = given.pop("add"), given.pop("launchers")
    first, *others = [measure(given, launcher) for launcher in launchers]
    for number, step in enumerate(first["steps"], start=1):
        print(f"step {number}: " + ", ".join(f"{name} = {step[name]:.4g}" for name in SHOWN))
    result_of(given, first, others).publish(add=add)


if __name__ == "__main__":
    main()
