"""Handling of errors of files that cannot be written: how to recognise them, and messages that name the free space."""

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
"""Error numbers (`errno`) by which the system says that a file cannot be written: the disk is full, over its quota,
broken or read-only, or the file would be too large."""

OF_RUST = re.compile(r"\(os error \d+\)")  # the tokenizers package's form of system errors
OF_TORCH = ("inline_container", "PytorchStreamWriter")  # `torch.save` does not name the system error


def unwritten(error: BaseException) -> bool:
    """Return whether an error says that a file could not be written, whichever library raised it."""
    if isinstance(error, HybridError):  # its text may quote another error
        return False
    if isinstance(error, OSError):  # errors of connections have neither
        return error.errno in REFUSALS or error.filename is not None
    if isinstance(error, RuntimeError) and any(word in str(error) for word in OF_TORCH):
        return True
    return isinstance(error, SafetensorError) or bool(OF_RUST.search(str(error))) or _of_shards(error)


@contextmanager
def named(text: Callable[[Exception], str]) -> Iterator[None]:
    """Return a context that turns an error raised inside into a HybridError if the error says that a file could not be
    written. Other errors pass unchanged.

    Args:
        text: returns the HybridError's message from the original error; the message should name what was written, and
            what to do.

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
    """Return the free bytes on the disk of a folder, which need not exist yet."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def told(error: BaseException, folder: Path) -> str:
    """Return two sentences for an error message: what failed, and how much space is free on the disk of a folder."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, RuntimeError):
        text = f"torch.save failed ({text})"
    return f"{text.rstrip('.'):.300}. {free_bytes(folder):,} bytes are free on the disk of {folder}."


def _of_shards(error: BaseException) -> bool:
    """Return whether an error is a `CheckpointException` of torch's sharded checkpoints, which reports for all ranks,
    and is no subclass of `Exception`."""
    from torch.distributed.checkpoint.api import CheckpointException

    return isinstance(error, CheckpointException)
