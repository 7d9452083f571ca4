"""Adapters against the real packages. `make test-adapters` runs them, in environments of their own."""

import importlib.util
from dataclasses import dataclass, field

import pytest
from trlx_hybrid_multiturn.environment import CheckedEnvironment
from trlx_hybrid_multiturn.loop import Loop
from trlx_hybrid_multiturn.options import MultiTurnOptions
from trlx_hybrid_multiturn.tool_calls import LostCallError
from trlx_hybrid_multiturn.tools.runner import ToolRunner

NEEDED = {"openenv": "openenv", "verifiers": "verifiers", "trained": "vllm"}
collect_ignore = [f"test_{name}_episodes.py" for name, used in NEEDED.items() if importlib.util.find_spec(used) is None]


class Idle:
    """An engine with nothing to do, and what is told about it."""

    shared = busy = False

    def step(self, more):
        return [], more

    def moved(self, *numbers):
        pass


@dataclass
class Played:
    """What became of one episode."""

    shown: list = field(default_factory=list)
    rewards: list = field(default_factory=list)
    lost: str | None = None
    done: bool = False


@pytest.fixture
def play():
    """Play one episode per row, all at once, as a rollout does, with a function for the model."""
    opened = []

    def start(factory, rows, model, *, turns=10, tool_timeout=30.0):
        runner = ToolRunner(MultiTurnOptions(tool_timeout=tool_timeout))
        opened.append(runner)
        played = [Played() for _ in rows]

        async def one(row, found):
            player = CheckedEnvironment(factory, runner, None)
            try:
                found.shown.append(await player.reset(row))
                for _ in range(turns):
                    step = await player.step(model(row, found.shown))
                    found.rewards.append(step.reward)
                    if step.done:
                        found.done = True
                        break
                    found.shown.append(step.observation)
            except LostCallError as lost:
                found.lost = str(lost)
            await player.close()

        Loop(Idle(), Idle(), width=len(rows)).run([one(*each) for each in zip(rows, played, strict=True)])
        return played

    yield start
    for runner in opened:
        runner.close()
