"""Saving of checkpoints and resuming from them: adds to transformers' own a manifest, the session's state, and the
choice of the checkpoint after a restart."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ..config import RESUME_VARIABLE
from ..errors import ConfigError, listed
from ..interprocess.ranks import by_first
from ..policy.adapters import adapters_kept
from . import manifest, restart
from .adapter_checkpoints import load_adapters, load_default, one_by_one
from .run_identity import RunIdentity, new_identity, read_identity, write_identity
from .write_errors import WriteErrors

if TYPE_CHECKING:
    from ..session import Session

logger = logging.getLogger(__name__)


class Checkpointing:
    """A mixin between `HybridTrainer` and TRL's trainer that saves checkpoints with a manifest and resumes from
    them."""

    session: Session
    _identity: RunIdentity | None = None  # the run's identity, which all of its starts share
    _open_save: Path | None = None  # the checkpoint that is being saved
    _write_errors: WriteErrors  # this rank's errors in that save
    _limit: int | None = None  # the user's save_total_limit, during a save
    _taken_over_said = False

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL does. If a launcher has started the run again and no checkpoint is named here, resume from the
        run's last checkpoint."""
        return super().train(self._start_from(resume_from_checkpoint), *args, **kwargs)  # type: ignore[misc]

    def _start_from(self, given: str | bool | None) -> str | bool | None:
        """Determine which run this is and where it begins, and return what TRL's `train` gets as
        `resume_from_checkpoint`. Collective.

        Args:
            given: the argument of `train`: a checkpoint, True for the newest, False for none; None for the newest if a
                launcher has started the run again, else for none.

        Raises:
            ConfigError: no checkpoint can be resumed from although `given` is True, or the one that is named is
                damaged.
        """
        trainer: Any = self
        ranks, output_dir = self.session.ranks, Path(trainer.args.output_dir)
        again = given is None and trainer.state.global_step == 0 and os.environ.get(RESUME_VARIABLE) == "1"
        if not again and not given and self._identity is not None:
            return given  # a further call of `train`
        if again:
            choose = functools.partial(restart.launched_again, output_dir)
        elif given is True:
            choose = functools.partial(restart.newest_start, output_dir)
        elif given:
            choose = functools.partial(restart.named_start, output_dir, Path(str(given)))
        else:
            choose = functools.partial(restart.first_start, output_dir)
        writes = str(getattr(trainer.args.save_strategy, "value", trainer.args.save_strategy)) != "no"
        start = restart.started(ranks, output_dir, choose, saves=bool(trainer.args.should_save), writes=writes)
        self._identity = start.identity
        if ranks.rank == 0 and (again or start.passed):
            restart.announce(start, trainer.args.output_dir)
        if ranks.rank == 0:
            restart.warn(start, ranks.world)
        if given is True and start.checkpoint is None and start.passed:
            raise ConfigError(
                f"No checkpoint in {output_dir} can be resumed from: {listed(list(start.passed), 8)}. Name one, or "
                "start over with resume_from_checkpoint=False."
            )
        found = start.checkpoint if again or given is True else None
        return given if found is None else str(found)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Run an epoch, except after the last step: transformers 5.17 takes one more step when it resumes a run that
        had ended."""
        trainer: Any = self
        if trainer.state.global_step < trainer.state.max_steps:
            super()._run_epoch(*args, **kwargs)  # type: ignore[misc]
        else:
            trainer.control.should_training_stop = True

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the weights of a checkpoint as transformers does. Of a PEFT model, load all adapters and keep the active
        ones active: transformers loads only some, and leaves one active."""
        from accelerate.utils import load_fsdp_model

        trainer: Any = self
        adapted = trainer.model if model is None else model
        with adapters_kept(adapted), self._all_adapters(load_fsdp_model, adapted, resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
            if not trainer.is_fsdp_enabled:
                load_default(adapted, Path(resume_from_checkpoint))
        self.session.weights_changed()

    def _load_best_model(self) -> None:
        """Load the best model at the end of training as transformers does. Of a PEFT model, load all adapters:
        transformers finds only "default", and loads one of several."""
        from accelerate.utils import load_fsdp_model

        trainer: Any = self
        model, best = trainer.model, trainer.state.best_model_checkpoint
        with adapters_kept(model), self._all_adapters(load_fsdp_model, model, best):
            apart = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
            if apart or not load_adapters(model, Path(best)):
                super()._load_best_model()  # type: ignore[misc]
        self.session.weights_changed()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save optimizer and scheduler as transformers does. With FSDP this also saves the model's shards, which here
        get all active adapters."""
        from accelerate.utils import save_fsdp_model

        trainer: Any = self
        meets = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled  # ranks meet within this write
        with self._held(meets), self._all_adapters(save_fsdp_model, trainer.model, output_dir):
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]

    def _all_adapters(self, move: Callable[..., object], model: Any, folder: str) -> Any:
        """Return a context in which accelerate saves or loads one active adapter in FSDP's shards, and at whose end
        `move` does the same for the others.

        Args:
            move: accelerate's `save_fsdp_model` or `load_fsdp_model`.
            model: the PEFT model.
            folder: the checkpoint.
        """
        trainer: Any = self
        accelerator = trainer.accelerator
        plugin = accelerator.state.fsdp_plugin if trainer.is_fsdp_enabled else None
        return one_by_one(
            model,
            plugin,
            lambda number: move(plugin, accelerator, model, folder, model_index=number, adapter_only=True),
        )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        trainer: Any = self
        if checkpoint is not None:
            self.session.load_state(Path(checkpoint), trainer.state.global_step)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save a checkpoint as TRL does. A first manifest is written before the checkpoint's files and a complete one
        after them, so that an interrupted save can be recognised. Older checkpoints are removed only then."""
        from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

        trainer: Any = self
        if "session" not in self.__dict__:
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
            return
        args, output_dir = trainer.args, Path(trainer._get_output_dir(trial=trial))
        self._begin_save(output_dir / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}")
        self._limit, args.save_total_limit = args.save_total_limit, None
        try:
            with self._held():
                super()._save_checkpoint(model, trial)  # type: ignore[misc]
        finally:
            args.save_total_limit = self._limit
        self._end_save()
        if args.should_save:
            best = trainer.state.best_model_checkpoint
            rotate_checkpoints(str(output_dir), args.save_total_limit, best_model_checkpoint=best, use_mtime=True)

    def _save(self, *args: Any, **kwargs: Any) -> None:
        """Save the model as transformers does, and with it the training arguments, where `save_total_limit` has the
        user's value: during a checkpoint's save it is set to None."""
        trainer: Any = self
        held_back = trainer.args.save_total_limit
        if self._open_save is not None:
            trainer.args.save_total_limit = self._limit
        try:
            with self._held():
                super()._save(*args, **kwargs)  # type: ignore[misc]
        finally:
            trainer.args.save_total_limit = held_back

    def _held(self, meets: bool = False) -> AbstractContextManager[None]:
        """Return a context for writing a part of a checkpoint. Errors inside are stored, and raised on all ranks once
        all have written.

        Args:
            meets: whether ranks wait for each other within the write, so that an error must be raised at once.
        """
        if self._open_save is None:  # not a checkpoint but, for example, a save at the end of a script
            return nullcontext()
        return self._write_errors.at_once(self._open_save) if meets else self._write_errors.held()

    def _save_place(self, *args: Any, **kwargs: Any) -> None:
        with self._held():
            super()._save_place(*args, **kwargs)  # type: ignore[misc]

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Create TRL's model card."""
        with self._held():
            super().create_model_card(*args, **kwargs)  # type: ignore[misc]

    def _save_scaler(self, output_dir: str) -> None:
        with self._held():
            super()._save_scaler(output_dir)  # type: ignore[misc]

    def _save_rng_state(self, output_dir: str) -> None:
        with self._held():
            super()._save_rng_state(output_dir)  # type: ignore[misc]

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push a checkpoint to the Hub as transformers does, after its manifest is completed."""
        self._end_save()
        super()._push_from_checkpoint(checkpoint_folder)  # type: ignore[misc]

    def _begin_save(self, checkpoint: Path) -> None:
        """Write a checkpoint's first manifest and the session's state. Collective: no rank writes before files left in
        the folder are removed.

        Args:
            checkpoint: the checkpoint's folder.
        """
        trainer: Any = self
        self._open_save, self._write_errors = checkpoint, WriteErrors()
        self._identity = identity = self._identity or self.session.ranks.broadcast(new_identity())
        if trainer.args.should_save:
            with self._write_errors.held(ours=True):
                self._see_whose_folder(Path(trainer.args.output_dir), identity)
                manifest.begin(checkpoint, identity.run, self.session.ranks.world)
                if not (self.session.selection.stock and not self.session.algorithms):
                    self.session.save_state(checkpoint)
        self._meet()

    def _meet(self) -> None:
        """Wait for all ranks, and raise on all of them if one could not write its part of the checkpoint.
        Collective."""
        if self._open_save is not None:
            try:
                self._write_errors.tell(self.session.ranks, self._open_save)
            except BaseException:
                self._open_save = None
                raise

    def _end_save(self) -> None:
        """Write the checkpoint's complete manifest, after all ranks have written the files that it lists. Does nothing
        if no save is under way. Collective."""
        trainer: Any = self
        if self._open_save is None or self._identity is None:
            return
        self._meet()
        if trainer.args.should_save:
            with self._write_errors.held():
                manifest.end(self._open_save, self._identity.run, self.session.ranks.world)
        self._meet()
        self._open_save = None

    def _see_whose_folder(self, output_dir: Path, identity: RunIdentity) -> None:
        """Write the run's identity into a folder that has none; warn, once, if another process has since begun a run in
        the folder."""
        try:
            known = read_identity(output_dir)
        except ConfigError:  # damaged: it is written again
            known = None
        if known is None:
            write_identity(output_dir, identity)
        elif known.process != identity.process and not self._taken_over_said:
            self._taken_over_said = True
            which = "this run again" if known.run == identity.run else "another run"
            logger.warning(
                "Another process has started %s in %s since this one began, and both write checkpoints there. End one "
                "of them, or give it an output_dir of its own.",
                which,
                output_dir,
            )


def checkpoint_to_resume(output_dir: str | Path) -> str | None:
    """Return the checkpoint from which a restarted run continues, for scripts with a trainer from outside this package:
    pass it to `trainer.train(resume_from_checkpoint=...)`.

    It is None at a run's first start, and where nothing was saved yet or only an earlier run has saved. A trainer of
    this package finds the same checkpoint by itself. Where torch has a process group this is collective: rank 0 alone
    reads the checkpoints, each of which may hold a file of every rank, and the others use its result.

    Raises:
        ConfigError: the file that says which run the folder belongs to cannot be read, or this rank does not see the
            checkpoint that rank 0 has found.
    """
    if os.environ.get(RESUME_VARIABLE) != "1":
        return None
    start = by_first(functools.partial(restart.launched_again, Path(output_dir)))
    if start.checkpoint is not None and not start.checkpoint.is_dir():
        raise ConfigError(
            f"In this run rank {dist.get_rank()} does not see {start.checkpoint}, from which rank 0 goes on. Let "
            "output_dir be a folder that all nodes share."
        )
    if os.environ.get("RANK", "0") == "0":
        restart.announce(start, output_dir)
        restart.warn(start, int(os.environ.get("WORLD_SIZE", "1")))
    return None if start.checkpoint is None else str(start.checkpoint)


def newest_checkpoint(output_dir: str | Path) -> Path | None:
    """Return the newest complete checkpoint of the run that a folder belongs to; None if there is none.

    transformers takes the checkpoint with the highest number, which may be incomplete, or another run's.
    """
    return restart.newest_start(Path(output_dir)).checkpoint
