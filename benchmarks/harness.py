"""The harness of comparisons: all arms take turns in one run, so that a machine's drift affects all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class UnequalResultsError(Exception):
    """Raised where two arms that are timed against each other do not compute the same."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One of the things compared.

    Attributes:
        name: name in the table.
        run: runs one repetition. It is given the round's number to draw its random data from, the same for all arms.
            Its results must be equal in all arms of a round, except None; it may time itself and return a Timed.
    """

    name: str
    run: Callable[[int], Any]


@dataclass(frozen=True, slots=True)
class Timed:
    """The result of an arm that times itself, because it knows when to start and stop its clock.

    Attributes:
        seconds: seconds of the repetition.
        result: compared with the other arms', see `Arm.run`.
    """

    seconds: float
    result: Any = None


@dataclass(frozen=True, slots=True)
class Measurement:
    """The seconds of every repetition of one arm, in order. `case` names one of a benchmark's sizes."""

    arm: str
    seconds: tuple[float, ...]
    case: str = ""

    @property
    def median(self) -> float:
        """The median in seconds. Ratios and metrics are made of it, since one slow round must not decide."""
        return statistics.median(self.seconds)


def synchronise() -> None:
    """Wait until the device is idle."""
    import torch  # some benchmarks run without it, and importing it takes a second

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], object]) -> float:
    """Return the seconds of `work`, from an idle device to an idle device."""
    synchronise()
    started = time.perf_counter()
    work()
    synchronise()
    return time.perf_counter() - started


def alternate(
    arms: Sequence[Arm],
    *,
    warmup: int,
    repetitions: int,
    case: str = "",
    synchronise: Callable[[], None] = lambda: None,
) -> list[Measurement]:
    """Run `warmup` and then `repetitions` rounds; each round runs every arm once, in order.

    Args:
        arms: the arms.
        warmup: rounds that are not measured.
        repetitions: rounds that are measured.
        case: name of the case in the measurements.
        synchronise: waits until the device is idle; called before the clock is read.

    Returns:
        One measurement per arm, without the warm-up.

    Raises:
        UnequalResultsError: in some round, warm-up included, two arms returned different results.
    """
    seconds: dict[str, list[float]] = {arm.name: [] for arm in arms}
    for turn in range(warmup + repetitions):
        results = {}
        for arm in arms:
            timed = _run(arm, turn, synchronise)
            results[arm.name] = timed.result
            if turn >= warmup:
                seconds[arm.name].append(timed.seconds)
        check_equal(results, turn)
    return [Measurement(name, tuple(values), case) for name, values in seconds.items()]


def _run(arm: Arm, turn: int, synchronise: Callable[[], None]) -> Timed:
    synchronise()
    started = time.perf_counter()
    result = arm.run(turn)
    synchronise()
    seconds = time.perf_counter() - started
    return result if isinstance(result, Timed) else Timed(seconds, result)


def check_equal(results: Mapping[str, Any], turn: int) -> None:
    """Raise UnequalResultsError unless the results of one round are equal; None is equal to all.

    Raises:
        UnequalResultsError: names two arms that differ.
    """
    given = [(name, result) for name, result in results.items() if result is not None]
    for name, result in given[1:]:
        if result != given[0][1]:
            raise UnequalResultsError(
                f"In round {turn}, arm {name!r} and arm {given[0][0]!r} disagree: "
                f"{_short(result)} and {_short(given[0][1])}. Their times say nothing."
            )


def _short(result: Any, limit: int = 200) -> str:
    text = repr(result)
    return text if len(text) <= limit else f"{text[:limit]}…"
