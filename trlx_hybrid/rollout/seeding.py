"""Seeds of requests: every request gets its own, so that sampling needs no generator state, and the trainer's random
generators are never used."""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..contract.types import Request


def request_seed(run_seed: int, stream: str, weight_version: int, row: int, generation: int, turn: int) -> int:
    """Return the seed of one request, a hash of the arguments, which identify the request.

    The seed does not depend on the number of processes, on the rank that computes it, on the order of the calls, or on
    random numbers that other code has drawn. So the ranks of one replica agree, runs repeat on another number of
    processes, and resumes are exact, without generator state in checkpoints.

    Args:
        run_seed: the run's seed (TRL's `seed`).
        stream: "train" or "eval", which get different seeds.
        weight_version: version of the weights that will sample.
        row: number of the prompt among all prompts of this weight version and stream, over all ranks.
        generation: index within the prompt's group.
        turn: turn of the trajectory.

    Returns:
        A non-negative integer below 2**63, which both of vLLM's runners accept.
    """
    key = struct.pack("<5q", run_seed, weight_version, row, generation, turn) + stream.encode()
    return _digest(key)


def several(request: Request, count: int) -> list[Request]:
    """Return requests for `count` completions of one prompt, for a rollout that samples several and returns one of
    them. They differ in their seeds only, so each completion is another draw.

    The first one is the request itself. The other seeds are hashes of its seed and of their places, so they do not
    depend on `count` or on other requests.
    """
    seeds = (_digest(struct.pack("<2q", request.seed, place)) for place in range(1, count))
    return [request, *(replace(request, seed=seed) for seed in seeds)]


def rest(request: Request, sampled: Sequence[int], interruptions: int) -> Request:
    """Return the request for the rest of one that was interrupted. Its seed is a hash of the first one's seed and of
    the number of interruptions.

    Args:
        request: the first request, with a limit of tokens.
        sampled: all tokens that were sampled.
        interruptions: how often it was interrupted, at least once.
    """
    assert request.max_tokens is not None
    return replace(
        request,
        prompt_ids=[*request.prompt_ids, *sampled],
        seed=_digest(struct.pack("<2q", request.seed, -interruptions)),
        max_tokens=request.max_tokens - len(sampled),
    )


def _digest(key: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Restore the global generators of `random`, NumPy and torch (CPU and current GPU) on exit.

    Without this, building an engine and calling it would draw random numbers from these generators, and so change the
    dropout and the data order of the training.
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


class RowTracker:
    """Finds out for each prompt of a rollout phase on this rank which row of the batch it belongs to, and which turn of
    that row it is.

    The first call of `place` has every row of this rank. TRL's tool loop then samples again for the rows that called
    tools. Each prompt then is the row's earlier tokens plus the tool's answer, and is recognised by this prefix.

    Args:
        first_row: number of this rank's first row in the batch of all ranks.
    """

    def __init__(self, first_row: int) -> None:
        self._first_row = first_row
        self._sequences: list[list[int]] = []
        self._turns: list[int] = []
        self._calls = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def place(self, prompts: Sequence[list[int]]) -> list[tuple[int, int]]:
        """Return (row, turn) for each prompt, in order: the row's number over all ranks, and the turn within the
        trajectory. TRL keeps the order of rows, so each search starts after the last hit."""
        self._calls += 1
        if not self._sequences:
            self._sequences = [list(p) for p in prompts]
            self._turns = [0] * len(prompts)
            return [(self._first_row + i, 0) for i in range(len(prompts))]
        places, start = [], 0
        for index, prompt in enumerate(prompts):
            hit = next((i for i in range(start, len(self._sequences)) if _continues(prompt, self._sequences[i])), None)
            if hit is None:  # a custom rollout's own request: the call's number keeps it distinct
                places.append((self._first_row + index, self._calls - 1))
                continue
            start = hit + 1
            self._turns[hit] += 1
            places.append((self._first_row + hit, self._turns[hit]))
        return places

    def extend(
        self, places: Sequence[tuple[int, int]], prompts: Sequence[list[int]], completions: Sequence[list[int]]
    ) -> None:
        """Record the completions that were sampled for the prompts of the last call of `place`, so that the prompts of
        the next turn, which continue them, are recognised.

        Args:
            places: what `place` returned for `prompts`.
        """
        for (row, _), prompt, completion in zip(places, prompts, completions, strict=True):
            index = row - self._first_row
            if index < len(self._sequences):
                self._sequences[index] = [*prompt, *completion]


def _continues(prompt: list[int], sequence: list[int]) -> bool:
    return len(prompt) > len(sequence) and prompt[: len(sequence)] == sequence
