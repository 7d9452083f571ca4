"""What the engine is asked for, and what it hands back."""

import copy
import dataclasses
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
import trl
import trlx_hybrid
import vllm
from trlx_hybrid import hookimpl
from trlx_hybrid.contract.types import Phase, Request, Sampling
from trlx_hybrid.errors import ConfigError, EngineError, StaleWeightsError
from trlx_hybrid.testing.models import tiny_model
from trlx_hybrid.testing.processes import Script
from trlx_hybrid_vllm import versions
from trlx_hybrid_vllm.arguments import serves_scheduler, shared_arguments
from trlx_hybrid_vllm.options import VLLMOptions
from trlx_hybrid_vllm.private.engine import prefixes
from trlx_hybrid_vllm.private.models import only_attends, unimportable
from trlx_hybrid_vllm.private.process import running
from trlx_hybrid_vllm.sampling import sampling_params
from vllm.model_executor.models import registry

from tests.support.agreement import gap

SCRIPTS = Path(__file__).parent / "scripts"


class Events:
    """Every edge and sync of a run, in order."""

    def __init__(self):
        self.seen = []

    @hookimpl
    def trlx_leave_phase(self, session, phase, step):
        self.seen.append(("leave", phase, step))

    @hookimpl
    def trlx_enter_phase(self, session, phase, step):
        asleep = bool(session.live_engine.asleep)
        self.seen.append(("enter", phase, step, "asleep" if asleep else "awake"))

    @hookimpl
    def trlx_sync_start(self, session, plan):
        self.seen.append(("sync", plan.version, plan.verify))

    @hookimpl
    def trlx_sync_end(self, session, report):
        self.seen.append(("synced", report.version, report.tensors, report.verified, report.logprob_gap is not None))


def test_a_newer_vllm_than_those_tested_is_proven_in_full_at_every_sync(run, monkeypatch, caplog):
    assert serves_scheduler({})
    monkeypatch.setattr(versions, "TESTED", ((0, 30), (0, 30)))
    events = Events()
    run(trlx_hybrid.GRPOTrainer, use_vllm=True, max_steps=2, plugins=[events], hybrid={"verify_every": 0})
    assert [what[2] for what in events.seen if what[0] == "sync"] == ["full", "full"]
    assert "is newer than any that this plugin was tested with (0.30)" in caplog.text
    assert not serves_scheduler({})


def test_phases_and_syncs_come_in_the_designed_order(run):
    events, also = Events(), Events()
    run(
        trlx_hybrid.GRPOTrainer,
        use_vllm=True,
        vllm_enable_sleep_mode=True,
        max_steps=2,
        plugins=[events, also],
        hybrid={"verify_every": 0, "weights": "gather"},
    )
    edges = lambda step, verify, compared: [  # noqa: E731
        ("leave", Phase.TRAIN, step),
        ("sync", step, verify),
        ("synced", step, 25, compared, verify == "full"),
        ("enter", Phase.ROLLOUT, step, "awake"),
        ("leave", Phase.ROLLOUT, step),
        ("enter", Phase.TRAIN, step, "asleep"),
    ]
    assert events.seen == also.seen == edges(0, "full", 25) + edges(1, "sampled", 8)


def test_a_leave_of_every_plugin_comes_before_any_enter(run):
    order = []

    class Plugin:
        def __init__(self, name):
            self.name = name

        @hookimpl
        def trlx_leave_phase(self, phase):
            order.append(("leave", self.name))

        @hookimpl
        def trlx_enter_phase(self, phase):
            order.append(("enter", self.name))

    run(trlx_hybrid.GRPOTrainer, use_vllm=True, max_steps=1, plugins=[Plugin("a"), Plugin("b")])
    assert [kind for kind, _ in order] == ["leave", "leave", "enter", "enter"] * 2


def test_text_is_built_only_for_stop_strings():
    plain = Sampling(max_tokens=4, logprobs=0)
    assert sampling_params(plain)["detokenize"] is False
    assert sampling_params(dataclasses.replace(plain, extra={"stop": ["x"]}))["detokenize"] is True
    assert sampling_params(dataclasses.replace(plain, extra={"stop_token_ids": [3]}))["detokenize"] is False
    assert sampling_params(dataclasses.replace(plain, extra={"temperature": 0.5}))["temperature"] == 0.5
    with_regex = dataclasses.replace(plain, regex="[0-9]+", extra={"structured_outputs": {"choice": ["a"]}})
    assert sampling_params(with_regex)["structured_outputs"].regex == "[0-9]+"


