"""Layouts that a loop names: what contradicts the model, the processes or the options is said at once."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from trlx_hybrid import HybridConfig, HybridEngine, Layout
from trlx_hybrid.errors import ConfigError
from trlx_hybrid.own_loop.layouts import check_rollout, check_train, check_train_config, shards_of, with_rollout
from trlx_hybrid.testing.models import character_tokenizer, tiny_model

WORLD = 4


@pytest.fixture
def four_ranks():
    """This process as one of four; the process group carries nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    yield
    dist.destroy_process_group()


def sharded(*mesh):
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8))
    fully_shard(model, mesh=init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard")[-len(mesh) :]))
    return model


def test_a_layout_is_a_product():
    assert Layout(dp=2, pp=3, fsdp=4, tp=5).world == 120
    assert str(Layout(tp=4, pp=2)) == "Layout(pp=2, tp=4)"
    with pytest.raises(ConfigError, match="fsdp=0 in a layout"):
        Layout(fsdp=0)


@pytest.mark.parametrize(
    ("mesh", "fitting", "odd"),
    [
        ((4,), [Layout(fsdp=4), Layout(fsdp=2, tp=2)], [Layout(fsdp=8), Layout(dp=4), Layout(dp=2, fsdp=4), Layout()]),
        ((2, 2), [Layout(fsdp=2), Layout(dp=2, fsdp=2)], [Layout(fsdp=4), Layout(dp=4, fsdp=2)]),
    ],
    ids=["FSDP", "HSDP"],
)
def test_a_sharded_model_is_held_against_the_layout(four_ranks, mesh, fitting, odd):
    model = sharded(*mesh)
    assert shards_of(model) == mesh[-1]
    for layout in fitting:
        check_train(layout, model, WORLD)
    for layout in odd:
        with pytest.raises(ConfigError, match=f"{mesh[-1]} ranks|replicas on 4"):
            check_train(layout, model, WORLD)


def test_what_differs_is_named(four_ranks):
    with pytest.raises(ConfigError, match=r"The model is sharded over 4 ranks, train=Layout\(fsdp=8\)\."):
        check_train(Layout(fsdp=8), sharded(4), WORLD)
    with pytest.raises(ConfigError, match=r"The model is whole on every rank, train=Layout\(fsdp=4\)\. Shard it first"):
        check_train(Layout(fsdp=4), nn.Linear(2, 2), WORLD)
    check_train(Layout(dp=4), nn.Linear(2, 2), WORLD)
    with pytest.raises(ConfigError, match="no pipeline stages"):
        check_train(Layout(pp=2), nn.Linear(2, 2), WORLD)


FSDP = {"version": 2, "dp_shard_size": 4, "dp_replicate_size": 1, "reshard_after_forward": True, "cpu_offload": False}
FSDP |= {"activation_checkpointing": False, "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]}
FSDP |= {"sharding_strategy": "FULL_SHARD"}


def sharded_qwen(**settings):
    model = tiny_model()
    for layer in model.model.layers:
        fully_shard(layer, **settings)
    fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False)  # as accelerate does
    return fully_shard(model)


def held(model, **settings):
    check_train_config({"fsdp_config": settings}, model, WORLD)


def test_a_model_under_fsdp2_is_held_against_accelerates_settings(four_ranks):
    model = sharded_qwen()
    held(model, **FSDP)
    held(model, **{f"fsdp_{name}": value for name, value in FSDP.items()})
    held(
        model,
        transformer_cls_names_to_wrap="Qwen3DecoderLayer,Qwen3DecoderLayer",
        offload_params=False,
        sharding_strategy="full_shard",
    )
    others = {"version": 1, "dp_shard_size": 8, "dp_replicate_size": 2, "reshard_after_forward": False}
    others |= {"cpu_offload": True, "activation_checkpointing": True, "transformer_layer_cls_to_wrap": "Qwen3MLP"}
    for name, value in (others | {"sharding_strategy": "HYBRID_SHARD"}).items():
        with pytest.raises(ConfigError, match=f"has {name}={value!r}, and the model .*[Ii]t changes nothing"):
            held(model, **FSDP | {name: value})


def test_what_fully_shard_was_given_is_seen(four_ranks):
    held(sharded_qwen(reshard_after_forward=False), reshard_after_forward=False, sharding_strategy="SHARD_GRAD_OP")
    held(sharded_qwen(offload_policy=CPUOffloadPolicy(pin_memory=False)), cpu_offload=True)
    held(sharded(2, 2), dp_shard_size=2, dp_replicate_size=2, sharding_strategy="HYBRID_SHARD")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"fsdp": {}}, r"train_config has no setting 'fsdp'\."),
        ({"fsdp_config": True}, "must be a mapping of settings, got True"),
        ({"fsdp_config": {"reshard_after_foward": True}}, "Did you mean 'reshard_after_forward'"),
        ({"fsdp_config": {"fsdp_state_dict_type": "x"}}, "has 'state_dict_type', which does not show in a model"),
        ({"fsdp_config": {"version": 2}}, "the model is not sharded by FSDP2"),
    ],
)
def test_train_configs_that_cannot_be_held_are_refused(config, reason):
    with pytest.raises(ConfigError, match=reason):
        check_train_config(config, nn.Linear(2, 2), WORLD)


