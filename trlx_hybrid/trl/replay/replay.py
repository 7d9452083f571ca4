"""Recording and replay of a trainer's batches: they are written to a folder, and another run trains on them without
sampling.

All that a training step reads of a rollout comes from TRL's `_generate_and_score_completions`, except for the order of
its rows, which TRL draws from torch's generator afterwards. So a recording keeps what that method returns together with
the generator's state, and a replay returns both instead of sampling.

TRL asks for a new batch whenever its counter of micro-batches, `_step`, is a multiple of the micro-batches that one
rollout serves. The counter begins at 0 again in a resumed run, so a resumed run may ask at other places of the run. A
replay sets `_step` so that TRL asks where the recording has batches.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.trainer_utils import has_length

from ...config import RESUME_VARIABLE
from ...errors import ConfigError, listed
from ...policy.sharded import is_sharded
from ...rollout.seeding import preserved_generators
from ..checkpoint.data_order import micro_batches_of_a_rollout
from .recording import WAY_OUT, RecordedBatch, Recording, compared, facts_of, refuse_foreign

if TYPE_CHECKING:
    from ...session import Session
    from ..stock import StockTrainer

logger = logging.getLogger(__name__)


class _Position:
    """An object that says which batch of the run TRL asks for (the optimizer step, and the batch's number within it),
    and identifies this rank's weights by digests. Both are recorded with a batch. A replay finds the batch by its
    position in the run, and checks by the digests that its weights are the weights with which the batch was recorded.

    Args:
        session: the live objects of the run.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._evaluated: Counter[int] = Counter()  # batches of the evaluation after so many steps

    def next(self, trainer: StockTrainer, place: tuple[int, int]) -> tuple[str, int, int]:
        """Return which batch TRL asks for now, as (kind, step, number). The kind is "train" or "eval", the step is the
        number of the optimizer step. The number counts the micro-batches within the step or, in an evaluation, the
        batches of the evaluation.

        Args:
            place: in training, the optimizer step that runs and how many of its micro-batches are done; not used in an
                evaluation.
        """
        if trainer.model.training:
            return "train", *place
        step = trainer.state.global_step
        self._evaluated[step] += 1
        return "eval", step, self._evaluated[step] - 1

    def weights(self) -> list[Any]:
        """Return three facts that identify this rank's weights: whether they are shards, the digest of the trainable
        ones, and the digest of the frozen ones."""
        policy = self._session.policy
        policy.reshard()
        return [any(map(is_sharded, policy.module.parameters())), policy.digest(), self._frozen]

    @functools.cached_property
    def _frozen(self) -> int:
        policy = self._session.policy
        return policy.digest(p for p in policy.module.parameters() if not p.requires_grad)


class Recorder:
    """Writes each batch of a trainer to a recording (`HybridConfig.record`).

    Args:
        session: the live objects of the run.
        folder: the recording's folder.
    """

    def __init__(self, session: Session, folder: str) -> None:
        self._session, self._recording = session, Recording(folder, session.ranks.rank)
        self._position = _Position(session)
        self._begun = False
        self._last = (-1, 0)  # step and number of the last batch of training
        session.notes.append(f"record: each batch is kept in {folder}")

    def starts(self, trainer: StockTrainer, step: int) -> None:
        """Begin the recording, at the start of training or of an evaluation before it. Collective.

        Args:
            step: optimizer steps done.

        Raises:
            ConfigError: the folder already has a recording, which this run does not continue.
        """
        if self._begun:
            return
        self._begun, recording = True, self._recording
        facts, known = facts_of(trainer), recording.facts
        if self._session.ranks.any(known is not None) and step == 0 and os.environ.get(RESUME_VARIABLE) != "1":
            raise ConfigError(f"{recording.folder} has a recording already. Name another folder, or remove it.")
        if known is not None:
            refuse_foreign(recording.folder, compared(known, facts)[0])
        recording.begin(facts, step)

    def recorded(
        self,
        trainer: StockTrainer,
        place: tuple[int, int],
        roll_out: Callable[[], tuple[dict[str, Any], Tensor | None]],
    ) -> dict[str, Any]:
        """Sample the next batch, write it, and return it.

        Args:
            place: the optimizer step that runs, and the number of its micro-batches that are done.
            roll_out: a function that samples and scores the batch, and returns it with its rewards, (world * B,
                functions).
        """
        mode, step, number = self._position.next(trainer, place)
        if mode == "train":
            if (step, number) <= self._last:
                self._begun = False  # a second `train()`
            self._last = step, number
        metrics = trainer._metrics[mode]
        before = {name: list(values) for name, values in metrics.items()}
        self.starts(trainer, step)
        (values, rewards), device = roll_out(), self._session.policy.device
        self._recording.write(
            RecordedBatch(
                mode=mode,
                step=step,
                number=number,
                index=0,
                weight_version=self._session.weight_version,
                weights=self._position.weights(),
                tokens_seen=trainer.state.num_input_tokens_seen,
                metrics={name: found for name in metrics if (found := _added(before.get(name, []), metrics[name]))},
                values=values,
                rewards=rewards,
                generators=_generators(device),
                threads=torch.get_num_threads() if device.type == "cpu" else 0,
            )
        )
        return values


class Replay:
    """Gives a trainer the batches of a recording, instead of sampling them (`HybridConfig.replay`).

    Args:
        trainer: the trainer, with its session.
        recording: the recording that batches are read from. It is checked: it must be complete, and made with this
            run's model and settings. Collective.

    Attributes:
        facts: the facts of the recorded run: versions, model, settings and so on.

    Raises:
        ConfigError: the recording was made with another model or with settings that make it unusable, or is not
            complete.
    """

    def __init__(self, trainer: StockTrainer, recording: Recording) -> None:
        self._session, self._recording, self.facts = trainer.session, recording, recording.facts or {}
        self._position = _Position(self._session)
        self._said_apart = False  # a warning that the weights differ from the recorded run's was given
        ranks = self._session.ranks
        foreign, other = compared(self.facts, facts_of(trainer, self.facts))
        refuse_foreign(recording.folder, foreign)
        recording.rank = ranks.rank
        problems = ranks.gather(recording.inspect())
        ends = ranks.gather(recording.places[-1:])
        if not any(problems) and any(end != ends[0] for end in ends):
            last = listed([f"{step} of rank {rank}" for rank, ((step, _),) in enumerate(ends)], 8)
            problems.append(f"the ranks do not have the same batches; their last are of step {last}. {WAY_OUT}")
        for problem in filter(None, problems):
            raise ConfigError(f"The recording in {recording.folder} is not whole: {problem}")
        trainer.log_completions = False  # their texts are not recorded
        differing = f"; differing: {listed(other, 8)}" if other else ""
        self._session.notes.append(f"replay: {len(recording.places)} batches of {recording.folder}{differing}")

    def starts(self, trainer: StockTrainer, step: int) -> None:
        """Check, at the start of training, that the recording has batches from this step on.

        Args:
            step: optimizer steps done.

        Raises:
            ConfigError: the recording has no batches from this step on.
        """
        steps = self._steps(trainer)
        if steps <= step < trainer.state.max_steps:
            raise ConfigError(
                f"The recording in {self._recording.folder} has batches for {steps} steps, and the checkpoint is of "
                f"step {step}: nothing is left to replay."
            )

    def ends(self, trainer: StockTrainer) -> None:
        """Stop training after the optimizer step that runs now if the recording has no batches for further ones."""
        steps = trainer.state.global_step + 1
        if trainer.accelerator.sync_gradients and self._steps(trainer) <= steps < trainer.state.max_steps:
            trainer.control.should_training_stop = True
            if self._session.ranks.rank == 0:
                ended = f"after {steps} of {trainer.state.max_steps} steps"
                print(f"trlx_hybrid: the recording ends {ended}, and training with it", file=sys.stderr, flush=True)

    def batch(self, trainer: StockTrainer, place: tuple[int, int]) -> dict[str, Any]:
        """Return the batch that the recording has for the current step, on this run's device, and restore metrics and
        random states as they were after it. Collective.

        Args:
            place: the optimizer step that runs, and the number of its micro-batches that are done.
        """
        mode, *here = self._position.next(trainer, place)
        step, number = self._recording.latest(*here) if mode == "train" else here
        batch, device = self._recording.read(mode, step, number), self._session.policy.device
        self._compare_weights(batch, first=step == self._recording.places[0][0])
        metrics = trainer._metrics[mode]
        for name, (replaces, values) in batch.metrics.items() if [step, number] == here else ():
            metrics[name] = values if replaces else metrics[name] + values
        trainer.state.num_input_tokens_seen = batch.tokens_seen
        _restore(batch.generators, device)
        if batch.threads and device.type == "cpu":
            torch.set_num_threads(batch.threads)
        return {name: v.to(device) if isinstance(v, Tensor) else v for name, v in batch.values.items()}

    def in_place(self, trainer: StockTrainer, place: tuple[int, int]) -> AbstractContextManager[None]:
        """Set TRL's counter `_step`, by which TRL decides when to ask for a batch, so that it asks where the recording
        has its batches. Return the context in which `_prepare_inputs` must run then: where a run resumes in the middle
        of a batch, it preserves the random number generators.

        Args:
            place: the optimizer step that runs, and the number of its micro-batches that are done.
        """
        if not trainer.model.training:
            return nullcontext()
        taken = self._before(trainer, *place) - self._before(trainer, *self._recording.latest(*place))
        if trainer._step % micro_batches_of_a_rollout(trainer) != taken:
            trainer._step = taken
        within = taken and trainer._buffered_inputs is None  # resumed in the middle of a batch
        return preserved_generators() if within else nullcontext()

    def _before(self, trainer: StockTrainer, step: int, micro_batch: int) -> int:
        """Return how many micro-batches the run trains on before the given micro-batch of a step."""
        length, steps = _epoch(trainer)
        epochs, rest = divmod(step, steps)
        return epochs * length + rest * int(trainer.args.gradient_accumulation_steps) + micro_batch

    def _steps(self, trainer: StockTrainer) -> int:
        """Return the number of optimizer steps for which the recording has all batches."""
        length, steps = _epoch(trainer)
        last = self._before(trainer, *self._recording.places[-1]) + micro_batches_of_a_rollout(trainer)
        epochs, rest = divmod(last, length)
        return epochs * steps + rest // int(trainer.args.gradient_accumulation_steps)

    def _compare_weights(self, batch: RecordedBatch, first: bool) -> None:
        """Compare this rank's weights with those that sampled the recorded batch. Collective. A later difference is
        only warned of, once.

        Args:
            batch: the recorded batch.
            first: whether it is the recording's first step.

        Raises:
            ConfigError: the weights differ at the first step.
        """
        here = self._position.weights()
        apart = here[0] == batch.weights[0] and here != batch.weights  # digests of whole and sharded weights differ
        if self._said_apart or not self._session.ranks.any(apart):
            return
        where = f"{self._recording.folder} at step {batch.step}"
        if first:
            raise ConfigError(
                f"The weights are not those of the recording in {where}: another model, another seed of its adapters, "
                "or another checkpoint. Start from what the recorded run started from."
            )
        self._said_apart = True
        if self._session.ranks.rank == 0:
            logger.warning(
                "The weights are no longer those of the recording in %s. On another device or with other settings that "
                "is to be expected; losses from here on are not the recorded ones.",
                where,
            )


def _epoch(trainer: StockTrainer) -> tuple[int, int]:
    """Return the numbers of micro-batches and of optimizer steps in an epoch. The last step may have fewer
    micro-batches than the others."""
    loader, accumulated = trainer.callback_handler.train_dataloader, trainer.args.gradient_accumulation_steps
    length = len(loader) if has_length(loader) else trainer.state.max_steps * accumulated
    return length, -(-length // accumulated)


def _added(before: list[float], after: list[float]) -> list[Any]:
    """Return how a metric's list changed between two moments, for a recording: `[replaced, values]`. If `after` begins
    with `before`, `replaced` is False and the values are those appended since; otherwise `replaced` is True and the
    values are the whole of `after`. An empty list means no change."""
    if after[: len(before)] != before:
        return [True, list(after)]
    return [False, after[len(before) :]] if len(after) > len(before) else []


def _generators(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def _restore(states: dict[str, Tensor], device: torch.device) -> None:
    """Set torch's generators to recorded states, for the CPU and for this run's device if it is of a recorded type."""
    torch.set_rng_state(states["cpu"])
    if device.type in states and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[device.type], device)
