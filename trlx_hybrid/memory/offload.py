"""An owner's tensors leave the device and return, bit for bit, while everything that refers to them stays."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from .arena import Arena, ByteRange, Span, aligned
from .ledger import storages, torch_optimizer

SMALL = 1 << 20  # bytes; torch's CUDA allocator serves smaller blocks from a pool of their own


@dataclass(frozen=True, slots=True, eq=False)
class _Away:
    """A storage that left: emptied, its bytes in the arena."""

    storage: torch.UntypedStorage
    nbytes: int
    pieces: list[ByteRange]


class Offload:
    """Moves whole storages between the device and the arena. One per owner; everything from one thread.

    A storage is emptied in place, so tensors, views and the optimizer's dicts stay the same objects; each storage
    moves once, however many tensors share it. Emptied tensors must not be touched: see `guard`. A storage that was
    exported (DLPack, `numpy()`, CUDA IPC) or whose address was recorded (CUDA graphs) must not be listed: it returns
    to another address.

    Args:
        arena: where the bytes go.
        tensors: returns the owner's tensors, whatever they are by then.

    Attributes:
        left_behind: bytes that stayed at the last `leave`, by reason.
    """

    def __init__(self, arena: Arena, tensors: Callable[[], Iterable[Tensor]]) -> None:
        self.left_behind: Mapping[str, int] = {}
        self._arena, self._tensors = arena, tensors
        self._away: list[_Away] = []
        self._returning: list[_Away] = []  # on their way in: memory is there, the bytes perhaps not yet
        self._out: list[Span] = []
        self._back: list[Span] = []

    @property
    def resident(self) -> bool:
        """Whether all of it may be used on the current stream."""
        return not self._away and not self._returning

    @property
    def bytes_away(self) -> int:
        """Bytes that hold no device memory."""
        return sum(away.nbytes for away in self._away)

    @property
    def seconds_out(self) -> float | None:
        """Time on the copy stream of the last `leave`; None while copies are under way or before any."""
        return _total(self._out)

    @property
    def seconds_back(self) -> float | None:
        """The same for all returns since the last `leave`."""
        return _total(self._back)

    def leave(self) -> int:
        """Copy all that can move to the arena and free it. Returns the bytes moved; 0 when nothing was there.

        Returns while copies run: the freed memory goes to nobody before they are done, and
        `torch.cuda.empty_cache()` waits for them and gives it back to the device.

        Raises:
            MemoryPlanError: the host lacks the memory; nothing moved.
        """
        self.finish_return()
        movable = self._movable()
        if not movable:
            return 0
        sizes = [storage.nbytes() for storage in movable]
        leaving = [_Away(*entry) for entry in zip(movable, sizes, self._arena.take(sizes), strict=True)]
        try:
            with self._arena.copies() as span:
                for away in leaving:
                    self._copy(away, out=True)
        except BaseException:
            self._release(leaving)
            raise
        self._away += leaving  # first, so that an interrupt in between loses nothing
        for away in leaving:
            away.storage.resize_(0)
        self._out, self._back = [span], []
        return sum(sizes)

    def start_return(self, budget_bytes: int | None = None) -> int:
        """Allocate on the current stream and start the copies in, without waiting. Returns the bytes started.

        Args:
            budget_bytes: return only the first storages that fit in it together; a later call goes on from there.

        Raises:
            torch.OutOfMemoryError: the device is full. What got memory before returns; the rest is still away.
        """
        self._forget_dead()
        batch: list[_Away] = []
        total = 0
        for away in self._away:
            if budget_bytes is not None and total + away.nbytes > budget_bytes:
                break
            batch.append(away)
            total += away.nbytes
        self._one_segment(batch)
        allocated = 0
        try:
            for away in batch:
                away.storage.resize_(away.nbytes)
                allocated += 1
        finally:
            self._copy_in(batch[:allocated])
        return total

    def finish_return(self) -> None:
        """Make the current stream wait for the copies that were started; the host does not wait."""
        if not self._returning:
            return
        self._back[-1].wait(self._arena.device)
        self._release(self._returning)
        self._returning = []

    def return_all(self) -> None:
        """Start whatever is still away, and finish."""
        self.start_return()
        self.finish_return()

    # --- doing ------------------------------------------------------------------------------------------------------

    def _movable(self) -> list[torch.UntypedStorage]:
        """Distinct storages on the device that can be emptied, in order; notes the others."""
        found: list[torch.UntypedStorage] = []
        behind: dict[str, int] = {}
        for storage in storages(self._tensors()):
            if not storage.nbytes():
                continue
            if storage.device == self._arena.device and storage.resizable():
                found.append(storage)
            else:
                reason = "not resizable" if storage.device == self._arena.device else f"on {storage.device}"
                behind[reason] = behind.get(reason, 0) + storage.nbytes()
        self.left_behind = behind
        return found

    def _copy_in(self, batch: list[_Away]) -> None:
        """Copies for storages that were just allocated; empties them again when a copy cannot be started."""
        if not batch:
            return
        try:
            with self._arena.copies() as span:
                for away in batch:
                    self._copy(away, out=False)
        except BaseException:
            for away in batch:
                away.storage.resize_(0)
            raise
        del self._away[: len(batch)]
        self._returning += batch
        self._back.append(span)

    def _copy(self, away: _Away, *, out: bool) -> None:
        device, stream = self._arena.device, self._arena.stream
        with torch.no_grad():
            raw = torch.empty(0, dtype=torch.uint8, device=device).set_(away.storage)  # type: ignore[call-overload]
            if stream is not None:  # whenever it is freed, the memory stays reserved until this copy is done
                raw.record_stream(stream)
            start = 0
            for piece in away.pieces:
                there, here = self._arena.view(piece), raw[start : start + piece.bytes]
                target, source = (there, here) if out else (here, there)
                target.copy_(source, non_blocking=True)
                start += piece.bytes

    def _one_segment(self, batch: list[_Away]) -> None:
        """Ask the driver for all the memory at once: hundreds of calls of cudaMalloc would take longer than the copies.

        The block goes straight back to torch's cache, from where the storages are cut.
        """
        device = self._arena.device
        if device.type != "cuda":
            return
        need = sum(aligned(away.nbytes) for away in batch if away.nbytes > SMALL)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if need > cached:
            with contextlib.suppress(torch.OutOfMemoryError):  # in smaller parts it may still fit
                torch.empty(need, dtype=torch.uint8, device=device)

    def _forget_dead(self) -> None:
        """Drop what nobody refers to any more, as gradients set to None while away."""
        dead = {away for away in self._away if _unreferenced(away.storage)}
        self._away = [away for away in self._away if away not in dead]
        self._release(dead)

    def _release(self, entries: Iterable[_Away]) -> None:
        for away in entries:
            self._arena.give_back(away.pieces)


def _total(spans: list[Span]) -> float | None:
    seconds = [span.seconds for span in spans]
    known = [s for s in seconds if s is not None]
    return sum(known) if known and len(known) == len(seconds) else None


def _unreferenced(storage: torch.UntypedStorage) -> bool:
    """Whether no tensor refers to a storage: the Python object held here is then its only owner."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return count is not None and count(storage._cdata) == 1


def guard(optimizer: Any, offload: Offload) -> Callable[[], None]:
    """Bring the state back before `step` and `state_dict` read it; the stream waits, the host does not.

    Returns:
        Takes the hooks off again.

    Raises:
        ConfigError: the optimizer has no such hooks (DeepSpeed's own).
    """
    inner = torch_optimizer(optimizer)
    if not isinstance(inner, torch.optim.Optimizer):
        raise ConfigError(
            f"{type(inner).__name__} is no torch optimizer, so nothing could return its state before it is used. "
            "Leave the optimizer out of what is offloaded; DeepSpeed has offloading of its own."
        )
    handles = [
        inner.register_step_pre_hook(lambda *_: offload.return_all()),
        inner.register_state_dict_pre_hook(lambda _: offload.return_all()),
    ]

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove
