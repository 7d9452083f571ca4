"""The actor that scores: a reward function, or a reward model, with its share of a batch."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trlx_hybrid.errors import RewardError

from ..worker_group import register, this_worker
from .quarters import show_gpus
from .reward_model import RewardModelSource
from .shipment import Shipment

LOGGERS = ("log_extra", "log_metric")
"""Arguments by which TRL lets a reward function log: methods of the trainer, which must not travel."""


@dataclass(slots=True)
class Scored:
    """What a worker made of its rows.

    Attributes:
        rewards: one per row.
        extra: by column what was given to `log_extra`, one value per row.
        metrics: what was given to `log_metric`, in order.
    """

    rewards: list[float | None]
    extra: dict[str, list[Any]] = field(default_factory=dict)
    metrics: list[tuple[str, float]] = field(default_factory=list)


class RewardWorker:
    """Holds the function.

    Args:
        shipment: of a function, a class (each worker makes an instance of it), or a `RewardModelSource`.
        name: of the reward, for messages.
    """

    def __init__(self, shipment: Shipment, name: str) -> None:
        show_gpus(this_worker().gpus)
        score = shipment.opened()
        if isinstance(score, RewardModelSource):
            score = score.loaded()
        elif inspect.isclass(score):
            score = score()
        self._score, self._name = score, name
        self._runner: asyncio.Runner | None = None

    @register(dispatch="scatter", execute="stream")
    def score(self, rows: dict[str, list[Any]], others: Mapping[str, Any], loggers: Sequence[str] = ()) -> Scored:
        """Score a share of a batch.

        Args:
            rows: by name, what has an entry for each row.
            others: arguments that have not.
            loggers: which of `LOGGERS` the function expects.
        """
        count = len(next(iter(rows.values())))
        scored = Scored([])
        if not count:
            return scored

        def log_extra(column: str, values: Sequence[Any]) -> None:
            if len(values) != count or column in scored.extra:
                raise RewardError(
                    f"Reward function {self._name!r} gave log_extra {len(values)} values for {column!r}. Give it "
                    f"one for each of the {count} rows, and each column once."
                )
            scored.extra[column] = list(values)

        def log_metric(name: str, value: float) -> None:
            scored.metrics.append((name, float(value)))

        given = {"log_extra": log_extra, "log_metric": log_metric}
        answer = self._score(**rows, **others, **{name: given[name] for name in loggers})
        if inspect.isawaitable(answer):
            answer = self._awaited(answer)
        scored.rewards = self._checked(answer, count)
        return scored

    def _awaited(self, answer: Any) -> Any:
        """On one event loop for all batches, so that a client can keep its connections."""

        async def wait() -> Any:
            return await answer

        self._runner = self._runner or asyncio.Runner()
        return self._runner.run(wait())

    def _checked(self, answer: Any, count: int) -> list[float | None]:
        try:
            found = [None if value is None else float(value) for value in answer]
        except (TypeError, ValueError) as error:
            raise RewardError(
                f"Reward function {self._name!r} returned {answer!r:.100}: {error}. Return a list of numbers, "
                "with None where the reward does not apply."
            ) from error
        if len(found) != count:
            raise RewardError(
                f"Reward function {self._name!r} returned {len(found)} rewards for {count} rows. Return one for each; "
                "a function that looks at a whole batch needs workers=1."
            )
        return found
