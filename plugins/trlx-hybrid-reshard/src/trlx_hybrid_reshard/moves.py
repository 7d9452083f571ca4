"""One plan and all that carries it out: the slices, the views, and the transport."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from trlx_hybrid.protocols import Regions

from .buckets import Buckets, bucketed
from .descriptors import Descriptors, lower
from .live import LiveLayout
from .options import ReshardOptions
from .parameter import Model
from .plan import plan
from .program import Program, program
from .sharding import Sharding
from .shards import Shards
from .transport import Transport


class Moves:
    """The sync of some parameters on this rank.

    Args:
        names: of the parameters.
        layouts: where all of them lie in the trainer and in the engines.
        place: this rank, and the group of all ranks.

    Attributes:
        digest: of everything that the ranks must agree on, 64 bits.
        received_bytes, floor_bytes: per sync on this rank, and the least it could be.
        sent_bytes: the other way.
        tensors: how many of them this rank's engine holds.
    """

    def __init__(
        self,
        shards: Shards,
        names: Sequence[str],
        layouts: tuple[LiveLayout, LiveLayout],
        regions: Regions,
        dtype: torch.dtype,
        device: torch.device,
        place: tuple[int, Any],
        options: ReshardOptions,
    ) -> None:
        self._shards, self._names, self._regions = shards, names, regions
        self._dtype, self._device, self._options = dtype, device, options
        rank, self._group = place
        model = Model(name="live", parameters=tuple(shards.parameters(names)), itemsize=dtype.itemsize)
        cast = any(shards.local[name].dtype != dtype for name in names)
        self._buckets: Buckets = bucketed(model, *layouts, options.bucket_bytes, cast=cast)
        self._lowered: Descriptors = lower(model, *layouts, rank, self._buckets)
        self.floor_bytes = plan(model, *layouts, rank).floor_bytes
        self.digest = _digest(model, layouts, self._buckets)
        self._made = -1
        self._renew()

    def _renew(self) -> None:
        """Make the views anew where the trainer's tensors have become others."""
        if self._made == self._shards.moved:
            return
        self._made = self._shards.moved
        self._program: Program = program(
            self._names,
            self._lowered,
            self._buckets.count,
            self._shards.local,
            self._regions.of,
            self._dtype,
            self._device,
        )
        self._transport = Transport(
            self._program, self._group, self._device, self._options.stall, record=self._options.record
        )
        self.received_bytes, self.sent_bytes = self._program.received_bytes, self._program.sent_bytes
        self.tensors = self._program.tensors

    def run(self) -> None:
        """Move them.

        Raises:
            PeerLostError: see `Transport.run`.
        """
        self._renew()
        self._transport.run()

    def __str__(self) -> str:
        received, floor, extra = self.received_bytes, self.floor_bytes, self._program.staging.bytes
        return (
            f"transferred={received / 1e9:.3g}GB (floor {floor / 1e9:.3g}GB), peak=+{extra / 1e9:.3g}GB, "
            f"buckets={self._buckets.count}"
        )


def _digest(model: Model, layouts: tuple[LiveLayout, LiveLayout], buckets: Buckets) -> int:
    """Equal on two ranks only if they plan the same."""
    state = hashlib.blake2b(digest_size=8)
    state.update(repr((model.itemsize, buckets.rounds, buckets.by_source, buckets.count)).encode())
    for parameter, numbers in zip(model.parameters, buckets.numbers, strict=True):
        state.update(f"{parameter.name}{parameter.shape}".encode() + numbers.tobytes())
        for layout in layouts:
            state.update(_bytes(layout.sharding(parameter)))
    return int.from_bytes(state.digest(), "little", signed=True)


def _bytes(sharding: Sharding) -> bytes:
    arrays = [*sharding.parts, *sharding.coordinates, sharding.held]
    return b"|".join(b"-" if array is None else array.tobytes() for array in arrays)
