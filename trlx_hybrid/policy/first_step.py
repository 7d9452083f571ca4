"""Checks that a run trains its policy: what the optimizer holds, and what its first steps do to the weights."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError, SyncError, listed
from .adapters import adapter_layers, held_by
from .policy import local
from .sharded import is_sharded

if TYPE_CHECKING:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from torch.optim import Optimizer

    from ..interprocess.ranks import Ranks
    from .policy import Policy

logger = logging.getLogger(__name__)

NO_GRADIENT = 1e-6
"""The absolute value above which a gradient must change its weight. Adam divides by the gradient's size plus 1e-8, so a
gradient far above that makes a full step, and one below it makes hardly any."""

PLAIN = ("torch.optim.", "transformers.optimization")
"""Prefixes of the modules whose optimizers write to the parameters that they are given. Other optimizers may hold
copies of them, or slices of flat buffers."""

HALF = (
    "In float16 the squares of small gradients are 0, and Adam divides by their root. Load the model in float32 "
    "(dtype='float32', with fp16=True or bf16=True for its products) or in bfloat16. SGD, Adafactor and Adam with "
    "adam_epsilon=1e-4 do train float16 weights."
)


def trained_parameters(policy: Policy) -> dict[str, nn.Parameter]:
    """Return the parameters that require gradients and take part in what the policy computes, by their names.

    Parameters of adapters that are inactive, disabled or merged into the base are left out.
    """
    idle = {id(p) for layer in adapter_layers(policy.modules) for p in _idle(layer)}
    named = policy.module.named_parameters()
    return {name: p for name, p in named if p.requires_grad and id(p) not in idle}


def _idle(layer: BaseTunerLayer) -> Iterator[nn.Parameter]:
    """Yield the adapter parameters of a PEFT layer or wrapper that have no effect on its output now."""
    off = bool(layer.disable_adapters) or _is_merged(layer)
    active = () if off else layer.active_adapters
    return (p for adapter, p in held_by(layer) if adapter not in active)


def _is_merged(layer: BaseTunerLayer) -> bool:
    return bool(getattr(layer, "merged", False))


def refuse_idle(policy: Policy, optimizer: Optimizer) -> None:
    """Refuse a run whose optimizer would change no weight of the policy.

    Only optimizers of torch and transformers are checked. Others may hold copies of the weights, and DeepSpeed's
    optimizer holds no weights between its steps. For such optimizers, the first step shows whether weights are written.

    Args:
        optimizer: the run's optimizer, with or without accelerate's wrapper around it.

    Raises:
        ConfigError: no parameter of the policy that requires gradients is in the optimizer (TRL issue #6700).
    """
    trained = trained_parameters(policy)
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not trained:
        raise ConfigError(
            f"No parameter of the policy requires gradients, so the run would train nothing. {_why(policy)}"
        )
    inner = getattr(optimizer, "optimizer", optimizer)
    plain = type(inner).__module__.startswith(PLAIN) and policy.fsdp_version != 1
    if plain and stepped.isdisjoint(map(id, trained.values())):
        raise ConfigError(
            f"The optimizer ({type(inner).__name__}) holds none of the policy's {len(trained)} trainable parameters, "
            "so the run would train nothing. Leave it to the trainer to make one, or make it after the model is frozen "
            "or adapted, for the parameters of the very model that the trainer gets."
        )


def _why(policy: Policy) -> str:
    """Return sentences for an error message: why no parameter of a policy requires gradients, and what to do about
    it."""
    if not policy.adapters:
        return (
            "All of its weights are frozen, as `merge_and_unload()` leaves them. Either train them all "
            "(`model.requires_grad_(True)`), or give the trainer a `peft_config`, which adds an adapter to train."
        )
    layers = adapter_layers(policy.modules)
    if any(bool(layer.disable_adapters) for layer in layers):
        return (
            "The layers of its adapter are disabled. Either enable them (`model.base_model.enable_adapter_layers()`), "
            "or call `merge_and_unload()` and give the trainer a `peft_config`, which adds an adapter to train."
        )
    if any(map(_is_merged, layers)):
        return (
            "Its adapter is merged into the base. Either take it out (`model.unmerge_adapter()`), or call "
            "`merge_and_unload()` and give the trainer a `peft_config`, which adds an adapter to train."
        )
    return (
        "Its active adapter is frozen, as `PeftModel.from_pretrained` leaves it. Either load it with "
        "`is_trainable=True`, or call `merge_and_unload()` and give the trainer a `peft_config`, which adds an adapter "
        "to train."
    )


class FirstStep:
    """Checks that the optimizer changes the weights that are synced, at the first step that must change them.

    An optimizer may hold other memory than the model's parameters, or its updates may be rounded away. A step must
    change some weights if its learning rate and some gradient are not zero, and no gradient overflowed. Steps before
    this one (a warm-up from 0, groups with equal rewards, a masked batch) show nothing. Trainable parameters that got
    no gradient in that step are named in a warning or an error.
    """

    def __init__(self, policy: Policy, ranks: Ranks) -> None:
        self._policy, self._ranks = policy, ranks
        self._before: int | None = None
        self._trained: dict[str, nn.Parameter] = {}
        self._blocks, self._sizes = ReentrantBlocks([]), StepSizes()
        self._done = False

    def begins(self, optimizer: Optimizer) -> None:
        """Record a checksum of the trained weights before an optimizer step, so that `ended` can tell whether the step
        changed them. Call it when the step's learning rate is set; at a rate of 0 nothing is recorded."""
        self._before = None
        rate = max((float(group.get("lr") or 0) for group in optimizer.param_groups), default=0.0)  # Adafactor has None
        if rate <= 0 or (self._done and self._sizes.over):
            return
        self._policy.reshard()  # the same sharding as after the step
        self._trained = trained_parameters(self._policy)
        self._sizes.begins(self._trained, rate)
        if not self._done:
            self._before = self._policy.digest(self._trained.values())
            self._blocks.close()
            self._blocks = ReentrantBlocks(self._policy.modules)

    def ended(self, step: int, optimizer: Optimizer) -> None:
        """Check what the step that the optimizer has just taken did to the weights, before the gradients are freed.
        Collective.

        Args:
            step: number of optimizer steps before this one.

        Raises:
            SyncError: no bit of any trainable weight has changed on any rank; or unsharded weights differ between
                ranks; or some weights can never get a gradient, because of gradient checkpointing; or the step moved
                weights further than its learning rate can.
        """
        before, self._before = self._before, None
        self._blocks.close()
        if getattr(optimizer, "step_was_skipped", False):
            return
        self._check_sizes(step, optimizer)
        if before is None:
            return
        digest = self._policy.digest(self._trained.values())
        moved = self._done = self._ranks.any(digest != before)
        whole = not any(map(is_sharded, self._policy.module.parameters()))
        if moved and whole and len(set(self._ranks.gather(digest))) > 1:
            raise SyncError(
                f"After step {step + 1} of the optimizer the ranks hold different weights: each trains on its own. Is "
                "the model inside of DDP? What is wrapped or replaced by hand has to be before the trainer is made."
            )
        if not self._ranks.any(any(map(_has_gradient, self._trained.values()))):
            return
        if not moved:
            raise SyncError(
                f"Step {step + 1} of the optimizer changed no bit of any trainable weight, although its gradients and "
                f"its learning rate are not 0: what follows would train nothing. Weights in {self._policy.dtype} round "
                "updates away that are small beside them: load the model in float32, or raise learning_rate. Or the "
                "optimizer was made for other tensors than the model's parameters."
            )
        self._check_gradients(step)

    def _check_sizes(self, step: int, optimizer: Optimizer) -> None:
        """Check that an optimizer step has moved no weight further than its learning rate can. Does nothing after the
        first steps. Collective until then.

        Args:
            step: number of optimizer steps before this one.

        Raises:
            SyncError: on some rank, weights moved further; the message names one.
        """
        if self._sizes.over:
            return
        found = self._sizes.ended(self._trained)
        if not self._ranks.any(found is not None):
            return
        found = next(filter(None, self._ranks.gather(found)))
        name = type(getattr(optimizer, "optimizer", optimizer)).__name__
        half = any(p.dtype is torch.float16 for p in self._trained.values())
        raise SyncError(
            f"Step {step + 1} of the optimizer ({name}) moved weights further than its learning rate can: {found}. "
            f"{HALF if half else 'It computes something else than a step of that size.'}"
        )

    def _check_gradients(self, step: int) -> None:
        """Raise for trainable parameters that can never get a gradient, and warn of others that got none. Collective.

        Args:
            step: number of optimizer steps before this one, for messages.

        Raises:
            SyncError: on some rank, some parameters can never get a gradient, because of gradient checkpointing.
        """
        without = {name: p for name, p in self._trained.items() if p.grad is None}
        if len(without) == len(self._trained):
            without = {}  # DeepSpeed keeps gradients elsewhere
        cut = self._blocks.cut(without)
        if self._ranks.any(bool(cut)):
            names = next(filter(None, self._ranks.gather(cut)))
            raise SyncError(
                f"In step {step + 1}, {len(names)} of {len(self._trained)} trainable parameters got no gradient and "
                f"never will: {listed(names)}. Their layers are checkpointed with use_reentrant=True, which needs an "
                "input that requires gradients, and what goes into them is frozen. Set gradient_checkpointing_kwargs="
                "{'use_reentrant': False}, or call `model.enable_input_require_grads()` before the training."
            )
        if without and self._ranks.rank == 0:
            logger.warning(
                "In step %d, %d of %d trainable parameters got no gradient: %s. Layers that this batch does not use "
                "have none, as a vision tower without images. If these are used, something between them and the loss "
                "keeps the gradients from them.",
                step + 1,
                len(without),
                len(self._trained),
                listed(list(without)),
            )


def _has_gradient(p: nn.Parameter) -> bool:
    grad = getattr(p.grad, "_local_tensor", p.grad)
    return grad is not None and bool((grad.abs() > NO_GRADIENT).any())


class ReentrantBlocks:
    """Records by forward hooks whether layers under gradient checkpointing with use_reentrant=True get inputs that
    require gradients.

    The weights of such a layer get gradients only if some input tensor of the layer requires them.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._fed: dict[nn.Module, bool] = {}  # for each block that ran: whether an input required gradients
        blocks = [module for module in modules if _reentrant(module)]
        self._hooks = [block.register_forward_pre_hook(self._note, with_kwargs=True) for block in blocks]

    def _note(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = (*args, *kwargs.values())
        needs = any(isinstance(value, Tensor) and value.requires_grad for value in given)
        self._fed[block] = self._fed.get(block, False) or needs

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def cut(self, without: dict[str, nn.Parameter]) -> list[str]:
        """Return the names of the parameters in `without` that can never get a gradient, because no input of their
        layer requires one.

        Args:
            without: parameters that got no gradient, by name.
        """
        cut = {id(p) for block, fed in self._fed.items() if not fed for p in block.parameters()}
        return [name for name, p in without.items() if id(p) in cut]


def _reentrant(module: nn.Module) -> bool:
    function = getattr(module, "_gradient_checkpointing_func", None)
    kwargs = getattr(function, "keywords", None) or {}
    return bool(getattr(module, "gradient_checkpointing", False) and kwargs.get("use_reentrant"))


STEPS = 4
"""Number of optimizer steps that are checked; more than one, since fused AdamW computes its first step in float32
whatever dtype it stores."""

ELEMENTS = 4096
"""Number of elements of each tensor that are checked, spread evenly over it."""

FACTOR = 100.0
"""The largest accepted move of a weight, in units of the learning rate (times the largest gradient, if that is above
1). Adam's first steps move a weight by its learning rate, RMSprop's by 10 times that, SGD's by the gradient times the
learning rate."""

SHARE = 1e-3
"""The share of the checked elements of a step that may move further than FACTOR allows. Optimizers that bound the mean
square of a step by the learning rate (Adafactor, Muon) move at most a ten-thousandth of the elements by more than 100
times as much."""


class StepSizes:
    """A check that none of the first STEPS (4) optimizer steps moves weights further than its learning rate explains. A
    step that does so was computed wrongly. The check compares a sample of the weights before and after each of these
    steps."""

    def __init__(self) -> None:
        self._left = STEPS
        self._before: dict[str, Tensor] = {}
        self._rate, self._gradient = 0.0, 1.0

    @property
    def over(self) -> bool:
        """True once all steps that are to be checked were checked."""
        return self._left == 0

    def begins(self, trained: Mapping[str, nn.Parameter], rate: float) -> None:
        """Record a sample of the weights before a step, unless all steps that are to be checked were checked.

        Args:
            trained: the parameters that the optimizer updates, by name.
            rate: the largest learning rate of the step.
        """
        self._before, self._rate = {}, rate
        if not self.over:
            self._before = {name: _sampled(local(p)).clone() for name, p in trained.items() if p.is_floating_point()}

    @torch.no_grad()
    def ended(self, trained: Mapping[str, nn.Parameter]) -> str | None:
        """Return how far the step that has ended moved the weights, if its learning rate cannot explain this. The text
        is the end of an error message. Return None if the learning rate explains it, if a gradient is not finite, or if
        nothing was recorded before the step.

        Args:
            trained: the parameters that the optimizer updates, by name.
        """
        before, self._before = self._before, {}
        if not before:
            return None
        self._left -= 1
        grads = [_sampled(g.detach()).abs().max().float() for g in map(_gradient, trained.values()) if g is not None]
        self._gradient = max([self._gradient, *(float(g) for g in grads)])
        if any(not bool(g.isfinite()) for g in grads):
            return None  # then the weights are not finite either, which another check reports
        limit, beyond, furthest = FACTOR * self._rate * self._gradient, 0, (0.0, "")
        for name, old in before.items():
            info = torch.finfo(old.dtype)
            moved = (_sampled(local(trained[name])).float() - old.float()).abs()
            far = ~(moved <= limit + 2 * info.eps * (old.float().abs() + info.tiny))  # a NaN must not pass
            if bool(far.any()):
                beyond += int(far.sum())
                furthest = max(furthest, (float(moved.nan_to_num(torch.inf).max()), name))
        share = beyond / sum(map(Tensor.numel, before.values()))
        if share <= SHARE:
            return None
        largest, name = furthest
        return (
            f"{share:.1%} of those that were looked at by more than {FACTOR:g} times its {self._rate:g}, up to "
            f"{largest:.3g} in {name}"
        )


def _sampled(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1)
    return flat[:: max(1, flat.numel() // ELEMENTS)]


def _gradient(p: nn.Parameter) -> Tensor | None:
    gradient: Tensor | None = getattr(p.grad, "_local_tensor", p.grad)
    return gradient if gradient is not None and gradient.numel() else None
