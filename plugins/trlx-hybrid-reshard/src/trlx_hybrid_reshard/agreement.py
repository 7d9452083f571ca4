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
from trlx_hybrid.errors import PeerLostError

from .arrival import arrived

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
        self._fast: tuple[Any, torch.device] | None = None
        if world == 1:
            return
        Agreement._made += 1
        store = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
        self._store: Any = dist.PrefixStore(f"trlx_hybrid/reshard/{Agreement._made}", store)  # type: ignore[attr-defined]
        everyone = [f"at/{rank}" for rank in range(world)]
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
            PeerLostError: a rank did not come; names it.
        """
        if self.group is None:
            return [value]
        gathered: list[Any] = [None] * self._world
        self._entered(what, lambda: dist.all_gather_object(gathered, value, group=self.group))
        return gathered

    def use(self, group: Any, device: torch.device) -> None:
        """Compare numbers over this group of all ranks from now on: NCCL takes a tenth of gloo's time."""
        self._fast = group, device

    def same(self, what: str, numbers: Sequence[int], flag: bool) -> tuple[bool, bool]:
        """Whether all ranks have these integers of 64 bits, and whether any has raised the flag; one all-reduce.

        Raises:
            PeerLostError: see `exchange`.
        """
        if self.group is None:
            return True, flag
        values = torch.tensor([*numbers, *(~n for n in numbers), flag], dtype=torch.int64)  # ~n falls as n rises
        self._entered(what, lambda: self._most(values))
        most, least, (raised,) = torch.split(values, [len(numbers), len(numbers), 1])
        return bool((most == ~least).all()), bool(raised)

    def _most(self, values: torch.Tensor) -> None:
        """The largest of each over all ranks, in place."""
        if self._fast is None:
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
            return
        group, device = self._fast
        there = values.pin_memory().to(device, non_blocking=True)
        dist.all_reduce(there, dist.ReduceOp.MAX, group=group)
        back = torch.empty_like(values, pin_memory=True)
        back.copy_(there, non_blocking=True)
        if not arrived(torch.cuda.current_stream(device).record_event(), self._deadline):
            raise RuntimeError("the all-reduce did not complete")
        values.copy_(back)

    def _entered(self, what: str, collective: Any) -> None:
        self._round += 1
        error: RuntimeError | None = None
        try:
            self._store.set(f"at/{self._rank}", str(self._round))  # does not wait for an answer
            collective()
        except RuntimeError as failed:  # of gloo or of the store
            error = failed
        if error is not None:
            missing = self._missing()
            who = " and ".join(f"rank {rank}" for rank in missing) or "a rank that left"
            raise PeerLostError(
                f"Rank {self._rank} waited up to {self._deadline:g} s at {what} for {who}"
                f"{', which never entered it' if missing else ''} ({str(error).splitlines()[0][:200]}). It has "
                "died, or does something else; its own output says what. Where it is only slow, raise `deadline` in "
                "HybridConfig.weights_options."
            ) from error

    def _missing(self) -> list[int]:
        try:
            return [rank for rank in range(self._world) if self._round_of(rank) < self._round]
        except RuntimeError:  # the store went with the rank that kept it
            return []

    def _round_of(self, rank: int) -> int:
        """How many collectives a rank has entered."""
        key = f"at/{rank}"
        return int(self._store.get(key)) if self._store.check([key]) else 0

    def close(self) -> None:
        """Give the group back, as far as it still works."""
        group, self.group = self.group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)
