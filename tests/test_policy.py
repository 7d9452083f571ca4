"""The policy's weights are what `save_pretrained` would write, whatever wraps or fuses them in memory."""

import copy
import gc
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from transformers import AriaConfig, Qwen3Config, Qwen3MoeConfig
from trlx_hybrid.policy import policy as policies
from trlx_hybrid.policy.policy import ModuleTree, Policy, modules_of, parameters_in
from trlx_hybrid.policy.sharded import is_sharded
from trlx_hybrid.testing.models import tiny_model

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": []}


def policy_of(model):
    return Policy(lambda: model, None, torch.device("cpu"))


@pytest.mark.parametrize(
    ("architecture", "config"),
    [("qwen2", {}), ("qwen3", {"tied": True}), ("llama", {}), ("gemma2", {"tied": True}), ("qwen3_moe", EXPERTS)],
    ids=["qwen2", "qwen3-tied", "llama", "gemma2-tied", "qwen3-moe"],
)
def test_full_weights_are_the_checkpoint(tmp_path, architecture, config):
    model = tiny_model(architecture, **config)
    model.save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    policy = policy_of(model)
    ours = dict(policy.full_weights())
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) for name in expected)
    assert sorted(policy.checkpoint_names()) == sorted(expected)


def test_only_some_weights_are_materialised_once_their_layers_are_known():
    policy = policy_of(tiny_model("qwen3_moe", **EXPERTS))
    everything = dict(policy.full_weights())
    wanted = {"model.layers.1.mlp.experts.3.up_proj.weight", "lm_head.weight"}
    seen = []
    policy._materialise = lambda tensor: seen.append(tensor.shape) or tensor.detach()
    some = dict(policy.full_weights(wanted))
    assert some.keys() == wanted
    assert all(torch.equal(some[name], everything[name]) for name in wanted)
    assert len(seen) < len(list(policy.module.parameters())) - 4  # layer 0, embedding and norm were left alone


def test_names_are_known_without_a_pass_before():
    assert policy_of(tiny_model()).checkpoint_names()[0] == "model.embed_tokens.weight"


def test_a_tree_of_modules_notices_what_is_replaced_and_keeps_nothing_alive():
    model, tree = tiny_model(), ModuleTree()
    assert tree.changed(model)
    assert not tree.changed(model)
    assert tree.modules == list(model.modules())
    before = ref(model.lm_head)
    model.lm_head = copy.deepcopy(model.lm_head)
    gc.collect()
    assert before() is None
    assert tree.changed(model)
    assert not tree.changed(model)
    del model.model.layers[1]
    assert tree.changed(model)
    model.lm_head = None
    assert tree.changed(model)
    assert not tree.changed(model)
    model.lm_head = torch.nn.Linear(1, 1)
    assert tree.changed(model)
    assert not tree.changed(model)
    model.model.layers[0].mlp.up_proj.added = torch.nn.Linear(1, 1)  # as PEFT puts a second adapter beside the first
    assert tree.changed(model)
    assert not tree.changed(model)
    assert tree.modules == list(model.modules())
    assert tree.changed(copy.deepcopy(model))


def test_a_digest_leaves_out_what_zero3_pads_the_last_part_with(monkeypatch):
    monkeypatch.setattr(policies.dist, "get_rank", lambda group: 1)
    found = set()
    for junk in (7.0, 9.0):
        model = torch.nn.Linear(5, 1, bias=False)
        part = torch.tensor([1.0, 2.0, junk])  # of five elements, the second rank's three
        model.weight.ds_tensor, model.weight.ds_numel, model.weight.ds_process_group = part, 5, None
        found.add((policy_of(model).digest(), policy_of(model).fingerprint()))
    assert len(found) == 1


def test_the_fingerprint_follows_bits_and_nothing_else():
    model = tiny_model()
    policy = policy_of(model)
    before = policy.fingerprint()
    assert policy.fingerprint() == before
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.001)
    assert policy.fingerprint() != before


def test_compiled_and_checkpointed_names_are_stripped():
    model = tiny_model()
    names = [name for name, _ in policy_of(torch.compile(model)).full_weights()]
    assert names == [name for name, _ in policy_of(model).full_weights()]


