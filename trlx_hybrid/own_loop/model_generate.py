"""A replacement of `model.generate` during rollouts: called like transformers' own, but the engine samples.

Source: transformers 5.17, `GenerationMixin.generate`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..contract.types import Sampling
from ..errors import ConfigError, EngineError, did_you_mean

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..session import Session

SERVED = (
    *("max_new_tokens", "max_length", "num_return_sequences", "do_sample", "temperature", "top_k", "top_p", "min_p"),
    *("repetition_penalty", "eos_token_id", "pad_token_id"),
)
"""Fields of a GenerationConfig that the engine follows; their values may differ from call to call."""

INDIFFERENT = {"bos_token_id", "decoder_start_token_id", "transformers_version", "_from_model_config"} | {
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size"),
    *("compile_config", "disable_compile", "synced_gpus"),
}
"""Fields of a GenerationConfig that do not affect what is generated, only how transformers computes it."""


@contextmanager
def served_generate(session: Session, model: nn.Module) -> Iterator[None]:
    """Replace `model.generate` inside the context by a function that samples with the engine. The module inside DDP or
    a compiler's wrapper gets it, too.

    The function is set as an attribute of these objects, which hides the method of their class, and is removed on exit.
    Other models of the same class are not affected.
    """
    holders = {id(module): vars(module) for module in (model, session.policy.module)}.values()
    before = [dict(holder) for holder in holders]
    for holder in holders:
        holder["generate"] = functools.partial(generate, session)
    try:
        yield
    finally:
        for holder, old in zip(holders, before, strict=True):
            del holder["generate"]
            if "generate" in old:  # a `generate` that was set before
                holder["generate"] = old["generate"]


def generate(session: Session, inputs: Tensor | None = None, generation_config: Any = None, **settings: Any) -> Tensor:
    """Generate as transformers' `generate` does, with completions sampled by the engine.

    The arguments, `generation_config` and the model's own config set the sampling, in this order of precedence. Where
    none of them sets `do_sample`, decoding is greedy, as in transformers. `HybridEngine(sampling=...)` has
    no effect here, only on `engine.generate`. Draws depend on the run's seed, not on torch's generators.

    Args:
        inputs: (B, P) int64, may be passed as `input_ids`; prompts padded on the left.
        generation_config: a transformers `GenerationConfig`.
        settings: `attention_mask` (B, P), 0 at padding; and the fields of a GenerationConfig in SERVED.

    Returns:
        (B * num_return_sequences, P + T) int64, on the device of the prompts: each prompt as it was given, its
        completion with the stop token, and `pad_token_id` up to T, the length of the longest completion.

    Raises:
        ConfigError: a setting is not supported by the engine.
        EngineError: a prompt and the completion that is allowed would be longer than the engine's context.
    """
    import torch

    input_ids = settings.pop("input_ids", None) if inputs is None else inputs
    attention_mask = settings.pop("attention_mask", None)
    config = _resolved(session.policy.base.generation_config, generation_config, settings)
    if input_ids is None or input_ids.dim() != 2:
        raise ConfigError("generate() inside rollout_context() takes input_ids of shape (prompts, tokens).")
    rows, width = input_ids.shape
    limit = config.max_new_tokens
    if limit is None and config.max_length is not None:
        limit = config.max_length - width
    if limit is None or limit < 1:
        raise ConfigError(
            f"generate() inside rollout_context() was left {'no' if limit is None else limit} tokens: pass "
            "max_new_tokens, which neither HybridEngine's max_tokens nor its sampling is."
        )
    stops = [] if config.eos_token_id is None else torch.as_tensor(config.eos_token_id).reshape(-1).tolist()
    pad = config.pad_token_id if config.pad_token_id is not None else next(iter(stops), None)
    if attention_mask is None:  # transformers' rule for a missing mask
        attention_mask = torch.ones_like(input_ids) if pad is None or pad in stops else (input_ids != pad).long()
    prompts = _without_padding(input_ids, attention_mask)
    longest, context = max(map(len, prompts)), session.live_engine.max_model_len
    if longest + limit > context:
        raise EngineError(
            f"generate() was asked for {limit} tokens after a prompt of {longest}; the engine's context holds "
            f"{context}. Ask for fewer, or raise max_model_len in engine_options up to what the model supports."
        )
    sampling = Sampling(
        max_tokens=limit,
        temperature=config.temperature if config.do_sample else 0.0,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p or 0.0,
        repetition_penalty=config.repetition_penalty,
        extra={"stop_token_ids": stops, "ignore_eos": True},  # else the engine would add its tokenizer's
    )
    copies = config.num_return_sequences
    repeated = [prompt for prompt in prompts for _ in range(copies)]
    found = [c.token_ids for c in session.generate(repeated, num_generations=copies, sampling=sampling)]
    sequences = input_ids.new_full((rows * copies, width + max(map(len, found))), 0 if pad is None else pad)
    sequences[:, :width] = input_ids.repeat_interleave(copies, dim=0)
    for row, tokens in zip(sequences, found, strict=True):
        row[width : width + len(tokens)] = torch.tensor(tokens, device=row.device)
    return sequences


def _resolved(own: Any, given: Any, settings: Mapping[str, Any]) -> Any:
    """Return the GenerationConfig of a call, merged in transformers' order of precedence: the call's settings, the
    given config, the model's own config, defaults.

    Args:
        own: the model's GenerationConfig.
        given: the GenerationConfig that was passed, or None.
        settings: the keyword arguments of the call.

    Raises:
        ConfigError: a setting that the engine does not follow has another value than transformers' default.
    """
    from transformers import GenerationConfig

    config = GenerationConfig() if given is None else copy.deepcopy(given)
    defaults = config._get_default_generation_params()
    config.update(**own.to_dict(), defaults_only=True)
    unknown = config.update(**settings)
    # Defaults last, since None is often passed along with do_sample=False.
    config.update(**{k: v for k, v in defaults.items() if k != "max_length"}, defaults_only=True)
    known = INDIFFERENT | set(SERVED)
    for name, value in (config.to_dict() | unknown).items():
        nothing = value is None or (isinstance(value, int | float | list | tuple | dict) and not value)
        if name not in known and not nothing and value != defaults.get(name):
            hint = did_you_mean(name, SERVED) if name in unknown else ""
            raise ConfigError(
                f"generate() inside rollout_context() does not follow {name}={value!r:.60}.{hint} "
                f"The engine takes {', '.join(SERVED)}; engine.generate() returns log-probs. Leave it out, or call the "
                "model's own generate() outside of rollout_context()."
            )
    return config


def _without_padding(input_ids: Tensor, attention_mask: Tensor) -> list[list[int]]:
    """Return the tokens of each prompt without padding.

    Raises:
        ConfigError: padding is elsewhere than on the left.
    """
    mask = attention_mask.cpu().int()
    if mask.shape != input_ids.shape or not mask[:, -1].all() or (mask.diff(dim=1) < 0).any():
        raise ConfigError(
            f"generate() inside rollout_context() takes prompts padded on the left: attention_mask of the shape of "
            f"input_ids, {tuple(input_ids.shape)}, 0 at padding, then 1 up to the end (tokenizer.padding_side='left')."
        )
    return [row[keep].tolist() for row, keep in zip(input_ids.cpu(), mask.bool(), strict=True)]
