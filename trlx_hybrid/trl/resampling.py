"""Sampling of a training batch in rounds (dynamic sampling): further prompts are sampled until the algorithms have kept
enough groups. A group is the completions of one prompt.

TRL asks `_generate` for the completions of its data loader's prompts, and takes back one completion per prompt. The
caller reads its lists of prompts and of dataset rows again afterwards. So both lists, and the result of `_generate`,
are filled with the rows that are trained on, whichever round and rank sampled them. `_calculate_rewards` then returns
the rewards that the rounds have computed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..algorithms import groups_of
from ..contract.protocols import Groups
from ..interprocess.copies import copied
from ..rollout.rounds import batch_of, rows_per_rank

logger = logging.getLogger(__name__)

SUMMED = ("hybrid/rollout_seconds", "hybrid/sync_seconds", "hybrid/sync_bytes", "hybrid/fingerprint_seconds")
"""Metrics of a rollout that are added up over the rounds of a batch."""

TOOLS = ("_sync_tool_dicts", "_async_tool_dicts")
"""Attributes of TRL's trainer that hold the tools of each row."""


@dataclass(slots=True)
class SampledRow:
    """One sampled row of a round, with everything that TRL's `_generate` and the reward functions returned or changed
    for it.

    Attributes:
        row: the dataset's row, with the fields that a `rollout_func` has added.
        prompt: the prompt as TRL passed it to `_generate`.
        experts: the experts that the row's tokens were routed to; None where the run does not replay routers.
        support: for each token the ids that it was sampled from; None where the run does not score over them.
        logged: values that reward functions have logged for the row, by column.
        truncated: whether the completion was cut at its limit.
    """

    row: dict[str, Any]
    prompt: Any
    prompt_ids: list[int]
    completion_ids: list[int]
    loss_mask: list[int] | None
    completion: Any
    logprobs: list[float] | None
    images: Any
    tool_images: Any
    experts: Any
    support: Any
    logged: dict[str, Any]
    truncated: bool


@dataclass(slots=True)
class Round:
    """One of the rollouts that a batch is sampled in.

    Attributes:
        rows: this rank's rows.
        rewards: (world * B, functions), of all ranks.
        numbers: for each group of all ranks, the number of its prompt's row in the dataset; None where that is not
            known.
        kept: for each group of all ranks, whether the algorithms keep it.
        totals: (groups, num_generations), weighted sums of the rewards; NaN where a row has none.
    """

    rows: list[SampledRow]
    rewards: Tensor
    numbers: Sequence[int | None]
    kept: list[bool]
    totals: Tensor


def refuses(trainer: Any) -> str | None:
    """Return the reason why this run cannot sample other prompts than those of TRL's data loader, or None."""
    dataset = trainer.train_dataset
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        return "its training dataset is iterable, so no row can be asked for. Load it as a `datasets.Dataset`"
    if not trainer.session.algorithms.filters:
        return None
    if {"image", "images"} & set(getattr(dataset, "column_names", None) or ()):
        return "its dataset has images, which TRL puts into prompts before they are sampled. Leave these out"
    if trainer.environment_factories is not None:
        return (
            "TRL resets the environments of `environment_factory` once in each batch. Play them with "
            "rollout_func=episodes(...)"
        )
    return None


