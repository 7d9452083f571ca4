"""Offloading of the tensors of one owner, such as the optimizer: their bytes move to host memory and back unchanged,
while the tensor objects stay the same."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from .arena import Arena, aligned
from .ledger import storages, torch_optimizer

SMALL = 1 << 20  # bytes; torch's CUDA allocator has a separate pool for smaller blocks


@dataclass(frozen=True, slots=True, eq=False)
class _Away:
    """A storage that was offloaded: on the device it is empty, and its bytes are in the arena.

    Attributes:
        storage: the storage, of size 0 now.
        nbytes: its size in bytes before.
        pieces: the arena's tensors that hold its bytes.
    """

    storage: torch.UntypedStorage
    nbytes: int
    pieces: list[Tensor]


class Offload:
    """Moves the storages of one owner, such as the optimizer, between the device and a host buffer, the arena. Use each
    object from one thread.

    A storage is emptied in place, so tensors, views and the optimizer's dicts stay the same objects; each storage moves
    once, however many tensors share it. Storages that are on another device or cannot be emptied stay. Emptied tensors
    must not be read or written; `guard` makes an optimizer bring its state back first. A storage that was exported
    (DLPack, `numpy()`, CUDA IPC) or whose address was recorded (CUDA graphs) must not be among `tensors`: it returns to
    another address.

    Args:
        arena: host buffer for the bytes.
        tensors: returns the owner's current tensors.
    """

    def __init__(self, arena: Arena, tensors: Callable[[], Iterable[Tensor]]) -> None:
        self._arena, self._tensors = arena, tensors
        self._away: list[_Away] = []
        self._returning: list[_Away] = []  # returning: memory is allocated, copies may still run
        self._returned: torch.cuda.Event | None = None  # the event at the end of these copies

    @property
    def resident(self) -> bool:
        """True where all of the owner's tensors are on the device and may be used on the current stream."""
        return not self._away and not self._returning

    def leave(self) -> int:
        """Copy the owner's tensors to the arena, as far as they can move, and free them on the device.

        It returns while copies run: no other tensor gets the freed memory before they end. `torch.cuda.empty_cache()`
        waits for them and gives the memory back to the device.

        Returns:
            The bytes moved; 0 if nothing could move.

        Raises:
            MemoryPlanError: the host lacks the memory; nothing moved.
        """
        self.finish_return()
        found = storages(self._tensors())
        movable = [s for s in found if s.nbytes() and s.device == self._arena.device and s.resizable()]
        sizes = [storage.nbytes() for storage in movable]
        leaving = [_Away(*entry) for entry in zip(movable, sizes, self._arena.take(sizes), strict=True)]
        with self._arena.copies():
            for away in leaving:
                self._copy(away, out=True)
        self._away += leaving  # before the resize, so that an interrupt in between loses nothing
        for away in leaving:
            away.storage.resize_(0)
        return sum(sizes)

    def start_return(self) -> int:
        """Allocate device memory for the tensors that were offloaded, and start the copies to it, without waiting.

        Returns:
            The bytes whose copies started.

        Raises:
            torch.OutOfMemoryError: the device is full. Tensors that had got memory before the error are copied back
                all the same; the others stay offloaded.
        """
        self._forget_dead()
        self._one_segment()
        allocated = 0
        try:
            for away in self._away:
                away.storage.resize_(away.nbytes)
                allocated += 1
        finally:
            batch, self._away = self._away[:allocated], self._away[allocated:]
            with self._arena.copies() as self._returned:
                for away in batch:
                    self._copy(away, out=False)
            self._returning += batch
        return sum(away.nbytes for away in batch)

    def finish_return(self) -> None:
        """Make the current stream wait for the copies that `start_return` has started, and give their host memory back;
        the host does not wait."""
        if self._returned is not None:
            torch.cuda.current_stream(self._arena.device).wait_event(self._returned)
        self._arena.give_back([away.nbytes for away in self._returning])
        self._returning, self._returned = [], None

    def return_all(self) -> None:
        """Bring back all tensors that are still offloaded: `start_return` and `finish_return`."""
        self.start_return()
        self.finish_return()

    def _copy(self, away: _Away, *, out: bool) -> None:
        device, stream = self._arena.device, self._arena.stream
        with torch.no_grad():
            raw = torch.empty(0, dtype=torch.uint8, device=device).set_(away.storage)
            if stream is not None:  # if it is freed earlier, the memory stays reserved until this copy ends
                raw.record_stream(stream)
            for there, here in zip(away.pieces, torch.split(raw, [len(p) for p in away.pieces]), strict=True):
                target, source = (there, here) if out else (here, there)
                target.copy_(source, non_blocking=True)

    def _one_segment(self) -> None:
        """Make torch's allocator reserve the memory for all returning storages in one call of cudaMalloc: hundreds of
        calls would take longer than the copies.

        The block goes straight back to torch's cache, from which the storages are then allocated.
        """
        device = self._arena.device
        if device.type != "cuda":
            return
        need = sum(aligned(away.nbytes) for away in self._away if away.nbytes > SMALL)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if need > cached:
            with contextlib.suppress(torch.OutOfMemoryError):  # in smaller parts it may still fit
                torch.empty(need, dtype=torch.uint8, device=device)

    def _forget_dead(self) -> None:
        """Drop offloaded storages that no tensor refers to any more, such as gradients set to None meanwhile, so that
        they are not brought back."""
        dead = {away for away in self._away if _unreferenced(away.storage)}
        self._away = [away for away in self._away if away not in dead]
        self._arena.give_back([away.nbytes for away in dead])


def _unreferenced(storage: torch.UntypedStorage) -> bool:
    """Return whether no tensor refers to a storage: the Python object passed here is then its only owner."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return count is not None and count(storage._cdata) == 1


def guard(optimizer: Any, offload: Offload) -> Callable[[], None]:
    """Add hooks to an optimizer that bring its offloaded state back before `step` and `state_dict` read it. The stream
    waits for the copies, the host does not.

    Args:
        offload: the offload of the optimizer's state.

    Returns:
        A function that removes the hooks.

    Raises:
        ConfigError: the optimizer is no torch optimizer and has no such hooks (DeepSpeed's own).
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
