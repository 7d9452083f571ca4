"""Gradient checkpointing for as many layers as memory asks for, and no more.

With gradient checkpointing, TRL's default, a layer keeps its input only and is computed a second time in the backward
pass: about a quarter of the model's arithmetic. Whether a layer is recomputed changes no bit of the gradients (Chen et
al., 2016, "Training Deep Nets with Sublinear Memory Cost"), so it is decided anew for each micro-batch: by its tokens,
by what a token was seen to keep in a layer, and by what is free when the loss begins.

transformers' layers read `gradient_checkpointing` of their own when they are called (`GradientCheckpointingLayer`).
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
from trlx_hybrid.weights.policy import modules_of
from trlx_hybrid.weights.sharded import is_sharded
from trlx_hybrid.weights.verify import autocast_dtype

if TYPE_CHECKING:
    from trlx_hybrid.protocols import Run

logger = logging.getLogger(__name__)

SHARE = 0.9
"""Of what is free, how much may be planned with: the allocator's blocks do not fit exactly."""

WORKSPACE = 1 << 30
"""Bytes of what has no count of its own: chunks of float32 logits above all."""

IN_BACKWARD = 3
"""What the backward pass of one layer holds at most beside what others keep, in multiples of what a layer keeps: its
own, recomputed, and the gradients of that."""

COPIED = 4
"""Of a token, a layer keeps more than so many times what it keeps of one whose keys and values alone are copied to
it."""


