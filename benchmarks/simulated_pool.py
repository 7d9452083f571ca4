"""Simulate rows in flight: seconds of a step, from the pool that a run uses and an engine that only counts.

    python -m benchmarks.simulated_pool

The costs are those measured with a 1.5B model on an H200. The table is in docs/in-flight.md.
"""

from __future__ import annotations

from statistics import fmean

from trlx_hybrid.contract.types import Completion, Request
from trlx_hybrid.rollout.pool import Pool, PooledGroup, PoolRollout

from .step import LENGTHS

DECODE_SECONDS, TRAIN_SECONDS, READ_SECONDS = 0.0026, 1.25, 0.3
BEGIN_SECONDS = 0.0015
"""The additional time of a step of the engine that also reads the prompts of rows that begin."""
GROUPS, COMPLETIONS = 8, 8
STALENESS, IN_FLIGHT = (0, 1, 2, 3, 4), (64, 96, 128)
BATCHES, WARM, LAST = 48, 12, 6
"""The batches of a run, and how many of them are left out at both ends, where the pool fills and empties."""


class Engine:
    """A stream of requests whose lengths are known. Each step takes the same time, and more where requests begin.

    Attributes:
        seconds: the time that its steps have taken.
    """

    shared = busy = False

    def __init__(self) -> None:
        self.seconds = 0.0
        self._begins = False
        self._left: dict[int, int] = {}
        self._sampled: dict[int, int] = {}
        self._ended: set[int] = set()

    def add(self, request: Request) -> int:
        """Add a request, whose row is its key."""
        assert request.max_tokens is not None
        self._left[request.row], self._sampled[request.row] = request.max_tokens, 0
        self._begins = self.seconds > 0  # what is read in the first step is counted for the whole rollout
        return request.row

    def abort(self, key: int) -> None:
        """Drop a request."""
        self._left.pop(key, None)

    def step(self, more: bool) -> tuple[list[tuple[int, Completion]], bool]:
        """Sample a token for each request."""
        self.seconds += DECODE_SECONDS + (BEGIN_SECONDS if self._begins else 0)
        self._begins = False
        self._advance(1)
        ended, self._ended = sorted(self._ended), set()
        return [(key, self._completion(key, "stop")) for key in ended], more

    def go_on(self, seconds: float) -> None:
        """Sample while the trainer trains."""
        self._advance(int(seconds / DECODE_SECONDS))

    def sampled(self, key: int) -> Completion:
        """Return what a request has sampled."""
        return self._completion(key, "stop" if key in self._ended else None)

    def _advance(self, steps: int) -> None:
        for key, left in list(self._left.items()):
            taken = min(left, steps)
            self._sampled[key] += taken
            self._left[key] -= taken
            if taken == left:
                del self._left[key]
                self._ended.add(key)

    def _completion(self, key: int, reason: str | None) -> Completion:
        return Completion(token_ids=[0] * self._sampled[key], finish_reason=reason)


def step_seconds(staleness: int, in_flight: int, apart: bool) -> float:
    """Return the mean seconds of a step.

    Args:
        staleness: `max_staleness`.
        in_flight: the number of rows that are sampled at a time.
        apart: whether the engine has its own GPUs and goes on while the trainer trains.
    """
    pool, lengths, spans = Pool(GROUPS, staleness), LENGTHS["1.5b"]["lognormal"], []

    def begin() -> PooledGroup | None:
        return pool.begin(0, [0], COMPLETIONS) if pool.room(BATCHES - pool.batch) > 0 else None

    def request(group: PooledGroup, place: int) -> Request:
        turn, at = divmod(group.number, GROUPS)
        row = at * COMPLETIONS + place
        left = lengths.draw(turn)[row] - group.rows[place].tokens
        return Request(prompt_ids=[0], seed=0, row=group.number * COMPLETIONS + place, max_tokens=left)

    for batch in range(BATCHES):
        engine = Engine()
        rollout = PoolRollout(pool, engine, in_flight=in_flight, version=batch, begin=begin, request=request)
        rollout.run()
        spans.append(engine.seconds + TRAIN_SECONDS + (READ_SECONDS if staleness else 0))
        if apart:
            engine.go_on(TRAIN_SECONDS)
        rollout.interrupt()
    return fmean(spans[WARM:-LAST])


def main() -> None:
    """Print the table."""
    print("| `max_staleness` | " + " | ".join(map(str, STALENESS)) + " |")
    print("|---" * (len(STALENESS) + 1) + "|")
    for apart in (False, True):
        for in_flight in IN_FLIGHT:
            seconds = [step_seconds(staleness, in_flight, apart) for staleness in STALENESS]
            where = ", engines on other GPUs" if apart else ""
            print(f"| `in_flight` {in_flight}{where} | " + " | ".join(f"{each:.1f}" for each in seconds) + " |")


if __name__ == "__main__":
    main()
