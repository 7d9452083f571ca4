"""Before bytes move: every rank is there, and all of them mean the same.

A rank that waits for others gets to know who is missing. Each one leaves its name in the rendezvous store as it enters,
so that when a collective times out, every rank that waits can tell which ranks never came.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from trlx_hybrid.errors import SyncError

T = TypeVar("T")


class Agreement:
    """All methods are collective. Its group is gloo's, which takes CPU tensors and keeps deadlines.

    Args:
        deadline: seconds to wait for a rank.

    Attributes:
        group: None for a single rank.
    """

    _made = 0  # in this process: all ranks make the same number, so it names the same one everywhere

    def __init__(self, rank: int, world: int, deadline: float) -> None:
        self.group: Any = None
        self._rank, self._world, self._deadline = rank, world, deadline
        self._round = 0
        if world == 1:
            return
        Agreement._made += 1
        store = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
        self._store: Any = dist.PrefixStore(f"trlx_hybrid/reshard/{Agreement._made}", store)  # type: ignore[attr-defined]
        everyone = [f"1/{rank}" for rank in range(world)]
        # The group's own rendezvous would not say who is missing.
        self._entered("the opening of the weight sync", lambda: self._store.wait(everyone, self._limit))
        self.group = dist.new_group(backend="gloo", timeout=self._limit)

    @property
    def _limit(self) -> timedelta:
        return timedelta(seconds=self._deadline)

    def exchange(self, what: str, value: T) -> list[T]:
        """One picklable value per rank, on every rank.

        Args:
            what: what the ranks enter, for the message.

        Raises:
            SyncError: a rank did not come; names it.
        """
        if self.group is None:
            return [value]
        gathered: list[Any] = [None] * self._world
        self._entered(what, lambda: dist.all_gather_object(gathered, value, group=self.group))
        return gathered

    def exchange_numbers(self, what: str, numbers: Sequence[int]) -> list[list[int]]:
        """The same for a few integers of 64 bits, as many on every rank; a round trip."""
        if self.group is None:
            return [list(numbers)]
        mine = torch.tensor(numbers, dtype=torch.int64)
        gathered = [torch.empty_like(mine) for _ in range(self._world)]
        self._entered(what, lambda: dist.all_gather(gathered, mine, group=self.group))
        return [row.tolist() for row in gathered]

    def _entered(self, what: str, collective: Any) -> None:
        self._round += 1
        error: RuntimeError | None = None
        try:
            self._store.set(f"{self._round}/{self._rank}", what)
            collective()
        except RuntimeError as failed:  # of gloo or of the store
            error = failed
        if error is not None:
            missing = self._missing()
            who = " and ".join(f"rank {rank}" for rank in missing) or "a rank that left"
            raise SyncError(
                f"Rank {self._rank} waited up to {self._deadline:g} s at {what} for {who}"
                f"{', which never entered it' if missing else ''} ({str(error).splitlines()[0][:200]}). It has "
                "died, or does something else; its own output says what. Where it is only slow, raise `deadline` in "
                "HybridConfig.weights_options."
            ) from error
        self._store.delete_key(f"{self._round - 1}/{self._rank}")

    def _missing(self) -> list[int]:
        try:
            return [rank for rank in range(self._world) if not self._store.check([f"{self._round}/{rank}"])]
        except RuntimeError:  # the store went with the rank that kept it
            return []

    def close(self) -> None:
        """Give the group back, as far as it still works."""
        group, self.group = self.group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)
