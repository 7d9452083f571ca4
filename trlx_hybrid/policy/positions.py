"""Position ids for rows that are padded on the left, for models whose log-probs depend on a row's absolute positions.

TRL pads prompts on the left and passes no position ids, so transformers counts the padding tokens as positions. That
does not matter with rotary embeddings, which depend only on the distances between tokens. It matters to a model that
has an embedding of each position, such as GPT-2: a row's log-probs change with its padding, and so with the length of
the batch's longest prompt. In a small test they changed by 3 nats. An engine does not pad, so its log-probs would
differ. This module gives such a model the position ids that transformers' `generate` would give it, counted from the
attention mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from .precision import PROBE_TOKENS, TOLERANCE, coarsest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .policy import Policy

SCALED = "llama_4_scaling_beta"
"""The key of `rope_parameters` that makes attention scale with the position, so that a shifted row has other log-probs
although its model uses rotary embeddings."""


def counts_positions(model: PreTrainedModel) -> bool:
    """Return whether a text model may compute other log-probs for a row that begins at a later position, for instance
    after padding."""
    config = model.config
    rotary = getattr(config, "rope_parameters", None)
    text = config.get_text_config() is config
    return text and not getattr(model, "_is_stateful", False) and (not rotary or SCALED in rotary)


def takes_positions(model: PreTrainedModel) -> bool:
    """Return whether the model's `forward` takes position ids."""
    return "position_ids" in inspect.signature(type(model.base_model).forward).parameters


YARN = "a longer max_position_embeddings and rope_parameters of rope_type='yarn', which both scale alike"
"""The way to longer rows, in messages: the positions that trainer and engine scale in the same way."""


def beyond_positions(config: Any, longest: int, setting: str) -> str | None:
    """Return why rows are too long for a model's positions, and what to change; None where they are not, or where its
    positions are scaled.

    Args:
        config: the config of a language model.
        longest: the longest prompt plus completion, in tokens.
        setting: the name of the setting that gives this length.
    """
    rotary, native = getattr(config, "rope_parameters", None) or {}, getattr(config, "max_position_embeddings", None)
    kinds = {of["rope_type"] for of in (rotary, *rotary.values()) if isinstance(of, dict) and "rope_type" in of}
    if native is None or kinds != {"default"} or longest <= max(native, getattr(config, "model_max_length", None) or 0):
        return None
    return (
        f"{setting}={longest} is more than the model's {native} positions. Lower it, or give the model's config {YARN}."
    )


def from_mask(attention_mask: Tensor) -> Tensor:
    """Return position ids (B, T) int64 for an attention mask (B, T). Each row's tokens count from 0; padding before
    them has position 0."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def _fill(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """Return the arguments of a forward pass with position ids added, if it has an attention mask but no position ids;
    otherwise None, which leaves the arguments as they are. It is a forward pre-hook of torch."""
    mask = kwargs.get("attention_mask")
    if kwargs.get("position_ids") is not None or not isinstance(mask, Tensor) or mask.ndim != 2:
        return None
    given = [args[0] if args else None, kwargs.get("input_ids"), kwargs.get("inputs_embeds")]
    length = next((tokens.shape[1] for tokens in given if tokens is not None), mask.shape[1])
    return args, kwargs | {"position_ids": from_mask(mask)[:, -length:]}  # the mask covers a cache, too


class Positions:
    """Adds position ids, counted without left padding, to the forward passes of models, until `close` is called.

    Args:
        models: transformers models. A model whose log-probs do not depend on absolute positions, or whose `forward`
            takes no position ids, gets no hook.
    """

    def __init__(self, models: Iterable[PreTrainedModel]) -> None:
        told = [model for model in models if counts_positions(model) and takes_positions(model)]
        inner: list[nn.Module] = [model.base_model for model in told]  # TRL also calls it without the head
        self._hooks = [model.register_forward_pre_hook(_fill, with_kwargs=True) for model in inner]

    def close(self) -> None:
        """Remove the hooks from the models."""
        for hook in self._hooks:
            hook.remove()


def check_positions(policy: Policy, autocast: torch.dtype) -> None:
    """Check that padding before a row does not change its log-probs. Collective; computes nothing for a model whose
    attention sees only distances between tokens.

    Args:
        autocast: dtype of the trainer's matrix products.

    Raises:
        ConfigError: padding changes the log-probs by more than rounding explains.
    """
    model = policy.base
    if not counts_positions(model):
        return
    vocabulary = model.config.vocab_size
    ids = [(7919 * i + 11) % vocabulary for i in range(1, 2 * PROBE_TOKENS + 1)]
    prompt, completion = ids[:PROBE_TOKENS], ids[PROBE_TOKENS:]
    alone, padded = (policy.log_probs(prompt, completion, padding=n) for n in (0, PROBE_TOKENS))
    policy.reshard()
    gap = float((alone - padded).abs().max())
    if gap > TOLERANCE[coarsest(*policy.dtypes, autocast)]:
        raise ConfigError(
            f"{type(model).__name__} counts positions from the padding on: {PROBE_TOKENS} tokens of padding before a "
            f"row move its log-probs by {gap:.3g} nats. TRL pads the shorter prompts of a batch, engines pad none, so "
            "that the trainer would score other rows than were sampled. Its `forward` takes no `position_ids` that "
            "could tell it: let it take them, or train a model with rotary positions."
        )
