"""The conformance check of algorithms, the components that choose prompts and groups, change rewards and advantages,
and add terms to the loss."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from ...algorithms import Algorithms
from ...contract.protocols import Groups, Scores
from ...errors import ComponentError
from .findings import ConformanceError, require

if TYPE_CHECKING:
    from .runs import Trainer

T = TypeVar("T")
ROWS = 64  # rows of the dataset from which prompts are drawn
GROUPS, SIZE, FUNCTIONS, TOKENS = 4, 4, 2, 6


def check_algorithm(trainer: Trainer, *, per_token: bool = False) -> None:
    """Call all methods of a trainer's algorithms as training does, and check what they return.

    The calls include rewards that differ, rewards that are all equal, rows and groups without any reward, prompts to
    draw, and micro-batches for the loss, with and without a `tool_mask`. They are then repeated with a second instance,
    because every rank has to get the same results, and with one that was restored from a checkpoint.

    Args:
        trainer: a GRPO trainer of `trlx_hybrid` with `HybridConfig.algorithm`. It need not have trained.
        per_token: whether to compute the terms of the loss also with advantages of shape (B, C), one for each token.
            TRL's own advantages have the shape (B,). TRL's loss takes both shapes, so a subclass of TRL's trainer may
            have advantages of shape (B, C).

    Raises:
        ConformanceError: a result is unusable, depends on something else than the calls, or differs after the state was
            restored from a checkpoint.
    """
    session = trainer.session
    chosen = session.selection.algorithms
    require(bool(chosen), "This trainer has no algorithm.", "Name one: HybridConfig(algorithm=[...]).")
    names = ", ".join(choice.component.name for choice in chosen)
    one, other = Algorithms(chosen, session), Algorithms(chosen, session)
    for algorithms in (one, other):
        require(
            algorithms.rounds >= 1 and algorithms.oversampling >= 1,
            f"{names}: rounds={algorithms.rounds}, oversampling={algorithms.oversampling}.",
            "A batch has one round and all of its prompts at least.",
        )
    _require_equal(
        [_answers(one, names, per_token), _answers(other, names, per_token)],
        f"{names}: asked the same in the same order, a second one answered otherwise.",
        "Ranks must answer alike: decide from what is given, and draw from random.Random(f'{session.args.seed}/...').",
    )
    states = [json.loads(json.dumps(_guarded(one.state, names, "state")))]
    resumed = Algorithms(chosen, session)
    _guarded(lambda: resumed.load_state(states[0]), names, "load_state")
    states.append(json.loads(json.dumps(resumed.state())))
    mend = "Let `state` return all that later answers depend on, and `load_state` take it up."
    _require_equal(states, f"{names}: after `load_state`, `state` returned something else.", mend)
    later = [_answers(one, names, per_token), _answers(resumed, names, per_token)]
    _require_equal(later, f"{names}: taken up from a checkpoint, it answered otherwise than without a break.", mend)


def _answers(algorithms: Algorithms, names: str, per_token: bool) -> list[object]:
    """Call all methods of the algorithms for two batches, and return the results as plain data that can be compared.

    Args:
        algorithms: a run's algorithms, called as one.
        names: their names, for messages.
        per_token: whether to compute the loss also with advantages of shape (B, C), one for each token. Each row's
            advantage is repeated for its tokens, and the loss must be the same as with the shape (B,).
    """
    found: list[object] = []
    for rewards in (torch.linspace(0.0, 1.0, GROUPS * SIZE * FUNCTIONS).view(GROUPS, SIZE, FUNCTIONS), _torn()):
        drawn = _guarded(lambda: algorithms.draw(GROUPS, ROWS), names, "draw")
        rows: list[int | None] = [None] * GROUPS if drawn is None else list(drawn)
        lengths = torch.arange(1, GROUPS * SIZE + 1).view(GROUPS, SIZE)
        groups = Groups(rewards, torch.tensor([1.0, 0.5]), lengths, lengths % 5 == 0, rows)
        before = {f.name: _copied(getattr(groups, f.name)) for f in fields(groups)}
        _guarded(lambda: algorithms.observe(groups), names, "observe")  # noqa: B023
        kept = _guarded(lambda: algorithms.keep(groups), names, "keep")  # noqa: B023
        shaped = _guarded(lambda: algorithms.rewards(groups), names, "rewards")  # noqa: B023
        advantages = _guarded(lambda: algorithms.advantages(shaped), names, "advantages")  # noqa: B023
        touched = [name for name, value in before.items() if not _same(value, getattr(groups, name))]
        require(
            not touched,
            f"{names} wrote into the groups' {', '.join(touched)}.",
            "Return a new tensor: what it was given is what others are asked about.",
        )
        found += [drawn, kept, _plain(shaped.rewards), _plain(advantages)]
        text, tools = _micro_batches()
        terms = [_loss(algorithms, names, batch) for batch in (text, tools)]
        if per_token:
            each = tools["advantages"].unsqueeze(1).expand(SIZE, TOKENS)
            _require_equal(
                [terms[1], _loss(algorithms, names, tools | {"advantages": each})],
                f"{names}: with a row's advantage at each of its tokens, the `loss` is another one.",
                "Take both shapes: `advantages if advantages.ndim == 2 else advantages.unsqueeze(1)`.",
            )
        found += terms
    return found


def _micro_batches() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return two micro-batches in the form that TRL passes to its loss: one of completions that the model alone has
    written, and one whose completions hold a tool's answer. In both, one row has no trained token."""
    mask = torch.ones(SIZE, TOKENS, dtype=torch.long)
    mask[0] = 0
    batch = {
        "advantages": torch.tensor([1.0, -1.0, 0.5, 0.0]),
        "completion_ids": torch.ones(SIZE, TOKENS, dtype=torch.long),
        "completion_mask": mask,
    }
    answered = torch.ones_like(mask)
    answered[:, 2:4] = 0
    return batch, batch | {"tool_mask": answered}


