"""Norms and MLPs of a layer, computed on tiles of the sequence, so that only one tile's activations exist at a time.

They compute each token by itself, so the sequence can be cut anywhere. In the forward pass a module keeps its input and
nothing else; in the backward pass it is computed once more, tile by tile, each followed by the tile's own backward pass
(Arctic Long Sequence Training, arXiv 2506.13996, whose MLP is tiled likewise). In a layer that is recomputed as a whole
(gradient checkpointing), this costs no further arithmetic for an MLP at the layer's end: torch stops the layer's
recomputation where all that the backward pass needs is there, which is the MLP's input.

Bytes, for a Qwen3-8B layer (hidden size 4,096, MLP 12,288) in bf16: the MLP keeps 98 kB for each token. A tile of 8,192
tokens keeps 0.8 GB. Both norms keep 82 kB for each token, in float32 and bf16, and 8 kB if they are tiled.

Gradients of parameters are summed over the tiles in float32 at least, and reach the parameter once. So hooks of DDP and
FSDP2 run as they do without tiles.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import get_device_states, set_device_states
from trlx_hybrid.policy.sharded import is_sharded
from trlx_hybrid.weights.verify import noise

from .autocasting import META, autocast_now, autocast_on_meta
from .comparison import difference

logger = logging.getLogger(__name__)

TILE = 8192
"""The number of tokens of a tile: enough for matrix products to reach their full speed."""

COMPARED = 64
"""The number of tokens on which a module is compared with its own tiles."""

MLP_NAMES = ("mlp", "feed_forward", "ffn")
"""Names that transformers' layers give to their MLP."""

_alike: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""The modules that were compared with their own tiles: True where they compute tiles as they compute the sequence."""


def tileable(layer: nn.Module) -> list[nn.Module]:
    """Return the modules of a transformers layer that can be computed on tiles of the sequence: its MLP, and its norms,
    those of queries and keys included. A mixture of experts is left as it is: its router sees the whole sequence. So
    are modules with hooks, which would run for each tile."""
    found: list[nn.Module] = []
    waiting = list(layer.named_children())
    while waiting:
        name, module = waiting.pop(0)
        if "Norm" in type(module).__name__ or (name in MLP_NAMES and not _has_experts(module)):
            found.append(module)
        elif name not in MLP_NAMES:
            waiting += module.named_children()
    return [module for module in found if not _hooked(module)]


def _hooked(module: nn.Module) -> bool:
    """Return whether a hook waits for a gradient of a module's parameters, or for a call of a module inside it."""
    inside = (child for child in module.modules() if child is not module)
    calls = any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks for m in inside)
    return calls or any(p._backward_hooks for p in module.parameters())


def _has_experts(module: nn.Module) -> bool:
    batched = any(p.dim() > 2 for p in module.parameters())
    return batched or any(isinstance(child, nn.ModuleList) for child in module.modules())


@contextmanager
def tiled(modules: Sequence[nn.Module], tile: int | None = None) -> Iterator[None]:
    """Return a context in which modules compute inputs of more than `tile` tokens on tiles.

    Args:
        modules: modules that take one tensor (B, N, ...) and return a tensor (B, N, ...).
        tile: the number of tokens of a tile; None for `TILE`.
    """
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(_replaced(module, tile or TILE))
        yield


@contextmanager
def _replaced(module: nn.Module, tile: int) -> Iterator[None]:
    own, stock = vars(module).get("forward"), module.forward

    def forward(x: Any, *args: Any, **kwargs: Any) -> Any:
        long = isinstance(x, Tensor) and x.dim() > 2 and x.shape[1] > tile
        if not long or args or kwargs or _partly_elsewhere(module) or not _computes_alike(module, stock, x):
            return stock(x, *args, **kwargs)
        return _on_tiles(module, stock, x, tile)

    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


def _partly_elsewhere(module: nn.Module) -> bool:
    """Return whether parameters of a module are sharded, and gathered by modules inside it: gradients of what they
    gather would be lost. A layer that is gathered as a whole has its parameters here."""
    return any(is_sharded(p) or hasattr(p, "ds_id") for p in module.parameters())


def _on_tiles(module: nn.Module, stock: Callable[[Tensor], Tensor], x: Tensor, tile: int) -> Tensor:
    if not torch.is_grad_enabled():
        return _joined(stock, x, tile)
    keep: Callable[..., Tensor] = _Kept.apply
    compute: Callable[..., Tensor] = _Tiled.apply
    kept = keep(x)
    if kept.grad_fn is None:
        return stock(x)
    trained = [p for p in module.parameters() if p.requires_grad]
    return compute(kept, _Pass(module, stock, tile, kept.grad_fn), *trained)


