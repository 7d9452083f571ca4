"""Checks that all ranks make together before weights move: every rank has entered the weight sync, and all ranks are
about to do the same weight sync.

A rank that waits for others can tell which rank is missing, and whether that rank is alive. For this, each rank writes
the number of collective steps that it has entered into torch's rendezvous store. The ranks also take part in a
collective of gloo, whose sockets close when a process ends. So a closed socket means a dead rank, which is an error at
once. A rank that is only slow keeps its socket open, and the others wait for it until the deadline.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Work, _get_default_store
from trlx_hybrid.errors import PeerLostError

T = TypeVar("T")
logger = logging.getLogger(__name__)

POLL = 2e-5
"""Seconds between two checks of a device or a connection."""
TELL = 60.0
"""Seconds between two log lines that name the ranks for which this rank waits."""
ANSWER = 1.0
"""Seconds to wait, once a sync has failed, before the store is read for the ranks that have not entered the step: until
then, every living rank has recorded itself there."""


class Agreement:
    """Collective checks among all ranks before a weight sync, which raise an error that names the rank that is missing.
    They run over gloo, which takes CPU tensors and keeps deadlines. Every method but `compare_over` and `close` must be
    called by all ranks.

    Args:
        rank: the number of this rank.
        world: the number of ranks.
        deadline: seconds to wait for a rank that is alive and does not come.
        stall: seconds that NCCL's all-reduce may take once all ranks have come; normally it completes at once.

    Attributes:
        group: the gloo process group of all ranks; None for a single rank.

    Raises:
        PeerLostError: a rank did not come to the constructor in time; names it.
    """

    _made = 0  # counts per process: all ranks make the same number, so it names the same agreement on all

    def __init__(self, rank: int, world: int, deadline: float, stall: float = 30.0) -> None:
        self.group: dist.ProcessGroup | None = None
        self._rank, self._world, self._deadline, self._stall = rank, world, deadline, stall
        self._round = 0
        self._fast: tuple[dist.ProcessGroup, torch.device] | None = None
        if world == 1:
            return
        Agreement._made += 1
        self._store = PrefixStore(f"trlx_hybrid/reshard/{Agreement._made}", _get_default_store())
        limit = timedelta(seconds=deadline)
        everyone = [f"at/{rank}" for rank in range(world)]
        self._enter()
        try:  # the group's own rendezvous would not say who is missing
            self._store.wait(everyone, limit)
        except RuntimeError as error:
            raise self._lost("the opening of the weight sync", deadline, error) from error
        self.group = dist.new_group(backend="gloo", timeout=limit)

    def exchange(self, what: str, value: T) -> list[T]:
        """Gather one picklable value per rank, and return the values on every rank, ordered by rank.

        Args:
            what: the step that the ranks enter, for the error message, such as "the start of the weight sync".
            value: the value of this rank.

        Raises:
            PeerLostError: a rank did not come; names it.
        """
        if self.group is None:
            return [value]
        self.compare(what, [], False)
        gathered = [value] * self._world
        try:
            dist.all_gather_object(gathered, value, group=self.group)
        except RuntimeError as error:
            raise self._lost(what, self._deadline, error) from error
        return gathered

    def compare_over(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Make `compare` read its result from an all-reduce over this NCCL group from now on, because NCCL takes a
        tenth of gloo's time. Gloo's all-reduce still runs beside it, to notice dead ranks.

        Args:
            group: an NCCL group of all ranks.
            device: this rank's CUDA device.
        """
        self._fast = group, device

    def compare(self, what: str, numbers: Sequence[int], flag: bool) -> tuple[bool, bool]:
        """Compare integers between all ranks with one all-reduce.

        Args:
            what: the step that the ranks enter, for the error message.
            numbers: 64-bit integers of this rank, the same count on every rank.
            flag: any boolean of this rank.

        Returns:
            Two booleans, equal on all ranks: whether all ranks have the same `numbers`, and whether `flag` is True on
                any rank.

        Raises:
            PeerLostError: a rank did not come; names it.
        """
        if self.group is None:
            return True, flag
        values = torch.tensor([*numbers, *(~n for n in numbers), flag], dtype=torch.int64)  # max ~n gives min n
        self._enter()
        own = values.clone()  # gloo's threads may write to `values` from now on
        began = time.monotonic()  # before gloo's own deadline begins, so that its end is not taken for a death
        meeting = dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group, async_op=True)
        event = None
        if self._fast is not None:
            values, event = self._on_device(own)
        self._wait(what, began, meeting, event)
        most, least, (raised,) = torch.split(values, [len(numbers), len(numbers), 1])
        return bool((most == ~least).all()), bool(raised)

    def roll_call(self) -> str:
        """Return a sentence on which ranks still answer, for the error message of a sync that all ranks have started
        and in which data no longer arrives."""
        self._enter()
        time.sleep(ANSWER)
        missing = self._missing()
        if missing:
            return f"{self._names(missing)} answered no roll call: it died, or left the sync; its own output says why."
        return (
            "All ranks are there and wait as this one: it is the GPUs, their driver or the network (NCCL_DEBUG=INFO)."
        )

    def _on_device(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Start the all-reduce (maximum) of int64 values over NCCL. Returns a pinned CPU tensor and a CUDA event. The
        tensor holds the result once the device has reached the event."""
        assert self._fast is not None
        group, device = self._fast
        there = values.pin_memory().to(device, non_blocking=True)
        dist.all_reduce(there, dist.ReduceOp.MAX, group=group)
        back = torch.empty_like(values, pin_memory=True)
        back.copy_(there, non_blocking=True)
        return back, torch.cuda.current_stream(device).record_event()

    def _wait(self, what: str, began: float, meeting: Work, event: torch.cuda.Event | None) -> None:
        """Wait until an all-reduce of all ranks has completed. Every minute, log the ranks that have not come yet.

        Args:
            what: the step that the ranks enter, for messages.
            began: the time at which this rank came, in seconds of `time.monotonic`.
            meeting: gloo's work handle, which fails if a rank has died, and at the deadline.
            event: the CUDA event that marks the end of NCCL's all-reduce; None waits for gloo's, `meeting`, alone.

        Raises:
            PeerLostError: a rank died or did not come in time, or all ranks came and NCCL did not complete within
                `stall` seconds.
        """
        tell, met = began + TELL, None
        while event is None or not completed(event):
            now = time.monotonic()
            if met is None and meeting.is_completed():
                try:
                    meeting.wait()
                except RuntimeError as error:
                    waited = time.monotonic() - began
                    raise self._lost(what, waited, None if waited >= self._deadline else error) from error
                met = now
                if event is None:
                    return
            if met is None and now - began > self._deadline:
                raise self._lost(what, self._deadline, None)
            if met is not None and now - met > self._stall:
                raise PeerLostError(
                    f"All ranks entered {what}, and {self._stall:g} s later NCCL has not completed its all-reduce: "
                    "look at the GPUs, their driver and the network (NCCL_DEBUG=INFO)."
                )
            if now > tell:
                tell += TELL
                whom = self._names(self._missing()) or "NCCL"
                logger.warning(
                    "Rank %d has waited %.0f s at %s for %s, which lives: its connection is open.",
                    *(self._rank, now - began, what, whom),
                )
            time.sleep(POLL)

    def _enter(self) -> None:
        """Record in torch's rendezvous store that this rank has entered one more collective step, so that others can
        name the ranks that have not."""
        self._round += 1
        self._store.set(f"at/{self._rank}", str(self._round))  # does not wait for an answer

    def _lost(self, what: str, waited: float, error: Exception | None) -> PeerLostError:
        """Return the error for a step to which some ranks did not come. It names these ranks.

        Args:
            what: the step, for the message.
            waited: the time waited, in seconds.
            error: gloo's error if a connection has closed, that is, if a rank has died, left, or reached its deadline
                before this one; None if this rank waited for the whole deadline, so that the missing rank is alive.
        """
        if error is not None:
            time.sleep(ANSWER)  # a closed connection is seen at once, before other living ranks have entered
            error = None if self._given_up() else error
        if error is None:
            self._store.set(f"given up/{self._rank}", str(self._round))
        missing = self._missing()
        who = self._names(missing) or "a rank that left"
        whole = error is None or waited >= self._deadline
        seconds = f"up to {self._deadline:g}" if whole else f"{waited:.1f}"
        text = f"Rank {self._rank} waited {seconds} s at {what} for {who}"
        text += ", which never entered it. " if missing else ". "
        if error is None:
            return PeerLostError(
                f"{text}It lives, and does something else: its own output says what. If it is only slow, raise "
                "`deadline` in HybridConfig.weights_options."
            )
        return PeerLostError(
            f"{text}It has died or left; its own output says why ({str(error).splitlines()[0][:200]})."
        )

    @staticmethod
    def _names(ranks: Sequence[int]) -> str:
        return " and ".join(f"rank {rank}" for rank in ranks)

    def _missing(self) -> list[int]:
        """Return the ranks that have not entered the collective step that this rank is in; an empty list if the store
        is gone."""
        return [rank for rank, number in enumerate(self._rounds("at")) if number < self._round]

    def _given_up(self) -> bool:
        """Return whether another rank has waited in this step until the deadline. Gloo then closes that rank's
        connections, which a rank whose clock is a moment behind cannot tell from a death."""
        return any(number == self._round for number in self._rounds("given up"))

    def _rounds(self, event: str) -> list[int]:
        """Return for each rank the number of the last collective step for which it recorded `event`, or 0; an empty
        list if the store is gone."""
        keys = [f"{event}/{rank}" for rank in range(self._world)]
        try:
            return [int(self._store.get(key)) if self._store.check([key]) else 0 for key in keys]
        except RuntimeError:  # the rank that held the store is gone
            return []

    def close(self) -> None:
        """Destroy the gloo group, unless torch's process groups are gone already."""
        group, self.group = self.group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)


