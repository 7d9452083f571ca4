"""Each mistake gets one message that names the culprit and the way out."""

import importlib.metadata
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
import trlx_hybrid
from datasets import Dataset
from trlx_hybrid.errors import ComponentError, ConfigError, EngineError, RewardError, SyncError
from trlx_hybrid.testing.models import tiny_model
from trlx_hybrid_vllm import versions as vllm_versions
from trlx_hybrid_vllm.arguments import engine_dtype, refuses, refuses_routing
from trlx_hybrid_vllm.options import VLLMOptions
from vllm.platforms import current_platform


def train(run, **given):
    return run(trlx_hybrid.GRPOTrainer, use_vllm=True, **given)


def test_unknown_config_key(run):
    with pytest.raises(ConfigError, match=r"'enginee'. Did you mean 'engine'"):
        train(run, hybrid={"enginee": "vllm"})


def test_unknown_engine_option(run):
    with pytest.raises(ConfigError, match=r"'enforce_eagr'. Did you mean 'enforce_eager'"):
        train(run, hybrid={"engine_options": {"enforce_eagr": True}})


@pytest.mark.parametrize(
    ("names", "dtype"),
    [
        (("half", "fp16", "float16"), torch.float16),
        (("bf16", "bfloat16"), torch.bfloat16),
        (("float", "fp32", "float32", torch.float32), torch.float32),
    ],
    ids=str,
)
def test_dtypes_under_their_usual_names(names, dtype):
    assert {engine_dtype(VLLMOptions(dtype=name), None, None) for name in names} == {dtype}


def test_an_unknown_dtype(run):
    with pytest.raises(ConfigError, match=r"no dtype 'float61'. Did you mean 'float16'.*bfloat16, bf16"):
        train(run, hybrid={"engine_options": {"dtype": "float61"}})


def test_unknown_vllm_argument(run):
    with pytest.raises(ComponentError, match=r"'swap_spac'"):
        train(run, hybrid={"engine_options": {"engine_args": {"swap_spac": 1}}})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine_args": {"dtype": "bfloat16"}}, "engine_args has 'dtype', an option of its own"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be 1 or more, got 0"),
        ({"max_model_len": "2048"}, "max_model_len is int, got '2048'"),
        ({"enable_sleep_mode": "false"}, "enable_sleep_mode is True or False, got 'false'. Write it without quotes"),
        ({"enforce_eager": 1}, "enforce_eager is True or False, got 1"),
        ({"max_num_seqs": 64.0}, "max_num_seqs is int, got 64.0"),
        ({"gpu_memory_utilization": 40}, "a share of the GPU above 0 and up to 1, got 40"),
    ],
)
def test_options_that_vllm_would_take_for_something_else(run, options, message):
    with pytest.raises(ConfigError, match=message):
        train(run, hybrid={"engine_options": options})


@pytest.mark.parametrize("name", ["n", "logprobs"])
def test_what_each_request_is_asked_for_is_the_trainers(run, name):
    with pytest.raises(ConfigError, match=f"generation_kwargs has '{name}'.*Leave it out"):
        train(run, generation_kwargs={name: 3})


@pytest.mark.parametrize("name", ["offload", "every_n_layers"])
def test_checkpointing_that_trl_loses_after_a_rollout_is_refused_and_ours_named(run, name):
    with pytest.raises(ConfigError, match=f"gradient_checkpointing_kwargs has '{name}'.*keeps their inputs in host"):
        train(run, gradient_checkpointing_kwargs={name: 2})


@pytest.mark.parametrize(
    "setting",
    [
        {"repetition_penalty": 1.2},
        {"generation_kwargs": {"repetition_penalty": 1.2}},
        {"generation_kwargs": {"presence_penalty": 0.5}},
        {"generation_kwargs": {"frequency_penalty": -0.5}},
        {"generation_kwargs": {"logit_bias": {5: 1.0, 7: -100.0}}},
    ],
    ids=str,
)
def test_penalties_that_the_correction_would_take_for_the_engines_error(run, setting):
    (name,) = setting.get("generation_kwargs", setting)
    with pytest.raises(ConfigError, match=rf"{name}=.*vllm_importance_sampling_correction=False"):
        train(run, train=False, **setting)
    train(run, train=False, vllm_importance_sampling_correction=False, **setting)
    if name != "logit_bias":
        train(run, train=False, generation_kwargs={name: None, "logit_bias": {7: -100.0}})


