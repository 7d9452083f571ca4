"""The pool of rows in flight: groups whose completions are sampled over several optimizer steps, so that no step waits
for its longest completion.

A batch takes groups that are complete. The rows of the other groups are interrupted, and sampling goes on from their
tokens in the next rollout, with the weights of then. No row is dropped: a group has a batch at which it is trained at
the latest, and a rollout that must train it waits for it. So long completions are not selected against.

Partial rollouts are known from Kimi k1.5 (arXiv:2501.12599, section 2.6.2) and AReaL (arXiv:2505.24298).
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..contract.conversation import PooledConversation, PooledEpisode, PooledRow
from ..interprocess import plain_data

if TYPE_CHECKING:
    from ..contract.protocols import Stream
    from ..contract.types import Request


TOGETHER = 16
"""Rows begin when one place in so many is free: a step of the engine that also reads prompts takes longer than one that
only decodes, so few such steps are better than one for each row that ends."""


@dataclass(slots=True, eq=False)
class PooledGroup:
    """The completions, conversations or episodes of one prompt, which are trained together.

    Attributes:
        number: the number of groups of this rank that began before it; their seeds are made from it.
        index: the number of the prompt's row in the dataset, or in what was read of an iterable one.
        prompt_ids: token ids of the prompt; empty for episodes, which know their own.
        due: the number of the batch that trains it at the latest.
        rows: its completions, conversations or episodes.
        told: whether `Pool.completed` was called for it. A checkpoint does not have it.
    """

    number: int
    index: int
    prompt_ids: list[int]
    due: int
    rows: list[Any]
    told: bool = False

    @property
    def numbers(self) -> list[int]:
        """The numbers of its rows among all rows that this rank has begun in the run."""
        return [self.number * len(self.rows) + place for place in range(len(self.rows))]

    @property
    def complete(self) -> bool:
        """True where all rows have ended."""
        return all(row.over for row in self.rows)


class Pool:
    """The groups of one rank that have begun and are not trained yet, and the choice of those that a batch trains.

    Args:
        size: the number of groups that a batch takes from this rank.
        depth: the number of batches for which a group may wait after the one in whose rollout it began.
        row: the class of its rows: completions, conversations or episodes.

    Attributes:
        groups: the groups, in the order in which they began.
        batch: the number of batches that were taken.
        begun: the number of groups that have begun.
        completed: called once with each group that is complete, when `ready` finds it.
    """

    def __init__(
        self,
        size: int,
        depth: int,
        row: type[PooledRow] | type[PooledConversation] | type[PooledEpisode] = PooledRow,
    ) -> None:
        self._size, self._depth, self._row = size, depth, row
        self.groups: list[PooledGroup] = []
        self.batch = self.begun = 0
        self.completed: Callable[[PooledGroup], None] = lambda group: None

    def room(self, batches: int) -> int:
        """Return how many groups may begin now. More could not all be trained before they are due, or at all.

        Args:
            batches: the number of batches that the run has left, the current one included.
        """
        return min(self._depth + 1, batches) * self._size - len(self.groups)

    def begin(self, index: int, prompt_ids: list[int], completions: int) -> PooledGroup:
        """Add a group, and return it.

        Args:
            index: the number of the prompt's row in the dataset.
            completions: the number of its rows.
        """
        rows = [self._row() for _ in range(completions)]
        group = PooledGroup(self.begun, index, prompt_ids, self.batch + self._depth, rows)
        self.begun += 1
        self.groups.append(group)
        return group

    def ready(self) -> list[PooledGroup] | None:
        """Return the groups of the current batch: the oldest that are complete. None where the rollout has to go on,
        since there are too few, or since the groups that would be left could not all be trained before they are due."""
        complete = [group for group in self.groups if group.complete]
        for group in complete:
            if not group.told:
                group.told = True
                self.completed(group)
        chosen = complete[: self._size]
        left = [group for group in self.groups if group not in chosen]
        in_time = all(group.due > self.batch + place // self._size for place, group in enumerate(left))
        return chosen if len(chosen) == self._size and in_time else None

    def take(self, chosen: Sequence[PooledGroup]) -> None:
        """Remove the groups of the current batch; the next batch begins."""
        numbers = {group.number for group in chosen}
        self.groups = [group for group in self.groups if group.number not in numbers]
        self.batch += 1

    def state(self) -> dict[str, Any]:
        """Return the pool for a checkpoint, in the types of JSON. A row with a value that is no plain data, such as an
        object that an environment has shown, is saved as one that has not begun."""
        return {"batch": self.batch, "begun": self.begun, "groups": [self._saved(group) for group in self.groups]}

    def _saved(self, group: PooledGroup) -> dict[str, Any]:
        rows = []
        for row in group.rows:
            try:
                body = plain_data.dumps(asdict(row), classes=False)
            except plain_data.NotPlainError:
                body = plain_data.dumps(asdict(self._row()), classes=False)
            rows.append(json.loads(body))
        fields = ("number", "index", "prompt_ids", "due")
        return {name: getattr(group, name) for name in fields} | {"rows": rows}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take what `state` returned."""
        self.batch, self.begun = state["batch"], state["begun"]
        self.groups = [
            PooledGroup(**{**group, "rows": [self._restored(row) for row in group["rows"]]})
            for group in state["groups"]
        ]

    def _restored(self, row: Mapping[str, Any]) -> Any:
        return self._row.restored(plain_data.loads(json.dumps(row).encode(), classes=False))


class PoolRollout:
    """One rollout of a pool: samples until the pool has the groups of a batch. The other rows are interrupted then, or
    later where the engine goes on while the batch is trained.

    Args:
        pool: the pool.
        stream: an open stream of the engine.
        in_flight: the number of rows that are sampled at a time.
        version: the version of the weights that sample.
        begin: begins the next group of the pool, and returns it; None where no further group may begin.
        request: returns the request for the rest of a row, from its group and its place in it.

    Attributes:
        steps: the number of steps that the engine has made.
        sampled: the number of rows that were sampled in these steps, summed over the steps.
        alone: the number of steps in which fewer rows than a quarter of `in_flight` were sampled.
    """

    def __init__(
        self,
        pool: Pool,
        stream: Stream,
        *,
        in_flight: int,
        version: int,
        begin: Callable[[], PooledGroup | None],
        request: Callable[[PooledGroup, int], Request],
    ) -> None:
        self._pool, self._stream, self._in_flight, self._version = pool, stream, in_flight, version
        self._begin, self._request = begin, request
        self._waiting = deque(
            (group, place) for group in pool.groups for place, row in enumerate(group.rows) if not row.over
        )
        self._running: dict[int, tuple[PooledGroup, int]] = {}
        self._given_back = 0  # rows that the engine has interrupted by itself, which wait for no others
        self.steps = self.sampled = self.alone = 0

    def run(self) -> list[PooledGroup]:
        """Sample, and return the groups of the batch. Rows of other groups are not interrupted yet. Where several
        ranks run the engine, all of them must call it together; rows of a rank that has its batch go on until every
        rank has its own."""
        self._fill()
        chosen, more = self._pool.ready(), True
        while more and (chosen is None or self._stream.shared):
            self.steps, self.sampled = self.steps + 1, self.sampled + len(self._running)
            self.alone += 4 * len(self._running) < self._in_flight
            finished, more = self._step(chosen is None)
            if finished:  # in most steps no row ends
                self._fill()
                chosen = self._pool.ready()
        assert chosen is not None
        self._pool.take(chosen)
        return chosen

    def go_on(self) -> bool:
        """Hand the engine what it has not been given yet, since it goes on without further steps. Return whether rows
        are being sampled."""
        self._step(False)
        return bool(self._running)

    def _step(self, more: bool) -> tuple[bool, bool]:
        """Let the engine take a step; return whether a row has ended, and whether a rank has something left to do."""
        finished, anyone = self._stream.step(more)
        for key, completion in finished:
            group, place = self._running.pop(key)
            row = group.rows[place]
            row.extend(completion, self._version)
            if not row.over:  # the engine has interrupted it by itself
                self._waiting.appendleft((group, place))
                self._given_back += 1
        return bool(finished), anyone

    def interrupt(self) -> None:
        """Interrupt the rows that are being sampled, and keep their tokens. The rollout is over."""
        for key, (group, place) in self._running.items():
            group.rows[place].extend(self._stream.sampled(key), self._version)
        self._running = {}

    def _fill(self) -> None:
        """Let further rows be sampled, as far as there is room: interrupted ones first, then those of new groups."""
        room = self._in_flight - len(self._running)
        begun, self._given_back = self._given_back, 0
        for _ in range(room if room >= self._in_flight // TOGETHER else begun):
            if not self._waiting:
                group = self._begin()
                if group is None:
                    return
                self._waiting += [(group, place) for place in range(len(group.rows))]
            group, place = self._waiting.popleft()
            self._running[self._stream.add(self._request(group, place))] = group, place
