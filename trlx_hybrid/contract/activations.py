"""A forecast of the memory that a pass of the loss takes: what a scoring component is told of the pass, and what it
answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..policy.policy import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLoss:
    """One forward and backward pass of the loss, of a run that is forecast. All rows are as long as they may be.

    Attributes:
        policy: the policy on the meta device, where tensors have shapes and no memory.
        args: TRL's config.
        rows: the number of rows in the micro-batch.
        prompts: the number of different prompts that these rows have at most.
        length: the number of tokens of each row, prompt and completion.
        completion: how many of these tokens are the completion.
        free: bytes of the device that are free before the pass; the gradients of the parameters will be among them.
        tile: the number of tokens and of vocabulary entries for which the fused head computes logits at once.
        accumulates: whether an optimizer step has more than one micro-batch.
        sharded: whether each rank holds only a part of the policy (FSDP).
        recomputed: whether FSDP lets all layers be recomputed.
        quantised: whether the base model's weights are held in 4 bits.
    """

    policy: Policy
    args: Any
    rows: int
    prompts: int
    length: int
    completion: int
    free: int
    tile: tuple[int, int]
    accumulates: bool = False
    sharded: bool = False
    recomputed: bool = False
    quantised: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """The memory that a pass of the loss takes on one rank.

    Attributes:
        tokens: the number of tokens that the pass computes.
        device: bytes of the device at the pass's peak, without the policy and the gradients of its parameters.
        host: bytes of pinned host memory.
        layers: a text on how the layers are computed, which is printed.
    """

    tokens: int
    device: int
    host: int
    layers: str