def test_both_ways_of_running_give_the_same(run):
    """Stop strings go through `LLM.generate`, everything else through the collector."""
    session = run(trlx_hybrid.GRPOTrainer, use_vllm=True, train=False).trainer.session
    requests = [Request(prompt_ids=[5 + i, 6], seed=i) for i in range(5)]
    with session.rollout_phase(True):
        engine = session.live_engine
        collected = engine.generate(requests, Sampling(max_tokens=9, logprobs=0))
        generated = engine.generate(requests, Sampling(max_tokens=9, logprobs=0, extra={"stop": ["never this"]}))
        silent = engine.generate(requests, Sampling(max_tokens=9))
        ranked = engine.generate(requests, Sampling(max_tokens=9, logprobs=3))
    assert collected == generated
    assert [c.token_ids for c in silent] == [c.token_ids for c in collected]
    assert all(c.logprobs is None for c in silent)
    for completion, reference in zip(ranked, collected, strict=True):
        for values, ids, token in zip(
            completion.logprobs, completion.logprob_token_ids, reference.token_ids, strict=True
        ):
            assert values == sorted(values, reverse=True)
            assert 3 <= len(values) <= 4
            assert token in ids
    assert not engine.llm.llm_engine.has_unfinished_requests()


def test_eos_of_the_live_generation_config_stops(run):
    """The config a checkpoint once had is not what stops: the live one is, here with an end token of its own."""
    model = tiny_model()
    model.generation_config.eos_token_id = list(range(3, 98))
    session = run(trlx_hybrid.GRPOTrainer, model=model, use_vllm=True, train=False).trainer.session
    with session.rollout_phase(True):
        completions = session.generate([[5, 6]] * 4)
    assert all(len(c.token_ids) == 1 or set(c.token_ids[:-1]) <= {0, 2} for c in completions)
    assert all(c.finish_reason == "stop" for c in completions)


def test_trl_arguments_and_engine_options_reach_vllm(run):
    finished = run(
        trlx_hybrid.GRPOTrainer,
        use_vllm=True,
        train=False,
        hybrid={"engine_options": {"kv_cache_memory_bytes": 32 << 20, "engine_args": {"enable_prefix_caching": False}}},
    )
    finished.trainer.session.open()
    config = finished.trainer.session.live_engine.llm.llm_engine.vllm_config
    assert config.model_config.max_model_len == 64
    assert config.scheduler_config.max_num_seqs == 8
    assert config.cache_config.kv_cache_memory_bytes == 32 << 20
    assert config.cache_config.enable_prefix_caching is False
    assert config.model_config.dtype is torch.float32


def test_a_step_of_the_engine_has_a_token_for_each_sequence(run):
    """Large rollouts ask for more sequences than a step reads tokens of prompts, and vLLM refuses that."""
    options = {"max_num_seqs": 5000, "kv_cache_memory_bytes": 16 << 20}
    finished = run(trlx_hybrid.GRPOTrainer, use_vllm=True, max_steps=1, hybrid={"engine_options": options})
    config = finished.trainer.session.live_engine.llm.llm_engine.vllm_config.scheduler_config
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (5000, 5000)


def test_what_is_set_on_vllm_generation_is_sampled_with(run):
    finished = run(trlx_hybrid.GRPOTrainer, use_vllm=True, train=False)
    session, generation = finished.trainer.session, finished.trainer.vllm_generation

    def sampled():
        with session.rollout_phase(True):
            return generation.generate([[5, 6, 7]] * 8, None, 8)[1]

    assert (generation.temperature, generation.max_completion_length) == (1.0, 12)
    assert len({tuple(ids) for ids in sampled()}) > 1
    generation.temperature, generation.max_completion_length = 0.01, 2
    generation.min_p = None
    few = sampled()
    assert len({tuple(ids) for ids in few}) == 1
    assert len(few[0]) == 2
    with pytest.raises(ConfigError, match="generation_kwargs has 'n', which the trainer decides by itself"):
        generation.generation_kwargs = {"n": 2}
    with pytest.raises(AttributeError, match=r"no 'max_model_length'.* TRL's vllm_\* arguments"):
        generation.max_model_length = 32
    with pytest.raises(AttributeError, match=r"no 'tempereture'. It has temperature, top_p"):
        generation.tempereture = 0.5


