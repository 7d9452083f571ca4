"""Rewards of groups that are sampled, begun while others are sampled still.

TRL scores a rollout once all of it is there, and the longest tenth of its rows takes half of the time to sample. A
reward that is computed elsewhere need not wait: a reward function that says `begins_early` is told of each group as
soon as it is there, by its method `begin`, which returns at once; before the rollout its method `prepare` is called.
TRL's own call, for all rows, then finds rewards begun.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

from ..plugins.registry import BUILTIN
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
    trainer.session.on_completion = SampledGroups(trainer, parse_response, functions, prompts).add
    try:
        yield
    finally:
        trainer.session.on_completion = None


def _impossible(trainer: Any, prompts: Sequence[Any]) -> str | None:
    """Why a completion of the engine is not yet what will be scored, or None."""
    selection = trainer.session.selection
    if selection.stock:
        return "TRL generates"
    if getattr(trainer, "tools", None) or getattr(trainer, "environments", None):
        return "tools and environments have turns to come"
    if getattr(trainer, "rollout_func", None) is not None:
        return "rollout_func samples"
    if selection.rollout.component.plugin != BUILTIN:
        return f"the {selection.rollout.component} samples"
    if not selection.engine.component.streams:
        return f"the {selection.engine.component} returns all completions at once"
    if len(prompts) != len(trainer.session.rows):
        return "the rollout has other rows than the batch"
    return None


class SampledGroups:
    """Collects a rollout's completions and tells reward functions of each group that is whole.

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
        self._sampled: dict[int, tuple[Request, Completion]] = {}

    def add(self, row: int, request: Request, completion: Completion) -> None:
        """A row is sampled. One beyond the prompts, of a rollout of one's own, is in no group."""
        group = self._group_of.get(row)
        if group is None:
            return
        self._sampled[row] = request, completion
        if all(n in self._sampled for n in group):
            arguments = self._arguments(group)
            for function in self._functions:
                function.begin(group, **arguments)

    def _arguments(self, rows: Sequence[int]) -> dict[str, Any]:
        """What TRL will call a reward function with, of these rows.

        Source: trl 1.16, `_generate` (completions) and `_calculate_rewards` (the rest) of GRPO and RLOO.
        """
        trainer = self._trainer
        columns = [key for key in self._rows[0] if key not in NOT_COLUMNS]
        return {
            **{key: [self._rows[row][key] for row in rows] for key in columns},
            "prompts": [self._prompts[row] for row in rows],
            "completions": [self._completion(row) for row in rows],
            "completion_ids": [self._sampled[row][1].token_ids for row in rows],
            "trainer_state": trainer.state,
            "log_extra": trainer._log_completion_extra,
            "log_metric": trainer._log_metric,
        }

    def _completion(self, row: int) -> Any:
        """Text, or messages where the prompt is messages; GRPO parses these where it can, RLOO does not."""
        trainer, (request, completion) = self._trainer, self._sampled[row]
        messages, tokenizer = not isinstance(self._prompts[row], str), trainer._tokenizer
        templates = (getattr(tokenizer, name, None) for name in ("response_template", "response_schema"))
        if messages and trainer._base_name == "GRPO" and any(template is not None for template in templates):
            tools, prefix = getattr(trainer, "tools", None), request.prompt_ids
            return [self._parse_response(tokenizer, completion.token_ids, prefix=prefix, tools=tools)]
        (text,) = trainer.processing_class.batch_decode([completion.token_ids], skip_special_tokens=True)
        return [{"role": "assistant", "content": text}] if messages else text