def _loss(algorithms: Algorithms, names: str, batch: dict[str, Tensor]) -> float | None:
    """Return the sum of the algorithms' loss terms for a micro-batch; None if there are no terms.

    Args:
        algorithms: a run's algorithms, called as one.
        names: their names, for messages.
        batch: the micro-batch.

    Raises:
        ConformanceError: the sum is not finite, has no gradient, or has one at tokens that are not trained.
    """
    log_probs = torch.linspace(-3.0, -0.1, SIZE * TOKENS).view(SIZE, TOKENS).requires_grad_()
    entropies = torch.linspace(0.1, 2.0, SIZE * TOKENS).view(SIZE, TOKENS).requires_grad_()
    scores = Scores(log_probs, entropies, None)
    terms = [t for t in _guarded(lambda: algorithms.loss(scores, batch), names, "loss").values() if t is not None]
    if not terms:
        return None
    added = torch.stack(terms).sum()
    require(bool(added.isfinite()), f"{names} returned {added.item()} from `loss`.", "A row may have no tokens.")
    require(added.requires_grad, f"{names} returned a `loss` without gradients.", "Compute it from scores.log_probs.")
    torch.autograd.backward(added)
    untrained = batch["completion_mask"] * batch.get("tool_mask", torch.tensor(1)) == 0
    for gradient in (log_probs.grad, entropies.grad):
        require(
            gradient is None or not gradient[untrained].any(),
            f"{names}: the `loss` has a gradient at tokens that are not trained.",
            'Multiply by batch["completion_mask"], and by batch["tool_mask"] where it has one.',
        )
    return float(added.detach())


def _torn() -> Tensor:
    """Return rewards of shape (groups, completions, functions) of which some are NaN, that is, missing.

    In the first group all rewards are equal. In the second group all rewards of one completion are missing. In the
    third group all rewards are missing. In the fourth group all rewards of one function are missing.
    """
    rewards = torch.rand(GROUPS, SIZE, FUNCTIONS, generator=torch.Generator().manual_seed(0))
    rewards[0] = 1.0
    rewards[1, 0], rewards[2] = float("nan"), float("nan")
    rewards[3, :, 1] = float("nan")
    return rewards


def _guarded(ask: Callable[[], T], names: str, method: str) -> T:
    try:
        return ask()
    except ComponentError as error:
        raise ConformanceError(str(error)) from error
    except Exception as error:
        raise ConformanceError(f"{names} failed in `{method}`: {type(error).__name__}: {error}") from error


def _copied(value: Tensor | Sequence[object]) -> Tensor | Sequence[object]:
    return value.clone() if isinstance(value, Tensor) else list(value)


def _same(one: Tensor | Sequence[object], other: Tensor | Sequence[object]) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one.nan_to_num(), other.nan_to_num())
    return list(one) == list(other)


def _plain(tensor: Tensor | None) -> object:
    return None if tensor is None else tensor.nan_to_num(nan=-1e30).tolist()


def _require_equal(values: Sequence[object], found: str, mend: str) -> None:
    require(values[0] == values[1], found, mend)