def drawn(trainer: Any, rows: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[int]] | None:
    """Return the rows of a batch whose prompts an algorithm chooses, before it is sampled. Collective.

    Args:
        rows: this rank's rows from TRL's data loader.

    Returns:
        This rank's rows, and for each group of all ranks the number of its row in the dataset; None where no algorithm
        chooses, and TRL's rows are taken.
    """
    session, size = trainer.session, trainer.num_generations
    numbers = session.algorithms.draw(len(rows) * session.ranks.world // size, len(trainer.train_dataset))
    if numbers is None:
        return None
    return _rows_here(trainer, [int(number) for number in numbers], rows[0].keys()), numbers


def resampled(trainer: Any, prompts: list[Any], sample: Callable[[list[Any]], Any]) -> Any:
    """Sample a batch in rounds until the run's algorithms have kept enough groups, and return it as `_generate` returns
    one.

    Args:
        prompts: TRL's prompts of this rank. The prompts of the batch replace them, and its rows replace `session.rows`.
        sample: a function that samples one round, as TRL's `_generate`.
    """
    session, size, ranks = trainer.session, trainer.num_generations, trainer.session.ranks
    batch_rows, needed = session.rows, len(prompts) * ranks.world // size
    columns, tools = list(batch_rows[0]), {name: getattr(trainer, name) for name in TOOLS if hasattr(trainer, name)}
    rounds: list[Round] = []
    metrics: dict[str, Any] = {}
    missing = needed
    while missing > 0 and len(rounds) < session.algorithms.rounds:
        rows, numbers = _drawn_rows(trainer, missing, columns) if rounds else _first_round(trainer, needed)
        for name, of_rows in tools.items():  # without environments, all rows have the same tools
            setattr(trainer, name, of_rows[:1] * len(rows))
        rounds.append(_round(trainer, rows, numbers, sample))
        metrics = _together(metrics, session.metrics)
        missing -= sum(rounds[-1].kept)
    for name, of_rows in tools.items():
        setattr(trainer, name, of_rows)
    batch = _batch(trainer, rounds, needed)
    prompts[:], batch_rows[:], session.rows = [row.prompt for row in batch], [row.row for row in batch], batch_rows
    trainer._truncated = [row.truncated for row in batch]
    if any(row.experts is not None for row in batch):
        session.experts = [row.experts for row in batch]
    trainer._supports = [row.support for row in batch] if batch and batch[0].support is not None else None
    trainer._pending_extra_logs.clear()
    for column in dict.fromkeys(column for row in batch for column in row.logged):
        trainer._pending_extra_logs[column].extend(row.logged.get(column) for row in batch)
    sampled = sum(len(one.kept) for one in rounds)
    session.metrics |= metrics | {
        "hybrid/rounds": float(len(rounds)),
        "hybrid/sampled_groups": float(sampled),
        "hybrid/kept_groups": float(sum(sum(one.kept) for one in rounds)),
        "hybrid/sampled_reward": float(torch.cat([one.totals for one in rounds]).nanmean()),
    }
    if missing > 0 and ranks.rank == 0:
        _say_short(trainer, needed - missing, needed, sampled)
    return _as_generated(batch)


def _batch(trainer: Any, rounds: Sequence[Round], needed: int) -> list[SampledRow]:
    """Put the batch together from the kept groups of all rounds, filled up with others if they are too few. Moves rows
    between ranks where needed. Collective. The rewards and row numbers of all its groups are stored in the trainer.

    Args:
        needed: number of groups in the batch.

    Returns:
        This rank's rows. In groups that only fill the batch up, no token is trained on.
    """
    ranks, size = trainer.session.ranks, trainer.num_generations
    places = batch_of([one.kept for one in rounds], needed)
    wanted = [(place.round, place.group * size + n) for place in places for n in range(size)]
    held = {(k, ranks.rank * len(one.rows) + i): row for k, one in enumerate(rounds) for i, row in enumerate(one.rows)}
    share = len(wanted) // ranks.world
    sizes = [len(one.rows) for one in rounds]  # the same on all ranks
    moving = [(k, at) for place, (k, at) in enumerate(wanted) if at // sizes[k] != place // share]
    if moving:
        for part in ranks.gather({at: held[at] for at in moving if at in held}):
            held |= part
    fills = [not place.kept for place in places for _ in range(size)]
    here = slice(ranks.rank * share, (ranks.rank + 1) * share)
    batch = [held[at] for at in wanted[here]]
    for row, fill in zip(batch, fills[here], strict=True):
        if any(fills):  # on any rank
            trained = row.loss_mask if row.loss_mask is not None else [1] * len(row.completion_ids)
            row.loss_mask = [0] * len(trained) if fill else trained
    rewards = torch.stack([rounds[k].rewards[at] for k, at in wanted])
    trainer._known_rewards = rewards.masked_fill(torch.tensor(fills, device=rewards.device)[:, None], math.nan)
    trainer._row_numbers = [rounds[place.round].numbers[place.group] for place in places]
    return batch


def sampled_groups(trainer: Any, rewards: Tensor, numbers: Sequence[int | None] | None = None) -> Groups:
    """Return the groups of the rows that TRL has generated last, of all ranks, in the form in which algorithms judge
    them. Collective.

    Args:
        rewards: (world * B, functions), of all ranks.
        numbers: for each group, the number of its row in the dataset.
    """
    _, ids, mask, *_ = trainer._generated
    return groups_of(
        trainer.session.ranks,
        rewards,
        trainer.reward_weights,
        lengths=[len(row) for row in ids] if mask is None else [sum(row) for row in mask],
        truncated=trainer._truncated,
        size=trainer.num_generations,
        rows=numbers,
    )


def _first_round(trainer: Any, needed: int) -> tuple[list[dict[str, Any]], Sequence[int | None]]:
    """Return the rows for the first round: TRL's groups, and further ones where algorithms oversample.

    Args:
        needed: number of groups in the batch.

    Returns:
        This rank's rows, and for each group of all ranks the number of its row in the dataset.
    """
    session, size = trainer.session, trainer.num_generations
    known = trainer._row_numbers or [None] * needed
    wanted = math.ceil(needed * session.algorithms.oversampling)
    count = rows_per_rank(wanted, size, session.ranks.world) * session.ranks.world // size
    if count <= needed:
        return [dict(row) for row in session.rows], known
    every = [row for rows in session.ranks.gather(session.rows) for row in rows][::size]
    more = _draw(trainer, count - needed)
    return _rows_here(trainer, [*every, *more], session.rows[0].keys()), [*known, *more]


def _drawn_rows(trainer: Any, groups: int, columns: Sequence[str]) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the rows for a further round, drawn from the dataset.

    Args:
        groups: the least number of groups, over all ranks.
        columns: columns of the dataset that the rows get.

    Returns:
        This rank's rows, and for each group of all ranks the number of its row in the dataset.
    """
    world, size = trainer.session.ranks.world, trainer.num_generations
    numbers = _draw(trainer, rows_per_rank(groups, size, world) * world // size)
    return _rows_here(trainer, numbers, columns), numbers


def _draw(trainer: Any, count: int) -> list[int]:
    session = trainer.session
    return session.algorithms.draw_or_any(count, len(trainer.train_dataset), session.weight_version)  # type: ignore[no-any-return]


def _rows_here(trainer: Any, groups: Sequence[Any], columns: Any) -> list[dict[str, Any]]:
    """Return this rank's rows, with each prompt repeated for its group.

    Args:
        groups: for each group of all ranks its row, or that row's number in the dataset.
        columns: columns that the rows get.
    """
    ranks, size = trainer.session.ranks, trainer.num_generations
    share = len(groups) * size // ranks.world
    rows = []
    for at in range(ranks.rank * share, (ranks.rank + 1) * share):
        group = groups[at // size]
        row = trainer.train_dataset[group] if isinstance(group, int) else group
        rows.append({name: copied(value) for name, value in row.items() if name in columns})
    return rows


def _round(
    trainer: Any, rows: list[dict[str, Any]], numbers: Sequence[int | None], sample: Callable[[list[Any]], Any]
) -> Round:
    """Sample and score one round as TRL would, and let the algorithms decide which groups are kept.

    Args:
        rows: this rank's rows.
        numbers: for each group of all ranks, the number of its row in the dataset.
        sample: a function that samples the completions of prompts, as TRL's `_generate`.
    """
    session, prompts = trainer.session, [row["prompt"] for row in rows]
    session.rows, session.experts = rows, []
    prompt_ids, ids, mask, completions, logprobs, added, images, tool_images = sample(prompts)
    for name, values in added.items():
        for row, value in zip(rows, values, strict=False) if isinstance(values, list) else ((r, values) for r in rows):
            row[name] = value
    trainer._pending_extra_logs.clear()
    rewards = trainer._calculate_rewards(rows, prompts, completions, ids)
    logs, nothing = dict(trainer._pending_extra_logs), [None] * len(rows)
    logged = [{column: values[i] for column, values in logs.items() if i < len(values)} for i in range(len(rows))]
    every = [rows, prompts, prompt_ids, ids, mask, completions, logprobs, images, tool_images, session.experts]
    every += [trainer._supports, logged, list(trainer._truncated)]
    sampled = [SampledRow(*of_row) for of_row in zip(*(values or nothing for values in every), strict=True)]
    groups = sampled_groups(trainer, rewards, numbers)
    session.algorithms.observe(groups)
    return Round(sampled, rewards, numbers, session.algorithms.keep(groups), groups.totals)


def _as_generated(batch: Sequence[SampledRow]) -> Any:
    """Return sampled rows as the tuple of columns that TRL's `_generate` returns."""

    def column(name: str) -> list[Any] | None:
        values = [getattr(row, name) for row in batch]
        return None if all(value is None for value in values) else values

    columns = [column(name) for name in ("prompt_ids", "completion_ids", "loss_mask", "completion", "logprobs")]
    return (*columns, {}, column("images"), [row.tool_images for row in batch])


def _together(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a batch's rounds so far, combined with those of one more round: sums for SUMMED,
    concatenated lists, and the latest value of all others."""
    both = before.keys() & now.keys()
    return {**before, **now} | {n: before[n] + now[n] for n in both if n in SUMMED or isinstance(now[n], list)}


def _say_short(trainer: Any, kept: int, needed: int, sampled: int) -> None:
    """Warn, once per run, that the rounds have kept too few groups for a batch. The metric `hybrid/kept_groups` has the
    number for each batch."""
    if not trainer.__dict__.get("_said_short"):
        trainer._said_short = True
        logger.warning(
            "After %d groups were sampled, %d of the %d that a batch has were kept. It is filled up with groups that "
            "count for nothing: easier or harder prompts, more rounds or another algorithm would use the step better.",
            sampled,
            kept,
            needed,
        )
