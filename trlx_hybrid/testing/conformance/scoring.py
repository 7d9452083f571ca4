"""The conformance check of scorings, the components that compute log-probs for the trainer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...config import AUTO
from ...contract.protocols import Rows, Scores, Scoring
from ...policy.policy import evaluating
from ...policy.precision import TOLERANCE, autocast_dtype, coarsest
from .findings import ConformanceError, require

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...plugins.selection import Choice
    from ...session import Session
    from .runs import Trainer

IGNORED = -100
"""The label of a position whose next token is not scored, as in transformers."""

PROMPTS = ((5, 6, 7, 40), tuple(range(10, 42)), tuple(range(10, 42)), (9,), tuple(range(60, 77)), (30, 31))
"""The prompts of the scored rows, as token ids; two are equal and long, so that a scoring may share them."""

LENGTHS = (7, 3, 9, 9, 1, 5)
"""The number of tokens of each row's completion."""

MASKED = 5
"""The row whose completion is masked whole, as TRL masks truncated completions and conversations that broke off."""

AT_ONCE = 2


def check_scoring(trainer: Trainer) -> None:
    """Score rows of many lengths with the trainer's scoring, and compare log-probs, entropies and gradients with those
    of each row alone. Then let the scoring choose micro-batches, if it does so, and close it.

    Args:
        trainer: a GRPO or RLOO trainer of `trlx_hybrid` with `HybridConfig.scoring`; it need not have trained. Give it
            another temperature than 1, to check that the scoring divides the logits by it.

    Raises:
        ConformanceError: the scores are not the model's, or the scoring does something else than
            `trlx_hybrid.contract.protocols.Scoring` says.
    """
    session = trainer.session
    require(
        session.config.scoring != AUTO,
        "This trainer has no scoring of a plugin.",
        "Name one: HybridConfig(scoring=...).",
    )
    dtype = coarsest(session.policy.dtype, autocast_dtype(session.args))
    temperature = float(session.args.temperature)
    model = _Model(session.policy.base, temperature)
    with evaluating(session.policy.base):
        checked = _Checked(session.selection.scoring, session, model, TOLERANCE[dtype])
        checked.scores()
        checked.gradients()
        checked.groups()
        checked.closed()


