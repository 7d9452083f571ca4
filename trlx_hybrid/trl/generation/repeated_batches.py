"""Data loaders that read a generation batch once.

TRL's loader yields each generation batch as often as micro-batches are trained on its completions, and the trainer
looks at the first of these only. For the others, the loader reads the rows again, pins them, and moves them to the
device, a value at a time: 12 ms a step with 128 rows and 8 micro-batches on a CPU, where nothing is pinned. Here the
others are `Repeated`, an object that these functions pass on unseen, and it takes 1.5 ms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import datasets
from accelerate.utils import send_to_device

from ..checkpoint.data_order import micro_batches_of_a_rollout
from ..refusals import overriding

if TYPE_CHECKING:
    from ..state import RunState
    from ..stock import Rows, StockTrainer


class ReadOnce:
    """A dataset that returns the same list where the rows that it returned last are asked for again.

    Args:
        dataset: the dataset that is read.
    """

    def __init__(self, dataset: datasets.Dataset) -> None:
        self._dataset = dataset
        self._numbers: Sequence[int] | None = None
        self._rows: Rows = []

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_dataset":  # a copy that is being made has no dataset yet
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __getitem__(self, number: int) -> dict[str, Any]:
        row: dict[str, Any] = self._dataset[number]
        return row

    def __getitems__(self, numbers: Sequence[int]) -> Rows:
        if self._numbers is None or list(numbers) != self._numbers:
            self._rows, self._numbers = self._dataset.__getitems__(numbers), list(numbers)
        return self._rows

    def forget(self) -> None:
        """Read the next rows in any case."""
        self._numbers, self._rows = None, []


class Repeated:
    """A generation batch that the loader has yielded before. It reads like the list of its rows.

    It is no `Sequence` and no `list`, so that torch and accelerate look for no tensors in it.

    Args:
        rows: the rows as the dataset returned them.
        collated: makes a batch of them.
    """

    def __init__(self, rows: Rows, collated: Callable[[Rows], Any]) -> None:
        self._rows, self._collated = rows, collated

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows)

    def __getitem__(self, place: int) -> dict[str, Any]:
        return self._rows[place]

    def batch(self, device: Any) -> Any:
        """Return the batch as the loader would have yielded it, with its tensors on this device."""
        return send_to_device(self._collated(self._rows), device)


class CollatedOnce:
    """A collator that returns `Repeated` for the list of rows that it was given last.

    Args:
        collated: the collator of the trainer.
    """

    def __init__(self, collated: Callable[[Rows], Any]) -> None:
        self._collated = collated
        self._last: Rows | None = None

    def __call__(self, rows: Rows) -> Any:
        """Return a batch of rows."""
        if rows is self._last:
            return Repeated(rows, self._collated)
        self._last = rows
        return self._collated(rows)


@contextmanager
def read_once(trainer: StockTrainer, run: RunState | None, dataset: Any) -> Iterator[Any]:
    """Return a context in which the trainer builds the loader of this training dataset, and yield the dataset for it:
    `ReadOnce` where the loader may read each generation batch once; else the given one, and nothing changes.

    It may not where processes read the dataset, where rank 0 reads for all ranks, or where a user's class looks at the
    batches.
    """
    args = trainer.args
    may = (
        run is not None
        and not run.session.selection.stock
        and isinstance(dataset, datasets.Dataset)
        and not args.dataloader_num_workers
        and not trainer.accelerator.dataloader_config.dispatch_batches
        and not args.remove_unused_columns
        and overriding(trainer, "_prepare_inputs", "training_step", "get_batch_samples") is None
    )
    if not may:
        yield dataset
        return
    own = trainer.data_collator
    trainer.data_collator = CollatedOnce(own)
    try:
        yield ReadOnce(dataset)
    finally:
        trainer.data_collator = own


def warn_of_shards(trainer: StockTrainer, run: RunState, dataset: Any) -> None:
    """Warn where ranks have shards of an iterable training dataset of their own, of which some prompts are never read.

    TRL repeats whole batches of all ranks in the stream. A rank that reads a shard by itself takes the same part of a
    batch each time, unless the number of repeats and the number of ranks have no common divisor.

    Source: trl 1.16, `repeat_iterable_dataset`; accelerate 1.15, `prepare_data_loader`.
    """
    accelerator = trainer.accelerator
    common = math.gcd(micro_batches_of_a_rollout(trainer), accelerator.num_processes)
    sharded = getattr(dataset, "n_shards", 1) >= accelerator.num_processes and not accelerator.split_batches
    if isinstance(dataset, datasets.IterableDataset) and common > 1 and sharded:
        run.say_once(
            "shards",
            "One in %d prompts of train_dataset is trained, and each of these %d times. It has %d shards, so each of "
            "the %d ranks reads its own, in which TRL repeats the batches of all ranks. Give it fewer shards than "
            "ranks (`to_iterable_dataset(num_shards=1)`), or load it as a `datasets.Dataset`.",
            common,
            common,
            dataset.n_shards,
            accelerator.num_processes,
        )


def begin_epoch(loader: Any) -> None:
    """Let a loader read its next batch in any case, since the epoch before may have ended with the same rows."""
    if isinstance(dataset := getattr(loader, "dataset", None), ReadOnce):
        dataset.forget()


def whole(batch: Any, device: Any) -> Any:
    """Return a batch of a loader with all its rows, if it is `Repeated`; else as it is."""
    return batch.batch(device) if isinstance(batch, Repeated) else batch
