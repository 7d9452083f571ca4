"""Where the policy's weights lie in the engine: complete, bit for bit, and nothing where a layer is not known."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
import trlx_hybrid
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from trlx_hybrid.errors import EngineError
from trlx_hybrid.testing.models import ARCHITECTURES, tiny_model
from trlx_hybrid_vllm.private.engine import model_of
from trlx_hybrid_vllm.weights.loader import Route, Slice
from trlx_hybrid_vllm.weights.weight_map import PlacedBox, Places, WeightMap, joined, piece_of, regions

# --- a real engine ----------------------------------------------------------------------------------------------------


@pytest.fixture
def opened(run):
    """A session with its engine built."""

    def build(**model):
        finished = run(trlx_hybrid.GRPOTrainer, model=tiny_model(**model), use_vllm=True, train=False)
        finished.trainer.session.open()
        return finished.trainer.session

    return build


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "glm4_moe"])
def test_writing_all_regions_and_buffers_is_a_complete_sync(opened, architecture):
    """In a mixture, the bias of the routing is a buffer of the policy's and a parameter of the engine's."""
    session = opened(architecture=architecture, tied=architecture == "gemma2")
    engine, policy = session.live_engine, session.policy
    weights = {name: p.detach() + 1 for name, p in policy.base_parameters().items()}
    found = engine.regions(policy)
    for p in model_of(engine.llm).parameters():
        p.data.fill_(torch.nan)
    for name, held in found.of.items():
        for region in held:
            region.memory.copy_(weights[name][tuple(slice(a, b) for a, b in region.box)])
    for rows in found.padding:
        rows.zero_()
    engine.weights_written()
    parts = [part for name, w in weights.items() for part in policy.checkpoint_parts(name, w).items()]
    assert engine.differing([*parts, *policy.buffers().items()]) == []
    assert not any(p.isnan().any() for p in model_of(engine.llm).parameters())
    assert sum(rows.numel() for rows in found.padding) == 30 * 128 * (1 if architecture == "gemma2" else 2)


def test_layers_that_are_not_known_are_refused_by_name(opened, monkeypatch):
    session = opened()
    engine = session.live_engine
    model = model_of(engine.llm)
    attention = next(m for m in model.modules() if type(m).__name__ == "Attention")
    cases = {
        "is a Odd, which is not known to keep what was loaded": lambda m: m.setitem(
            model.model._modules, "odd", _odd()
        ),
        "keeps its weights in the form of Fp8LinearMethod": lambda m: m.setattr(
            model.model.layers[0].mlp.down_proj, "quant_method", type("Fp8LinearMethod", (), {})()
        ),
        "which derives something from its weights after loading them": lambda m: m.setattr(
            type(attention.impl), "process_weights_after_loading", lambda *_: None, raising=False
        ),
        "ForCausalLM derives something from its weights": lambda m: m.setattr(
            type(model), "process_weights_after_loading", lambda *_: None, raising=False
        ),
    }
    for reason, change in cases.items():
        with monkeypatch.context() as patch:
            change(patch)
            with pytest.raises(EngineError, match=reason):
                engine.regions(session.policy)
    assert engine.regions(session.policy).of


def _odd():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

    return Odd()


# --- routes as boxes --------------------------------------------------------------------------------------------------


def slice_of(view):
    return Slice(tuple(view.shape), view.stride(), view.storage_offset())


sizes = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@st.composite
def copies(draw):
    """(tensor, one of its boxes, source, destination): views of the tensor's box and of other memory, of one shape.

    Their dimensions come in any order; one may be split in two, and all may be flat.
    """
    shape = draw(sizes)
    tensor = torch.arange(math.prod(shape)).view(shape)
    starts = [draw(st.integers(0, n - 1)) for n in shape]
    box = tuple((start, draw(st.integers(start + 1, n))) for start, n in zip(starts, shape, strict=True))
    source = tensor[tuple(slice(*ends) for ends in box)]
    wide = torch.full([n + draw(st.integers(0, 1)) for n in source.shape], -1)
    destination = wide[tuple(slice(n) for n in source.shape)]
    if draw(st.booleans()) and source.is_contiguous() and destination.is_contiguous():
        return tensor, box, source.view(-1), destination.view(-1)
    order = draw(st.permutations(range(len(shape))))
    source, destination = source.permute(order), destination.permute(order)
    even = [d for d, n in enumerate(source.shape) if n % 2 == 0]
    if even and draw(st.booleans()):
        d = draw(st.sampled_from(even))
        source, destination = source.unflatten(d, (2, -1)), destination.unflatten(d, (2, -1))
    return tensor, box, source, destination


@given(copies())
def test_what_a_copy_read_is_found_as_a_box_with_its_memory(case):
    tensor, box, source, destination = case
    destination.copy_(source)
    piece = piece_of(Route("p", slice_of(destination), slice_of(source)), tensor.shape)
    assert (piece.box, piece.parameter) == (box, "p")
    memory = destination.as_strided((destination.untyped_storage().nbytes() // 8,), (1,), 0)
    assert torch.equal(piece.memory.of(memory), tensor[tuple(slice(*ends) for ends in box)])


def mapped(routes, shape, checkpoint=None):
    """The map of a policy with one parameter "weight"; `checkpoint` makes of it what its checkpoint has."""
    policy = SimpleNamespace(
        base_parameters=lambda: {"weight": torch.zeros(shape)},
        buffers=dict,
        converts=checkpoint is not None,
        checkpoint_parts=lambda name, tensor: {"part": checkpoint(tensor)},
    )
    tensors = {"fused": torch.zeros(200)}
    loader = SimpleNamespace(
        routes={"weight" if checkpoint is None else "part": routes},
        parameters=tensors,
        tensors=tensors,
        computed_from=set(),
        unexplained=set(),
    )
    return WeightMap(policy, loader), policy


@pytest.mark.parametrize("checkpoint", [None, torch.clone], ids=["itself", "converted"])
def test_a_slice_is_found_at_its_place_and_what_is_no_box_is_refused(checkpoint):
    """Another matrix's transpose, and every other row."""
    route = Route("fused", Slice((2, 3), (6, 1), 1), Slice((2, 3), (6, 1), 8))
    (piece,) = mapped([route], (4, 6), checkpoint)[0].pieces["weight"]
    assert (piece.box, piece.memory) == (((1, 3), (2, 5)), route.destination)
    name = "weight" if checkpoint is None else "part"
    for source in (Slice((4, 6), (1, 4), 0), Slice((2, 6), (12, 1), 0)):
        odd, policy = mapped([route, Route("fused", Slice(source.shape, (6, 1), 0), source)], (4, 6), checkpoint)
        reason = f"copies {name} into fused in a way that is no slice of it"
        assert Places(policy, odd).refused == {"weight": f"vLLM's loader {reason}"}
        with pytest.raises(EngineError, match=reason):
            regions(None, odd)