class _Model:
    """A model that scores the checked rows for a scoring component, as the trainer does, and refuses forward passes of
    more than AT_ONCE rows.

    Attributes:
        base: the transformers model.
        temperature: the temperature by which logits are divided.
    """

    def __init__(self, base: PreTrainedModel, temperature: float) -> None:
        self.base, self.temperature = base, temperature

    def rows(self, entropies: bool) -> Rows:
        """Return the check's six rows (PROMPTS with completions of LENGTHS tokens) as the `Rows` that a scoring
        component is called with.

        Args:
            entropies: whether `forward` and `padded`, the functions in the `Rows` that compute log-probs, compute
                entropies, too.
        """
        input_ids, mask = _batch(self.base.device)

        def forward(
            labels: Tensor, input_ids: Tensor, experts: None = None, support: None = None, **inputs: object
        ) -> Scores:
            require(
                len(input_ids) <= AT_ONCE,
                f"`rows.forward` was given {len(input_ids)} rows where `rows.at_once` is {AT_ONCE}.",
                "Split the rows: memory was planned for so many.",
            )
            return self._scored(self.base(input_ids=input_ids, **inputs).logits, labels, self.temperature, entropies)

        return Rows(
            model=self.base,
            input_ids=input_ids,
            attention_mask=mask,
            completion_length=max(LENGTHS),
            at_once=AT_ONCE,
            router_loss=False,
            padded=lambda: self.alone(entropies=entropies),
            forward=forward,
        )

    def alone(self, temperature: float | None = None, entropies: bool = True) -> Scores:
        """Return the scores of the check's rows. Each row is computed in a forward pass of its own, without padding.

        Args:
            temperature: the temperature by which logits are divided; None for the run's.
            entropies: whether to return entropies beside the log-probs.
        """
        scored = []
        for prompt, length, completion in zip(PROMPTS, LENGTHS, _completions(), strict=True):
            ids = torch.tensor([[*prompt, *completion]], device=self.base.device)
            labels = torch.full_like(ids, IGNORED)
            labels[:, len(prompt) - 1 : -1] = ids[:, len(prompt) :]
            found = self._scored(self.base(input_ids=ids).logits, labels, temperature or self.temperature, True)
            assert found.entropies is not None
            kept = slice(len(prompt) - 1, len(prompt) - 1 + length)
            pad = (0, max(LENGTHS) - length)
            scored.append([torch.nn.functional.pad(one[0, kept], pad) for one in (found.log_probs, found.entropies)])
        log_probs, of_all = (torch.stack(parts) for parts in zip(*scored, strict=True))
        trained = _trained(log_probs.device)
        return Scores(log_probs * trained, of_all * trained if entropies else None, None)

    @staticmethod
    def _scored(logits: Tensor, labels: Tensor, temperature: float, entropies: bool) -> Scores:
        """Return the log-probs, and if asked for the entropies, of the tokens in `labels`, computed from logits.

        Args:
            logits: (b, t, vocabulary).
            labels: (b, t) int64, the token to score at each position, IGNORED for none.
        """
        log_probs = (logits.float() / temperature).log_softmax(-1)
        scored = labels != IGNORED
        chosen = log_probs.gather(-1, labels.where(scored, 0)[..., None])[..., 0]
        of_all = -(log_probs.exp() * log_probs).sum(-1)
        return Scores(chosen * scored, of_all * scored if entropies else None, None)


