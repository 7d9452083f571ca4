"""Launched by test_gathering.py: tensors of all kinds, whole again; each rank reports what differs, and the calls."""

import json
import random
import sys
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from trlx_hybrid.policy.sharded import whole


def main(folder):
    dist.init_process_group("gloo")
    world, source = dist.get_world_size(), random.Random(0)
    line, grid = init_device_mesh("cpu", (world,)), init_device_mesh("cpu", (1, world))
    torch.manual_seed(0)
    tensors = [torch.randn(3, 3)]
    for _ in range(40):
        shape = [source.randint(1, 9) for _ in range(source.randint(1, 3))]
        dtype = source.choice([torch.float32, torch.bfloat16])
        mesh, placements = source.choice(
            [(line, [Shard(0)])] * 4 + [(grid, [Replicate(), Shard(0)]), (line, [Replicate()])]
        )
        if len(shape) > 1 and source.random() < 0.2:
            mesh, placements = line, [Shard(1)]
        tensors.append(distribute_tensor(torch.randn(shape).to(dtype), mesh, placements))
    with patch.object(dist, "all_gather_into_tensor", wraps=dist.all_gather_into_tensor) as calls:
        found = whole(tensors)
    wanted = [tensors[0], *(tensor.full_tensor() for tensor in tensors[1:])]
    report = {
        "same_object": found[0] is tensors[0],
        "different": [n for n, (a, b) in enumerate(zip(found, wanted, strict=True)) if not torch.equal(a, b)],
        "dtypes": [n for n, (a, b) in enumerate(zip(found, wanted, strict=True)) if a.dtype != b.dtype],
        "calls": calls.call_count,
        "kinds": len({(t.device_mesh, t.dtype) for t in tensors[1:] if Shard(0) in t.placements}),
    }
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
