"""Rewards of groups that are sampled, begun while others are sampled still.

TRL scores a rollout once all of it is there, and the longest tenth of its rows takes half of the time to sample; with
tools and environments, those with the slowest calls. A reward that is computed elsewhere need not wait: a reward
function that says `begins_early` is told of each group as soon as it is there, by its method `begin`, which returns at
once; before the rollout its method `prepare` is called. TRL's own call, for all rows, then finds rewards begun.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

from ..copies import copied
from ..rollout.conversation import Conversation
from ..types import Completion, Request

logger = logging.getLogger(__name__)

NOT_COLUMNS = ("prompt", "completion", "completion_ids")
"""Of a dataset's row, what TRL does not hand on under its own name."""


@contextmanager
def begun_early(trainer: Any, parse_response: Callable[..., dict[str, Any]], prompts: Sequence[Any]) -> Iterator[None]:
    """Inside, reward functions that begin early are told of each group that is sampled.

    Args:
        parse_response: TRL's.
        prompts: of the rollout that begins, as TRL will hand them to reward functions.
    """
    functions = [f for f in getattr(trainer, "reward_funcs", None) or () if getattr(f, "begins_early", False)]
    reason = _impossible(trainer, prompts) if functions else None
    if reason is not None and not trainer.__dict__.get("_said_late"):
        trainer._said_late = True
        if trainer.accelerator.is_main_process:
            logger.warning("Rewards begin when all is sampled: %s.", reason)
    if not functions or reason is not None:
        yield
        return
    for function in functions:
        function.prepare()
    groups, session = SampledGroups(trainer, parse_response, functions, prompts), trainer.session
    session.on_completion, session.on_conversation = groups.sampled, groups.ended
    try:
        yield
    finally:
        session.on_completion = session.on_conversation = None


def _impossible(trainer: Any, prompts: Sequence[Any]) -> str | None:
    """Why nothing is known of a row before all rows are there, or None."""
    selection, rollout = trainer.session.selection, trainer.session.rollout
    if selection.stock:
        return "TRL generates"
    if getattr(trainer, "rollout_func", None) is not None:
        return "rollout_func samples"
    if getattr(trainer, "tools", None) and not rollout.converses:
        return f"TRL runs the tools, turn by turn, where the {selection.rollout.component} samples"
    if not rollout.tells:
        return f"the {selection.rollout.component} does not tell what it has sampled (`tells`)"
    if not selection.engine.component.streams:
        return f"the {selection.engine.component} returns all completions at once"
    if len(prompts) != len(trainer.session.rows):
        return "the rollout has other rows than the batch"
    return None


class SampledGroups:
    """Collects a rollout's completions, or its conversations, and tells reward functions of each group that is whole.

    Args:
        parse_response: TRL's.
        functions: those that can begin.
        prompts: of this rank's rows, as TRL hands them to reward functions.
    """

    def __init__(
        self,
        trainer: Any,
        parse_response: Callable[..., dict[str, Any]],
        functions: Sequence[Any],
        prompts: Sequence[Any],
    ) -> None:
        session = trainer.session
        self._parse_response = parse_response
        self._trainer, self._functions, self._prompts, self._rows = trainer, functions, prompts, session.rows
        in_evaluation = getattr(trainer, "num_generations_eval", trainer.num_generations)
        size = trainer.num_generations if session.training else in_evaluation
        first = session.ranks.rank * len(prompts)  # a group may lie on two ranks, each of which has a part of it
        groups = groupby(range(len(prompts)), key=lambda row: (first + row) // size)
        self._group_of = {row: group for group in (list(rows) for _, rows in groups) for row in group}
        self._scored: dict[int, tuple[Any, list[int]]] = {}  # of each row what will be scored: completion, token ids

    def sampled(self, row: int, request: Request, completion: Completion) -> None:
        """A completion is there. One beyond the prompts, of a rollout of one's own, is in no group."""
        if row in self._group_of:
            self._add(row, self._completion(row, request, completion), completion.token_ids)

    def ended(self, row: int, conversation: Conversation) -> None:
        """A conversation is over, or broke off."""
        self._add(row, conversation.messages, conversation.completion_ids)

    def _add(self, row: int, completion: Any, token_ids: list[int]) -> None:
        self._scored[row] = completion, token_ids
        group = self._group_of[row]
        if all(n in self._scored for n in group):
            arguments = self._arguments(group)
            for function in self._functions:
                function.begin(group, **copied(arguments))

    def _arguments(self, rows: Sequence[int]) -> dict[str, Any]:
        """What TRL will call a reward function with, of these rows.

        Source: trl 1.16, `_generate` (completions) and `_calculate_rewards` (the rest) of GRPO and RLOO.
        """
        trainer = self._trainer
        columns = [key for key in self._rows[0] if key not in NOT_COLUMNS]
        environments = getattr(trainer, "environments", None)
        return {
            **{key: [self._rows[row][key] for row in rows] for key in columns},
            "prompts": [self._prompts[row] for row in rows],
            "completions": [self._scored[row][0] for row in rows],
            "completion_ids": [self._scored[row][1] for row in rows],
            "trainer_state": trainer.state,
            "log_extra": trainer._log_completion_extra,
            "log_metric": trainer._log_metric,
        } | ({} if environments is None else {"environments": [environments[row] for row in rows]})

    def _completion(self, row: int, request: Request, completion: Completion) -> Any:
        """Text, or messages where the prompt is messages; GRPO parses these where it can, RLOO does not."""
        trainer = self._trainer
        messages, tokenizer = not isinstance(self._prompts[row], str), trainer._tokenizer
        templates = (getattr(tokenizer, name, None) for name in ("response_template", "response_schema"))
        if messages and trainer._base_name == "GRPO" and any(template is not None for template in templates):
            tools, prefix = getattr(trainer, "tools", None), request.prompt_ids
            return [self._parse_response(tokenizer, completion.token_ids, prefix=prefix, tools=tools)]
        (text,) = trainer.processing_class.batch_decode([completion.token_ids], skip_special_tokens=True)
        return [{"role": "assistant", "content": text}] if messages else text
