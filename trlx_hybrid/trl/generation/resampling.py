"""Sampling of a training batch in rounds (dynamic sampling): further prompts are sampled until the algorithms have kept
enough groups. A group is the completions of one prompt.

The rounds run before TRL's `_generate_and_score_completions`. TRL then gets the dataset rows of the batch, whichever
round and rank sampled them; its `_generate` and `_calculate_rewards` return what the rounds have sampled and computed.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...algorithms import groups_of
from ...contract.protocols import Groups
from ...interprocess.copies import copied
from ...rollout.rounds import batch_of, rows_per_rank

if TYPE_CHECKING:
    from ..state import RunState
    from ..stock import Rows, StockTrainer

SUMMED = ("hybrid/rollout_seconds", "hybrid/sync_seconds", "hybrid/sync_bytes", "hybrid/fingerprint_seconds")
"""Metrics of a rollout that are added up over the rounds of a batch."""


@dataclass(slots=True)
class SampledRow:
    """One sampled row of a round, with what TRL's `_generate` and the reward functions returned or changed for it.

    Attributes:
        row: the dataset's row, with the fields that a `rollout_func` has added.
        experts: the experts that the row's tokens were routed to; None where the run does not replay routers.
        support: for each token the ids that it was sampled from; None where log-probs are computed over the whole
            vocabulary.
        logged: values that reward functions have logged for the row, by column.
        truncated: whether the completion was cut at its length limit.
    """

    row: dict[str, Any]
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
    """One round of sampling for a batch: the rows of its rollout, their rewards, and the groups that are kept.

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


