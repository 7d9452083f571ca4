"""The trainer's per-token log-probs, computed by the run's scoring component instead of TRL's own method.

A call takes these steps: find the experts and the kept ids (left by top-k and the like) with which TRL's rows were
sampled; let the component score the rows, alone or together with the micro-batches that follow; store what the run
needs of the scores; and return them.

What a component returns is checked, and errors name the component. TRL's own scoring is called directly: its errors
come from the model and from TRL, and already name their source.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...blame import asked, called_back, fault
from ...contract.protocols import Rows, Scores
from ...contract.support import BOUNDS, WORDS, KeptTokens, tensors_of
from ...errors import ComponentError
from ...plugins.registry import BUILTIN
from ...policy.policy import evaluating, transformers_model
from ...rollout.seeding import preserved_generators
from ...routing import DIFFERENCE, EXPERTS, aligned, experts_of
from ...weights.verify import beyond_rounding
from ..generation.truncation import attended
from ..refusals import LOSS, overriding
from ..stock import mode_of
from . import agreement, branches, kept_ids, micro_batches
from .deferred import NUMBER
from .kept_log_probs import scoring_over
from .micro_batches import WIDE, JoinedPass, joinable, regrouped, tokens_of
from .reference import activate_copies

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...plugins.registry import Component
    from ...session import Session
    from ..state import Batch, RunState
    from ..stock import StockTrainer

logger = logging.getLogger(__name__)

IGNORED = -100
"""The label of positions that are not scored, such as prompts and padding."""


def rollout_experts(run: RunState, prompt_mask: Tensor, completion_length: int) -> Tensor:
    """Return the experts that the engine routed the rollout's tokens to, at TRL's token positions, (B, P + T, layers,
    experts per token) int16; -1 at padding and where unknown.

    Args:
        prompt_mask: (B, P), 0 where padded.
        completion_length: T.
    """
    return aligned(run.session.experts, prompt_mask, prompt_mask.shape[1] + completion_length)


def kept_in_rollout(trainer: StockTrainer, batch: Batch, completion_length: int) -> dict[str, Tensor]:
    """Return what scoring needs of the rollout beside TRL's tensors, as tensors to be added to the batch: the supports
    (for each token, the ids that it was sampled from), except where log-probs are over all ids, and where branches of
    rows begin, except where rows have none."""
    if batch.kept is None:
        batch.kept = branches.of_rollout(trainer, batch.generated, completion_length)
        if batch.supports is not None:
            batch.kept |= tensors_of(batch.supports, completion_length)
    return batch.kept


@dataclass(slots=True, eq=False, kw_only=True)
class ScoringCall:
    """One call of TRL's `_get_per_token_logps_and_entropies`: B rows of P prompt and T completion positions.

    Attributes:
        stock: TRL's own method.
        model: the model that scores, as TRL passes it: the policy, or the reference model.
        input_ids, attention_mask: (B, P + T) int64.
        completion_length: T.
        at_once: rows that TRL scores in one forward pass; None for all of them.
        entropies, router_loss: whether TRL wants the entropies, and the loss that balances experts.
        images: image tensors by name, as TRL passes them.
        experts: (B, P + T, layers, experts per token) int16, the experts that compute the rows' tokens, -1 where the
            model's router chooses; None if the router chooses for all tokens. Set by the call itself.
        kept: the ids from which the rows' tokens were sampled, over which log-probs are computed; None for the whole
            vocabulary. Set by the call itself.
        masses: for each forward pass over kept ids, a (2,) float: the sum, over the sampled tokens, of the logarithm of
            the kept ids' probability in the whole distribution; and the number of these tokens.
    """

    trainer: StockTrainer
    run: RunState
    stock: Callable[..., Any]
    model: Any
    input_ids: Tensor
    attention_mask: Tensor
    completion_length: int
    at_once: int | None
    entropies: bool
    router_loss: bool
    images: dict[str, Any]
    experts: Tensor | None = None
    kept: KeptTokens | None = None
    masses: list[Tensor] = field(default_factory=list)

    def scores(self) -> Scores:
        """Return the rows' scores, after storing what the run needs of them. Return placeholders of 0 if the losses
        will compute the old log-probs. Collective."""
        run, micro_batch = self.run, self.run.micro_batch
        if micro_batch is not None and micro_batch.logs_again:
            return micro_batches.kept(micro_batch.inputs)
        of_old = False
        if not run.generating:  # else a user's rollout scores other rows than the batch's
            skipped, run.batch.skips_old = run.batch.skips_old, False
            of_old, run.batch.scores_old = run.batch.scores_old, False
            if skipped:
                shape = len(self.input_ids), self.completion_length
                return Scores(torch.zeros(shape, device=self.input_ids.device), None, None)
        self.attention_mask = attended(run.batch, self.attention_mask, self.completion_length)
        activate_copies(run.session.policy.module)
        self.experts, self.kept = self._experts(of_old), self._kept()
        rows = self._rows()
        scores = self._scored_together(rows) or self._scored(rows, [self._beside()], self.entropies)
        self._keep(scores)
        return scores

    # --- rows -------------------------------------------------------------------------------------------------------

    @property
    def _of_reference(self) -> bool:
        """True where the call is for a separate reference model, not for the policy."""
        return self.model is self.trainer.ref_model

    def _rows(self) -> Rows:
        """Return the call's rows in the form in which a scoring component takes them."""
        given = self.input_ids, self.attention_mask, self.at_once, self.experts, self.kept
        reference = self._of_reference and self.trainer.accelerator.unwrap_model(self.model)
        return Rows(
            model=transformers_model(reference) if reference else self.run.session.policy.base,
            input_ids=self.input_ids,
            attention_mask=self.attention_mask,
            completion_length=self.completion_length,
            at_once=self.at_once or len(self.input_ids),
            router_loss=self.router_loss,
            padded=functools.partial(self._padded, *given),
            forward=self._forward,
            experts=self.experts,
            support=self.kept,
        )

    def _experts(self, of_old: bool) -> Tensor | None:
        """Return the experts that the rows were routed to when they were sampled, (B, P + T, layers, experts per
        token); None where the model chooses."""
        run = self.run
        if run.session.router_replay is not None and run.micro_batch is not None and not self._of_reference:
            return experts_of(run.micro_batch.inputs)
        if of_old:
            return rollout_experts(run, self.attention_mask[:, : -self.completion_length], self.completion_length)
        return None

    def _beside(self) -> Mapping[str, Any]:
        """Return the tensors by name that the batch has beside those that TRL passes to the call."""
        run = self.run
        if run.micro_batch is not None:
            return run.micro_batch.inputs
        return {} if run.generating else kept_in_rollout(self.trainer, run.batch, self.completion_length)

    def _kept(self) -> KeptTokens | None:
        """Return the ids that the rows' tokens were sampled from; None where log-probs are over all ids.

        Raises:
            ConfigError: the micro-batch should say which ids were kept, and does not.
            ComponentError: other rows are scored than those whose kept ids are known.
        """
        run, batch = self.run, self._beside()
        if run.micro_batch is not None and run.left_out_by is not None:
            kept_ids.require(batch, run.left_out_by)
        if WORDS not in batch:
            return None
        if len(batch[WORDS]) != len(self.input_ids):
            raise ComponentError(
                f"{len(self.input_ids)} rows are scored, and the ids that were kept are known of {len(batch[WORDS])}. "
                f"{kept_ids.WAY_OUT}"
            )
        vocabulary = run.session.policy.base.config.get_text_config().vocab_size
        return KeptTokens.of(batch, self.input_ids.shape[1] - self.completion_length, vocabulary)

    # --- forward passes, called by the component --------------------------------------------------------------------

    def _padded(
        self, ids: Tensor, mask: Tensor, at_once: int | None, experts: Tensor | None, kept: KeptTokens | None
    ) -> Scores:
        """Score padded rows with TRL's own method.

        Args:
            ids, mask: (b, P + T) int64, token ids and attention mask.
            at_once: rows that TRL scores in one forward pass; None for all of them.
            experts: the experts that compute each token; None where the model chooses.
            kept: the ids over which each token's log-prob is computed; None for the whole vocabulary.
        """
        self._count(ids)
        scored = completions_of(mask, self.completion_length)[:, :-1]
        over = scoring_over(kept and kept.but_last(), scored, self.masses, self.run.borrowed.head)
        with called_back(), self._replaying(experts), over:
            wanted = self.entropies, self.router_loss
            return Scores(*self.stock(self.model, ids, mask, self.completion_length, at_once, *wanted, **self.images))

    def _forward(
        self, labels: Tensor, experts: Tensor | None = None, support: KeptTokens | None = None, **inputs: Any
    ) -> Scores:
        """Run one forward pass over tokens that the scoring component has arranged, for example packed, and return
        scores of shape (b, t), 0 where nothing is scored.

        Args:
            labels: (b, t) int64, the token that follows each position; -100 where nothing is to be scored.
            experts: (b, t, layers, experts per token), the experts that compute each token; None where the model
                chooses.
            support: the ids over which the log-prob at each position is computed; None for the whole vocabulary.
            inputs: the model's own arguments.

        Raises:
            ComponentError: the component left out the experts or the support that its rows have.
        """
        self._count(labels)
        name = self.run.session.selection.scoring.component.name
        if self.experts is not None and experts is None:
            raise ComponentError(f"scoring {name!r} leaves out the experts of its rows: set router_replay=False.")
        if self.kept is not None and support is None:
            raise ComponentError(f"scoring {name!r} leaves out the support of its rows. {kept_ids.WAY_OUT}")
        if self.router_loss:
            inputs["output_router_logits"] = True
        over = scoring_over(support, labels != IGNORED, self.masses, self.run.borrowed.head)
        with called_back(), self._replaying(experts), over, self.trainer.accelerator.autocast():
            outputs = self.model(**inputs, shift_labels=labels, fused_lm_head=True)
        entropies = outputs.entropy if self.entropies else None
        return Scores(outputs.log_probs, entropies, outputs.aux_loss if self.router_loss else None)

    def _count(self, tokens: Tensor) -> None:
        if self.run.step_metrics is not None and torch.is_grad_enabled():
            self.run.step_metrics.loss_tokens += tokens.numel()

    def _replaying(self, experts: Tensor | None) -> AbstractContextManager[None]:
        replay = self.run.session.router_replay
        return nullcontext() if replay is None or experts is None else replay.replaying(experts)

    def _scored(self, rows: Rows, batches: Sequence[Mapping[str, Any]], entropies: bool) -> Scores:
        """Return the scores of rows. Branches are scored as rows of their own, all in one forward pass, so that sharded
        ranks run equally many. Collective.

        Args:
            rows: the rows of these micro-batches.
            batches: the tensors by name that each micro-batch has beside its rows, or all of its tensors.
            entropies: whether entropies are needed.
        """
        whole = self.experts is not None or self.kept is not None or branches.BRANCHES not in batches[0]
        if whole:
            return component_scores(self.run.session, rows, entropies)
        begins = torch.cat([batch[branches.BRANCHES] for batch in batches])
        parts = branches.Parts.of(rows.input_ids, rows.attention_mask, begins)
        call = replace(
            self,
            input_ids=parts.input_ids,
            attention_mask=parts.attention_mask,
            completion_length=parts.completion_length,
            at_once=None,
        )
        return parts.rows(component_scores(self.run.session, call._rows(), entropies))

    # --- one pass for several micro-batches -------------------------------------------------------------------------

    def _scored_together(self, rows: Rows) -> Scores | None:
        """Return the scores of the current micro-batch, computed in one forward pass with the micro-batches that
        follow; None where the micro-batch needs a forward pass of its own. Collective.

        Args:
            rows: the current micro-batch as a scoring component takes it.
        """
        run, session, window = self.run, self.run.session, self.run.window
        pictured = any(value is not None for value in self.images.values())
        if run.micro_batch is None or self._of_reference or self.router_loss or pictured:
            return None
        trains = torch.is_grad_enabled() and self.trainer.model.training and session.scoring.joins
        if not trains or overriding(self.trainer, "training_step", *LOSS) is not None:
            return None
        micro_batch = run.micro_batch.inputs
        if window.joined is None:
            ahead = joinable(self.trainer, micro_batch, window.done)
            count, window.joins = window.joins or component_joins(session, tokens_of(ahead)), 0
            if count == 1:
                return None
            every = self._together(rows, ahead[:count])
            if count > session.scoring.joins:
                alike = self._alike(rows, every, ahead[:count])
                session.scoring.joins = count if alike else 0  # which is in its checkpoints
                if not alike:
                    return None
            window.joined = JoinedPass(self._scored(every, ahead[:count], self.entropies), ahead[:count])
        return window.joined.take(micro_batch)

    @torch.no_grad()
    def _alike(self, rows: Rows, every: Rows, ahead: list[dict[str, Any]]) -> bool:
        """Compute the log-probs of one micro-batch twice, in a forward pass of its own and in one pass together with
        other micro-batches, both without dropout. Return whether they are the same, and log a warning if not.
        Collective.

        Args:
            rows: the current micro-batch, in the form in which a scoring component takes it.
            every: the rows of all micro-batches that the joined pass computes.
            ahead: these micro-batches. The last one is computed twice.
        """
        session, last = self.run.session, ahead[-1]
        with evaluating(self.model), preserved_generators():
            apart = self._scored(self._together(rows, [last]), [last], False).log_probs
            joined = self._scored(every, ahead, False).log_probs
        session.policy.reshard()  # without a backward pass the parameters would stay gathered
        self.masses.clear()  # nothing is logged of these passes
        if session.router_replay is not None:
            session.router_replay.difference()
        scored = last["completion_mask"].bool()
        found = beyond_rounding(session.policy, session.args, (joined[-len(apart) :] - apart).abs()[scored])
        reason = next((r for r in session.ranks.gather(found) if r is not None), None)
        if reason is not None and session.ranks.rank == 0:
            logger.warning("Each micro-batch takes a forward pass of its own: log-probs of a shared one %s.", reason)
        return reason is None

    def _together(self, rows: Rows, ahead: list[dict[str, Any]]) -> Rows:
        """Return the rows of several micro-batches as the rows of one call. TRL's method scores all of them at once, so
        that sharded ranks run equally many forward passes.

        Args:
            rows: the current micro-batch as a scoring component takes it.
            ahead: the micro-batches, the current one first.
        """

        def joined(name: str) -> Tensor:
            return torch.cat([micro[name] for micro in ahead])

        prompts, prompt_mask, completions, mask = map(joined, WIDE)
        ids, attention = torch.cat([prompts, completions], dim=1), torch.cat([prompt_mask, mask], dim=1)
        experts, kept = None if self.experts is None else joined(EXPERTS), self.kept
        if kept is not None:
            tensors = {name: joined(name) for name in (WORDS, BOUNDS)}
            kept = KeptTokens.of(tensors, prompts.shape[1], kept.vocabulary)
        return replace(
            rows,
            input_ids=ids,
            attention_mask=attention,
            at_once=len(ids),
            experts=experts,
            support=kept,
            padded=functools.partial(self._padded, ids, attention, None, experts, kept),
        )

    # --- what the run keeps -----------------------------------------------------------------------------------------

    def _keep(self, scores: Scores) -> None:
        """Store what the run needs of a micro-batch's scores: old log-probs that were still to be computed, copies for
        TRL's metrics, and the scores themselves for the terms that an algorithm adds to the loss. Log the metrics of
        router replay and of truncated sampling. Collective."""
        run, trainer, micro_batch = self.run, self.trainer, self.run.micro_batch
        if micro_batch is None:
            return
        if NUMBER in micro_batch.inputs:
            whole = run.deferred.fill(trainer, micro_batch.inputs, scores.log_probs.detach())
            if whole is not None:
                agreement.check(trainer, run, whole, micro_batch.inputs)
        if not self._of_reference:
            micro_batches.keep(micro_batch.inputs, scores)
        if self.experts is not None and not micro_batch.alone:
            self._log_difference()
        if self.kept is not None and not micro_batch.alone:
            self._log_truncation()
        adds = trainer.model.training and run.session.algorithms.loss_terms_by is not None
        if adds and micro_batch.scores is None and not self._of_reference and torch.is_grad_enabled():
            micro_batch.scores = scores

    def _log(self, name: str, counts: Tensor) -> None:
        """Log the quotient of two sums over all ranks. Collective.

        Args:
            counts: (2,), this rank's parts of both sums.
        """
        above, below = self.trainer.accelerator.gather(counts).view(-1, 2).sum(0).tolist()
        self.trainer._metrics[mode_of(self.trainer)][name].append(above / max(below, 1))

    def _log_difference(self) -> None:
        """Log the share of the trainer's own choices of experts that differ from the engine's. Collective."""
        assert self.run.session.router_replay is not None
        counts = self.run.session.router_replay.difference()
        if len(counts):  # else an earlier micro-batch's pass computed this one's rows
            self._log(DIFFERENCE, counts)

    def _log_truncation(self) -> None:
        """Log the mean logarithm of the probability that the kept ids have in the whole distribution. Collective."""
        if self.masses:  # else an earlier micro-batch's pass computed this one's rows
            self._log(kept_ids.TRUNCATION, torch.stack(self.masses).sum(0))


