"""Errors of writing a checkpoint: held on their rank until all ranks meet, and raised on all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import RESUME_VARIABLE
from ..disk import named, told, unwritten
from ..errors import ConfigError, HybridError
from . import restart

if TYPE_CHECKING:
    from ..ranks import Ranks


class WriteErrors:
    """Errors that this rank meets as it writes its part of the checkpoint whose save is open.

    Within a save ranks wait for each other. A rank that raised there would leave the others waiting, so it goes on, and
    what it has written is no checkpoint: its manifest does not say that the save came to its end.
    """

    def __init__(self) -> None:
        self._first: BaseException | None = None

    @contextmanager
    def held(self, ours: bool = False) -> Iterator[None]:
        """Hold the error of a file that cannot be written inside. Other errors are raised.

        Args:
            ours: whether errors of this package are held as well.
        """
        try:
            yield
        except BaseException as error:
            if not (unwritten(error) or (ours and isinstance(error, HybridError))):
                raise
            self._first = self._first or error

    @contextmanager
    def at_once(self, checkpoint: Path) -> Iterator[None]:
        """Raise an error where it is met: inside is a write that other ranks wait for. The error ends this process, and
        the launcher ends the others.

        Raises:
            HybridError: the part cannot be written.
        """
        with named(lambda error: _text(error, checkpoint)):
            yield

    def tell(self, ranks: Ranks, checkpoint: Path) -> None:
        """Meet the other ranks, and raise what could not be written on one of them. Collective.

        Raises:
            HybridError: on each of them, where one has an error. Names the checkpoint, what is free on its disk, and
                the way out.
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
    except ConfigError:  # nobody can tell whose they are
        whole = None
    begins = f"goes on from {whole.name}, which is whole" if whole is not None else "starts over: none is whole yet"
    return (
        f"{checkpoint} could not be saved: {told(error, output_dir)} Make room there, let save_total_limit keep fewer "
        f"checkpoints, or name another output_dir. Then, with resume_from_checkpoint=True or {RESUME_VARIABLE}=1, the "
        f"run {begins}. {checkpoint.name} holds a part, is passed over, and may be removed."
    )