def drawn(trainer: StockTrainer, run: RunState, rows: Rows) -> Rows:
    """Return this rank's dataset rows as an algorithm has chosen them for the batch that is sampled next, and store the
    row numbers of all groups in `run.batch`. Return TRL's rows where no algorithm chooses. Collective.

    Args:
        rows: this rank's rows from TRL's data loader.
    """
    session, size = run.session, trainer.num_generations
    numbers = session.algorithms.draw(len(rows) * session.ranks.world // size, len(trainer.train_dataset))
    if numbers is None:
        return rows
    run.batch.row_numbers = numbers
    return _rows_here(trainer, [int(number) for number in numbers], rows[0].keys())


def resampled(trainer: StockTrainer, run: RunState, rows: Rows, sample: Callable[[list[Any]], Any]) -> Rows:
    """Sample a batch in rounds until the run's algorithms have kept enough groups. The completions, in the form that
    TRL's `_generate` returns, and their rewards are stored in `run.batch`.

    Args:
        rows: this rank's rows from TRL's data loader.
        sample: a function that samples the completions of one round's prompts, as TRL's `_generate`.

    Returns:
        This rank's rows of the batch.
    """
    session, ranks, batch = run.session, run.session.ranks, run.batch
    needed, columns = len(rows) * ranks.world // trainer.num_generations, list(rows[0])
    rounds: list[Round] = []
    metrics: dict[str, Any] = {}
    numbers: Sequence[int | None]
    missing, batch.in_rounds = needed, True
    while missing > 0 and len(rounds) < session.algorithms.rounds:
        if rounds:
            of_round, numbers = _drawn_rows(trainer, missing, columns)
        else:
            of_round, numbers = _first_round(trainer, run, rows, needed)
        rounds.append(_round(trainer, run, of_round, numbers, sample))
        metrics = _together(metrics, session.metrics)
        missing -= sum(rounds[-1].kept)
    batch.in_rounds = False
    sampled = _batch(trainer, run, rounds, needed)
    batch.generated, batch.known = _as_generated(sampled, columns), True
    batch.truncated = [row.truncated for row in sampled]
    if any(row.experts is not None for row in sampled):
        session.experts = [row.experts for row in sampled]
    batch.supports = [row.support for row in sampled] if sampled and sampled[0].support is not None else None
    trainer._pending_extra_logs.clear()
    for column in dict.fromkeys(column for row in sampled for column in row.logged):
        trainer._pending_extra_logs[column].extend(row.logged.get(column) for row in sampled)
    groups = sum(len(one.kept) for one in rounds)
    session.metrics |= metrics | {
        "hybrid/rounds": float(len(rounds)),
        "hybrid/sampled_groups": float(groups),
        "hybrid/kept_groups": float(sum(sum(one.kept) for one in rounds)),
        "hybrid/sampled_reward": float(torch.cat([one.totals for one in rounds]).nanmean()),
    }
    if missing > 0:
        run.say_once(
            "short batch",
            "After %d groups were sampled, %d of the %d that a batch has were kept. It is filled up with groups that "
            "count for nothing: easier or harder prompts, more rounds or another algorithm would use the step better.",
            groups,
            needed - missing,
            needed,
        )
    return [{name: row.row[name] for name in columns if name in row.row} for row in sampled]


def _batch(trainer: StockTrainer, run: RunState, rounds: Sequence[Round], needed: int) -> list[SampledRow]:
    """Put the batch together from the kept groups of all rounds, filled up with others if they are too few. Moves rows
    between ranks where needed. Collective. The rewards and row numbers of all its groups are stored in the run's batch.

    Args:
        needed: number of groups in the batch.

    Returns:
        This rank's rows. In groups that only fill the batch up, no token is trained on.
    """
    ranks, size = run.session.ranks, trainer.num_generations
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
    run.batch.known_rewards = rewards.masked_fill(torch.tensor(fills, device=rewards.device)[:, None], math.nan)
    run.batch.row_numbers = [rounds[place.round].numbers[place.group] for place in places]
    return batch


def sampled_groups(
    trainer: StockTrainer, run: RunState, rewards: Tensor, numbers: Sequence[int | None] | None = None
) -> Groups:
    """Return the groups of the rows that TRL has generated last, of all ranks, in the form in which algorithms judge
    them. Collective.

    Args:
        rewards: (world * B, functions), of all ranks.
        numbers: for each group, the number of its row in the dataset.
    """
    _, ids, mask, *_ = run.batch.generated
    return groups_of(
        run.session.ranks,
        rewards,
        trainer.reward_weights,
        lengths=[len(row) for row in ids] if mask is None else [sum(row) for row in mask],
        truncated=run.batch.truncated or [],
        size=trainer.num_generations,
        rows=numbers,
    )


def _first_round(trainer: StockTrainer, run: RunState, rows: Rows, needed: int) -> tuple[Rows, Sequence[int | None]]:
    """Return the dataset rows for the first round: TRL's groups, and further groups where an algorithm asks for more
    than the batch has (`oversampling`).

    Args:
        rows: this rank's rows from TRL's data loader.
        needed: number of groups in the batch.

    Returns:
        This rank's rows, and for each group of all ranks the number of its row in the dataset; None for a group whose
        row TRL's data loader drew.
    """
    session, size = run.session, trainer.num_generations
    known = run.batch.row_numbers or [None] * needed
    wanted = math.ceil(needed * session.algorithms.oversampling)
    count = rows_per_rank(wanted, size, session.ranks.world) * session.ranks.world // size
    if count <= needed:
        return [dict(row) for row in rows], known
    every = [row for of_rank in session.ranks.gather(rows) for row in of_rank][::size]
    more = _draw(trainer, count - needed)
    return _rows_here(trainer, [*every, *more], rows[0].keys()), [*known, *more]


def _drawn_rows(trainer: StockTrainer, groups: int, columns: Sequence[str]) -> tuple[Rows, list[int]]:
    """Return the dataset rows for a further round, as an algorithm draws them, or random ones.

    Args:
        groups: the least number of groups that the round needs, over all ranks.
        columns: columns of the dataset that the rows get.

    Returns:
        This rank's rows, and for each group of all ranks the number of its row in the dataset.
    """
    world, size = trainer.session.ranks.world, trainer.num_generations
    numbers = _draw(trainer, rows_per_rank(groups, size, world) * world // size)
    return _rows_here(trainer, numbers, columns), numbers


def _draw(trainer: StockTrainer, count: int) -> list[int]:
    session = trainer.session
    return session.algorithms.draw_or_any(count, len(trainer.train_dataset), session.weight_version)


def _rows_here(trainer: StockTrainer, groups: Sequence[Any], columns: Collection[str]) -> Rows:
    """Return this rank's rows of the dataset, as dicts. The row of each prompt comes once for each completion of the
    prompt's group.

    Args:
        groups: one entry for each group, over all ranks: the row of its prompt, or that row's number in the dataset.
        columns: names of the columns that the returned rows have.
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
    trainer: StockTrainer,
    run: RunState,
    rows: Rows,
    numbers: Sequence[int | None],
    sample: Callable[[list[Any]], Any],
) -> Round:
    """Sample and score one round as TRL would, and let the algorithms decide which groups are kept. A round is one
    sampling of prompts; a training batch takes several if the algorithms keep too few groups.

    Args:
        rows: this rank's dataset rows of the round.
        numbers: for each group of all ranks, the number of its row in the dataset; None where it is not known.
        sample: a function that samples the completions of prompts, as TRL's `_generate`.
    """
    session, prompts = run.session, [row["prompt"] for row in rows]
    session.rows, session.experts = rows, []
    _give_tools(trainer, len(rows))
    prompt_ids, ids, mask, completions, logprobs, added, images, tool_images = sample(prompts)
    for name, values in added.items():
        for row, value in zip(rows, values, strict=False) if isinstance(values, list) else ((r, values) for r in rows):
            row[name] = value
    trainer._pending_extra_logs.clear()
    rewards = trainer._calculate_rewards(rows, prompts, completions, ids)
    logs, nothing = dict(trainer._pending_extra_logs), [None] * len(rows)
    logged = [{column: values[i] for column, values in logs.items() if i < len(values)} for i in range(len(rows))]
    every = [rows, prompt_ids, ids, mask, completions, logprobs, images, tool_images, session.experts]
    every += [run.batch.supports, logged, list(run.batch.truncated or [])]
    sampled = [SampledRow(*of_row) for of_row in zip(*(values or nothing for values in every), strict=True)]
    groups = sampled_groups(trainer, run, rewards, numbers)
    session.algorithms.observe(groups)
    return Round(sampled, rewards, numbers, session.algorithms.keep(groups), groups.totals)


def _give_tools(trainer: StockTrainer, rows: int) -> None:
    """Give each row of a round (one sampling of further prompts) the trainer's tools, as TRL does before it samples.
    TRL would also add the tools of a row's environment; here no row has one.

    Args:
        trainer: its lists of tools per row are replaced.
        rows: the number of rows that this rank samples in the round.

    Source: trl 1.16, `GRPOTrainer._generate_and_score_completions`.
    """
    if trainer.tools:
        named = {tool.__name__: tool for tool in trainer._standalone_tools}
        waits = {name for name, tool in named.items() if inspect.iscoroutinefunction(tool)}
        trainer._sync_tool_dicts = [{name: tool for name, tool in named.items() if name not in waits}] * rows
        trainer._async_tool_dicts = [{name: tool for name, tool in named.items() if name in waits}] * rows


def _as_generated(batch: Sequence[SampledRow], columns: Sequence[str]) -> Any:
    """Return sampled rows as the tuple of columns that TRL's `_generate` returns.

    Args:
        columns: names of the dataset's columns. Other fields of the rows come from a `rollout_func`; they are returned
            as its extra fields, by name.
    """

    def column(name: str) -> list[Any] | None:
        values = [getattr(row, name) for row in batch]
        return None if all(value is None for value in values) else values

    sampled = [column(name) for name in ("prompt_ids", "completion_ids", "loss_mask", "completion", "logprobs")]
    names = dict.fromkeys(name for row in batch for name in row.row if name not in columns)
    added = {name: [row.row.get(name) for row in batch] for name in names}
    return (*sampled, added, column("images"), [row.tool_images for row in batch])


def _together(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a training batch, combined from those of its earlier rounds, `before`, and those of one
    more round, `now`. A round is one sampling of prompts. Metrics in SUMMED are added, lists are concatenated, also
    with a number of the other rounds, and of all others the latest value is taken."""
    together = {**before, **now}
    for name in before.keys() & now.keys():
        if name in SUMMED:
            together[name] = before[name] + now[name]
        elif isinstance(before[name], list) or isinstance(now[name], list):
            together[name] = [*_values(before[name]), *_values(now[name])]
    return together


def _values(metric: Any) -> list[Any]:
    return metric if isinstance(metric, list) else [metric]
