"""Where a rank's piece starts in the engine's fused parameters: q, k and v in one, gate and up in another."""

from __future__ import annotations

from dataclasses import dataclass

from .intervals import length
from .parameter import Model
from .plan import Placement


@dataclass(frozen=True, slots=True)
class FusedRows:
    """The rows of one engine parameter that are one of the model's.

    Attributes:
        engine: name of the engine's parameter, with `{}` for the layer.
        start: first row; the piece's other rows follow it.
        rows: how many.
    """

    engine: str
    start: int
    rows: int


def fused_rows(model: Model, target: Placement, rank: int) -> dict[str, FusedRows]:
    """By parameter class, those that vLLM fuses along dimension 0, each below the ones listed before it.

    Experts are not among them: their gate and up are one parameter in transformers 5 too, in vLLM's order.

    Source: vLLM `layers/linear.py::QKVParallelLinear`, `MergedColumnParallelLinear`.
    """
    found: dict[str, FusedRows] = {}
    filled: dict[str, int] = {}
    for p in model.parameters:
        sharding = target.sharding(p)
        if p.fused is None or not sharding.holds(rank):
            continue
        rows = int(length(sharding.piece(rank)[1]))
        found[p.name] = FusedRows(p.fused, filled.get(p.fused, 0), rows)
        filled[p.fused] = filled.get(p.fused, 0) + rows
    return found
