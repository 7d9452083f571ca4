"""The comparison of the engine's log-probs with the trainer's. Where they differ too much, the row that differs most
is scored once more by itself, which tells whether the micro-batch's shape is the cause."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..refusals import SCORER, overriding, own_rollout
from . import divergence, shape

if TYPE_CHECKING:
    from ..state import RunState
    from ..stock import StockTrainer


def check(
    trainer: StockTrainer, run: RunState, batch: Mapping[str, Any], whole: Mapping[str, Any] | None = None
) -> None:
    """Compare the engine's log-probs with the trainer's, and raise if they differ by more than rounding; if a user's
    `rollout_func` returned them, only warn. Does nothing unless the batch has the log-probs of both. Collective.

    Args:
        batch: this rank's rows, with the log-probs of both.
        whole: this rank's rows as TRL trains on them; by default the rows of `batch`. If log-probs differ too much, a
            row is taken from `whole` and scored once more, alone.

    Raises:
        SyncError: engine and trainer differ.
    """
    session = run.session
    if not {shape.OLD, shape.SAMPLED} <= batch.keys():
        return
    if shape.STALENESS in batch:  # also in a replay, which has no engine
        divergence.log_staleness(trainer, session.ranks, batch)
    if session.selection.stock:
        return
    source, again = session.sampler.source, batch if whole is None else whole
    session.versions.check_batch(
        session.live_engine,
        batch[shape.SAMPLED],
        batch[shape.OLD],
        shape.current(batch),
        batch["completion_ids"],
        temperature=trainer.temperature,
        step=session.step,
        own_sampler=own_rollout(trainer),
        over_support=run.left_out_by is not None,
        rollout=source if source is not None and source.slot == "rollout" else None,
        again=_again(trainer, run, again) if _comparable(trainer, run, again) else None,
    )


def note(trainer: StockTrainer, run: RunState, micro_batch: dict[str, Any]) -> None:
    """Schedule the first row of a rollout's first micro-batch to be scored once more alone, which shows how far
    log-probs depend on the micro-batch's shape (shape.py). Done once every `shape.EVERY` steps."""
    sampled_at, run.sampled_at = run.sampled_at, None
    if sampled_at is None or run.session.weight_version != sampled_at or not trainer.model.training:
        return
    if run.session.step % shape.EVERY == 0 and _comparable(trainer, run, micro_batch):
        run.window.to_measure = micro_batch


def measure(trainer: StockTrainer, run: RunState, micro_batch: Mapping[str, Any]) -> None:
    """Score the first row of a micro-batch alone, and log how far its log-probs differ from those in the micro-batch.
    Collective."""
    one = shape.alone(micro_batch, 0)
    found = shape.parts(one, _scored_alone(trainer, run, one))
    shape.log(trainer._metrics["train"], trainer.accelerator.gather(found[None]))


def _comparable(trainer: StockTrainer, run: RunState, batch: Mapping[str, Any]) -> bool:
    """Return whether a row of the batch can be scored alone, to find out whether a difference of log-probs comes from
    the micro-batch's shape. True only if the log-probs of a row that is scored alone should agree with the engine's up
    to rounding."""
    session, replayed = run.session, None if run.replay is None else run.replay.facts
    return (
        (not session.selection.stock or replayed is not None)
        and not shape.switched_off(session.config.max_logprob_gap, replayed)
        and not own_rollout(trainer)
        and shape.measurable(batch)
        and not trainer.is_deepspeed_enabled  # its backward pass also takes the optimizer step
        and overriding(trainer, SCORER) is None
        and session.versions.incomparable(trainer.temperature, run.left_out_by is not None) is None
    )


def _again(
    trainer: StockTrainer, run: RunState, batch: Mapping[str, Any]
) -> Callable[[tuple[float, float]], str | None]:
    """Return a function that `WeightVersions.check_batch` calls where log-probs of engine and trainer differ too much.
    It takes the allowed differences, picks the row with the largest difference, and scores that row once more, alone.
    It returns a text for the error message if the micro-batch's shape is the cause, else None.

    Args:
        batch: this rank's rows.
    """

    def again(allowed: tuple[float, float]) -> str | None:
        row = shape.furthest(batch, allowed[0])
        one = shape.alone(batch, row)
        return shape.fault(one, _scored_alone(trainer, run, one), row, allowed)

    return again


def _scored_alone(trainer: StockTrainer, run: RunState, one: dict[str, Any]) -> Tensor:
    """Score one row, given as a batch of its own, without gradients, and return its log-probs, (1, T). Collective."""
    ids = torch.cat([one["prompt_ids"], one["completion_ids"]], dim=1)
    mask, length = torch.cat([one["prompt_mask"], one["completion_mask"]], dim=1), one["completion_ids"].shape[1]
    with run.scoring_alone(one), torch.no_grad(), run.borrowed.without_checkpointing(trainer):
        scored = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, length, batch_size=1)
    if run.session.router_replay is not None:
        run.session.router_replay.difference()  # these tokens were counted before
    run.session.policy.reshard()  # clipping comes next, and needs the shards' gradients
    found: Tensor = scored[0]
    return found
