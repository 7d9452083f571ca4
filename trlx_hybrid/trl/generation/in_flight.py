"""Rows that stay in flight over several optimizer steps: batches are taken from a pool of groups (rollout/pool.py).

TRL's data loader yields one batch of prompts at a time, and a pool begins groups of later batches. So their prompts are
read ahead (prompt_order.py). The batch that TRL gets then has other rows than its loader yielded, as with dynamic
sampling; over the run, both have the same rows, in the same order of beginning.
"""

from __future__ import annotations

import itertools
import logging
import math
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...blame import asked, blaming, fault
from ...contract.conversation import PooledConversation, PooledEpisode, PooledRow
from ...contract.types import Request
from ...errors import ConfigError
from ...interprocess.copies import copied
from ...plugins.builtin import SingleTurnOptions
from ...rollout.pool import Pool, PooledGroup, PoolRollout
from ...rollout.sampler import refuse_empty, refuse_long
from ...rollout.seeding import preserved_generators
from ..arguments import rows_of_a_batch
from ..checkpoint.data_order import micro_batches_of_a_rollout, prompts_digest, read_file, write_file
from ..refusals import IN_FLIGHT, Facts
from .pooled_rewards import PooledRewards
from .pooled_rows import PooledConversations, PooledEpisodes
from .prompt_order import IndexedOrder, PromptOrder, StreamedOrder
from .reward_arguments import early_functions
from .tool_calling import refuse_text

if TYPE_CHECKING:
    from ...session import Session
    from ..stock import Rows, StockTrainer

logger = logging.getLogger(__name__)

BY_TOKEN_RATIO = "token_truncate"
"""The mode of TRL's importance-sampling correction in which each token has its own ratio, cut at an upper bound."""

TOOLS, EPISODES, ITERABLE = "tools", "a rollout_func", "an iterable train_dataset"
"""Names of settings. Older checkpoints do not have the latter two, which were False then."""

KINDS: dict[str | None, type[PooledRow] | type[PooledConversation] | type[PooledEpisode]] = {
    None: PooledRow,
    TOOLS: PooledConversation,
    EPISODES: PooledEpisode,
}
"""The classes of rows, by what answers the model."""

FILE = "trlx_hybrid_in_flight_{rank}.pt"
"""The file in a checkpoint with one rank's pool."""


