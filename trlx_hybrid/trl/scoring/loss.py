"""Changes to micro-batches and their losses: rows that are moved between micro-batches, TRL's metrics of the
micro-batches as TRL drew them, and terms that algorithms add to a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...errors import ComponentError
from ...plugins.registry import BUILTIN
from ..checkpoint.checkpoints import newest_checkpoint
from ..metrics.step_metrics import in_step_time
from ..refusals import LOSS, REGROUPED, SCORER, Facts, overriding
from ..state import MicroBatch
from . import agreement, micro_batches
from .scoring_call import component_groups, component_joins

if TYPE_CHECKING:
    from ..state import RunState
    from ..stock import Rows, StockTrainer


def in_one_step(trainer: StockTrainer, run: RunState) -> bool:
    """Return whether the optimizer step that runs now is going to use all micro-batches of the rollout that begins.
    False where none runs: a script may ask a trainer that does not train for a batch."""
    needed = run.window.done + int(trainer.args.steps_per_generation)
    return needed <= getattr(trainer, "current_gradient_accumulation_steps", 0)


def regrouped(trainer: StockTrainer, run: RunState, drawn: Rows) -> Rows:
    """Return a rollout's rows, moved to other micro-batches than TRL has drawn where the scoring component balances the
    micro-batches; else as they are. Where one pass is going to compute all of them, they stay as they are, too: there
    is nothing to balance, and TRL's metrics need not be computed again. Collective.

    Args:
        drawn: the micro-batches that TRL has drawn.
    """
    if len(drawn) == 1 or not run.session.scoring.balanced:
        return drawn
    images = any(isinstance(value, list) for value in drawn[0].values())  # images do not have one entry per row
    if images or REGROUPED.refused(Facts(trainer)) is not None or not in_one_step(trainer, run):
        return drawn
    if shares_one_pass(trainer, run, drawn):
        return drawn
    micro_batches.number(drawn)
    tokens = torch.cat([micro_batches.row_lengths(micro) for micro in drawn])
    prompts = torch.cat([micro["prompt_ids"].masked_fill(micro["prompt_mask"] == 0, -1) for micro in drawn])
    return component_groups(run.session, drawn, prompts, tokens.tolist())


def shares_one_pass(trainer: StockTrainer, run: RunState, drawn: Rows) -> bool:
    """Return whether one forward and backward pass is going to compute all micro-batches of a rollout that begins to be
    trained, and note it in the run's window. False until a shared pass of so many was found to compute them alike.
    Collective."""
    session = run.session
    if session.scoring.joins < len(drawn) or overriding(trainer, "training_step", *LOSS) is not None:
        return False
    ahead = micro_batches.joinable(trainer, drawn[0], run.window.done)
    if len(ahead) < len(drawn) or component_joins(session, micro_batches.tokens_of(ahead)) < len(drawn):
        return False
    run.window.joins = len(drawn)
    return True


def with_terms(trainer: StockTrainer, run: RunState, loss: Any, micro_batch: MicroBatch) -> Any:
    """Add to a micro-batch's loss the terms of the run's algorithms, and return the sum. The terms are divided here by
    the number of accumulation steps; TRL has divided `loss` by it already. If the micro-batch has no scores, `loss` is
    returned unchanged. Logs each term. Collective."""
    if micro_batch.scores is None:
        return loss
    run.terms_added = True
    terms = run.session.algorithms.loss(micro_batch.scores, micro_batch.inputs)
    none = torch.zeros((), device=micro_batch.scores.log_probs.device)
    added = [none if term is None else term for term in terms.values()]
    values = trainer.accelerator.gather(torch.stack([term.detach().float() for term in added])[None]).mean(0)
    for name, value in zip(terms, values.tolist(), strict=True):
        trainer._metrics["train"][f"hybrid/loss/{name}"].append(value)
    return loss + torch.stack(added).sum() / trainer.current_gradient_accumulation_steps


@torch.no_grad()
def log_as_drawn(
    trainer: StockTrainer, run: RunState, micro_batch: MicroBatch, compute: Callable[[dict[str, Any]], Any]
) -> None:
    """Replace the logged metrics of regrouped micro-batches by those of the micro-batches that TRL drew, computed from
    stored scores. Called after each loss; it does something only after the last micro-batch of a rollout whose rows
    were regrouped. Collective.

    Args:
        micro_batch: the micro-batch whose loss was computed.
        compute: TRL's `_compute_loss`, which takes a micro-batch and also logs its metrics.
    """
    computed = trainer._buffered_inputs or []
    if micro_batches.ROW not in micro_batch.inputs or trainer._step % len(computed) != len(computed) - 1:
        return
    metrics = trainer._metrics["train"]
    drawn, lengths = micro_batches.as_drawn(computed), {name: len(values) for name, values in metrics.items()}
    for inputs in drawn:
        run.micro_batch = MicroBatch(inputs, logs_again=True)
        compute(inputs)
    run.micro_batch = micro_batch
    micro_batches.replace_last(metrics, lengths, len(drawn))


def end_micro_batch(trainer: StockTrainer, run: RunState) -> None:
    """End a micro-batch's `training_step`. After the last of several micro-batches that share a forward pass, run their
    shared backward pass. If no shared pass is open and a micro-batch was noted in `window.to_measure`, score its
    first row alone, to measure how the row's log-probs depend on the other rows. Collective.

    Raises:
        ComponentError: an algorithm's term was not added to the loss, since a user's class computes the loss.
    """
    adds, window = run.session.algorithms.loss_terms_by, run.window
    if adds is not None and not run.terms_added:
        own = overriding(trainer, SCORER, *LOSS) or "the trainer"
        raise ComponentError(
            f"HybridConfig.algorithm: {adds!r} adds to the loss, and {own} computes it without TRL's {SCORER}. Leave "
            "the algorithm out."
        )
    if (joined := window.joined) is not None and joined.taken:
        window.joined = None
        with _in_loss_time(trainer, run):
            joined.backward()
    if (measured := window.to_measure) is not None and window.joined is None:
        window.to_measure = None
        with _in_loss_time(trainer, run):
            agreement.measure(trainer, run, measured)


@contextmanager
def naming_rows(trainer: StockTrainer, run: RunState) -> Iterator[None]:
    """Return a context for a training step in which an out-of-memory error of a loss, or of its backward pass, gets a
    note on the rows that were computed, and on settings with which they take less memory."""
    run.window.rows = None
    try:
        yield
    except torch.OutOfMemoryError as error:
        if run.window.rows is not None:
            error.add_note(_rows_told(trainer, run, run.window.rows))
        raise


def _rows_told(trainer: StockTrainer, run: RunState, rows: dict[str, Any]) -> str:
    masks = {name: rows[name].cpu() for name in ("prompt_mask", "completion_mask")}  # the device has no memory left
    args, lengths = trainer.args, micro_batches.row_lengths(masks)
    number = f"{len(lengths)} rows" if len(lengths) > 1 else "1 row"
    told = [
        f"It was the loss of {number} with {int(lengths.sum())} tokens, {int(lengths.max())} of them in the longest "
        f"row, in step {trainer.state.global_step + 1}."
    ]
    if run.window.joined is not None:
        told.append("Its pass was shared with other micro-batches: scoring_options={'joined': False} ends that.")
    if len(lengths) > 1:
        steps = args.gradient_accumulation_steps * len(lengths)
        told.append(f"Fewer rows at once: per_device_train_batch_size=1, gradient_accumulation_steps={steps}.")
    if not args.gradient_checkpointing:
        told.append("Layers that are recomputed keep less: gradient_checkpointing=True.")
    elif run.session.selection.scoring.component.plugin == BUILTIN:
        told.append('Rows without padding, layers in tiles, and inputs in host memory: HybridConfig(scoring="packed").')
    if len(lengths) == 1:
        told.append(f"Shorter rows: max_completion_length below {args.max_completion_length}.")
    last = newest_checkpoint(Path(args.output_dir))
    if last is not None:
        told.append(f"The last checkpoint is {last}: train(resume_from_checkpoint=True) goes on from it.")
    return " ".join(told)


@contextmanager
def _in_loss_time(trainer: StockTrainer, run: RunState) -> Iterator[None]:
    """Return a context for work that belongs to the loss but runs after TRL's training step, such as the backward pass
    of joined micro-batches. The time spent in it is added to the logged times of the step and of the loss."""
    further = nullcontext() if run.step_metrics is None else run.step_metrics.further_loss()
    with in_step_time(trainer), further:
        yield


@contextmanager
def in_training(model: nn.Module, modules: Sequence[nn.Module] | None) -> Iterator[None]:
    """Return a context in which the first call of `model.train()` does nothing if all modules are in training mode
    already.

    transformers calls `model.train()` for each micro-batch, which takes 10 ms for adapters in 28 layers. After that
    call, the model has its own method again, so that it can be copied, for example.

    Args:
        modules: all modules of the model, without wrappers such as DDP; None changes nothing.
    """
    if modules is None:
        yield
        return
    stock, own = model.train, vars(model).get("train")

    def put_back() -> None:
        vars(model).pop("train", None)
        if own is not None:
            vars(model)["train"] = own

    def train(mode: bool = True) -> nn.Module:
        put_back()
        already = mode and model.training and all(module.training for module in modules)
        return model if already else stock(mode)

    vars(model)["train"] = train
    try:
        yield
    finally:
        put_back()
