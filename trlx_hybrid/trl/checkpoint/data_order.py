"""The position of a run in its data, saved in each checkpoint, so that a resumed run reads on where it had stopped.

transformers resumes by reading an epoch from its beginning and skipping what was trained on. That is not enough here.
TRL's sampler draws the order of each epoch from a generator of its own, which nothing saves. TRL trains several
optimizer steps on one rollout, which nothing saves either. And the epochs of a stream cannot be derived from its
length.

    trlx_hybrid_data.pt          the epoch, where it began, the states of the sampler's generators, and the settings
                                 that decide the order
    trlx_hybrid_rollout_0.pt     rank 0's micro-batches of a rollout that later steps train on, where there is one

A run that is not interrupted trains exactly as in stock TRL: the code here only reads its state.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import send_to_device
from transformers.trainer_utils import has_length

from ...errors import ConfigError, listed

if TYPE_CHECKING:
    from ...session import Session
    from ..stock import StockTrainer

logger = logging.getLogger(__name__)

DATA_FILE = "trlx_hybrid_data.pt"
ROLLOUT_FILE = "trlx_hybrid_rollout_{rank}.pt"

ORDERING = (
    *("seed", "data_seed", "shuffle_dataset", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("steps_per_generation", "generation_batch_size", "num_generations", "num_iterations"),
    *("dataloader_drop_last", "train_sampling_strategy"),
)
"""Arguments of a trainer that decide which prompts a step gets."""

SEEDS = ("seed", "data_seed")
"""Arguments that may differ on resuming without another order of prompts, since the saved states of the sampler's
generators are used instead."""


@dataclass(kw_only=True, slots=True)
class Place:
    """The position of all ranks in their data when a checkpoint is written.

    Attributes:
        epoch: number of the current epoch.
        first_step: optimizer steps done when the epoch began.
        sized: whether the length of an epoch is known. If it is, transformers itself skips to the position on resuming.
        begin: (n,) uint8 states of the sampler's generators before the epoch.
        now: the generators' states when the checkpoint is written: before the next epoch, if this one is over.
        micro_batch: micro-batches that the run has trained on, TRL's `_step`.
        kept: whether later steps still train on the latest rollout, and rank 0 has written its part of it into the
            checkpoint. Each other rank has, too, unless its part has values that cannot be saved.
        settings: the arguments that decide the order, by name, and facts of the dataset.
    """

    epoch: int
    first_step: int
    sized: bool
    begin: list[torch.Tensor]
    now: list[torch.Tensor]
    micro_batch: int
    kept: bool
    settings: dict[str, Any]


class DataOrder:
    """A run's position in its data: saved in each checkpoint, and restored on resuming.

    Args:
        session: the live objects of the run.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._taken_up: tuple[Path, Place | None] | None = None  # the checkpoint at whose place the next epoch starts
        self._epoch: tuple[int, int, list[torch.Tensor]] | None = None  # number, first step, states of the generators
        self._inexact_said = False

    def resumed(self, trainer: StockTrainer, checkpoint: str | None, skipped: tuple[int, int]) -> tuple[int, int]:
        """Return how many epochs, and how many micro-batches of the next epoch, a resumed run skips: as transformers
        computes them, or for a stream, whose epochs have no known length, as they were saved.

        Args:
            checkpoint: the checkpoint that the run resumes from; None for a fresh start.
            skipped: both numbers as transformers computes them.
        """
        self._taken_up = None
        if checkpoint is None:
            return skipped
        place = read_place(Path(checkpoint))
        self._taken_up = Path(checkpoint), place
        if place is None or place.sized or has_length(trainer.train_dataset):
            return skipped
        steps = trainer.state.global_step - place.first_step
        return place.epoch, 0 if trainer.args.ignore_data_skip else steps * trainer.args.gradient_accumulation_steps

    def begin_epoch(self, trainer: StockTrainer, epoch: int, loader: Any, trained: int) -> None:
        """Restore the position in the data of the checkpoint that the run resumes from, if this is the first epoch
        after resuming, and store where the epoch begins. Collective.

        Args:
            epoch: number of the epoch.
            loader: the training data loader.
            trained: number of the epoch's micro-batches that were trained on before and are not read again.
        """
        first_step = trainer.state.global_step
        if self._taken_up is not None:
            (checkpoint, place), self._taken_up = self._taken_up, None
            first_step -= trained // trainer.args.gradient_accumulation_steps
            self._take_up(trainer, checkpoint, place, epoch, loader, trained)
        self._epoch = epoch, first_step, [generator.get_state() for generator in sampler_generators(loader)]

    def save(self, trainer: StockTrainer, folder: Path) -> None:
        """Write the position in the data into a checkpoint, and this rank's micro-batches of the rollout if later steps
        train on it.

        Args:
            folder: the checkpoint's folder.
        """
        if self._epoch is None or trainer.args.save_only_model:
            return
        epoch, first_step, begin = self._epoch
        folder.mkdir(parents=True, exist_ok=True)
        loader = trainer.callback_handler.train_dataloader
        kept = bool(trainer._step % micro_batches_of_a_rollout(trainer)) and trainer._buffered_inputs is not None
        foreign = next(foreign_values(trainer._buffered_inputs), None) if kept else None
        file = folder / ROLLOUT_FILE.format(rank=self._session.ranks.rank)
        if kept and foreign is None:
            write_file(trainer._buffered_inputs, file)
        else:
            file.unlink(missing_ok=True)  # of an earlier run that wrote into this folder
        if trainer.args.should_save:
            place = Place(
                epoch=epoch,
                first_step=first_step,
                sized=has_length(loader),
                begin=begin,
                now=[generator.get_state() for generator in sampler_generators(loader)],
                micro_batch=trainer._step,
                kept=kept and foreign is None,
                settings=ordering_settings(trainer),
            )
            write_file(asdict(place), folder / DATA_FILE)
        reasons = list(inexact_reasons(trainer, foreign))
        if reasons and not self._inexact_said and self._session.ranks.rank == 0:
            self._inexact_said = True
            logger.warning("A run that is resumed from %s may differ from this one: %s.", folder, listed(reasons, 8))

    def _take_up(
        self, trainer: StockTrainer, checkpoint: Path, place: Place | None, epoch: int, loader: Any, skipped: int
    ) -> None:
        """Restore a checkpoint's position in the data, at the first epoch after resuming. Collective.

        Args:
            place: the checkpoint's position; None where the checkpoint has none, as stock TRL's.
            epoch: number of the epoch that begins or continues.
            loader: the training data loader.
            skipped: number of the epoch's micro-batches that are not read again.

        Raises:
            ConfigError: a rank's file with its part of the rollout is damaged.
        """
        differing = differences(place.settings, ordering_settings(trainer)) if place is not None else {}
        if differing and self._session.ranks.rank == 0:
            logger.warning("%s", changed_text(checkpoint, differing))
        states = None if place is None else {place.epoch: place.begin, place.epoch + 1: place.now}.get(epoch)
        generators = sampler_generators(loader)
        if states is not None and len(states) == len(generators):
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
        else:
            pass_epochs(loader, epoch)
        if trainer.args.ignore_data_skip or self._session.config.replay is not None:
            return  # a replay knows which batches are next
        same = place is not None and not [name for name in differing if name not in SEEDS]
        trainer._step = place.micro_batch if place is not None and same else skipped
        trainer._buffered_inputs = None
        if trainer._step % micro_batches_of_a_rollout(trainer) == 0:
            return
        rollout, problem = self._kept_rollout(checkpoint) if place is not None and place.kept and same else (None, None)
        problems = [found for found in self._session.ranks.gather(problem) if found is not None]
        if problems:
            raise ConfigError(problems[0])
        missing = self._session.ranks.any(rollout is None)
        trainer._buffered_inputs = None if missing else rollout
        if missing and self._session.ranks.rank == 0:
            logger.warning(
                "%s lies in the middle of a rollout that it does not hold%s: its prompts are sampled anew, with other "
                "weights than those of the run that was interrupted.",
                checkpoint,
                "" if place is not None else ", as one that was written without trlx_hybrid's trainer",
            )

    def _kept_rollout(self, checkpoint: Path) -> tuple[list[dict[str, Any]] | None, str | None]:
        """Load this rank's micro-batches of the rollout that a checkpoint keeps.

        Returns:
            The micro-batches, None where the checkpoint has none; and what is wrong with the file, None if nothing is.
        """
        file = checkpoint / ROLLOUT_FILE.format(rank=self._session.ranks.rank)
        try:
            return send_to_device(read_file(file), self._session.policy.device), None
        except ConfigError as error:
            return None, str(error)