class InFlight:
    """The rows in flight of one rank, from which a trainer takes its batches.

    Args:
        session: the live objects of the run.
        options: `max_staleness`, above 0, and `in_flight`.
        rows: the number of rows that a batch has on this rank.
        completions: the number of completions of a group.
        steps: the number of optimizer steps that are trained on each batch.
        answers: what answers the model: TOOLS, whose conversations the rollout component plays; EPISODES, which a
            `rollout_func` plays; or None.
        streamed: whether the training dataset is iterable.

    Attributes:
        begins_rewards: whether reward functions begin with each group that is complete, before its batch is known.
        places: the places of rows in the batch that was taken last, by their numbers in the run.
    """

    def __init__(
        self,
        session: Session,
        options: SingleTurnOptions,
        rows: int,
        completions: int,
        steps: int,
        answers: str | None = None,
        streamed: bool = False,
    ) -> None:
        self._session, self._completions, self._steps, self._answers = session, completions, steps, answers
        self._in_flight = options.rows_at_a_time(rows)
        self._depth = (options.max_staleness - steps + 1) // steps
        self._size = rows // completions
        self._settings = {
            "max_staleness": options.max_staleness,
            "rows of a batch on each rank": rows,
            "num_generations": completions,
            "ranks": session.ranks.world,
            TOOLS: answers == TOOLS,
            EPISODES: answers == EPISODES,
            ITERABLE: streamed,
        }
        engine = session.selection.engine
        self._goes_on = engine is not None and engine.component.remote  # while the trainer trains
        self._rollout: tuple[PoolRollout, ExitStack] | None = None  # on such engines
        self._columns: list[str] = []
        self.begins_rewards = self._compares = False
        self._played_rows: PooledConversations | PooledEpisodes | None = None
        self.start(None)

    @property
    def note(self) -> str:
        """A line to print when the run starts."""
        steps = self._settings["max_staleness"]
        return (
            f"rows in flight: for up to {steps} optimizer steps, {self._in_flight} rows at a time on each rank"
            f"{', also while the trainer trains' if self._goes_on else ''}"
        )

    def start(self, checkpoint: str | None) -> None:
        """Begin a training run with an empty pool, or with that of a checkpoint. Called before the engine starts.

        Raises:
            ConfigError: the checkpoint's pool is that of a run with other settings, or this rank's part of it is lost.
        """
        self._end_rollout(keep=False)
        self._pool = Pool(self._size, self._depth, KINDS[self._answers])
        self._played_rows = None
        self._order: PromptOrder | None = None
        self.places: dict[int, int] = {}
        self._resumed = None if checkpoint is None else self._read(Path(checkpoint))

    def _read(self, checkpoint: Path) -> dict[str, Any] | None:
        """Return what `save` has written into a checkpoint on this rank; None where the run had no rows in flight. The
        settings are those of rank 0's file where this rank has none, so that all ranks find the same fault."""
        own, first = read_file(self._file(checkpoint)), read_file(checkpoint / FILE.format(rank=0))
        found: dict[str, Any] | None = own or first
        if found is None:
            return None
        for name, here in self._settings.items():
            then = {EPISODES: False, ITERABLE: False, **found["settings"]}[name]
            if then != here:
                raise ConfigError(
                    f"{checkpoint} has rows in flight of a run with {name}={then}, and this run has "
                    f"{here}. Resume with {name}={then}, or leave max_staleness out of "
                    "rollout_options: then these rows are dropped, and a later checkpoint can be resumed with any."
                )
        if own is None:
            raise ConfigError(
                f"{checkpoint} has the rows in flight of rank 0, and {self._file(checkpoint).name} is missing: it was "
                "lost, or is on another node's disk. Resume from another checkpoint, or from a folder that all share."
            )
        return found

    def begin_epoch(self, trainer: StockTrainer, epoch: int, loader: Any, trained: int) -> None:
        """Begin to read ahead, if this is the first epoch of a training run, or go on where the checkpoint was written.

        Args:
            epoch: number of the epoch.
            loader: the training data loader, at the beginning of the epoch.
            trained: the number of the epoch's micro-batches that are not read again.
        """
        if self._order is not None:
            return
        repeats, completions = micro_batches_of_a_rollout(trainer), self._completions
        if self._settings[ITERABLE]:
            self._order = StreamedOrder(loader, self._size * completions, completions, repeats, epoch)
        else:
            self._order = IndexedOrder(trainer.train_dataset, loader, completions, repeats)
        functions = early_functions(trainer)
        self.begins_rewards = (
            self._answers != EPISODES and bool(functions) and all(hasattr(f, "placed") for f in functions)
        )
        if self.begins_rewards:
            self._pool.completed = PooledRewards(trainer, self._of_dataset).begin
        state, self._resumed = self._resumed, None
        self._compares = bool(self._settings[ITERABLE]) and state is None and not trained
        if state is None:
            self._order.skip(math.ceil(trained / repeats) * self._size)  # the rest of the last batch is kept
            return
        self._pool.load_state(state["pool"])
        self._order.load_state(state["order"], {group.index for group in self._pool.groups})
        for index, prompt in state.get("prompts", {}).items():
            if prompts_digest([self._order.row(index)["prompt"]]) != prompt:
                raise ConfigError(
                    "The iterable training dataset yields other rows than in the run that wrote the checkpoint: rows "
                    "in flight would get the columns of others. Give it the same rows in the same order, or leave "
                    "max_staleness out of rollout_options: then these rows are dropped."
                )

    def save(self, folder: Path) -> None:
        """Write this rank's pool into a checkpoint's folder. Engines that sample while the trainer trains stop, and go
        on with the next batch."""
        if self._order is None:
            return
        self._end_rollout()
        folder.mkdir(parents=True, exist_ok=True)
        state: dict[str, Any] = {"pool": self._pool.state(), "order": self._order.state(), "settings": self._settings}
        if self._settings[ITERABLE]:  # its rows are read again
            indices = {group.index for group in self._pool.groups}
            state["prompts"] = {index: prompts_digest([self._order.row(index)["prompt"]]) for index in indices}
        write_file(state, self._file(folder))

    def _file(self, folder: Path) -> Path:
        return folder / FILE.format(rank=self._session.ranks.rank)

    # --- a batch ----------------------------------------------------------------------------------------------------

    def batch(self, trainer: StockTrainer, rows: Rows) -> tuple[Rows, list[list[int]]]:
        """Sample until a batch's groups are complete. The completions or conversations are stored in the session, which
        hands them to TRL when TRL asks for them. Collective.

        Args:
            rows: the rows that the data loader has yielded for the batch. Other rows get their columns.

        Returns:
            The batch's dataset rows, one for each completion; and for each of its tokens, the number of optimizer steps
            between its sampling and the batch.
        """
        session, self._columns = self._session, list(rows[0])
        for function in early_functions(trainer) if self.begins_rewards else ():
            function.prepare()
        with session.rollout_phase(True):
            chosen = self._completed(trainer) if self._answers is None else self._played(trainer)
        self._compare_readers(rows)
        pooled, version = [row for group in chosen for row in group.rows], session.weight_version
        if self._answers is None:
            session.sampled = [row.completion() for row in pooled]
            versions = [row.versions for row in pooled]
            sampled = [[1] * row.tokens for row in pooled]
        else:
            session.sampled = pooled if self._answers == EPISODES else [row.conversation for row in pooled]
            versions = [row.conversation.weight_versions for row in pooled]
            sampled = [row.conversation.loss_mask for row in pooled]
        numbers = [number for group in chosen for number in group.numbers]
        self.places = {number: place for place, number in enumerate(numbers)}
        staleness = [[version - of_token for of_token in of_row] for of_row in versions]
        self._log(
            [age for ages, mask in zip(staleness, sampled, strict=True) for age in itertools.compress(ages, mask)]
        )
        of_dataset = [copied(self._of_dataset(group.index)) for group in chosen for _ in group.rows]
        assert self._order is not None
        self._order.forget([group.index for group in chosen])
        return of_dataset, staleness

    def _compare_readers(self, rows: Rows) -> None:
        """Compare the first batch of an iterable dataset, as the loader yields it, with the rows that were read ahead.

        Raises:
            ConfigError: they differ, since the dataset's readers share an iterator, a queue, or unseeded noise.
        """
        order, compares, self._compares = self._order, self._compares, False
        if not compares or order is None:
            return
        read = [order.row(number)["prompt"] for number in range(self._size)]
        if [row["prompt"] for row in rows[:: self._completions]] != read:
            raise ConfigError(
                "The iterable training dataset yields other rows to a second reader, by which rows in flight read "
                "prompts ahead (rollout_options max_staleness): its readers share an iterator or a queue, or it draws "
                "unseeded numbers. Let its generator begin anew each time, or load it as a `datasets.Dataset`."
            )

    def _of_dataset(self, number: int) -> dict[str, Any]:
        """Return the columns that TRL's loader yields of a row of the dataset."""
        assert self._order is not None
        return {name: value for name, value in self._order.row(number).items() if name in self._columns}

    def _completed(self, trainer: StockTrainer) -> list[PooledGroup]:
        """Sample completions until the groups of a batch are complete, and return these. An engine of the trainer's own
        GPUs is interrupted then. One on other GPUs goes on until the weights change."""
        session = self._session
        assert session.selection.engine is not None
        component = session.selection.engine.component
        self._end_rollout()
        with preserved_generators(), blaming(component, "stream"), ExitStack() as opened:
            rollout = PoolRollout(
                self._pool,
                opened.enter_context(session.live_engine.stream(session.sampling)),
                in_flight=self._in_flight,
                version=session.weight_version,
                begin=lambda: self._begin(trainer),
                request=self._request,
            )
            chosen = rollout.run()
            goes_on = self._goes_on and rollout.go_on()
            self._rollout = rollout, opened.pop_all()
        if not goes_on:
            self._end_rollout()
        if rollout.steps:  # else the batch was complete before
            session.metrics["hybrid/in_flight/occupancy"] = rollout.sampled / rollout.steps / self._in_flight
            session.metrics["hybrid/in_flight/alone"] = rollout.alone / rollout.steps
        return chosen

    def _end_rollout(self, keep: bool = True) -> None:
        """Interrupt the rows that are being sampled, if any, and close the engine's stream.

        Args:
            keep: whether the pool gets what they have sampled.
        """
        if keep and self._played_rows is not None and self._goes_on:
            component = self._session.rollout
            if hasattr(component, "interrupt"):
                with preserved_generators():
                    asked(self._session.sampler.source, component, "interrupt")
        if self._rollout is None:
            return
        (rollout, opened), self._rollout = self._rollout, None
        assert self._session.selection.engine is not None
        with preserved_generators(), blaming(self._session.selection.engine.component, "stream"), opened:
            if keep:
                rollout.interrupt()

    def _played(self, trainer: StockTrainer) -> list[PooledGroup]:
        """Let the rollout component play conversations, or TRL's `rollout_func` episodes, until the groups of a batch
        are complete; return these."""
        session = self._session
        self._end_rollout()
        if self._played_rows is None:
            pooled = trainer, session, self._pool, self._in_flight, self._begin, self._goes_on
            episodes = self._answers == EPISODES
            self._played_rows = (
                PooledEpisodes(*pooled, of_dataset=self._of_dataset) if episodes else PooledConversations(*pooled)
            )
        rows = self._played_rows
        rows.next_rollout()
        if isinstance(rows, PooledEpisodes):
            trainer.rollout_func.play(trainer, rows)
        else:
            assert session.rollout is not None
            asked(session.sampler.source, session.rollout, "play", session, rows)
        chosen = self._pool.ready()
        if chosen is None:
            raise fault(session.sampler.source, "play", "no complete batch", "one")
        self._pool.take(chosen)
        return chosen

    def _begin(self, trainer: StockTrainer) -> PooledGroup | None:
        """Begin the group of the next prompt; return None where no further group may begin."""
        left = math.ceil((trainer.state.max_steps - trainer.state.global_step) / self._steps)
        if self._pool.room(left) <= 0:
            return None
        assert self._order is not None
        index = next(self._order)
        if self._answers == EPISODES:  # their prompts are known once they have begun
            return self._pool.begin(index, [], self._completions)
        prompts = [copied(self._order.row(index)["prompt"])]
        if self._answers == TOOLS:
            refuse_text(prompts)
        prompt_ids = trainer._tokenize_prompts(prompts)[0]
        refuse_empty(prompt_ids)
        refuse_long(prompt_ids, self._session.live_engine.max_model_len)
        return self._pool.begin(index, list(prompt_ids[0]), self._completions)

    def _request(self, group: PooledGroup, place: int) -> Request:
        """Return the request for the rest of one completion of a group."""
        row, ranks, sampler = group.rows[place], self._session.ranks, self._session.sampler
        number = group.number * ranks.world + ranks.rank
        return Request(
            prompt_ids=[*group.prompt_ids, *row.token_ids],
            seed=sampler.seed_in_flight(number, place, row.rollouts),
            row=number * self._completions + place,
            max_tokens=sampler.sampling.max_tokens - len(row.token_ids),
        )

    def _log(self, ages: list[int]) -> None:
        """Add to the rollout's metrics how much is in flight, and how old the batch's sampled tokens are.

        Args:
            ages: for each of these tokens, the number of optimizer steps between its sampling and the batch.
        """
        unfinished = [row for group in self._pool.groups for row in group.rows if not row.over]
        self._session.metrics |= {
            "hybrid/in_flight/rows": float(len(unfinished)),
            "hybrid/in_flight/tokens": float(sum(row.tokens for row in unfinished)),
            "hybrid/staleness/mean": sum(ages) / max(1, len(ages)),
            "hybrid/staleness/max": float(max(ages, default=0)),
        }