class _Checked:
    """The steps of `check_scoring`, one per method, on a newly built scoring component.

    Args:
        choice: the scoring component and its options.
        session: the trainer's run.
        model: the model that scores.
        allowed: the largest allowed difference of one token's log-prob, in nats.
    """

    def __init__(self, choice: Choice, session: Session, model: _Model, allowed: float) -> None:
        self._model, self._allowed, self._name = model, allowed, f"scoring {choice.component.name!r}"
        self._before = _described(model.base)
        self._scoring: Scoring = choice.component.build(session, choice.options)

    def scores(self) -> None:
        """Check log-probs computed without gradients, twice, as for the old log-probs of two rollouts."""
        with torch.no_grad():
            expected = self._model.alone()
            for _ in range(2):
                self._compare(self._asked(entropies=False).log_probs, expected.log_probs, "log-probs")

    def gradients(self) -> None:
        """Check log-probs, entropies and gradients, computed as for a loss."""
        of_ours, of_model = self._asked(entropies=True), self._model.alone()
        entropies = of_ours.entropies
        require(
            isinstance(entropies, Tensor) and entropies.shape == of_ours.log_probs.shape,
            f"{self._name} returned no entropies in the shape of its log-probs, where they were asked for.",
            "Return those of `rows.forward` or `rows.padded`, which has them where the loss needs them.",
        )
        assert entropies is not None
        assert of_model.entropies is not None
        self._compare(of_ours.log_probs.detach(), of_model.log_probs.detach(), "log-probs, asked with gradients,")
        self._compare(entropies.detach(), of_model.entropies.detach(), "entropies")
        require(
            of_ours.log_probs.requires_grad,
            f"{self._name} returned log-probs without gradients for a loss.",
            "Compute them outside of torch.no_grad.",
        )
        weights = [p for p in self._model.base.parameters() if p.requires_grad]
        ours, models = (
            torch.autograd.grad((scores.log_probs * _weighted(scores.log_probs)).sum(), weights, allow_unused=True)
            for scores in (of_ours, of_model)
        )
        gaps = [_gap(one, other) for one, other in zip(ours, models, strict=True)]
        allowed = 10 * self._allowed
        require(
            max(gaps) <= allowed,
            f"{self._name}: a parameter's gradient differs from that of the rows alone by {max(gaps):.3g} of its norm "
            f"({allowed:g} are allowed).",
            "Cut nothing out of the graph, and let each token's log-prob count once.",
        )

    def groups(self) -> None:
        """Check the micro-batches that the scoring chooses, and its number of micro-batches per forward and backward
        pass. A choice that the scoring leaves to the trainer is not checked."""
        tokens = [len(prompt) + length for prompt, length in zip(PROMPTS, LENGTHS, strict=True)]
        if self._scoring.balanced:
            input_ids, mask = _batch(self._model.base.device)
            prompts = input_ids.masked_fill(mask == 0, -1)[:, : -max(LENGTHS)]
            for count in (1, 2, 3):
                found = [list(rows) for rows in self._scoring.micro_batches(prompts, tokens, count)]
                size = len(tokens) // count
                dealt = sorted(row for rows in found for row in rows)
                require(
                    [len(rows) for rows in found] == [size] * count and dealt == list(range(len(tokens))),
                    f"{self._name}: `micro_batches` dealt {len(tokens)} rows out as {found}, for {count} of them.",
                    f"Return {count} lists of {size} row numbers, each row in one of them.",
                )
        if self._scoring.joins:
            joined = self._scoring.joined(tokens)
            require(
                type(joined) is int and joined >= 1,
                f"{self._name}: `joined` returned {joined!r}.",
                "Return how many micro-batches share a pass, 1 or more.",
            )

    def closed(self) -> None:
        """Close the scoring, and check that the model is as it was before the scoring was built."""
        note = self._scoring.note()
        require(note is None or isinstance(note, str), f"{self._name}: `note` returned {note!r}.", "Return a line.")
        self._scoring.close()
        changed = [name for name, value in _described(self._model.base).items() if self._before[name] != value]
        require(
            not changed,
            f"{self._name}: after `close`, the model has other {', '.join(changed)} than before.",
            "Put back in `close` what was changed: the model outlives the run.",
        )

    def _asked(self, entropies: bool) -> Scores:
        """Return the scores that the scoring computes for the rows, after checking their shape, and that the scoring
        has not written into the rows.

        Args:
            entropies: whether entropies are asked for.
        """
        rows = self._model.rows(entropies)
        given = rows.input_ids.clone(), rows.attention_mask.clone()
        try:
            scores = self._scoring.score(rows)
        except ConformanceError as error:
            raise ConformanceError(f"{self._name}: {error}") from error
        except Exception as error:
            raise ConformanceError(f"{self._name} failed in `score`: {type(error).__name__}: {error}") from error
        shape = (len(rows.input_ids), rows.completion_length)
        require(
            isinstance(scores, Scores) and isinstance(scores.log_probs, Tensor) and scores.log_probs.shape == shape,
            f"{self._name}: `score` did not return Scores with log-probs of shape {shape}.",
            "One for each token of a completion, in the order of the rows, padded to `rows.completion_length`.",
        )
        require(
            torch.equal(given[0], rows.input_ids) and torch.equal(given[1], rows.attention_mask),
            f"{self._name} wrote into the rows that it was given.",
            "Copy them: the loss reads them afterwards.",
        )
        return scores

    def _compare(self, found: Tensor, expected: Tensor, what: str) -> None:
        """Check scores against those of each row computed alone.

        Args:
            found: the scores that the scoring returned, (B, C).
            expected: the scores of each row computed alone, (B, C).
            what: what the scores are, for messages.

        Raises:
            ConformanceError: they differ; the message names the likely mistake.
        """
        require(
            bool(found.isfinite().all()),
            f"{self._name}: some {what} are not finite.",
            "Return 0 where a token is masked: what is multiplied by the mask's 0 must be a number.",
        )
        trained = _trained(found.device).bool()
        gap = (found - expected).abs().where(trained, 0.0)
        if float(gap.max()) <= self._allowed:
            return
        row, token = (int(place) for place in (gap == gap.max()).nonzero()[0])
        text = (
            f"{self._name}: {what} of row {row} are {float(gap.max()):.3g} off at token {token} "
            f"({self._allowed:g} are allowed)."
        )
        require(False, text, self._likely(found, expected, row))

    def _likely(self, found: Tensor, expected: Tensor, row: int) -> str:
        """Return a sentence that names the likely mistake of a scoring whose scores are not the model's.

        Args:
            found: the scores that the scoring returned, (B, C).
            expected: the model's scores, (B, C).
            row: number of the row that differs most.
        """
        length = LENGTHS[row]
        mine = found[row, :length]

        def near(other: Tensor) -> bool:
            return len(other) > 1 and bool(((mine[: len(other)] - other).abs() <= self._allowed).all())

        if near(expected[row, 1:length]):
            return "They fit when moved by one token: column 0 is the first token of the completion."
        if any(near(expected[other, :length]) for other in range(len(expected)) if other != row):
            return "They are another row's: return the rows in the order in which they were given."
        if self._model.temperature != 1.0 and near(self._model.alone(temperature=1.0).log_probs[row, :length]):
            return f"They are those at temperature 1, not at {self._model.temperature:g}, at which was sampled."
        return "A row attends to its own tokens only, neither to padding nor to a neighbour, and counts positions anew."


