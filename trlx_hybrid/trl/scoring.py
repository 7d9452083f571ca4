"""TRL's per-token log-probs, computed by the run's scoring component. Where possible, a loss's first forward pass also
gives the old log-probs, so that they need no pass of their own.

TRL 1.16's GRPO and RLOO trainers score rows in one method, `_get_per_token_logps_and_entropies`, called

- by `_generate_and_score_completions` without gradients, for all rows of a rollout: the old log-probs first, then those
  of the reference model;
- by `_compute_loss` at its start, for the rows of one micro-batch. Afterwards it reads the old log-probs, and the
  values computed from them, from that micro-batch.

If the first loss forward of each row runs with the weights that sampled the rollout, then it computes the old
log-probs. In that case the pass without gradients is left out: `Deferred` stores the log-probs, and the values that TRL
computes from them, where TRL would have stored them.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn

from ..blame import called_back
from ..contract.kept_tokens import BOUNDS, WORDS, KeptTokens, tensors_of
from ..contract.protocols import Rows, Scores
from ..errors import ComponentError, ConfigError, StaleWeightsError
from ..policy.policy import transformers_model
from ..routing import DIFFERENCE, EXPERTS, aligned, experts_of
from ..weights.verify import noise
from . import asked_scoring, micro_batches, over_support, shape
from .joined import WIDE, JoinedPass, joinable, tokens_of
from .kept_log_probs import scoring_over
from .reference import activate_copies
from .unscored import UNSCORED, left_out, unscored

if TYPE_CHECKING:
    from ..contract.support import Support
    from ..contract.types import Sampling
    from ..plugins.host import PluginInfo
    from ..session import Session

logger = logging.getLogger(__name__)

NUMBER = "deferred_row"
"""The key in a batch for each row's position in the rollout before TRL shuffles it, (B,) int64. Present while old
log-probs are still to be computed by the loss."""

DIVERGENCE = tuple(f"sampling/sampling_logp_difference/{name}" for name in ("mean", "max"))
RATIO = tuple(f"sampling/importance_sampling_ratio/{name}" for name in ("min", "mean", "max"))
"""Names of TRL's metrics that are computed from the old log-probs of a rollout."""

OF_SEQUENCES = ("sequence_mask", "sequence_truncate")
"""Modes of TRL's importance-sampling correction (`vllm_importance_sampling_mode`) that compute one ratio per
sequence."""

LOSS = ("_prepare_inputs", "compute_loss", "_compute_loss")
"""TRL's methods through which a micro-batch goes on its way to its loss."""

READERS = ("_generate_and_score_completions", *LOSS)
"""TRL's methods in which the old log-probs of a rollout can be read."""

IGNORED = -100
"""The label of positions that are not scored, such as prompts and padding."""

SCORER = "_get_per_token_logps_and_entropies"
"""TRL's method that computes log-probs."""


