"""Micro-batches of an optimizer step that are scored otherwise than TRL drew them: with their rows regrouped, or
several in one forward and one backward pass. TRL's metrics are those of the micro-batches as they were drawn.

TRL computes some numbers for single micro-batches (minima, maxima, and means over tokens), and logs their mean over an
optimizer step. In this mean, all micro-batches have equal weight, whatever the number of their tokens. With other rows
in each micro-batch these numbers change (the KL divergence of one step was 4.59 instead of 3.48), although the gradient
of the step does not. So after the last loss of a rollout, TRL computes all losses once more for the micro-batches as
they were drawn, from stored scores, and its metrics are taken from there.

Several micro-batches share a pass because TRL computes each micro-batch's loss from its rows' log-probs and entropies,
and differentiates the loss at once. The model receives nothing else from the loss. Each loss gets its rows' scores
without their graph, and its backward pass ends at these scores. After the last loss, the gradients of all scores go
through the model together. TRL computes, normalises and logs each micro-batch as before, whatever the loss. Only the
order of sums over rows changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor

from ...contract.protocols import Scores
from ...errors import ComponentError

if TYPE_CHECKING:
    from ..stock import StockTrainer

ROW = "drawn_row"
"""The key in a regrouped batch for each row's position among all rows that were drawn, (b,) int64."""

LOG_PROBS, ENTROPIES = "drawn_log_probs", "drawn_entropies"
"""The keys in a regrouped batch for the scores that its loss was computed from, (b, T) float, without a graph."""


def regrouped(
    micro_batches: Sequence[dict[str, Any]], groups: Sequence[Sequence[int]], by: str = "scoring"
) -> list[dict[str, Any]]:
    """Return the rows of some micro-batches, put together into other micro-batches of the same size.

    Args:
        groups: for each new micro-batch, the numbers of its rows, counted from 0 through all the given micro-batches.
        by: name of the component that chose the groups, for the error.

    Raises:
        ComponentError: the groups do not contain each row once, or differ in size.
    """
    size = len(micro_batches[0]["prompt_ids"])
    rows, sizes = size * len(micro_batches), [len(group) for group in groups]
    if sorted(row for group in groups for row in group) != list(range(rows)) or set(sizes) != {size}:
        raise ComponentError(
            f"The {by} put the {rows} rows of {len(micro_batches)} micro-batches into groups of "
            f"{', '.join(map(str, sizes))}, where each row once and {size} to a group were expected. Report it to its "
            "author."
        )
    whole: dict[str, Any] = {}
    for name, value in micro_batches[0].items():
        if isinstance(value, Tensor) and value.ndim:
            whole[name] = torch.cat([micro[name] for micro in micro_batches])
    return [
        {name: whole[name][list(group)] if name in whole else value for name, value in micro_batches[0].items()}
        for group in groups
    ]


def number(micro_batches: Sequence[dict[str, Any]]) -> None:
    """Store in each micro-batch, under ROW, the positions of its rows among all rows that TRL drew. After rows are
    regrouped, `as_drawn` restores the order from them."""
    size, device = len(micro_batches[0]["prompt_ids"]), micro_batches[0]["prompt_ids"].device
    for first, micro_batch in enumerate(micro_batches):
        micro_batch[ROW] = torch.arange(first * size, (first + 1) * size, device=device)


def keep(micro_batch: dict[str, Any], scores: Scores) -> None:
    """Store scores in the micro-batch whose loss is computed from them, so that `as_drawn` can give them to the
    micro-batches that TRL drew. Does nothing unless rows were put into other micro-batches than TRL drew them in."""
    if ROW in micro_batch:
        micro_batch[LOG_PROBS] = scores.log_probs.detach()
        if scores.entropies is not None:
            micro_batch[ENTROPIES] = scores.entropies.detach()


def kept(micro_batch: Mapping[str, Any]) -> Scores:
    """Return the scores that `keep` has stored in a micro-batch."""
    return Scores(micro_batch[LOG_PROBS], micro_batch.get(ENTROPIES), None)