def _completions() -> list[list[int]]:
    """Return the completion of each checked row as token ids."""
    return [[20 + (7 * row + 3 * place) % 60 for place in range(length)] for row, length in enumerate(LENGTHS)]


def _batch(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return token ids and attention mask, (6, P + C) each, of the checked rows, padded as TRL does it: prompts on the
    left, completions on the right."""
    width, longest = max(map(len, PROMPTS)), max(LENGTHS)
    ids, masks = [], []
    for row, (prompt, completion) in enumerate(zip(PROMPTS, _completions(), strict=True)):
        left, right = [0] * (width - len(prompt)), [0] * (longest - len(completion))
        ids.append([*left, *prompt, *completion, *right])
        masks.append([*left, *[1] * len(prompt), *[int(row != MASKED)] * len(completion), *right])
    return torch.tensor(ids, device=device), torch.tensor(masks, device=device)


def _trained(device: torch.device) -> Tensor:
    """Return the mask of the completions' tokens that are trained on: (6, C), 1 for these and 0 for all others."""
    return _batch(device)[1][:, -max(LENGTHS) :]


def _weighted(like: Tensor) -> Tensor:
    """Return arbitrary weights for the log-probs of the six checked rows, 0 where a token is masked. The gradient of
    the log-probs' weighted sum is checked; the sum stands for a loss, and the weights for its advantages.

    Args:
        like: a (6, C) tensor, such as the log-probs, that gives the weights their shape and device.
    """
    return torch.linspace(-1.0, 1.0, like.numel(), device=like.device).view_as(like) * _trained(like.device)


def _gap(one: Tensor | None, other: Tensor | None) -> float:
    """Return the norm of the difference of two gradients, relative to the norm of the second. Where only one of them is
    None the result is infinite; where both are, 0."""
    if one is None or other is None:
        return 0.0 if one is other else math.inf
    return float((one - other).norm() / other.norm().clamp(min=1e-6))


def _described(model: PreTrainedModel) -> dict[str, object]:
    """Return what a scoring may change of a model for its own use, and must restore."""
    return {
        "attention": model.config._attn_implementation,
        "config": model.config.to_dict(),
        "forward": [vars(module).get("forward") for module in model.modules()],
        "mode": [module.training for module in model.modules()],
        "weights": [float(tensor.detach().double().sum()) for tensor in model.state_dict().values()],
    }
