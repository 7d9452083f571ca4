"""Errors of writing a checkpoint: each rank stores its error until all ranks have finished writing, and then all ranks
raise it together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ...config import RESUME_VARIABLE
from ...disk import named, told, unwritten
from ...errors import ConfigError, HybridError
from . import restart

if TYPE_CHECKING:
    from ...interprocess.ranks import Ranks


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
