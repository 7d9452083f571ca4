"""Gradient checkpointing for only as many layers as memory requires.

With gradient checkpointing, TRL's default, a layer keeps only its input and is computed a second time in the backward
pass. The second computation is about a quarter of the model's arithmetic. The gradients have the same bits whether or
not a layer is recomputed (Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost"). So the number of
recomputed layers is chosen anew for each micro-batch. It depends on the micro-batch's number of tokens, on the bytes
per token that a layer was seen to keep, and on the memory that is free when the loss begins.

Each layer of transformers reads its own `gradient_checkpointing` when it is called (`GradientCheckpointingLayer`).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers.modeling_layers import GradientCheckpointingLayer
from trlx_hybrid.memory.ledger import plain_tensors
from trlx_hybrid.policy.policy import modules_of
from trlx_hybrid.policy.precision import autocast_dtype
from trlx_hybrid.policy.sharded import is_sharded

if TYPE_CHECKING:
    from trlx_hybrid.contract.protocols import Run

logger = logging.getLogger(__name__)

SHARE = 0.9
"""The share of the free memory that activations may be planned to take: the allocator's blocks do not fit exactly."""

WORKSPACE = 1 << 30
"""Bytes of the device that no layer's activations may take: they are kept free for what is not counted separately,
above all chunks of float32 logits."""

IN_BACKWARD = 3
"""The peak memory of one layer's backward pass, in multiples of the bytes that a layer keeps for it.

It counts the layer's own activations, recomputed, and their gradients, beside what other layers keep.
"""

COPIED = 4
"""The number of copied tokens that count as one computed token, when memory is estimated. Copied tokens are tokens of
shared prompts whose keys and values are copied, while nothing else is computed for them.

A layer keeps more than this many times as much for a computed token as for a copied token.
"""


