"""Recording and replay of a trainer's batches: they are written to a folder, and another run trains on them without
sampling. Also `rollout_only`, which samples without training.

All that a training step reads of a rollout comes from TRL's `_generate_and_score_completions`, except for the order of
its rows, which TRL draws from torch's generator afterwards. So a recording keeps what that method returns together with
the generator's state, and a replay returns both instead of sampling. TRL decides by its `_step` when to ask for a
batch, and `_step` counts from 0 again in a resumed run. A replay sets `_step` to where the recording has its batches.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.trainer_utils import has_length

from ..config import RESUME_VARIABLE
from ..errors import ConfigError, listed
from ..policy.sharded import is_sharded
from ..rollout.seeding import preserved_generators
from .recording import WAY_OUT, RecordedBatch, Recording, compared, facts_of, refuse_foreign
from .scoring import NUMBER, Deferred

if TYPE_CHECKING:
    from ..session import Session

logger = logging.getLogger(__name__)


class Replayed:
    """A mixin between `Scored` and `Checkpointing` that writes each batch to a recording (`HybridConfig.record`), or
    reads them from one instead of sampling (`HybridConfig.replay`)."""

    session: Session

    _recording: Recording | None = None  # the recording that batches are written to
    _replay: Recording | None = None  # the recording that batches are read from
    _begun = False  # whether this run has begun its recording
    _last = (-1, 0)  # step and number of the last batch of training that was recorded
    _said_apart = False  # a warning that the weights differ from the recorded run's was given

    def _attach_recording(self) -> None:
        """Open the recording to be written or replayed, once the trainer is built. Check that a recording to be
        replayed was made by this run's model and settings, and is complete. Collective.

        Raises:
            ConfigError: it was not, or is not.
        """
        trainer: Any = self
        session, config = self.session, self.session.config
        if config.rollout_only:
            session.notes.append("rollout_only: batches are sampled and scored, and nothing is trained")
        if config.record is not None:
            self._recording = Recording(config.record, session.ranks.rank)
            session.notes.append(f"record: each batch is kept in {config.record}")
        if self._replay is not None:
            replay = self._replay
            foreign, other = compared(replay.facts or {}, facts_of(trainer))
            refuse_foreign(replay.folder, foreign)
            replay.rank = session.ranks.rank
            problems = session.ranks.gather(replay.inspect())
            ends = session.ranks.gather(replay.places[-1:])
            if not any(problems) and any(end != ends[0] for end in ends):
                last = listed([f"{step} of rank {rank}" for rank, ((step, _),) in enumerate(ends)], 8)
                problems.append(f"the ranks do not have the same batches; their last are of step {last}. {WAY_OUT}")
            for problem in filter(None, problems):
                raise ConfigError(f"The recording in {replay.folder} is not whole: {problem}")
            trainer.log_completions = False  # their texts are not recorded
            differing = f"; differing: {listed(other, 8)}" if other else ""
            session.notes.append(f"replay: {len(replay.places)} batches of {replay.folder}{differing}")

    def _starts(self, step: int) -> None:
        """Handle the start of training, or of an evaluation before it: begin the recording that is written. Collective.

        Args:
            step: optimizer steps done.

        Raises:
            ConfigError: the folder already has a recording, or the replayed one has no batches from this step on.
        """
        trainer: Any = self
        if self._replay is not None and self._replayed_steps <= step < trainer.state.max_steps:
            raise ConfigError(
                f"The recording in {self._replay.folder} has batches for {self._replayed_steps} steps, and the "
                f"checkpoint is of step {step}: nothing is left to replay."
            )
        if self._recording is None or self._begun:
            return
        self._begun, recording = True, self._recording
        facts, known = facts_of(self), recording.facts
        if self.session.ranks.any(known is not None) and step == 0 and os.environ.get(RESUME_VARIABLE) != "1":
            raise ConfigError(f"{recording.folder} has a recording already. Name another folder, or remove it.")
        if known is not None:
            refuse_foreign(recording.folder, compared(known, facts)[0])
        recording.begin(facts, step)

    def _ends(self, steps: int) -> None:
        """Stop training after `steps` optimizer steps if the replayed recording has no batches for further ones."""
        trainer: Any = self
        if self._replayed_steps <= steps < trainer.state.max_steps:
            trainer.control.should_training_stop = True
            if self.session.ranks.rank == 0:
                ended = f"after {steps} of {trainer.state.max_steps} steps"
                print(f"trlx_hybrid: the recording ends {ended}, and training with it", file=sys.stderr, flush=True)

    # --- batches ----------------------------------------------------------------------------------------------------

    def _batch(self, roll_out: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the next batch: from the rollout, written to the recording if there is one; or in a replay the
        recorded one.

        Args:
            roll_out: a function that samples and scores the batch.
        """
        trainer: Any = self
        if self._replay is not None:
            return self._recorded(self._replay)
        if self._recording is None:
            return roll_out()
        mode, step, number = self._place()
        if mode == "train":
            if (step, number) <= self._last:
                self._begun = False  # a second `train()`
            self._last = step, number
        metrics = trainer._metrics[mode]
        before = {name: list(values) for name, values in metrics.items()}
        self._starts(step)
        values, device = roll_out(), self.session.policy.device
        self._recording.write(
            RecordedBatch(
                mode=mode,
                step=step,
                number=number,
                index=0,
                weight_version=self.session.weight_version,
                weights=self._weights(),
                tokens_seen=trainer.state.num_input_tokens_seen,
                metrics={name: found for name in metrics if (found := _added(before.get(name, []), metrics[name]))},
                values=values,
                rewards=trainer._rewards,
                generators=_generators(device),
                threads=torch.get_num_threads() if device.type == "cpu" else 0,
            )
        )
        return values

    def _recorded(self, replay: Recording) -> dict[str, Any]:
        """Return the batch that the recording has for the current step, on this run's device, and restore metrics and
        random states as they were after it. Collective."""
        trainer: Any = self
        mode, *here = self._place()
        step, number = replay.latest(*here) if mode == "train" else here
        batch, device = replay.read(mode, step, number), self.session.policy.device
        self._compare_weights(batch, first=step == replay.places[0][0])
        metrics = trainer._metrics[mode]
        for name, (replaces, values) in batch.metrics.items() if [step, number] == here else ():
            metrics[name] = values if replaces else metrics[name] + values
        trainer.state.num_input_tokens_seen = batch.tokens_seen
        _restore(batch.generators, device)
        if batch.threads and device.type == "cpu":
            torch.set_num_threads(batch.threads)
        moved = {name: v.to(device) if isinstance(v, Tensor) else v for name, v in batch.values.items()}
        if NUMBER in moved:
            self._deferred[mode] = Deferred(moved, mode, self.session.weight_version)  # type: ignore[attr-defined]
        return moved

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        trainer: Any = self
        stock = super()._prepare_inputs  # type: ignore[misc]
        if self._replay is None or not trainer.model.training:
            return stock(generation_batch)
        _, *here = self._place()
        taken = self._before(*here) - self._before(*self._replay.latest(*here))
        if trainer._step % self._every != taken:
            trainer._step = taken
        within = taken and trainer._buffered_inputs is None  # resumed in the middle of a batch
        with preserved_generators() if within else nullcontext():
            return stock(generation_batch)

    def _place(self) -> tuple[str, int, int]:
        """Return the position of the batch that TRL asks for now: "train" or "eval", the optimizer step, and the
        micro-batch within the step or, in an evaluation, the number of the batch."""
        trainer: Any = self
        if trainer.model.training:
            return "train", *self._window  # type: ignore[attr-defined]
        step = trainer.state.global_step
        self._evaluated[step] += 1
        return "eval", step, self._evaluated[step] - 1

    @functools.cached_property
    def _evaluated(self) -> Counter[int]:
        return Counter()

    @property
    def _every(self) -> int:
        """The number of micro-batches that TRL trains on from one generated batch, before it generates the next."""
        args = self.args  # type: ignore[attr-defined]
        return int(
            (getattr(args, "steps_per_generation", None) or args.gradient_accumulation_steps)
            * getattr(self, "num_iterations", 1)
        )

    @property
    def _epoch(self) -> tuple[int, int]:
        """The numbers of micro-batches and of optimizer steps in an epoch. The last step may have fewer micro-batches
        than the others."""
        trainer: Any = self
        loader, accumulated = trainer.callback_handler.train_dataloader, trainer.args.gradient_accumulation_steps
        length = len(loader) if has_length(loader) else trainer.state.max_steps * accumulated
        return length, -(-length // accumulated)

    def _before(self, step: int, micro_batch: int) -> int:
        """Return how many micro-batches the run trains on before the given micro-batch of a step."""
        length, steps = self._epoch
        epochs, rest = divmod(step, steps)
        return epochs * length + rest * int(self.args.gradient_accumulation_steps) + micro_batch  # type: ignore[attr-defined]

    @property
    def _replayed_steps(self) -> int:
        """The number of optimizer steps for which the recording has all batches."""
        assert self._replay is not None
        length, steps = self._epoch
        epochs, rest = divmod(self._before(*self._replay.places[-1]) + self._every, length)
        return epochs * steps + rest // int(self.args.gradient_accumulation_steps)  # type: ignore[attr-defined]

    # --- weights ----------------------------------------------------------------------------------------------------

    def _weights(self) -> list[Any]:
        """Return three facts that identify this rank's weights: whether they are shards, the digest of the trainable
        ones, and the digest of the frozen ones."""
        policy = self.session.policy
        policy.reshard()
        return [any(map(is_sharded, policy.module.parameters())), policy.digest(), self._frozen]

    @functools.cached_property
    def _frozen(self) -> int:
        policy = self.session.policy
        return policy.digest(p for p in policy.module.parameters() if not p.requires_grad)

    def _compare_weights(self, batch: RecordedBatch, first: bool) -> None:
        """Compare this rank's weights with those that sampled the recorded batch. Collective. A later difference is
        only warned of, once.

        Args:
            batch: the recorded batch.
            first: whether it is the recording's first step.

        Raises:
            ConfigError: the weights differ at the first step.
        """
        here = self._weights()
        apart = here[0] == batch.weights[0] and here != batch.weights  # digests of whole and sharded weights differ
        if self._said_apart or not self.session.ranks.any(apart):
            return
        where = f"{self._replay.folder if self._replay else ''} at step {batch.step}"
        if first:
            raise ConfigError(
                f"The weights are not those of the recording in {where}: another model, another seed of its adapters, "
                "or another checkpoint. Start from what the recorded run started from."
            )
        self._said_apart = True
        if self.session.ranks.rank == 0:
            logger.warning(
                "The weights are no longer those of the recording in %s. On another device or with other settings that "
                "is to be expected; losses from here on are not the recorded ones.",
                where,
            )

    # --- rollouts only ----------------------------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run TRL's training step, and stop training where the replayed recording ends. With `rollout_only`, train
        nothing: only sample and score a batch where one is due, and return a loss of 0."""
        trainer: Any = self
        if not self.session.config.rollout_only:
            loss = super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
            if self._replay is not None and trainer.accelerator.sync_gradients:
                self._ends(trainer.state.global_step + 1)
            return loss
        model.train()
        trainer._prepare_inputs(inputs)
        trainer._step += 1
        trainer.accelerator.gradient_state._set_sync_gradients(False)  # so optimizer and scheduler take no step
        return torch.zeros((), device=trainer.args.device)

    def _clip_grad_norm(self, model: Any) -> Any:
        return None if self.session.config.rollout_only else super()._clip_grad_norm(model)  # type: ignore[misc]

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        return None if self.session.config.rollout_only else super()._get_grad_norm(*args, **kwargs)  # type: ignore[misc]


def _added(before: list[float], after: list[float]) -> list[Any]:
    """Return how a metric's list changed between two moments, for a recording: `[replaced, new values]`, where
    `replaced` says that the earlier values were changed too. An empty list means no change."""
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
