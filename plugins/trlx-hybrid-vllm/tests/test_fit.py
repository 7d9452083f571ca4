"""What cannot work is said before an engine is built; what is assumed is said in the header."""

from types import SimpleNamespace

import pytest
import torch
import trlx_hybrid
from accelerate import Accelerator
from trlx_hybrid.errors import ConfigError, EngineError, MemoryPlanError
from trlx_hybrid.testing.models import character_tokenizer, tiny_model
from trlx_hybrid_vllm import engine as engine_module
from trlx_hybrid_vllm.arguments import kv_cache_bytes
from trlx_hybrid_vllm.options import VLLMOptions


@pytest.fixture
def unbuilt(monkeypatch):
    """Building an engine fails the test."""
    import vllm

    def build(**arguments):
        raise AssertionError("an engine was built")

    monkeypatch.setattr(vllm, "LLM", build)
    assert engine_module.VLLMEngine


def test_a_run_that_cannot_fit_names_the_owner_and_the_setting(run, unbuilt):
    with pytest.raises(MemoryPlanError, match=r"largest owner is KV cache with .* GiB: lower .*kv_cache_memory_bytes"):
        run(
            trlx_hybrid.GRPOTrainer,
            use_vllm=True,
            vllm_enable_sleep_mode=True,
            hybrid={"engine_options": {"kv_cache_memory_bytes": 1 << 50}},
        )


def test_an_engine_that_does_not_sleep_leaves_nothing_to_offload(run, unbuilt):
    with pytest.raises(ConfigError, match=r"offload='all' moves nothing with an engine that does not sleep.*leave"):
        run(trlx_hybrid.GRPOTrainer, use_vllm=True, hybrid={"offload": "all"})


@pytest.mark.parametrize("name", ["gemma3_text", "deepseek_v2", "qwen3_next", "mistral", "gemma4_text"])
def test_the_least_kv_cache_is_what_vllm_counts_for_one_sequence(name):
    """Layers with a sliding window, compressed keys and values, recurrent layers, and layers of two shapes."""
    from transformers import AutoConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

    config = AutoConfig.for_model(name, max_position_embeddings=131072)
    shape = {"block_size": 32, "dtype": torch.bfloat16}
    heads = {"num_kv_heads": getattr(config, "num_key_value_heads", 1), "head_size": 1}
    full, sliding = FullAttentionSpec, SlidingWindowSpec
    if name == "deepseek_v2":
        layers = [MLAAttentionSpec(num_kv_heads=1, head_size=512 + 64, **shape)] * config.num_hidden_layers
    else:
        layers = []
        for kind in getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers:
            wide = name == "gemma4_text" and kind == "full_attention"
            heads["head_size"] = 512 if wide else 128 if name == "mistral" else 256
            if kind == "full_attention":
                layers.append(full(**heads, **shape))
            elif kind == "sliding_attention":
                layers.append(sliding(sliding_window=config.sliding_window, **heads, **shape))
    model = SimpleNamespace(max_model_len=131072)
    parallel = SimpleNamespace(decode_context_parallel_size=1)
    counted = SimpleNamespace(model_config=model, parallel_config=parallel, max_in_flight_tokens=8192)
    real = sum(layer.max_memory_usage_bytes(counted) for layer in layers)

    session = SimpleNamespace(policy=SimpleNamespace(base=SimpleNamespace(config=config)))
    least = kv_cache_bytes(session, VLLMOptions(), torch.bfloat16, least=True)
    assert real <= least <= 1.05 * real


def test_the_cache_of_a_pipeline_stage_is_that_of_its_layers():
    """vLLM cuts five layers into 1, 2 and 2."""
    policy = SimpleNamespace(base=tiny_model(num_hidden_layers=5))
    session = SimpleNamespace(policy=policy)
    whole, staged = (
        kv_cache_bytes(session, VLLMOptions(pipeline_parallel_size=stages), torch.bfloat16, least=True)
        for stages in (1, 3)
    )
    assert staged * 5 == whole * 2