def completions_of(attention_mask: Tensor, completion_length: int) -> Tensor:
    """Return a (B, P + C) bool mask of the positions right before those completion tokens that are attended to: the
    logits there give the tokens' log-probs."""
    scored = torch.zeros_like(attention_mask, dtype=torch.bool)
    scored[:, -completion_length - 1 : -1] = attention_mask[:, -completion_length:] != 0
    return scored


def component_scores(session: Session, rows: Rows, entropies: bool) -> Scores:
    """Compute the log-probs and entropies of rows with the run's scoring component. Collective.

    Args:
        rows: the rows, with the model and the functions that score them.
        entropies: whether entropies are needed.

    Raises:
        ComponentError: a plugin's scoring failed, or returned something else than scores of these rows.
    """
    component = _of_a_plugin(session)
    scores: Scores = asked(component, session.scoring, "score", rows)
    if component is None:
        return scores
    if not isinstance(scores, Scores):
        raise fault(component, "score", f"a {type(scores).__name__}", "a trlx_hybrid.contract.protocols.Scores")
    shape = (len(rows.input_ids), rows.completion_length)
    for name, needed in (("log_probs", True), ("entropies", entropies)):
        found = getattr(scores, name)
        if needed and (not isinstance(found, Tensor) or found.shape != shape):
            told = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"type {type(found).__name__}"
            raise fault(component, "score", f"{name} of {told}", f"a tensor of shape {shape}")
    if rows.router_loss and not isinstance(scores.router_loss, Tensor):
        raise fault(component, "score", f"a router_loss of type {type(scores.router_loss).__name__}", "a tensor")
    return scores


