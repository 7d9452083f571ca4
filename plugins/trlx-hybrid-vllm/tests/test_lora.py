"""vLLM's LoRA slots hold the live adapter: what the unmerged PEFT model computes, the engine computes."""

import gc

import pytest
import torch
from peft import LoraConfig, get_peft_model
from trlx_hybrid.errors import SyncError
from trlx_hybrid.policy.policy import Policy
from trlx_hybrid.testing.models import character_tokenizer, tiny_model
from trlx_hybrid_vllm.arguments import lora_arguments, write_without_weights
from trlx_hybrid_vllm.private.adapted_linear import Joined, adapters_under_weights, beside_slots
from trlx_hybrid_vllm.private.ending import shut_down
from trlx_hybrid_vllm.private.engine import model_of
from trlx_hybrid_vllm.private.lora import adapter_slots_of
from trlx_hybrid_vllm.private.process import running
from trlx_hybrid_vllm.rendezvous import launcher_environment
from trlx_hybrid_vllm.weights.loader import WeightLoader
from trlx_hybrid_vllm.weights.lora import AdapterSlots, lora_layers

PROMPTS = [[5, 6, 7, 40], list(range(10, 75)), [90]]  # a single token, and two full KV blocks of 32 to be cached


def policy_of(model, **config):
    config = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "init_lora_weights": "gaussian"} | config
    adapted = get_peft_model(model, LoraConfig(**config))
    perturb(adapted, seed=0)
    return Policy(lambda: adapted, character_tokenizer(), torch.device("cpu"))


def adapter_parameters(policy):
    return {name: p for name, p in policy.module.named_parameters() if "lora_" in name}


