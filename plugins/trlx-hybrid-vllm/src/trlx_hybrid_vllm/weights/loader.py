"""A loader that writes full tensors into vLLM's memory through vLLM's own loader, and records what went where.

vLLM fuses (q, k and v into one matrix), pads and slices while it loads, each model in its own way. Instead of a table
of names, the first load is watched: every copy that vLLM's loader makes is recorded as a route from a slice of a
checkpoint tensor to a slice of an engine parameter or buffer. The routes then tell which elements were written, and let
later syncs be compared bit for bit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trlx_hybrid.contract.types import LoadReport
from trlx_hybrid.errors import SyncError

from ..private.lora import unwrapped
from ..private.models import latent_attention, persistent_buffers

NamedTensors = Iterable[tuple[str, Tensor]]
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Slice:
    """A strided region of a tensor: `offset` is in elements from the tensor's first one."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return a view of this region of `tensor`."""
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True)
class Route:
    """One copy that vLLM's loader makes: from a slice of a checkpoint tensor into a slice of an engine tensor.

    Attributes:
        parameter: vLLM's name of the engine's parameter or buffer that is written.
        destination: the slice of this parameter.
        source: the slice of the checkpoint tensor.
    """

    parameter: str
    destination: Slice
    source: Slice


class WeightLoader:
    """Loads weights into one vLLM model, and finds out at the first load what goes where.

    Attributes:
        parameters: the engine's parameters by vLLM's names, without those that vLLM derives from others.
        tensors: `parameters`, and the buffers that a checkpoint may fill.
        routes: for each checkpoint tensor, the copies that vLLM's loader makes of its slices. The first `load` fills
            this attribute and the two below.
        computed_from: checkpoint tensors that the loader computed something from, rather than copy slices of them.
        unexplained: engine tensors that the loader filled with something other than slices of checkpoint tensors, or
            zeros.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model: Any = model
        with unwrapped(model):
            derived = {f"{name}.{key}" for name, module in latent_attention(model) for key in module._parameters}
            self.parameters = {name: p for name, p in model.named_parameters() if name not in derived}
            self.tensors: dict[str, Tensor] = dict(persistent_buffers(model)) | self.parameters
        self.routes: dict[str, list[Route]] = {}
        self.computed_from: set[str] = set()
        self.unexplained: set[str] = set()

    def load(self, weights: NamedTensors) -> LoadReport:
        """Write checkpoint tensors into the engine, in one call of vLLM's loader, which reads them one by one.

        The first call also records `routes`: which slice of each tensor is copied to where.

        Args:
            weights: (checkpoint name, full tensor) pairs.

        Returns:
            Number and bytes of the tensors, and the names of engine parameters that were not written.

        Raises:
            SyncError: vLLM's loader has no place for a tensor.
        """
        given: dict[str, int] = {}
        stream = counted(weights, given)
        if self.routes:
            self._load(stream, given)
            missing = (self.routes.keys() | self.computed_from) - given.keys()
            unwritten = {r.parameter for name in missing for r in self.routes.get(name, ())}
            unwritten |= missing & self.computed_from
        else:
            recorder = _Recorder(self.tensors)
            with recorder:
                self._load(recorder.following(stream), given)
            self.routes = dict(recorder.routes)
            self.computed_from, self.unexplained = recorder.computed_from, recorder.unexplained
            unwritten = {name for name, p in self.parameters.items() if recorder.written.get(name, 0) < p.numel()}
        return LoadReport(tensors=len(given), bytes=sum(given.values()), unwritten=sorted(unwritten))

    def _load(self, weights: NamedTensors, given: dict[str, int]) -> None:
        try:
            with unwrapped(self._model):
                self._model.load_weights(weights)
        except (KeyError, AssertionError, ValueError) as error:
            raise SyncError(
                f"vLLM's {type(self._model).__name__} has no place for {next(reversed(given), 'the weights')}: "
                f"{type(error).__name__}: {error}. Its definition and the model's disagree, or the model's config "
                "lacks what published ones have; use engine='transformers' and report it."
            ) from error

    def write(self, weights: NamedTensors) -> None:
        """Copy checkpoint tensors to where the first `load` put them, without calling vLLM's loader."""
        for name, tensor in weights:
            for route in self.routes.get(name, ()):
                route.destination.of(self.tensors[route.parameter].data).copy_(route.source.of(tensor))

    def differing(self, weights: NamedTensors) -> list[str]:
        """Return the names of checkpoint tensors whose bits, cast to the engine's dtype, differ from its memory."""
        names, flags = [], []
        for name, tensor in weights:
            for route in self.routes.get(name, ()):
                ours = route.destination.of(self.tensors[route.parameter].data)
                names.append(f"{name} (engine parameter {route.parameter})")
                flags.append(differ(ours, route.source.of(tensor)))
        return flagged(names, flags)


class _WeakReference(Protocol):
    """A reference to a storage that does not keep it alive, as torch's `StorageWeakRef`."""

    def expired(self) -> bool:
        """Return whether the storage is gone."""


