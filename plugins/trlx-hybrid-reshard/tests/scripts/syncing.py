"""Launched by test_sync.py: the weight sync on FSDP2 and plain models over gloo, a number of times.

Each rank writes what it saw under the names that the test reads.
"""

import json
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from standins import RANK, WORLD, Model, SlicedEngine, session_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from trlx_hybrid.errors import SyncError

IDS = torch.arange(4)[None]


def sharded(columns=False, **arguments):
    """By rows; or matrices by columns, as `trlx-hybrid reshard-plan` may advise."""
    model = Model(**arguments)
    placed = {"shard_placement_fn": lambda p: Shard(1) if p.ndim == 2 else None} if columns else {}
    if WORLD > 1:
        for layer in model.layers:
            fully_shard(layer, **placed)
        fully_shard(model, **placed)
    return model


def local(p):
    return getattr(p, "_local_tensor", p)


def opened(model, engine, **arguments):
    session, sync = session_of(model, engine, **arguments)
    assert sync.refuses() is None
    sync.open()
    return session, sync


def train_step(model):
    model(IDS).square().sum().backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
    model.zero_grad()


def a_run(model):
    """Bytes of each sync, whether the engine was right after it, and the floor of the first."""
    engine = SlicedEngine(tp=WORLD)
    session, sync = opened(model, engine)
    frozen = model.layers[1][1].weight
    seen = {}

    def after(name):
        session.weight_version += 1
        report = sync.sync()
        seen[name] = {"bytes": report.bytes, "tensors": report.tensors, "wrong": engine.wrong(session.policy)}

    after("first")
    seen["floor"] = sync.prepared.floor_bytes
    train_step(model)
    engine.poison()
    after("trained")
    frozen.requires_grad_(False)
    after("newly frozen")
    train_step(model)
    engine.poison([name for name in engine.memory if name != "layers.1.1.weight"])
    after("one frozen")
    with torch.no_grad():
        local(frozen).mul_(2)
    after("frozen but written")
    engine.weights_lost = True
    engine.poison()
    after("lost")
    parked = []
    for p in model.parameters():  # the memory goes and comes back elsewhere, as when a policy is offloaded
        storage = local(p.detach()).untyped_storage()
        saved, size = storage.clone(), storage.nbytes()
        storage.resize_(0)
        parked.append(torch.empty(size))  # so that it comes back to another address
        storage.resize_(size)
        storage.copy_(saved)
    with torch.no_grad():
        model(IDS)  # FSDP2 leaves the root unsharded after this
    engine.poison(["norm.weight", "again"])
    after("offloaded and run")
    if WORLD == 1:
        model.norm.weight.data = torch.randn(8)
        after("replaced")
    seen["written"] = engine.written
    staging = sync.prepared._program.staging
    seen["staging"] = [b.untyped_storage().nbytes() for b in staging._buffers]
    sync.release()
    return seen


def refusals():
    seen = {}
    session, sync = session_of(
        sharded(), SlicedEngine(tp=WORLD, reason=f"no, says {RANK}" if RANK == WORLD - 1 else None)
    )
    seen["one rank"] = sync.refuses()
    session, sync = session_of(sharded(), object())
    seen["no regions"] = sync.refuses()
    _, sync = session_of(Model(layers=2 + (RANK == 1)), SlicedEngine(tp=WORLD))
    seen["other model"] = error_of(sync.refuses)
    session, sync = opened(sharded(), SlicedEngine(tp=WORLD))
    session.weight_version = 7 + RANK
    seen["version"] = error_of(sync.sync)
    session.weight_version = 9
    if RANK == 0:
        session.policy.module.norm.weight.requires_grad_(False)
    seen["freezing"] = error_of(sync.sync)
    session.policy.module.norm.weight.requires_grad_(False)
    sync.sync()
    seen["after"] = session.live_engine.wrong(session.policy)
    return seen


def two_nodes():
    """Whom a rank receives from where each of two nodes has a replica of the shards, and an engine spans both."""
    model, mesh = Model(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    engine, plain = SlicedEngine(tp=4), socket.gethostname
    socket.gethostname = lambda: f"node{RANK // 2}"
    session, sync = opened(model, engine)
    socket.gethostname = plain
    sync.sync()
    peers = {t.peer for bucket in sync.prepared._program.buckets for t in bucket.receives}
    return {"peers": sorted(peers), "wrong": engine.wrong(session.policy)}


def error_of(call):
    try:
        call()
    except SyncError as error:
        return str(error)
    return None


def main(folder):
    if WORLD > 1:
        dist.init_process_group("gloo")
    seen = {"sharded": a_run(sharded())}
    seen["sharded by columns"] = a_run(sharded(columns=True))
    seen["plain"] = a_run(Model())
    if WORLD == 2:
        seen["refusals"] = refusals()
    if WORLD == 4:
        seen["two nodes"] = two_nodes()
    (folder / f"rank{RANK}.json").write_text(json.dumps(seen))
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