def test_a_run_that_samples_at_another_temperature_than_it_trains_at_says_so_and_goes_on(run, caplog):
    finished = run(trlx_hybrid.GRPOTrainer, use_vllm=True, train=False, max_steps=1)
    finished.trainer.vllm_generation.temperature = 0.5
    finished.trainer.train()
    assert "not compared token by token: temperature=0.5 makes them differ" in caplog.text
    assert finished.logs[0]["sampling/sampling_logp_difference/max"] > 0.1


def test_the_config_alone_chooses_the_engine(run):
    finished = run(trlx_hybrid.GRPOTrainer, hybrid={"engine": "vllm"}, max_steps=1)
    assert finished.trainer.use_vllm
    assert finished.trainer.args.use_vllm
    assert "sampling/sampling_logp_difference/mean" in finished.logs[0]
    assert {"hybrid/weight_version", "hybrid/sync_seconds", "hybrid/rollout_seconds"} <= set(
        finished.trainer.state.log_history[0]
    )


def test_evaluation_without_training_builds_the_engine_at_the_first_rollout(run, prompts):
    finished = run(trlx_hybrid.GRPOTrainer, use_vllm=True, train=False)
    assert finished.trainer.session.engine is None
    metrics = finished.trainer.evaluate(prompts.select(range(8)))
    assert finished.trainer.session.engine is not None
    assert "eval_reward" in metrics


def test_trls_tool_loop_runs_through_the_engine(run):
    """Turns of one rollout: one sync, seeds by row and turn, limits read where TRL reads them."""
    finished = run(trlx_hybrid.GRPOTrainer, use_vllm=True, train=False)
    session = finished.trainer.session
    with session.rollout_phase(True):
        first = finished.trainer.vllm_generation.generate([[5, 6], [7, 8]], None, 1)
        prompts = [[5, 6, *first[1][0], 9]]
        finished.trainer.vllm_generation.generate(prompts, None, 1)
        assert finished.trainer.vllm_generation.llm.llm_engine.model_config.max_model_len == 64
        assert session.sampler._tracker._turns == [1, 0]
    assert session.versions._syncs == 1


def test_a_generate_of_ones_own_works_beneath_ours_and_above_it_names_the_way(run):
    def whole(self, prompts):
        return trl.GRPOTrainer._generate(self, prompts)

    above = type("Above", (trlx_hybrid.GRPOTrainer,), {"_generate": whole})
    trainer = run(above, use_vllm=True, train=False).trainer
    with pytest.raises(StaleWeightsError, match=r"a subclass replaces it.*hybrid\(MyTrainer\)"):
        trainer._generate(["sort 12="])
    beneath = trlx_hybrid.hybrid(type("Beneath", (trl.GRPOTrainer,), {"_generate": whole}))
    assert run(beneath, use_vllm=True, max_steps=1).logs


def test_an_engine_that_could_not_be_built_leaves_nothing_behind_for_the_next(run):
    """Experts have a process group of their own in vLLM: a dense model's groups would do for them as little as none."""
    nowhere = {"engine_options": {"engine_args": {"load_format": "pt"}}}  # there are no weights in the model's folder
    with pytest.raises(EngineError, match="could not build an engine"):
        run(trlx_hybrid.GRPOTrainer, use_vllm=True, hybrid=nowhere)
    finished = run(trlx_hybrid.GRPOTrainer, model=tiny_model("gpt_oss"), use_vllm=True, train=False)
    assert gap(finished.trainer.session) < 1e-5


def test_vllm_internals_are_where_they_were(run):
    """Names what broke when vLLM's version changes; private/ is the only folder that knows them."""
    from vllm.distributed import parallel_state
    from vllm.v1.worker.cpu_worker import CPUWorker

    session = run(trlx_hybrid.GRPOTrainer, use_vllm=True, train=False).trainer.session
    session.open()
    engine = session.live_engine.llm.llm_engine
    assert engine.model_executor.driver_worker.model_runner.model is not None
    assert {"structured_output_manager", "model_executor", "scheduler"} <= set(vars(engine.engine_core.engine_core))
    assert not engine.engine_core._finalizer.alive  # at exit it would destroy every process group, accelerate's too
    assert hasattr(engine.output_processor, "process_outputs")
    assert all(hasattr(parallel_state, name) for name in ("_WORLD", "_NODE_COUNT", "destroy_model_parallel"))
    assert all(hasattr(CPUWorker, name) for name in ("init_device", "load_model", "sleep", "wake_up"))