@dataclass(frozen=True, slots=True)
class _Source:
    """A checkpoint tensor that vLLM's loader was given, and the range of elements that it takes in its storage.

    Attributes:
        name: the tensor's name in the checkpoint.
        storage: a weak reference, so that the tensor can be freed after it is loaded.
        start, end: the tensor's range of elements in the storage: the first index, and the last index plus 1.
    """

    name: str
    storage: _WeakReference
    start: int
    end: int

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> _Source:
        start = int(tensor.storage_offset())
        end = start + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        weak: Callable[[torch.UntypedStorage], _WeakReference] = StorageWeakRef
        return cls(name, weak(tensor.untyped_storage()), start, end)

    def begins(self, view: Tensor) -> bool:
        """Return whether a tensor that vLLM's loader reads is a view of this checkpoint tensor: it begins within the
        range, and the storage still exists. The address of a storage that was freed may belong to another tensor.

        Args:
            view: a tensor whose storage begins at the address at which this checkpoint tensor's storage began.
        """
        return self.start <= view.storage_offset() < self.end and not self.storage.expired()


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A recorder of every write into the engine's parameters and buffers while vLLM's loader runs. A write that copies
    a slice of a checkpoint tensor is recorded as a route.

    Args:
        parameters: the engine's parameters and buffers, by vLLM's names.

    Attributes:
        written: how many elements of each parameter or buffer were written, by vLLM's name.
        routes: the copies, by the checkpoint tensor that they read.
        computed_from: checkpoint tensors that something was computed from, rather than slices copied.
        unexplained: engine tensors that were filled with something other than slices of checkpoint tensors, or zeros.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        begin: Callable[[], None] = super().__init__
        begin()
        self.routes: defaultdict[str, list[Route]] = defaultdict(list)
        self.written: dict[str, int] = {}
        self.computed_from: set[str] = set()
        self.unexplained: set[str] = set()
        self._parameters = {_address(p): (name, p) for name, p in parameters.items()}
        self._sources: defaultdict[int, list[_Source]] = defaultdict(list)

    def following(self, weights: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        """Pass the checkpoint tensors on to vLLM's loader, and note in which memory each lies, without keeping it."""
        for name, tensor in weights:
            self._sources[_address(tensor)].insert(0, _Source.of(name, tensor))  # newest first
            yield name, tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [value for value in tree_leaves((args, kwargs)) if _has_address(value)]
        if given and not any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns):  # no view
            owner = self._parameters.get(_address(given[0])) if func._schema.is_mutable else None
            if owner is None or not self._explained(func, *owner, args):
                self.computed_from.update(s.name for value in given if (s := self._source(value)) is not None)
        return result

    def _explained(self, func: Any, name: str, parameter: Tensor, args: Any) -> bool:
        """Return whether an operation wrote zeros or a slice of a checkpoint tensor into the engine. A slice is also
        recorded as a route.

        Args:
            func: the ATen operation.
            name: vLLM's name of the parameter that it wrote into.
            args: the operation's arguments.
        """
        if func in _WRITES:
            self.written[name] = self.written.get(name, 0) + args[0].numel()
        if (
            func is torch.ops.aten.copy_.default
            and (source := self._source(args[1]))
            and args[0].shape == args[1].shape
        ):
            to = _slice(args[0], int(parameter.storage_offset()))
            self.routes[source.name].append(Route(name, to, _slice(args[1], source.start)))
            return True
        if func is torch.ops.aten.zero_.default or (func is torch.ops.aten.fill_.Scalar and args[1] == 0):
            return True
        self.unexplained.add(name)
        return False

    def _source(self, value: Tensor) -> _Source | None:
        return next((s for s in self._sources.get(_address(value), ()) if s.begins(value)), None)


_WRITES = {
    torch.ops.aten.copy_.default,
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.fill_.Tensor,
    torch.ops.aten.zero_.default,
}


def _has_address(value: Any) -> bool:
    """Return whether a value is a plain strided tensor, whose storage has an address.

    While vLLM's loader runs, other tensors may occur: the weights may be made by a merge of adapters, which can compute
    with sparse tensors.
    """
    return type(value) in (Tensor, torch.nn.Parameter) and value.layout is torch.strided


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _slice(view: Tensor, start: int) -> Slice:
    return Slice(tuple(view.shape), tuple(view.stride()), int(view.storage_offset()) - start)


def differ(view: Tensor, tensor: Tensor) -> Tensor:
    """Return whether the bits of an engine's `view` differ from those of `tensor`, cast to the view's dtype.

    The result is a boolean scalar tensor on the view's device, so that the host does not wait for the device; `flagged`
    reads many of these at once.
    """
    return (_bits(view) != _bits(tensor.to(view.device, view.dtype))).any()


def _bits(tensor: Tensor) -> Tensor:
    """Return the tensor as integers: NaN equals NaN, and 0.0 differs from -0.0."""
    return tensor.view(BITS[tensor.element_size()])


def flagged(names: Iterable[str], flags: Sequence[Tensor]) -> list[str]:
    """Return the names whose flag is True.

    Args:
        names: one for each flag.
        flags: boolean scalar tensors on one device, as `differ` returns them; they are read with one transfer.
    """
    values = torch.stack(list(flags)).tolist() if flags else []
    return [name for name, flag in zip(names, values, strict=True) if flag]


def counted(weights: NamedTensors, given: dict[str, int]) -> Iterator[tuple[str, Tensor]]:
    """Yield these (name, tensor) pairs unchanged, and record in `given` the bytes of each tensor under its name."""
    for name, tensor in weights:
        given[name] = tensor.numel() * tensor.element_size()
        yield name, tensor