class Scored:
    """A mixin between `HybridTrainer` and TRL's trainer that computes log-probs with the run's scoring component
    instead of TRL's own method."""

    session: Session

    _skips_old = False  # the next call is for the old log-probs, which are not computed
    _micro_batch: dict[str, Any] | None = None  # the micro-batch whose loss is being computed
    _logs_again = False  # that loss is computed a second time, from stored scores
    _terms_added = False  # algorithms have added to that micro-batch's loss
    _loss_scores: Scores | None = None  # scores of that micro-batch, where algorithms add to its loss
    _loss_tokens = 0  # tokens that the model got to compute losses, padding included
    _window = (-1, 0)  # the optimizer step, and how many of its micro-batches are done
    _joined: JoinedPass | None = None  # the pass of the micro-batches whose losses are being computed
    _generating = False  # `_generate` runs: a user's rollout asks for any scores meanwhile
    _trl: Any = None  # `trl.trainer.utils`
    _left_out_by: str | None = None  # the setting that left ids out of the trained rollout
    _supports: list[Support] | None = None  # supports of the rows being scored after a rollout
    _kept: dict[str, Tensor] | None = None  # these supports as tensors
    _scores_alone = False  # one row is being scored once more, alone
    _sampled_at: int | None = None  # the weight version that sampled a rollout, until its first loss
    _to_measure: dict[str, Any] | None = None  # the micro-batch with a row to be scored alone
    _scores_old = False  # the next call is for the old log-probs, with the rollout's experts

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL does, and drop what an interrupted step has left behind, before and after the training."""
        self._window = (-1, 0)
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._joined = None

    def _starts(self, step: int) -> None:
        """Handle the start of training, after its checkpoint is loaded. If an earlier `train()` stopped within a
        rollout whose old log-probs are incomplete, and the weights have changed since, drop the rollout's
        micro-batches.

        Args:
            step: optimizer steps done.
        """
        super()._starts(step)  # type: ignore[misc]
        left = self._deferred.get("train")
        if left is not None and left.outlived(self.session.weight_version):
            self._buffered_inputs, self._step = None, 0

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Run TRL's training step on one micro-batch, count the micro-batches of each optimizer step, and run the
        shared backward pass after the last of several micro-batches that were scored in one forward pass."""
        step = self.state.global_step  # type: ignore[attr-defined]
        if self._window[0] != step:
            self._window, self._joined = (step, 0), None
        self._terms_added = False
        session = self.__dict__.get("session")
        known = None if session is None or session.selection.stock else session.policy.modules
        with nullcontext() if known is None else in_training(model, known):
            loss = super().training_step(model, *args, **kwargs)  # type: ignore[misc]
        adds = session.algorithms.loss_terms_by if session is not None else None
        if adds is not None and not self._terms_added:
            own = overriding(self, (SCORER, *LOSS)) or "the trainer"
            raise ComponentError(
                f"HybridConfig.algorithm: {adds!r} adds to the loss, and {own} computes it without TRL's {SCORER}. "
                "Leave the algorithm out."
            )
        self._window = step, self._window[1] + 1
        if self._joined is not None and self._joined.taken:
            joined, self._joined = self._joined, None
            with self._in_step_time():
                joined.backward()
        if self._to_measure is not None and self._joined is None:
            with self._in_step_time():
                self._measure_shape(self._to_measure)
        return loss

    @contextmanager
    def _in_step_time(self) -> Iterator[None]:
        """Add the time that is spent inside to TRL's `step_time`, whose clock has stopped by then."""
        trainer: Any = self
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        if trainer._step % trainer.current_gradient_accumulation_steps:
            trainer._current_train_step_time += seconds
        else:
            trainer._metrics["train"]["step_time"][-1] += seconds

    def _generate_and_score_completions(self, inputs: list[Any]) -> Any:
        session = self.__dict__.get("session")
        if session is None:
            return self._score_rollout(inputs)
        session.policy.look()
        replays = session.router_replay is not None
        self._scores_old, self._supports = replays and reads_old(self), None
        self._left_out_by = session.sampling.truncated_by() if session.over_support else None
        try:
            batch = self._score_rollout(inputs)
            batch |= self._kept_in_rollout(batch["completion_ids"].shape[1])
            self._leave_out_unscored(batch)
        finally:
            self._scores_old, self._supports, self._kept = False, None, None
        if replays:
            batch[EXPERTS] = self._experts(batch["prompt_mask"], batch["completion_ids"].shape[1])
            session.experts = []  # frees the memory of a rollout's experts
        return batch

    def _leave_out_unscored(self, batch: dict[str, Any]) -> None:
        """Exclude from training the tokens whose log-prob the sampler did not return, and log their number.
        Collective."""
        trainer: Any = self
        if self.session.selection.stock or not corrects(trainer) or "sampling_per_token_logps" not in batch:
            return
        without = unscored(batch)
        tokens = self.session.ranks.sum(int(without.sum()))
        if tokens:
            trainer._metrics["train" if trainer.model.training else "eval"][UNSCORED].append(tokens)
        if "importance_sampling_ratio" in batch:  # else the first loss forward computes it
            batch["importance_sampling_ratio"] = left_out(batch["importance_sampling_ratio"], without)

    def _scores_over_support(self, sampling: Sampling) -> tuple[bool, str | None]:
        """Decide whether this run computes a token's log-prob over the ids that the engine could sample (after top-k,
        top-p and the like) instead of the whole vocabulary. Called when the session is made.

        Returns:
            Whether it does; and a note for the run's header, or None. The note says what this costs in memory, or why
            it is impossible although the sampling leaves ids out.

        Raises:
            ConfigError: the replayed recording was scored in this way, and this run cannot be.
        """
        trainer: Any = self
        corrected = getattr(trainer, "vllm_importance_sampling_correction", False)
        if trainer._base_name != "GRPO" or not corrected:
            return False, None
        replay, selection, setting = trainer._replay, trainer._selection, sampling.truncated_by()
        recorded = replay is not None and bool((replay.facts or {}).get(over_support.FACT))
        if (selection.stock and replay is None) or (replay is not None and not recorded):
            return False, None
        engine = selection.engine.component if selection.engine is not None else None
        reason = over_support.refuses(trainer, engine, overriding(self, (SCORER,)), replays=recorded)
        if reason is None or setting is None:
            self._left_out_by, size = setting, trainer.args.generation_batch_size // trainer.accelerator.num_processes
            vocabulary = trainer.model.config.get_text_config().vocab_size
            return reason is None, None if setting is None else over_support.forecast(sampling, size, vocabulary)
        if recorded:
            raise ConfigError(f"The recording was scored over the ids that {setting} kept, and {reason}. Leave it out.")
        told = f"{setting} leaves ids out, and {reason}: long completions will count for almost nothing"
        return False, f"importance sampling: {told}. {over_support.WAY_OUT}"

    def _note_supports(self, generated: Any) -> None:
        """Store the supports of the rows that were just generated (for each token, the ids that it was sampled from),
        where the run scores over them.

        Args:
            generated: the result of TRL's `_generate`.
        """
        if self._left_out_by is not None and self._rolls_out:  # type: ignore[attr-defined]
            self._supports = over_support.rows_of(self, generated)

    def _kept_in_rollout(self, completion_length: int) -> dict[str, Tensor]:
        """Return the supports of the rollout that is being scored (for each token, the ids that it was sampled from) as
        tensors to be added to the batch; an empty dict where log-probs are over all ids."""
        if self._supports is None:
            return {}
        if self._kept is None:
            self._kept = tensors_of(self._supports, completion_length)
        return self._kept

    def _score_rollout(self, inputs: list[Any]) -> Any:
        trainer: Any = self
        if not self._defers():
            return super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        mode = "train" if trainer.model.training else "eval"
        metrics = trainer._metrics[mode]
        logged = {name: len(metrics[name]) for name in (*DIVERGENCE, *RATIO) if name in metrics}
        self._skips_old = True
        try:
            batch = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        finally:
            self._skips_old = False
        for name in (*DIVERGENCE, *RATIO):  # these were computed from placeholders
            del metrics[name][logged.get(name, 0) :]
            if not metrics[name]:
                del metrics[name]
        self._deferred[mode] = Deferred(batch, mode, self.session.weight_version)
        return batch

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        trainer: Any = self
        known: Any = getattr(trainer, "_buffered_inputs", None)
        inputs = super()._prepare_inputs(generation_batch)  # type: ignore[misc]
        drawn: Any = getattr(trainer, "_buffered_inputs", None)
        scoring = self.session.scoring if "session" in self.__dict__ else None
        if drawn is not known and scoring is not None:
            self._sampled_at = self.session.weight_version
        if drawn is known or len(drawn) == 1 or scoring is None or not scoring.balanced:
            return inputs
        images = any(isinstance(value, list) for value in drawn[0].values())  # images do not have one entry per row
        if images or self._bound is not None or not self._in_one_step():
            return inputs
        micro_batches.number(drawn)
        tokens = torch.cat([(micro["prompt_mask"].sum(1) + micro["completion_mask"].sum(1)) for micro in drawn])
        prompts = torch.cat([micro["prompt_ids"].masked_fill(micro["prompt_mask"] == 0, -1) for micro in drawn])
        trainer._buffered_inputs = asked_scoring.grouped(self.session, drawn, prompts, tokens.tolist())
        return trainer._buffered_inputs[trainer._step % len(drawn)]

    @functools.cached_property
    def _bound(self) -> str | None:
        """The reason why rows must stay in the micro-batches that TRL drew, as text (see `bound_together`); None where
        they may be regrouped."""
        return bound_together(self)

    @functools.cached_property
    def _own_loss(self) -> str | None:
        """The name of a user's method that overrides TRL's steps from a micro-batch to its loss, and so may score other
        rows or skip micro-batches; None if there is none."""
        return overriding(self, ("training_step", *LOSS))

    def _in_one_step(self) -> bool:
        """Return whether the optimizer step that runs now is going to use all micro-batches of the rollout that
        begins."""
        trainer: Any = self
        micro_batches = self._window[1] + trainer.args.steps_per_generation
        return bool(micro_batches <= trainer.current_gradient_accumulation_steps)

    def _compute_loss(self, model: Any, inputs: dict[str, Any], *others: Any) -> Any:
        self._micro_batch = inputs
        try:
            loss = super()._compute_loss(model, inputs, *others)  # type: ignore[misc]
            if micro_batches.ROW in inputs:
                self._log_as_drawn(model)
            self._note_to_measure(inputs)
            return loss if self._loss_scores is None else loss + self._added_loss(self._loss_scores, inputs)
        finally:
            self._micro_batch = self._loss_scores = None

    def _note_to_measure(self, micro_batch: dict[str, Any]) -> None:
        """Schedule the first row of a rollout's first micro-batch to be scored once more alone, which shows how far
        log-probs depend on the micro-batch's shape (shape.py). Done once every `shape.EVERY` steps."""
        sampled_at, self._sampled_at = self._sampled_at, None
        session, trainer = self.__dict__.get("session"), cast(Any, self)
        if sampled_at is None or session is None or session.weight_version != sampled_at:
            return
        if session.step % shape.EVERY == 0 and trainer.model.training and self._compares(micro_batch):
            self._to_measure = micro_batch

    def _compares(self, batch: Mapping[str, Any]) -> bool:
        """Return whether single rows of a batch can be scored once more alone, and whether trainer and engine should
        then agree up to rounding."""
        session, trainer = self.session, cast(Any, self)
        return (
            (not session.selection.stock or trainer._replay is not None)
            and not shape.switched_off(self)
            and not trainer._names_own_log_probs
            and shape.measurable(batch)
            and not trainer.is_deepspeed_enabled  # its backward pass also takes the optimizer step
            and overriding(self, (SCORER,)) is None
            and session.versions.incomparable(trainer.temperature, self._left_out_by is not None) is None
        )

    def _measure_shape(self, micro_batch: Mapping[str, Any]) -> None:
        """Score the first row of a micro-batch alone, and log how far its log-probs differ from those in the
        micro-batch. Collective."""
        trainer: Any = self
        self._to_measure = None
        one = shape.alone(micro_batch, 0)
        found = shape.parts(one, self._scored_alone(one))
        shape.log(trainer._metrics["train"], trainer.accelerator.gather(found[None]))

    def _rescoring(self, batch: Mapping[str, Any]) -> Callable[[tuple[float, float]], str | None] | None:
        """Return a function that `WeightVersions.check_batch` calls where log-probs of engine and trainer differ too
        much. It takes the allowed differences, scores the row that differs most alone, and returns a text if the
        micro-batch's shape is the cause, or None.

        Args:
            batch: this rank's rows.

        Returns:
            The function, or None where rows of `batch` cannot be scored alone.
        """

        def again(allowed: tuple[float, float]) -> str | None:
            row = shape.furthest(batch, allowed[0])
            one = shape.alone(batch, row)
            return shape.fault(one, self._scored_alone(one), row, allowed)

        return again if self._compares(batch) else None

    def _scored_alone(self, one: dict[str, Any]) -> Tensor:
        """Score one row, given as a batch of its own, without gradients, and return its log-probs, (1, T).
        Collective."""
        trainer: Any = self
        outer, self._micro_batch, self._scores_alone = self._micro_batch, one, True
        ids = torch.cat([one["prompt_ids"], one["completion_ids"]], dim=1)
        mask = torch.cat([one["prompt_mask"], one["completion_mask"]], dim=1)
        try:
            with torch.no_grad(), trainer._without_checkpointing():
                length = one["completion_ids"].shape[1]
                scored = self._get_per_token_logps_and_entropies(trainer.model, ids, mask, length, batch_size=1)
        finally:
            self._micro_batch, self._scores_alone = outer, False
            if self.session.router_replay is not None:
                self.session.router_replay.difference()  # these tokens were counted before
        self.session.policy.reshard()  # clipping comes next, and needs the shards' gradients
        found: Tensor = scored[0]
        return found

    @torch.no_grad()
    def _log_as_drawn(self, model: Any) -> None:
        """Compute TRL's metrics again for the micro-batches that TRL drew, from stored scores. Called after each loss;
        does something only after the last micro-batch of a rollout whose rows were regrouped. Collective."""
        trainer: Any = self
        computed = trainer._buffered_inputs
        if trainer._step % len(computed) != len(computed) - 1:
            return
        metrics = trainer._metrics["train"]
        drawn, lengths = micro_batches.as_drawn(computed), {name: len(values) for name, values in metrics.items()}
        self._logs_again = True
        try:
            for self._micro_batch in drawn:
                super()._compute_loss(model, self._micro_batch)  # type: ignore[misc]
        finally:
            self._logs_again = False
        micro_batches.replace_last(metrics, lengths, len(drawn))

    def _added_loss(self, scores: Scores, inputs: dict[str, Any]) -> Any:
        """Return the sum of the terms that the run's algorithms add to a micro-batch's loss, divided by the number of
        accumulation steps as TRL's own loss is. Logs each term. Collective.

        Args:
            scores: log-probs and entropies of the micro-batch's rows, with their graph.
            inputs: the micro-batch.
        """
        trainer: Any = self
        self._terms_added = True
        terms = self.session.algorithms.loss(scores, inputs)
        none = torch.zeros((), device=scores.log_probs.device)
        added = [none if term is None else term for term in terms.values()]
        values = trainer.accelerator.gather(torch.stack([term.detach().float() for term in added])[None]).mean(0)
        for name, value in zip(terms, values.tolist(), strict=True):
            trainer._metrics["train"][f"hybrid/loss/{name}"].append(value)
        return torch.stack(added).sum() / trainer.current_gradient_accumulation_steps

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **images: Any,
    ) -> Any:
        trainer: Any = self
        stock = super()._get_per_token_logps_and_entropies  # type: ignore[misc]
        if "session" not in self.__dict__:
            given = input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, compute_aux_loss
            return stock(model, *given, **images)
        if self._logs_again and self._micro_batch is not None:
            return micro_batches.kept(self._micro_batch)
        skipped = of_old = False
        if not self._generating:  # else the flags are about other rows
            skipped, self._skips_old = self._skips_old, False
            of_old, self._scores_old = self._scores_old, False
        if skipped:
            return Scores(torch.zeros(len(input_ids), logits_to_keep, device=input_ids.device), None, None)

        attention_mask = trainer._attended(attention_mask, logits_to_keep)
        reference = model is trainer.ref_model
        activate_copies(self.session.policy.module)
        experts = None
        if self.session.router_replay is not None and self._micro_batch is not None and not reference:
            experts = experts_of(self._micro_batch)
        elif of_old:
            experts = self._experts(attention_mask[:, :-logits_to_keep], logits_to_keep)
        kept = self._kept_of(input_ids, logits_to_keep)
        masses: list[Tensor] = []

        def count(tokens: int) -> None:
            self._loss_tokens += tokens if torch.is_grad_enabled() else 0

        def padded(
            ids: Tensor = input_ids,
            mask: Tensor = attention_mask,
            at_once: int | None = batch_size,
            chosen: Tensor | None = experts,
            over: KeptTokens | None = kept,
        ) -> Scores:
            count(ids.numel())
            before = None if over is None else over.but_last()
            scored = completions_of(mask, logits_to_keep)[:, :-1]
            with called_back(), self._replaying(chosen), scoring_over(before, scored, masses, self._trl):
                return Scores(
                    *stock(model, ids, mask, logits_to_keep, at_once, compute_entropy, compute_aux_loss, **images)
                )

        def forward(
            labels: Tensor, experts: Tensor | None = None, support: KeptTokens | None = None, **inputs: Any
        ) -> Scores:
            count(labels.numel())
            name = self.session.selection.scoring.component.name
            if rows.experts is not None and experts is None:
                raise ComponentError(f"scoring {name!r} leaves out the experts of its rows: set router_replay=False.")
            if rows.support is not None and support is None:
                raise ComponentError(f"scoring {name!r} leaves out the support of its rows. {over_support.WAY_OUT}")
            if compute_aux_loss:
                inputs["output_router_logits"] = True
            over = scoring_over(support, labels != IGNORED, masses, self._trl)
            with called_back(), self._replaying(experts), over, trainer.accelerator.autocast():
                outputs = model(**inputs, shift_labels=labels, fused_lm_head=True)
            entropies = outputs.entropy if compute_entropy else None
            return Scores(outputs.log_probs, entropies, outputs.aux_loss if compute_aux_loss else None)

        policy = self.session.policy
        rows = Rows(
            model=transformers_model(trainer.accelerator.unwrap_model(model)) if reference else policy.base,
            input_ids=input_ids,
            attention_mask=attention_mask,
            completion_length=logits_to_keep,
            at_once=batch_size or len(input_ids),
            router_loss=compute_aux_loss,
            padded=padded,
            forward=forward,
            experts=experts,
            support=kept,
        )
        pictured = any(value is not None for value in images.values())
        joins = not (self._own_loss or reference or compute_aux_loss or pictured)
        scores = self._scored_together(rows, padded, compute_entropy) if joins else None
        scores = scores or asked_scoring.scored(self.session, rows, compute_entropy)
        if self._micro_batch is not None and NUMBER in self._micro_batch:
            deferred = self._deferred["train" if trainer.model.training else "eval"]
            deferred.fill(trainer, self._micro_batch, scores.log_probs.detach())
        if self._micro_batch is not None and not reference:
            micro_batches.keep(self._micro_batch, scores)
        if self._micro_batch is not None and experts is not None and not self._scores_alone:
            self._log_difference()
        if self._micro_batch is not None and kept is not None and not self._scores_alone:
            self._log_truncation(masses)
        first = self._micro_batch is not None and self._loss_scores is None
        adds = trainer.model.training and self.session.algorithms.loss_terms_by is not None
        if first and adds and not reference and torch.is_grad_enabled():
            self._loss_scores = scores
        return scores

    def _kept_of(self, input_ids: Tensor, completion_length: int) -> KeptTokens | None:
        """Return the ids that the tokens of the rows being scored were sampled from; None where log-probs are over all
        ids.

        Raises:
            ConfigError: the micro-batch should say which ids were kept, and does not.
            ComponentError: other rows are scored than those whose kept ids are known.
        """
        batch: dict[str, Any] = {}
        if self._micro_batch is not None:
            batch = self._micro_batch
            if self._left_out_by is not None:
                over_support.require(batch, self._left_out_by)
        elif not self._generating:
            batch = self._kept_in_rollout(completion_length)
        if WORDS not in batch:
            return None
        if len(batch[WORDS]) != len(input_ids):
            raise ComponentError(
                f"{len(input_ids)} rows are scored, and the ids that were kept are known of {len(batch[WORDS])}. "
                f"{over_support.WAY_OUT}"
            )
        vocabulary = self.session.policy.base.config.get_text_config().vocab_size
        return KeptTokens.of(batch, input_ids.shape[1] - completion_length, vocabulary)

    def _log_truncation(self, masses: Sequence[Tensor]) -> None:
        """Log the mean logarithm of the probability that the kept ids have in the whole distribution. Collective.

        Args:
            masses: for each forward pass, (2,): the sum of these logarithms, and the number of tokens.
        """
        trainer: Any = self
        if masses:  # else an earlier micro-batch's pass computed this one's rows
            total, tokens = trainer.accelerator.gather(torch.stack(list(masses)).sum(0)).view(-1, 2).sum(0).tolist()
            mode = "train" if trainer.model.training else "eval"
            trainer._metrics[mode][over_support.TRUNCATION].append(total / max(tokens, 1))

    def _experts(self, prompt_mask: Tensor, completion_length: int) -> Tensor:
        """Return the experts that the engine routed the rollout's tokens to, as a tensor in TRL's token positions, see
        `routing.aligned`.

        Args:
            prompt_mask: (B, P).
            completion_length: T.
        """
        return aligned(self.session.experts, prompt_mask, prompt_mask.shape[1] + completion_length)

    def _replaying(self, experts: Tensor | None) -> AbstractContextManager[None]:
        replay = self.session.router_replay
        return nullcontext() if replay is None or experts is None else replay.replaying(experts)

    def _log_difference(self) -> None:
        """Log the share of the trainer's own choices of experts that differ from the engine's. Collective."""
        trainer: Any = self
        assert self.session.router_replay is not None
        counts = self.session.router_replay.difference()
        if len(counts):  # else an earlier micro-batch's pass computed this one's rows
            differing, compared = trainer.accelerator.gather(counts).view(-1, 2).sum(0).tolist()
            mode = "train" if trainer.model.training else "eval"
            trainer._metrics[mode][DIFFERENCE].append(differing / max(compared, 1))

    def _scored_together(
        self,
        rows: Rows,
        padded: Callable[[Tensor, Tensor, None, Tensor | None, KeptTokens | None], Scores],
        entropies: bool,
    ) -> Scores | None:
        """Return the scores of the current micro-batch, computed in one pass with the micro-batches that follow; None
        where the micro-batch has a pass of its own. Collective.

        Args:
            padded: a function that scores ids with a mask, experts and a support as TRL does. It scores all rows at
                once, so that sharded ranks run equally many forward passes.
            entropies: whether entropies are needed.
        """
        trainer: Any = self
        micro_batch, joins = self._micro_batch, self.session.scoring.joins
        if micro_batch is None or not (torch.is_grad_enabled() and trainer.model.training and joins):
            return None
        if self._joined is None:
            ahead = joinable(trainer, micro_batch, self._window[1])
            count = asked_scoring.joined(self.session, tokens_of(ahead))
            if count == 1:
                return None
            prompts, prompt_mask, completions, mask = (torch.cat([m[name] for m in ahead[:count]]) for name in WIDE)
            ids, attended = torch.cat([prompts, completions], dim=1), torch.cat([prompt_mask, mask], dim=1)
            chosen = None if rows.experts is None else torch.cat([m[EXPERTS] for m in ahead[:count]])
            kept = rows.support
            if kept is not None:
                tensors = {name: torch.cat([m[name] for m in ahead[:count]]) for name in (WORDS, BOUNDS)}
                kept = KeptTokens.of(tensors, prompts.shape[1], kept.vocabulary)
            every = replace(
                rows,
                input_ids=ids,
                attention_mask=attended,
                at_once=len(ids),
                experts=chosen,
                support=kept,
                padded=functools.partial(padded, ids, attended, None, chosen, kept),
            )
            self._joined = JoinedPass(asked_scoring.scored(self.session, every, entropies), ahead[:count])
        return self._joined.take(micro_batch)

    def _defers(self) -> bool:
        """Return whether the old log-probs of the rollout that begins will be taken from the first forward passes of
        its losses, instead of a pass of their own."""
        session = self.__dict__.get("session")
        if session is None or not session.scoring.deferred or session.scores_apart is not None:
            return False
        if session.config.rollout_only:
            return False  # there is no loss forward
        trainer: Any = self
        if not reads_old(trainer):
            return False
        if trainer.model.training:
            if not self._in_one_step():
                return False  # the weights will have changed before the last rows
            random = noise(session.policy.module, session.policy.modules)
            if random is not None:
                self._say_once(f"{random} makes each forward pass another one")
                return False
        return True

    @functools.cached_property
    def _deferred(self) -> dict[str, Deferred]:
        return {}

    @functools.cached_property
    def _said(self) -> set[str]:
        return set()

    def _say_once(self, reason: str) -> None:
        if reason not in self._said and self.session.ranks.rank == 0:
            logger.warning("Old log-probs take a forward pass of their own: %s.", reason)
        self._said.add(reason)


