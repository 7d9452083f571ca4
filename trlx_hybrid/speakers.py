"""Training of one model in several roles ("speakers"): each has its own prompt for a task, and its reward may depend on
what all of them say.

Examples are self-play, a proposer and a solver, or a coder and a tester. A speaker's completions of a task are one TRL
group, so the advantage of a completion is relative to others of the same speaker.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from accelerate import PartialState

from .errors import ConfigError
from .interprocess.ranks import gathered

if TYPE_CHECKING:
    from datasets import Dataset

T = TypeVar("T")
S = TypeVar("S")

TASK, SPEAKER = "task_id", "speaker"


def with_speakers(tasks: Dataset, args: Any, /, **prompts: Callable[[Mapping[str, Any]], Any]) -> Dataset:
    """Return a dataset with one row per task and speaker (role of the model), and the added columns `task_id` and
    `speaker`. The rows of a task follow each other.

    TRL samples a group of completions for each row. In this order, all groups of a task are in one batch if the number
    of prompts in a batch is a multiple of the number of speakers. Training keeps the order of `tasks`: shuffle them
    yourself.

    Args:
        tasks: the dataset of tasks; all columns are kept for each speaker, except for a `prompt`, which is replaced.
        args: the `GRPOConfig` or `RLOOConfig` of the run.
        prompts: for each speaker, by name, a function that makes its prompt (text or messages) from a row of `tasks`.

    Raises:
        ConfigError: there is no speaker, `args` would put groups of one task into different batches, or the tasks
            already have a column `task_id` or `speaker`.
    """
    if not prompts:
        raise ConfigError("with_speakers was given no speaker: name each, as in `with_speakers(tasks, args, a=ask)`.")
    names, count = ", ".join(map(repr, prompts)), len(prompts)
    if args.shuffle_dataset:
        raise ConfigError(
            f"The rows of a task, for {names}, must be in one batch: set {type(args).__name__}(shuffle_dataset=False)."
        )
    in_batch = args.generation_batch_size // args.num_generations
    if in_batch % count:
        raise ConfigError(
            f"A task needs {count} prompts in one batch, for {names}, and a batch has {in_batch}: "
            f"generation_batch_size ({args.generation_batch_size}) must be a multiple of {count} * num_generations "
            f"({count * args.num_generations})."
        )
    taken = [name for name in (TASK, SPEAKER) if name in tasks.column_names]
    if taken:
        raise ConfigError(
            f"{TASK!r} and {SPEAKER!r} are added to the tasks' columns: rename {' and '.join(map(repr, taken))}."
        )

    def speak(rows: dict[str, list[Any]], places: list[int]) -> dict[str, list[Any]]:
        spoken = []
        for place, values in zip(places, zip(*rows.values(), strict=True), strict=True):
            row = dict(zip(rows, values, strict=True))
            for speaker, prompt in prompts.items():
                spoken.append(row | {"prompt": prompt(row), TASK: place, SPEAKER: speaker})
        return {name: [row[name] for row in spoken] for name in spoken[0]}

    return tasks.map(speak, batched=True, with_indices=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchByTask(Generic[T]):
    """One value per completion, such as its text or a score, for the whole batch of all ranks, indexed by task and by
    speaker (role of the model). All attributes are the same on every rank, except for `rows`.

    Attributes:
        values: the values in the order of the ranks: those of rank 0, then those of rank 1, and so on.
        places: `places[task][speaker]` are the indices in `values` of that speaker's completions; empty if it has none.
        rows: the slice of `values` that belongs to this rank's completions.
    """

    values: list[T]
    places: dict[int, dict[str, list[int]]]
    rows: slice

    def own(self, rewards: Sequence[S]) -> list[S]:
        """Return the rewards of this rank's completions, which a reward function returns after it has computed those of
        all ranks.

        Args:
            rewards: one reward for each entry of the attribute `values`, in its order.
        """
        return list(rewards[self.rows])


def by_task(
    task_id: Sequence[int], speaker: Sequence[str], values: Sequence[T], *, required: Collection[str]
) -> BatchByTask[T]:
    """Gather the values of a batch from all ranks, by task and speaker (role of the model), for a reward function that
    needs what all speakers said to a task, whichever rank sampled it. Collective.

    Args:
        task_id, speaker: the columns of this rank's rows, as TRL passes them to a reward function.
        values: what rewards are computed from, one value for each of this rank's rows: the completion, or something
            computed from it. Values must be picklable.
        required: the speakers without which a task cannot be rewarded; usually all.

    Returns:
        The values of all ranks, their places by task and speaker, and a method that picks this rank's rewards.

    Raises:
        ConfigError: on all ranks, if a required speaker has no value for a task.
    """
    ranks = gathered(list(zip(task_id, speaker, values, strict=True)))
    places: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    rows = [row for of_rank in ranks for row in of_rank]
    for place, (task, name, _) in enumerate(rows):
        places[task][name].append(place)
    for task, spoken in places.items():
        for name in required:
            if name not in spoken:
                raise ConfigError(
                    f"A batch has completions of {', '.join(map(repr, spoken))} for task {task}, and none of {name!r}. "
                    "Give the trainer what `with_speakers` returns, as it is, with the config that it was given. "
                    "Evaluations, which shuffle, and algorithms that choose prompts part the speakers of a task."
                )
    first = sum(len(of_rank) for of_rank in ranks[: PartialState().process_index])
    mine = slice(first, first + len(task_id))
    return BatchByTask(values=[value for *_, value in rows], places=dict(places), rows=mine)
