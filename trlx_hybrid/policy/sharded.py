"""Gathering of sharded tensors: full tensors of DTensors, and modules with full parameters."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn


def is_sharded(p: Tensor) -> bool:
    """Return whether this rank holds only a part of a parameter: a DTensor (FSDP2), or a parameter of ZeRO-3."""
    return hasattr(p, "full_tensor") or hasattr(p, "ds_id")


def fsdp_note(module: nn.Module, version: int | None, world: int, args: Any) -> str | None:
    """Return a note for the run's header where FSDP was asked for and every rank holds the whole model, else None.

    accelerate turns FSDP into DDP on CPUs, and without a process group into a single process, and says neither.

    Args:
        module: the model, prepared for training.
        version: 1 or 2 where accelerate shards by FSDP, else None.
        world: number of ranks.
        args: the run's arguments, which may have `fsdp`.
    """
    launched = os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("true", "1")
    asked = launched or getattr(args, "fsdp", None)
    if not asked or version == 1 or any(map(is_sharded, module.parameters())):
        return None
    cpu = all(p.device.type == "cpu" for p in module.parameters())
    way_out = (
        "accelerate makes DDP of it on CPUs; on GPUs the same start shards."
        if cpu and world > 1
        else "Start several processes with `accelerate launch` and a config of `distributed_type: FSDP`."
    )
    holds = "each rank holds all of it" if world > 1 else "this is the only process"
    by = "ACCELERATE_USE_FSDP" if launched else "fsdp"
    return f"FSDP: asked for ({by}), and the model is not sharded: {holds}. {way_out}"


def full(tensor: Any) -> Tensor:
    """Return a DTensor as a full tensor. Shards that are offloaded to host memory are first copied to the mesh's
    device, where the gather runs."""
    kind = tensor.device_mesh.device_type
    return cast("Tensor", (tensor if tensor.device.type == kind else tensor.to(kind)).full_tensor())


@torch.no_grad()
def whole(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return each tensor in full: DTensors as new tensors, the others as they are. Collective where any is sharded.

    FSDP2 splits the first dimension into equal shards, the last of which may be shorter or empty. So every rank pads
    its shards to the size of the first rank's, and one all-gather moves all tensors of a dtype. DTensors with other
    placements are gathered one by one.
    """
    found: list[Tensor] = list(tensors)
    together: dict[tuple[Any, ...], list[int]] = {}
    for number, tensor in enumerate(tensors):
        if not hasattr(tensor, "full_tensor"):
            continue
        dim = _sharded_dim(tensor)
        if dim is None:
            found[number] = full(tensor)
        else:
            together.setdefault((getattr(tensor, "device_mesh", None), dim, tensor.dtype), []).append(number)
    for (mesh, dim, _), numbers in together.items():
        gathered = _gather([tensors[number] for number in numbers], mesh, dim)
        for number, tensor in zip(numbers, gathered, strict=True):
            found[number] = tensor
    return found


def _sharded_dim(tensor: Any) -> int | None:
    """Return the mesh dimension over which a DTensor's first dimension is split; None for any other placement."""
    cut = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    plain = len(cut) == 1 and type(tensor.placements[cut[0]]).__name__ == "Shard" and tensor.placements[cut[0]].dim == 0
    return cut[0] if plain else None


def _gather(tensors: Sequence[Any], mesh: Any, dim: int) -> list[Tensor]:
    """Gather DTensors of one dtype, all split along their first dimension, with one all-gather, and return full
    tensors.

    Args:
        dim: mesh dimension over which the tensors are split.
    """
    ranks = mesh.size(dim)
    here = [tensor._local_tensor for tensor in tensors]
    rows = [-(-tensor.shape[0] // ranks) for tensor in tensors]  # rows of a full piece
    sizes = [count * tensor.shape[1:].numel() for count, tensor in zip(rows, tensors, strict=True)]
    mine = torch.empty(sum(sizes), dtype=here[0].dtype, device=mesh.device_type)
    parts = torch.split(mine, sizes)
    held = [part[: t.numel()] for part, t in zip(parts, here, strict=True)]
    torch._foreach_copy_(held, [t.reshape(-1) for t in here])
    everyone = torch.empty(ranks * len(mine), dtype=mine.dtype, device=mine.device)
    dist.all_gather_into_tensor(everyone, mine, group=mesh.get_group(dim))
    pieces = torch.split(everyone.view(ranks, -1), sizes, dim=1)
    return [
        piece.reshape(-1, *tensor.shape[1:])[: tensor.shape[0]] for piece, tensor in zip(pieces, tensors, strict=True)
    ]


@contextmanager
def unsharded(module: nn.Module) -> Iterator[None]:
    """Replace a module's sharded parameters by full ones inside the context. On exit the sharded parameters return, so
    writes to the full ones are lost. Collective where any parameter is a DTensor."""
    sharded = [
        (held, key, p)
        for held in (m._parameters for m in module.modules())
        for key, p in held.items()
        if p is not None and hasattr(p, "full_tensor")
    ]
    try:
        for held, key, p in sharded:
            held[key] = nn.Parameter(full(p.detach()), requires_grad=False)
        yield
    finally:
        for held, key, p in sharded:
            held[key] = p
