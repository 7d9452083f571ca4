"""KV-cache tokens that fit on one GPU at an equal memory peak, and the largest LoRA model that trains.

`--kv`: TRL's colocate and a hybrid trainer, each with sleep mode on, hold a 7B policy and the engine they sample from;
how many tokens does the KV cache hold when the GPU's memory peaks at the same number of bytes?

`--train SIZE`: GRPO steps of rank-16 LoRA on all linear layers at a context of 4096 tokens, half of them prompt. The
second step is the first that has an optimizer state beside its activations. Each trainer has a process of its own,
because running out of memory is an answer, too. The result file is written after each trainer.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from .child import ChildError, ask
from .result import Result

SHAPES: dict[str, dict[str, Any]] = {  # Qwen2.5's, and Qwen3's 8B
    "tiny": {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "vocab_size": 4096},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    | {"num_key_value_heads": 4, "vocab_size": 152064},
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "model_type": "qwen3"},
    "14b": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48, "num_attention_heads": 40}
    | {"num_key_value_heads": 8, "vocab_size": 152064},
    "32b": {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40}
    | {"num_key_value_heads": 8, "vocab_size": 152064},
}
TRL_SHARE = {"tiny": 0.3, "7b": 0.35, "8b": 0.35, "14b": 0.45, "32b": 0.85}
"""The share of the GPU that TRL's engine needs: for the weights, and for a few sequences."""
KINDS = ("trl", "hybrid")
LORA_RANK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of a step.

    Attributes:
        context: tokens of a row.
        sampled: how many of them are sampled; the others are the prompt.
        number: how many rows there are, all of one prompt.
        at_once: rows of a micro-batch.
    """

    context: int
    sampled: int
    number: int = 4
    at_once: int = 1

    @classmethod
    def of(cls, size: str) -> Rows:
        """Return the usual rows of a model's size: half of 4,096 tokens is the prompt."""
        context = 64 if size == "tiny" else 4096
        return cls(context=context, sampled=context // 2)

    @property
    def long(self) -> bool:
        """True where only few rows fit into an engine's cache."""
        return self.context > 8192


def attempt(
    kind: str, size: str, share: float | None, steps: int, folder: str, seconds: float, eager: bool = False, **more: Any
) -> dict[str, Any]:
    """Run one trainer in a process of its own; return its answer, or how it ended. Prints its progress as it comes.

    Args:
        more: further arguments of `benchmarks.capacity_run.run`.
    """
    given = {"kind": kind, "size": size, "share": share, "steps": steps, "folder": folder, "eager": eager} | more

    def say(line: str) -> None:
        print(f"{kind} {size}: {line}", file=sys.stderr, flush=True)

    try:
        return ask("benchmarks.capacity_run", given, seconds, say)
    except ChildError as error:
        say(f"{error.ended} after {error.after}; {' | '.join(error.last_lines[-3:])}")
        ended = {name: getattr(error, name) for name in ("ended", "timed_out", "after", "last_lines")}
        return {"kind": kind, "size": size, **ended}


def kv_tokens(size: str, shares: Sequence[float], folder: str, seconds: float, eager: bool) -> Iterator[Result]:
    """Yield the result so far, after TRL at each share of the GPU, and after ours at the same peak."""
    runs: dict[str, dict[str, Any]] = {}
    metrics: dict[str, float] = {}
    for share in shares:
        trl = runs[f"trl {size} at {share:g}"] = attempt("trl", size, share, 0, folder, seconds)
        yield _result("capacity_kv", [size], runs, metrics)
        if "ended" in trl:
            continue
        ours = runs[f"hybrid {size} at {share:g}"] = attempt(
            "hybrid", size, trl["peak_bytes"], 0, folder, seconds, eager
        )
        if "ended" not in ours:
            metrics[f"kv_ratio_{size}_at_{share:g}"] = ours["kv_tokens"] / trl["kv_tokens"]
            metrics[f"peak_ratio_{size}_at_{share:g}"] = ours["peak_bytes"] / max(1, trl["peak_bytes"])
        yield _result("capacity_kv", [size], runs, metrics)


def training(
    sizes: Sequence[str], kinds: Sequence[str], steps: int, folder: str, seconds: float, eager: bool
) -> Iterator[Result]:
    """Yield the result so far, after each trainer with each of the sizes."""
    runs: dict[str, dict[str, Any]] = {}
    for size in sizes:
        for kind in kinds:
            share = TRL_SHARE[size] if kind == "trl" else None
            runs[f"{kind} {size}"] = attempt(kind, size, share, steps, folder, seconds, eager and kind == "hybrid")
            known = {name.replace(" ", "_"): run for name, run in runs.items() if not run.get("timed_out")}
            metrics = {f"trains_{name}": float("ended" not in run) for name, run in known.items()}
            yield _result("capacity_training", sizes, runs, metrics)


@cache
def device() -> str:
    """Return the name of the accelerator, as `result` does.

    It is asked in another process, because this one must hold nothing of the GPU while others are measured.
    """
    program = "from benchmarks.result import accelerator; print(accelerator())"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def _result(name: str, sizes: Sequence[str], runs: dict[str, dict[str, Any]], metrics: dict[str, float]) -> Result:
    return Result(
        benchmark=name,
        device=device(),
        peer="trl",
        measurements=[],
        metrics=dict(metrics),
        settings={
            "lora_rank": LORA_RANK,
            "rows": {size: asdict(Rows.of(size)) for size in sizes},
            "shapes": {size: SHAPES[size] for size in sizes},
            "runs": dict(runs),
        },
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.capacity", description=__doc__)
    parser.add_argument("--kv", choices=sorted(SHAPES), help="compare KV-cache tokens for a model of this size")
    shares = "TRL's vllm_gpu_memory_utilization (default: 0.3 0.6)"
    parser.add_argument("--shares", type=float, nargs="+", default=[0.3, 0.6], help=shares)
    parser.add_argument("--train", choices=sorted(SHAPES), nargs="+", default=[], help="sizes to train (default: none)")
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=KINDS, help="trainers to use (default: all)")
    parser.add_argument("--steps", type=int, default=2, help="training steps (default: 2)")
    parser.add_argument("--seconds", type=float, default=480, help="limit of one trainer's process (default: 480)")
    parser.add_argument("--eager", action="store_true", help="our engine without CUDA graphs, which TRL's always has")
    parser.add_argument("--add", action="store_true", help="keep the other cases of this commit's result file")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="benchmark-capacity-") as folder:
        if given.kv:
            for result in kv_tokens(given.kv, given.shares, folder, given.seconds, given.eager):
                result.publish(add=given.add)
        for result in training(given.train, given.kinds, given.steps, folder, given.seconds, given.eager):
            result.publish(add=given.add)


if __name__ == "__main__":
    main()
