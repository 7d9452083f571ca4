"""What fits on one GPU: KV-cache tokens at an equal memory peak, and the largest LoRA model that trains.

`--kv`: TRL's colocate and a hybrid trainer, each with sleep mode on, hold a 7B policy and the engine they sample from;
how many tokens does the KV cache hold when the GPU's memory peaks at the same number of bytes?

`--train SIZE`: a GRPO step of rank-16 LoRA on all linear layers at a context of 4096 tokens. Each trainer has a
process of its own, for a run that ends out of memory is an answer too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from .result import Result, accelerator

SHAPES: dict[str, dict[str, Any]] = {  # Qwen2.5's
    "tiny": {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "vocab_size": 4096},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    | {"num_key_value_heads": 4, "vocab_size": 152064},
    "14b": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48, "num_attention_heads": 40}
    | {"num_key_value_heads": 8, "vocab_size": 152064},
    "32b": {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40}
    | {"num_key_value_heads": 8, "vocab_size": 152064},
}
TRL_SHARE = {"tiny": 0.3, "7b": 0.35, "14b": 0.45}  # what its engine needs to hold the weights, and a few sequences
CONTEXT = 4096
SEQUENCES = 4
MINUTES = 60
GIB = 1 << 30


def attempt(kind: str, size: str, share: float | None, steps: int, folder: str, seconds: float) -> dict[str, Any]:
    """One trainer in a process of its own; its answer, or how it ended."""
    command = [sys.executable, "-m", "benchmarks.capacity_run", kind, size, str(share), str(steps), folder]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"kind": kind, "size": size, "ended": f"no answer within {seconds:g} s"}
    answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if answers:
        return dict(json.loads(answers[-1]))
    return {"kind": kind, "size": size, "ended": f"exit code {done.returncode}: {done.stderr[-600:]}"}


def kv_tokens(size: str, shares: Sequence[float], folder: str) -> Result:
    """TRL at each share of the GPU, and ours at the same peak."""
    found: list[dict[str, Any]] = []
    metrics: dict[str, float] = {}
    for share in shares:
        trl = attempt("trl", size, share, 0, folder, 5 * MINUTES)
        found.append(trl)
        if "ended" in trl:
            continue
        ours = attempt("hybrid", size, trl["peak_bytes"], 0, folder, 5 * MINUTES)
        found.append(ours)
        if "ended" not in ours:
            metrics[f"kv_ratio_at_{share:g}"] = ours["kv_tokens"] / trl["kv_tokens"]
            metrics[f"peak_ratio_at_{share:g}"] = ours["peak_bytes"] / trl["peak_bytes"]
    return Result(
        benchmark="capacity_kv",
        device=accelerator(),
        peer="trl",
        measurements=[],
        metrics=metrics,
        settings={"size": size, "config": SHAPES[size], "context": CONTEXT, "runs": found},
    )


def training(sizes: Sequence[str], folder: str) -> Iterator[Result]:
    """Which of the sizes each trainer trains; what is known so far after each. Two copies of 32B need no trying."""
    found: list[dict[str, Any]] = []
    for size in sizes:
        for kind in ("hybrid", "trl") if size != "32b" else ("hybrid",):
            found.append(attempt(kind, size, TRL_SHARE[size] if kind == "trl" else None, 1, folder, 8 * MINUTES))
            yield _trained(sizes, found)


def _trained(sizes: Sequence[str], found: Sequence[dict[str, Any]]) -> Result:
    return Result(
        benchmark="capacity_training",
        device=accelerator(),
        peer="trl",
        measurements=[],
        metrics={f"trains_{run['kind']}_{run['size']}": float("ended" not in run) for run in found},
        settings={
            "context": CONTEXT,
            "sequences": SEQUENCES,
            "shapes": {s: SHAPES[s] for s in sizes},
            "runs": list(found),
        },
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.capacity", description=__doc__)
    parser.add_argument("--kv", choices=sorted(SHAPES), help="compare KV-cache tokens for a model of this size")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.3, 0.6], help="TRL's vllm_gpu_memory_utilization")
    parser.add_argument("--train", choices=sorted(SHAPES), nargs="+", help="sizes to try to train")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="benchmark-capacity-") as folder:
        if arguments.kv:
            kv_tokens(arguments.kv, arguments.shares, folder).publish()
        if arguments.train:
            for result in training(arguments.train, folder):
                result.publish()


if __name__ == "__main__":
    main()