def test_a_penalty_that_is_set_between_rollouts_is_refused_and_not_taken(run):
    generation = train(run, train=False).trainer.vllm_generation
    with pytest.raises(ConfigError, match=r"repetition_penalty=1.2 changes the probabilities"):
        generation.repetition_penalty = 1.2
    assert generation.repetition_penalty == 1.0


def test_a_weight_path_that_refuses_says_why_each_time_it_is_tried(run):
    finished = train(run, train=False, model=tiny_model(), hybrid={"weights": "lora"})
    for _ in range(2):
        with pytest.raises(ComponentError, match="the policy is not a PEFT model"):
            finished.trainer.train()


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ({}, "vLLM is not installed. Install 0.31 to 0.32: `pip install"),
        ({"vllm": "0.30.2"}, "vllm 0.30.2 is installed, this plugin works with 0.31 to 0.32"),
    ],
    ids=["missing", "too old"],
)
def test_vllm_missing_or_of_another_version(run, monkeypatch, versions, message):
    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(vllm_versions, "version", version)
    with pytest.raises(ComponentError, match=message):
        train(run)


def test_the_plugin_switched_off_says_how_to_get_the_engine(run, monkeypatch):
    monkeypatch.setenv("TRLX_HYBRID_DISABLE", "vllm")
    with pytest.raises(ComponentError, match=r"No plugin offers engine 'vllm'.*trlx-hybrid plugins"):
        train(run)


def test_a_model_vllm_cannot_serve(run):
    with pytest.raises(ComponentError, match=r"no model for BioGptForCausalLM. Set vllm_model_impl='transformers'"):
        train(run, model=tiny_model("biogpt"))


def test_a_head_size_without_a_kernel(run):
    with pytest.raises(ComponentError, match="no kernel for head size 16"):
        train(run, model=tiny_model(head_dim=16))


def test_more_tokens_than_positions(run):
    with pytest.raises(ComponentError, match=r"=512 is more than the model's 64 positions\. Lower"):
        train(run, model=tiny_model(max_position_embeddings=64), vllm_max_model_length=512)


def test_positions_that_depend_on_the_length_of_a_batch(run):
    dynamic = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
    with pytest.raises(ComponentError, match=r"its positions are dynamic.*rope_type='yarn'"):
        train(run, model=tiny_model(rope_parameters=dynamic))


def test_rows_beyond_the_short_factors_of_longrope(run):
    factors = {"short_factor": [1.0] * 16, "long_factor": [4.0] * 16, "original_max_position_embeddings": 64}
    longrope = {"rope_type": "longrope", "factor": 4.0, "rope_theta": 10000.0, **factors}
    with pytest.raises(ComponentError, match=r"vllm_max_model_length=128 is more than 64.*Lower it to 64"):
        train(run, model=tiny_model(rope_parameters=longrope), vllm_max_model_length=128)


def test_a_size_of_latents_without_a_kernel(run):
    with pytest.raises(ComponentError, match=r"kv_lora_rank \+ qk_rope_head_dim = 576, and this model's is 320"):
        train(run, model=tiny_model("deepseek_v3", kv_lora_rank=256))


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="vLLM's class of Qwen3.5 can be imported")
def test_a_model_whose_class_in_vllm_cannot_be_imported(run):
    with pytest.raises(
        ComponentError, match=r"Qwen3_5ForCausalLM cannot be imported here: .*'torchvision'.*Install what"
    ):
        train(run, model=tiny_model("qwen3_5_text"))


def test_a_config_without_what_vllm_reads_names_the_tensor(run):
    """Published configs of DeepSeek-V3 say how tokens are routed; transformers' default says nothing."""
    with pytest.raises(SyncError, match=r"no place for model\.layers\.1\.mlp\.gate\.e_score_correction_bias"):
        train(run, model=tiny_model("deepseek_v3", topk_method="greedy"))


def test_attention_whose_soft_capping_the_trainer_leaves_out(run):
    model = tiny_model("gemma2", tied=True, attn_logit_softcapping=0.5)
    logits = []
    for attention in ("eager", model.config._attn_implementation):
        model.set_attn_implementation(attention)
        logits.append(model(torch.arange(3, 19)[None]).logits)
    if torch.allclose(*logits, atol=1e-4):
        pytest.skip("this transformers caps the scores of every attention, so nothing is left out")
    with pytest.raises(SyncError, match=r"leaves out the soft-capping .* attn_implementation='eager'"):
        train(run, model=model)


