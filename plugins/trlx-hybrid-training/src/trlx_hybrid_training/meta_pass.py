"""Forward and backward passes of a model's layers on the meta device, where tensors have shapes and no memory. They
count the bytes that the same passes take on a GPU.

The passes run the code that a run's own passes run: the model's, this plugin's attention, LoRA layers and tiles. Three
parts stand in for others. The fused LM head of TRL chooses tokens by their labels, whose number the meta device cannot
tell, so `_Head` allocates what it allocates. A kernel's workspace is not seen, so that of flash attention's backward
pass is added. And all rows are computed by torch's kernel for ragged rows, also those for which a run takes cuDNN.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from . import attention
from .autocasting import META, autocast_on_meta
from .recomputation import computed_in_tiles, counting_kept, layers_of
from .tiles import tileable, tiled

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BACKWARD = "torch_attn::_varlen_attn_backward"
"""The operator of the backward pass of torch's kernel for rows of different lengths."""


class MetaPass:
    """A pass of some of a model's last layers on the meta device.

    Args:
        base: the transformers model on the meta device, with its adapters. It is put into training mode, and computes
            with this plugin's attention afterwards.
        segments, prefixes: the rows of the pass; see `attention.attention`.
        scored: the number of tokens whose log-probs the pass computes.
        tile: the number of tokens and of vocabulary entries for which the fused head computes logits at once.
        autocast: the dtype to which autocast casts products; None without autocast.
        dtype: the dtype of the layers' inputs.

    Raises:
        NotImplementedError: the layers are not in one list.
    """

    def __init__(
        self,
        base: PreTrainedModel,
        segments: Sequence[int],
        prefixes: Sequence[tuple[int, int]],
        scored: int,
        tile: tuple[int, int],
        autocast: torch.dtype | None,
        dtype: torch.dtype,
    ) -> None:
        self._base, self._layers = base, layers_of(base)
        self._segments, self._prefixes = tuple(segments), tuple(prefixes)
        self._scored, self._tile, self._autocast, self._dtype = scored, tile, autocast, dtype
        found = [
            (parent, name)
            for parent in base.modules()
            for name, child in parent.named_children()
            if isinstance(child, nn.ModuleList) and list(child) == self._layers
        ]
        if not found:
            raise NotImplementedError("its layers are not in one list")
        self._place = found[0]
        attention.register()
        base.config._attn_implementation = attention.NAME
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        base.train()
        for p in base.parameters():
            p.grad = torch.zeros_like(p) if p.requires_grad else None  # gradients are counted elsewhere

    def kept(self, in_tiles: bool) -> int:
        """Return the bytes that one layer keeps for its backward pass.

        Args:
            in_tiles: whether it computes norms and MLP in tiles.
        """
        with self._only(1, recomputed=False, in_tiles=in_tiles) as layers, counting_kept(layers[-1]) as storages:
            self._hidden()
        return sum(storages.values())

    def peak(self, layers: int, recomputed: bool, in_tiles: bool) -> int:
        """Return the most bytes of the device that a forward and backward pass takes at one time.

        Args:
            layers: the number of layers in the pass.
            recomputed: whether they are recomputed in the backward pass.
            in_tiles: whether they compute norms and MLP in tiles.
        """
        with self._only(layers, recomputed, in_tiles), LiveBytes(self._held()) as live:
            compute: Callable[..., Tensor] = _Head.apply
            out = compute(self._hidden(), self._scored, self._tile)
            _run_backward(out, torch.empty_like(out))
            del out
        peak: int = live.peak
        return peak

    def _held(self) -> Iterator[Tensor]:
        """Yield the tensors that are there before a pass: parameters, their gradients, and buffers."""
        for p in self._base.parameters():
            yield p
            if p.grad is not None:
                yield p.grad
        yield from self._base.buffers()

    def _hidden(self) -> Tensor:
        """Return the last hidden states of the pass, (1, N, hidden size)."""
        segments, prefixes = self._segments, self._prefixes
        width, tokens = int(self._base.config.get_text_config().hidden_size), sum(segments)
        lengths = [own + tokens for own, (_, tokens) in zip(segments, prefixes, strict=True)]
        embedded = torch.empty(1, tokens, width, dtype=self._dtype, device=META, requires_grad=True)
        with attention.packing():
            found = self._base.base_model(
                inputs_embeds=embedded,
                attention_mask=torch.empty(1, tokens, dtype=torch.bool, device=META),  # else positions would be read
                use_cache=False,
                segments=segments,
                prefixes=prefixes,
                cu_seq_lens_q=_ends(segments),
                cu_seq_lens_k=_ends(lengths),
                max_length_q=max(segments),
                max_length_k=max(lengths),
            )
        hidden: Tensor = found.last_hidden_state
        return hidden

    @contextmanager
    def _only(self, number: int, recomputed: bool, in_tiles: bool) -> Iterator[list[nn.Module]]:
        """Return a context in which the model has only its last layers.

        Args:
            number: how many layers it has.
            recomputed, in_tiles: see `peak`.

        Yields:
            These layers.
        """
        parent, name = self._place
        layers: list[Any] = self._layers[-number:]
        stock = [layer._gradient_checkpointing_func for layer in layers]
        setattr(parent, name, nn.ModuleList(layers))
        with ExitStack() as in_pass:
            in_pass.enter_context(autocast_on_meta(self._autocast))  # also of what the backward pass recomputes
            for layer, checkpoint in zip(layers, stock, strict=True):
                layer.gradient_checkpointing = recomputed
                modules = tileable(layer) if in_tiles else []
                if recomputed and modules:
                    layer._gradient_checkpointing_func = functools.partial(_checkpointed, checkpoint, modules)
                else:
                    in_pass.enter_context(tiled(modules))
            try:
                yield layers
            finally:
                for layer, checkpoint in zip(layers, stock, strict=True):
                    layer._gradient_checkpointing_func = checkpoint
                setattr(parent, name, nn.ModuleList(self._layers))


