import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trlx_hybrid.errors import ConfigError, HybridError, MemoryPlanError
from trlx_hybrid.memory.arena import ALIGNMENT, Arena, ByteRange, FreeRanges, aligned

CHUNK = 4096
steps = st.lists(st.tuples(st.booleans(), st.integers(0, 3 * CHUNK), st.integers(0, 10**6)), max_size=40)


@given(steps)
def test_ranges_never_overlap_and_all_come_back(steps):
    arena, held = Arena("cpu", CHUNK), []
    for taking, size, which in steps:
        if taking or not held:
            held.append((size, arena.take([size])[0]))
        else:
            arena.give_back(held.pop(which % len(held))[1])
        used = sorted(piece for _, pieces in held for piece in pieces)
        for a, b in itertools.pairwise(used):
            assert a.chunk != b.chunk or a.stop <= b.start
        assert all(0 <= p.start < p.stop <= CHUNK and p.start % ALIGNMENT == 0 for p in used)
        assert all(sum(p.bytes for p in pieces) == size for size, pieces in held)
        assert arena.bytes_taken == sum(aligned(size) for size, _ in held) <= arena.bytes
    for _, pieces in held:
        arena.give_back(pieces)
    assert arena.bytes_taken == 0
    if arena.bytes:  # the holes joined again: everything in one piece per chunk
        assert len(arena.take([arena.bytes])[0]) == arena.bytes // CHUNK


@given(st.lists(st.integers(1, 3 * CHUNK), min_size=1, max_size=12))
def test_what_was_written_is_read_back(sizes):
    arena = Arena("cpu", CHUNK)
    taken = arena.take(sizes)
    for value, pieces in enumerate(taken):
        for piece in pieces:
            arena.view(piece).fill_(value)
    for value, (size, pieces) in enumerate(zip(sizes, taken, strict=True)):
        read = torch.cat([arena.view(piece) for piece in pieces])
        assert read.numel() == size
        assert (read == value).all()


def test_it_grows_by_chunks_only_when_it_must_and_never_shrinks():
    arena = Arena("cpu", CHUNK)
    assert arena.bytes == 0
    arena.reserve(CHUNK + 1)
    assert arena.bytes == 2 * CHUNK
    [large] = arena.take([2 * CHUNK])
    assert [p.bytes for p in large] == [CHUNK, CHUNK]
    arena.give_back(large)
    [again] = arena.take([10])
    assert (again, arena.bytes) == ([ByteRange(0, 0, 10)], 2 * CHUNK)


def test_a_hole_that_holds_it_all_is_preferred_to_splitting():
    free = FreeRanges(CHUNK)
    free.grow(), free.grow()
    first, _second = free.take(CHUNK - ALIGNMENT), free.take(CHUNK // 2)
    assert free.take(CHUNK // 2) == [ByteRange(1, CHUNK // 2, CHUNK)]
    free.give_back(first)
    assert free.take(CHUNK) == [ByteRange(0, 0, CHUNK)]


@pytest.mark.parametrize("again", [ByteRange(0, 0, 100), ByteRange(0, 512, 1024), ByteRange(0, 0, 2048)])
def test_giving_back_twice_is_refused(again):
    free = FreeRanges(CHUNK)
    free.grow()
    taken = free.take(CHUNK)
    free.give_back(taken)
    with pytest.raises(ValueError, match="free already"):
        free.give_back([again])
    with pytest.raises(ValueError, match="are free"):
        free.take(CHUNK + 1)


def test_closing_with_state_inside_is_refused_unless_asked_for():
    arena = Arena("cpu", CHUNK)
    arena.take([100])
    with pytest.raises(HybridError, match=r"finish_return.*discard=True"):
        arena.close()
    arena.close(discard=True)
    arena.close()
    assert (arena.bytes, arena.bytes_taken) == (0, 0)
    assert arena.take([5]) == [[ByteRange(0, 0, 5)]]


def test_a_host_without_memory_is_named(monkeypatch):
    arena = Arena("cpu", CHUNK)
    arena.reserve(1)

    def fail(*_, **__):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "empty", fail)
    with pytest.raises(MemoryPlanError, match=r"gives no .* MiB more \(CUDA error: out of memory\).*ulimit") as caught:
        arena.take([100, 2 * CHUNK])
    assert caught.value.owner == "host arena"
    assert arena.bytes_taken == 0


@pytest.mark.parametrize(("device", "chunk"), [("cpu", 1000), ("cpu", 256), ("cpu", 0), ("meta", CHUNK)])
def test_wrong_settings_are_refused(device, chunk):
    with pytest.raises(ConfigError):
        Arena(device, chunk)
