"""Log-probs over the kept ids, which are the ids that truncated sampling (top-k, top-p, min-p) left for a token. While
a model scores such tokens, they replace the log-probs over the whole vocabulary that TRL's head computes.

TRL 1.16 projects hidden states in tiles and never holds all logits (`trl/kernels/chunked_logprob.py`). The function
here does the same, but leaves out the ids that the engine could not sample. A token's log-prob is its logit minus the
logarithm of the sum of exp(logit) over the kept ids, at the run's temperature. The function also computes the
probability that the kept ids have together in the whole distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...contract.support import UNSAMPLED, WORD, KeptTokens
from ...errors import ComponentError

TOKENS = 512
"""The number of tokens in a tile. TRL uses 4,096; here a tile needs more memory, about 16 bytes per logit in addition
to the logit itself."""


@contextmanager
def scoring_over(kept: KeptTokens | None, scored: Tensor, masses: list[Tensor], trl: Any) -> Iterator[None]:
    """Return a context in which TRL's fused head computes log-probs over the kept ids only. Inside, a model must score
    the given positions once and in order, in any number of calls.

    Args:
        kept: the kept ids of the positions; None leaves TRL's head as it is.
        scored: bool, one for each position: whether it has a label.
        masses: a list to which each call of the head appends a (2,) float: the sum, over the sampled tokens, of the
            logarithm of the kept ids' probability in the whole distribution; and the number of these tokens.
        trl: `trl.trainer.utils`, in which TRL's head looks its function up by name.

    Raises:
        ComponentError: the model scored other positions.
    """
    if kept is None:
        yield
        return
    head = _Head(kept, scored.flatten(), masses, trl)
    stock, trl._ChunkedLogProbFunction = trl._ChunkedLogProbFunction, head
    try:
        yield
    finally:
        trl._ChunkedLogProbFunction = stock
    head.end()


class _Head:
    """An object in the place of TRL's autograd function `_ChunkedLogProbFunction`. TRL calls only `apply`, which here
    computes log-probs over the kept ids (those that top-k, top-p and the like left) and not over the vocabulary."""

    def __init__(self, kept: KeptTokens, scored: Tensor, masses: list[Tensor], trl: Any) -> None:
        self._trl = trl
        bounds = kept.bounds.flatten(0, -2)
        self._kept, self._masses = replace(kept, bounds=bounds), masses
        self._scored = scored.to(bounds.device)
        self._at, self._of = 0, len(scored)  # number of scored positions, and of all positions

    def apply(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None,
        logit_scale: float,
        outputs: Sequence[str],
    ) -> tuple[Tensor | None, ...]:
        """Return what TRL's function `_ChunkedLogProbFunction.apply` returns for the N positions in `hidden`: (N,)
        log-probs, entropies if `outputs` has "entropy", and None for the outputs that only other trainers of TRL read.
        The arguments are TRL's. The positions must follow those of the previous call, as kept ids are used in order."""
        if len(weight) != self._kept.vocabulary:
            raise ComponentError(
                f"The engine samples from {self._kept.vocabulary} ids, and the trainer's head has {len(weight)}: the "
                "support of a token says nothing of the others. Report it with `trlx-hybrid env`."
            )
        if self._at == 0 and self._trl._use_triton(hidden.device):  # TRL then skips positions without a label
            self._kept, self._scored = self._kept[self._scored], self._scored[self._scored]
            self._of = len(self._scored)
        part = slice(self._at, self._at + len(hidden))
        self._at = part.stop
        if part.stop > self._of:
            self.end()
        here = self._kept[part].on(hidden.device)
        projection = Projection(chunk_size, 1 / temperature, softcap, logit_scale, self._trl.maybe_gather_lm_head_ctx)
        log_probs, entropies, mass = KeptLogProbs.apply(hidden, weight, bias, targets, here, projection)  # type: ignore[no-untyped-call]
        sampled = (here.bounds[:, 0] != UNSAMPLED) & self._scored[part].to(hidden.device)
        self._masses.append(torch.stack([mass[sampled].sum(), sampled.sum()]))
        return log_probs, entropies if "entropy" in outputs else None, None, None, None

    def end(self) -> None:
        """Check, after a scoring call, that the model has passed to `apply` as many positions as there are kept ids
        for: with more or fewer, kept ids were used for wrong tokens.

        Raises:
            ComponentError: the two numbers differ.
        """
        if self._at != self._of:
            raise ComponentError(
                f"A model scored {self._at} tokens, and the support of {self._of} is known. What scores must compute "
                "each token that it was given once: adapters that put tokens before the prompt do not. Set "
                "vllm_importance_sampling_correction=False."
            )