@contextmanager
def in_training(model: nn.Module, modules: Sequence[nn.Module]) -> Iterator[None]:
    """Return a context in which the first call of `model.train()` does nothing if all modules are in training mode
    already.

    transformers calls `model.train()` for each micro-batch, which takes 10 ms for adapters in 28 layers. After that
    call, the model has its own method again, so that it can be copied, for example.

    Args:
        modules: all modules inside the model, except those that wrap it.
    """
    stock = model.train

    def train(mode: bool = True) -> nn.Module:
        patched.close()
        already = mode and model.training and all(module.training for module in modules)
        return model if already else stock(mode)

    with ExitStack() as patched:
        patched.enter_context(patch.object(model, "train", train))
        yield


def completions_of(attention_mask: Tensor, completion_length: int) -> Tensor:
    """Return a (B, P + C) bool mask of the positions right before those completion tokens that are attended to."""
    scored = torch.zeros_like(attention_mask, dtype=torch.bool)
    scored[:, -completion_length - 1 : -1] = attention_mask[:, -completion_length:] != 0
    return scored


def reads_old(trainer: Any) -> bool:
    """Return whether TRL computes old log-probs after a rollout at all: it does not where they would equal those of the
    loss."""
    if trainer._base_name == "RLOO":
        return True
    every = trainer.args.steps_per_generation * trainer.num_iterations
    return bool(trainer.args.gradient_accumulation_steps % every != 0 or corrects(trainer))