def test_scoring_leaves_modes_alone():
    model = tiny_model()
    model.train()
    model.model.layers[0].eval()
    modes = [m.training for m in model.modules()]
    scores = policy_of(model).log_probs([5, 6], [7, 8, 9])
    assert scores.shape == (3,)
    assert (scores < 0).all()
    assert [m.training for m in model.modules()] == modes


@pytest.mark.parametrize(
    ("config", "experts"), [(AriaConfig(), True), (Qwen3MoeConfig(), True), (Qwen3Config(), False)]
)
def test_experts_are_known_by_whatever_the_config_calls_their_number(config, experts):
    model = torch.nn.Module()
    model.config = config
    assert policy_of(model).has_experts is experts


@pytest.mark.parametrize("checkpoint", [False, True], ids=["evaluated", "evaluated and saved"])
def test_a_unit_that_fsdp_left_in_the_middle_of_a_forward_pass_is_sharded_and_computes_again(tmp_path, checkpoint):
    """accelerate shards norm and head as one, and TRL uses the head's weight without calling the head."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = tiny_model()
        for module in (model.model.embed_tokens, *model.model.layers):
            fully_shard(module)
        fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False)
        fully_shard(model)
        policy = Policy(lambda: model, None, torch.device("cpu"), fsdp_version=2)
        ids = torch.tensor([[5, 6, 7]])
        with torch.no_grad():
            before = model(input_ids=ids).logits
            policy.reshard()
            bits = policy.fingerprint()
            model.model(input_ids=ids)
            assert not is_sharded(model.lm_head.weight)
            if checkpoint:
                model.state_dict()
            policy.reshard()
            assert all(is_sharded(p) for p in model.parameters())
            assert policy.fingerprint() == bits
            model.lm_head.weight.mul_(2.0)
            assert torch.equal(model(input_ids=ids).logits, 2.0 * before)
    finally:
        dist.destroy_process_group()


def test_fsdp_units_are_found_in_a_model_that_is_sharded_later_and_in_one_that_takes_its_place(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = tiny_model()
        policy = Policy(lambda: model, None, torch.device("cpu"), fsdp_version=2)
        policy.reshard()  # nothing is sharded yet
        for current in (model, tiny_model()):
            model = current
            fully_shard(model.model.layers[0], reshard_after_forward=False)
            policy.reshard()
            fully_shard(model, reshard_after_forward=False)
            for unit in (model, model.model.layers[0]):
                unit.unshard()
            assert not any(is_sharded(p) for p in model.parameters())
            policy.reshard()
            assert all(is_sharded(p) for p in model.parameters())
    finally:
        dist.destroy_process_group()


def test_the_policys_modules_are_those_of_the_last_look_or_of_another_model(monkeypatch):
    model = tiny_model()
    policy = Policy(lambda: model, None, torch.device("cpu"))
    walks = []
    monkeypatch.setattr(policies, "modules_of", lambda root: walks.append(root) or modules_of(root))
    assert policy.modules == [*model.modules()]
    assert [*map(id, policy.parameters)] == [*map(id, model.parameters())]
    assert walks == [model]
    model.lm_head = torch.nn.Linear(*reversed(model.lm_head.weight.shape), bias=False)
    assert policy.modules == [*model.modules()][:-1]  # what went is nobody's
    assert policy.other_modules()
    assert not policy.other_modules()
    assert policy.modules == [*model.modules()]
    assert len(walks) == 2
    model = tiny_model()
    assert policy.modules == [*model.modules()]
    assert policy.other_modules()  # though somebody has asked for them in between
    model.model.norm = torch.nn.Identity()
    policy.look()
    assert policy.modules == [*model.modules()]
    assert policy.other_modules()
    assert not policy.other_modules()
    assert len(walks) == 4


def test_modules_and_parameters_are_torchs_in_its_order():
    model = tiny_model(tie_word_embeddings=True)
    model.again, model.absent = model.model.layers[0], None
    model.register_parameter("missing", None)
    assert [*map(id, modules_of(model))] == [*map(id, model.modules())]
    assert [*map(id, parameters_in(modules_of(model)))] == [*map(id, model.parameters())]