def read_place(checkpoint: Path) -> Place | None:
    """Return the position in the data at which a checkpoint was written; None where it has none.

    Raises:
        ConfigError: the file cannot be read.
    """
    found = read_file(checkpoint / DATA_FILE)
    try:
        return None if found is None else Place(**found)
    except TypeError as error:
        raise ConfigError(f"{checkpoint / DATA_FILE} is of another version ({error}). Resume with that one.") from error


def micro_batches_of_a_rollout(trainer: StockTrainer) -> int:
    """Return how many micro-batches TRL takes from a rollout, including those of further iterations."""
    args = trainer.args
    of_one = getattr(args, "steps_per_generation", None) or args.gradient_accumulation_steps
    return int(of_one * getattr(trainer, "num_iterations", 1))


def sampler_generators(loader: Any) -> list[torch.Generator]:
    """Return the generators that a data loader and its samplers draw the order from, the outermost first."""
    found: list[torch.Generator] = []
    for part in nested_samplers(loader):
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator) and all(generator is not other for other in found):
            found.append(generator)
    return found


def pass_epochs(loader: Any, epochs: int) -> None:
    """Draw and discard the orders of the first `epochs` epochs from TRL's sampler, so that its random generator gets
    into the state that it had after them. Used if the checkpoint does not have the generator's states."""
    sampler = next((part for part in nested_samplers(loader) if hasattr(part, "mini_repeat_count")), None)
    if sampler is not None:
        for _ in range(epochs):
            next(iter(sampler), None)


