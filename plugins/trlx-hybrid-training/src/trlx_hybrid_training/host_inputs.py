"""The inputs of recomputed layers, kept in host memory until the backward pass needs them.

A layer that is recomputed keeps its input alone. It is copied to pinned host memory while the next layers compute, and
back while the layer above is in its backward pass. A copy of 1 GiB takes 20 ms over PCIe 5, and a layer with such rows
takes a second.

TRL's `OffloadActivations` does more: it moves any tensor that is saved. It keeps five of them on the device, where
each may be 1 GiB here, and takes its host memory from torch's allocator, which rounds up to powers of two. The arena
here is allocated once and cut without rounding.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from trlx_hybrid.errors import MemoryPlanError
from trlx_hybrid.memory.arena import Arena

logger = logging.getLogger(__name__)

AHEAD = 2
"""The number of copies to the host that may be under way before the program waits for the first of them: what is being
copied cannot be freed on the device."""


class HostInputs:
    """Keeps the inputs of layers in host memory from a layer's forward pass to its backward pass.

    Args:
        device: the device of the layers.
    """

    def __init__(self, device: torch.device) -> None:
        self._arena = Arena(device)
        self._leaving: deque[tuple[torch.cuda.Event | None, Tensor]] = deque()
        self._last: weakref.ref[_Input] | None = None
        self._full = False  # whether the host had no memory for an input

    @property
    def bytes(self) -> int:
        """The host memory that is allocated for inputs, in bytes."""
        return self._arena.bytes

    def keeping(self, checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call torch's `checkpoint` on a layer, and keep the layer's input in host memory.

        Args:
            checkpoint: transformers' partial of `torch.utils.checkpoint.checkpoint`.
            function: the layer's call; its first argument is the input.
        """
        if not args or not isinstance(args[0], Tensor):  # a layer that gets its input by name
            return checkpoint(function, *args, **kwargs)
        moved = args[0].data_ptr()

        def pack(tensor: Tensor) -> _Input | Tensor:
            return self._leave(tensor) if tensor.data_ptr() == moved else tensor

        with saved_tensors_hooks(pack, lambda saved: saved.back() if isinstance(saved, _Input) else saved):
            return checkpoint(function, *args, **kwargs)

    def _leave(self, tensor: Tensor) -> _Input | Tensor:
        """Copy a tensor to the host, and return what brings it back; the tensor itself where the host has no memory."""
        tensor = tensor.detach().contiguous()
        try:
            left = _Input(self._arena, tensor, self._last)
        except MemoryPlanError as error:
            if not self._full:
                logger.warning("Inputs of layers stay on the device: %s", error)
            self._full = True
            return tensor
        self._last = weakref.ref(left)
        self._leaving.append((left.arrived, tensor))
        self._wait(AHEAD)
        return left

    def _wait(self, most: int) -> None:
        """Wait until at most so many copies to the host are under way."""
        while len(self._leaving) > most:
            arrived, _ = self._leaving.popleft()
            if arrived is not None:
                arrived.synchronize()

    def settle(self) -> None:
        """End a forward pass: wait until the copies to the host have ended, so that what they read is freed on the
        device."""
        self._last = None
        self._wait(0)

    def close(self) -> None:
        """Free the host memory; if a graph still uses it, as after an error, it is freed with that graph."""
        self.settle()
        if not self._arena.bytes_taken:
            self._arena.close()


class _Input:
    """A layer's input in host memory; it gives the memory back when the graph drops it.

    Args:
        arena: where the memory comes from.
        tensor: the input, contiguous.
        before: the input of the layer before, which is copied back together with this one.

    Attributes:
        arrived: the event at which the copy to the host ends; None on a CPU.
    """

    def __init__(self, arena: Arena, tensor: Tensor, before: weakref.ref[_Input] | None) -> None:
        self._arena, self._before = arena, before
        self._shape, self._dtype, self._device = tensor.shape, tensor.dtype, tensor.device
        (self._pieces,) = arena.take([tensor.nbytes])
        weakref.finalize(self, arena.give_back, [tensor.nbytes])
        self._back: tuple[Tensor, torch.cuda.Event | None] | None = None
        with arena.copies() as self.arrived:
            self._copy(tensor, out=True)

    def _copy(self, tensor: Tensor, *, out: bool) -> None:
        parts = torch.split(tensor.view(-1).view(torch.uint8), [len(piece) for piece in self._pieces])
        for here, there in zip(parts, self._pieces, strict=True):
            target, source = (there, here) if out else (here, there)
            target.copy_(source, non_blocking=True)

    def start(self) -> None:
        """Start the copy back to the device, if it has not been started."""
        if self._back is None:
            tensor = torch.empty(self._shape, dtype=self._dtype, device=self._device)
            if self._arena.stream is not None:  # the graph may drop it before the copy ends
                tensor.record_stream(self._arena.stream)
            with self._arena.copies() as returned:
                self._copy(tensor, out=False)
            self._back = tensor, returned

    def back(self) -> Tensor:
        """Return the input on the device, and start the copy of the one before it."""
        self.start()
        assert self._back is not None
        (tensor, returned), self._back = self._back, None
        if returned is not None:
            torch.cuda.current_stream(self._device).wait_event(returned)
        before = None if self._before is None else self._before()
        if before is not None:
            before.start()
        return tensor