def _joined(stock: Callable[[Tensor], Tensor], x: Tensor, tile: int) -> Tensor:
    """Return a module's output for an input (B, N, ...), computed on tiles."""
    out = None
    for start in range(0, x.shape[1], tile):
        part = stock(x[:, start : start + tile])
        if out is None:
            out = part.new_empty(*x.shape[:2], *part.shape[2:])
        out[:, start : start + tile] = part
    assert out is not None
    return out


def _computes_alike(module: nn.Module, stock: Callable[[Tensor], Any], x: Tensor) -> bool:
    """Return whether a module computes each token by itself: on the first tokens of its first long input, both halves
    apart give what they give together. Logs a warning if not."""
    if x.is_meta:  # where memory is forecast, and there is nothing to compare
        return True
    if module not in _alike:
        with _keeping_all(module):
            why = noise(module) or _apart(stock, x.detach()[:, :COMPARED])
        _alike[module] = why is None
        if why is not None:
            logger.warning("%s is not computed in tiles: %s.", type(module).__name__, why)
    return _alike[module]


@torch.no_grad()
def _apart(stock: Callable[[Tensor], Any], part: Tensor) -> str | None:
    """Return how a module's output for some tokens differs from that for both halves of them, or None."""
    half = part.shape[1] // 2
    with _autocast(part.device.type, *autocast_now(part.device.type)):
        whole, halves = stock(part), (stock(part[:, :half]), stock(part[:, half:]))
    if not isinstance(whole, Tensor) or whole.shape[:2] != part.shape[:2]:
        return "its output has another shape than its input"
    found = difference([torch.cat(halves, dim=1)], [whole], whole.dtype)
    return None if found is None else f"its output is {found:.2g} of the largest value apart"


@contextmanager
def _keeping_all(module: nn.Module) -> Iterator[None]:
    """Return a context without dropout. Other modules stay in training mode, in which `noise` finds what they draw, and
    bitsandbytes keeps weights on a CPU as they are."""
    drops = [m for m in module.modules() if isinstance(m, nn.Dropout) and m.training]
    for drop in drops:
        drop.training = False
    try:
        yield
    finally:
        for drop in drops:
            drop.training = True


def _autocast(device: str, enabled: bool, dtype: torch.dtype) -> AbstractContextManager[object]:
    """Return autocast as given, but without its cache: what it casts without gradients must not serve passes that have
    them, nor one tile's graph the next."""
    if device == META:
        return autocast_on_meta(dtype if enabled else None)
    return torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False)


class _Pass:
    """A pass of a module over one sequence, as its backward pass repeats it.

    Args:
        module: the module; `stock` is its own forward.
        tile: the number of tokens of a tile.
        node: the graph's node that keeps the input.
    """

    def __init__(self, module: nn.Module, stock: Callable[[Tensor], Tensor], tile: int, node: Any) -> None:
        self.stock, self.tile, self.node = stock, tile, node
        self._draws = noise(module) is not None

    def forward(self, x: Tensor) -> Tensor:
        """Compute the output, and remember the state of autocast and of the random number generators."""
        self._device = x.device.type
        self._autocast = autocast_now(self._device)
        if self._draws:
            self._cpu, self._devices = torch.get_rng_state(), get_device_states(x)
        with _autocast(self._device, *self._autocast):
            return _joined(self.stock, x, self.tile)

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Return a context in which the module computes what it computed in `forward`, with gradients."""
        devices = self._devices[0] if self._draws else []
        forked = torch.random.fork_rng(devices) if self._draws else nullcontext()
        with forked, _autocast(self._device, *self._autocast), torch.enable_grad():
            if self._draws:
                torch.set_rng_state(self._cpu)
                set_device_states(*self._devices)
            yield


class _Kept(torch.autograd.Function):
    """The identity, which keeps its input for `_Tiled`. It is a node of its own, so that the input is saved before the
    module is computed, and a recomputation ends there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _Tiled(torch.autograd.Function):
    """The autograd function of a module that is computed on tiles."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: _Pass, *trained: Tensor) -> Tensor:
        ctx.run, ctx.trained = run, trained
        return run.forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        run, trained = ctx.run, ctx.trained
        (x,) = run.node.saved_tensors
        of_input = torch.empty_like(x)
        sums: list[Tensor | None] = [None] * len(trained)
        with run.repeated():
            for start in range(0, x.shape[1], run.tile):
                some = slice(start, start + run.tile)
                part = x[:, some].detach().requires_grad_()
                out = run.stock(part)
                first, *others = torch.autograd.grad(out, [part, *trained], grad[:, some], allow_unused=True)
                of_input[:, some] = first
                for number, found in enumerate(others):
                    if found is not None:
                        before = sums[number]
                        wide = found.to(torch.promote_types(found.dtype, torch.float32))
                        sums[number] = wide if before is None else before.add_(wide)
        of_trained = [g if g is None else g.to(p.dtype) for g, p in zip(sums, trained, strict=True)]
        return of_input, None, *of_trained
