"""The longest rows that train on a GPU of 80 GB: whole GRPO steps of rank-16 LoRA, engine built, two rows a group.

    python -m benchmarks.long_context 8b:131072 32b:16384 --memory 80

Each case has a process of its own, because running out of memory is an answer, too. A larger GPU is filled up, so that
the run finds the memory of a smaller one. The result file is written after each case.

The arithmetic is counted as it is done: the products of all linear layers three times (forward, recomputation, and the
backward pass to the inputs, since the base is frozen), and causal attention four and a half times its forward pass.
Tokens of the prompt, which both rows share, are computed once.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from .capacity import LORA_RANK, SHAPES, Rows, attempt, device
from .harness import Measurement
from .result import Result

GIB = 1 << 30
SAMPLED, NUMBER = 8192, 2
PASSES = 3
"""The number of times that a step computes the products of linear layers, whose weights are frozen."""
ATTENTION_PASSES = 4.5
"""The attention of a step in multiples of its forward pass: forward, recomputed, and two and a half backward."""


def arithmetic(size: str, rows: Rows) -> float:
    """Return the floating-point operations of a step's forward and backward passes."""
    shape: dict[str, int] = SHAPES[size]
    prompt = rows.context - rows.sampled
    tokens = prompt + rows.number * rows.sampled
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    width = shape.get("head_dim", hidden // heads)
    attention = hidden * width * (2 * heads + 2 * shape["num_key_value_heads"])
    layer = attention + 3 * hidden * shape["intermediate_size"]
    head = hidden * shape["vocab_size"] * rows.number * rows.sampled
    linear = 2 * PASSES * (shape["num_hidden_layers"] * layer * tokens + head)
    pairs = rows.context**2 / 2 + (rows.number - 1) * rows.sampled * (prompt + rows.sampled / 2)
    return linear + ATTENTION_PASSES * 4 * pairs * heads * width * shape["num_hidden_layers"]


def measure(cases: Sequence[str], memory: float, steps: int, seconds: float, add: bool) -> None:
    """Run the cases, one after the other, and publish the result so far after each.

    Args:
        cases: size and tokens of a row, such as "8b:131072".
        memory: GiB of the GPU.
    """
    runs: dict[str, dict[str, Any]] = {}
    metrics: dict[str, float] = {}
    measured: list[Measurement] = []
    for case in cases:
        size, context = case.split(":")
        sampled = min(SAMPLED, int(context) // 2)
        rows = Rows(context=int(context), sampled=sampled, number=NUMBER, at_once=NUMBER)
        limit = None if size == "tiny" else int(memory * GIB)
        with tempfile.TemporaryDirectory(prefix="benchmark-long-context-") as folder:
            given: dict[str, Any] = {"rows": asdict(rows), "memory": limit}
            found = attempt("hybrid", size, None, steps, folder, seconds, **given)
        name = f"{size}_{context}"
        runs[name] = found | {"rows": asdict(rows), "memory": limit}
        metrics[f"trains_{name}"] = float("ended" not in found)
        if "ended" not in found:
            metrics[f"peak_gib_{name}"] = found["peak_bytes"] / GIB
            metrics[f"step_seconds_{name}"] = min(found["step_seconds"])
            metrics[f"loss_seconds_{name}"] = min(found["loss_seconds"])
            metrics[f"tflops_{name}"] = arithmetic(size, rows) / min(found["loss_seconds"]) / 1e12
            measured.append(Measurement("hybrid", tuple(found["step_seconds"]), name))
        settings = {"lora_rank": LORA_RANK, "shapes": SHAPES, "runs": dict(runs)}
        Result(
            benchmark="long_context",
            device=device(),
            peer="none",
            measurements=list(measured),
            metrics=dict(metrics),
            settings=settings,
        ).publish(add=add)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.long_context", description=__doc__)
    parser.add_argument(
        "cases", nargs="+", help=f"a size ({', '.join(sorted(SHAPES))}) and the tokens of a row, 8b:131072"
    )
    parser.add_argument("--memory", type=float, default=80, help="GiB of the GPU that the run may use (default: 80)")
    parser.add_argument("--steps", type=int, default=1, help="training steps (default: 1)")
    parser.add_argument("--seconds", type=float, default=560, help="limit of one case (default: 560)")
    parser.add_argument("--add", action="store_true", help="keep the other cases of the result file")
    given = parser.parse_args(argv)
    measure(given.cases, given.memory, given.steps, given.seconds, given.add)


if __name__ == "__main__":
    main()