def corrects(trainer: Any) -> bool:
    """Return whether TRL corrects for differences between sampler and trainer (importance sampling)."""
    return bool(trainer.use_vllm and getattr(trainer, "vllm_importance_sampling_correction", False))


def scores_apart(trainer: Any, plugin: PluginInfo | None) -> str | None:
    """Return the reason why this run must compute its old log-probs before the losses, in a forward pass of their own;
    None where it need not.

    Args:
        plugin: the plugin that implements the hook `trlx_advantages`, or None.
    """
    args = trainer.args
    own = overriding(trainer, READERS)
    if own is not None:
        return f"{own} may read them."
    if plugin is not None:
        return f"trlx_advantages of plugin {plugin.name!r} may read them."
    if trainer._base_name == "RLOO" and trainer.beta != 0:
        return f"RLOO takes the KL divergence, with beta={trainer.beta:g}, out of the rewards."
    if args.steps_per_generation > args.gradient_accumulation_steps:
        return (
            f"a rollout is {args.steps_per_generation} micro-batches (steps_per_generation) and the weights change "
            f"after {args.gradient_accumulation_steps} (gradient_accumulation_steps)."
        )
    return None


def overriding(trainer: Any, methods: tuple[str, ...]) -> str | None:
    """Return the first of a user's methods that overrides one of `methods`, as "Class.method"; None if there is none.
    The class lies between this package's and TRL's trainer, or is derived from this package's."""
    package = __name__.partition(".")[0]
    for owner in type(trainer).__mro__:
        if owner.__dict__.get("_name") == trainer._base_name and owner.__module__.startswith("trl.trainer."):
            return None
        found = [name for name in methods if name in owner.__dict__]
        if found and owner.__module__.partition(".")[0] != package:
            return f"{owner.__qualname__}.{found[0]}"
    return None


