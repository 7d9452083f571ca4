"""The reference model of the KL term (`beta > 0`) for policies that are PEFT adapters: corrections of TRL's errors with
this model, without changing the policy.

TRL 1.16 scores the reference with the adapters off if it added the adapter itself (`peft_config`). If it is given a
PEFT model, it adds an adapter "ref", a copy of the adapter named "default", switches to "ref" and back. Three things go
wrong there. TRL copies no parameter whose name ends in the adapter's name (embeddings, token rows). It initialises the
copy as the config says, which writes to the base model for PiSSA and similar methods. And it switches back to one
adapter only.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...errors import ConfigError
from ...policy.adapters import adapter_layers, adapters_kept, held_by, tuned
from ...policy.policy import local
from ...policy.precision import PROBE_TOKENS, TOLERANCE, coarsest
from ..refusals import SCORING

if TYPE_CHECKING:
    from ...interprocess.ranks import Ranks
    from ...policy.policy import Policy
    from ..stock import StockTrainer

REFERENCE = "ref"
"""The name that TRL gives to the copy of the policy's adapter."""

FURTHER = "ref_of_"
"""The prefix of the names of the frozen copies of all active adapters except the first."""

TRLS = "default"
"""The name of the adapter that TRL copies."""


@contextmanager
def reference_of_active(model: Any, args: Any) -> Iterator[None]:
    """Return a context for TRL's `__init__` in which TRL's reference model becomes a frozen copy of all adapters that
    are active, not of one.

    Args:
        model: the model passed to TRL's `__init__`; nothing is done unless it is a PEFT model.
        args: the run's arguments, with `beta` and `disable_dropout`.

    Raises:
        ConfigError: one of the policy's adapters has a name that the copies need.
    """
    if not getattr(args, "beta", 0) or not tuned(model):
        yield
        return
    configs, active = model.peft_config, list(model.active_adapters)
    taken = [name for name in configs if name == REFERENCE or name.startswith(FURTHER)]
    if taken:
        raise ConfigError(
            f"The policy has an adapter named {taken[0]!r}, and beta={args.beta} keeps a frozen copy of the active "
            "adapters under that name. Load it under another one (adapter_name=...), or delete it "
            f"(`model.delete_adapter({taken[0]!r})`) where an earlier trainer has left it."
        )
    own, copied = configs.get(TRLS), TRLS if TRLS in configs else active[0]
    with adapters_kept(model):
        configs[TRLS] = _plain(configs[copied])
        try:
            yield
        finally:
            del configs[TRLS]
            if own is not None:
                configs[TRLS] = own
        if REFERENCE in configs:  # else TRL has made no reference, and says so
            _copy_all(model, active, again=copied != active[0])
            if getattr(args, "disable_dropout", False):
                for dropout in (m for m in model.modules() if isinstance(m, nn.Dropout)):
                    dropout.p = 0


def _plain(config: Any) -> Any:
    """Return a copy of an adapter's config with ordinary initialisation: methods such as PiSSA would also write to the
    base model."""
    plain = copy.copy(config)
    if hasattr(plain, "init_lora_weights"):
        plain.init_lora_weights = True
    return plain


def _copy_all(model: Any, active: list[str], again: bool) -> None:
    """Give each active adapter a frozen copy with the same weights. TRL has already added the copy "ref".

    Args:
        model: the PEFT model.
        active: names of the active adapters.
        again: whether "ref" was made from the config of another adapter than the first active one, and must be made
            anew.
    """
    if again:
        model.delete_adapter(REFERENCE)
        model.add_adapter(REFERENCE, _plain(model.peft_config[active[0]]))
    for name in active[1:]:
        model.add_adapter(FURTHER + name, _plain(model.peft_config[name]))
    for layer in adapter_layers(model.modules()):
        scaling = getattr(layer, "scaling", {})
        for name, frozen in _copies(active).items():
            if name in scaling:
                scaling[frozen] = scaling[name]
        for held, kept in _held_twice(layer, active):
            for theirs, ours in zip(held, kept, strict=True):
                ours.data.copy_(theirs.data)
                ours.requires_grad_(False)


def _copies(active: list[str]) -> dict[str, str]:
    """Return the names of the active adapters' frozen copies, by the names of the adapters."""
    return {active[0]: REFERENCE} | {name: FURTHER + name for name in active[1:]}


def _held_twice(layer: Any, active: list[str]) -> Iterator[tuple[list[nn.Parameter], list[nn.Parameter]]]:
    """Yield, for each active adapter of a PEFT layer, the adapter's trained parameters and those of its frozen copy,
    which serves as the reference model, as two lists in the same order."""
    held = defaultdict[str, list[nn.Parameter]](list)
    for name, parameter in held_by(layer):
        held[name].append(parameter)
    return ((held[name], held[frozen]) for name, frozen in _copies(active).items())


def scored_by_policy(trainer: StockTrainer) -> bool:
    """Return whether TRL scores a reference that is no separate model, but the policy with other adapters or with none,
    in a run whose completions this package samples."""
    without = getattr(trainer, "ref_model", None) is None and getattr(trainer, "beta", 0) != 0
    return without and trainer._base_name in SCORING and not trainer.session.selection.stock