def in_flight_of(trainer: StockTrainer, session: Session) -> InFlight | None:
    """Return the rows in flight of a trainer's run; None where each batch is sampled to its end (`max_staleness` of 0).

    Raises:
        ConfigError: the run cannot have rows in flight.
    """
    choice = session.selection.rollout
    options = None if choice is None else choice.options
    if not isinstance(options, SingleTurnOptions) or not options.max_staleness:
        return None
    facts = Facts.of(trainer, session.selection)
    reason = IN_FLIGHT.refused(facts)
    if reason is not None:
        raise ConfigError(
            f"HybridConfig.rollout_options max_staleness={options.max_staleness} cannot serve this run: {reason}. "
            f"{IN_FLIGHT.way_out}"
        )
    args, custom = trainer.args, getattr(trainer, "rollout_func", None)
    steps = args.steps_per_generation // args.gradient_accumulation_steps * trainer.num_iterations
    if options.max_staleness < 2 * steps - 1:
        raise ConfigError(
            f"HybridConfig.rollout_options max_staleness={options.max_staleness}: each batch is trained for {steps} "
            f"optimizer steps, so a row that stays in flight is used up to {2 * steps - 1} steps after it began. Give "
            f"max_staleness={2 * steps - 1} or more, or 0."
        )
    return InFlight(
        session,
        options,
        rows_of_a_batch(args),
        trainer.num_generations,
        steps,
        answers=TOOLS if getattr(trainer, "tools", None) else EPISODES if custom else None,
        streamed=facts.streamed,
    )


def stale(staleness: list[list[int]], like: Tensor) -> Tensor:
    """Return, for each token of a batch, how many optimizer steps were done between its sampling and the batch.

    Args:
        staleness: these numbers for each row's tokens.
        like: (B, T), a tensor of the batch.

    Returns:
        (B, T) int64, 0 in the padding.
    """
    found = torch.zeros(like.shape, dtype=torch.int64)
    for row, ages in enumerate(staleness):
        found[row, : len(ages)] = torch.tensor(ages[: found.shape[1]])
    return found.to(like.device)


def start(in_flight: InFlight | None, checkpoint: str | None) -> None:
    """Begin a training run with no rows in flight, or with those of a checkpoint. Warn where the checkpoint has some,
    and the run keeps none.

    Args:
        in_flight: the rows in flight of the run; None where it keeps none.
        checkpoint: the folder of the checkpoint that the run resumes from; None for a fresh start.
    """
    if in_flight is not None:
        in_flight.start(checkpoint)
    elif checkpoint is not None and Path(checkpoint, FILE.format(rank=0)).exists():
        logger.warning(
            "%s has rows in flight, and this run keeps none (rollout_options max_staleness), so their prompts are left "
            "out, and prompts that were trained ahead of them come again.",
            checkpoint,
        )
