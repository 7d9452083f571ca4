"""Saving of checkpoints and resuming from them. This adds three things to transformers' own: a manifest (a list of the
checkpoint's files), the session's state, and the choice of the checkpoint after a restart. Where a checkpoint cannot be
written, all ranks raise the error together."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ...config import RESUME_VARIABLE
from ...disk import named, told, unwritten
from ...errors import ConfigError, HybridError, listed
from ...interprocess.ranks import by_first
from ...plugins.selection import PADDED
from . import manifest, restart
from .adapters import one_by_one
from .run_identity import RunIdentity, new_identity, read_identity, write_identity

if TYPE_CHECKING:
    from ...interprocess.ranks import Ranks
    from ...session import Session
    from ..stock import StockTrainer

logger = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of a run: which one it begins with, and what is added to each that it saves.

    Args:
        session: the live objects of the run.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._identity: RunIdentity | None = None  # shared by all starts of the run
        self._open_save: Path | None = None  # the checkpoint that is being saved
        self._write_errors = WriteErrors()  # this rank's, in that save
        self._limit: int | None = None  # the user's save_total_limit, during a save
        self._taken_over_said = False

    def start(self, trainer: StockTrainer, given: str | bool | None) -> str | bool | None:
        """Determine which run this is and where it begins, and return what TRL's `train` gets as
        `resume_from_checkpoint`. Collective.

        Args:
            given: the argument of `train`: a checkpoint, True for the newest, False for none; None for the newest if a
                launcher has started the run again, else for none.

        Raises:
            ConfigError: no checkpoint can be resumed from although `given` is True, or the one that is named is
                damaged.
        """
        args, ranks, output_dir = trainer.args, self._session.ranks, Path(trainer.args.output_dir)
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
        writes = str(getattr(args.save_strategy, "value", args.save_strategy)) != "no"
        start = restart.started(ranks, output_dir, choose, saves=bool(args.should_save), writes=writes)
        self._identity = start.identity
        if ranks.rank == 0 and (again or start.passed):
            restart.announce(start, args.output_dir)
        if ranks.rank == 0:
            restart.warn(start, ranks.world)
        if given is True and start.checkpoint is None and start.passed:
            raise ConfigError(
                f"No checkpoint in {output_dir} can be resumed from: {listed(list(start.passed), 8)}. Name one, or "
                "start over with resume_from_checkpoint=False."
            )
        found = start.checkpoint if again or given is True else None
        return given if found is None else str(found)

    # --- saving -----------------------------------------------------------------------------------------------------

    @contextmanager
    def saving(self, trainer: StockTrainer, output_dir: Path) -> Iterator[Path]:
        """Return a context for TRL's save of a checkpoint, which gives the checkpoint's folder.

        A first manifest is written before the checkpoint's files and a complete one after them, so that an interrupted
        save can be recognised. Older checkpoints are removed only then. Collective.

        Args:
            output_dir: the folder of the run's checkpoints.
        """
        # Not at the top: scripts that only call `checkpoint_to_resume` would wait seconds for it, on every rank.
        from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

        args, checkpoint = trainer.args, output_dir / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
        self._begin(checkpoint, args)
        self._limit, args.save_total_limit = args.save_total_limit, None
        try:
            with self.held():
                yield checkpoint
        finally:
            args.save_total_limit = self._limit
        self.complete(args)
        if args.should_save:
            best = trainer.state.best_model_checkpoint
            rotate_checkpoints(str(output_dir), args.save_total_limit, best_model_checkpoint=best, use_mtime=True)

    @contextmanager
    def with_limit(self, args: Any) -> Iterator[None]:
        """Return a context in which `args.save_total_limit` has the user's value, for saving the arguments themselves.
        Otherwise it is None while a checkpoint is saved, so that transformers removes no older one too early."""
        held_back = args.save_total_limit
        if self._open_save is not None:
            args.save_total_limit = self._limit
        try:
            with self.held():
                yield
        finally:
            args.save_total_limit = held_back

    def held(self, meets: bool = False) -> AbstractContextManager[None]:
        """Return a context for writing a part of a checkpoint. Errors of files that cannot be written are stored, and
        raised on all ranks once all have written.

        Args:
            meets: whether the write itself is collective. An error is then raised at once on the rank where it occurs,
                because the other ranks wait for this one inside the write; the launcher ends them.
        """
        if self._open_save is None:  # not a checkpoint but, for example, a save at the end of a script
            return nullcontext()
        return self._write_errors.at_once(self._open_save) if meets else self._write_errors.held()

    def _begin(self, checkpoint: Path, args: Any) -> None:
        """Write a checkpoint's first manifest, which says that the save is under way, and the session's state.

        Collective: files that another run or an interrupted save left in the folder are removed first, and no rank
        writes into the folder before that.

        Args:
            checkpoint: the checkpoint's folder.
            args: the trainer's `TrainingArguments`; ranks whose `should_save` is False only wait.
        """
        session = self._session
        selection = session.selection
        of_trl = selection.stock and selection.scoring.component.name == PADDED and not session.algorithms
        self._open_save, self._write_errors = checkpoint, WriteErrors()
        self._identity = identity = self._identity or session.ranks.broadcast(new_identity())
        if args.should_save:
            with self._write_errors.held(ours=True):
                self._see_whose_folder(Path(args.output_dir), identity)
                manifest.begin(checkpoint, identity.run, session.ranks.world)
                if not of_trl:
                    session.save_state(checkpoint)
        self._meet()

    def _meet(self) -> None:
        """Wait for all ranks, and raise on all of them if one could not write its part of the checkpoint.
        Collective."""
        if self._open_save is not None:
            try:
                self._write_errors.tell(self._session.ranks, self._open_save)
            except BaseException:
                self._open_save = None
                raise

    def complete(self, args: Any) -> None:
        """Write the checkpoint's complete manifest, the list of its files with their digests, after all ranks have
        written them. Does nothing if no save is under way. Collective."""
        if self._open_save is None or self._identity is None:
            return
        self._meet()
        if args.should_save:
            with self._write_errors.held():
                manifest.end(self._open_save, self._identity.run, self._session.ranks.world)
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


@contextmanager
def all_adapters(trainer: StockTrainer, move: Callable[..., object], model: Any, folder: str) -> Iterator[None]:
    """Return a context for transformers' saving or loading of a checkpoint. In FSDP's shards, transformers handles only
    the first active adapter of a PEFT model; at the end of the context, `move` does the same for the other active ones,
    and all are active again. Elsewhere the context does nothing.

    Args:
        move: accelerate's `save_fsdp_model` or `load_fsdp_model`, whichever fits.
        model: the PEFT model.
        folder: the checkpoint.
    """
    accelerator = trainer.accelerator
    plugin = accelerator.state.fsdp_plugin if trainer.is_fsdp_enabled else None

    def further(number: int) -> None:
        move(plugin, accelerator, model, folder, model_index=number, adapter_only=True)

    with one_by_one(model, plugin, further):
        yield


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


class WriteErrors:
    """The errors that this rank meets while it writes its part of the checkpoint that is being saved.

    While a checkpoint is saved, ranks wait for each other. If a rank raised its error at once, the other ranks would
    wait for it without end, so it stores the error and goes on. The result is no valid checkpoint: its manifest does
    not say that the save was completed.
    """

    def __init__(self) -> None:
        self._first: BaseException | None = None

    @contextmanager
    def held(self, ours: bool = False) -> Iterator[None]:
        """Return a context in which an error of a file that cannot be written is caught and stored in this object,
        until `tell` raises it on all ranks. Only the first one is stored. Other errors are raised at once.

        Args:
            ours: whether to store this package's errors (HybridError) as well.
        """
        try:
            yield
        except BaseException as error:
            if not (unwritten(error) or (ours and isinstance(error, HybridError))):
                raise
            self._first = self._first or error

    @contextmanager
    def at_once(self, checkpoint: Path) -> Iterator[None]:
        """Return a context for a write that other ranks wait for. An error inside is raised at once, with a message
        that says what to do. It must end this process, so that the launcher ends the processes of the other ranks.

        Args:
            checkpoint: the checkpoint that is being written.

        Raises:
            HybridError: a part of the checkpoint cannot be written.
        """
        with named(lambda error: _text(error, checkpoint)):
            yield

    def tell(self, ranks: Ranks, checkpoint: Path) -> None:
        """Wait for the other ranks, and raise the stored error on all of them if one rank has any. Collective.

        Raises:
            HybridError: on every rank, if any rank has an error. Names the checkpoint, the free space on its disk, and
                what to do.
        """
        first, self._first = self._first, None
        own = None if first is None else str(first) if isinstance(first, HybridError) else _text(first, checkpoint)
        for rank, text in enumerate(ranks.gather(own)):
            if text is not None:
                where = f"On rank {rank}: " if ranks.world > 1 else ""
                raise HybridError(f"{where}{text}") from first


def _text(error: BaseException, checkpoint: Path) -> str:
    output_dir = checkpoint.parent
    try:
        whole = restart.newest_start(output_dir).checkpoint
    except ConfigError:  # the checkpoints' run is unknown
        whole = None
    begins = f"goes on from {whole.name}, which is whole" if whole is not None else "starts over: none is whole yet"
    return (
        f"{checkpoint} could not be saved: {told(error, output_dir)} Make room there, let save_total_limit keep fewer "
        f"checkpoints, or name another output_dir. Then, with resume_from_checkpoint=True or {RESUME_VARIABLE}=1, the "
        f"run {begins}. {checkpoint.name} holds a part, is passed over, and may be removed."
    )
