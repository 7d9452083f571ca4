"""What the engine says about its memory: complete, bit for bit, and nothing at all where a layer is not known."""

import pytest
import torch
import trlx_hybrid
from torch import nn
from trlx_hybrid.errors import EngineError
from trlx_hybrid.testing.models import ARCHITECTURES, tiny_model
from trlx_hybrid_vllm import regions as module
from trlx_hybrid_vllm.internals import model_of
from trlx_hybrid_vllm.loading import Route, Slice


@pytest.fixture
def opened(run):
    """A session with its engine built."""

    def build(**model):
        finished = run(trlx_hybrid.GRPOTrainer, model=tiny_model(**model), use_vllm=True, train=False)
        finished.trainer.session.open()
        return finished.trainer.session

    return build


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_writing_all_regions_is_a_complete_sync(opened, architecture):
    session = opened(architecture=architecture, tied=architecture == "gemma2")
    engine, policy = session.live_engine, session.policy
    weights = {name: p.detach() + 1 for name, p in policy.base_parameters().items()}
    found = engine.regions(policy)
    for p in model_of(engine.llm).parameters():
        p.data.fill_(torch.nan)
    for name, regions in found.of.items():
        for region in regions:
            region.memory.copy_(weights[name][tuple(slice(a, b) for a, b in region.box)])
    for rows in found.padding:
        rows.zero_()
    assert engine.differing(weights.items()) == []
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


def test_copies_that_are_no_box_are_refused():
    """A transposed copy, one that takes every other row, and one that came flat; from the tensor, and from a part."""
    for source in (Slice((4, 6), (1, 4), 0), Slice((2, 6), (12, 1), 0), Slice((24,), (1,), 0)):
        route = Route("fused", Slice(source.shape, (6, 1)[-len(source.shape) :], 0), source)
        for index in (None, torch.arange(24).view(4, 6)):
            with pytest.raises(EngineError, match="copies weight into fused in a way that is no slice of it"):
                module._pieces("weight", [route], index, (4, 6))


@pytest.mark.parametrize("index", [None, torch.arange(24).view(4, 6)], ids=["itself", "converted"])
def test_a_slice_is_found_at_its_place(index):
    route = Route("fused", Slice((2, 3), (6, 1), 1), Slice((2, 3), (6, 1), 8))
    (piece,) = module._pieces("weight", [route], index, (4, 6))
    assert piece.box == ((1, 3), (2, 5))
    assert piece.memory == route.destination


def test_one_expert_of_a_fused_tensor_is_found_by_its_indices():
    """The checkpoint has the second of three experts' rows 2 to 5 as a matrix; a route takes its columns 1 and 2."""
    index = torch.arange(3 * 6 * 4).view(3, 6, 4)[1, 2:5]
    route = Route("w", Slice((3, 2), (10, 1), 7), Slice((3, 2), (4, 1), 1))
    (piece,) = module._pieces("expert", [route], index.contiguous(), (3, 6, 4))
    assert piece.box == ((1, 2), (2, 5), (1, 3))
    assert piece.memory == Slice((1, 3, 2), (1, 10, 1), 7)
