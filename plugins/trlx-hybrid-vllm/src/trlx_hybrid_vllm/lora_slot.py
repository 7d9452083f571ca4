"""Where one PEFT layer's adapter goes in vLLM's memory, and what of it belongs there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from trlx_hybrid.weights.policy import whole


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one PEFT layer's adapter goes: `a` (r, in) and `b` (out, r) are views of vLLM's memory.

    Under tensor parallelism an engine's rank has some columns of A or some rows of B, as it has those of the weight;
    `cut` says whether it is so here.
    """

    name: str
    layer: Any
    a: Tensor
    b: Tensor
    columns: slice
    rows: slice
    cut: bool

    def parts(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """What of the whole factors belongs here."""
        return (a[:, self.columns], b[self.rows]) if self.cut else (a, b)


def factors_of(slots: Sequence[Slot], adapter: str) -> list[tuple[Tensor, Tensor, float]]:
    """Of each slot's layer A (r, in), B (out, r) and the scaling. Collective where the policy is sharded."""
    factors = whole([weight for s in slots for weight in weights_of(s.layer, adapter)])
    scalings = [float(s.layer.scaling[adapter]) for s in slots]
    return list(zip(factors[::2], factors[1::2], scalings, strict=True))


def weights_of(layer: Any, adapter: str) -> tuple[Tensor, Tensor]:
    """Both factors as they are, which may be sharded; fetched anew: training may rebind any of them.

    Past `nn.Module.__getattr__`, which for some 200 layers takes longer than the copies.
    """
    a, b = (layer._modules[part]._modules[adapter]._parameters["weight"] for part in ("lora_A", "lora_B"))
    return a.data, b.data


@dataclass(frozen=True, slots=True)
class Cut:
    """vLLM's way of cutting the factors of one part of a layer for this rank."""

    wrapper: Any
    number: int

    def columns(self, size: int) -> slice | None:
        """Of an A with so many, those that this rank has; None where they are no range."""
        return _range(self._of(self.wrapper.slice_lora_a, torch.arange(size)[None])[0])

    def rows(self, size: int) -> slice | None:
        """The same of the rows of a B."""
        return _range(self._of(self.wrapper.slice_lora_b, torch.arange(size)[:, None])[:, 0])

    def _of(self, cut: Any, numbers: Tensor) -> Tensor:
        if self.wrapper.n_slices == 1:
            return cut(numbers)  # type: ignore[no-any-return]
        given: list[Tensor | None] = [None] * self.wrapper.n_slices
        given[self.number] = numbers
        return cut(given)[self.number]  # type: ignore[no-any-return]


def _range(numbers: Tensor) -> slice | None:
    found: list[int] = numbers.tolist()
    if not found or found != list(range(found[0], found[0] + len(found))):
        return None
    return slice(found[0], found[0] + len(found))


def place_of(slot_a: Tensor, slot_b: Tensor, a: Tensor, b: Tensor, cut: Cut) -> tuple[slice, slice, bool] | None:
    """Which columns of A and rows of B belong into these slots, and whether others do not; None where none fit."""
    columns, rows = cut.columns(a.shape[1]), cut.rows(b.shape[0])
    if columns is None or rows is None or a.shape[0] > slot_a.shape[0]:
        return None
    fits = columns.stop - columns.start == slot_a.shape[1] and rows.stop - rows.start == slot_b.shape[0]
    return (columns, rows, slot_a.shape[1] < a.shape[1] or slot_b.shape[0] < b.shape[0]) if fits else None