def test_engines_must_fit_the_processes():
    check_rollout(Layout(tp=2), WORLD)
    check_rollout(Layout(tp=2, dp=2), WORLD)
    with pytest.raises(ConfigError, match=r"rollout=Layout\(tp=3\) takes 3 ranks per engine, which do not divide 4"):
        check_rollout(Layout(tp=3), WORLD)
    with pytest.raises(ConfigError, match="takes 8 ranks, and there are 4"):
        check_rollout(Layout(tp=2, dp=4), WORLD)
    check_rollout(Layout(tp=4), WORLD, alone=True)
    with pytest.raises(ConfigError, match="dp_type='none' is one engine, and 4 processes hold 2 of tp_size=2"):
        check_rollout(Layout(tp=2), WORLD, alone=True)


def test_the_engine_gets_its_parallelism_and_keeps_its_other_options():
    config = HybridConfig(engine="vllm", engine_options={"max_num_seqs": 8}, verify_every=3)
    made = with_rollout(config, Layout(tp=4, dp=2))
    assert made.engine_options == {"max_num_seqs": 8, "tensor_parallel_size": 4}
    assert (made.engine, made.verify_every) == ("vllm", 3)
    assert config.engine_options == {"max_num_seqs": 8}
    assert with_rollout(made, Layout(tp=4)) == made
    with pytest.raises(ConfigError, match="the engine's options say tensor_parallel_size=4"):
        with_rollout(made, Layout(tp=2))
    staged = with_rollout(made, Layout(tp=4, pp=2))
    assert staged.options("engine")["pipeline_parallel_size"] == 2
    with pytest.raises(ConfigError, match="the engine's options say pipeline_parallel_size=2"):
        with_rollout(staged, Layout(tp=4))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"rollout": Layout(tp=4, pp=2)}, r"rollout=Layout\(pp=2, tp=4\) takes 8 ranks per engine, which do not div"),
        ({"rollout": Layout(fsdp=2)}, "engines are not sharded by FSDP"),
        ({"rollout": Layout(tp=2)}, "takes 2 ranks per engine, which do not divide 1"),
        ({"train": Layout(fsdp=8)}, r"The model is whole on every rank, train=Layout\(fsdp=8\)"),
        (
            {"rollout_config": {"tp_size": 4, "pp_size": 2, "dp_type": "none"}},
            r"rollout=Layout\(pp=2, tp=4\) takes 8 ranks per engine, which do not divide 1",
        ),
        ({"rollout_config": {"tp_sise": 4}}, r"rollout_config has no setting 'tp_sise'\. Did you mean 'tp_size'\?"),
        ({"rollout_config": {"tp_size": "4"}}, "rollout_config: tp_size is int, got '4'. Write it without"),
        ({"rollout_config": {"tp_size": 4.0}}, r"rollout_config: tp_size is int, got 4\.0"),
        ({"rollout_config": {"tp_size": 0}}, "tp=0 in a layout"),
        ({"rollout_config": {"dp_type": "replicas"}}, "dp_type='replicas'.*'none' is one engine over all"),
        ({"rollout_config": {"tp_size": 2}}, "takes 2 ranks per engine, which do not divide 1"),
        ({"rollout_config": Layout(tp=2)}, "rollout_config= takes a mapping, got Layout"),
        ({"rollout_config": {}, "rollout": Layout()}, "rollout= or rollout_config=, two spellings of the same"),
        ({"train_config": {}, "train": Layout()}, "train= or train_config=, two spellings of the same"),
        ({"train_config": {"fsdp_config": {"dp_shard_size": 8}}}, "the model is not sharded by FSDP2"),
    ],
)
def test_the_hybrid_engine_refuses_before_anything_is_built(arguments, reason):
    with pytest.raises(ConfigError, match=reason):
        HybridEngine(tiny_model(), character_tokenizer(), max_tokens=4, **arguments)
    assert not torch.distributed.is_initialized()
