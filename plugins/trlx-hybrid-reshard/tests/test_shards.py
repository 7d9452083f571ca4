"""What is noticed of a policy between two syncs: what moved in memory, what is frozen, and what was written to."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from trlx_hybrid.errors import SyncError
from trlx_hybrid.policy.policy import Policy
from trlx_hybrid.testing.models import tiny_model
from trlx_hybrid_reshard.shards import Shards

NORM = "model.norm.weight"


@pytest.fixture
def model():
    return tiny_model()


@pytest.fixture
def shards(model):
    return Shards(Policy(lambda: model, None, torch.device("cpu")))


def test_nothing_moves_while_an_optimizer_works(model, shards):
    before = shards.moved
    for p in model.parameters():
        p.data.add_(1)
    assert shards.refresh() is False
    assert shards.moved == before
    assert torch.equal(shards.local[NORM], model.model.norm.weight)


@pytest.mark.parametrize("replace", ["data", "parameter"])
def test_what_is_replaced_is_followed(model, shards, replace):
    before, other = shards.moved, torch.full_like(model.model.norm.weight, 7.0)
    if replace == "data":
        model.model.norm.weight.data = other
    else:
        model.model.norm.weight = torch.nn.Parameter(other)
    shards.refresh()
    assert shards.moved == before + 1
    assert shards.local[NORM].data_ptr() == other.data_ptr()


def test_what_was_offloaded_has_moved_and_is_no_other_weight(model, shards):
    """A recorded sync names addresses, so it must be made again; a frozen weight need not be sent again."""
    weight = model.model.norm.weight.requires_grad_(False)
    assert shards.refresh() is True
    before, address, bits = shards.moved, weight.data_ptr(), weight.detach().clone()
    storage = weight.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    blocks = [torch.empty(size, dtype=torch.uint8) for _ in range(64)]  # one of them takes the place
    storage.resize_(size)
    torch.empty(0).set_(storage, 0, weight.shape).copy_(bits)
    assert weight.data_ptr() != address, len(blocks)
    assert shards.refresh() is False
    assert shards.moved == before + 1
    assert torch.equal(shards.local[NORM], bits)


def test_a_frozen_weight_that_was_written_to_is_news_once(model, shards):
    weight = model.model.norm.weight.requires_grad_(False)
    assert shards.refresh() is True
    assert shards.frozen == {NORM}
    assert shards.refresh() is False
    weight.add_(1)
    assert shards.refresh() is True
    assert shards.refresh() is False
    weight.requires_grad_(True)
    assert shards.refresh() is False
    assert shards.frozen == set()


def test_a_module_that_takes_the_place_of_another_is_named(model, shards):
    shards.refuse_other_modules()
    model.model.norm = copy.deepcopy(model.model.norm)
    with pytest.raises(SyncError, match=rf"{NORM}: other modules have taken their place.*release_engine"):
        shards.refuse_other_modules()


@pytest.fixture
def adapted():
    return get_peft_model(tiny_model(), LoraConfig(r=4, target_modules=["q_proj"]))


@pytest.fixture
def merging(adapted):
    return Shards(Policy(lambda: adapted, None, torch.device("cpu")))


def test_an_adapter_that_was_unloaded_is_named(adapted, merging):
    merging.refuse_other_modules()
    adapted.unload()
    with pytest.raises(SyncError, match="layers of the adapter: other modules have taken their place"):
        merging.refuse_other_modules()


def test_another_adapter_is_a_change_once_it_is_active(adapted, merging):
    adapted.add_adapter("wide", LoraConfig(r=4, target_modules=["o_proj"]))
    merging.refuse_other_modules()
    adapted.set_adapter("wide")
    with pytest.raises(SyncError, match="layers of the adapter: other modules have taken their place"):
        merging.refuse_other_modules()


def test_an_adapter_that_is_no_plain_lora_any_more_is_named(adapted, merging):
    adapted.add_adapter("dora", LoraConfig(r=4, target_modules=["q_proj"], use_dora=True))
    adapted.set_adapter("dora")
    with pytest.raises(SyncError, match=r"q_proj computes a variant of LoRA .*Set weights='gather'"):
        merging.refuse_other_modules()