def test_the_header_has_the_memory_table_and_warns_of_steps_lost_in_rounding(run, capfd):
    run(
        trlx_hybrid.GRPOTrainer,
        model=tiny_model(dtype=torch.bfloat16),
        use_vllm=True,
        vllm_enable_sleep_mode=True,
        learning_rate=1e-6,
        bf16=True,
        max_steps=1,
    )
    header = capfd.readouterr().err
    assert "weights=alias" in header
    assert "note: the policy is in bfloat16, and steps at learning_rate=1e-06 are mostly lost in its rounding" in header
    rows = [line.split() for line in header.splitlines() if line.startswith(("memory, MiB", "KV cache", "optimizer"))]
    assert rows[0] == ["memory,", "MiB", "edge", "rollout", "train"]
    assert ["KV", "cache", "away", rows[-1][3], "away"] == rows[-1]


def test_an_out_of_memory_error_says_who_held_what(run):
    def exhausting(completions, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError) as caught:
        run(
            trlx_hybrid.GRPOTrainer,
            use_vllm=True,
            reward_funcs=exhausting,
        )
    assert caught.value.__notes__[0].startswith("Raised by reward function 'exhausting' for 8 completions")
    note = caught.value.__notes__[1]
    assert "Memory held on cpu in phase TRAIN" in note
    assert "policy" in note
    assert "KV cache" in note


def test_a_policy_that_is_away_in_rollouts_is_away_while_the_engine_is_built(run, monkeypatch, capfd):
    """And returns when the KV cache has made room, before the weight sync is chosen: the three are never there at
    once."""
    import vllm

    model, held, real, sleep = tiny_model(), [], vllm.LLM, engine_module.VLLMEngine.sleep

    def policy_bytes():
        return sum(p.untyped_storage().nbytes() for p in model.parameters())

    def build(**arguments):
        held.append(("built", policy_bytes()))
        return real(**arguments)

    def asleep(engine, keep_weights=False):
        held.append(("sleeps", policy_bytes()))
        sleep(engine, keep_weights)

    whole = policy_bytes()
    monkeypatch.setattr(vllm, "LLM", build)
    monkeypatch.setattr(engine_module.VLLMEngine, "sleep", asleep)
    hybrid = {"offload": "all", "weights": "gather", "verify_every": 1}
    run(trlx_hybrid.GRPOTrainer, model=model, use_vllm=True, vllm_enable_sleep_mode=True, hybrid=hybrid, max_steps=2)
    assert held[:2] == [("built", 0), ("sleeps", 0)]
    assert policy_bytes() == whole
    (row,) = [line.split() for line in capfd.readouterr().err.splitlines() if line.startswith("KV cache")]
    assert float(row[3]) > 0


def test_what_an_optimizer_holds_already_is_away_while_the_engine_is_built(started_once, monkeypatch):
    """As after a resume, whose state lies in memory that a CPU cannot give back."""
    import vllm

    model, held, real = tiny_model(), [], vllm.LLM
    optimizer = torch.optim.AdamW(model.parameters())
    options = {"enable_sleep_mode": True, "max_model_len": 64, "max_num_seqs": 4, "kv_cache_memory_bytes": 1 << 20}
    config = trlx_hybrid.HybridConfig(engine="vllm", offload="all", engine_options=options)
    loop = trlx_hybrid.HybridEngine(
        model, character_tokenizer(), optimizer, config=config, max_tokens=4, accelerator=Accelerator(cpu=True)
    )

    def state_bytes():
        return sum(t.untyped_storage().nbytes() for state in optimizer.state.values() for t in state.values())

    def build(**arguments):
        held.append(state_bytes())
        return real(**arguments)

    monkeypatch.setattr(vllm, "LLM", build)
    ids = torch.tensor([[5, 6, 7, 40]])
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    whole = state_bytes()
    with loop.rollout_context():
        loop.generate([[5, 6, 7]])
    loop.session.memory.settle()
    assert held[0] < whole / 1000  # counters of steps
    assert state_bytes() == whole
    loop.close()


def test_a_policy_is_back_when_the_engine_could_not_be_built(run, monkeypatch):
    import vllm

    def fails(**arguments):
        raise ValueError("no engine today")

    model = tiny_model()
    monkeypatch.setattr(vllm, "LLM", fails)
    hybrid = {"offload": "all", "weights": "gather"}
    with pytest.raises(EngineError, match="no engine today"):
        run(trlx_hybrid.GRPOTrainer, model=model, use_vllm=True, vllm_enable_sleep_mode=True, hybrid=hybrid)
    assert all(bool(p.isfinite().all()) and p.untyped_storage().nbytes() for p in model.parameters())
