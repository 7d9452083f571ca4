"""Rewards of finished groups (the completions of one prompt), started while other groups are still being sampled.

TRL scores a rollout after all rows are sampled, and the longest tenth of the rows takes half of the sampling time. With
tools and environments, the rows with the slowest calls take this time. A reward that is computed elsewhere need not
wait for these rows. If a reward function has a true attribute `begins_early`, its method `prepare` is called before the
rollout. Its method `begin` is called for each group as soon as the group is complete, and must return at once. When TRL
calls the function itself, for all rows, the rewards are already being computed.

Where rows stay in flight, a group may be complete long before its batch. `begin` then gets numbers of rows that hold
for the whole run. Before TRL calls the function, its method `placed` is told which of them are in the batch, and where.
What was begun for the others waits for a later batch.
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
from .reward_arguments import arguments_of, completion_of, early_functions

if TYPE_CHECKING:
    from ..state import RunState
    from ..stock import StockTrainer


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
    functions = early_functions(trainer)
    if not functions:
        yield
        return
    in_flight, reason = run.in_flight, EARLY_REWARDS.refused(Facts.of(trainer, run.session.selection))
    if in_flight is not None and in_flight.begins_rewards:
        places = in_flight.places if run.session.sampled is not None else {}
        for function in functions:
            function.placed(places)
        if places:
            yield
            return
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
            token_ids, prompt = completion.token_ids, self._prompts[row]
            parsed = completion_of(self._trainer, self._parse_response, prompt, request.prompt_ids, token_ids)
            self._add(row, parsed, token_ids)

    def ended(self, row: int, conversation: Conversation) -> None:
        """Take a row's conversation, which has ended or broken off; if it completes its group, call the reward
        functions' `begin` for the group."""
        self._add(row, conversation.messages, conversation.completion_ids)

    def _add(self, row: int, completion: Any, token_ids: list[int]) -> None:
        self._scored[row] = completion, token_ids
        group = self._group_of[row]
        if all(n in self._scored for n in group):
            scored = [self._scored[n] for n in group]
            rows, prompts = [self._rows[n] for n in group], [self._prompts[n] for n in group]
            arguments = arguments_of(self._trainer, rows, prompts, scored)
            if (environments := getattr(self._trainer, "environments", None)) is not None:
                arguments["environments"] = [environments[n] for n in group]
            for function in self._functions:
                function.begin(group, **copied(arguments))