def test_a_float32_engine_does_not_compute_in_tf32(monkeypatch):
    """What Triton compiles meanwhile, and no longer; what the user says counts for more."""
    monkeypatch.delenv("TRITON_F32_DEFAULT", raising=False)
    knobs = pytest.importorskip("triton.knobs")

    def precision(dtype):
        with running(dtype):
            return knobs.language.fp32_default

    assert precision(torch.float32) == "ieee"
    assert precision(torch.bfloat16) is None
    assert knobs.language.fp32_default is None
    monkeypatch.setenv("TRITON_F32_DEFAULT", "tf32x3")
    assert precision(torch.float32) == "tf32x3"


def test_a_class_that_is_new_on_a_machine_is_inspected_without_another_process(tmp_path, monkeypatch):
    """The other process would import torch and vLLM anew."""

    def refuse(look):
        raise AssertionError("another process")

    monkeypatch.setattr(registry, "_run_in_subprocess", refuse)
    monkeypatch.setitem(vars(vllm.envs), "VLLM_CACHE_ROOT", str(tmp_path))
    assert unimportable("Qwen3ForCausalLM") is None
    assert [file.stem for file in (tmp_path / "modelinfos").iterdir()] == [
        "vllm-model_executor-models-qwen3-Qwen3ForCausalLM"
    ]
    shutil.rmtree(tmp_path / "modelinfos")
    assert only_attends("Qwen3ForCausalLM")
    assert registry._run_in_subprocess is refuse


def test_kernels_are_kept_for_engines_of_all_configurations(monkeypatch):
    """Inductor would set the variable, while the engine starts, to a folder of this configuration."""
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.delenv("TRITON_HOME", raising=False)
    for home in (None, "/elsewhere"):
        if home is not None:
            monkeypatch.setenv("TRITON_HOME", home)
        own = triton.knobs.cache_knobs().dir
        with running(torch.bfloat16):
            assert os.environ["TRITON_CACHE_DIR"] == triton.knobs.cache_knobs().dir == own
        assert "TRITON_CACHE_DIR" not in os.environ
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    with running(torch.bfloat16):
        assert os.environ["TRITON_CACHE_DIR"] == "/mine"


def test_weights_do_not_change_under_requests_that_a_custom_rollout_left_unfinished(run):
    """vLLM keeps its prefix cache then, keys and values of the old weights, and only logs that."""
    session = run(trlx_hybrid.GRPOTrainer, use_vllm=True, train=False).trainer.session
    with session.rollout_phase(True):
        llm = session.live_engine.llm
        (left,) = llm.enqueue([{"prompt_token_ids": [7] * 33}], vllm.SamplingParams(max_tokens=30, ignore_eos=True))
        llm.llm_engine.step()
    session.weights_changed()
    with pytest.raises(EngineError, match="1 requests are still in vLLM's queue"), session.rollout_phase(True):
        pass
    llm.llm_engine.abort_request([left], internal=True)
    with session.rollout_phase(True):
        assert prefixes(llm) == 0


def test_a_second_start_finds_what_the_first_compiled(run, monkeypatch):
    """vLLM keeps it under a hash of its config, which has the path of the model's folder in it."""
    hashes, folders = [], []

    class Noting(vllm.LLM):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            hashes.append(self.llm_engine.vllm_config.compute_hash())
            folders.append(self.llm_engine.model_config.model)

    monkeypatch.setattr(vllm, "LLM", Noting)
    for length in (64, 64, 96):
        given = {"use_vllm": True, "vllm_max_model_length": length, "train": False}
        run(trlx_hybrid.GRPOTrainer, **given).trainer.session.open()
    assert len(set(folders)) == 3
    assert hashes[0] == hashes[1] != hashes[2]


def test_batches_of_one_weight_version_share_no_draws(run):
    """Gradient accumulation samples several batches with the same weights, and so does an evaluation in between."""
    session = run(trlx_hybrid.GRPOTrainer, use_vllm=True, train=False).trainer.session
    sampled = []
    for training in (True, True, False):
        with session.rollout_phase(training):
            sampled += [tuple(c.token_ids) for c in session.generate([[5, 6, 7]] * 4, num_generations=4)]
    assert len(set(sampled)) == 12


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """How processes ended that left an engine to their end: standard error and report of each."""
    folder, hows = tmp_path_factory.mktemp("ends"), ("left", "half", "destroyed")
    scripts = {how: Script(SCRIPTS / "ends.py", how, folder / how) for how in hows}
    ends = {how: script.wait(600) for how, script in scripts.items()}
    assert not any(end.returncode for end in ends.values()), ends
    return {how: (end.stderr, json.loads((folder / how).read_text())) for how, end in ends.items()}


