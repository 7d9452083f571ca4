"""Warnings about TRL's own reward functions that cannot see parts of a completion, given at a run's first batch.

`think_format_reward` wants a completion to begin with `<think>`. If the chat template has written that tag at the end
of the prompt, no completion begins with it, and the reward is always 0. A tokenizer with a response template moves the
reasoning out of `content`, which is what TRL's functions read; for runs with tools, TRL gives every tokenizer such a
template. And TRL's functions read the first message of a completion, but a conversation with tools has several.

Source: trl 1.16, `trl/rewards/format_rewards.py` and `accuracy_rewards.py`. The rewards themselves are not changed.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

logger = logging.getLogger(__name__)

OPENS, CLOSES = "<think>", "</think>"
TAIL = 32  # tokens to decode at a prompt's end: enough for the tag and blanks, even with a token per letter
READS_FIRST = ("trl.rewards.format_rewards", "trl.rewards.accuracy_rewards")
"""Modules of TRL's functions that read `completion[0]["content"]` and nothing else."""


def warn(
    functions: Any, prompt_ids: Sequence[Sequence[int]], processor: Any, parse: Callable[..., Any], tools: bool
) -> None:
    """Warn of TRL's own reward functions that look for text which the completions they are given cannot contain. An
    example is `think_format_reward`, if the chat template writes `<think>` at the end of the prompt. Called for a run's
    first batch, because the templates' effect can be seen in its rendered prompts.

    Args:
        functions: the trainer's `reward_funcs`.
        prompt_ids: (B, prompt tokens) of this rank.
        processor: the trainer's `processing_class`.
        parse: TRL's `parse_response`.
        tools: whether the run has any tools.
    """
    own = [function for function in functions if _is_trls(_called(function))]
    if not own:
        return
    tokenizer = getattr(processor, "tokenizer", processor)
    opened = sum(tokenizer.decode(list(ids)[-TAIL:]).rstrip().endswith(OPENS) for ids in prompt_ids)
    moved = _moves_reasoning(tokenizer, prompt_ids[0], parse)
    for function in own:
        name = getattr(_called(function), "__name__", type(_called(function)).__name__)
        for problem in _problems(function, opened, len(prompt_ids), moved, tools):
            logger.warning("Reward function %r of TRL %s", name, problem)


def _problems(function: Any, opened: int, rows: int, moved: bool, tools: bool) -> Iterator[str]:
    """Yield a warning for each part of a completion that a function does not see, with what the user can do.

    Args:
        opened: how many prompts of the batch end in `<think>`.
        rows: how many prompts the batch has.
        moved: whether the tokenizer's parser moves reasoning out of a message's `content`.
        tools: whether the run has any tools.
    """
    name = getattr(_called(function), "__name__", "")
    if name == "think_format_reward" and opened and not moved:
        yield (
            f"is 0 wherever the prompt ends in {OPENS}, as {opened} of {rows} prompts of the first batch do: the chat "
            "template opens the block, so no completion begins with that tag. Wrap the function in one of your own "
            f"that puts {OPENS} before each completion's content."
        )
    delimited = name == "reasoning_accuracy_reward" and not _given(function).get("reasoning_delimiters")
    if moved and (name == "think_format_reward" or delimited):
        yield (
            f"is 0 for every completion: it looks for {CLOSES} in a message's content, and the tokenizer's response "
            "template moves the reasoning to a field of its own. Write a reward function that reads that field."
        )
    if tools:
        yield (
            "reads the first message of a completion only, and with tools a completion has several: what is said "
            "after a call is not rewarded. Write a reward function that reads all of them, or the last, "
            'completion[-1]["content"].'
        )


def _called(function: Any) -> Any:
    """Return the function that a `functools.partial` calls, or `function` itself if it is no partial."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _is_trls(function: Any) -> bool:
    """Return whether a reward function is one of TRL's that read only a message's `content`, of which `warn` warns. A
    user's wrapper around one does not count: the wrapper may already pass it the parts that it would not see."""
    return getattr(function, "__module__", None) in READS_FIRST and not hasattr(function, "__wrapped__")


def _given(function: Any) -> dict[str, Any]:
    """Return the keyword arguments that nested `functools.partial` objects hold; the outermost partial wins."""
    held: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        held, function = function.keywords | held, function.func
    return held


def _moves_reasoning(tokenizer: Any, prompt_ids: Sequence[int], parse: Callable[..., Any]) -> bool:
    """Return whether the tokenizer's parser moves reasoning out of `content`, by parsing a sample completion."""
    if all(getattr(tokenizer, name, None) is None for name in ("response_template", "response_schema")):
        return False
    ends_open = tokenizer.decode(list(prompt_ids)[-TAIL:]).rstrip().endswith(OPENS)
    text = f"{'' if ends_open else OPENS}\nfour\n{CLOSES}\n\n4"
    ids = tokenizer.encode(text, add_special_tokens=False)
    message = parse(tokenizer, [*ids, tokenizer.eos_token_id], prefix=list(prompt_ids))
    return CLOSES not in str(message.get("content", ""))
