"""CUDA graphs of a model's layers: two launches for the forward and the backward pass of all layers.

A small model waits for the CPU. A layer of SmolLM2-135M is launched as some 180 kernels forward and backward, of about
25 µs each on the CPU, and its arithmetic for 2,400 tokens takes 0.1 ms. A CUDA graph records the kernels once and
starts them together. It needs the same shapes and addresses each time, so packs are filled up to sizes that several
rollouts fit into, see `trlx_hybrid_training.packing.Sizes`.

Layers are captured together, by `torch.cuda.make_graphed_callables`, if each one's input is the output of the one
before, and all else that they get is the same. A first pass without graphs shows that, and how much memory they keep.
Each new graph is compared with the layers that it was captured from. The embedding, the last norm, the head and the
loss are computed as before.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import set_warn_on_accumulate_grad_stream_mismatch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from trlx_hybrid.weights.verify import noise

from .comparison import difference
from .packing import KERNEL, Pack, Sizes, attention_name
from .recomputation import layers_of
from .whole_rows import Room, whole_rows

if TYPE_CHECKING:
    from trlx_hybrid.contract.protocols import Run

logger = logging.getLogger(__name__)

WORTH = 10**11
"""The largest product of a layer's parameters and the tokens of a pass for which graphs are captured. Beyond it, a
layer's arithmetic takes longer than its launches, which then cost no time."""

WASTE = 2.0
"""The largest size of a graph that is used, in multiples of the pack's tokens."""

SHARE = 0.5
"""The share of the device's free memory, less what a sleeping engine is going to need, that a graph and its comparison
may take."""

MOST = 3
"""The largest number of graphs. Each keeps the memory of its activations and gradients."""

PLAIN = (type(None), bool, int, float, str)
"""Types of arguments, besides tensors, that layers may get."""


