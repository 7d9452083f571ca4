"""The trainer's state beside TRL's own: of a run, of an optimizer step (Window), of a generation (Batch), and of a
micro-batch.

A run has one `Window` and one `Batch` at a time, and replaces them. What outlives both, such as old log-probs that are
still to be computed, lies in the run's state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..episodes.unparsed import UnparsedTurns
from .checkpoint.checkpoints import Checkpoints
from .checkpoint.data_order import DataOrder
from .metrics.step_metrics import SessionMetrics, StepMetrics
from .replay.replay import Recorder, Replay
from .scoring.deferred import DeferredLogProbs
from .scoring.micro_batches import JoinedPass

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor

    from ..contract.conversation import Conversation
    from ..contract.protocols import Groups, Scores
    from ..contract.support import Support
    from ..session import Session
    from .generation.in_flight import InFlight
    from .stock import StockTrainer

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Window:
    """An optimizer step, whose gradients add up over its micro-batches.

    Attributes:
        step: number of the step; -1 before the first.
        done: number of its micro-batches that are done.
        joins: how many micro-batches the scoring component puts into the next pass, where it was asked before; else 0.
        joined: the forward pass that several micro-batches share, until all of them have taken their scores; else None.
        to_measure: a micro-batch whose first row is to be scored once more alone, which shows how far log-probs depend
            on the other rows; done once no shared forward pass is open. None where nothing is to be measured.
        rows: the micro-batch whose loss was begun last; None where its training step has not begun it.
    """

    step: int = -1
    done: int = 0
    joins: int = 0
    joined: JoinedPass | None = None
    to_measure: dict[str, Any] | None = None
    rows: dict[str, Any] | None = None

    @property
    def place(self) -> tuple[int, int]:
        """The place of the next micro-batch in the run: the step, and the micro-batch's number in it."""
        return self.step, self.done


@dataclass(slots=True, eq=False)
class Batch:
    """A batch of rows that are sampled together, from the request for them until they are scored.

    Attributes:
        to_be_scored: whether TRL is going to score the rows, for training or evaluation; False where a script only
            samples them, and once they are scored.
        in_rounds: whether the rows are sampled in several rounds, of which one is running.
        row_numbers: for each group (the completions of one prompt) of all ranks, the number of its prompt's row in the
            dataset; None where the order is TRL's.
        generated: the result of TRL's `_generate`; None before.
        sampled: whether the rows were already sampled, into `generated`, when TRL calls `_generate`.
        conversations: each row's conversation with tools; None where TRL runs the tools.
        truncated: for each row, whether its completion was cut at its length limit; None where that is not known.
        masked: (B,) bool, the truncated rows, where this package excludes them from the loss because TRL's rule would
            exclude others; else None.
        made_mask: whether the rows had no loss mask, and got one for this exclusion.
        known_rewards: (world * B, functions) rewards that were computed before TRL asks for them; else None.
        rewards: (world * B, functions) rewards that are trained on, NaN where a function returned None.
        groups: the groups with these rewards, where an algorithm observes or replaces rewards or advantages; else None.
        supports: for each row, the ids that each of its tokens was sampled from; None where all ids count.
        kept: `supports`, and where branches of rows begin, as tensors by name; None until they are first needed.
        skips_old: whether TRL's next scoring call is for the old log-probs, and is skipped because the losses will
            compute them.
        scores_old: whether TRL's next scoring call is for the old log-probs, and uses the experts that the engine chose
            in the rollout (router replay).
        staleness: for each token of this rank's rows, the number of optimizer steps between its sampling and the batch;
            None where the batch was sampled in one rollout.
    """

    to_be_scored: bool = False
    in_rounds: bool = False
    row_numbers: Sequence[int | None] | None = None
    generated: Any = None
    known: bool = False
    conversations: list[Conversation] | None = None
    truncated: list[bool] | None = None
    masked: Tensor | None = None
    made_mask: bool = False
    known_rewards: Tensor | None = None
    rewards: Tensor | None = None
    groups: Groups | None = None
    supports: list[Support] | None = None
    kept: dict[str, Tensor] | None = None
    skips_old: bool = False
    scores_old: bool = False
    staleness: list[list[int]] | None = None


