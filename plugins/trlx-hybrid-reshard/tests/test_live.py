"""Layouts read from DTensors that torch itself sharded, once as every rank; no communication takes place."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from trlx_hybrid.errors import ConfigError
from trlx_hybrid_reshard.layouts import MeshLayout, Model, Parameter, from_dtensor, read_trainer
from trlx_hybrid_reshard.plan import plan

sys.path.insert(0, str(Path(__file__).parent))
from worlds import boxes

WORLD = 4


@pytest.fixture
def as_rank():
    """Become one rank of four; the process group carries nothing."""

    def become(rank):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)

    yield become
    if dist.is_initialized():
        dist.destroy_process_group()


def numbered(*shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def taken(full, boxes):
    """The elements of the boxes of a tensor of one layer."""
    return [x for box in boxes for x in full[tuple(slice(a, b) for a, b in box[1:])].flatten().tolist()]


MESHES = [
    ((4,), [Shard(0)], (10, 3)),
    ((4,), [Shard(0)], (3, 2)),  # fewer rows than ranks: the last holds nothing
    ((4,), [Shard(1)], (3, 8)),
    ((4,), [Replicate()], (3, 2)),
    ((2, 2), [Replicate(), Shard(0)], (7, 2)),
    ((2, 2), [Shard(0), Shard(1)], (6, 4)),
    ((2, 2), [Shard(0), Shard(0)], (12, 2)),
]


@pytest.mark.parametrize(("mesh", "placements", "shape"), MESHES, ids=str)
def test_each_rank_holds_what_torch_gave_it(as_rank, mesh, placements, shape):
    full = numbered(*shape)
    for rank in range(WORLD):
        as_rank(rank)
        tensor = distribute_tensor(full, init_device_mesh("cpu", mesh), placements, src_data_rank=None)
        held = boxes(from_dtensor(tensor, WORLD), rank)
        assert taken(full, held) == tensor.to_local().flatten().tolist()


def test_fsdp_inside_tensor_parallelism(as_rank):
    full = numbered(8, 2)
    for rank in range(WORLD):
        as_rank(rank)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
        layer = nn.Linear(2, 8, bias=False)
        layer.weight = nn.Parameter(distribute_tensor(full, mesh["tp"], [Shard(0)], src_data_rank=None))
        fully_shard(layer, mesh=mesh["fsdp"])
        held = boxes(from_dtensor(layer.weight, WORLD), rank)
        assert taken(full, held) == layer.weight.to_local().flatten().tolist()


def live():
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(3, 10, bias=False) for _ in range(2))
    return model


WEIGHTS = tuple(Parameter(name=f"layers.{i}.weight", shape=(10, 3), tp_dim=0) for i in range(2))


def test_a_model_under_fully_shard_plans_like_the_layout_it_has(as_rank):
    as_rank(1)
    model = live()
    for layer in model.layers:
        fully_shard(layer)
    tensors = dict(model.named_parameters())
    assert all(isinstance(t, DTensor) for t in tensors.values())
    described = Model(name="two layers", parameters=WEIGHTS)
    seen = read_trainer(tensors, WORLD)
    for rank in range(WORLD):
        found = plan(described, seen, MeshLayout(tp=2, dp=2), rank)
        meant = plan(described, MeshLayout(fsdp=4), MeshLayout(tp=2, dp=2), rank)
        assert (found.receives == meant.receives).all()
        assert (found.sends == meant.sends).all()


def test_a_mesh_out_of_order_is_refused(as_rank):
    """torch sorts the ranks of its groups, so FSDP2's chunks do not follow such a mesh: a sync would mix them up."""
    as_rank(1)
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(8, 12, bias=False) for _ in range(2))
    for layer in model.layers:
        fully_shard(layer, mesh=DeviceMesh("cpu", [0, 2, 1, 3]))
    with pytest.raises(ConfigError, match=r"lists its ranks as \[0, 2, 1, 3\]"):
        read_trainer(dict(model.named_parameters()), WORLD)


def test_advised_shard_dimensions_are_what_fully_shard_makes(as_rank):
    as_rank(1)
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(8, 12, bias=False) for _ in range(2))
    for layer in model.layers:
        fully_shard(layer, mesh=DeviceMesh("cpu", range(WORLD)), shard_placement_fn=lambda p: Shard(1))
    rows = tuple(Parameter(name=f"layers.{i}.weight", shape=(12, 8), tp_dim=1) for i in range(2))
    described = Model(name="two layers", parameters=rows)
    seen = read_trainer(dict(model.named_parameters()), WORLD)
    rollout, meant = MeshLayout(tp=2, dp=2), MeshLayout(fsdp=4, shard_dims=tuple((p.name, 1) for p in rows))
    for rank in range(WORLD):
        assert (plan(described, seen, rollout, rank).receives == plan(described, meant, rollout, rank).receives).all()


def test_plain_parameters_are_on_every_rank():
    seen = read_trainer(dict(live().named_parameters()), WORLD)
    assert [seen.sharding(WEIGHTS[0]).elements(r) for r in range(WORLD)] == [30] * WORLD