def bound_together(trainer: Any) -> str | None:
    """Return the reason why an optimizer step's gradient would change if rows moved to other micro-batches of the step;
    None if it would not.

    TRL sums over tokens or rows and divides by numbers that are the same for each micro-batch of a step, as long as all
    micro-batches have equally many rows. The settings checked here divide by the number of tokens of one micro-batch,
    or compare its tokens with each other.
    """
    args = trainer.args
    own = overriding(trainer, LOSS)
    if own is not None:
        return f"{own} may depend on which rows share a micro-batch."
    if getattr(args, "loss_type", None) == "bnpo":
        return "loss_type='bnpo' divides by the tokens of each micro-batch."
    if getattr(trainer, "top_entropy_quantile", 1.0) < 1.0:
        return "top_entropy_quantile compares the tokens of a micro-batch."
    if getattr(trainer, "_entropy_bonus_enabled", False):
        return "the entropy bonus is a mean over the tokens of a micro-batch."
    if trainer.session.algorithms.loss_terms_by is not None:
        return (
            f"algorithm {trainer.session.algorithms.loss_terms_by!r} may add a mean over the tokens of a micro-batch."
        )
    if trainer.aux_loss_enabled:
        return "the load balance of experts is one of the tokens of a micro-batch."
    if args.gradient_accumulation_steps % args.steps_per_generation:
        return "two optimizer steps share a rollout."
    return None


