"""TRL's tool calling in our terms: its rows as dialogues, and finished conversations as what its tool loop returns.

Knows the attributes that TRL 1.16's `GRPOTrainer` and `DistillationTrainer` keep for it; tests/test_seam.py names them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from .conversation import Conversation, Dialogue, Limits
from .errors import ConfigError
from .tool_suffix import observer
from .types import Completion


def dialogues(
    trainer: Any,
    parse_response: Callable[..., dict[str, Any]],
    prompt_ids: Sequence[list[int]],
    images: Sequence[list[Any] | None] | None,
    first: Sequence[Completion] | None = None,
) -> list[Dialogue]:
    """One dialogue per row of the batch.

    Args:
        parse_response: TRL's.
        first: first turns that a custom rollout has sampled.
    """
    observe, environments = observer(trainer), getattr(trainer, "environments", None)
    known = {tool.__name__: tool for tool in trainer.tools or () if not inspect.iscoroutinefunction(tool)}
    return [
        Dialogue(
            prompt_ids=list(prompt_ids[index]),
            parse=_parser(trainer, parse_response, index),
            observe=observe,
            sync_tools=trainer._sync_tool_dicts[index] if _is_grpo(trainer) else trainer._tool_dict,
            async_tools=trainer._async_tool_dicts[index] if _is_grpo(trainer) else {},
            run_tools=known,
            images=images[index] if images is not None else None,
            first=first[index] if first is not None else None,
            event_loop=getattr(trainer, "async_loop", None),
            environment=environments[index] if environments else None,
            discard=_discarding(trainer, index),
        )
        for index in range(len(prompt_ids))
    ]


def limits(trainer: Any, max_model_len: int) -> Limits:
    """Where TRL ends a conversation."""
    return Limits(
        completion_tokens=trainer.max_completion_length,
        model_tokens=max_model_len,
        tool_turns=trainer.max_tool_calling_iterations,
    )


def refuse_text(prompts: Sequence[Any]) -> None:
    """Tools need chat messages; TRL would fail on the first completion, after it was sampled."""
    if prompts and isinstance(prompts[0], str):
        raise ConfigError(
            "The trainer was given tools, but the dataset's prompts are plain text: there is no conversation to put a "
            'call into. Make each prompt a list of messages, [{"role": "user", "content": …}].'
        )


def first_turns(trainer: Any, conversations: Sequence[Conversation]) -> Any:
    """What TRL's `_generate_single_turn` returns: of every row the first turn."""
    lengths = [c.turns[0].sampled for c in conversations]
    token_ids = [c.completion_ids[:n] for c, n in zip(conversations, lengths, strict=True)]
    if not _is_grpo(trainer):
        return token_ids
    return token_ids, [(c.logprobs or [])[:n] for c, n in zip(conversations, lengths, strict=True)]


def sampled_turns(token_ids: Sequence[list[int]], logprobs: Sequence[list[float]] | None) -> list[Completion]:
    """First turns that a custom rollout sampled, from what it returned."""
    return [
        Completion(token_ids=list(ids), logprobs=[[value] for value in logprobs[i]] if logprobs is not None else None)
        for i, ids in enumerate(token_ids)
    ]


def loop_result(trainer: Any, conversations: Sequence[Conversation]) -> tuple[Any, ...]:
    """What TRL's `_tool_call_loop` returns."""
    logprobs = ([c.logprobs or [] for c in conversations],) if _is_grpo(trainer) else ()
    return (
        [c.loss_mask for c in conversations],
        [c.messages for c in conversations],
        [c.completion_ids for c in conversations],
        *logprobs,
        sum(c.calls for c in conversations),
        sum(c.failed_calls for c in conversations),
        [c.images for c in conversations],
    )


def _is_grpo(trainer: Any) -> bool:
    return bool(trainer._base_name == "GRPO")


def _parser(
    trainer: Any, parse_response: Callable[..., dict[str, Any]], index: int
) -> Callable[[list[int], list[int]], dict[str, Any]]:
    """A row's turns are parsed with the tools that its prompt was rendered with."""
    tools = trainer.tools
    if getattr(trainer, "environment_factories", None) is not None:
        tools = trainer._env_tools[trainer._batch_environments[index]]
    return lambda token_ids, prefix: parse_response(trainer._tokenizer, token_ids, prefix=prefix, tools=tools)


def _discarding(trainer: Any, index: int) -> Callable[[], None]:
    """Take a row's environment out of TRL's pool: a call that never came back may still be using it.

    TRL makes another when a batch needs it. Here its factory, which may fail, would end everybody's conversations.
    """

    def discard() -> None:
        if not getattr(trainer, "environments", None):
            return
        environment, name = trainer.environments[index], trainer._batch_environments[index]
        pool = trainer._environment_pool[name]
        pool[:] = [pooled for pooled in pool if pooled is not environment]

    return discard