def test_what_a_conversion_rearranges_is_no_slice():
    route = Route("fused", Slice((4, 6), (6, 1), 0), Slice((4, 6), (6, 1), 0))
    assert mapped([route], (4, 6), lambda t: t.view(4, 2, 3).transpose(1, 2).reshape(4, 6))[0].irregular
    (piece,) = mapped([route], (6, 4), lambda t: t.t().contiguous())[0].pieces["weight"]
    assert (piece.box, piece.memory) == (((0, 6), (0, 4)), Slice((6, 4), (1, 6), 0))


def test_one_expert_of_a_fused_tensor_is_found_by_its_indices():
    """The checkpoint has the second of three experts' rows 2 to 5 as a matrix; a route takes its columns 1 and 2."""
    route = Route("fused", Slice((3, 2), (10, 1), 7), Slice((3, 2), (4, 1), 1))
    (piece,) = mapped([route], (3, 6, 4), lambda t: t[1, 2:5].contiguous())[0].pieces["weight"]
    assert piece.box == ((1, 2), (2, 5), (1, 3))
    assert piece.memory == Slice((1, 3, 2), (1, 10, 1), 7)


# --- boxes that continue each other -----------------------------------------------------------------------------------


@st.composite
def cut_views(draw):
    """(memory, a view of it, the view cut into boxes in any order)."""
    shape = draw(sizes)
    memory = torch.arange(1000.0)[: torch.Size([n + 2 for n in shape]).numel()].view([n + 2 for n in shape])
    view = memory[tuple(slice(1, n + 1) for n in shape)]
    edges = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=3))}) for n in shape]
    boxes = list(itertools.product(*(list(itertools.pairwise(e)) for e in edges)))
    return memory, view, draw(st.permutations(boxes))


