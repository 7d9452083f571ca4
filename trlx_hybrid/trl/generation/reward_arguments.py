"""The arguments of reward functions that begin before TRL calls them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..stock import StockTrainer

NOT_COLUMNS = ("prompt", "completion", "completion_ids")
"""Columns of a dataset's row that TRL does not pass on to reward functions under their own names."""


def early_functions(trainer: StockTrainer) -> list[Any]:
    """Return the reward functions that can begin early."""
    return [f for f in getattr(trainer, "reward_funcs", None) or () if getattr(f, "begins_early", False)]


def arguments_of(
    trainer: StockTrainer,
    rows: Sequence[dict[str, Any]],
    prompts: Sequence[Any],
    scored: Sequence[tuple[Any, list[int]]],
) -> dict[str, Any]:
    """Return the arguments with which TRL will call a reward function, for some rows; without environments.

    Source: trl 1.16, `_generate` (completions) and `_calculate_rewards` (the rest) of GRPO and RLOO.

    Args:
        rows: the dataset's rows.
        prompts: their prompts, as TRL passes them to reward functions.
        scored: their completions, and the token ids of these.
    """
    columns = [key for key in rows[0] if key not in NOT_COLUMNS]
    return {
        **{key: [row[key] for row in rows] for key in columns},
        "prompts": list(prompts),
        "completions": [completion for completion, _ in scored],
        "completion_ids": [token_ids for _, token_ids in scored],
        "trainer_state": trainer.state,
        "log_extra": trainer._log_completion_extra,
        "log_metric": trainer._log_metric,
    }


def completion_of(
    trainer: StockTrainer,
    parse_response: Callable[..., dict[str, Any]],
    prompt: Any,
    prompt_ids: list[int],
    token_ids: list[int],
) -> Any:
    """Return a completion in the form in which TRL passes it to reward functions: a text, or a list with one message if
    the prompt is a list of messages. GRPO parses it into a message where the tokenizer can, RLOO does not.

    Args:
        parse_response: TRL's function of that name.
        prompt: the row's prompt.
        prompt_ids: its token ids.
        token_ids: the completion's token ids.
    """
    messages, tokenizer = not isinstance(prompt, str), trainer._tokenizer
    templates = (getattr(tokenizer, name, None) for name in ("response_template", "response_schema"))
    if messages and trainer._base_name == "GRPO" and any(template is not None for template in templates):
        tools = getattr(trainer, "tools", None)
        return [parse_response(tokenizer, token_ids, prefix=prompt_ids, tools=tools)]
    (text,) = trainer.processing_class.batch_decode([token_ids], skip_special_tokens=True)
    return [{"role": "assistant", "content": text}] if messages else text