def ordering_settings(trainer: StockTrainer) -> dict[str, Any]:
    """Return the settings that decide which prompts a step gets, by name: arguments, the number of ranks, and facts of
    the dataset. A resumed run compares them with the saved ones."""
    settings = {name: getattr(trainer.args, name) for name in ORDERING if hasattr(trainer.args, name)}
    settings |= {"ranks": trainer.accelerator.num_processes}
    dataset = trainer.train_dataset
    if has_length(dataset):
        settings |= {"rows of train_dataset": len(dataset), "prompts of train_dataset": _dataset_digest(dataset)}
    return {name: value if isinstance(value, int | float | None) else str(value) for name, value in settings.items()}


def differences(then: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    """Return the settings that differ between a checkpoint and the run that resumes from it: for each name, a text with
    both values.

    Args:
        then: the checkpoint's settings, by name.
        now: the run's settings, by name.
    """
    names = [name for name in dict.fromkeys([*then, *now]) if then.get(name) != now.get(name)]
    return {name: f"{name} is {now.get(name)!r:.60}, and was {then.get(name)!r:.60}" for name in names}


def changed_text(checkpoint: Path, differing: dict[str, str]) -> str:
    """Return a warning on how changed settings affect the data of a resumed run.

    Args:
        differing: for the name of each changed setting, a text with both values.
    """
    text = f"This run resumes from {checkpoint} with other settings ({listed(list(differing.values()), 8)}), "
    if all(name in SEEDS for name in differing):
        return f"{text}and goes on in the checkpoint's order of prompts; its completions are drawn with the new seed."
    return f"{text}so its steps get other prompts than those of the run that was interrupted: some may come twice."


def inexact_reasons(trainer: StockTrainer, foreign: str | None) -> Iterator[str]:
    """Yield the reasons, as texts for a warning, why a run resumed from a checkpoint may not equal the uninterrupted
    one bit for bit.

    Args:
        foreign: name and type, as text, of a value in the rollout that a checkpoint cannot keep because it is neither a
            tensor nor plain data; None if there is none.
    """
    if foreign is not None:
        yield f"its rollout holds {foreign}, which a checkpoint cannot keep, and is sampled anew"
    if trainer.accelerator.device.type != "cpu":
        yield "kernels of this device may round otherwise in another process"
    if getattr(trainer, "environment_factory", None) is not None or getattr(trainer, "environments", None):
        yield "environments keep their own state, if they have any beyond a conversation"


def foreign_values(value: Any, name: str = "") -> Iterator[str]:
    """Yield name and type, as text, of each value in nested containers that a checkpoint cannot keep: anything but
    tensors and plain data.

    Args:
        name: name of `value`.
    """
    if isinstance(value, dict):
        for key, part in value.items():
            yield from foreign_values(part, str(key))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from foreign_values(part, name)
    elif not isinstance(value, torch.Tensor | str | bytes | int | float | None):
        yield f"{name!r}, a {type(value).__name__}"


def nested_samplers(loader: Any) -> list[Any]:
    """Return a data loader and all of its nested samplers, outermost first."""
    found: list[Any] = []
    parts = [loader]
    while parts:
        part = parts.pop(0)
        if part is not None and all(part is not other for other in found):
            found.append(part)
            parts += [getattr(part, "batch_sampler", None), getattr(part, "sampler", None)]
    return found


def _dataset_digest(dataset: Any) -> str | None:
    """Return a digest of the first, the middle and the last prompt, by which a resumed run notices that its dataset has
    changed. None where the dataset is empty or has no column "prompt"."""
    if not len(dataset) or "prompt" not in (getattr(dataset, "column_names", None) or ()):
        return None
    return prompts_digest([dataset[index]["prompt"] for index in sorted({0, len(dataset) // 2, len(dataset) - 1})])


def prompts_digest(prompts: Sequence[Any]) -> str:
    """Return a digest of prompts, by which a resumed run recognises them."""
    text = json.dumps(prompts, sort_keys=True, default=lambda value: type(value).__name__)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_file(value: Any, file: Path) -> None:
    """Write a value to a file that gets its name only once it is complete, so that a kill leaves no partial file."""
    part = file.with_name(f"{file.name}.part")
    torch.save(value, part)
    part.replace(file)


def read_file(file: Path) -> Any:
    """Return a file's value on the CPU; None where the file does not exist. Raise ConfigError where it is damaged."""
    if not file.exists():
        return None
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ConfigError(f"{file} cannot be read ({error!r:.200}). Resume from an earlier checkpoint.") from error
