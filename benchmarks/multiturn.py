"""Asynchronous conversations with tools, against lock-step ones, against TRL's loop, and against a computed optimum.

There are two benchmarks. On a CPU it runs rollouts only, all over one engine: TRL's loop, which calls tools one after
another (its tokens sampled by our engine, `rollout="single_turn"`), the same loop with all tools of a turn at once, and
`multi_turn`. Tool latencies and numbers of tokens come from a seeded trace, and a replay of it (`benchmarks.replay`)
says how fast an asynchronous and a lock-step rollout could be. On a GPU (`--model 1.5b`) it runs whole GRPO steps of
TRL's trainer with its own colocated engine, and of ours, both with sleep mode on; tools answer at once, or wait.

The model has random weights, so the tokenizer of all arms reads one tool call out of every turn (`Talker`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from .harness import Measurement
from .result import Result, cpu
from .rollout import SCALES, write_model
from .scale import Scale

CASES = tuple((trajectories, turns) for trajectories in (64, 256) for turns in (3, 5, 10))
COMPUTING = (64, 5)
OBSERVED = 16  # tokens of a tool's answer


def rollouts_scale(cases: Sequence[tuple[int, int]], tokens: int) -> tuple[Scale, int]:
    """Return the tiny model's scale with a KV cache for all conversations, and the tokens of the longest."""
    longest = max(turns for _, turns in cases) * (2 * tokens + OBSERVED)
    most = max(trajectories for trajectories, _ in cases)
    scale = SCALES["tiny"]
    bytes_per_token = 1024  # 2 layers, keys and values, 2 heads of 32, fp32; half of it in reserve for blocks
    cache = most * (scale.prompt_tokens + longest + 32) * bytes_per_token
    return dataclasses.replace(scale, kv_cache_bytes=cache), longest


def run_rollouts(
    cases: Sequence[tuple[int, int]], *, tokens: int, latency: float, repetitions: int, stock: bool
) -> Result:
    """Run the benchmark on a CPU."""
    import torch

    from . import multiturn_cases
    from .multiturn_cases import Sizes
    from .multiturn_clock import StepClock
    from .multiturn_rollouts import Rollouts
    from .replay import draw

    scale, longest = rollouts_scale(cases, tokens)
    sizes = Sizes(tokens=tokens, latency=latency)
    measured: list[Measurement] = []
    metrics: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="benchmark-multiturn-", ignore_cleanup_errors=True) as folder:
        write_model(Path(folder), scale)
        most = max(trajectories for trajectories, _ in cases)
        rollouts = Rollouts(folder, scale, trajectories=most, tokens=longest, observed=OBSERVED)
        try:
            for rollout in ("single_turn", "multi_turn"):  # warm up
                rollouts.repeat(draw(8, 3, tokens=tokens, latency=0.01), rollout, StepClock())
            for trajectories, turns in cases:
                more, found = multiturn_cases.waiting_tools(
                    rollouts, trajectories, turns, sizes, repetitions=repetitions
                )
                measured, metrics = measured + more, metrics | found
                print(f"{trajectories}x{turns}: " + ", ".join(f"{k} {v:.3g}" for k, v in found.items()), flush=True)
            more, found = multiturn_cases.computing_tools(
                rollouts, *min(COMPUTING, cases[0]), Sizes(tokens=tokens, latency=latency / 4), repetitions=repetitions
            )
            measured, metrics = measured + more, metrics | found
            for trajectories, turns in cases if stock else ():
                print(f"TRL's loop, {trajectories}x{turns}", flush=True)
                measured.append(multiturn_cases.stock_loop(rollouts, trajectories, turns, sizes))
        finally:
            rollouts.close()
    return Result(
        benchmark="multiturn" if stock and set(cases) == set(CASES) else "multiturn_part",  # goals refer to all cases
        device=cpu(),
        peer="lock_step",
        measurements=measured,
        metrics=summary(metrics) | metrics,
        settings={
            "config": dict(scale.config),
            "prompt_tokens": scale.prompt_tokens,
            "tokens_per_turn": f"{tokens // 2} to {tokens + tokens // 2}",
            "observed_tokens": OBSERVED,
            "latency_median_seconds": latency,
            "latency_sigma": 1.0,
            "threads": torch.get_num_threads(),
        },
    )


def summary(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the worst of all cases, which the goals refer to.

    Deviations compare the predicted with the measured ratio.
    """
    found = {}
    for suffix in ("", "_with_prompts"):
        start = f"share_of_optimum{suffix}_"
        cases = [name.removeprefix(start) for name in metrics if name.startswith(start) and name[len(start)].isdigit()]
        found[f"share_of_optimum{suffix}"] = min(metrics[start + case] for case in cases)
        found[f"ratio_deviation{suffix}"] = max(
            abs(metrics[f"predicted_ratio{suffix}_{case}"] / metrics[f"ratio_{case}"] - 1) for case in cases
        )
    found["prefix_share"] = min(value for name, value in metrics.items() if name.startswith("prefix_share_"))
    return found


def case(text: str) -> tuple[int, int]:
    """Parse TRAJECTORIESxTURNS."""
    trajectories, turns = map(int, text.split("x"))
    return trajectories, turns


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.multiturn", description=__doc__)
    parser.add_argument("--model", choices=("1.5b", "tiny"), help="GRPO steps; tiny is for a CPU (default: rollouts)")
    parser.add_argument("--repetitions", type=int, default=3, help="of each arm (default: 3)")
    cases = "trajectories x turns, e.g. 64x5; repeat for several (default: all six)"
    parser.add_argument("--case", type=case, action="append", help=cases)
    parser.add_argument("--tokens", type=int, default=16, help="mean length of a turn in the rollouts (default: 16)")
    parser.add_argument("--latency", type=float, default=0.1, help="median seconds that a tool takes (default: 0.1)")
    parser.add_argument("--no-stock", action="store_true", help="leave out TRL's loop, which waits for every tool")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="vLLM's, of both trainers' engines, in JSON")
    arguments = parser.parse_args(argv)
    if arguments.model:
        from .multiturn_steps import run_steps

        result = run_steps(arguments.model, arguments.latency, arguments.repetitions, arguments.engine_args)
    else:
        result = run_rollouts(
            arguments.case or CASES,
            tokens=arguments.tokens,
            latency=arguments.latency,
            repetitions=arguments.repetitions,
            stock=not arguments.no_stock,
        )
    result.publish()


if __name__ == "__main__":
    main()
