"""Measurement of the device memory that each owner (policy, gradients, optimizer, engine weights, KV cache, other)
holds, for logs and error messages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from ..contract.types import Phase
from ..policy.quantised import scales
from .estimate import GIB, OWNERS, REMEDIES, ParameterSize, Prediction

if TYPE_CHECKING:
    from .arena import Arena

MIB = 1 << 20
Interval = tuple[int, int]


class Ledger:
    """Measures the bytes that each owner, such as the policy or the KV cache, holds on the run's device; tensors
    elsewhere are not counted.

    Args:
        owners: for each owner ("policy", "KV cache" and so on) a function that yields its current tensors. Memory that
            several owners share counts for the first of them. An owner whose memory is unmapped, as vLLM's while it
            sleeps, must yield nothing: its addresses would still count.
        arena: the host buffer for offloaded tensors, whose size is reported separately; its device is the run's.
        allocated: a function that returns the bytes in use on the device (`torch.cuda.memory_allocated`); with None,
            "other" is not measured.

    Attributes:
        held: bytes per owner when a phase last began, for each phase that has begun.
    """

    def __init__(
        self,
        owners: Mapping[str, Callable[[], Iterable[Tensor]]],
        arena: Arena,
        allocated: Callable[[], int] | None = None,
    ) -> None:
        self.device, self.arena = arena.device, arena
        self._owners, self._allocated = dict(owners), allocated
        self.held: dict[Phase, dict[str, int]] = {}

    def measure(self) -> dict[str, int]:
        """Return the bytes that each owner holds now, by the owner's name. A byte to which several tensors refer counts
        once, for the first owner. The entry "other" has the bytes that are allocated on the device and belong to no
        owner. Does not synchronise."""
        held = disjoint_bytes({owner: self._intervals(tensors()) for owner, tensors in self._owners.items()})
        if self._allocated is not None:
            held["other"] = max(0, self._allocated() - sum(held.values()))
        return held

    def metrics(self, phase: Phase) -> dict[str, float]:
        """Measure the owners when a phase begins, and return metrics for the logs, in MiB.

        `hybrid/memory/<phase>_mib` is what all owners hold. `hybrid/memory/host_arena_mib` is the host memory of the
        arena, if there is any. For TRAIN there is also `hybrid/memory/moved/<owner>_mib`, for each owner that holds
        another amount than at the last call for ROLLOUT: positive for what came back for TRAIN, negative for what
        exists in ROLLOUT only.
        """
        held = self.held[phase] = self.measure()
        found = {f"hybrid/memory/{phase.value}_mib": sum(held.values()) / MIB}
        if self.arena.bytes:
            found["hybrid/memory/host_arena_mib"] = self.arena.bytes / MIB
        if phase is Phase.TRAIN:
            for owner, before in self.held.get(Phase.ROLLOUT, {}).items():
                if owner != "other" and held[owner] != before:
                    name = owner.lower().replace(" ", "_")
                    found[f"hybrid/memory/moved/{name}_mib"] = (held[owner] - before) / MIB
        return found

    def report(self, phase: Phase, capacity: int | None = None, prediction: Prediction | None = None) -> str:
        """Return a text on the memory that each owner holds now, largest first, and what to change. It is added to an
        out-of-memory error.

        Args:
            phase: the phase of the error.
            capacity: the device's memory in bytes.
            prediction: the prediction, to be shown next to the measured bytes.
        """
        held = self.measure()
        expected = prediction.phases[phase.value] if prediction is not None else {}
        ranked = sorted((owner for owner in held if held[owner]), key=lambda owner: -held[owner])
        of = f" of {_gib(capacity)}" if capacity is not None else ""
        lines = [f"Memory held on {self.device} in phase {phase.name}: {_gib(sum(held.values()))}{of} GiB."]
        for owner in ranked:
            predicted = f" (predicted {_gib(expected[owner])})" if owner in expected else ""
            lines.append(f"  {owner:<15}{_gib(held[owner]):>8} GiB{predicted}")
        lines.append(f"  {'host arena':<15}{_gib(self.arena.bytes):>8} GiB, on the host")
        if ranked and ranked[0] in REMEDIES:
            lines.append(f"The largest is {ranked[0]}: {REMEDIES[ranked[0]]}.")
        return "\n".join(lines)

    def _intervals(self, tensors: Iterable[Tensor]) -> list[Interval]:
        found = [s for s in storages(tensors) if s.device == self.device and s.nbytes()]
        return [(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in found]


def disjoint_bytes(owners: Mapping[str, Iterable[Interval]]) -> dict[str, int]:
    """Return the bytes that each owner holds, by its name. Addresses that several owners share count for the first of
    them.

    Args:
        owners: for each owner, its address intervals (end exclusive), which may overlap.
    """
    held: dict[str, int] = {}
    covered: list[Interval] = []
    before = 0
    for owner, intervals in owners.items():
        covered = union([*covered, *intervals])
        total = sum(stop - start for start, stop in covered)
        held[owner] = total - before
        before = total
    return held


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the addresses of some intervals, which may overlap, as sorted intervals that neither overlap nor touch."""
    joined: list[Interval] = []
    for start, stop in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        elif stop > start:
            joined.append((start, stop))
    return joined


