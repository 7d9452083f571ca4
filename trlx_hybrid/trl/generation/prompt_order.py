"""The dataset rows of one rank in the order in which TRL's data loader yields them, read ahead of the loader."""

from __future__ import annotations

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from typing import Any

from ...errors import ConfigError
from ..checkpoint.data_order import nested_samplers, sampler_generators


class PromptOrder(ABC):
    """The numbers of this rank's dataset rows in the loader's order, epoch after epoch. It does not change the loader.

    Args:
        completions: the number of completions of a group, by which the loader repeats each row.
        repeats: how often the loader yields each batch.
    """

    def __init__(self, completions: int, repeats: int) -> None:
        self._completions, self._repeats = completions, repeats

    @abstractmethod
    def __next__(self) -> int:
        """Return the number of the dataset row of the next group."""

    @abstractmethod
    def row(self, number: int) -> dict[str, Any]:
        """Return a dataset row, which the caller does not change.

        Args:
            number: its number, as it was returned. It is not forgotten.
        """

    def forget(self, numbers: Collection[int]) -> None:  # noqa: B027
        """Forget rows that are not asked for again."""

    def skip(self, groups: int) -> None:
        """Leave out the next groups, which were trained before."""
        for _ in range(groups):
            self.forget([next(self)])

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the position as plain data, for a checkpoint."""

    @abstractmethod
    def load_state(self, state: dict[str, Any], numbers: Collection[int]) -> None:
        """Go to the position that `state` returned.

        Args:
            numbers: the rows that are asked for again.
        """

    def _once(self, batches: Iterator[list[Any]]) -> Iterator[Any]:
        """Yield each row of an epoch's batches once."""
        for batch in itertools.islice(batches, 0, None, self._repeats):
            yield from batch[:: self._completions]


class IndexedOrder(PromptOrder):
    """The order of a dataset with an index, read from a copy of the loader's sampler. A number is the row's index.

    Args:
        dataset: the dataset.
        loader: the training data loader, before the epoch in which the order begins.
    """

    def __init__(self, dataset: Any, loader: Any, completions: int, repeats: int) -> None:
        super().__init__(completions, repeats)
        self._dataset = dataset
        shared = {
            id(part.data_source): part.data_source for part in nested_samplers(loader) if hasattr(part, "data_source")
        }
        self._sampler = copy.deepcopy(loader.batch_sampler, shared)
        self._begin_epoch()

    def __next__(self) -> int:
        row = next(self._rows, None)
        if row is None:
            self._begin_epoch()
            row = next(self._rows)
        self._taken += 1
        number: int = row
        return number

    def row(self, number: int) -> dict[str, Any]:
        """Read a row of the dataset, and return it."""
        found: dict[str, Any] = self._dataset[number]
        return found

    def _begin_epoch(self) -> None:
        self._begin = [generator.get_state() for generator in sampler_generators(self._sampler)]
        self._taken = 0
        self._rows = self._once(iter(self._sampler))

    def state(self) -> dict[str, Any]:
        """Return the states of the sampler's generators before the epoch, and the number of groups taken in it."""
        return {"begin": self._begin, "taken": self._taken}

    def load_state(self, state: dict[str, Any], numbers: Collection[int]) -> None:
        """Go to the position that `state` returned; the dataset has all rows."""
        for generator, begin in zip(sampler_generators(self._sampler), state["begin"], strict=True):
            generator.set_state(begin)
        self._begin_epoch()
        self.skip(state["taken"])


class StreamedOrder(PromptOrder):
    """The order of an iterable dataset, which is read a second time. A row's number counts the rows that were read from
    the first epoch on. A checkpoint has the numbers only: a resumed run reads the stream again, as transformers does.

    A copy of the dataset is read, since readers of one `datasets.IterableDataset` share its position in its files.

    Args:
        loader: the training data loader.
        rows: the number of rows of each of its batches.
        epoch: the number of the epoch in which the order begins.

    Raises:
        ConfigError: the dataset cannot be copied.
    """

    def __init__(self, loader: Any, rows: int, completions: int, repeats: int, epoch: int) -> None:
        super().__init__(completions, repeats)
        try:
            self._dataset = copy.deepcopy(loader.dataset)
        except Exception as error:
            raise ConfigError(
                f"Rows in flight (rollout_options max_staleness) need prompts of later batches, and the iterable "
                f"training dataset cannot be copied to read them ({error!r:.200}). Open files and connections inside "
                f"its generator, or load it as a `datasets.Dataset`."
            ) from error
        self._size, self._first = rows, epoch
        self._ends: list[int] = []  # for each epoch that was read, the number of rows up to its end
        self._taken = 0
        self._kept: dict[int, dict[str, Any]] = {}
        self._rows = self._epoch(epoch)

    def __next__(self) -> int:
        row = next(self._rows, None)
        if row is None:
            if self._taken == (self._ends[-1] if self._ends else 0):
                raise ConfigError(
                    f"Epoch {self._first + len(self._ends)} of the iterable training dataset has no whole batch of "
                    "prompts. Lower the batch size, or give the dataset more rows."
                )
            self._ends.append(self._taken)
            self._rows = self._epoch(self._first + len(self._ends))
            return next(self)
        number, self._taken = self._taken, self._taken + 1
        self._kept[number] = row
        return number

    def row(self, number: int) -> dict[str, Any]:
        """Return a row that was read."""
        return self._kept[number]

    def forget(self, numbers: Collection[int]) -> None:
        """Forget rows that are not asked for again."""
        for number in numbers:
            self._kept.pop(number, None)

    def _epoch(self, epoch: int) -> Iterator[dict[str, Any]]:
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
        rows = iter(self._dataset)
        return self._once(iter(lambda: list(itertools.islice(rows, self._size)), []))

    def state(self) -> dict[str, Any]:
        """Return the first epoch, the ends of those that are over, and the number of rows read."""
        return {"first": self._first, "ends": self._ends, "taken": self._taken}

    def load_state(self, state: dict[str, Any], numbers: Collection[int]) -> None:
        """Read on where `state` was taken, and read again the epochs that have the rows that are asked for."""
        self._first, self._kept = state["first"], {}
        begins, ends = [0, *state["ends"]], [*state["ends"], state["taken"]]
        for epoch, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            current = epoch == len(state["ends"])
            if current or any(begin <= number < end for number in numbers):
                self._ends, self._taken = state["ends"][:epoch], begin
                self._rows = self._epoch(self._first + epoch)
                for _ in range(end - begin):
                    number = next(self)
                    if number not in numbers:
                        self.forget([number])
