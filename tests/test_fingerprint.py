"""Weights that changed are noticed, whoever wrote to them and however: a sync that is skipped wrongly says nothing."""

import random

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from trlx_hybrid.policy.policy import Policy
from trlx_hybrid.testing.models import tiny_model
from trlx_hybrid.weights import verify

SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
TARGETS = {"full": None, "q,v": ["q_proj", "v_proj"], "all": "all-linear", "mlp": ["up_proj", "gate_proj", "down_proj"]}


def policy_of(model):
    return Policy(lambda: model, None, torch.device("cpu"))


def model_of(layers, targets, **config):
    model = tiny_model(num_hidden_layers=layers, **SMALL, **config)
    if targets is None:
        return model
    return get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))


def stepped(**kind):
    def write(p):
        p.grad = torch.ones_like(p)
        torch.optim.AdamW([p], lr=1e-3, **kind).step()
        p.grad = None

    return write


@torch.no_grad()
def multiplied(p):
    p.mul_(2)


def in_data(p):
    p.data.mul_(1.001)


def one_element(p):
    p.data.view(-1)[p.numel() // 2] += 1e-3


WRITES = {
    "fused": stepped(fused=True),
    "foreach": stepped(foreach=True),
    "mul_": multiplied,
    ".data": in_data,
    "one element": one_element,
}


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize(
    "layers",
    [
        *random.Random(41).sample(range(1, 9), 3),
        *(pytest.param(n, marks=pytest.mark.slow) for n in random.Random(41).sample(range(9, 37), 3)),
    ],
)
def test_a_write_to_any_one_trainable_weight_is_noticed(layers, targets):
    model = model_of(layers, TARGETS[targets])
    policy, writes = policy_of(model), random.Random(layers)
    before, missed = policy.fingerprint(), []
    for name, p in model.named_parameters():
        if p.requires_grad:
            how = writes.choice(list(WRITES))
            WRITES[how](p)
            after = policy.fingerprint()
            if after == before:
                missed.append(f"{name}: {how}")
            before = after
    assert missed == []


@pytest.mark.parametrize("how", WRITES)
def test_every_kind_of_write_to_a_lora_b_is_noticed(how):
    model = model_of(2, "all-linear")
    policy = policy_of(model)
    before = policy.fingerprint()
    for name, p in model.named_parameters():
        if "lora_B" in name:
            WRITES[how](p)
    assert policy.fingerprint() != before


@torch.no_grad()
def negate_a_column(model):
    model.model.layers[1].mlp.up_proj.weight[:, 1].neg_()


@torch.no_grad()
def negate_a_weight(model):
    model.model.layers[1].mlp.up_proj.weight.neg_()


@torch.no_grad()
def swap_two_rows(model):
    weight = model.model.embed_tokens.weight
    weight[[50, 60]] = weight[[60, 50]]


@torch.no_grad()
def swap_two_elements(model):
    row = model.lm_head.weight[3]
    largest, smallest = int(row.argmax()), int(row.argmin())
    row[[largest, smallest]] = row[[smallest, largest]]


@torch.no_grad()
def swap_two_layers(model):
    mlps = [layer.mlp for layer in model.model.layers]
    kept = mlps[0].up_proj.weight.clone()
    mlps[0].up_proj.weight.copy_(mlps[1].up_proj.weight)
    mlps[1].up_proj.weight.copy_(kept)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "change", [negate_a_column, negate_a_weight, swap_two_rows, swap_two_elements, swap_two_layers]
)
@pytest.mark.parametrize("hidden", [64, 1536])
def test_a_change_that_keeps_sums_or_sizes_is_noticed(dtype, change, hidden):
    """Embedding and layers of the larger model take several rows of a square, or several squares."""
    config = SMALL | {"hidden_size": hidden, "intermediate_size": hidden, "num_hidden_layers": 2}
    model = tiny_model(**config).to(dtype)
    policy = policy_of(model)
    before = policy.fingerprint()
    change(model)
    assert policy.fingerprint() != before
    change(model)
    assert policy.fingerprint() == before


