"""One forward and one backward pass for several micro-batches of an optimizer step.

TRL computes each micro-batch's loss from its rows' log-probs and entropies, and differentiates the loss at once. The
model receives nothing else from the loss. So the rows of several micro-batches may be scored in one forward pass: each
loss gets its rows' scores without their graph, and its backward pass ends at these scores. After the last loss, the
gradients of all scores go through the model together. TRL computes, normalises and logs each micro-batch as before,
whatever the loss. Only the order of sums over rows changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor

from ...contract.protocols import Scores

if TYPE_CHECKING:
    from ..stock import StockTrainer

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


def tokens_of(micro_batches: Sequence[dict[str, Any]]) -> list[int]:
    """Return the number of prompt and completion tokens of each micro-batch. Waits for the device once."""
    counts = [micro["prompt_mask"].sum() + micro["completion_mask"].sum() for micro in micro_batches]
    return [int(count) for count in torch.stack(counts).tolist()]