def parameter_sizes(module: nn.Module) -> list[ParameterSize]:
    """Return the sizes of a module's parameters on this rank, with the scales of quantised parameters. A tied parameter
    has a single entry."""
    return [
        ParameterSize(shape=tuple(local.shape), itemsize=local.element_size(), trainable=p.requires_grad)
        for p in module.parameters()
        for local in plain_tensors([p, *scales(p)])
    ]


def table(prediction: Prediction) -> list[str]:
    """Return a memory prediction as lines that are printed when the run starts: a table of owners and phases in GiB
    (MiB where the peak is below one GiB), the peak, and the assumptions. An owner that is offloaded or asleep in a
    phase is shown as "away"."""
    phases = list(prediction.phases)
    phase, peak = prediction.peak
    name, unit = ("GiB", GIB) if peak >= GIB else ("MiB", MIB)
    rows = [[f"memory, {name}", *phases]]
    for owner in OWNERS:
        if any(held.get(owner) for held in prediction.phases.values()):
            rows.append([owner, *(_cell(prediction, p, owner, unit) for p in phases)])
    rows.append(["total", *(f"{sum(held.values()) / unit:.2f}" for held in prediction.phases.values())])
    lines = [f"{row[0]:<15}" + "".join(f"{cell:>9}" for cell in row[1:]) for row in rows]
    return [*lines, f"peak {peak / unit:.2f} {name} in {phase}", *(f"note: {note}" for note in prediction.notes)]


def _cell(prediction: Prediction, phase: str, owner: str, unit: int) -> str:
    if owner in prediction.away[phase]:
        return "away"
    held = prediction.phases[phase].get(owner, 0)
    return f"{held / unit:.2f}" if held else "-"


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f}"


def plain_tensors(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the strided tensors that hold the bytes of some tensors: a DTensor's local tensor, the parts of a quantised
    tensor, and any other tensor itself."""
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
            yield from plain_tensors(part for part in parts if isinstance(part, Tensor))
        elif tensor.layout == torch.strided:
            yield tensor


def storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Return the distinct storages that hold some tensors, each once, in order."""
    found = (tensor.untyped_storage() for tensor in plain_tensors(tensors))
    return list({storage._cdata: storage for storage in found}.values())


def policy_tensors(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Yield the parameters and buffers that some modules hold directly, with the scales of quantised weights. A tied
    parameter comes once per module that has it."""
    held = (t for m in modules for t in itertools.chain(m._parameters.values(), m._buffers.values()))
    return (tensor for found in held if found is not None for tensor in (found, *scales(found)))


def gradient_tensors(parameters: Iterable[nn.Parameter]) -> Iterator[Tensor]:
    """Yield the gradients of the parameters that have one."""
    return (p.grad for p in parameters if p.grad is not None)


def optimizer_tensors(optimizer: Any) -> Iterator[Tensor]:
    """Yield all tensors in the state of an optimizer, which accelerate may have wrapped."""
    leaves = tree_leaves(list(torch_optimizer(optimizer).state.values()))
    return (leaf for leaf in leaves if isinstance(leaf, Tensor))


def torch_optimizer(optimizer: Any) -> Any:
    """Return the torch optimizer inside accelerate's wrapper."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer
