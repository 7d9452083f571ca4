"""Milliseconds of the plugin host per GRPO step, with 0, 10 and 100 plugins that implement every hook of a step."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from trlx_hybrid.contract.types import Phase, SyncPlan, SyncReport, Trajectory
from trlx_hybrid.plugins.hookspecs import hookimpl
from trlx_hybrid.plugins.host import Host

from .harness import Arm, Timed, alternate
from .result import Result, cpu

COUNTS = (0, 10, 100)
STEPS = 100  # per repetition: one step is too short for the clock
CALLS_PER_STEP = 8
TRAJECTORIES = 64


class _Observer:
    """A plugin with every hook of a step, each doing next to nothing, so that the host's own cost remains.

    Attributes:
        steps: number of steps that it saw.
    """

    def __init__(self) -> None:
        self.steps = 0

    @hookimpl
    def trlx_leave_phase(self, session: Any, phase: Phase, step: int) -> None: ...

    @hookimpl
    def trlx_enter_phase(self, session: Any, phase: Phase, step: int) -> None: ...

    @hookimpl
    def trlx_sync_start(self, session: Any, plan: SyncPlan) -> None: ...

    @hookimpl
    def trlx_sync_end(self, session: Any, report: SyncReport) -> None: ...

    @hookimpl
    def trlx_advantages(self, session: Any, batch: dict[str, Any]) -> None: ...

    @hookimpl
    def trlx_rollout_end(self, session: Any, trajectories: Sequence[Trajectory]) -> None:
        self.steps += 1


def step(host: Host, session: Any, number: int, trajectories: Sequence[Trajectory]) -> None:
    """Make the hook calls of one training step, as Session, WeightVersions and the trainer make them."""
    plan = SyncPlan(weights="alias", version=number, verify="sampled")
    report = SyncReport(weights="alias", version=number, tensors=0, bytes=0, seconds=0.0)
    host.call("trlx_leave_phase", session=session, phase=Phase.TRAIN, step=number)
    host.call("trlx_sync_start", session=session, plan=plan)
    host.call("trlx_sync_end", session=session, report=report)
    host.call("trlx_enter_phase", session=session, phase=Phase.ROLLOUT, step=number)
    host.call("trlx_leave_phase", session=session, phase=Phase.ROLLOUT, step=number)
    host.call("trlx_enter_phase", session=session, phase=Phase.TRAIN, step=number)
    host.call("trlx_advantages", session=session, batch={})
    host.call("trlx_rollout_end", session=session, trajectories=trajectories)


def arm(count: int) -> Arm:
    """Return an arm with `count` plugins; its time is that of one step, its result how many steps each plugin saw."""
    host, observers = Host(), [_Observer() for _ in range(count)]
    for index, observer in enumerate(observers):
        host.register(observer, f"observer-{index}")

    def run(turn: int) -> Timed:
        trajectories = random_trajectories(turn)
        session = SimpleNamespace()
        started = time.perf_counter()
        for number in range(STEPS):
            step(host, session, number, trajectories)
        seconds = time.perf_counter() - started
        return Timed(seconds / STEPS, {observer.steps for observer in observers} or None)

    return Arm(f"{count} plugins", run)


def random_trajectories(seed: int) -> list[Trajectory]:
    """Return a batch with short completions; the host passes the list on and never looks inside."""
    draw = random.Random(seed)
    ids = [draw.choices(range(1000), k=16) for _ in range(TRAJECTORIES)]
    return [
        Trajectory(prompt_ids=i[:8], completion_ids=i[8:], loss_mask=[1] * 8, weight_version=0, reward=draw.random())
        for i in ids
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=20, help="of each arm (default: 20)")
    arguments = parser.parse_args(argv)
    arms = [arm(count) for count in COUNTS]
    measurements = alternate(arms, warmup=2, repetitions=arguments.repetitions)
    Result(
        benchmark="host",
        device=cpu(),
        peer=arms[0].name,
        measurements=measurements,
        metrics={f"overhead_ms_{count}": m.median * 1e3 for count, m in zip(COUNTS, measurements)},
        settings={"steps_per_repetition": STEPS, "hook_calls_per_step": CALLS_PER_STEP, "trajectories": TRAJECTORIES},
    ).publish()


if __name__ == "__main__":
    main()