class LayerGraphs:
    """The CUDA graphs of the policy's layers, by the sizes of the packs that they compute.

    Args:
        session: the run.

    Attributes:
        refused: why layers are not captured; None where they are.
    """

    def __init__(self, session: Run) -> None:
        self._session = session
        self._layers = layers_of(session.policy.base)
        self.refused = _refused(session, self._layers)
        self._graphs: dict[Sizes, Graph | None] = {}  # the last used one last; None until it is captured
        self._last: Sizes | None = None
        self._chain: Chain | None = None
        self._waiting: int | None = None  # the weight version of a forward pass whose backward pass has not begun

    def sizes(self, pack: Pack) -> Sizes | None:
        """Return the sizes to which a pack is to be filled up before a forward pass of the loss; None where no graph is
        going to compute it. Sizes are chosen where two packs in succession fit into them."""
        if self.refused is not None or pack.trie:  # the sizes of a trie differ too much from pack to pack
            return None
        wanted, last = pack.sizes, self._last
        self._last = wanted
        fitting = [s for s in self._graphs if s.holds(wanted) and s.tokens <= WASTE * wanted.tokens]
        if fitting:
            chosen = min(fitting, key=lambda sizes: sizes.tokens)
        elif last is None or self._chain is None or not self._serves(chosen := wanted.with_room(), last):
            return None
        self._graphs[chosen] = self._graphs.pop(chosen, None)
        while len(self._graphs) > MOST:
            del self._graphs[next(iter(self._graphs))]
        return chosen

    def may_serve(self, tokens: int) -> bool:
        """Return whether graphs may compute the layers of a pack with so many tokens, now or later in the run."""
        return self.refused is None and (self._chain is None or self._chain.parameters * tokens <= WORTH)

    def inputs(self, pack: Pack, sizes: Sizes) -> dict[str, Any]:
        """Return the keyword arguments with which the model computes a pack that was filled up to `sizes`, in place of
        those that differ from pack to pack."""
        room = Room(sizes.copied, sizes.shared, sizes.copies)
        indices = whole_rows(pack.segments, pack.prefixes, pack.ends.device, room)
        assert indices is not None
        return {
            "segments": (),
            "prefixes": (),
            "indices": indices._replace(lengths=()),
            "max_length_q": sizes.longest,
            "max_length_k": sizes.longest,
        }

    @contextmanager
    def running(self, sizes: Sizes | None) -> Iterator[None]:
        """A context for one forward pass of the loss, in which graphs compute the layers, where they can.

        Args:
            sizes: those that the pack was filled up to; None where it was not.
        """
        if self.refused is None:
            self.refused = _changed(self._layers)
        if self.refused is not None or self._waiting == self._session.weight_version:
            yield
        elif self._chain is None:
            with Watch(self._layers) as watch:
                yield
            found = watch.found()
            self._chain, self.refused = (None, found) if isinstance(found, str) else (found, None)
        elif sizes is None:
            yield
        else:
            with self._replacing(sizes):
                yield

    @contextmanager
    def _replacing(self, sizes: Sizes) -> Iterator[None]:
        """A context in which the first layer computes all of them, and the others return their input.

        It sets their attribute `forward`, as `trlx_hybrid_training.lora` does, and removes it at the end.
        """
        layers = self._layers

        def restore() -> None:
            for layer in layers:
                vars(layer).pop("forward", None)

        def all_layers(hidden: Tensor, **given: Any) -> Tensor:
            graph = self._captured(sizes, hidden, given)
            if graph is None:
                restore()
                plain: Tensor = layers[0].forward(hidden, **given)
                return plain
            out = graph(hidden, given)
            if out.requires_grad:
                self._waiting = self._session.weight_version
                out.register_hook(self._begun)  # type: ignore[no-untyped-call]
            return out

        for layer in layers:
            layer.forward = _unchanged
        layers[0].forward = all_layers
        try:
            yield
        finally:
            restore()

    def _begun(self, gradient: Tensor) -> None:
        self._waiting = None

    def _captured(self, sizes: Sizes, hidden: Tensor, given: Mapping[str, Any]) -> Graph | None:
        """Return the graph of these sizes, captured now where it has to be; None where the layers are to compute
        without one, because memory asks for recomputation or because it cannot be captured."""
        layers = self._layers
        if any(layer.gradient_checkpointing for layer in layers) or not layers[0].training:
            return None
        graph = self._graphs[sizes]
        if graph is not None and graph.takes(hidden, given):
            return graph
        self._graphs[sizes] = None  # gives its memory back before the next one takes some
        del graph
        try:
            random = noise(self._session.policy.module, self._session.policy.modules)
            if random is not None:
                raise NotImplementedError(f"{random} makes each forward pass another one")
            graph = Graph(layers, hidden, given)
            found = graph.compare(hidden, given)
        except (RuntimeError, NotImplementedError, AssertionError, ValueError) as error:
            found = str(error).partition("\n")[0]
            _release_generator(hidden.device)
        if found is not None:
            self.refused = found
            self._graphs.clear()
            logger.warning("The layers run without CUDA graphs: %s.", found)
            return None
        logger.info("CUDA graphs of %d layers serve up to %d tokens.", len(layers), sizes.tokens)
        self._graphs[sizes] = graph
        return graph

    def _serves(self, sizes: Sizes, last: Sizes) -> bool:
        """Return whether a graph of these sizes is worth its memory, and whether there is enough.

        Args:
            last: the sizes of the pack before.
        """
        chain, engine = self._chain, self._session.engine
        assert chain is not None
        if not sizes.holds(last) or chain.parameters * sizes.tokens > WORTH:
            return False
        asleep = engine.asleep_bytes if engine is not None else 0
        taken = 2 * (chain.bytes * sizes.tokens // chain.tokens + chain.gradients)
        return taken <= SHARE * (self._session.free_bytes() - asleep)

    def state(self) -> list[dict[str, int]]:
        """Return the sizes of the graphs. A resumed run then fills packs up to the sizes that it would have chosen
        without the interruption."""
        return [asdict(sizes) for sizes in self._graphs]

    def load_state(self, state: Sequence[Mapping[str, int]]) -> None:
        """Restore what `state` returned. The graphs are captured anew."""
        self._graphs = dict.fromkeys(Sizes(**sizes) for sizes in state)

    def close(self) -> None:
        """Give the memory of all graphs back."""
        self._graphs.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The sizes of layers that are called one after the other, each with the output of the one before.

    Attributes:
        tokens: the number of tokens that they were called with.
        bytes: the bytes that they kept for the backward pass.
        parameters: the number of parameters of the largest layer.
        gradients: the bytes of the gradients of all their parameters.
    """

    tokens: int
    bytes: int
    parameters: int
    gradients: int


class Watch:
    """A context for one forward pass, in which the calls of layers are watched. Afterwards `found` says whether each
    layer was called with the output of the one before.

    Args:
        layers: the layers, in model order.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = layers
        self._called = 0
        self._given: tuple[list[Any], TreeSpec] | None = None  # the arguments of the first layer, besides its input
        self._out: Any = None  # of the layer that was called last
        self._refused: str | None = None
        self._before = self._kept = 0
        self._recomputed = False

    def __enter__(self) -> Watch:
        self._handles = [layer.register_forward_pre_hook(self._called_with, with_kwargs=True) for layer in self._layers]
        self._handles += [layer.register_forward_hook(self._returned) for layer in self._layers]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._given = self._out = None

    def found(self) -> Chain | str | None:
        """Return the chain that was seen, or why the layers are none. None where layers were recomputed, which tells
        nothing about the memory that they keep."""
        if self._refused is not None or self._recomputed:
            return self._refused
        if self._called < len(self._layers):
            return "some of its layers were not called"
        sizes = [sum(p.numel() for p in layer.parameters()) for layer in self._layers]
        trained = [p for layer in self._layers for p in layer.parameters() if p.requires_grad]
        return Chain(
            tokens=self._tokens,
            bytes=self._kept,
            parameters=max(sizes),
            gradients=sum(p.numel() * p.itemsize for p in trained),
        )

    def _called_with(self, layer: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        number, (leaves, spec) = self._called, tree_flatten(given)
        if number == 0:
            self._given, self._before = (leaves, spec), _allocated()
        assert self._given is not None
        if number >= len(self._layers) or layer is not self._layers[number] or len(args) != 1:
            self._refused = "its layers are not called one after the other"
        elif number and args[0] is not self._out:
            self._refused = "a layer's input is not the output of the one before"
        elif spec != self._given[1] or not all(map(_same, leaves, self._given[0])):
            self._refused = "its layers do not all get the same arguments"
        elif not all(isinstance(leaf, (Tensor, *PLAIN)) for leaf in leaves):
            self._refused = "its layers get other arguments than tensors and numbers"
        self._called += 1
        self._recomputed = self._recomputed or bool(layer.gradient_checkpointing)

    def _returned(self, layer: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if not isinstance(out, Tensor):
            self._refused = "its layers return more than a tensor"
            return
        self._out, self._tokens, self._kept = out, out.shape[-2], _allocated() - self._before


class Graph:
    """The CUDA graphs of all layers' forward and backward pass, for one set of shapes.

    Args:
        layers: the layers, in model order.
        hidden: (1, N, width), the input of the first layer.
        given: the other arguments of each layer.
    """

    def __init__(self, layers: Sequence[nn.Module], hidden: Tensor, given: Mapping[str, Any]) -> None:
        leaves, self._spec = tree_flatten(dict(given))
        self._constants = _constants(leaves)
        kind = hidden.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        self._dtype = autocast or hidden.dtype
        self._stack = _Stack(layers, self._spec, self._constants, autocast)
        self._parameters = tuple(self._stack.parameters())
        self._addresses = _addresses(self._parameters)
        samples = [hidden.detach().clone().requires_grad_(hidden.requires_grad)]
        samples += [leaf.clone() for leaf in leaves if isinstance(leaf, Tensor)]
        self._shapes = _shapes(samples)
        # Its nodes add gradients up on the stream of its warm-up, for which autograd waits, and would warn.
        set_warn_on_accumulate_grad_stream_mismatch(False)
        with torch.autocast(hidden.device.type, enabled=False):  # as a backward pass runs; the stack switches it on
            replay: Any = torch.cuda.make_graphed_callables(
                self._stack, tuple(samples), num_warmup_iters=1, allow_unused_input=True
            )
        self._replay: Callable[..., Tensor] = replay

    def takes(self, hidden: Tensor, given: Mapping[str, Any]) -> bool:
        """Return whether the graphs compute the layers with these arguments: shapes, numbers, and the addresses of the
        parameters must be those of the capture."""
        leaves, spec = tree_flatten(dict(given))
        shapes = _shapes([hidden, *(leaf for leaf in leaves if isinstance(leaf, Tensor))])
        told = spec == self._spec and _constants(leaves) == self._constants and shapes == self._shapes
        return told and _addresses(self._parameters) == self._addresses

    def __call__(self, hidden: Tensor, given: Mapping[str, Any]) -> Tensor:
        """Compute the layers' output, (1, N, width). Its backward pass must begin before the next call, which
        overwrites the activations."""
        for parameter in self._parameters:
            if parameter.grad is not None:  # it may lie in the graph's memory, which the next pass overwrites
                parameter.grad = parameter.grad.clone()
        return self._replay(hidden, *_tensors(given))

    def compare(self, hidden: Tensor, given: Mapping[str, Any]) -> str | None:
        """Return a text about output and gradients of graphs and layers, if they differ by more than rounding explains;
        None if they agree."""
        plain = functools.partial(_Stack.forward, self._stack)
        ours, theirs = (self._results(compute, hidden, given) for compute in (self._replay, plain))
        found = difference(ours, theirs, self._dtype)
        return None if found is None else f"graphs and layers differ by {found:.3g} of their largest value"

    def _results(self, compute: Callable[..., Tensor], hidden: Tensor, given: Mapping[str, Any]) -> list[Tensor]:
        """Return the output, and the gradients of input and parameters, where the output's gradient is the output."""
        hidden = hidden.detach().clone().requires_grad_(hidden.requires_grad)
        out = compute(hidden, *_tensors(given))
        wanted = [tensor for tensor in (hidden, *self._parameters) if tensor.requires_grad]
        with torch.autocast(hidden.device.type, enabled=False):
            gradients = torch.autograd.grad(out, wanted, out.detach(), allow_unused=True)
        return [tensor.detach().clone() for tensor in (out, *gradients) if tensor is not None]


class _Stack(nn.Module):
    """All layers as one module, whose arguments are tensors.

    Args:
        layers: the layers, in model order.
        spec: the structure of the arguments, besides the first layer's input.
        constants: the arguments, with the class `Tensor` in place of each tensor.
        autocast: the dtype to which autocast casts the layers' products; None where it is off.
    """

    def __init__(
        self, layers: Sequence[nn.Module], spec: TreeSpec, constants: Sequence[Any], autocast: torch.dtype | None
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._spec, self._constants, self._autocast = spec, constants, autocast

    def forward(self, hidden: Tensor, *tensors: Tensor) -> Tensor:
        left = iter(tensors)
        given = tree_unflatten([next(left) if c is Tensor else c for c in self._constants], self._spec)
        # Casts that autocast keeps would be made outside of the graph.
        on = self._autocast is not None
        with torch.autocast(hidden.device.type, self._autocast, on, cache_enabled=False):
            for layer in self.layers:
                hidden = type(layer).forward(layer, hidden, **given)  # `layer.forward` may be replaced meanwhile
        return hidden


def _tensors(given: Mapping[str, Any]) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(dict(given))[0] if isinstance(leaf, Tensor)]


def _constants(leaves: Sequence[Any]) -> list[Any]:
    """Return arguments with the class `Tensor` in place of each tensor."""
    return [Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _shapes(tensors: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    return [(tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in tensors]


def _addresses(parameters: Sequence[Tensor]) -> list[int]:
    return [parameter.data_ptr() for parameter in parameters]


def _same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, PLAIN) and type(one) is type(other) and one == other)


def _allocated() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def _unchanged(hidden: Tensor, **given: Any) -> Tensor:
    return hidden


def _refused(session: Run, layers: Sequence[nn.Module]) -> str | None:
    """Return why the layers of this run cannot be captured; None if nothing speaks against it yet."""
    for reason, holds in {
        "there is no CUDA device": session.policy.device.type != "cuda",
        "several processes train the model": session.ranks.world > 1,
        "its tokens are routed to experts": session.policy.has_experts,
        "its layers are not transformers' own": len(layers) < 2,
    }.items():
        if holds:
            return reason
    used = attention_name(session)
    return None if used == KERNEL else f"its attention is computed by {used}"


def _changed(layers: Sequence[nn.Module]) -> str | None:
    """Return why CUDA graphs cannot stand in for the layers, as a text: a layer has hooks or a replaced `forward`,
    which graphs would not call. None if no layer has."""
    for layer in layers:
        if "forward" in vars(layer):
            return "the forward of a layer was replaced"
        if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks:
            return "hooks are to be called with a layer"
    return None


def _release_generator(device: torch.device) -> None:
    """Give a GPU's random number generator a copy of its state. After a capture that has failed, torch 2.11 takes the
    old state for that of a capture, and each later draw raises "Offset increment outside graph capture"."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generator = torch.cuda.default_generators[index]
        generator.graphsafe_set_state(generator.clone_state())
