"""Gradient checkpointing for only as many layers as memory requires.

With gradient checkpointing, TRL's default, a layer keeps only its input and is computed a second time in the backward
pass. The second computation is about a quarter of the model's arithmetic. The gradients have the same bits whether or
not a layer is recomputed (Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost"). So the number of
recomputed layers is chosen anew for each micro-batch. It depends on the micro-batch's number of tokens, on the bytes
per token that a layer was seen to keep, and on the memory that is free when the loss begins.

Rows so long that not one layer fits beside the inputs of all are computed in tiles, and inputs that do not fit are kept
in host memory: see `layer_memory`, which plans this, `tiles` and `host_inputs`.

Each layer of transformers reads its own `gradient_checkpointing` when it is called (`GradientCheckpointingLayer`).
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers.modeling_layers import GradientCheckpointingLayer
from trlx_hybrid.memory import host as host_memory
from trlx_hybrid.memory.ledger import plain_tensors
from trlx_hybrid.policy.policy import modules_of
from trlx_hybrid.policy.precision import autocast_dtype
from trlx_hybrid.policy.sharded import is_sharded

from . import tiles
from .host_inputs import HostInputs
from .layer_memory import SHARE, KnownBytes, LayerPlan, Layers, Memory
from .tiles import tileable, tiled

if TYPE_CHECKING:
    from transformers import TrainingArguments
    from trlx_hybrid.contract.protocols import Run
    from trlx_hybrid.policy.policy import Policy

    from .options import PackedOptions

logger = logging.getLogger(__name__)

OFFLOADING = ("cuda",)
"""Types of devices whose memory is not the host's."""

COPIED = 4
"""The number of copied tokens that count as one computed token, when memory is estimated. Copied tokens are tokens of
shared prompts whose keys and values are copied, while nothing else is computed for them.

A layer keeps more than this many times as much for a computed token as for a copied token.
"""


def estimated(tokens: int, copied: int) -> int:
    """Return the number of computed tokens for which a layer keeps as much as in this pass, or a little more.

    Args:
        tokens: how many tokens the pass computes.
        copied: the number of tokens of shared prompts that it only copies.
    """
    return tokens + copied // COPIED


