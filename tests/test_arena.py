import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trlx_hybrid.errors import ConfigError, HybridError, MemoryPlanError
from trlx_hybrid.memory.arena import ALIGNMENT, Arena, aligned

CHUNK = 4096
steps = st.lists(st.tuples(st.booleans(), st.integers(0, 3 * CHUNK), st.integers(0, 10**6)), max_size=40)


def addresses(pieces):
    return [(piece.data_ptr(), piece.data_ptr() + len(piece)) for piece in pieces]


@given(steps)
def test_buffers_never_overlap_and_all_come_back(steps):
    arena, held = Arena("cpu", CHUNK), []
    for taking, size, which in steps:
        if taking or not held:
            held.append((size, arena.take([size])[0]))
        else:
            arena.give_back([held.pop(which % len(held))[0]])
        used = sorted(address for _, pieces in held for address in addresses(pieces))
        assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(used))
        assert all(sum(map(len, pieces)) == size for size, pieces in held)
        assert arena.bytes_taken == sum(aligned(size) for size, _ in held) <= arena.bytes
    arena.give_back([size for size, _ in held])
    assert arena.bytes_taken == 0
    before = arena.bytes
    arena.take([before])  # from the start again
    assert arena.bytes == before


@given(st.lists(st.integers(1, 3 * CHUNK), min_size=1, max_size=12))
def test_what_was_written_is_read_back(sizes):
    arena = Arena("cpu", CHUNK)
    taken = arena.take(sizes)
    for value, pieces in enumerate(taken):
        for piece in pieces:
            piece.fill_(value)
    for value, (size, pieces) in enumerate(zip(sizes, taken, strict=True)):
        read = torch.cat(pieces)
        assert read.numel() == size
        assert (read == value).all()


def test_it_grows_by_chunks_only_when_it_must_and_never_shrinks():
    arena = Arena("cpu", CHUNK)
    assert arena.bytes == 0
    arena.reserve(CHUNK + 1)
    assert arena.bytes == 2 * CHUNK
    [large] = arena.take([2 * CHUNK])
    assert [len(p) for p in large] == [CHUNK, CHUNK]
    arena.give_back([2 * CHUNK])
    [again] = arena.take([10])
    assert again[0].data_ptr() == large[0].data_ptr()
    assert arena.bytes == 2 * CHUNK
    [after] = arena.take([10])
    assert after[0].data_ptr() == again[0].data_ptr() + ALIGNMENT


def test_closing_with_state_inside_is_refused():
    arena = Arena("cpu", CHUNK)
    arena.take([100])
    with pytest.raises(HybridError, match=r"finish_return"):
        arena.close()
    arena.give_back([100])
    arena.close()
    arena.close()
    assert (arena.bytes, arena.bytes_taken) == (0, 0)
    assert [len(piece) for piece in arena.take([5])[0]] == [5]


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


def test_other_devices_are_refused():
    with pytest.raises(ConfigError, match="not meta"):
        Arena("meta", CHUNK)
