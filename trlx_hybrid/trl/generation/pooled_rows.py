"""The conversations and episodes of a pool of rows in flight, as the component that plays them gets them."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic

from ...contract.conversation import (
    ConversationPool,
    Dialogue,
    EpisodePool,
    Limits,
    PooledConversation,
    PooledEpisode,
    PooledT,
    RequestMaker,
)
from ...contract.types import Request
from ...interprocess.copies import copied
from .tool_calling import limits, observer, parser

if TYPE_CHECKING:
    from ...rollout.pool import Pool, PooledGroup
    from ...session import Session
    from ..stock import StockTrainer


class PooledRows(Generic[PooledT]):
    """The rows of one rank's pool.

    Args:
        trainer: the trainer.
        session: the live objects of the run.
        pool: the pool.
        in_flight: the number of rows that are played at a time.
        begin: begins the next group of the pool, and returns it; None where no further group may begin.
        goes_on: whether the engine works while the trainer trains.
    """

    def __init__(
        self,
        trainer: StockTrainer,
        session: Session,
        pool: Pool,
        in_flight: int,
        begin: Callable[[StockTrainer], PooledGroup | None],
        goes_on: bool,
    ) -> None:
        self._session, self._pool, self._in_flight, self._begin = session, pool, in_flight, begin
        self._goes_on = goes_on
        self._trainer: Callable[[], Any] = weakref.ref(trainer)  # the rollout component keeps this object
        self._version = session.weight_version

    def next_rollout(self) -> None:
        """Begin a rollout."""
        self._version = self._session.weight_version

    @property
    def in_flight(self) -> int:
        """The number of rows that are played at a time."""
        return self._in_flight

    @property
    def version(self) -> int:
        """The version of the weights that sample in this rollout."""
        return self._version

    @property
    def goes_on(self) -> bool:
        """True where the engine works while the trainer trains."""
        return self._goes_on

    def unfinished(self) -> list[PooledT]:
        """Return the rows that are not over, the oldest first."""
        return [row for group in self._pool.groups for row in group.rows if not row.over]

    def begin(self) -> Sequence[PooledT]:
        """Begin the rows of the next prompt, and return them; none where no further group may begin."""
        group = self._begin(self._trainer())
        return () if group is None else group.rows

    def batch(self) -> list[PooledT] | None:
        """Return the rows of the batch; None where it is not complete."""
        groups = self._pool.ready()
        return None if groups is None else [row for group in groups for row in group.rows]

    def _place(self, row: PooledT) -> tuple[PooledGroup, int]:
        """Return the group of a row, and its place in it."""
        return next((group, place) for group in self._pool.groups for place, own in enumerate(group.rows) if own is row)

    def _requests(self, row: PooledT, number: Callable[[int], int]) -> RequestMaker:
        """Return a function that makes the requests of a row, with seeds that do not depend on the weights.

        Args:
            number: returns the number of a request, for its seed, from the number of its turn.
        """
        (group, place), ranks, sampler = self._place(row), self._session.ranks, self._session.sampler
        of_run, completions = group.number * ranks.world + ranks.rank, len(group.rows)

        def request(
            index: int, turn: int, prompt_ids: list[int], images: list[Any] | None, max_tokens: int | None
        ) -> Request:
            return Request(
                prompt_ids=prompt_ids,
                seed=sampler.seed_in_flight(of_run, place, number(turn)),
                row=of_run * completions + place,
                turn=turn,
                images=images,
                max_tokens=max_tokens,
            )

        return request


class PooledConversations(PooledRows[PooledConversation], ConversationPool):
    """Conversations, whose dialogues and requests are made from TRL's tools, prompts and templates."""

    _observe: Callable[[Sequence[dict[str, Any]]], list[int]]

    def next_rollout(self) -> None:
        """Begin a rollout: dialogues are made with the templates of now."""
        super().next_rollout()
        self._observe = observer(self._trainer())

    @property
    def limits(self) -> Limits:
        """The limits at which TRL ends a conversation."""
        return limits(self._trainer(), self._session.live_engine.max_model_len)

    def dialogue(self, row: PooledConversation) -> Dialogue:
        """Return the dialogue of a conversation. All rows have the same tools, since there are no environments."""
        trainer, (group, _) = self._trainer(), self._place(row)
        tools = {tool.__name__: tool for tool in trainer.tools}
        asynchronous = {name: tool for name, tool in tools.items() if inspect.iscoroutinefunction(tool)}
        synchronous = {name: tool for name, tool in tools.items() if name not in asynchronous}
        return Dialogue(
            prompt_ids=list(group.prompt_ids),
            parse=parser(trainer, trainer._run.borrowed.parse_response, trainer.tools),
            decode=functools.partial(trainer._tokenizer.decode, skip_special_tokens=True),
            observe=self._observe,
            sync_tools=synchronous,
            async_tools=asynchronous,
            run_tools=synchronous,
            event_loop=getattr(trainer, "async_loop", None),
        )

    def request(self, row: PooledConversation) -> RequestMaker:
        """Return a function that makes the requests of a conversation: of turns, and of the rests of turns."""
        return self._requests(row, lambda turn: row.requests)


class PooledEpisodes(PooledRows[PooledEpisode], EpisodePool):
    """Episodes of a `rollout_func`, which begin with rows of the dataset.

    Args:
        of_dataset: returns the row of the dataset with a number.
    """

    def __init__(self, *pooled: Any, of_dataset: Callable[[int], dict[str, Any]]) -> None:
        super().__init__(*pooled)
        self._of_dataset = of_dataset

    def given(self, row: PooledEpisode) -> tuple[int, dict[str, Any]]:
        """Return an episode's number on this rank, and a copy of its row of the dataset."""
        group, place = self._place(row)
        return group.numbers[place], copied(self._of_dataset(group.index))

    def request(self, row: PooledEpisode) -> RequestMaker:
        """Return a function that makes the requests of an episode."""
        return self._requests(row, lambda turn: turn)
