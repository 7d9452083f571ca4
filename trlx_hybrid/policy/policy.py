"""A view of the model being trained: its weights in the form that the engine needs, whatever wraps, shards or adapts
the model."""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..blame import called_back
from . import quantised
from .adapters import AdaptedModule, adapted, adapter_layers, untied_head
from .fingerprint import BITS, fingerprint, sample
from .sharded import full, is_sharded

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

WRAPPER_PREFIXES = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")
DIGEST_ELEMENTS = 1 << 24
Merge = Callable[[AdaptedModule], dict[str, Tensor]]


class Policy:
    """A view of the trainer's model. Everything that touches sharded tensors is collective: call it on all ranks.

    Args:
        model: returns the trainer's model; it is a function because `Trainer.train` may replace it by a wrapped one.
        processing_class: the trainer's tokenizer or processor.
        device: where full tensors are to be materialised.
        fsdp_version: 1, 2, or None without FSDP.
        gather: takes a list of ZeRO-3 parameters and returns a context manager in which they are full; None without
            ZeRO-3.
    """

    def __init__(
        self,
        model: Callable[[], nn.Module],
        processing_class: PreTrainedTokenizerBase | ProcessorMixin,
        device: torch.device,
        fsdp_version: int | None = None,
        gather: Callable[[Sequence[Tensor]], Any] | None = None,
    ) -> None:
        self._model = model
        self._gather = gather
        self.processing_class = processing_class
        self.device = device
        self.fsdp_version = fsdp_version
        self._names_of: dict[str, frozenset[str]] = {}  # checkpoint names per layer, learned while yielding it
        self._tree = ModuleTree()
        self._others = False  # new modules that `other_modules` has not reported

    @property
    def module(self) -> nn.Module:
        """The trainer's model without DDP and compile wrappers, but with its adapters."""
        return unwrapped(self._model())

    @property
    def modules(self) -> list[nn.Module]:
        """The trainer's model and all modules inside it, in the order of `module.modules()`, as found by the last call
        of `look`; they are listed anew if the trainer's model is another object by now. Cached because a step reads
        this list a dozen times."""
        if self._tree.root is not self.module:
            self.look()
        return self._tree.modules

    def look(self) -> None:
        """Update the cached list `modules` if modules were added, removed or replaced in the model, and keep their
        4-bit weights as they are; call it at the beginning of every rollout."""
        if self._tree.changed(self.module):
            self._others = True
            quantised.keep_bits(self._tree.modules)

    def other_modules(self) -> bool:
        """Return whether modules were added, removed or replaced in the model since the last call of this method; also
        updates the cached list `modules`."""
        self.look()
        found, self._others = self._others, False
        return found

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the model's modules, each once."""
        return parameters_in(self.modules)

    @property
    def base(self) -> PreTrainedModel:
        """The transformers model inside any adapter."""
        return transformers_model(self._model())

    @property
    def adapters(self) -> bool:
        """True where the model has PEFT adapters."""
        return hasattr(self.module, "peft_config")

    @property
    def architecture(self) -> str:
        """The class name of the transformers model."""
        return class_name(self.base)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the largest number of parameter values. Weights held in 4 bits do not count."""
        return self._sizes.most_common(1)[0][0]

    @property
    def dtypes(self) -> list[torch.dtype]:
        """The floating-point dtypes of the parameters, the one with most values first. Weights held in 4 bits do not
        count."""
        return [dtype for dtype, _ in self._sizes.most_common()]

    @property
    def _sizes(self) -> Counter[torch.dtype]:
        sizes: Counter[torch.dtype] = Counter()
        for p in self.parameters:
            dtype = p.dtype
            if dtype.is_floating_point and not quantised.in_4_bits(p):
                sizes[dtype] += p.numel()
        return sizes

    @property
    def in_4_bits(self) -> bool:
        """True where bitsandbytes holds some of the base model's weights in 4 bits."""
        return any(map(quantised.in_4_bits, self.base.parameters()))

    @property
    def in_zero3(self) -> bool:
        """True where DeepSpeed's ZeRO-3 holds the parameters. ZeRO-3 records the order in which a forward pass calls
        modules. If a pass has another order, the next one fails, so callers leave out passes that only check."""
        return any(hasattr(p, "ds_id") for p in self.parameters)

    @property
    def has_experts(self) -> bool:
        """True where the model routes tokens to experts."""
        config = self.base.config.get_text_config()
        keys = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
        return any(getattr(config, key, None) for key in keys)

    def refuses_gather(self, merge: bool = True) -> str | None:
        """Return why full weights cannot be read from this model, or None.

        Args:
            merge: whether adapters are to be merged into the weights, as by `full_weights(merge=True)`.
        """
        if self.fsdp_version == 1:
            return "FSDP1 flattens parameters. Set `fsdp_version: 2` in the accelerate config."
        for name, config in getattr(self.module, "peft_config", {}).items():
            if config.is_prompt_learning or config.is_adaption_prompt:
                return (
                    f"adapter {name!r} ({config.peft_type.value}) is no change of weights, so that no engine can be "
                    "given it. Train LoRA, or let transformers generate."
                )
        for name, p in self.module.named_parameters():
            if type(p).__name__ == "Int8Params":
                return (
                    f"{name} is held in 8 bits, by layers that round what goes in too: no engine samples what they "
                    "compute. Load the base in bf16, or in 4 bits (load_in_4bit)."
                )
            if type(p).__name__ != "Params4bit":
                continue
            if merge:
                return (
                    f"{name} is held in 4 bits: an adapter that is merged into it is rounded to 4 bits as well. A "
                    "LoRA adapter is served beside it by weights='lora'. Else load the base in bf16."
                )
            if not quantised.in_4_bits(p) or is_sharded(p):
                return (
                    f"{name} is held in 4 bits, and is sharded, not quantised yet, or packed anew by an evaluation "
                    "on a CPU. Use DDP, or load the base in bf16."
                )
        return None

    def full_weights(self, only: Set[str] | None = None, merge: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yield (checkpoint name, full tensor) for every parameter and persistent buffer. Only one layer's tensors are
        in memory at a time.

        In-memory names are not checkpoint names in transformers 5 (fused experts, multimodal prefixes), so each
        layer goes through the model's own conversion (`transformers.core_model_loading.revert_weight_conversion`).

        Args:
            only: checkpoint names to yield, None for all; layers known to hold none of them are not gathered.
            merge: whether to merge adapters into copies of the base weights; else the base weights are yielded as they
                are.
        """
        base = self.base
        convert = _conversion(base)
        weights = _saved(base, self._merged if merge else None)
        with called_back():  # errors in here are not the reader's
            for layer, group in itertools.groupby(weights, key=lambda weight: _layer_of(weight[0])):
                if only is not None and self._names_of.get(layer, only).isdisjoint(only):
                    continue
                tensors = {name: self._materialise(read()) for name, read in group}
                tensors = convert(tensors) if convert else tensors
                self._names_of[layer] = self._names_of.get(layer, frozenset()) | frozenset(tensors)
                yield from ((name, tensor) for name, tensor in tensors.items() if only is None or name in only)

    def base_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of the base model, without adapters, by in-memory name; a tied parameter comes once."""
        found = ((name, read()) for name, read in _weights(self.base, "", set()))
        return {name: p for name, p in found if isinstance(p, nn.Parameter)}

    def buffers(self) -> dict[str, Tensor]:
        """Return the base model's persistent buffers by checkpoint name. Every rank has them in full."""
        found = {name: t for name, read in _saved(self.base) if not isinstance(t := read(), nn.Parameter)}
        convert = _conversion(self.base) if found else None
        return convert(found) if convert else found

    def base_slots(self) -> dict[str, tuple[dict[str, nn.Parameter | None], str]]:
        """Return, by in-memory name, where each parameter of the base model is stored: the `_parameters` dict of its
        module, and its key in that dict. This stays valid when the parameter is replaced by another
        (`load_state_dict(assign=True)`)."""
        slots: dict[int, tuple[dict[str, nn.Parameter | None], str]] = {}
        for module in self.base.modules():
            for key, parameter in module._parameters.items():
                slots.setdefault(id(parameter), (module._parameters, key))
        return {name: slots[id(p)] for name, p in self.base_parameters().items()}

    def reshard(self) -> None:
        """Bring every parameter back to its sharded state, in which the optimizer updates it: FSDP2 leaves some modules
        unsharded after a forward pass."""
        if not (dist.is_available() and dist.is_initialized()):
            return  # FSDP2 needs a mesh
        from torch.distributed.fsdp import FSDPModule

        for module in self.modules:
            if isinstance(module, FSDPModule):
                _finish_forward(module)
                module.reshard()

    @property
    def converts(self) -> bool:
        """True where transformers converts the model's in-memory tensors to checkpoint tensors of other names or
        shapes."""
        return _conversion(self.base) is not None

    def checkpoint_parts(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Convert one in-memory tensor to checkpoint tensors, as transformers does when it saves the model; most often
        the result is the tensor itself under its own name.

        Args:
            name: in-memory name of the tensor.
        """
        convert = _conversion(self.base)
        return convert({name: tensor}) if convert else {name: tensor}

    def checkpoint_names(self) -> list[str]:
        """Return the checkpoint names that `full_weights` yields. Collective; gathers all weights once to learn the
        names, unless `full_weights` has yielded all of them before."""
        layers = dict.fromkeys(_layer_of(name) for name, _ in _saved(self.base))
        if not layers.keys() <= self._names_of.keys():
            return [name for name, _ in self.full_weights()]
        return [name for layer in layers for name in sorted(self._names_of[layer])]

    def _materialise(self, tensor: Tensor) -> Tensor:
        if quantised.in_4_bits(tensor):
            return quantised.values(tensor)
        if self._gather is not None and hasattr(tensor, "ds_id"):
            with self._gather([tensor]):
                return tensor.detach().clone()
        tensor = tensor.detach()
        if hasattr(tensor, "full_tensor"):
            return full(tensor)
        return tensor

    def _merged(self, wrapped: AdaptedModule) -> dict[str, Tensor]:
        """Return the original parameters of a module under PEFT by name, with its adapters merged into copies. ZeRO-3
        parameters are gathered first: until then they are empty, and nothing can be merged into them."""
        flat = [p for p in wrapped.parameters() if hasattr(p, "ds_id")]
        if self._gather is None or not flat:
            return wrapped.merged()
        with self._gather(flat):
            return {name: tensor.clone() for name, tensor in wrapped.merged().items()}

    def fingerprint(self) -> int:
        """Return a number that changes when this rank's trainable weights change, or when frozen ones are written to or
        move in memory.

        It covers every bit of the trainable weights, or of all weights where none is trainable. For a frozen weight it
        covers the identity of its storage, torch's version counter and about 64 values, since a write to `.data` does
        not move that counter.
        """
        parameters = self.parameters
        trainable = [p for p in parameters if p.requires_grad] or parameters
        frozen = [] if trainable is parameters else [p for p in parameters if not p.requires_grad]
        memory = tuple((p._version, p.untyped_storage()._cdata) for p in frozen if not is_sharded(p))
        return hash((fingerprint(map(_held, trainable), sample(map(_held, frozen))), memory))

    def adapter_states(self) -> tuple[object, ...]:
        """Return the state of each PEFT layer and wrapper in the model: active and merged adapters, whether they are
        disabled, and their scaling factors."""
        if not self.adapters:
            return ()
        return tuple(
            (
                *layer.active_adapters,
                layer.disable_adapters,
                *getattr(layer, "merged_adapters", ()),
                *getattr(layer, "scaling", {}).items(),
            )
            for layer in adapter_layers(self.modules)
        )

    def digest(self, parameters: Iterable[nn.Parameter] | None = None) -> int:
        """Return a checksum of all bits that this rank holds of some parameters, by default of those that require
        gradients, to compare before and after a step. Reads them once, on the device."""
        if parameters is None:
            parameters = (p for p in self.module.parameters() if p.requires_grad)
        total = torch.zeros((), dtype=torch.int64, device=self.device)
        for p in parameters:
            for part in torch.split(local(p).reshape(-1), DIGEST_ELEMENTS):  # the sum casts to int64
                total = 31 * total + part.view(BITS[part.element_size()]).sum().to(self.device)
        return int(total)

    def not_finite(self) -> list[str]:
        """Return the names of parameters whose part on this rank contains a NaN or an infinity. Parameters with
        one-byte elements are not checked."""
        parts = ((name, local(p)) for name, p in self.module.named_parameters())
        return [name for name, part in parts if part.element_size() > 1 and not bool(part.isfinite().all())]

    @torch.no_grad()
    def log_probs(
        self, prompt_ids: Sequence[int], completion_ids: Sequence[int], temperature: float = 1.0, padding: int = 0
    ) -> Tensor:
        """Return the log-probs of a completion's tokens after its prompt, (T,) float32 on the CPU, from one forward
        pass with dropout off.

        Args:
            padding: number of masked padding tokens to put before the prompt.
        """
        module, first = self.module, padding + len(prompt_ids)
        ids = torch.tensor([[0] * padding + [*prompt_ids, *completion_ids]], device=self.device)
        mask = torch.ones_like(ids)
        mask[:, :padding] = 0
        with evaluating(module):
            logits = module(input_ids=ids, attention_mask=mask, use_cache=False).logits
        logits = logits[0, first - 1 : -1].float() / temperature
        targets = ids[0, first:, None]
        scores: Tensor = logits.log_softmax(-1).gather(-1, targets)[:, 0]
        return scores.cpu()


def local(p: nn.Parameter) -> Tensor:
    """Return the part of a parameter that this rank holds, detached. ZeRO-3's padding at the end of the last ranks'
    parts, which holds arbitrary values, is cut off."""
    return _held(p).detach()


def _held(p: nn.Parameter) -> Tensor:
    """Return this rank's part of a parameter, without ZeRO-3's padding at its end. Unlike `local`, it does not detach
    the part, which saves an operation per tensor where no gradients are recorded."""
    part: Tensor | None = getattr(p, "ds_tensor", None)
    if part is not None:
        begin = dist.get_rank(getattr(p, "ds_process_group", None)) * part.numel()
        return part[: max(0, getattr(p, "ds_numel", 0) - begin)]
    held: Tensor = getattr(p, "_local_tensor", p)
    return held


def _saved(model: nn.Module, merge: Merge | None = None) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield (name, function that returns the tensor) for each tensor of a model that transformers writes into a
    checkpoint, including an output head that adapters have untied from the embeddings.

    Args:
        merge: merges the adapters of a module under PEFT; None yields base weights.
    """
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    return ((name, read) for name, read in _weights(model, "", set(), merge, untied_head(model)) if name not in ignored)


def modules_of(root: nn.Module, closed: tuple[type[nn.Module], ...] = ()) -> Iterator[nn.Module]:
    """Yield the modules that `root.modules()` yields, in the same order, in less than half of the time, since it builds
    no names. `root.modules()` takes 5 ms for adapters in 28 layers, and modules are listed at every rollout and loss.

    Args:
        closed: types of modules that are yielded without the modules inside them.
    """
    seen, waiting = set[int](), [root]
    while waiting:
        module = waiting.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield module
            if not isinstance(module, closed):
                waiting += [child for child in reversed(module._modules.values()) if child is not None]


class ModuleTree:
    """A record of a model's module tree, which detects in less than 1 ms that modules were added, removed or replaced;
    listing all modules anew would take 5 ms. Holds weak references only."""

    def __init__(self) -> None:
        self._places: list[tuple[ref[nn.Module], dict[str, ref[nn.Module] | None]]] = []  # each module and its children

    def changed(self, root: nn.Module) -> bool:
        """Return whether modules below `root` were added, removed or replaced since the last call, and record the tree;
        True at the first call."""
        if self.root is root and all(itertools.starmap(_has_children, self._places)):
            return False
        self._places = [
            (ref(m), {key: None if child is None else ref(child) for key, child in m._modules.items()})
            for m in modules_of(root)
        ]
        return True

    @property
    def root(self) -> nn.Module | None:
        """The root module that the last call of `changed` was given; None before the first call, or if the module was
        freed since."""
        return self._places[0][0]() if self._places else None

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that the last call of `changed` has seen, in the order of `root.modules()`."""
        return [module for held, _ in self._places if (module := held()) is not None]


def _has_children(parent: ref[nn.Module], children: dict[str, ref[nn.Module] | None]) -> bool:
    held = parent()
    if held is None or len(held._modules) != len(children):
        return False
    now = held._modules
    for key, child in children.items():
        found = now.get(key)
        if found is not (None if child is None else child()) or (found is None and child is not None):
            return False
    return True


def parameters_in(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters that some modules hold directly, each once. For `modules_of(root)`, these are the
    parameters of `root.parameters()`, in the same order.

    They are read anew at every call, since a parameter may be replaced between two rollouts without any event. To keep
    this cheap, modules that hold no parameters directly are skipped at once. In an adapted model, most modules hold
    none.
    """
    tables = [table for module in modules if (table := module._parameters)]
    return list({id(p): p for table in tables for p in table.values() if p is not None}.values())


def unwrapped(module: nn.Module) -> nn.Module:
    """Return a model without DDP and compile wrappers, but with its adapters."""
    while isinstance(module, nn.parallel.DistributedDataParallel) or hasattr(module, "_orig_mod"):
        module = getattr(module, "module" if isinstance(module, nn.parallel.DistributedDataParallel) else "_orig_mod")
    return module


def transformers_model(module: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside its wrappers and adapters."""
    model: Any = unwrapped(module)
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def _weights(
    module: nn.Module, prefix: str, seen: set[int], merge: Merge | None = None, parted: nn.Module | None = None
) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield (name, function that returns the tensor) for each parameter and persistent buffer of a module, in
    registration order. The tensor comes from a function because reading it may merge adapters.

    Args:
        prefix: text that is put before the names.
        seen: ids of the tensors that were yielded already; a tied tensor comes once.
        merge: merges the adapters of an adapted module; None yields base weights.
        parted: a module whose tensors are yielded even if they were seen, such as an untied output head.
    """
    seen = set() if module is parted else seen
    wrapped = adapted(module)
    if wrapped is not None:
        # merged once for weight and bias; freed with the readers
        merged = functools.cache(functools.partial(merge, wrapped)) if merge else None
        for name, p in wrapped.base.named_parameters():
            if id(p) not in seen:
                seen.add(id(p))
                read = functools.partial(_item, merged, name) if merged else functools.partial(_identity, p)
                yield unwrapped_name(f"{prefix}{name}"), read
        yield from _weights(wrapped.base, prefix, seen, merge)  # only its buffers are left
        return
    persistent = ((k, b) for k, b in module._buffers.items() if k not in module._non_persistent_buffers_set)
    for key, tensor in itertools.chain(module._parameters.items(), persistent):
        if tensor is not None and id(tensor) not in seen:
            seen.add(id(tensor))
            yield unwrapped_name(f"{prefix}{key}"), functools.partial(_identity, tensor)
    for name, child in module.named_children():
        yield from _weights(child, f"{prefix}{name}.", seen, merge, parted)


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _item(merged: Callable[[], dict[str, Tensor]], name: str) -> Tensor:
    return merged()[name]


def _finish_forward(module: Any) -> None:
    """End the forward pass that FSDP2 believes a module to be in, as torch 2.13 does by itself.

    accelerate shards the last norm and the head as one FSDP2 module, and TRL multiplies by the head's weight without
    calling the head. Before torch 2.13, FSDP2 then waits for that call. An evaluation has no backward pass, and so
    leaves the module unsharded. If a checkpoint then shards the module's parameters, the next forward pass does not
    gather them.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    state = module._get_fsdp_state()
    if not state._modules_to_run_forward:
        return
    state._modules_to_run_forward.clear()
    for owner in (state, *_groups(state)):
        owner._training_state = TrainingState.IDLE


def _groups(state: Any) -> list[Any]:
    """Return the parameter groups of a module that FSDP2 has sharded: the parameters of one group are gathered
    together.

    Args:
        state: FSDP2's state of the module.
    """
    return [*filter(None, getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group])]


def unit_settings(unit: Any) -> tuple[bool, bool]:
    """Return two settings of a module that FSDP2 has sharded: whether it is resharded after its forward pass, and
    whether its shards are kept in host memory. Both are read from FSDP2's internals, since it takes them as arguments
    and does not expose them."""
    groups = _groups(unit._get_fsdp_state())
    offloads = any(p.offload_to_cpu for group in groups for p in group.fsdp_params)
    return any(group.post_forward_mesh_info is not None for group in groups), offloads


def class_name(module: nn.Module) -> str:
    """Return the name of a module's class, without the class that FSDP2 puts in front of it."""
    return next(c.__name__ for c in type(module).__mro__ if not c.__name__.startswith("FSDP"))


def layer_kinds(config: PretrainedConfig) -> set[str]:
    """Return the different kinds of a text model's layers, as in transformers' `layer_types`, e.g. "full_attention". A
    config without that list has "sliding_attention" in all layers or "full_attention" in all."""
    windows = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return set(getattr(config, "layer_types", None) or ["sliding_attention" if windows else "full_attention"])


def unwrapped_name(name: str) -> str:
    """Return a parameter's or module's name without what checkpointing, compile and FSDP wrappers add to it."""
    for prefix in WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name


def _layer_of(name: str) -> str:
    """Return a parameter's name up to its first layer number: the tensors with the same result are gathered and
    converted together."""
    match = re.match(r".*?\.\d+\.", name)
    return match.group() if match else name.rpartition(".")[0]


def _conversion(model: PreTrainedModel) -> Callable[[dict[str, Tensor]], dict[str, Tensor]] | None:
    """Return a function that converts a model's in-memory tensors to checkpoint tensors, both by name; None where they
    are the same."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import revert_weight_conversion

    own = getattr(model, "_weight_conversions", None)
    kept = None if own is None else [conversion for conversion in own if not quantised.reads(conversion)]
    if not (kept if kept is not None else get_model_conversion_mapping(model, add_legacy=False)):
        return None
    if kept == own:
        return lambda tensors: revert_weight_conversion(model, tensors)

    def convert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        model._weight_conversions = kept
        try:
            return cast("dict[str, Tensor]", revert_weight_conversion(model, tensors))
        finally:
            model._weight_conversions = own

    return convert


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Switch a model to evaluation mode inside the context (no dropout and the like), and restore each module's mode on
    exit."""
    modes = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for m, training in modes:
            m.training = training
