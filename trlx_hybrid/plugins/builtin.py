"""The components that come with this package: the weight sync `gather`, the rollout `single_turn` and the scoring
`padded`. The engine `transformers` is TRL's own generation and needs no component."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from ..blame import asked
from ..contract.protocols import Rollout, Rows, Run, Scores, Scoring, WeightSync
from ..contract.types import Completion, LoadReport, Request, Sampling
from ..errors import ConfigError
from .hookspecs import hookimpl

if TYPE_CHECKING:
    from ..contract.protocols import Engine
    from ..policy.policy import Policy
    from .registry import Component, Registry


class GatherSync(WeightSync):
    """The weight sync `gather`: makes full tensors of the policy's weights, layer by layer, and streams them into the
    engine's own weight loader.

    Each sync moves the full model (all-gathered first where it is sharded) and needs the memory of one more layer.
    Adapters are merged out of place, so the trainer's weights stay bitwise what they were.

    Args:
        source: the component that offers the engine; errors of the engine name it.
    """

    name = "gather"

    def __init__(self, policy: Policy, engine: Engine, source: Component | None = None) -> None:
        self._policy, self._engine, self._source = policy, engine, source

    def refuses(self) -> str | None:
        """Return why the policy's weights cannot be read in full, or None."""
        return self._policy.refuses_gather()

    def sync(self) -> LoadReport:
        """Stream all weights of the policy into the engine."""
        report = asked(self._source, self._engine, "load_weights", self._policy.full_weights())
        return cast("LoadReport", report)


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleTurnOptions:
    """Options in `HybridConfig.rollout_options` for `rollout="single_turn"`.

    Attributes:
        max_staleness: the largest number of optimizer steps between the beginning of a row's sampling and the last step
            that trains on it. With 0, each batch is sampled to its end, as in TRL. Above 0, rows that are unfinished
            when a batch is complete stay in flight, and go on in the next rollout with the weights of then.
        in_flight: the number of rows that each rank samples at a time; by default one and a half times the rows of its
            batch. Only with `max_staleness`.
    """

    max_staleness: int = 0
    in_flight: int | None = None

    def __post_init__(self) -> None:
        if self.max_staleness < 0:
            raise ConfigError(f"rollout_options max_staleness={self.max_staleness}: it must be 0 or more.")
        if self.in_flight is not None and (self.in_flight < 1 or not self.max_staleness):
            raise ConfigError(
                f"rollout_options in_flight={self.in_flight}: it must be 1 or more, and needs max_staleness above 0."
            )

    def rows_at_a_time(self, rows: int) -> int:
        """Return the number of rows that a rank samples at a time.

        Args:
            rows: the number of rows that a batch has on each rank.
        """
        return rows if not self.max_staleness else self.in_flight or rows * 3 // 2


class SingleTurn(Rollout):
    """The built-in rollout: one completion per prompt. It also serves TRL's tool loop, which calls it once per turn."""

    name = "single_turn"
    tells = True

    def run(self, session: Run, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Sample one completion per request, and return them in the order of the requests. Calls
        `session.on_completion`, if it is set, as soon as each is finished."""
        engine, tell = session.live_engine, session.on_completion
        if tell is None:
            return engine.generate(requests, sampling)
        completions: dict[int, Completion] = {}
        with engine.stream(sampling) as stream:
            numbers = {stream.add(request): number for number, request in enumerate(requests)}
            more = True
            while more:
                finished, more = stream.step(len(completions) < len(requests))
                for key, completion in finished:
                    number = numbers[key]
                    completions[number] = completion
                    tell(number, requests[number], completion)
        return [completions[number] for number in range(len(requests))]


class Padded(Scoring):
    """The default scoring component: log-probs from TRL's own forward passes, over rows padded to the longest."""

    name = "padded"

    def score(self, rows: Rows) -> Scores:
        """Return the log-probs and entropies of the rows, computed by TRL's own forward passes."""
        return rows.padded()


@hookimpl
def trlx_register(registry: Registry) -> None:
    """Offer the default components: the weight sync `gather`, the rollout `single_turn` and the scoring `padded`."""
    registry.offer(
        "weights",
        "gather",
        lambda session, options: GatherSync(
            session.policy, session.live_engine, session.selection.engine and session.selection.engine.component
        ),
        order=100,
        summary="all-gathers full tensors and loads them with the engine's weight loader; always available",
    )
    registry.offer(
        "rollout",
        "single_turn",
        lambda session, options: SingleTurn(),
        options=SingleTurnOptions,
        summary="one completion per prompt",
    )
    registry.offer("scoring", "padded", lambda session, options: Padded(), summary="TRL's own forward passes")