@pytest.mark.parametrize("how", ["left", "half", "destroyed"])
def test_an_engine_that_is_left_takes_the_process_group_along_that_it_made(ended, how):
    """NCCL's prints a warning otherwise."""
    stderr, report = ended[how]
    assert report["default group at exit"] is False
    assert "Traceback" not in stderr
    assert how == "half" or "nanobind" not in stderr  # Triton's list of what was not collected; "half" ends as on a GPU


def test_closing_an_engine_unfreezes_what_vllm_froze_and_nothing_else(ended):
    _, report = ended["left"]
    before, while_open, after = report["frozen with imports"]
    assert before > 10_000
    assert while_open - before > 10_000  # or each wake-up of the engine visits all of its objects: 0.2 s
    assert after < 1_000  # Python's own, in 3.12
    before, while_open, after = report["frozen"]
    assert before < 1_000
    assert while_open > 10_000
    assert after < 1_000
    _, while_open, after = report["frozen by Python"]
    assert while_open > 10_000
    assert after < 1_000
    _, while_open, after = report["frozen by the user"]
    assert after > 10_000
    assert abs(after - while_open) < 1_000  # none of the engine's is among them


def test_what_was_compiled_keeps_no_weights_when_its_engine_is_closed(ended):
    """Neither where vLLM has frozen it, nor where the user's heap is frozen."""
    _, report = ended["left"]
    assert min(report["compiled"]) > 0
    assert report["weights kept"] == [0, 0, 0, 0]


def test_an_engine_for_conversations_records_steps_that_read_prompts(monkeypatch):
    """On a GPU with FlashAttention 3; an engine on a CPU records nothing."""
    from vllm.platforms import current_platform

    monkeypatch.setattr(
        type(current_platform), "is_device_capability_family", classmethod(lambda cls, capability: capability == 90)
    )
    plain = tiny_model()

    def graphs(
        needs=("streams",), model=plain, architecture="Qwen3ForCausalLM", dtype=torch.bfloat16, staleness=0, **options
    ):
        rollout = SimpleNamespace(component=SimpleNamespace(needs=needs))
        session = SimpleNamespace(
            selection=SimpleNamespace(rollout=rollout),
            config=trlx_hybrid.HybridConfig(engine="vllm", rollout_options={"max_staleness": staleness}),
            over_support=False,
            policy=SimpleNamespace(base=model, architecture=architecture),
        )
        options = VLLMOptions(**{"max_model_len": 1024, "max_num_seqs": 64} | options)
        return shared_arguments(session, options, dtype, cpu=False).get("compilation_config")

    wide = graphs()
    assert wide == {"cudagraph_mode": "FULL", "max_cudagraph_capture_size": 512}
    assert vllm.config.CompilationConfig(**wide).cudagraph_mode is vllm.config.CUDAGraphMode.FULL
    assert graphs(max_model_len=50, max_num_seqs=4)["max_cudagraph_capture_size"] == 200  # as many as a step has
    assert graphs(max_num_seqs=256) == graphs(max_num_seqs=None) == {"cudagraph_mode": "FULL"}
    assert graphs(needs=()) is None
    assert graphs(needs=(), staleness=2) == wide  # rows begin while others decode
    assert graphs(enforce_eager=True) is None
    assert graphs(pipeline_parallel_size=2) is None
    assert graphs(speculative_config={"method": "ngram"}) is None
    for name in ("max_cudagraph_capture_size", "cudagraph_capture_sizes", "optimization_level", "attention_backend"):
        assert graphs(engine_args={name: None}) is None  # the user's word
    assert graphs(dtype=torch.float32) is None  # no FlashAttention
    for architecture in ("Mamba2ForCausalLM", "Qwen3NextForCausalLM", "Unknown"):
        assert graphs(architecture=architecture) is None
    if unimportable("Gemma3ForConditionalGeneration") is None:  # else it is refused before
        assert graphs(architecture="Gemma3ForConditionalGeneration") is None
    chunked = copy.deepcopy(plain)
    chunked.config.attention_chunk_size = 8192  # Llama 4
    assert graphs(model=chunked) is None
    monkeypatch.setattr(
        type(current_platform), "is_device_capability_family", classmethod(lambda cls, capability: capability == 80)
    )
    assert graphs() is None  # FlashAttention 2 is recorded with decode steps only
