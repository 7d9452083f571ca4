import contextlib
import copy
import ctypes
import gc
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from trlx_hybrid.errors import ConfigError
from trlx_hybrid.memory.arena import Arena
from trlx_hybrid.memory.ledger import (
    gradient_tensors,
    optimizer_tensors,
    plain_tensors,
    policy_tensors,
    storages,
)
from trlx_hybrid.memory.offload import Offload, guard

MIB = 1 << 20
CHUNK = 1 << 16


def same_bits(a, b):
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def owner(*tensors, chunk=CHUNK):
    arena = Arena("cpu", chunk)
    return arena, Offload(arena, lambda: tensors)


def here(tensors):
    """Bytes that are on the device."""
    return sum(storage.nbytes() for storage in storages(tensors))


def trained(make, steps=1, seed=0):
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(33, 129), nn.LayerNorm(129), nn.Linear(129, 7))
    optimizer = make(module.parameters())
    for step in range(steps):
        train(module, optimizer, step)
    return module, optimizer


def train(module, optimizer, step):
    batch = torch.randn(8, 33, generator=torch.Generator().manual_seed(step))
    module(batch).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


# --- round trips -----------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_training_with_offloading_is_training_without(make):
    module, optimizer = trained(make)
    twin, twin_optimizer = trained(make)
    offload = Offload(
        Arena("cpu", CHUNK), lambda: [*optimizer_tensors(optimizer), *gradient_tensors(module.parameters())]
    )
    guard(optimizer, offload)
    for step in range(1, 6):
        objects = [id(t) for t in optimizer_tensors(optimizer)]
        assert offload.leave() > 0
        assert not offload.resident
        assert all(s.nbytes() == 0 for s in storages(optimizer_tensors(optimizer)))
        if step % 2:
            offload.start_return()
        train(module, optimizer, step)  # the guard returns what is away
        train(twin, twin_optimizer, step)
        assert offload.resident
        assert [id(t) for t in optimizer_tensors(optimizer)] == objects
    for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        assert same_bits(ours, theirs)
    pairs = zip(optimizer_tensors(optimizer), optimizer_tensors(twin_optimizer), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


sizes = st.lists(st.integers(1, 5000), min_size=1, max_size=8)
moves = st.lists(st.sampled_from(["leave", "start", "finish", "all"]), max_size=12)


@given(sizes, moves)
def test_any_order_of_calls_keeps_every_bit(sizes, moves):
    tensors = [torch.randint(0, 256, (n,), dtype=torch.uint8) for n in sizes]
    before = [t.clone() for t in tensors]
    arena, offload = owner(*tensors, chunk=4096)
    for move in moves:
        here_before = here(tensors)
        if move == "leave":
            assert offload.leave() == here_before
            assert here(tensors) == 0
        elif move == "finish":
            offload.finish_return()
        elif move == "all":
            offload.return_all()
            assert offload.resident
        else:
            assert here_before + offload.start_return() == here(tensors) == sum(sizes)
    offload.return_all()
    assert all(same_bits(a, b) for a, b in zip(tensors, before, strict=True))
    assert arena.bytes_taken == 0
    arena.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_every_bit_pattern_of_every_dtype_returns(dtype):
    values = 2 if dtype == torch.bool else 256  # NaN payloads included
    tensor = torch.arange(4096).remainder(values).to(torch.uint8).view(dtype)
    before = tensor.view(torch.uint8).clone()
    _, offload = owner(tensor)
    offload.leave()
    offload.return_all()
    assert torch.equal(tensor.view(torch.uint8), before)


def test_tensors_of_one_storage_move_once_and_views_survive():
    base = torch.arange(1000.0)
    view, strided, parameter = base[10:20], base[::3], nn.Parameter(base)
    _, offload = owner(view, base, strided, parameter)
    assert offload.leave() == 4000
    offload.return_all()
    assert view.tolist() == list(range(10, 20))
    base[10] = -1
    assert view[0] == -1
    assert parameter[10] == -1
    assert strided[4] == 12


def test_leaving_and_returning_twice_do_nothing():
    tensor = torch.ones(1000)
    arena, offload = owner(tensor)
    assert offload.start_return() == 0
    offload.finish_return()
    assert [offload.leave(), offload.leave()] == [4000, 0]
    assert [offload.start_return(), offload.start_return()] == [4000, 0]
    assert not offload.resident
    offload.finish_return()
    offload.finish_return()
    assert offload.resident
    assert arena.bytes_taken == 0


def test_resident_memory_drops_and_returns():
    def settled():
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        own = ("Anonymous:", "Swap:", "Pss_Shmem:")  # not code of libraries, of which Linux keeps what it likes
        return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(own))

    total = 256 * MIB
    tensors = [torch.ones(n * MIB // 4) for n in (100, 96, 40, 16, *[1] * 4)]
    arena, offload = owner(*tensors, chunk=64 * MIB)
    arena.reserve(total)
    before = settled()
    offload.leave()
    gone = before - settled()
    offload.return_all()
    back = settled() - before
    assert gone == pytest.approx(total, rel=0.1)
    assert abs(back) < 0.1 * total
    assert arena.bytes == total


def test_an_arena_serves_several_owners_and_ends_no_larger_than_their_sum():
    arena = Arena("cpu", CHUNK)
    tensors = {name: torch.randn(50_000) for name in ("optimizer", "gradients")}
    before = {name: t.clone() for name, t in tensors.items()}
    offloads = {name: Offload(arena, lambda t=t: [t]) for name, t in tensors.items()}
    for _ in range(3):
        for offload in offloads.values():
            offload.leave()
        for offload in offloads.values():
            offload.return_all()
    assert all(torch.equal(tensors[name], before[name]) for name in tensors)
    assert arena.bytes <= 2 * 200_000 + 2 * CHUNK


# --- what stays ------------------------------------------------------------------------------------------------------


def test_what_cannot_be_emptied_or_is_elsewhere_stays():
    foreign = torch.from_dlpack(torch.ones(100))
    sparse = torch.eye(3).to_sparse()
    elsewhere, empty, mine = torch.ones(50, device="meta"), torch.ones(0), torch.ones(10)
    _, offload = owner(foreign, sparse, elsewhere, empty, mine)
    assert offload.leave() == 40
    assert foreign.sum() == 100
    offload.return_all()
    assert mine.sum() == 10


def test_the_local_part_of_a_dtensor_moves():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        full = torch.arange(1000.0)
        tensor = nn.Parameter(distribute_tensor(full, init_device_mesh("cpu", (1,)), [Shard(0)]))
        optimizer = torch.optim.AdamW([tensor], lr=0.1)
        tensor.grad = torch.ones_like(tensor)
        optimizer.step()
        state = optimizer.state[tensor]["exp_avg"]
        before = state.to_local().clone()
        _, offload = owner(state, tensor)
        assert offload.leave() == 8000
        assert state._local_tensor.untyped_storage().nbytes() == 0
        offload.return_all()
        assert torch.equal(state.to_local(), before)
        assert [t.shape for t in plain_tensors([tensor])] == [(1000,)]
    finally:
        dist.destroy_process_group()


def test_whose_tensors_are_whose():
    module, optimizer = trained(lambda p: torch.optim.AdamW(p))
    module.register_buffer("positions", torch.arange(4))
    assert len(list(policy_tensors(module.modules()))) == 7
    assert list(gradient_tensors(module.parameters())) == []
    module(torch.ones(1, 33)).sum().backward()
    assert len(list(gradient_tensors(module.parameters()))) == 6
    assert len(list(optimizer_tensors(optimizer))) == 18
    optimizer.state["history"] = {"old": [torch.ones(1), (torch.ones(2), None)]}
    assert len(list(optimizer_tensors(optimizer))) == 20


# --- the guard -------------------------------------------------------------------------------------------------------


def accelerated(optimizer):
    prepared = Accelerator(cpu=True).prepare(optimizer)
    assert prepared is not optimizer
    return prepared


@pytest.mark.parametrize("wrap", [lambda o: o, accelerated], ids=["torch", "accelerate"])
def test_a_checkpoint_holds_the_state_even_when_it_is_away(wrap):
    _, optimizer = trained(OPTIMIZERS["adamw"])
    expected = copy.deepcopy(optimizer.state_dict())
    optimizer = wrap(optimizer)
    offload = Offload(Arena("cpu", CHUNK), lambda: optimizer_tensors(optimizer))
    remove = guard(optimizer, offload)
    offload.leave()
    saved = optimizer.state_dict()
    assert offload.resident
    for key, state in expected["state"].items():
        assert all(torch.equal(saved["state"][key][name], value) for name, value in state.items())
    remove()
    offload.leave()
    optimizer.state_dict()
    assert not offload.resident


def test_a_checkpoint_loaded_while_away_replaces_the_state_and_frees_the_arena():
    _, optimizer = trained(OPTIMIZERS["adamw"])
    saved = copy.deepcopy(optimizer.state_dict())
    arena = Arena("cpu", CHUNK)
    offload = Offload(arena, lambda: optimizer_tensors(optimizer))
    guard(optimizer, offload)
    offload.leave()
    optimizer.load_state_dict(saved)
    assert offload.start_return() == 0
    assert arena.bytes_taken == 0
    loaded = optimizer.state_dict()["state"]
    assert all(torch.equal(loaded[k][n], v) for k, state in saved["state"].items() for n, v in state.items())


def test_what_nobody_refers_to_does_not_return():
    module = nn.Linear(100, 100)
    module(torch.ones(1, 100)).sum().backward()
    kept = module.bias.grad
    offload = Offload(Arena("cpu", CHUNK), lambda: gradient_tensors(module.parameters()))
    assert offload.leave() == 40_400
    module.zero_grad()
    assert offload.start_return() == 400
    offload.finish_return()
    assert kept.sum() == 100


def test_an_optimizer_without_hooks_is_refused():
    with pytest.raises(ConfigError, match=r"object is no torch optimizer.*DeepSpeed"):
        guard(object(), owner()[1])


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fail_at", [0, 1, 2])
def test_a_device_without_memory_in_the_middle_of_a_return_loses_nothing(monkeypatch, fail_at):
    tensors = [torch.randn(1000) for _ in range(3)]
    before = [t.clone() for t in tensors]
    arena, offload = owner(*tensors)
    offload.leave()
    calls, resize_ = [], torch.UntypedStorage.resize_

    def failing(storage, nbytes):
        calls.append(1)
        if len(calls) == fail_at + 1:
            raise torch.OutOfMemoryError("injected")
        return resize_(storage, nbytes)

    with monkeypatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "resize_", failing)
        with pytest.raises(torch.OutOfMemoryError, match="injected"):
            offload.start_return()
    assert here(tensors) == 4000 * fail_at
    for _ in range(2):
        offload.return_all()
        assert offload.resident
        assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
        assert arena.bytes_taken == 0
        assert offload.leave() == 12_000


# --- streams ---------------------------------------------------------------------------------------------------------


class Recorded:
    """Stands for a CUDA stream, and for an event on it, on a machine without: notes what is asked of it."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for event")

    def record(self, stream):
        self.log.append(f"event on {stream.name}")


def test_copies_are_ordered_with_the_compute_stream(monkeypatch):
    log = []
    arena, offload = owner(torch.ones(10), torch.ones(20))
    arena.reserve(4096)
    arena.stream = Recorded("copies", log)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Recorded("compute", log))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext(log.append(f"on {stream.name}")))
    monkeypatch.setattr(torch.cuda, "Event", lambda: Recorded("event", log))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: log.append(f"kept for {stream.name}"))
    copy_, resize_ = torch.Tensor.copy_, torch.UntypedStorage.resize_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *a, **k: (log.append("copy"), copy_(*a, **k))[1])
    monkeypatch.setattr(torch.UntypedStorage, "resize_", lambda s, n: (log.append(f"resize {n}"), resize_(s, n))[1])
    batch = ["copies waits for compute", "on copies"]
    batch += ["kept for copies", "copy"] * 2 + ["event on copies"]
    offload.leave()
    assert log == [*batch, "resize 0", "resize 0"]
    log.clear()
    offload.start_return()
    assert log == ["resize 40", "resize 80", *batch]
    log.clear()
    offload.finish_return()
    assert log == ["compute waits for event"]
