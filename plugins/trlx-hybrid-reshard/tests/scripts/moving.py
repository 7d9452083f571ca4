"""Launched by test_transport.py: random reshards of real tensors between the ranks of one gloo group.

All ranks draw the same examples, so each is one collective call.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from trlx_hybrid.contract.protocols import Region
from trlx_hybrid_reshard.buckets import bucketed
from trlx_hybrid_reshard.descriptors import lower
from trlx_hybrid_reshard.layouts import MeshLayout, Model, Parameter, Stage, read_engines
from trlx_hybrid_reshard.plan import plan
from trlx_hybrid_reshard.program import messages_of, program
from trlx_hybrid_reshard.transport import Transport
from worlds import PADDING, boxes, held, layered, permuted, vocabulary

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
GROUP = None
SEEN = {"examples": 0, "received": 0, "buckets": 0, "in_place": 0, "packed": 0, "joined": 0}


@st.composite
def cases(draw):
    tp = draw(st.sampled_from([t for t in (1, 2, 4) if WORLD % t == 0]))
    fsdp = draw(st.sampled_from([WORLD, WORLD, *(f for f in (1, 2) if WORLD % f == 0)]))
    drawn = [draw(vocabulary), *draw(st.lists(layered(tp), min_size=4, max_size=8))]
    alike = {"layers": range(1), "depth": 0, "stage": Stage.LAYERS}
    parameters = tuple(replace(p, name=f"{i}.{p.name}", **alike) for i, p in enumerate(drawn))
    train = permuted(draw, MeshLayout(dp=WORLD // fsdp, fsdp=fsdp))
    rollout = permuted(draw, MeshLayout(dp=WORLD // tp, tp=tp, vocab_multiple=PADDING))
    dtypes = [draw(st.sampled_from([torch.float32, torch.bfloat16])) for _ in range(2)]
    return (
        parameters,
        train,
        rollout,
        dtypes,
        draw(st.sampled_from([1, 48, 1 << 20])),
        draw(st.sampled_from([1, 64, 1 << 20])),
    )


def poisoned(box, dtype, twice):
    """Memory for a box within something larger, as a fused parameter is: rows apart from each other, or not."""
    shape = [b - a for a, b in box]
    outer = [size + 2 if d == 0 else size + twice * (d == len(shape) - 1) for d, size in enumerate(shape)]
    whole = torch.full(outer, torch.nan, dtype=dtype)
    inner = whole[1 : 1 + shape[0]]
    return whole, inner[..., : shape[-1]] if len(shape) > 1 else inner


def moved(parameters, source, shards, target_boxes, dtype, capacity, alone):
    """The memory of this rank's engine after one sync, by name: (outer tensor, view, box)."""
    model = Model(name="drawn", parameters=parameters, itemsize=dtype.itemsize)
    target = read_engines(parameters, target_boxes)
    memory = {
        p.name: [(*poisoned(box, dtype, i % 2), box) for i, box in enumerate(target_boxes[RANK][p.name])]
        for p in parameters
    }
    cast = any(t.dtype != dtype for t in shards.values())
    buckets = bucketed(model, source, target, capacity, cast=cast)
    names = [p.name for p in parameters]
    regions = {name: [Region(box, view) for _, view, box in found] for name, found in memory.items()}
    planned = plan(model, source, target, RANK)
    lowered = lower(planned, buckets)
    made = program(names, lowered, buckets.count, shards, regions, dtype, torch.device("cpu"), alone)
    assert made.received_bytes == planned.floor_bytes
    transport = Transport(made, GROUP, torch.device("cpu"), 20.0)
    for _ in range(2):  # a replay writes all of it again
        for found in memory.values():
            for whole, _, _ in found:
                whole.fill_(torch.nan)
        transport.run()
    SEEN["received"] += made.received_bytes
    SEEN["buckets"] = max(SEEN["buckets"], buckets.count)
    buffers = {b.untyped_storage().data_ptr() for b in made.staging._buffers}
    for number, bucket in enumerate(made.buckets):
        SEEN["joined"] += sum(len(m.slices) > 1 for m in messages_of(lowered.receives, number, dtype.itemsize, alone))
        for wire in [*bucket.sends, *bucket.receives]:
            staged = wire.tensor.untyped_storage().data_ptr() in buffers
            SEEN["packed" if staged else "in_place"] += 1
    return memory


def everyone_wants_everything():
    """Tensors of one shape, each shard to all other ranks, cast on the way: what is sent is packed once."""
    alike = [Parameter(name=f"{i}", shape=(8 * WORLD, 6), tp_dim=0) for i in range(2)]
    layouts = MeshLayout(fsdp=WORLD), MeshLayout(dp=WORLD, vocab_multiple=PADDING)
    return (*alike,), *layouts, [torch.float32, torch.bfloat16], 1 << 20, 1


@example(everyone_wants_everything())
@settings(max_examples=30, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def check(case):
    parameters, train, rollout, (own, wire), capacity, alone = case
    SEEN["examples"] += 1
    full, shards = {}, {}
    for i, p in enumerate(parameters):  # whole numbers that bf16 has, other ones in each parameter
        full[p.name] = (torch.arange(p.elements, dtype=torch.float32).reshape(p.shape) + 31 * i) % 251
        shards[p.name] = torch.from_numpy((held(train, p, RANK)[0] + 31 * i) % 251).to(own)
    served = [
        {p.name: [b[1:] for b in boxes(rollout.sharding(p).within(p.extent), rank)] for p in parameters}
        for rank in range(WORLD)
    ]
    for name, found in moved(parameters, train, shards, served, wire, capacity, alone).items():
        for whole, view, box in found:
            assert torch.equal(view, full[name][tuple(slice(a, b) for a, b in box)].to(wire)), (name, box)
            assert whole.isnan().sum() == whole.numel() - view.numel()  # and nothing beside it


def main(folder):
    global GROUP
    if WORLD > 1:
        dist.init_process_group("gloo")
        GROUP = dist.group.WORLD
    check()
    (folder / f"rank{RANK}.json").write_text(json.dumps(SEEN))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