def test_tensor_parallel_size_that_does_not_divide(run):
    with pytest.raises(ComponentError, match="tensor_parallel_size=3 does not divide the 1 processes"):
        train(run, vllm_tensor_parallel_size=3)


def test_pipeline_stages_that_cannot_be(run):
    hybrid = {"engine": "vllm", "engine_options": {"pipeline_parallel_size": 2}}
    with pytest.raises(ComponentError, match="size=1 times pipeline_parallel_size=2 does not divide the 1 processes"):
        train(run, hybrid=hybrid)
    policy, options = SimpleNamespace(base=tiny_model()), VLLMOptions(pipeline_parallel_size=3)
    assert "pipeline_parallel_size=3 is more than the model's 2 layers" in refuses(policy, 3, options)
    assert "each stage of a replica knows the experts of its own layers only" in refuses_routing(options)


def test_experts_that_another_rank_returns(monkeypatch):
    """On GPUs, whose model runner returns them; on CPUs each rank looks itself."""
    options = VLLMOptions(tensor_parallel_size=2)
    assert refuses_routing(options) is None
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    assert "vLLM returns the experts of tokens on the first rank of a replica only" in refuses_routing(options)


def test_a_prompt_longer_than_the_context(run):
    rows = Dataset.from_dict({"prompt": ["x" * 70] * 8})
    with pytest.raises(EngineError, match=r"has 70 tokens; the engine's context holds 64.*vllm_max_model_length"):
        train(run, train_dataset=rows)


def test_num_generations_that_does_not_divide(run):
    with pytest.raises(ValueError, match="must be divisible by num_generations"):
        train(run, num_generations=3)


def test_an_empty_dataset(run):
    with pytest.raises(ConfigError, match="train_dataset is empty"):
        train(run, train_dataset=Dataset.from_dict({"prompt": []}))


def test_a_reward_without_its_package_before_the_model_is_loaded(run, monkeypatch):
    from trl.rewards import accuracy_reward

    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ConfigError, match=r"'accuracy_reward' needs the package math-verify.*trl\[math-verify\]"):
        train(run, model="nobody/such-model", reward_funcs=[accuracy_reward])


def test_a_reward_of_the_wrong_length(run):
    def short(completions, **kwargs):
        return [0.0] * 7

    with pytest.raises(ValueError, match=r"'short' returned 7 rewards, but 8 were expected"):
        train(run, reward_funcs=short)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number(run, value):
    def broken(completions, **kwargs):
        return [0.0, value] + [0.0] * 6

    with pytest.raises(RewardError, match=r"'broken' returned (nan|inf) for completion 1"):
        train(run, reward_funcs=broken)


def test_an_async_reward_that_is_nan(run):
    async def broken(completions, **kwargs):
        return [float("nan")] * 8

    with pytest.raises(RewardError, match="'broken' returned nan for completion 0"):
        train(run, reward_funcs=broken)


def test_reward_functions_stay_the_users_own_objects(run):
    class Scaled:
        __name__, scale = "scaled", 1.0

        def __call__(self, completions, **given):
            return [self.scale * index for index in range(len(completions))]

    finished = train(run, train=False, reward_funcs=[Scaled()], max_steps=1)
    finished.trainer.reward_funcs[0].scale = 3.0  # as a callback may
    finished.trainer.train()
    assert finished.logs[0]["reward"] == 3.0 * 3.5


def test_none_and_an_iterator_stay_legal(run):
    def sometimes(completions, **kwargs):
        return [None, 1.0] * 4

    def always(completions, **kwargs):
        return [0.5] * 8

    def lazily(completions, **kwargs):
        return map(len, completions)

    finished = train(run, reward_funcs=[sometimes, always, lazily], max_steps=1)
    assert finished.trainer.state.global_step == 1


def test_server_mode_keeps_trls_own_path(run):
    """TRL itself then looks for the server, and says that there is none."""
    with pytest.raises(OSError, match="vLLM server can't be reached"):
        train(run, vllm_mode="server", vllm_server_timeout=0.1, vllm_server_base_url="http://127.0.0.1:9")


def test_the_checks_that_trl_skips_for_us_are_run(run):
    with pytest.raises(ConfigError, match="VESPO loss needs vllm_importance_sampling_mode"):
        train(run, loss_type="vespo", vllm_importance_sampling_mode="sequence_mask")
