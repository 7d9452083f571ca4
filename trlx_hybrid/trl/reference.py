"""Keeps the reference of `beta > 0` right where the policy is a PEFT adapter, and the policy what it was.

TRL 1.16 scores with the adapters off where it adds the adapter itself (`peft_config`). Where a PEFT model is given, it
adds an adapter "ref", a copy of the one named "default", and switches to it and back. It copies no parameter whose name
ends in the adapter's (embeddings, token rows), initialises the copy as the config says, which for PiSSA and its like
writes to the base, and comes back to one adapter alone.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import ConfigError
from ..weights.adapters import adapter_layers, adapters_kept, held_by, tuned
from ..weights.policy import local
from ..weights.verify import PROBE_TOKENS, TOLERANCE, coarsest

if TYPE_CHECKING:
    from ..ranks import Ranks
    from ..weights.policy import Policy

REFERENCE = "ref"
"""The name that TRL gives to the copy of the policy's adapter."""

FURTHER = "ref_of_"
"""Begins the names of the copies of further active adapters."""

TRLS = "default"
"""The name of the adapter that TRL copies."""


@contextmanager
def reference_of_active(model: Any, args: Any) -> Iterator[None]:
    """Have TRL's `__init__`, which runs inside, make a reference of all adapters that are active.

    Args:
        model: given to that `__init__`; nothing is done unless it is a PEFT model.
        args: the run's, with `beta` and `disable_dropout`.

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
        if REFERENCE in configs:  # else TRL has left it out, and says so
            _copy_all(model, active, again=copied != active[0])
            if getattr(args, "disable_dropout", False):
                for dropout in (m for m in model.modules() if isinstance(m, nn.Dropout)):
                    dropout.p = 0


def _plain(config: Any) -> Any:
    """Return a copy of an adapter's config whose initialisation writes to nothing but the new adapter."""
    plain = copy.copy(config)
    if hasattr(plain, "init_lora_weights"):
        plain.init_lora_weights = True
    return plain


def _copy_all(model: Any, active: list[str], again: bool) -> None:
    """Make the frozen copies of the active adapters.

    Args:
        again: whether "ref" was made from another adapter's config than that of the first active one.
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
    """Return the names of the frozen copies of active adapters."""
    return {active[0]: REFERENCE} | {name: FURTHER + name for name in active[1:]}


def _held_twice(layer: Any, active: list[str]) -> Iterator[tuple[list[nn.Parameter], list[nn.Parameter]]]:
    """Yield the parameters that a PEFT layer has for each active adapter, and those that it has for its copy."""
    held = defaultdict[str, list[nn.Parameter]](list)
    for name, parameter in held_by(layer):
        held[name].append(parameter)
    return ((held[name], held[frozen]) for name, frozen in _copies(active).items())


def activate_copies(model: Any) -> None:
    """Where TRL has switched a PEFT model to "ref", switch the copies of further adapters on as well. TRL switches back
    by itself, and `adapters_kept` around it to what was active."""
    if not tuned(model) or model.active_adapter != REFERENCE:
        return
    further = [name for name in model.peft_config if name.startswith(FURTHER)]
    if further:
        model.base_model.set_adapter([REFERENCE, *further], inference_mode=True)


def check_reference(policy: Policy, ranks: Ranks, autocast: torch.dtype) -> None:
    """See that the policy is its reference before the first step. Collective.

    The means of their log-probs differ by rounding. In ZeRO-3, where no pass of this kind may come before the first
    rollout (`Policy.in_zero3`), their parameters are compared. Of full fine-tuning, the reference is another model,
    which may be another one on purpose.

    Args:
        autocast: what the trainer's matrix products are computed in.

    Raises:
        ConfigError: the reference is not what training starts from.
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
    """Whether what this rank holds of the parameters tells that an adapter is not its reference.

    A frozen copy has the adapter's values. Where the reference is the model with its adapters off, a LoRA adapter
    starts from zero, with its B. Adapters of other kinds do so in ways of their own, and are not looked at.
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
    """Return how far the policy's log-probs of a short sequence are from its reference's, in nats a token."""
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
    """Return how a reference comes to be another model, and the way out."""
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
    """Refuse a head that is tied to embeddings of which some rows are trained: TRL multiplies by its frozen weight.

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