@pytest.mark.parametrize("targets", ["q,v", "all"])
def test_frozen_weights_that_are_loaded_by_hand_are_noticed(targets):
    model, other = (model_of(3, TARGETS[targets]) for _ in range(2))
    policy, missed = policy_of(model), []
    before = policy.fingerprint()
    for (name, p), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        if not p.requires_grad and p.ndim > 1:
            p.data.copy_(theirs + 0.01)
            after = policy.fingerprint()
            if after == before:
                missed.append(name)
            before = after
    assert missed == []


def test_weights_that_nobody_trains_are_noticed_as_those_that_are_trained():
    model = model_of(3, None).requires_grad_(False)
    policy, missed = policy_of(model), []
    before = policy.fingerprint()
    for name, p in model.named_parameters():
        one_element(p)
        after = policy.fingerprint()
        if after == before:
            missed.append(name)
        before = after
    assert missed == []


@torch.no_grad()
def set_on_its_module(model):
    norm = model.get_base_model().model.norm
    norm.weight = nn.Parameter(norm.weight.clone(), requires_grad=False)


@torch.no_grad()
def set_on_an_adapter(model):
    b = model.get_base_model().model.layers[1].mlp.up_proj.lora_B["default"]
    b.weight = nn.Parameter(b.weight * 1.001)


def registered(model):
    model.get_base_model().model.norm.register_parameter("bias", nn.Parameter(torch.ones(3)))


def deleted(model):
    del model.get_base_model().model.layers[1].mlp.up_proj.lora_B["default"].weight


def other_data(model):
    b = model.get_base_model().model.layers[1].mlp.up_proj.lora_B["default"].weight
    b.data = b.data * 1.001


def frozen_data(model):
    norm = model.get_base_model().model.norm
    norm.weight.data = norm.weight.data.clone()


@pytest.mark.parametrize("change", [set_on_its_module, set_on_an_adapter, registered, deleted, other_data, frozen_data])
def test_another_parameter_in_the_place_of_one_is_noticed_without_a_look_at_the_modules(change):
    model = model_of(2, "all-linear")
    policy = policy_of(model)
    before = policy.fingerprint()
    change(model)
    assert policy.fingerprint() != before
    assert [*map(id, policy.parameters)] == [*map(id, model.parameters())]


@torch.no_grad()
def test_a_frozen_weight_with_gaps_in_memory_is_sampled_at_its_own_elements():
    model = model_of(2, "all-linear")
    weight = model.get_base_model().model.embed_tokens.weight
    weight.data = weight.data.t().contiguous().t()
    policy = policy_of(model)
    before = policy.fingerprint()
    weight.data[0, 0] += 1
    assert policy.fingerprint() != before


class Operations(TorchDispatchMode):
    """Counts torch's operations."""

    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        self.count += 1
        return function(*arguments, **(named or {}))


def test_a_fingerprint_of_an_adapter_takes_one_operation_for_each_tensor():
    """An operation takes a GPU's host longer than the GPU: three for each tensor were most of a fingerprint."""
    model = model_of(8, "all-linear")
    policy = policy_of(model)
    policy.fingerprint()
    with Operations() as operations:
        policy.fingerprint()
    tensors = len([*model.parameters()])
    assert tensors > 200
    assert operations.count <= tensors + 50


def test_the_checks_of_a_step_walk_over_no_modules_once_these_were_looked_for(monkeypatch):
    model = model_of(2, "all-linear").train()
    policy = policy_of(model)
    policy.look()
    walks, named_modules, named_members = [], nn.Module.named_modules, nn.Module._named_members

    def noted(walk):
        return lambda *arguments, **named: walks.append(walk) or walk(*arguments, **named)

    monkeypatch.setattr(nn.Module, "named_modules", noted(named_modules))
    monkeypatch.setattr(nn.Module, "_named_members", noted(named_members))
    policy.fingerprint()
    policy.adapter_states()
    assert verify.noise(policy.module, policy.modules) is None
    assert policy.dtypes == [torch.float32]
    assert walks == []