class Deferred:
    """The old log-probs of one rollout, collected from the first forward pass of each micro-batch's loss.

    Args:
        batch: this rank's rows of the rollout, as TRL made them. Values that TRL computed from placeholders of the old
            log-probs are removed from it.
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
        self._old: Tensor | None = None  # (B, T), in the order of the rollout
        self._waiting = len(mask)
        batch[NUMBER] = torch.arange(len(mask), device=mask.device)

    def outlived(self, version: int) -> bool:
        """Return whether the rollout can no longer be completed: some rows still wait for their loss, and the weights
        have changed since.

        Args:
            version: the current weight version.
        """
        return self._waiting > 0 and version != self._version

    def fill(self, trainer: Any, micro_batch: dict[str, Any], log_probs: Tensor) -> None:
        """Store the log-probs of a micro-batch's first loss as its old log-probs, under TRL's keys in the micro-batch.
        After the last micro-batch, log the rollout's metrics and compare its log-probs with the engine's. Collective.

        Args:
            log_probs: (b, T), without a graph.

        Raises:
            StaleWeightsError: the weights have changed since the rollout.
            SyncError: the log-probs of engine and trainer differ by more than rounding.
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
            return
        micro_batch["old_per_token_logps"] = log_probs
        ratio = None
        if corrects(trainer):  # over all rows, as in TRL: with fewer rows, kernels may sum in another order
            assert self._sampled is not None
            ratio = importance_ratio(trainer, self._old, self._sampled, self._mask)
            without = self._sampled.isnan() & self._mask.bool()
            micro_batch["importance_sampling_ratio"] = left_out(ratio, without)[rows]
        if self._waiting == 0:
            self._finish(trainer, self._old, ratio, micro_batch)

    def _finish(self, trainer: Any, old: Tensor, ratio: Tensor | None, micro_batch: Mapping[str, Any]) -> None:
        if ratio is not None and self._sampled is not None:
            log_divergence(trainer, trainer._metrics[self._mode], old, self._sampled, self._mask.bool(), ratio)
        batch = {"old_per_token_logps": old, "completion_mask": self._mask, "completion_ids": self._ids}
        if self._sampled is not None:
            batch["sampling_per_token_logps"] = self._sampled
        trainer._check_sampled(batch, micro_batch)
        self._old = self._sampled = None  # frees memory until the next rollout