@given(cut_views())
def test_a_region_cut_into_a_grid_is_one_again(case):
    memory, view, boxes = case
    pieces = [PlacedBox(box, "p", slice_of(view[tuple(slice(a, b) for a, b in box)])) for box in boxes]
    (whole,) = joined(pieces)
    assert whole.box == tuple((0, n) for n in view.shape)
    assert torch.equal(whole.memory.of(memory), view)


@given(cut_views(), st.data())
def test_with_boxes_missing_what_is_left_keeps_its_place(case, data):
    memory, view, boxes = case
    kept = data.draw(st.lists(st.sampled_from(boxes), unique=True))
    pieces = [PlacedBox(box, "p", slice_of(view[tuple(slice(a, b) for a, b in box)])) for box in kept]
    found = joined(pieces)
    assert len(found) <= len(kept)
    assert sum(math.prod(p.memory.shape) for p in found) == sum(math.prod(b - a for a, b in box) for box in kept)
    for piece in found:
        assert torch.equal(piece.memory.of(memory), view[tuple(slice(a, b) for a, b in piece.box)])


def test_experts_loaded_one_by_one_are_one_box_for_gate_and_one_for_up():
    """Three experts of (2 * 4, 5) in memory, of which a rank's slice of gate or up has 4 rows."""
    pieces = []
    for expert, half in itertools.product(range(3), range(2)):
        rows = (8 + 16 * half, 12 + 16 * half)
        memory = Slice((4, 5), (5, 1), expert * 40 + half * 20)
        source = Slice((4, 5), (5, 1), expert * 160 + rows[0] * 5)
        pieces.append(piece_of(Route("w13", memory, source), (3, 32, 5)))
    gate, up = joined(pieces)
    assert (gate.box, up.box) == (((0, 3), (8, 12), (0, 5)), ((0, 3), (24, 28), (0, 5)))
    assert (gate.memory, up.memory) == (Slice((3, 4, 5), (40, 5, 1), 0), Slice((3, 4, 5), (40, 5, 1), 20))


def test_neighbours_in_other_parameters_or_out_of_step_stay_apart():
    first = PlacedBox(((0, 2),), "a", Slice((2,), (1,), 10))
    for parameter, stride, offset in (("b", 1, 12), ("a", 2, 12), ("a", 1, 13), ("a", 1, 8)):
        second = PlacedBox(((2, 4),), parameter, Slice((2,), (stride,), offset))
        assert sorted(joined([first, second]), key=lambda p: p.box) == [first, second]
    assert joined([]) == []


def block(shape, width, offset, start):
    return Route("fused", Slice(shape, (width, 1), offset), Slice(shape, (shape[1], 1), start))


@st.composite
def fused(draw):
    """A parameter of `rows` x `columns` that lies, in blocks of rows, inside a wider matrix."""
    rows, columns = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    offset, width = draw(st.integers(0, 50)), columns + draw(st.integers(0, 3))
    cuts = sorted(draw(st.sets(st.integers(1, rows - 1), max_size=3)) if rows > 1 else [])
    routes = [
        Route(
            "fused",
            Slice((b - a, columns), (width, 1), offset + a * width),
            Slice((b - a, columns), (columns, 1), a * columns),
        )
        for a, b in itertools.pairwise([0, *cuts, rows])
    ]
    return (rows, columns), draw(st.permutations(routes)), Slice((rows, columns), (width, 1), offset)


@given(fused())
def test_blocks_of_one_region_are_joined_into_it(case):
    shape, routes, region = case
    (whole,) = mapped(routes, shape)[0].pieces["weight"]
    memory = torch.arange(200)
    assert torch.equal(whole.memory.of(memory), region.of(memory))


@given(fused(), st.integers(1, 7))
def test_a_block_that_lies_elsewhere_or_is_missing_leaves_no_region_but_the_right_one(case, shift):
    shape, routes, _ = case
    weights, policy = mapped(routes[1:], shape)
    assert Places(policy, weights).found == {}
    first = routes[0]
    moved = Route(
        "fused",
        Slice(first.destination.shape, first.destination.stride, first.destination.offset + shift),
        first.source,
    )
    weights, policy = mapped([moved, *routes[1:]], shape)
    found = Places(policy, weights).found
    memory = torch.arange(200)
    expected = torch.empty(math.prod(shape), dtype=memory.dtype)
    for route in [moved, *routes[1:]]:
        route.source.of(expected).copy_(route.destination.of(memory))
    if found:  # then it must be right, element for element
        assert torch.equal(found["weight"].memory.of(memory), expected.view(shape))
