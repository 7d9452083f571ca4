"""Disks that take no more: which errors say so, and what is free."""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from .errors import HybridError

REFUSALS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS})
"""By which a system says that a file cannot grow, whatever its name."""

OF_RUST = re.compile(r"\(os error \d+\)")  # how the tokenizers package words what the system said
OF_TORCH = ("inline_container", "PytorchStreamWriter")  # of `torch.save`, which does not say what the system said


def unwritten(error: BaseException) -> bool:
    """Return whether an error is of a file that could not be written."""
    if isinstance(error, HybridError):  # whose text may hold the words of the error that it tells of
        return False
    if isinstance(error, OSError):  # of which those of a connection have neither
        return error.errno in REFUSALS or error.filename is not None
    if isinstance(error, RuntimeError) and any(word in str(error) for word in OF_TORCH):
        return True
    return isinstance(error, SafetensorError) or bool(OF_RUST.search(str(error))) or _of_shards(error)


@contextmanager
def named(text: Callable[[Exception], str]) -> Iterator[None]:
    """Raise the error of a file that cannot be written inside as one of ours. Other errors stay what they are.

    Args:
        text: of that error; should name what was written, and the way out.

    Raises:
        HybridError: a file cannot be written.
    """
    try:
        yield
    except Exception as error:
        if not unwritten(error):
            raise
        raise HybridError(text(error)) from error


def free_bytes(folder: Path) -> int:
    """Return what is free on the disk of a folder, which need not be there yet."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def told(error: BaseException, folder: Path) -> str:
    """Say what was wrong in a folder, and what is free there, in two sentences."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, RuntimeError):
        text = f"torch.save failed ({text})"
    return f"{text.rstrip('.'):.300}. {free_bytes(folder):,} bytes are free on the disk of {folder}."


def _of_shards(error: BaseException) -> bool:
    """Whether it is the error of torch's checkpoints in shards, which tells of all ranks, and is no `Exception`."""
    from torch.distributed.checkpoint.api import CheckpointException

    return isinstance(error, CheckpointException)