@contextmanager
def active_adapters(trainer: StockTrainer) -> Iterator[None]:
    """Return a context that restores the policy's active adapters at its end, where TRL switches them to score the
    reference."""
    policy = trainer.session.policy
    with adapters_kept(policy.module, policy.modules) if scored_by_policy(trainer) else nullcontext():
        yield


def activate_copies(model: Any) -> None:
    """Activate the frozen copies of all adapters that are trained together, if TRL has switched a PEFT model to its
    reference adapter "ref", which is a copy of only the first of these adapters. Called before each scoring. TRL
    switches "ref" off by itself, and `adapters_kept`, around TRL's code, restores the active adapters."""
    if not tuned(model) or model.active_adapter != REFERENCE:
        return
    further = [name for name in model.peft_config if name.startswith(FURTHER)]
    if further:
        model.base_model.set_adapter([REFERENCE, *further], inference_mode=True)


def check_reference(policy: Policy, ranks: Ranks, autocast: torch.dtype) -> None:
    """Check that the policy equals its reference before the first step. Collective.

    The mean difference of their log-probs must be within rounding. In ZeRO-3, no such forward pass may come before the
    first rollout (`Policy.in_zero3`), so the parameters are compared instead. In full fine-tuning nothing is checked:
    there the reference is a separate model, which may differ on purpose.

    Args:
        autocast: the dtype in which the trainer computes matrix products.

    Raises:
        ConfigError: the reference is not the model that training starts from.
    """
    model: Any = policy.module
    if not tuned(model):
        return
    if policy.in_zero3:
        if not ranks.any(parameters_apart(policy)):
            return
        distance = ""
    else:
        gap = _gap(policy)
        if gap <= TOLERANCE[coarsest(*policy.dtypes, autocast)] / 10:
            return
        distance = f", by {gap:.3g} nats a token"
    raise ConfigError(
        f"The reference of beta > 0 is another model than the policy before the first step{distance}: "
        f"{_why_apart(model)}, or set beta=0."
    )


def parameters_apart(policy: Policy) -> bool:
    """Return whether the parameters on this rank show that an adapter differs from its reference.

    A frozen copy must have the adapter's values. Where the reference is the model with its adapters off, a LoRA adapter
    must start from zero, that is, with a zero B. Adapters of other kinds start from zero in other ways, and are not
    checked.
    """
    model: Any = policy.module
    active = list(model.active_adapters)
    if REFERENCE in model.peft_config:
        twice = (pair for layer in adapter_layers(policy.modules) for pair in _held_twice(layer, active))
        return any(
            len(held) != len(kept) or not all(torch.equal(local(a), local(b)) for a, b in zip(held, kept, strict=True))
            for held, kept in twice
        )
    named = ((set(name.split(".")), p) for name, p in model.named_parameters())
    return any(
        bool(local(p).any())
        for parts, p in named
        if not parts.isdisjoint(("lora_B", "lora_embedding_B")) and not parts.isdisjoint(active)
    )


def _gap(policy: Policy) -> float:
    """Return the mean difference between the log-probs of policy and reference on a short sequence, in nats per
    token."""
    model: Any = policy.module
    vocabulary = policy.base.config.get_text_config().vocab_size
    ids = [(7919 * i + 11) % vocabulary for i in range(1, 2 * PROBE_TOKENS + 1)]
    probe = ids[:PROBE_TOKENS], ids[PROBE_TOKENS:]
    ours = policy.log_probs(*probe)
    with adapters_kept(model, policy.modules):
        if REFERENCE in model.peft_config:
            model.set_adapter(REFERENCE)
            activate_copies(model)
            theirs = policy.log_probs(*probe)
        else:
            with model.disable_adapter():
                theirs = policy.log_probs(*probe)
    policy.reshard()
    return float((ours - theirs).abs().mean())


def _why_apart(model: Any) -> str:
    """Return the likely reason why a reference differs from the policy, and what the user can do, as text for an
    error."""
    if REFERENCE in model.peft_config:
        return (
            f"TRL scores it with the adapter {REFERENCE!r}, a copy of the policy's from when the trainer was made. "
            "Load the policy's weights before the trainer is made, not after"
        )
    start = getattr(model.peft_config[model.active_adapter], "init_lora_weights", None)
    return (
        f"TRL scores it with the adapters off, and what this adapter starts from ({start=}) is not that model. Give "
        "the trainer `model=get_peft_model(model, peft_config)` and no peft_config, of which a frozen copy is kept "
        "(PEFT 0.20 or newer for `target_parameters`), or let the adapter start from zero"
    )


def refuse_tied_token_rows(policy: Policy) -> None:
    """Refuse a head that is tied to embeddings of which some rows are trained: TRL would multiply by the head's frozen
    weight.

    Raises:
        ConfigError: names the setting and the ways out.
    """
    head = policy.base.get_output_embeddings()
    if getattr(head, "token_adapter", None) is not None:
        raise ConfigError(
            "trainable_token_indices of the adapter trains rows of the embeddings, to which this model ties its head "
            "(tie_word_embeddings=True), and TRL computes log-probs from the head's own weight, without those rows. "
            "Leave trainable_token_indices out, or load a model whose head is not tied (tie_word_embeddings=False, its "
            "head a copy of the embeddings)."
        )