def keepable(free: int, others: int, layer: int, layers: int) -> int:
    """How many layers' activations fit.

    Args:
        free: bytes that nobody uses.
        others: bytes that something else will take.
        layer: bytes that one layer keeps for its backward pass.
        layers: how many there are.

    Returns:
        From 0 to `layers`.
    """
    left = int(free * SHARE) - WORKSPACE - others - IN_BACKWARD * layer
    return max(0, min(layers, left // max(layer, 1)))


class Kept:
    """Bytes that a layer was seen to keep, by the tokens of the pass."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._seen)

    def add(self, tokens: int, bytes_: int) -> None:
        """Remember a pass, in place of those with about as many tokens and no more."""
        size = tokens.bit_length()
        self._seen = {n: b for n, b in self._seen.items() if n.bit_length() != size or n > tokens} | {tokens: bytes_}

    def expected(self, tokens: int) -> int | None:
        """Of a pass with so many tokens: the least that is certain, from what larger ones kept and from what smaller
        ones did in proportion. That is never too little, as part of it (weights cast under autocast) is the same for
        any number. None before the first."""
        return min((b if n >= tokens else -(-b * tokens // n) for n, b in self._seen.items()), default=None)


class Recomputation:
    """Decides which layers of the policy are recomputed, micro-batch by micro-batch.

    Attributes:
        recomputed: layers that the last loss recomputed; None before the first.
    """

    def __init__(self, session: Run) -> None:
        self._session, self._kept = session, Kept()
        self.recomputed: int | None = None
        self._sharded = any(is_sharded(p) for p in session.policy.module.parameters())

    def idle(self) -> str | None:
        """Why there is nothing to decide, or None."""
        if not self._session.args.gradient_checkpointing:
            return "gradient_checkpointing is off, so that there is nothing to decide"
        if not any(isinstance(module, GradientCheckpointingLayer) for module in self._session.policy.base.modules()):
            return "gradient checkpointing is not transformers' own here, and stays as it is"
        return None

    @contextmanager
    def chosen(self, tokens: int, copied: int = 0) -> Iterator[None]:
        """A loss forward over so many tokens, and keys and values that are copied from `copied` others, of prompts that
        rows share. Collective where the policy is sharded: a layer that is recomputed is gathered once more, so all
        ranks must recompute the same.

        The first layers are recomputed, the last ones are not: these have gone when the first are at work again.
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
                    self._kept.add(tokens, sum(storages.values()))
            else:
                yield
        finally:
            for layer in layers:  # TRL looks at them, and switches all of them off and on around a rollout
                layer.gradient_checkpointing = True

    def joined(self, tokens: Sequence[int]) -> int:
        """How many micro-batches of these tokens one pass can compute without recomputing a layer; 1 where nothing was
        counted yet, or not even one can. Collective."""
        layers = self._layers()
        counts = range(len(tokens), 1, -1) if layers and self._kept else ()
        memory = self._memory() if counts else (0, 0)
        count = next((n for n in counts if self._fitting(sum(tokens[:n]), len(layers), memory) == len(layers)), 1)
        ranks = self._session.ranks
        return min(ranks.gather(count)) if ranks.world > 1 else count

    def _layers(self) -> list[GradientCheckpointingLayer]:
        """Those that are recomputed unless something is decided, in order. What is inside them, an adapter's modules by
        the thousand, is not looked at."""
        modules = modules_of(self._session.policy.base, closed=(GradientCheckpointingLayer,))
        return [m for m in modules if isinstance(m, GradientCheckpointingLayer) and m.gradient_checkpointing]

    def _keepable(self, tokens: int, layers: int) -> int:
        kept = self._fitting(tokens, layers, self._memory()) if self._kept else 1
        return min(self._session.ranks.gather(kept)) if self._sharded else kept

    def _fitting(self, tokens: int, layers: int, memory: tuple[int, int]) -> int:
        """How many layers need not be recomputed, by this rank's memory."""
        layer, (free, others) = self._kept.expected(tokens), memory
        assert layer is not None
        return keepable(free, others + layers * tokens * self._input, layer, layers)

    def _memory(self) -> tuple[int, int]:
        """Bytes that nobody uses, and how many of them something else than activations will take. Looks at every
        parameter: once for each pass."""
        return self._session.free_bytes(), self._casts + self._head + self._gradients()

    def _gradients(self) -> int:
        """Bytes of those to come. Until the last micro-batch of a step FSDP2 holds them whole, where nobody sees them:
        they may be counted twice."""
        trained = [p for p in self._session.policy.parameters if p.requires_grad]
        if self._sharded and self._session.args.gradient_accumulation_steps > 1:
            return sum(p.numel() * p.itemsize for p in trained)
        return sum(tensor.nbytes for tensor in plain_tensors([p for p in trained if p.grad is None]))

    @functools.cached_property
    def _casts(self) -> int:
        """Bytes of the copies that autocast keeps of trained float32 weights for a forward pass."""
        if autocast_dtype(self._session.args).itemsize == 4:
            return 0
        trained = self._session.policy.module.parameters()
        return sum(2 * p.numel() for p in trained if p.requires_grad and p.itemsize == 4 and not is_sharded(p))

    @functools.cached_property
    def _head(self) -> int:
        """Bytes that TRL's fused LM head takes beside its chunks: its weight's gradient in float32, and its whole."""
        head: Any = self._session.policy.base.get_output_embeddings()
        weight = getattr(head, "weight", None)
        if weight is None:
            return 0
        each = (4 if weight.requires_grad else 0) + (weight.itemsize if is_sharded(weight) else 0)
        return int(weight.numel()) * each

    @functools.cached_property
    def _input(self) -> int:
        """Bytes of what a recomputed layer keeps of a token, its input."""
        policy = self._session.policy
        return int(policy.base.config.get_text_config().hidden_size) * policy.dtype.itemsize


@contextmanager
def _counting(layer: nn.Module) -> Iterator[dict[int, int]]:
    """Bytes, by storage, of what the layer's operations save for their backward pass, its parameters left out."""
    storages: dict[int, int] = {}
    own: set[int] = set()
    counting = saved_tensors_hooks(lambda tensor: _count(tensor, storages, own), lambda tensor: tensor)

    def before(*_: Any) -> None:
        own.update(p.untyped_storage().data_ptr() for p in layer.parameters() if not is_sharded(p))
        counting.__enter__()  # type: ignore[no-untyped-call]

    def after(*_: Any) -> None:
        counting.__exit__()  # type: ignore[no-untyped-call]

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
