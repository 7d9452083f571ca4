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
from torch import Tensor, nn

from ..errors import ConfigError
from ..weights.adapters import adapter_layers, adapters_kept, held_by, tuned
from ..weights.verify import PROBE_TOKENS, TOLERANCE, coarsest

if TYPE_CHECKING:
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
    copies = {active[0]: REFERENCE} | {name: FURTHER + name for name in active[1:]}
    for name in active[1:]:
        model.add_adapter(FURTHER + name, _plain(model.peft_config[name]))
    for layer in adapter_layers(model.modules()):
        scaling = getattr(layer, "scaling", {})
        held = defaultdict[str, list[Tensor]](list)
        for name, parameter in held_by(layer):
            held[name].append(parameter)
        for name, frozen in copies.items():
            if name in scaling:
                scaling[frozen] = scaling[name]
            for theirs, ours in zip(held[name], held[frozen], strict=True):
                ours.data.copy_(theirs.data)
                ours.requires_grad_(False)


def activate_copies(model: Any) -> None:
    """Where TRL has switched a PEFT model to "ref", switch the copies of further adapters on as well. TRL switches back
    by itself, and `adapters_kept` around it to what was active."""
    if not tuned(model) or model.active_adapter != REFERENCE:
        return
    further = [name for name in model.peft_config if name.startswith(FURTHER)]
    if further:
        model.base_model.set_adapter([REFERENCE, *further], inference_mode=True)


def check_reference(policy: Policy, autocast: torch.dtype) -> None:
    """See that the policy is its reference before the first step: the means of their log-probs differ by rounding.

    Collective. Of full fine-tuning, the reference is another model, which may be another one on purpose; in ZeRO-3 no
    pass of this kind may come before the first rollout (`Policy.in_zero3`).

    Args:
        autocast: what the trainer's matrix products are computed in.

    Raises:
        ConfigError: the reference is not what training starts from.
    """
    model: Any = policy.module
    if not tuned(model) or policy.in_zero3:
        return
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
    gap = float((ours - theirs).abs().mean())
    if gap <= TOLERANCE[coarsest(*policy.dtypes, autocast)] / 10:
        return
    if REFERENCE in model.peft_config:
        why = f"TRL scores it with the adapter {REFERENCE!r}, a copy of the policy's from when the trainer was made"
        way_out = "Load the policy's weights before the trainer is made, not after"
    else:
        config = model.peft_config[model.active_adapter]
        start = getattr(config, "init_lora_weights", None)
        why = f"TRL scores it with the adapters off, and what this adapter starts from ({start=}) is not that model"
        way_out = (
            "Give the trainer `model=get_peft_model(model, peft_config)` and no peft_config, of which a frozen copy is "
            "kept (PEFT 0.20 or newer for `target_parameters`), or let the adapter start from zero"
        )
    raise ConfigError(
        f"The reference of beta > 0 is another model than the policy before the first step, by {gap:.3g} nats a token: "
        f"{why}. {way_out}, or set beta=0."
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
