"""One object that stands for all algorithms of a run: each call is passed on to them in order. The prompts, rewards,
advantages and losses that they return are checked for shape and type; errors name the algorithm."""

from __future__ import annotations

import functools
import json
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .blame import asked, asked_text, blaming, fault
from .contract.protocols import Algorithm, Groups, Scores
from .errors import ComponentError, ConfigError
from .plugins.checks import overrides

if TYPE_CHECKING:
    from .interprocess.ranks import Ranks
    from .plugins.registry import Component
    from .plugins.selection import Choice


class Algorithms:
    """A run's algorithms, in the order in which they act; there may be none.

    Args:
        chosen: the chosen components with the user's options.
        session: the run's session.

    Attributes:
        rounds: the largest number of rounds of sampling for one batch that an algorithm asks for; 1 without algorithms.
        oversampling: the largest number of prompts in the first round that an algorithm asks for, as a multiple of the
            batch's; 1 without algorithms.

    Raises:
        ConfigError: two algorithms decide the same thing (prompts or advantages).
        ComponentError: an algorithm's `rounds` or `oversampling` is no number of 1 or more.
    """

    def __init__(self, chosen: Sequence[Choice], session: Any) -> None:
        self._ranks: Ranks = session.ranks
        self._seed: int = session.args.seed
        self._built: list[tuple[Component, Algorithm]] = [
            (choice.component, choice.component.build(session, choice.options)) for choice in chosen
        ]
        for method in ("draw", "advantages"):
            several = [component.name for component, _ in self._having(method)]
            if len(several) > 1:
                raise ConfigError(
                    f"HybridConfig.algorithm: {' and '.join(map(repr, several))} both decide about "
                    f"{'prompts' if method == 'draw' else method}. Leave all but one of them out."
                )
        for component, algorithm in self._built:
            for name in ("rounds", "oversampling"):
                number = getattr(algorithm, name)
                if not isinstance(number, int | float) or number < 1:
                    raise ComponentError(f"The {component} has {name}={number!r}, and it is a number of 1 or more.")
        self.rounds = max([1, *(algorithm.rounds for _, algorithm in self._built)])
        self.oversampling = max([1.0, *(algorithm.oversampling for _, algorithm in self._built)])
        self._drawn = (-1, 0)  # (weight version, number of random draws in it)

    def __bool__(self) -> bool:
        return bool(self._built)

    def _having(self, method: str) -> list[tuple[Component, Algorithm]]:
        return [(c, a) for c, a in self._built if overrides(a, method, Algorithm)]

    @functools.cached_property
    def draws(self) -> bool:
        """True where an algorithm chooses the batch's prompts."""
        return bool(self._having("draw"))

    @functools.cached_property
    def filters(self) -> bool:
        """True where more groups (the completions of one prompt) may be sampled for a batch than are trained on."""
        return self.rounds > 1 or self.oversampling > 1 or bool(self._having("keep"))

    @functools.cached_property
    def judges(self) -> bool:
        """True where an algorithm observes or replaces rewards or advantages. It then needs the rewards of every batch,
        even if no groups are chosen by them."""
        return any(self._having(method) for method in ("observe", "rewards", "advantages"))

    @property
    def advantages_by(self) -> str | None:
        """The name of the algorithm that computes the advantages; None where no algorithm does."""
        return next((component.name for component, _ in self._having("advantages")), None)

    @property
    def loss_terms_by(self) -> str | None:
        """The name of the first algorithm that adds to the loss, or None."""
        return next((component.name for component, _ in self._having("loss")), None)

    # --- prompts ----------------------------------------------------------------------------------------------------

    def draw(self, count: int, size: int) -> list[int] | None:
        """Return `count` row numbers of a dataset of `size` rows, as an algorithm has chosen them. None where no
        algorithm chooses prompts, or where the algorithm leaves the choice to the run.

        Raises:
            ComponentError: the algorithm returned something else, or not the same on all ranks.
        """
        for component, algorithm in self._having("draw"):
            drawn = asked(component, algorithm, "draw", count, size)
            if drawn is not None and not isinstance(drawn, Iterable):
                raise fault(component, "draw", repr(drawn), f"{count} row numbers below {size}")
            rows = None if drawn is None else [getattr(row, "item", lambda row=row: row)() for row in drawn]
            self._agree(component, "draw", rows)
            if rows is None:
                continue
            if len(rows) != count or not all(isinstance(row, int) and 0 <= row < size for row in rows):
                raise fault(component, "draw", f"{rows!r:.80}", f"{count} row numbers below {size}")
            return rows
        return None

    def draw_or_any(self, count: int, size: int, weight_version: int) -> list[int]:
        """Return `count` row numbers of the dataset, of the prompts to sample next: those that an algorithm's `draw`
        chooses, or random ones where it leaves the choice to the run.

        Random rows differ from each other where the dataset has enough. They depend only on the run's seed, the weight
        version, and how many random draws this version has had.

        Args:
            count: number of rows.
            size: number of rows of the dataset.
            weight_version: the version of the weights that will sample.
        """
        drawn = self.draw(count, size)
        if drawn is not None:
            return drawn
        version, number = self._drawn
        self._drawn = (weight_version, number + 1 if version == weight_version else 0)
        generator = random.Random(f"{self._seed}/{weight_version}/{self._drawn[1]}")
        order = generator.sample(range(size), min(count, size))
        return [order[i % len(order)] for i in range(count)]

    # --- batches ----------------------------------------------------------------------------------------------------

    def observe(self, groups: Groups) -> None:
        """Pass the groups of a round of sampling, with their rewards, to all algorithms that override `observe`, which
        for instance choose later prompts by them."""
        for component, algorithm in self._having("observe"):
            asked(component, algorithm, "observe", groups)

    def keep(self, groups: Groups) -> list[bool]:
        """Return for each group whether all algorithms keep it for training; a group without any reward is never kept.
        Collective.

        Raises:
            ComponentError: an algorithm returned something else than a bool per group, or not the same on all ranks.
        """
        kept = (~groups.totals.isnan()).any(dim=1).tolist()
        for component, algorithm in self._having("keep"):
            found = asked(component, algorithm, "keep", groups)
            if not isinstance(found, Iterable):
                raise fault(component, "keep", repr(found), "True or False for each group")
            answer = list(found)
            if other := [flag for flag in answer if not isinstance(flag, bool)]:
                raise fault(component, "keep", repr(other[0]), "True or False for each group")
            self._agree(component, "keep", answer)
            if len(answer) != len(groups):
                raise fault(component, "keep", f"{len(answer)} values", f"one for each of {len(groups)} groups")
            kept = [both and flag for both, flag in zip(kept, answer, strict=True)]
        return kept

    def rewards(self, groups: Groups) -> Groups:
        """Return the groups with the rewards that the algorithms put in place of the given ones.

        Raises:
            ComponentError: an algorithm returned a tensor of another shape, or no finite number where a reward function
                returned a number.
        """
        for component, algorithm in self._having("rewards"):
            given = groups.rewards
            found = asked(component, algorithm, "rewards", groups)
            rewards = _shaped(component, "rewards", found, given, ~given.isnan())
            rewards = rewards.masked_fill(given.isnan(), math.nan)
            groups = Groups(rewards, groups.weights, groups.lengths, groups.truncated, groups.rows)
        return groups

    def advantages(self, groups: Groups) -> Tensor | None:
        """Return the advantages of the algorithm that computes them, (groups, num_generations), 0 where a row has no
        reward. None where no algorithm computes any, so that TRL's are used.

        Raises:
            ComponentError: an algorithm returned a tensor of another shape, or numbers that are not finite.
        """
        for component, algorithm in self._having("advantages"):
            advantages = asked(component, algorithm, "advantages", groups)
            scored = ~groups.totals.isnan()
            if advantages is not None:
                advantages = _shaped(component, "advantages", advantages, groups.totals, scored)
                return advantages.masked_fill(~scored, 0.0)
        return None

    def loss(self, scores: Scores, batch: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
        """Return the term that each algorithm with a method `loss` adds to a micro-batch's loss, by the algorithm's
        name; None where it adds nothing.

        Args:
            scores: log-probs and entropies of the micro-batch's rows, with gradients.
            batch: the tensors that TRL computes the loss from, by TRL's names.

        Raises:
            ComponentError: an algorithm returned something else than a scalar tensor.
        """
        terms: dict[str, Tensor | None] = {}
        for component, algorithm in self._having("loss"):
            term = asked(component, algorithm, "loss", scores, batch)
            if term is not None and (not isinstance(term, Tensor) or term.ndim):
                found = f"a tensor of shape {tuple(term.shape)}" if isinstance(term, Tensor) else type(term).__name__
                raise fault(component, "loss", found, "a scalar tensor")
            terms[component.name] = term
        return terms

    def _agree(self, component: Component, method: str, answer: Any) -> None:
        """Raise ComponentError unless an algorithm's method returned the same on all ranks: with different results they
        would later wait for each other. Collective.

        Args:
            answer: what the method returned on this rank.
        """
        answers = self._ranks.gather(answer)
        other = next((rank for rank, found in enumerate(answers) if found != answers[0]), None)
        if other is not None:
            raise ComponentError(
                f"The {component} answered `{method}` on rank {other} otherwise than on rank 0. It must decide from "
                "what it is given, and draw random numbers from a generator with a fixed seed."
            )

    # --- life -------------------------------------------------------------------------------------------------------

    def notes(self) -> list[str]:
        """Return the lines about the algorithms that are printed when the run starts, one for each that has a note."""
        notes = [(component.name, asked_text(component, algorithm, "note")) for component, algorithm in self._built]
        return [f"{name}: {note}" for name, note in notes if note is not None]

    def state(self) -> dict[str, Any]:
        """Return the state of each algorithm that has one, by the algorithm's name, for a checkpoint.

        Raises:
            ComponentError: a state is no mapping, or cannot be written as JSON.
        """
        states: dict[str, Any] = {}
        for component, algorithm in self._built:
            state = asked(component, algorithm, "state")
            if not isinstance(state, Mapping):
                raise fault(component, "state", f"a {type(state).__name__}", "a mapping")
            with blaming(component, "state"):
                json.dumps(dict(state))
            if state:
                states[component.name] = dict(state)
        return states

    def load_state(self, states: Mapping[str, Any]) -> None:
        """Restore the algorithms' states from a checkpoint; an algorithm without a state there starts anew."""
        self._drawn = (-1, 0)
        for component, algorithm in self._built:
            if component.name in states:
                asked(component, algorithm, "load_state", states[component.name])


def _shaped(component: Component, method: str, found: Any, like: Tensor, needed: Tensor) -> Tensor:
    """Check that what an algorithm returned is a tensor, and return it with the dtype and device of `like`.

    Args:
        method: the algorithm's method, for the message.
        found: what the method returned.
        like: a tensor of the shape that is required.
        needed: a bool mask in the shape of `like`, True where the numbers must be finite.

    Raises:
        ComponentError: the check fails.
    """
    wanted = f"a tensor of finite numbers, of shape {tuple(like.shape)}"
    if not isinstance(found, Tensor):
        raise fault(component, method, type(found).__name__, wanted)
    if found.shape != like.shape:
        raise fault(component, method, f"a tensor of shape {tuple(found.shape)}", wanted)
    if not found[needed].isfinite().all():
        place = tuple((needed & ~found.isfinite()).nonzero()[0].tolist())
        raise fault(component, method, f"{found[place].item()} at {place}", wanted)
    return found.to(like)


def groups_of(
    ranks: Ranks,
    rewards: Tensor,
    weights: Tensor,
    lengths: Sequence[int],
    truncated: Sequence[bool],
    size: int,
    rows: Sequence[int | None] | None = None,
) -> Groups:
    """Make the `Groups` of all ranks, from what each rank knows of its own rows. Collective.

    Args:
        rewards: rewards of all ranks, (world * B, functions), B rows on each rank.
        weights: weights of the reward functions, (functions,).
        lengths, truncated: for each of this rank's B rows, how many tokens were sampled, and whether it was cut off.
        size: number of rows in a group.
        rows: the dataset row of each group; None where it is not known.
    """
    every = [pair for pairs in ranks.gather(list(zip(lengths, truncated, strict=True))) for pair in pairs]
    known = torch.tensor(every, dtype=torch.int64).view(-1, size, 2)
    count = len(known)
    return Groups(
        rewards=rewards.detach().float().cpu().view(count, size, -1),
        weights=weights.detach().float().cpu(),
        lengths=known[..., 0],
        truncated=known[..., 1].bool(),
        rows=[None] * count if rows is None else list(rows),
    )
