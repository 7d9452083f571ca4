"""Proof that the servers hold the policy's bits: digests of slices, taken at both ends along the loader's routes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from trlx_hybrid.errors import SyncError, listed

from ..loading import Slice
from .digest import digest


@dataclass(frozen=True, slots=True)
class ReadSlice:
    """A slice of a checkpoint tensor that one worker's loader reads, and the dtype that it is kept in."""

    dtype: torch.dtype
    source: Slice


@dataclass(frozen=True, slots=True)
class Routes:
    """What the workers of one server keep of each tensor. All servers of a run keep the same.

    Attributes:
        of: by checkpoint name, then by worker.
    """

    of: dict[str, list[list[ReadSlice]]]

    @classmethod
    def learned(cls, names: Sequence[str], servers: Sequence[Sequence[Any]]) -> Routes:
        """From what each server's workers answered to `learn`.

        Raises:
            SyncError: an engine has parameters that no tensor is written to, or the servers differ.
        """
        unwritten = [name for _, missing in servers[0] for name in missing]
        if unwritten:
            raise SyncError(
                f"The weight sync would leave engine parameters unwritten: {listed(unwritten)}. The model and vLLM's "
                "definition of it disagree; use engine='transformers' and report it."
            )
        if any(server != servers[0] for server in servers):
            raise SyncError(
                "The remote engines keep the weights in different layouts. Run them on machines of one kind, with one "
                "version of vLLM."
            )
        workers = [routes for routes, _ in servers[0]]
        return cls({name: [[_slice(r) for r in worker[i]] for worker in workers] for i, name in enumerate(names)})

    def wire(self, dtypes: dict[str, torch.dtype]) -> dict[str, torch.dtype]:
        """What tensors can be cast to before they are sent, since every worker keeps them in that narrower dtype."""
        found = {}
        for name, workers in self.of.items():
            kept = {r.dtype for worker in workers for r in worker}
            if len(kept) == 1 and (dtype := next(iter(kept))).itemsize < dtypes[name].itemsize:
                found[name] = dtype
        return found

    def digests(self, weights: Iterable[tuple[str, Tensor]]) -> dict[str, list[list[int]]]:
        """Of the policy's tensors, as a server's workers would answer: by name, worker and route."""
        found = {
            name: [[digest(r.source.of(tensor).to(r.dtype)) for r in worker] for worker in self.of[name]]
            for name, tensor in weights
        }
        return {name: [[int(d) for d in worker] for worker in workers] for name, workers in found.items()}


def _slice(route: Sequence[Any]) -> ReadSlice:
    dtype, shape, stride, offset = route
    return ReadSlice(getattr(torch, dtype), Slice(tuple(shape), tuple(stride), offset))


def differing(expected: dict[str, list[list[int]]], servers: Sequence[Sequence[Any]]) -> list[str]:
    """Tensors that a server holds with other bits.

    Args:
        servers: their answers, each by worker and then in the order of `expected`.
    """
    return [
        name
        for i, (name, workers) in enumerate(expected.items())
        if any(answer[rank][i] != digests for answer in servers for rank, digests in enumerate(workers))
    ]