def perturb(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.data.add_(
                torch.randn(p.shape, generator=generator) * 0.03
            )  # far larger, and float32 itself is off by 1e-5


class Served:
    """An engine with the policy's base in it, and the adapter's slots."""

    def __init__(self, policy, folder, dtype, joined):
        from vllm import LLM

        arguments = lora_arguments(policy, dtype)
        assert isinstance(arguments, dict), arguments
        self.policy = policy
        write_without_weights(policy, folder)
        with (
            launcher_environment(0, 0, 1),
            running(torch.float32),
            adapters_under_weights(arguments["max_lora_rank"] if joined else None),
        ):
            self.llm = LLM(
                model=str(folder),
                load_format="dummy",
                dtype=str(dtype).removeprefix("torch."),
                distributed_executor_backend="external_launcher",
                kv_cache_memory_bytes=8 << 20,
                max_model_len=128,
                max_num_seqs=8,
                max_num_batched_tokens=512,
                enforce_eager=True,
                logprobs_mode="processed_logprobs",
                worker_cls="trlx_hybrid_vllm.private.cpu.PlainWeightsCPUWorker",
                block_size=32,
                enable_prefix_caching=True,
                **arguments,
            )
        self.loader = WeightLoader(model_of(self.llm))
        self.load_base()
        self.slots = AdapterSlots(self.llm, policy)

    def load_base(self):
        self.report = self.loader.load(base_weights(self.policy))
        assert not self.report.unwritten

    def gap(self, version):
        """Largest log-prob difference between the engine and the unmerged PEFT model, over sampled tokens."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=8, logprobs=0, ignore_eos=True, seed=version, detokenize=False)
        prompts = [{"prompt_token_ids": p} for p in PROMPTS]
        with running(torch.float32):
            outputs = self.llm.generate(prompts, params, use_tqdm=False, lora_request=self.slots.request(version))
        worst = 0.0
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            sampled = output.outputs[0]
            ours = torch.tensor([step[token].logprob for step, token in zip(sampled.logprobs, sampled.token_ids)])
            worst = max(worst, float((ours - self.policy.log_probs(prompt, list(sampled.token_ids))).abs().max()))
        return worst

    def close(self):
        shut_down(self.llm, made_default_group=True)


def base_weights(policy):
    """The base alone: what is synced once and then stays."""
    with policy.module.disable_adapter():
        yield from policy.full_weights()


@pytest.fixture
def serve(tmp_path, started_once):
    served = []

    def start(policy, dtype=torch.float32, joined=True):
        served.append(Served(policy, tmp_path / "model", dtype, joined))
        return served[-1]

    (tmp_path / "model").mkdir()
    yield start
    for engine in served:
        engine.close()
    gc.collect()


CASES = {
    "qwen2": ("qwen2", {}, {}),
    "qwen2-tied": ("qwen2", {"tied": True}, {}),
    "qwen3": ("qwen3", {}, {"use_rslora": True}),
    "qwen3-tied": ("qwen3", {"tied": True}, {"lora_dropout": 0.5, "r": 8}),
    "llama": ("llama", {}, {"rank_pattern": {"q_proj": 2, "down_proj": 9}, "alpha_pattern": {"k_proj": 10}}),
    "llama-tied": ("llama", {"tied": True}, {"target_modules": ["q_proj", "down_proj"]}),
    "gemma3": (
        "gemma3_text",
        {"tied": True},
        {"layers_to_transform": [1], "target_modules": ["k_proj", "o_proj", "up_proj"]},
    ),
}


@pytest.mark.parametrize(
    ("case", "joined"), [*((case, True) for case in CASES), ("qwen2", False)], ids=lambda value: str(value)
)
def test_the_engine_computes_what_the_unmerged_model_computes_version_after_version(serve, case, joined):
    """With A under the weights, and with vLLM's own slots and kernels."""
    architecture, shape, config = CASES[case]
    policy = policy_of(tiny_model(architecture, **shape), **config)
    served = serve(policy, joined=joined)
    adapted = [w for w in served.slots._engine._manager.modules.values() if hasattr(w, "lora_a_stacked")]
    assert {isinstance(wrapper, Joined) for wrapper in adapted} == {joined}
    for version in range(3):
        perturb(policy.module, seed=version)
        before = {name: p.detach().clone() for name, p in policy.module.named_parameters()}
        assert served.slots.write() == sum(p.numel() * p.element_size() for p in adapter_parameters(policy).values())
        assert served.slots.differing() == []
        assert served.gap(version) < 1e-5  # the prefix cache is on, and never reset
        assert all(torch.equal(p, before[name]) for name, p in policy.module.named_parameters())
    mine = {p.untyped_storage().data_ptr() for p in policy.module.parameters()}
    slots = [t for wrapper in served.slots._engine._manager.modules.values() for t in adapter_slots_of(wrapper)]
    assert slots
    assert mine.isdisjoint(t.untyped_storage().data_ptr() for t in slots)


def test_stale_slots_differ_and_are_named(serve):
    """The oracle sees an unwritten adapter: otherwise agreement would show nothing."""
    policy = policy_of(tiny_model("qwen3"))
    served = serve(policy)
    assert len(served.slots.differing()) == 14
    assert served.gap(0) > 0.1
    served.slots.write()
    layer = policy.base.get_submodule("model.layers.1.mlp.up_proj")
    layer.lora_B["default"].weight.data[3, 1] += 1e-3
    assert served.slots.differing() == ["model.layers.1.mlp.up_proj"]
    layer.scaling["default"] *= 2
    layer.lora_B["default"].weight.data = layer.lora_B["default"].weight.data.clone()  # rebound
    served.slots.write()
    assert served.slots.differing() == []
    assert served.gap(1) < 1e-5
    wrapper = served.slots._engine._manager.modules["model.layers.0.self_attn.qkv_proj"]
    wrapper.lora_a_stacked[1][0, 0, 5, 7] = 1.0  # beyond rank 4
    assert served.slots.differing() == ["model.layers.0.self_attn.k_proj (outside the adapter)"]
    wrapper.lora_a_stacked[1][0, 0, 5, 7] = 0.0
    assert served.slots.differing() == []
    wrapper.joined_weight[-1, 0] = 1.0  # below the last A
    assert served.slots.differing() == ["model.layers.0.self_attn.q_proj (outside the adapter)"]
    del served.slots._engine._manager.modules["model.layers.1.self_attn.qkv_proj"]
    with pytest.raises(SyncError, match=r"no LoRA slot for model\.layers\.1\.self_attn\.q_proj.*k_proj.*gather"):
        AdapterSlots(served.llm, policy)


def test_slots_of_another_dtype_hold_what_was_scaled_in_the_adapters(serve):
    policy = policy_of(tiny_model("qwen3"), lora_alpha=5)
    served = serve(policy, dtype=torch.bfloat16)
    served.slots.write()
    assert served.slots.differing() == []
    b = policy.base.get_submodule("model.layers.1.mlp.down_proj").lora_B["default"].weight.detach()
    slot = served.slots._engine._manager.modules["model.layers.1.mlp.down_proj"].lora_b_stacked[0][0, 0, :, :4]
    assert torch.equal(slot, (b * 1.25).bfloat16())
    assert not torch.equal(slot, b.bfloat16() * 1.25)
    assert served.gap(0) < 0.2


def test_the_adapters_state_is_minded(serve):
    policy = policy_of(tiny_model("qwen3"))
    served, model = serve(policy), policy.module
    served.slots.write()
    with model.disable_adapter():
        assert served.slots.write() == 0
        assert served.slots.differing() == []
        assert served.gap(0) < 1e-5
    served.slots.write()
    assert served.gap(1) < 1e-5
    model.merge_adapter()
    with pytest.raises(SyncError, match=r"merged into model\.layers\.0\.self_attn\.q_proj.*unmerge_adapter"):
        served.slots.write()
    model.unmerge_adapter()
    model.add_adapter("other", LoraConfig(r=4, target_modules="all-linear"))
    model.set_adapter("other")
    with pytest.raises(SyncError, match="made for adapter 'default', but 'other' is active"):
        served.slots.write()
    model.set_adapter("default")
    layer = policy.base.get_submodule("model.layers.1.mlp.up_proj")
    layer.lora_A["default"].weight.data = layer.lora_A["default"].weight.data[:1].clone()  # would broadcast
    with pytest.raises(SyncError, match=r"up_proj has A \(1, 128\)"):
        served.slots.write()


def test_slots_survive_eviction_and_a_sleep_that_lost_them(serve):
    policy = policy_of(tiny_model("qwen3"))
    served = serve(policy)
    served.slots.write()
    served.slots._engine._manager.remove_all_adapters()  # as after a dummy run, or vLLM's own reload
    with pytest.raises(SyncError, match="dropped the adapter"):
        served.slots.request(0)
    served.slots.write()
    assert served.gap(0) < 1e-5
    for wrapper in served.slots._engine._manager.modules.values():
        for slot in [*adapter_slots_of(wrapper), *beside_slots(wrapper)]:
            slot.fill_(float("nan"))
    served.slots.reset()
    served.slots.write()
    assert served.slots.differing() == []
    assert served.gap(0) < 1e-5


def test_base_weights_load_into_a_wrapped_model_and_leave_it_wrapped(serve):
    from vllm.lora.layers import BaseLayerWithLoRA

    policy = policy_of(tiny_model("qwen2", tied=True))
    served = serve(policy)
    model = model_of(served.llm)
    wrappers = {n: id(m) for n, m in model.named_modules(remove_duplicate=False) if isinstance(m, BaseLayerWithLoRA)}
    assert len(wrappers) == 8
    for p in policy.base.parameters():
        p.data.mul_(1.01)
    served.load_base()  # the second load takes the other way through the loader
    assert served.loader.differing(base_weights(policy)) == []
    assert set(served.loader.routes) == {name for name, _ in base_weights(policy)}
    assert served.gap(0) > 0.1  # no adapter written yet

    def failing():
        yield from list(base_weights(policy))[:3]
        raise RuntimeError("source broke")

    with pytest.raises(RuntimeError, match="source broke"):
        served.loader.load(failing())
    names = {n: id(m) for n, m in model.named_modules(remove_duplicate=False) if isinstance(m, BaseLayerWithLoRA)}
    assert names == wrappers
    served.load_base()
    served.slots.write()
    assert served.gap(1) < 1e-5


# --- what slots can hold, decided before an engine is built -----------------------------------------------------------


def test_arguments_cover_the_largest_rank_and_wrap_only_what_is_adapted():
    policy = policy_of(tiny_model("llama"), target_modules=["q_proj", "down_proj"], rank_pattern={"down_proj": 17})
    assert lora_arguments(policy) == {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": 32,
        "lora_target_modules": ["down_proj", "q_proj"],
    }


REFUSED = {
    "DoRA": {"use_dora": True},
    "modules_to_save": {"modules_to_save": ["norm"]},
    "trainable_token_indices": {"trainable_token_indices": [3, 4]},
    "trains biases": {"bias": "all"},
    "lora_bias": {"lora_bias": True, "init_lora_weights": True},
    "target_parameters": {"target_modules": ["q_proj"], "target_parameters": ["mlp.up_proj.weight"]},
    "embed_tokens is adapted by PEFT's Embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "lm_head is the output head": {"target_modules": ["lm_head", "q_proj"]},
    "rank is 600, and vLLM's largest is 512": {"r": 600},
    "alora_invocation_tokens": {"alora_invocation_tokens": [3], "task_type": "CAUSAL_LM"},
    "MiCALinearVariant": {"init_lora_weights": "mica"},
    "layer_replication": {"layer_replication": [(0, 2), (1, 2)]},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_slots_cannot_hold_is_refused_by_name(reason):
    model = tiny_model("llama", attention_bias=True, mlp_bias=True)
    assert reason in lora_arguments(policy_of(model, **REFUSED[reason]))


def test_what_is_not_one_plain_lora_adapter_is_refused_by_name():
    from peft import IA3Config, PrefixTuningConfig

    plain = tiny_model("llama")
    assert "not a PEFT model" in lora_arguments(Policy(lambda: plain, None, torch.device("cpu")))
    for config in (
        IA3Config(target_modules=["q_proj"], feedforward_modules=[]),
        PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
    ):
        other = get_peft_model(tiny_model("llama"), config)
        reason = lora_arguments(Policy(lambda model=other: model, None, torch.device("cpu")))
        assert f"of type {config.peft_type.value}" in reason
    policy = policy_of(tiny_model("llama"))
    policy.fsdp_version = 1
    assert "FSDP1 flattens the adapter's parameters" in lora_arguments(policy)
    policy.fsdp_version = None
    policy.module.add_adapter("other", LoraConfig(r=4, target_modules=["q_proj"]))
    policy.module.base_model.set_adapter(["default", "other"])
    assert "2 adapters are active (default, other)" in lora_arguments(policy)


def test_an_adapter_in_a_wrapped_or_plain_transformers_model_is_found():
    """Activation checkpointing renames modules; `add_adapter` of transformers makes no PeftModel."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    model = tiny_model("llama")
    model.add_adapter(LoraConfig(r=4, target_modules=["q_proj"]))
    policy = Policy(lambda: model, None, torch.device("cpu"))
    assert lora_arguments(policy)["lora_target_modules"] == ["q_proj"]
    apply_activation_checkpointing(model, check_fn=lambda m: type(m).__name__ == "LlamaDecoderLayer")
    assert list(lora_layers(policy)) == [f"model.layers.{i}.self_attn.q_proj" for i in range(2)]
