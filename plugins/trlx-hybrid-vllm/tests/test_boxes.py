"""Boxes in strided memory: cut anywhere and joined again, they are the same elements at the same addresses."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from trlx_hybrid_vllm.boxes import Placed, elements, joined, placed
from trlx_hybrid_vllm.loading import Slice

sizes = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@st.composite
def cut_views(draw):
    """(memory, a view of it, the view cut into boxes in any order)."""
    shape = draw(sizes)
    memory = torch.arange(1000.0)[: torch.Size([n + 2 for n in shape]).numel()].view([n + 2 for n in shape])
    view = memory[tuple(slice(1, n + 1) for n in shape)]
    edges = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=3))}) for n in shape]
    boxes = list(itertools.product(*(list(itertools.pairwise(e)) for e in edges)))
    return memory, view, draw(st.permutations(boxes))


def slice_of(view):
    return Slice(tuple(view.shape), view.stride(), view.storage_offset())


@given(cut_views())
def test_a_region_cut_into_a_grid_is_one_again(case):
    memory, view, boxes = case
    pieces = [Placed(box, "p", slice_of(view[tuple(slice(a, b) for a, b in box)])) for box in boxes]
    (whole,) = joined(pieces)
    assert whole.box == tuple((0, n) for n in view.shape)
    assert torch.equal(whole.memory.of(memory), view)


@given(cut_views(), st.data())
def test_with_boxes_missing_what_is_left_keeps_its_place(case, data):
    memory, view, boxes = case
    kept = data.draw(st.lists(st.sampled_from(boxes), unique=True))
    pieces = [Placed(box, "p", slice_of(view[tuple(slice(a, b) for a, b in box)])) for box in kept]
    found = joined(pieces)
    assert len(found) <= len(kept)
    assert sum(elements(piece.box) for piece in found) == sum(elements(box) for box in kept)
    for piece in found:
        assert torch.equal(piece.memory.of(memory), view[tuple(slice(a, b) for a, b in piece.box)])


def test_experts_loaded_one_by_one_are_one_box_for_gate_and_one_for_up():
    """Three experts of (2 * 4, 5) in memory, of which a rank's slice of gate or up has 4 rows."""
    pieces = []
    for expert, half in itertools.product(range(3), range(2)):
        rows = (8 + 16 * half, 12 + 16 * half)
        memory = Slice((4, 5), (5, 1), expert * 40 + half * 20)
        pieces.append(placed(((expert, expert + 1), rows, (0, 5)), "w13", memory))
    gate, up = joined(pieces)
    assert (gate.box, up.box) == (((0, 3), (8, 12), (0, 5)), ((0, 3), (24, 28), (0, 5)))
    assert (gate.memory, up.memory) == (Slice((3, 4, 5), (40, 5, 1), 0), Slice((3, 4, 5), (40, 5, 1), 20))


def test_neighbours_in_other_parameters_or_out_of_step_stay_apart():
    first = Placed(((0, 2),), "a", Slice((2,), (1,), 10))
    for parameter, stride, offset in (("b", 1, 12), ("a", 2, 12), ("a", 1, 13), ("a", 1, 8)):
        second = Placed(((2, 4),), parameter, Slice((2,), (stride,), offset))
        assert sorted(joined([first, second]), key=lambda p: p.box) == [first, second]
    assert joined([]) == []


def test_memory_of_other_sizes_is_no_place():
    assert placed(((0, 1), (0, 4)), "p", Slice((4,), (2,), 0)).memory == Slice((1, 4), (1, 2), 0)
    assert placed(((0, 1), (0, 4)), "p", Slice((2, 2), (2, 1), 0)) is None
