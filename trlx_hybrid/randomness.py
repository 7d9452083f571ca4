"""Randomness without state: every request carries its seed, and the trainer's generators are never touched."""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager


def request_seed(run_seed: int, stream: str, weight_version: int, row: int, generation: int, turn: int) -> int:
    """The seed of one request: a hash of what identifies it, so that it depends on nothing else.

    Which rank asks, in which order, how many processes there are, and who else drew random numbers all stay out of
    it. That makes the ranks of one replica agree, runs repeat on another number of processes, and resumes exact,
    with no generator state to checkpoint.

    Args:
        run_seed: the run's seed (TRL's `seed`).
        stream: "train" or "eval", which must not share draws.
        weight_version: version of the weights that will sample.
        row: prompt index within that version and stream, over all ranks.
        generation: index within the prompt's group.
        turn: turn of the trajectory.

    Returns:
        A non-negative integer below 2**63, which both of vLLM's runners accept.
    """
    key = struct.pack("<5q", run_seed, weight_version, row, generation, turn) + stream.encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Give the global generators of `random`, NumPy and torch (CPU and current GPU) back as they were.

    Building an engine and each of its calls draw from them, which would change dropout and data order of the
    training around it.
    """
    import numpy as np
    import torch

    python, numpy = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