def keepable(free: int, others: int, layer: int, layers: int) -> int:
    """Return how many layers' activations fit into memory, so that these layers need not be recomputed.

    Args:
        free: bytes of the device that nobody uses.
        others: how many of these bytes something other than activations will take.
        layer: bytes that one layer keeps for its backward pass.
        layers: how many layers there are.

    Returns:
        From 0 to `layers`.
    """
    left = int(free * SHARE) - WORKSPACE - others - IN_BACKWARD * layer
    return max(0, min(layers, left // max(layer, 1)))


def layers_of(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """Return the layers of a transformers model that gradient checkpointing can recompute, in model order.

    Modules inside these layers, such as an adapter's thousands, are not searched.
    """
    modules = modules_of(model, closed=(GradientCheckpointingLayer,))
    return [module for module in modules if isinstance(module, GradientCheckpointingLayer)]


class LayerBytes:
    """A record of how many bytes a layer kept for its backward pass, by the number of tokens in the forward pass.

    Its truth value (`bool`) is True once it has an entry.

    Attributes:
        seen: the bytes, by the number of tokens.
    """

    def __init__(self) -> None:
        self.seen: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self.seen)

    def add(self, tokens: int, bytes_: int) -> None:
        """Record how many bytes a layer kept in a forward pass. This replaces the records of forward passes with as
        many or slightly fewer tokens.

        Args:
            tokens: the number of tokens in the forward pass.
            bytes_: the bytes that the layer kept for its backward pass.
        """
        size = tokens.bit_length()
        self.seen = {n: b for n, b in self.seen.items() if n.bit_length() != size or n > tokens} | {tokens: bytes_}

    def expected(self, tokens: int) -> int | None:
        """Return how many bytes a layer keeps at most in a forward pass, or None if nothing is recorded yet.

        The bound is the lowest that the records give: what a larger pass kept, or what a smaller one kept in proportion
        to its tokens. It is never too low, because a part of the bytes (weights cast under autocast) does not grow with
        the tokens.

        Args:
            tokens: the number of tokens in the forward pass.
        """
        return min((b if n >= tokens else -(-b * tokens // n) for n, b in self.seen.items()), default=None)


class Recomputation:
    """Decides for each micro-batch how many layers of the policy are recomputed in the backward pass (gradient
    checkpointing): as few as the free device memory allows.

    Args:
        session: the run.

    Attributes:
        layer_bytes: the bytes that a layer was seen to keep.
        recomputed: how many layers were recomputed for the last loss; None before the first.
    """

    def __init__(self, session: Run) -> None:
        self._session, self.layer_bytes = session, LayerBytes()
        self.recomputed: int | None = None
        self._sharded = any(is_sharded(p) for p in session.policy.module.parameters())

    def idle(self) -> str | None:
        """Return why there is no choice of layers in this run (gradient checkpointing is off, or is not transformers'
        own); None if there is a choice."""
        if not self._session.args.gradient_checkpointing:
            return "gradient_checkpointing is off, so that there is nothing to decide"
        if not any(isinstance(module, GradientCheckpointingLayer) for module in self._session.policy.base.modules()):
            return "gradient checkpointing is not transformers' own here, and stays as it is"
        return None

    @contextmanager
    def chosen(self, tokens: int, copied: int = 0) -> Iterator[None]:
        """Switch gradient checkpointing off for as many layers as memory holds, during one forward pass of the loss.

        Collective where the policy is sharded: a layer that is recomputed is gathered once more, so all ranks must
        recompute the same layers.

        The first layers are recomputed, not the last ones: the activations of the last layers are already freed when
        the backward pass recomputes the first.

        Args:
            tokens: how many tokens the forward pass computes.
            copied: the number of tokens of shared prompts for which the forward pass only copies keys and values.
                They are not counted in `tokens`.
        """
        layers = self._layers()
        if not layers or not torch.is_grad_enabled() or not layers[-1].training:
            yield
            return
        kept = self._keepable(tokens + copied // COPIED, len(layers))
        if self.recomputed is None and self._session.ranks.rank == 0:
            logger.info("The first loss recomputes all layers but one, whose activations are counted.")
        self.recomputed = len(layers) - kept
        for layer in layers[self.recomputed :]:
            layer.gradient_checkpointing = False
        try:
            if kept:
                with _counting(layers[-1]) as storages:
                    yield
                if storages:  # a layer that was not called tells nothing
                    self.layer_bytes.add(tokens, sum(storages.values()))
            else:
                yield
        finally:
            for layer in layers:  # TRL reads these flags, and switches all of them off and on around a rollout
                layer.gradient_checkpointing = True

    def joined(self, tokens: Sequence[int]) -> int:
        """Return how many of the next micro-batches one forward and backward pass can compute without recomputing a
        layer. Collective.

        It is 1 where no forward pass was measured yet, or where not even one micro-batch fits.

        Args:
            tokens: the number of tokens of each of these micro-batches.
        """
        layers = self._layers()
        counts = range(len(tokens), 1, -1) if layers and self.layer_bytes else ()
        memory = self._memory() if counts else (0, 0)
        count = next((n for n in counts if self._fitting(sum(tokens[:n]), len(layers), memory) == len(layers)), 1)
        ranks = self._session.ranks
        return min(ranks.gather(count)) if ranks.world > 1 else count

    def _layers(self) -> list[GradientCheckpointingLayer]:
        """Return the layers for which gradient checkpointing is on, in model order."""
        return [layer for layer in layers_of(self._session.policy.base) if layer.gradient_checkpointing]

    def _keepable(self, tokens: int, layers: int) -> int:
        kept = self._fitting(tokens, layers, self._memory()) if self.layer_bytes else 1
        return min(self._session.ranks.gather(kept)) if self._sharded else kept

    def _fitting(self, tokens: int, layers: int, memory: tuple[int, int]) -> int:
        """Return how many layers' activations this rank's memory can hold in one forward pass.

        Args:
            tokens: the number of tokens of the forward pass.
            layers: how many layers there are.
            memory: bytes of the device that are free, and how many of these something other than activations will take.
        """
        layer, (free, others) = self.layer_bytes.expected(tokens), memory
        assert layer is not None
        return keepable(free, others + layers * tokens * self._input, layer, layers)

    def _memory(self) -> tuple[int, int]:
        """Return how many bytes of the device are free, and how many of these will be needed for something other than
        activations.

        It looks at every parameter, so it is called only once per forward pass.
        """
        return self._session.free_bytes(), self._casts + self._head + self._gradients()

    def _gradients(self) -> int:
        """Return the bytes of the gradients that the backward pass will allocate.

        With gradient accumulation, FSDP2 holds whole gradients, not shards, until the last micro-batch of a step. They
        are not in `grad` of the parameters, so this function counts them all, even if they are allocated already.
        """
        trained = [p for p in self._session.policy.parameters if p.requires_grad]
        if self._sharded and self._session.args.gradient_accumulation_steps > 1:
            return sum(p.numel() * p.itemsize for p in trained)
        return sum(tensor.nbytes for tensor in plain_tensors([p for p in trained if p.grad is None]))

    @functools.cached_property
    def _casts(self) -> int:
        """The bytes of the 16-bit copies of trained float32 weights that autocast keeps during a forward pass."""
        if autocast_dtype(self._session.args).itemsize == 4:
            return 0
        trained = self._session.policy.module.parameters()
        return sum(2 * p.numel() for p in trained if p.requires_grad and p.itemsize == 4 and not is_sharded(p))

    @functools.cached_property
    def _head(self) -> int:
        """The bytes that TRL's fused LM head needs beside its chunks of logits: a float32 gradient if the head is
        trained, and the gathered weight if it is sharded."""
        head: Any = self._session.policy.base.get_output_embeddings()
        weight = getattr(head, "weight", None)
        if weight is None:
            return 0
        each = (4 if weight.requires_grad else 0) + (weight.itemsize if is_sharded(weight) else 0)
        return int(weight.numel()) * each

    @functools.cached_property
    def _input(self) -> int:
        """The bytes per token that a layer keeps if it is recomputed, which are the bytes of its input."""
        policy = self._session.policy
        return int(policy.base.config.get_text_config().hidden_size) * policy.dtype.itemsize


@contextmanager
def _counting(layer: nn.Module) -> Iterator[dict[int, int]]:
    """Return a context that counts the bytes which a layer keeps for the backward pass, in forward passes inside it.

    Args:
        layer: the layer. Its parameters are not counted.

    Yields:
        A dict to which the forward passes add entries: the bytes of each kept storage, by its address.
    """
    storages: dict[int, int] = {}
    own: set[int] = set()
    counting = saved_tensors_hooks(lambda tensor: _count(tensor, storages, own), lambda tensor: tensor)

    def before(*_: object) -> None:
        own.update(p.untyped_storage().data_ptr() for p in layer.parameters() if not is_sharded(p))
        counting.__enter__()

    def after(*_: object) -> None:
        counting.__exit__()

    handles = [layer.register_forward_pre_hook(before), layer.register_forward_hook(after, always_call=True)]
    try:
        yield storages
    finally:
        for handle in handles:
            handle.remove()


def _count(tensor: Tensor, storages: dict[int, int], own: set[int]) -> Tensor:
    if tensor.layout is not torch.strided:  # an adapter's sparse values, which its weights hold
        return tensor.detach()
    storage = tensor.untyped_storage()
    if storage.data_ptr() not in own:
        storages[storage.data_ptr()] = storage.nbytes()
    return tensor.detach()  # the tensor itself would keep its graph alive in a circle