def importance_ratio(trainer: Any, old: Tensor, sampled: Tensor, mask: Tensor) -> Tensor:
    """Return TRL's importance-sampling ratio between trainer and sampler, as
    `GRPOTrainer._generate_and_score_completions` computes it.

    Args:
        old, sampled: log-probs of trainer and sampler, (B, T) float; NaN where the sampler has none.
        mask: (B, T), 0 where no token is trained.

    Returns:
        (B, T), or (B, 1) for the modes that take whole sequences.
    """
    difference = torch.nan_to_num((old - sampled) * mask, nan=0.0)
    mode = trainer.vllm_importance_sampling_mode
    if mode in OF_SEQUENCES:
        difference = difference.sum(dim=-1, keepdim=True)
    ratio = torch.exp(difference)
    low, high = trainer.vllm_importance_sampling_clip_min, trainer.vllm_importance_sampling_clip_max
    if mode in ("sequence_truncate", "token_truncate"):
        return torch.clamp(ratio, min=low, max=high)
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    return ratio.masked_fill((ratio < low) | (ratio > high), value=0.0)


def log_divergence(
    trainer: Any, metrics: dict[str, list[float]], old: Tensor, sampled: Tensor, mask: Tensor, ratio: Tensor
) -> None:
    """Log TRL's metrics of how far the log-probs of sampler and trainer differ, as
    `GRPOTrainer._generate_and_score_completions` does. Collective.

    Args:
        metrics: TRL's metrics of training or of evaluation, to be appended to.
        old, sampled: log-probs of trainer and sampler, (B, T) float; NaN where the sampler has none.
        mask: (B, T) bool, the trained tokens.
        ratio: the importance-sampling ratio, see `importance_ratio`.
    """
    gather = trainer.accelerator.gather
    difference = torch.abs(old - sampled)
    difference = difference[mask & ~torch.isnan(difference)]
    none = torch.tensor(0.0, device=old.device)
    mean, largest = (difference.mean(), difference.max()) if difference.numel() else (none, none)
    metrics[DIVERGENCE[0]].append(gather(mean).mean().item())
    metrics[DIVERGENCE[1]].append(gather(largest).max().item())
    flat = ratio.flatten() if trainer.vllm_importance_sampling_mode in OF_SEQUENCES else ratio[mask]
    low, mean, high = (flat.min(), flat.mean(), flat.max()) if flat.numel() else (none, none, none)
    metrics[RATIO[0]].append(_finite(gather(low)).min().item())
    metrics[RATIO[1]].append(gather(mean).nanmean().item())
    metrics[RATIO[2]].append(_finite(gather(high)).max().item())


def _finite(gathered: Tensor) -> Tensor:
    """Return the values without NaN, to take a minimum or maximum of them; all of them if every value is NaN."""
    kept = gathered[~torch.isnan(gathered)]
    return kept if kept.numel() else gathered