@dataclass(frozen=True, slots=True)
class Projection:
    """The computation from hidden states to logits, tile by tile.

    Attributes:
        chunk_size: number of ids in a tile.
        inverse_temperature: the factor by which logits are multiplied last.
        softcap: the soft cap of the logits, applied before the temperature; None for no cap.
        logit_scale: the factor by which logits are multiplied first.
        gathered: called with the head's weight and bias; returns a context in which both are whole, also where they are
            sharded.
    """

    chunk_size: int
    inverse_temperature: float
    softcap: float | None
    logit_scale: float
    gathered: Callable[[Tensor, Tensor | None], AbstractContextManager[Any]] = lambda weight, bias: nullcontext()

    def tile(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Compute the logits of some tokens for a part of the vocabulary.

        Args:
            hidden: (n, H).
            weight: (ids, H), the head's rows of these ids.
            bias: (ids,), or None.

        Returns:
            (n, ids) float32 logits; and the tanh from which the soft cap's derivative is computed, or None without a
            cap.
        """
        product = hidden @ weight.to(hidden.dtype).t()
        if bias is not None:
            product += bias.to(hidden.dtype)
        logits = product.float() * self.logit_scale
        if self.softcap is None:
            return logits * self.inverse_temperature, None
        capped = torch.tanh(logits / self.softcap)
        return self.softcap * capped * self.inverse_temperature, capped


class _Sum:
    """A log-sum-exp of logits that is accumulated tile by tile, and the mean of the logits under the softmax
    distribution."""

    def __init__(self, like: Tensor) -> None:
        self._max = torch.full((len(like),), -torch.inf, device=like.device)
        self._sum, self._weighted = torch.zeros_like(self._max), torch.zeros_like(self._max)

    def add(self, logits: Tensor, kept: Tensor | None = None) -> None:
        exponents = logits if kept is None else logits.masked_fill(~kept, -torch.inf)
        largest = torch.maximum(self._max, exponents.amax(1))
        base = largest.masked_fill(largest == -torch.inf, 0.0)  # no id was kept so far
        before, terms = torch.exp(self._max - base), torch.exp(exponents - base[:, None])
        self._sum = self._sum * before + terms.sum(1)
        self._weighted = self._weighted * before + (terms * logits).sum(1)
        self._max = largest

    def log(self) -> Tensor:
        return self._max + torch.log(self._sum)

    def mean(self) -> Tensor:
        return self._weighted / self._sum


def _columns(masks: Tensor, start: int, end: int) -> Tensor:
    """Return columns `start` to `end` of bit masks as (n, end - start) bool: whether each token's mask contains these
    ids.

    Args:
        masks: (n, words) int32, one bit per id, the least significant bit first.
    """
    first = start // WORD
    words = masks[:, first : -(-end // WORD), None] >> torch.arange(WORD, device=masks.device, dtype=torch.int32)
    return (words & 1).bool().flatten(1)[:, start - first * WORD : end - first * WORD]


class KeptLogProbs(torch.autograd.Function):
    """An autograd function that computes three numbers for each of N tokens: the log-prob and the entropy over the
    token's kept ids (the ids that top-k, top-p and the like left), and the logarithm of the probability that the kept
    ids have together in the whole distribution. The third number has no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        kept: KeptTokens,
        projection: Projection,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute three numbers for each of N tokens, from the ids that truncated sampling left for it (its kept ids).

        Args:
            hidden: (N, H) hidden states.
            weight: (V, H), the head's weight.
            bias: (V,), the head's bias, or None.
            targets: (N,) int64, the ids whose log-probs are computed.
            kept: the kept ids of the N tokens.
            projection: how logits are computed.

        Returns:
            Tensors of shape (N,) in float32: the targets' log-probs over the kept ids; the entropies of the
                distributions over the kept ids; and, without a gradient, the logarithm of the probability that a
                token's kept ids have together among all ids.
        """
        ctx.set_materialize_grads(False)
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        parts: list[tuple[Tensor, ...]] = [(hidden.new_zeros(0, dtype=torch.float32),) * 4]
        for part in _parts(len(hidden), TOKENS):
            states, wanted = hidden[part].to(dtype), targets[part]
            masks = kept[part].masks()
            every, some, logit = _Sum(states), _Sum(states), states.new_full((len(states),), -torch.inf).float()
            for ids in _parts(len(weight), projection.chunk_size):
                logits, _ = projection.tile(states, weight[ids], None if bias is None else bias[ids])
                inside = _columns(masks, ids.start, ids.stop)
                every.add(logits)
                some.add(logits, inside)
                here = (wanted >= ids.start) & (wanted < ids.stop)
                at = (wanted - ids.start).clamp(0, logits.shape[1] - 1)[:, None]
                found = logits.masked_fill(~inside, -torch.inf).gather(1, at)[:, 0]
                logit = torch.where(here, found, logit)
            total = some.log()
            parts.append((logit - total, total - some.mean(), total - every.log(), total))
        log_probs, entropies, masses, totals = map(torch.cat, zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, bias, targets, entropies, totals)
        ctx.kept, ctx.projection, ctx.dtype = kept, projection, dtype
        ctx.mark_non_differentiable(masses)
        return log_probs, entropies, masses

    @staticmethod
    def backward(ctx: Any, log_prob_grads: Tensor | None, entropy_grads: Tensor | None, *_: Any) -> tuple[Any, ...]:
        """Return the gradients of the inputs: recompute the logits of each tile, and sum the tiles' gradients in
        float32."""
        hidden, weight, bias, targets, entropies, totals = ctx.saved_tensors
        projection, (of_hidden, of_weight, of_bias) = ctx.projection, ctx.needs_input_grad[:3]
        with projection.gathered(weight, bias):
            hidden_grad, weight_grad, bias_grad = (
                torch.zeros(like.shape, device=like.device) if wanted else None
                for like, wanted in ((hidden, of_hidden), (weight, of_weight), (bias, of_bias))
            )
            for part in _parts(len(hidden), TOKENS):
                states, masks = hidden[part].to(ctx.dtype), ctx.kept[part].masks()
                for ids in _parts(len(weight), projection.chunk_size):
                    rows = weight[ids].to(ctx.dtype)
                    logits, capped = projection.tile(states, rows, None if bias is None else bias[ids])
                    inside = _columns(masks, ids.start, ids.stop)
                    log_p = torch.where(inside, logits - totals[part, None], -torch.inf)
                    p, grad = log_p.exp(), torch.zeros_like(logits)
                    if log_prob_grads is not None:
                        target = torch.arange(ids.start, ids.stop, device=p.device) == targets[part, None]
                        grad += log_prob_grads[part, None].float() * (target.float() - p)
                    if entropy_grads is not None:
                        surprise = torch.where(inside, log_p + entropies[part, None], 0.0)
                        grad -= entropy_grads[part, None].float() * p * surprise
                    grad *= projection.inverse_temperature * projection.logit_scale
                    if capped is not None:
                        grad *= 1 - capped * capped
                    tile = grad.to(ctx.dtype)
                    if hidden_grad is not None:
                        _add_product(hidden_grad[part], tile, rows)
                    if weight_grad is not None:
                        _add_product(weight_grad[ids], tile.t(), states)
                    if bias_grad is not None:
                        bias_grad[ids] += tile.sum(dim=0, dtype=torch.float32)
        grads = ((hidden_grad, hidden), (weight_grad, weight), (bias_grad, bias))
        return *(None if grad is None else grad.to(like.dtype) for grad, like in grads), None, None, None


def _add_product(to: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left @ right` to `to` in float32: rounding each tile's product would bias training, as TRL has found."""
    if to.device.type == "cuda" and left.dtype in (torch.float16, torch.bfloat16):
        torch.addmm(to, left, right, out_dtype=torch.float32, out=to)
    else:
        to.addmm_(left.float(), right.float())


def _parts(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))