@dataclass(slots=True, eq=False)
class MicroBatch:
    """Rows whose loss is being computed.

    Attributes:
        inputs: the rows as TRL trains on them, by name.
        scores: the rows' log-probs and entropies with their autograd graph, where algorithms add terms to the loss;
            else None.
        logs_again: whether the loss is computed a second time, from stored scores, for TRL's metrics.
        alone: whether it is a single row that is scored again by itself, to be compared with its log-probs in the
            micro-batch; no loss is computed then.
    """

    inputs: dict[str, Any]
    scores: Scores | None = None
    logs_again: bool = False
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Borrowed:
    """Functions and a module of TRL's that this package uses.

    Attributes:
        parse_response: parses a model's turn into a message.
        without_checkpointing: returns a context without gradient checkpointing, as TRL uses it for forward passes
            without gradients.
        head: the module in which TRL's fused head, which computes log-probs, looks up its autograd function by name.
    """

    parse_response: Callable[..., dict[str, Any]]
    without_checkpointing: Callable[[StockTrainer], AbstractContextManager[None]]
    head: ModuleType


@dataclass(slots=True, eq=False, kw_only=True)
class RunState:
    """The state of a run of a trainer.

    Attributes:
        session: the live objects of the run.
        checkpoints: saves checkpoints and chooses where a run resumes.
        order: the run's position in its data, saved in each checkpoint.
        metrics: adds the numbers in `session.metrics` to TRL's log.
        recorder: writes each batch to a recording; None where none is written.
        replay: reads the batches from a recording; None where they are sampled.
        step_metrics: measures the time of a step; None where nothing is measured.
        in_flight: the rows that stay in flight between batches; None where each batch is sampled to its end.
        left_out_by: the sampling setting that leaves ids out, such as `top_k`, where log-probs are computed over the
            remaining ids only; else None.
        borrowed: TRL's functions that this package calls, and the module of its LM head, looked up once.
        deferred: the old log-probs that the losses' first forward passes compute.
        window, batch: the current optimizer step, and the rows that were sampled last.
        micro_batch: the rows whose loss is being computed; None outside of a loss.
        generating: whether TRL's `_generate` runs, in which a user's rollout may have rows scored that are in no batch.
        sampled_at: the weight version that sampled a rollout, until its first loss; else None.
        terms_added: whether algorithms have added their terms to the loss of the current training step.
        unparsed: a counter of the assistant turns that TRL's parser could not parse.
        said: keys of the warnings that were given, each once per run.
    """

    session: Session
    checkpoints: Checkpoints
    order: DataOrder
    metrics: SessionMetrics
    recorder: Recorder | None
    replay: Replay | None
    step_metrics: StepMetrics | None
    in_flight: InFlight | None
    left_out_by: str | None
    borrowed: Borrowed
    deferred: DeferredLogProbs = field(default_factory=DeferredLogProbs)
    window: Window = field(default_factory=Window)
    batch: Batch = field(default_factory=Batch)
    micro_batch: MicroBatch | None = None
    generating: bool = False
    sampled_at: int | None = None
    terms_added: bool = False
    unparsed: UnparsedTurns = field(default_factory=UnparsedTurns)
    said: set[str] = field(default_factory=set)

    def part(self, name: str) -> AbstractContextManager[None]:
        """Return a context whose time is measured as a part of the optimizer step, if steps are measured.

        Args:
            name: "rollout" or "scoring".
        """
        return nullcontext() if self.step_metrics is None else self.step_metrics.part(name)

    @contextmanager
    def scored_batch(self) -> Iterator[Batch]:
        """Return a context for TRL's `_generate_and_score_completions`, which samples and scores a batch. It yields the
        new `Batch`, which is filled inside."""
        batch = self.batch = Batch(to_be_scored=True)
        try:
            yield batch
        finally:
            batch.to_be_scored = batch.skips_old = batch.scores_old = False

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Return a context for TRL's `_generate`, within which `generating` is True."""
        self.generating = True
        try:
            yield
        finally:
            self.generating = False

    @contextmanager
    def scoring_alone(self, row: dict[str, Any]) -> Iterator[None]:
        """Return a context in which one row is scored again by itself, to compare the result with its log-probs within
        its micro-batch. Inside, `micro_batch` is this row.

        Args:
            row: the row as a batch of size 1, by TRL's names.
        """
        outer, self.micro_batch = self.micro_batch, MicroBatch(row, alone=True)
        try:
            yield
        finally:
            self.micro_batch = outer

    def say_apart(self, reason: str) -> None:
        """Warn, once per run and reason, that old log-probs take a forward pass of their own.

        Args:
            reason: why they do, as text.
        """
        self.say_once(reason, "Old log-probs take a forward pass of their own: %s.", reason)

    def say_once(self, key: str, text: str, *values: object) -> None:
        """Warn on rank 0, once per run and key.

        Args:
            key: a name for the warning.
            text: the warning, with placeholders of `logging` for `values`.
        """
        if key not in self.said and self.session.ranks.rank == 0:
            logger.warning(text, *values)
        self.said.add(key)