def _checkpointed(
    checkpoint: Callable[..., Any], modules: Sequence[nn.Module], function: Callable[..., Any], *args: Any, **kw: Any
) -> Any:
    return checkpoint(functools.partial(computed_in_tiles, modules, function), *args, **kw)


def _run_backward(out: Tensor, grad: Tensor) -> None:
    """Run the backward pass of a tensor. `torch.autograd.backward` would switch the mode off that stands for
    autocast."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.run_backward((out,), (grad,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def _ends(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(META)


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that counts the bytes of the tensors which operators make on the meta device, while these tensors live.

    Args:
        held: tensors that are there before, of which operators return views.

    Attributes:
        now: bytes of the tensors that live now.
        peak: the most bytes that lived at one time, with the workspace of the attention's backward pass.
    """

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._held = {tensor.untyped_storage()._cdata for tensor in held}
        self._living: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor) and tensor.is_meta:
                self._add(tensor.untyped_storage())
        workspace = _workspace(*args[1:3]) if func.name().startswith(BACKWARD) else 0
        self.peak = max(self.peak, self.now + workspace)
        return found

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._living and storage._cdata not in self._held:
            self._living[storage._cdata] = storage.nbytes()
            self.now += storage.nbytes()
            weakref.finalize(storage, self._end, storage._cdata)

    def _end(self, address: int) -> None:
        self.now -= self._living.pop(address)


def _workspace(query: Tensor, key: Tensor) -> int:
    """Return the bytes that flash attention 2 allocates inside its backward pass: the queries' gradients in float32,
    and, where several heads share a key head, the gradients of keys and values of all heads (`mha_varlen_bwd` in
    flash_api.cpp).

    Args:
        query: (N, heads, head size).
        key: (M, key heads, head size).
    """
    tokens, heads, size = query.shape
    expanded = 2 * key.shape[0] * heads * size * key.itemsize if key.shape[1] < heads else 0
    return 4 * tokens * heads * size + expanded


class _Head(torch.autograd.Function):
    """An autograd function that allocates what TRL's fused LM head allocates (`trl.kernels.chunked_logprob`): the
    hidden states of the scored tokens, a tile of logits, and in the backward pass their gradients in float32."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, scored: int, tile: tuple[int, int]) -> Tensor:
        ctx.shape, ctx.dtype, ctx.tile = hidden.shape, hidden.dtype, (min(tile[0], scored), tile[1])
        of_scored = hidden.flatten(0, 1)[:scored].clone()
        ctx.save_for_backward(of_scored)
        hidden.new_empty(ctx.tile)
        return hidden.new_empty(scored, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (of_scored,) = ctx.saved_tensors
        in_float32 = torch.empty_like(of_scored, dtype=torch.float32)
        logits = of_scored.new_empty(ctx.tile)
        narrow = in_float32.to(ctx.dtype)
        del in_float32, logits
        of_hidden = narrow.new_zeros(ctx.shape)
        of_hidden.flatten(0, 1)[: len(narrow)] = narrow
        return of_hidden, None, None
