"""The arm that reshards as verl does: full tensors on every rank, a bucket at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET = 256 << 20


class Gathering:
    """Full tensors, all-gathered a bucket at a time in the engine's dtype: one collective and a copy per bucket.

    FSDP2's default sharding is assumed: chunks of rows, the last ones shorter.
    """

    def __init__(self, session: Any) -> None:
        self._session, self._world = session, dist.get_world_size()
        self._dtype = session.live_engine.dtype
        self._order = self._ranks_in_order()
        self._converts = session.policy.converts

    def _ranks_in_order(self) -> list[int]:
        """The group's rank of each chunk: another than i where the mesh is permuted."""
        p = next(iter(shards_of(self._session.policy).values()))
        return [int(rank) for rank in p.device_mesh.mesh.tolist()]

    def sync(self) -> None:
        """Stream the policy through the engine's loader."""
        self._session.live_engine.load_weights(self._weights())

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        bucket: list[tuple[str, Any, int]] = []
        used = 0
        for name, p in shards_of(self._session.policy).items():
            rows = -(-p.shape[0] // self._world)
            elements = rows * (p.numel() // p.shape[0])
            if used and (used + elements) * self._world * self._dtype.itemsize > BUCKET:
                yield from self._gathered(bucket, used)
                bucket, used = [], 0
            bucket.append((name, p, elements))
            used += elements
        yield from self._gathered(bucket, used)

    def _gathered(self, bucket: list[tuple[str, Any, int]], used: int) -> Iterator[tuple[str, Tensor]]:
        device = bucket[0][1].device
        mine = torch.empty(used, dtype=self._dtype, device=device)
        parts = mine.split([elements for _, _, elements in bucket])  # type: ignore[no-untyped-call]
        local = [p.detach()._local_tensor.reshape(-1) for _, p, _ in bucket]
        torch._foreach_copy_([part[: t.numel()] for part, t in zip(parts, local)], local)
        everyone = torch.empty(self._world, used, dtype=self._dtype, device=device)
        dist.all_gather_into_tensor(everyone.view(-1), mine)
        everyone = everyone if self._order == list(range(self._world)) else everyone[self._order]
        start, full = 0, {}
        for name, p, elements in bucket:
            full[name] = everyone[:, start : start + elements].reshape(-1)[: p.numel()].view(p.shape)
            start += elements
        yield from (self._as_in_checkpoint(full) if self._converts else full).items()

    def _as_in_checkpoint(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Experts apart, as vLLM's loader wants them."""
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(self._session.policy.base, tensors)  # type: ignore[no-any-return]


def shards_of(policy: Any) -> dict[str, Any]:
    """The DTensors by name. FSDP2 leaves the root unsharded after a forward pass without a backward one."""
    for module in filter(lambda m: hasattr(m, "reshard"), policy.module.modules()):
        module.reshard()
    return dict(policy.base_parameters())