def layers_of(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """Return the layers of a transformers model that gradient checkpointing can recompute, in model order.

    Modules inside these layers, such as an adapter's thousands, are not searched.
    """
    modules = modules_of(model, closed=(GradientCheckpointingLayer,))
    return [module for module in modules if isinstance(module, GradientCheckpointingLayer)]


class Recomputation:
    """Decides for each micro-batch how many layers of the policy are recomputed in the backward pass (gradient
    checkpointing), as few as the free device memory allows; and where memory does not hold one layer, which layers are
    computed in tiles and keep their input in host memory.

    Args:
        session: the run.
        options: the user's options.

    Attributes:
        whole_bytes, tiled_bytes: the bytes that a layer was seen to keep, computed whole and in tiles.
        recomputed: how many layers were recomputed for the last loss; None before the first.
        host: the inputs in host memory.
    """

    def __init__(self, session: Run, options: PackedOptions) -> None:
        self._session, self._options = session, options
        self._known = KnownBytes()
        self.whole_bytes, self.tiled_bytes = self._known.whole, self._known.tiled
        self.recomputed: int | None = None
        self._sharded = any(is_sharded(p) for p in session.policy.module.parameters())
        self.host = HostInputs(session.policy.device)
        self._said = LayerPlan(kept=0)

    def idle(self) -> str | None:
        """Return why there is no choice of layers in this run (gradient checkpointing is off, or is not transformers'
        own); None if there is a choice."""
        if not self._session.args.gradient_checkpointing:
            return "gradient_checkpointing is off, so that there is nothing to decide"
        if not any(isinstance(module, GradientCheckpointingLayer) for module in self._session.policy.base.modules()):
            return "gradient checkpointing is not transformers' own here, and stays as it is"
        return None

    def note(self) -> str:
        """Return what is printed of the choice of layers when a run starts."""
        options = self._options
        further = {"in tiles": options.tiles, "with inputs in host memory": options.activation_offloading}
        chosen = [how for how, wanted in further.items() if wanted]
        beyond = f", beyond that computed {' and '.join(chosen)}" if chosen else ""
        return f"layers are recomputed as far as memory asks for it{beyond}"

    @contextmanager
    def chosen(self, tokens: int, copied: int = 0, rows: int = 1) -> Iterator[None]:
        """Let as few layers be recomputed as memory allows, during one forward pass of the loss and its backward pass.

        Collective where the policy is sharded: a layer that is recomputed is gathered once more, so all ranks must
        recompute the same layers.

        The first layers are recomputed, not the last ones: the activations of the last layers are already freed when
        the backward pass recomputes the first.

        Args:
            tokens: how many tokens the forward pass computes.
            copied: the number of tokens of shared prompts for which the forward pass only copies keys and values.
                They are not counted in `tokens`.
            rows: into how many sequences of equal length the tokens are arranged.
        """
        layers = self._layers()
        if not layers or not torch.is_grad_enabled() or not layers[-1].training:
            yield
            return
        chosen = self._plan(tokens, copied, rows, layers)
        if self.recomputed is None and chosen.kept == 1 and self._session.ranks.rank == 0:
            logger.info("The first loss recomputes all layers but one, whose activations are counted.")
        self._say(chosen, tokens, len(layers))
        self.recomputed = len(layers) - chosen.kept
        record = self.tiled_bytes if chosen.tiled else self.whole_bytes
        with self._following(chosen, layers):
            if chosen.kept:
                with counting_kept(layers[-1]) as storages:
                    yield
                if storages:  # a layer that was not called tells nothing
                    record.add(tokens, sum(storages.values()))
            else:
                yield

    @contextmanager
    def _following(self, chosen: LayerPlan, layers: Sequence[GradientCheckpointingLayer]) -> Iterator[None]:
        """Return a context in which layers do what a plan says in their forward pass, and again in its backward
        pass."""
        first, last = layers[: len(layers) - chosen.kept], layers[len(layers) - chosen.kept :]
        stock = [layer._gradient_checkpointing_func for layer in first]
        with ExitStack() as in_tiles:
            for layer in last:
                layer.gradient_checkpointing = False
                if chosen.tiled:
                    in_tiles.enter_context(tiled(tileable(layer)))
            for number, layer in enumerate(first):
                modules, to_host = tileable(layer) if chosen.tiled else [], number < chosen.offloaded
                if modules or to_host:
                    layer._gradient_checkpointing_func = functools.partial(
                        self._checkpointed, stock[number], modules, to_host
                    )
            try:
                yield
            finally:
                for layer in layers:  # TRL reads these flags, and switches all of them off and on around a rollout
                    layer.gradient_checkpointing = True
                for layer, checkpoint in zip(first, stock, strict=True):
                    layer._gradient_checkpointing_func = checkpoint
                self.host.settle()

    def _checkpointed(
        self,
        checkpoint: Callable[..., Any],
        modules: Sequence[nn.Module],
        to_host: bool,
        function: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call a layer so that it is recomputed in the backward pass.

        Args:
            checkpoint: what transformers calls for it, a partial of `torch.utils.checkpoint.checkpoint`.
            modules: modules of the layer that are computed in tiles, both times.
            to_host: whether the layer's input is kept in host memory.
            function: the layer's call; its first argument is its input.
        """
        if modules:
            function = functools.partial(computed_in_tiles, modules, function)
        if to_host:
            return self.host.keeping(checkpoint, function, *args, **kwargs)
        return checkpoint(function, *args, **kwargs)

    def _say(self, chosen: LayerPlan, tokens: int, layers: int) -> None:
        """Log how layers are computed in tiles or keep inputs in host memory, where more do than before."""
        if (chosen.tiled, chosen.offloaded) <= (self._said.tiled, self._said.offloaded):
            return
        self._said = chosen
        if self._session.ranks.rank == 0:
            logger.warning(
                "A forward pass of %d tokens does not fit as it is: %d of %d layers are recomputed, %d of their inputs "
                "are kept in host memory%s.",
                *(tokens, layers - chosen.kept, layers, chosen.offloaded),
                ", and norms and MLPs are computed in tiles" if chosen.tiled else "",
            )

    def joined(self, tokens: Sequence[int]) -> int:
        """Return how many of the next micro-batches one forward and backward pass can compute without recomputing a
        layer. Collective.

        It is 1 where no forward pass was measured yet, or where not even one micro-batch fits.

        Args:
            tokens: the number of tokens of each of these micro-batches.
        """
        layers = self._layers()
        counts = range(len(tokens), 1, -1) if layers and self.whole_bytes else ()
        memory = self._memory() if counts else Memory(free=0, others=0)

        def fits(number: int) -> bool:
            sizes = self._sizes(sum(tokens[:number]), 0, 1, layers)
            return sizes.kept_in(memory) == len(layers)

        count = next((number for number in counts if fits(number)), 1)
        ranks = self._session.ranks
        return min(ranks.gather(count)) if ranks.world > 1 else count

    def close(self) -> None:
        """Free the host memory of inputs."""
        self.host.close()

    def _layers(self) -> list[GradientCheckpointingLayer]:
        """Return the layers for which gradient checkpointing is on, in model order."""
        return [layer for layer in layers_of(self._session.policy.base) if layer.gradient_checkpointing]

    def _plan(self, tokens: int, copied: int, rows: int, layers: Sequence[GradientCheckpointingLayer]) -> LayerPlan:
        """Return what the layers are to do in a forward pass. Collective where the policy is sharded.

        Until a layer was counted, at most one is kept, to count it: of short rows in any case, of long ones where its
        linear modules tell that it fits.

        Args:
            tokens, copied, rows: see `chosen`.
        """
        sizes = self._sizes(tokens, copied, rows, layers)
        to_host = self._options.activation_offloading and self._session.policy.device.type in OFFLOADING
        long = estimated(tokens, copied) > rows * tiles.TILE
        found = self._known.plan(self._memory(), sizes, long, to_host)
        if found.offloaded:  # the ranks of a host decide before any of them has taken its share
            ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            room = self.host.bytes + int(host_memory.free_bytes() * SHARE) // ranks
            found = replace(found, offloaded=min(found.offloaded, room // max(sizes.inputs, 1)))
        return replace(found, kept=min(self._session.ranks.gather(found.kept))) if self._sharded else found

    def _sizes(self, tokens: int, copied: int, rows: int, layers: Sequence[GradientCheckpointingLayer]) -> Layers:
        """Return the bytes that layers keep in a forward pass.

        Args:
            tokens, copied, rows: see `chosen`.
        """
        in_tiles = tileable if self._options.tiles else no_modules
        self._known.read(layers[-1], self._session.policy.dtype.itemsize, in_tiles)
        return self._known.layers(len(layers), self._input * tokens, estimated(tokens, copied), rows * tiles.TILE)

    def _memory(self) -> Memory:
        """Return how many bytes of the device are free, and how many of these will be needed for something other than
        activations.

        It looks at every parameter, so it is called only once per forward pass.
        """
        return Memory(free=self._session.free_bytes(), others=self._lasting + self._gradients())

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
    def _lasting(self) -> int:
        """The bytes of the device that a pass takes beside activations and gradients, whatever its tokens."""
        return beside_activations(self._session.policy, self._session.args, is_sharded)

    @functools.cached_property
    def _input(self) -> int:
        """The bytes for each token of a layer's input."""
        policy = self._session.policy
        return int(policy.base.config.get_text_config().hidden_size) * policy.dtype.itemsize


def beside_activations(policy: Policy, args: TrainingArguments, sharded: Callable[[Tensor], bool]) -> int:
    """Return the bytes of the device that a forward and backward pass takes beside activations and gradients: the
    16-bit copies of trained float32 weights that autocast keeps during a forward pass; and what TRL's fused LM head
    needs beside its chunks of logits, a float32 gradient if the head is trained, and the gathered weight if it is
    sharded.

    Args:
        sharded: returns whether each rank holds only a part of a parameter.
    """
    casts = 0
    if autocast_dtype(args).itemsize < 4:
        trained = policy.module.parameters()
        casts = sum(2 * p.numel() for p in trained if p.requires_grad and p.itemsize == 4 and not sharded(p))
    head: Any = policy.base.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if weight is None:
        return casts
    each = (4 if weight.requires_grad else 0) + (weight.itemsize if sharded(weight) else 0)
    return casts + int(weight.numel()) * each


def no_modules(layer: nn.Module) -> Sequence[nn.Module]:
    """Return no modules of a layer, where none may be computed in tiles."""
    return ()


def computed_in_tiles(modules: Sequence[nn.Module], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function while some modules compute long inputs in tiles."""
    with tiled(modules):
        return function(*args, **kwargs)


@contextmanager
def counting_kept(layer: nn.Module) -> Iterator[dict[int, int]]:
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
        own.update(_address(p) for p in layer.parameters() if not is_sharded(p))
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
    address = _address(tensor)
    if address not in own:
        storages[address] = tensor.untyped_storage().nbytes()
    return tensor.detach()  # the tensor itself would keep its graph alive in a circle


def _address(tensor: Tensor) -> int:
    """Return a number that tensors have in common if they share memory; also of the meta device, which has none."""
    storage = tensor.untyped_storage()
    return storage._cdata if tensor.is_meta else storage.data_ptr()