def as_drawn(micro_batches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the micro-batches as TRL drew them, with their rows in the order before regrouping. Each holds the scores
    that `keep` stored when the losses of the regrouped ones were computed.

    Args:
        micro_batches: all regrouped micro-batches of a rollout; the scores are removed from them.

    Returns:
        The micro-batches; an empty list if `keep` was not called for one of them.
    """
    if not all(LOG_PROBS in micro_batch for micro_batch in micro_batches):
        return []
    places = torch.cat([micro_batch[ROW] for micro_batch in micro_batches]).argsort()
    drawn = regrouped(micro_batches, places.view(len(micro_batches), -1).tolist())
    for micro_batch in micro_batches:
        for name in (LOG_PROBS, ENTROPIES):
            micro_batch.pop(name, None)
    return drawn


def replace_last(metrics: Mapping[str, list[float]], lengths: Mapping[str, int], count: int) -> None:
    """Remove from TRL's metrics the values that the losses of regrouped micro-batches have logged. Called after the
    losses of the micro-batches that TRL drew have appended their own values. A metric to which the latter losses have
    appended nothing stays as it is.

    Args:
        metrics: TRL's metrics since its last log line, changed in place.
        lengths: length of each metric's list before the drawn micro-batches logged; the `count` values just before
            this index are removed.
        count: number of micro-batches, each of which logs one value.
    """
    for name, values in metrics.items():
        before = lengths.get(name, 0)
        if len(values) > before:
            del values[max(0, before - count) : before]


WIDE = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
"""Keys of the tensors of a micro-batch that its log-probs are computed from."""


class JoinedPass:
    """The scores that one forward pass computed for several micro-batches, and the gradients that the micro-batches'
    losses leave at these scores.

    Args:
        scores: scores of all rows of the micro-batches, with their graph.
        micro_batches: TRL's micro-batches, in the order of the rows.
    """

    def __init__(self, scores: Scores, micro_batches: Sequence[dict[str, Any]]) -> None:
        self._scored = [tensor for tensor in (scores.log_probs, scores.entropies) if tensor is not None]
        sizes = [len(micro["prompt_ids"]) for micro in micro_batches]
        self._parts = [[_apart(part) for part in torch.split(tensor, sizes)] for tensor in self._scored]
        self._waiting = list(enumerate(micro_batches))

    def take(self, micro_batch: dict[str, Any]) -> Scores | None:
        """Return the scores of a micro-batch, detached from the forward pass, so that its loss can be computed from
        them. Each micro-batch is served once and in order; for any other one, return None."""
        if not self._waiting or self._waiting[0][1] is not micro_batch:
            return None
        number, _ = self._waiting.pop(0)
        log_probs, entropies = [parts[number] for parts in self._parts] + [None] * (2 - len(self._parts))
        assert log_probs is not None
        return Scores(log_probs, entropies, None)

    @property
    def taken(self) -> bool:
        """True once `take` has returned the scores of every micro-batch. `backward` can be called as soon as the loss
        of the last micro-batch is computed."""
        return not self._waiting

    def backward(self) -> None:
        """Propagate the gradients that the losses have left at the scores through the model in one backward pass.
        Called after the last loss."""
        outputs, gradients = [], []
        for scored, parts in zip(self._scored, self._parts, strict=True):
            if any(part.grad is not None for part in parts):
                outputs.append(scored)
                gradients.append(torch.cat([torch.zeros_like(p) if p.grad is None else p.grad for p in parts]))
        torch.autograd.backward(outputs, gradients)


def _apart(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def joinable(trainer: StockTrainer, micro_batch: dict[str, Any], done: int) -> list[dict[str, Any]]:
    """Return the micro-batches that one forward pass could compute together: the given one, and the ones that follow it
    in the optimizer step (under DDP, without the step's last). Return only the given one if another kind of data
    parallelism than FSDP2 and DDP is used, or if the shapes of the micro-batches differ.

    Args:
        done: number of the step's micro-batches that came before the given one.
    """
    kind = trainer.accelerator.distributed_type
    left = trainer.current_gradient_accumulation_steps - done
    if kind in (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU):
        left -= 1  # DDP averages gradients in the last one's backward pass, prepared in its own forward pass
    elif kind != DistributedType.NO and not trainer.accelerator.is_fsdp2:
        left = 1
    drawn = getattr(trainer, "_buffered_inputs", None) or [micro_batch]
    first = trainer._step % len(drawn)
    ahead = list(drawn[first : first + max(1, left)])
    alike = {tuple(micro[name].shape for name in WIDE) for micro in ahead}
    return ahead if ahead[0] is micro_batch and len(alike) == 1 else [micro_batch]


def row_lengths(micro_batch: dict[str, Any]) -> Tensor:
    """Return the number of prompt and completion tokens of each row of a micro-batch, (rows,)."""
    lengths: Tensor = micro_batch["prompt_mask"].sum(1) + micro_batch["completion_mask"].sum(1)
    return lengths


def tokens_of(micro_batches: Sequence[dict[str, Any]]) -> list[int]:
    """Return the number of prompt and completion tokens of each micro-batch. Waits for the device once."""
    counts = [micro["prompt_mask"].sum() + micro["completion_mask"].sum() for micro in micro_batches]
    return [int(count) for count in torch.stack(counts).tolist()]