def completed(event: torch.cuda.Event) -> bool:
    """Return whether the device has reached an event. It is `event.query()`, to which torch gives no type."""
    query: Callable[[], bool] = event.query
    return query()


def model_difference(theirs: Sequence[Mapping[str, tuple[int, ...]]]) -> str | None:
    """Return an error message on the first rank that trains another model than rank 0, and the first parameter that
    differs. Returns None if all ranks train the same model.

    Args:
        theirs: for each rank, the shape of every parameter, by name.
    """
    for rank, other in enumerate(theirs):
        odd = [name for name in {**theirs[0], **other} if theirs[0].get(name) != other.get(name)]
        if odd:
            return (
                f"Rank {rank} trains another model than rank 0: {odd[0]} is {other.get(odd[0], 'missing')} there "
                f"and {theirs[0].get(odd[0], 'missing')} on rank 0 ({len(odd)} such parameters). Load one revision "
                "on all ranks."
            )
    return None


def plan_difference(theirs: Sequence[Sequence[int]]) -> str:
    """Return an error message that names the first rank whose planned weight sync differs from rank 0's. At least one
    rank's must differ, or StopIteration is raised.

    Args:
        theirs: for each rank, its weight version, followed by 64-bit digests (hashes) of the transfers that it has
            planned.
    """
    other = next(rank for rank, numbers in enumerate(theirs) if numbers != theirs[0])
    return (
        f"The ranks disagree on the weight sync: rank 0 is at weight version {theirs[0][0]} with plan "
        f"{_text(theirs[0][1:])}, rank {other} at version {theirs[other][0]} with plan {_text(theirs[other][1:])}. "
        "All ranks must load, freeze and sync alike."
    )


def _text(digests: Sequence[int]) -> str:
    """Format signed 64-bit digests as hexadecimal numbers, joined by slashes."""
    return "/".join(f"{digest & (2**64 - 1):016x}" for digest in digests)