def component_groups(
    session: Session, micro_batches: Sequence[dict[str, Any]], prompts: Tensor, tokens: Sequence[int]
) -> list[dict[str, Any]]:
    """Return the rows of a rollout's micro-batches, regrouped into other micro-batches as the scoring component
    chooses.

    Args:
        micro_batches: the micro-batches that TRL drew.
        prompts: (rows, P) ids of all rows' prompts, -1 where padded.
        tokens: number of tokens of each row.

    Raises:
        ComponentError: a plugin's scoring failed, or did not put each row into exactly one of the equally large groups.
    """
    component = session.selection.scoring.component
    groups = asked(component, session.scoring, "micro_batches", prompts, tokens, len(micro_batches))
    if not isinstance(groups, Sequence) or not all(
        isinstance(group, Sequence) and all(isinstance(row, Integral) for row in group) for group in groups
    ):
        raise fault(component, "micro_batches", f"{groups!r:.80}", f"{len(micro_batches)} lists of row numbers")
    return regrouped(micro_batches, groups, str(component))


def component_joins(session: Session, tokens: Sequence[int]) -> int:
    """Return how many of the next micro-batches are scored in one forward pass, as the scoring component chooses.

    Args:
        tokens: number of tokens of each of the next micro-batches.

    Raises:
        ComponentError: a plugin's scoring failed, or returned something else than an integer of at least 1.
    """
    component = session.selection.scoring.component
    count = asked(component, session.scoring, "joined", tokens)
    if not isinstance(count, int) or count < 1:
        raise fault(component, "joined", f"{count!r:.80}", "a number of micro-batches, 1 or more,")
    return count


def _of_a_plugin(session: Session) -> Component | None:
    component = session.selection.scoring.component
    return None if component.plugin == BUILTIN else component
