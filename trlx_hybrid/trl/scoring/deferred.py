"""Old log-probs of a rollout that are taken from the losses' first forward passes, so that they need no forward pass of
their own.

TRL 1.16's GRPO and RLOO trainers score rows in one method, `_get_per_token_logps_and_entropies`, called

- by `_generate_and_score_completions` without gradients, for all rows of a rollout: the old log-probs first, then those
  of the reference model;
- by `_compute_loss` at its start, for the rows of one micro-batch. Afterwards it reads the old log-probs, and the
  values computed from them, from that micro-batch.

If the first loss forward of each row runs with the weights that sampled the rollout, then it computes the old
log-probs. In that case the forward pass without gradients is left out: `Deferred` stores the log-probs, and the values
that TRL computes from them, where TRL would have stored them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...errors import StaleWeightsError
from ...weights.verify import noise
from ..checkpoint.data_order import micro_batches_of_a_rollout
from ..stock import mode_of
from .divergence import DIVERGENCE, RATIO, corrects, importance_ratio, left_out, log_divergence
from .shape import STALENESS

if TYPE_CHECKING:
    from ...session import Session
    from ..stock import StockTrainer

NUMBER = "deferred_row"
"""The key in a batch for each row's position in the rollout before TRL shuffles it, (B,) int64. Present while old
log-probs are still to be computed by the loss."""


def reads_old(trainer: StockTrainer) -> bool:
    """Return whether TRL computes old log-probs after a rollout at all. TRL does not if they would equal the log-probs
    of the loss."""
    if trainer._base_name == "RLOO":
        return True
    every = micro_batches_of_a_rollout(trainer)
    return bool(trainer.args.gradient_accumulation_steps % every != 0 or corrects(trainer))


def defers(
    trainer: StockTrainer, session: Session, in_one_step: Callable[[], bool], say: Callable[[str], None]
) -> bool:
    """Return whether the old log-probs of the rollout that begins will be taken from the first forward pass of each
    micro-batch's loss, which saves a forward pass of their own. In training that is only so if one optimizer step uses
    the whole rollout, and if the model's forward passes are not random.

    Args:
        in_one_step: returns whether the current optimizer step will use all micro-batches of the rollout. If not, the
            weights change before the last of them are scored.
        say: called with a text if the answer is False because the forward passes are random, as with dropout.
    """
    if not session.scoring.deferred or session.scores_apart is not None or not reads_old(trainer):
        return False
    if session.config.rollout_only:
        return False  # there is no loss forward
    if not trainer.model.training:
        return True
    if not in_one_step():
        return False
    random = noise(session.policy.module, session.policy.modules)
    if random is not None:
        say(f"{random} makes each forward pass another one")
    return random is None


class DeferredLogProbs:
    """The old log-probs that losses have still to compute: those of the last rollout of training, and those of the last
    rollout of evaluation."""

    def __init__(self) -> None:
        self._of_mode: dict[str, Deferred] = {}

    def begin(self, batch: dict[str, Any], training: bool, version: int) -> None:
        """Let the losses compute the old log-probs of a new rollout.

        Args:
            batch: this rank's rows of the rollout, as TRL made them. The placeholders of the old log-probs, and values
                that TRL computed from them, are removed from it, and each row's position is added under NUMBER.
            training: whether the rollout is for training, rather than for an evaluation.
            version: version of the weights that sampled the rollout.
        """
        mode = "train" if training else "eval"
        self._of_mode[mode] = Deferred(batch, mode, version)

    @contextmanager
    def rolled_out(self, trainer: StockTrainer) -> Iterator[None]:
        """Return a context for TRL's `_generate_and_score_completions` while old log-probs are placeholders: at its
        end, the metrics that TRL computed from the placeholders are removed."""
        metrics = trainer._metrics[mode_of(trainer)]
        logged = {name: len(metrics[name]) for name in (*DIVERGENCE, *RATIO) if name in metrics}
        yield
        for name in (*DIVERGENCE, *RATIO):
            del metrics[name][logged.get(name, 0) :]
            if not metrics[name]:
                del metrics[name]

    def fill(self, trainer: StockTrainer, micro_batch: dict[str, Any], log_probs: Tensor) -> dict[str, Any] | None:
        """Store the log-probs of a micro-batch's first loss as its old log-probs, under TRL's keys in the micro-batch.
        Collective.

        Args:
            log_probs: (b, T), without a graph.

        Returns:
            After the rollout's last micro-batch, all its rows with the log-probs of trainer and engine, to be compared;
            None before, and where TRL's trainer compares none.
        """
        return self._of_mode[mode_of(trainer)].fill(trainer, micro_batch, log_probs)

    def outlived(self, version: int) -> bool:
        """Return whether the last training rollout's old log-probs can no longer be completed: some of its rows have
        not been in a loss yet, and the weights have changed since the rollout. This happens if an earlier `train()`
        stopped before it had used all rows.

        Args:
            version: the current weight version.
        """
        left = self._of_mode.get("train")
        return left is not None and left.outlived(version)


class Deferred:
    """The old log-probs of one rollout, which get no forward pass of their own: they are collected from the first
    forward pass of each micro-batch's loss. Zeros take their place while TRL makes the rollout's batch.

    Args:
        batch: this rank's rows of the rollout, as TRL made them. The placeholders of the old log-probs, and the values
            that TRL computed from them, are removed from it, and each row's position is added under NUMBER.
        mode: "train" or "eval".
        version: version of the weights that sampled the rollout.
    """

    def __init__(self, batch: dict[str, Any], mode: str, version: int) -> None:
        for name in ("old_per_token_logps", "old_logps", "importance_sampling_ratio"):
            batch.pop(name, None)
        mask = batch["completion_mask"]
        self._mode, self._version = mode, version
        self._completion_mask, self._ids = mask, batch["completion_ids"]
        self._mask = mask * batch["tool_mask"] if "tool_mask" in batch else mask
        self._sampled: Tensor | None = batch.get("sampling_per_token_logps")
        self._staleness = {name: batch[name] for name in (STALENESS,) if name in batch}
        self._old: Tensor | None = None  # (B, T), in the order of the rollout
        self._waiting = len(mask)
        batch[NUMBER] = torch.arange(len(mask), device=mask.device)

    def outlived(self, version: int) -> bool:
        """Return whether the rollout's old log-probs can no longer be completed: some rows have not been in a loss yet,
        and the weights have changed since the rollout. So a loss's forward pass would give other log-probs.

        Args:
            version: the current weight version.
        """
        return self._waiting > 0 and version != self._version

    def fill(self, trainer: StockTrainer, micro_batch: dict[str, Any], log_probs: Tensor) -> dict[str, Any] | None:
        """Store the log-probs of a micro-batch's first loss as its old log-probs, under TRL's keys in the micro-batch.
        After the last micro-batch, log the rollout's metrics. Collective.

        Args:
            log_probs: (b, T), without a graph.

        Returns:
            After the last micro-batch, the rollout's rows with the log-probs of trainer and engine, to be compared;
            None before, and where TRL's trainer compares none.

        Raises:
            StaleWeightsError: the weights have changed since the rollout.
        """
        rows = micro_batch.pop(NUMBER)
        if trainer.session.weight_version != self._version:
            raise StaleWeightsError(
                f"The rollout was sampled at weight version {self._version}, and its first loss forward comes at "
                f"{trainer.session.weight_version}: something has changed the weights within an optimizer step. Switch "
                "off what takes the old log-probs from there: HybridConfig.scoring_options={'deferred': False}."
            )
        if self._old is None:
            self._old = log_probs.new_zeros(self._completion_mask.shape)
        self._old[rows] = log_probs
        self._waiting -= len(rows)
        if trainer._base_name == "RLOO":
            micro_batch["old_logps"] = (self._old * self._completion_mask).sum(1)[rows]
            return None
        micro_batch["old_per_token_logps"] = log_probs
        ratio = None
        if corrects(trainer):  # over all rows, as in TRL: with fewer rows, kernels may sum in another order
            assert self._sampled is not None
            ratio = importance_ratio(trainer, self._old, self._sampled, self._mask)
            without = self._sampled.isnan() & self._mask.bool()
            micro_batch["importance_sampling_ratio"] = left_out(ratio, without)[rows]
        return self._finished(trainer, self._old, ratio) if self._waiting == 0 else None

    def _finished(self, trainer: StockTrainer, old: Tensor, ratio: Tensor | None) -> dict[str, Any]:
        if ratio is not None and self._sampled is not None:
            log_divergence(trainer, trainer._metrics[self._mode], old, self._sampled, self._mask.bool(), ratio)
        batch = {"old_per_token_logps": old, "completion_mask": self._mask, "completion_ids": self._ids}
        batch |= self._staleness
        if self._sampled is not None:
            batch["sampling_per_token_logps"] = self._sampled
        self._old = self._sampled = None  # frees memory until the next rollout
        return batch
