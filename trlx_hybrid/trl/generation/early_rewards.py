"""Rewards of finished groups (the completions of one prompt), started while other groups are still being sampled.

TRL scores a rollout after all rows are sampled, and the longest tenth of the rows takes half of the sampling time. With
tools and environments, the rows with the slowest calls take this time. A reward that is computed elsewhere need not
wait for these rows. If a reward function has a true attribute `begins_early`, its method `prepare` is called before the
rollout. Its method `begin` is called for each group as soon as the group is complete, and must return at once. When TRL
calls the function itself, for all rows, the rewards are already being computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ...contract.conversation import Conversation
from ...contract.types import Completion, Request
from ...interprocess.copies import copied
from ..refusals import EARLY_REWARDS, Facts

if TYPE_CHECKING:
    from ..state import RunState
    from ..stock import StockTrainer

NOT_COLUMNS = ("prompt", "completion", "completion_ids")
"""Columns of a dataset's row that TRL does not pass on to reward functions under their own names."""


@contextmanager
def begun_early(
    trainer: StockTrainer, run: RunState, parse_response: Callable[..., dict[str, Any]], prompts: Sequence[Any]
) -> Iterator[None]:
    """Return a context for a rollout. Inside it, the method `begin` of reward functions that can begin early is called
    for each group (the completions of one prompt), as soon as all rows of the group are sampled.

    Args:
        parse_response: TRL's function of that name.
        prompts: the prompts of the rollout that begins, as TRL will pass them to reward functions.
    """
    functions = [f for f in getattr(trainer, "reward_funcs", None) or () if getattr(f, "begins_early", False)]
    if not functions:
        yield
        return
    reason = EARLY_REWARDS.refused(Facts.of(trainer, run.session.selection))
    if reason is None and len(prompts) != len(run.session.rows):
        reason = "the rollout has other rows than the batch"
    if reason is not None:
        run.say_once("late rewards", "Rewards begin when all is sampled: %s.", reason)
        yield
        return
    for function in functions:
        function.prepare()
    groups, session = SampledGroups(trainer, parse_response, functions, prompts), run.session
    session.on_completion, session.on_conversation = groups.sampled, groups.ended
    try:
        yield
    finally:
        session.on_completion = session.on_conversation = None


class SampledGroups:
    """A collector of a rollout's completions or conversations, which calls the method `begin` of reward functions for
    each group (the completions of one prompt) as soon as it is complete.

    Args:
        parse_response: TRL's function of that name.
        functions: the reward functions whose `begins_early` is true, with a method `begin`.
        prompts: the prompts of this rank's rows, as TRL passes them to reward functions.
    """

    def __init__(
        self,
        trainer: StockTrainer,
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
        self._scored: dict[int, tuple[Any, list[int]]] = {}  # by row: completion and token ids to score

    def sampled(self, row: int, request: Request, completion: Completion) -> None:
        """Take a row's completion; if it completes its group, call the reward functions' `begin` for the group. A
        completion beyond the batch's prompts, from a custom rollout, belongs to no group and is ignored.

        Args:
            row: the row's number in this rank's batch.
            request: the request that was sampled.
            completion: the completion.
        """
        if row in self._group_of:
            self._add(row, self._completion(row, request, completion), completion.token_ids)

    def ended(self, row: int, conversation: Conversation) -> None:
        """Take a row's conversation, which has ended or broken off; if it completes its group, call the reward
        functions' `begin` for the group."""
        self._add(row, conversation.messages, conversation.completion_ids)

    def _add(self, row: int, completion: Any, token_ids: list[int]) -> None:
        self._scored[row] = completion, token_ids
        group = self._group_of[row]
        if all(n in self._scored for n in group):
            arguments = self._arguments(group)
            for function in self._functions:
                function.begin(group, **copied(arguments))

    def _arguments(self, rows: Sequence[int]) -> dict[str, Any]:
        """Return the arguments with which TRL will call a reward function, for these rows.

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
        """Return a completion in the form in which TRL passes it to reward functions: a text, or a list with one
        message if the prompt is a list of messages. GRPO parses it into a message where the tokenizer can, RLOO does
        not."""
        trainer = self._trainer
        messages, tokenizer = not isinstance(self._prompts[row], str), trainer._tokenizer
        templates = (getattr(tokenizer, name, None) for name in ("response_template", "response_schema"))
        if messages and trainer._base_name == "GRPO" and any(template is not None for template in templates):
            tools, prefix = getattr(trainer, "tools", None), request.prompt_ids
            return [self._parse_response(tokenizer, completion.token_ids, prefix=prefix, tools=tools)]
        (text,) = trainer.processing_class.batch_decode([completion.token_ids], skip_special_tokens=True)
        return [{"role": "assistant", "content": text}] if messages else text
