"""Tokens that graphs choose are those that vLLM chooses, also where several are decoded in one step: its second model
runner, with calls in the place of CUDA graphs, in Triton's interpreter where there is no GPU."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from interpreting import interpreted

ENGINE = """
import os, tempfile, vllm.triton_utils
vllm.triton_utils.HAS_TRITON = True
os.environ |= {"VLLM_USE_V2_MODEL_RUNNER": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

from trlx_hybrid.testing.models import character_tokenizer, tiny_model
from trlx_hybrid.contract.types import Request, Sampling
from trlx_hybrid_vllm.private.process import running
from trlx_hybrid_vllm.private import sampling_graphs
from trlx_hybrid_vllm.private import token_logprobs
from trlx_hybrid_vllm.private.ending import shut_down
from trlx_hybrid_vllm.rendezvous import launcher_environment
from trlx_hybrid_vllm.sampling import sampling_params
from trlx_hybrid_vllm.generate.streaming import EngineStream, collect
from vllm import LLM
from vllm.platforms.cpu import CpuPlatform

checked = CpuPlatform.check_and_update_config.__func__

def check_and_update_config(cls, config):  # vLLM refuses to schedule ahead on a CPU, but can
    checked(cls, config)
    config.scheduler_config.async_scheduling = AHEAD

CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
ROWS = 6
folder, model = tempfile.mkdtemp(), tiny_model()
model.config.architectures = ["Qwen3ForCausalLM"]
model.save_pretrained(folder)
character_tokenizer().save_pretrained(folder)
with launcher_environment(0, 0, 1), running(torch.float32):
    llm = LLM(
        model=folder, dtype="float32", enforce_eager=True, kv_cache_memory_bytes=1 << 21, block_size=32,
        max_num_seqs=ROWS, max_model_len=96, distributed_executor_backend="external_launcher",
        worker_cls="vllm.v1.worker.cpu_worker.CPUWorker", logprobs_mode="processed_logprobs",
        scheduler_cls="trlx_hybrid_vllm.private.scheduler.DecodeScheduler",
    )
runner = llm.llm_engine.model_executor.driver_worker.model_runner
assert not sampling_graphs.serves(llm) and sampling_graphs.sampling_graphs(llm) is None  # its layers are no graphs

# What graphs of the layers leave behind: states that stay where they are, and rows that are not there, with no numbers.
from vllm.config import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

manager, sizes, prepared = runner.cudagraph_manager, (1, 2, 4, ROWS), []
manager.hidden_states = torch.full((ROWS, model.config.hidden_size), float("nan"))
manager.graphs = {
    BatchExecutionDescriptor(CUDAGraphMode.FULL, size, size, uniform_token_count=1): None for size in sizes
}
eager, prepare_attn = manager.dispatch, runner.model_state.prepare_attn

def dispatch(rows, tokens, uniform, *args, **kwargs):
    if uniform != 1 or rows > ROWS:
        return eager(rows, tokens, uniform, *args, **kwargs)
    return next(graph for graph in manager.graphs if graph.num_tokens >= rows)

def kept(*args, **kwargs):
    prepared[:] = [prepare_attn(*args, **kwargs)]
    return prepared[0]

def run_fullgraph(graph):
    size, buffers = graph.num_tokens, runner.input_buffers
    slots = build_slot_mappings_by_layer(runner.block_tables.slot_mappings[:, :size], runner.kv_cache_config)
    manager.hidden_states.fill_(float("nan"))
    with set_forward_context(prepared[0], runner.vllm_config, num_tokens=size, slot_mapping=slots):
        out = runner.model(input_ids=buffers.input_ids[:size], positions=buffers.positions[:size])
    return manager.hidden_states[:size].copy_(out)

manager.dispatch, manager.run_fullgraph, runner.model_state.prepare_attn = dispatch, run_fullgraph, kept
assert sampling_graphs.serves(llm)

def call(step):
    captured.append(step.args)
    return torch.inference_mode()(step)

def fails(step):
    raise RuntimeError("operation not permitted when stream is capturing")

captured, made = [], lambda: sampling_graphs.SamplingGraphs(runner, sizes)
assert sampling_graphs.compared(made(), fails) is None  # logged, and all is as it was
assert sampling_graphs.compared(made(), lambda step: lambda: None) is None  # a replay that computes nothing
assert not {"sample", "execute_model"} & vars(runner).keys() and "add_request" not in vars(runner.sampler)
manager.run_fullgraph = run_fullgraph  # which `close` has dropped
graphs = sampling_graphs.compared(made(), call)
assert graphs.multi_step.most == 8  # so small a model
graphs.multi_step.most = 1
assert captured == [(ROWS,), (4,), (2,), (1,)]
runner.cudagraph_manager.hidden_states.fill_(float("nan"))

TOKENS = 5, 4, 3, 5, 2, 5, 4, 1, 3

def requests(count):
    return [Request(prompt_ids=[3, 4 + i, 5], seed=i * 7919, max_tokens=TOKENS[i]) for i in range(count)]

def sampled(count, with_graphs, **changes):
    sampling = Sampling(**{"max_tokens": 5, "logprobs": 0} | changes)
    before = graphs.replayed
    with running(torch.float32):
        stream = EngineStream(llm, sampling_params(sampling), graphs=graphs if with_graphs else None)
        found = collect(stream, requests(count))
    assert not graphs.active
    return found, graphs.replayed - before

def same(count, **changes):
    expected, none = sampled(count, False, **changes)
    found, replayed = sampled(count, True, **changes)
    assert none == 0
    equal(found, expected)
    return replayed

def equal(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine.token_ids, mine.finish_reason) == (theirs.token_ids, theirs.finish_reason)
        values = [torch.tensor(sum(each.logprobs or [], [])) for each in (mine, theirs)]
        torch.testing.assert_close(*values, atol=1e-6, rtol=1e-6)
        assert mine.logprob_token_ids == theirs.logprob_token_ids
"""

DECODING = """
forever = {"ignore_eos": True}
for count in (1, 5):  # the second is padded
    assert same(count, extra=forever) == 4, count  # the first tokens come with the prompts
assert 0 < same(9, extra=forever) < 9  # more than there are places for: prompts come in between
assert same(2, temperature=0.0, extra=forever) == 4
assert same(3)  # the run before left it no parameters
assert same(2, logprobs=None, extra=forever) == 4
print("as vLLM decodes")
"""

SEVERAL_AT_ONCE = """
core = llm.llm_engine.engine_core.engine_core
assert core.batch_queue_size == 1 + AHEAD
scheduler = core.scheduler
TOKENS = 40, 4, 33, 25, 12, 37, 40, 1, 31  # over the ends of blocks of 32

def of_each(count, most=8, **changes):  # how many tokens each step decoded
    steps, stock = [], scheduler._decode_step
    def decode_step(*args, **kwargs):
        output = stock(*args, **kwargs)
        if output is not None:
            steps.append(output.tokens)
        return output
    expected, _ = sampled(count, False, max_tokens=40, **changes)
    graphs.multi_step.most, scheduler._decode_step = most, decode_step
    found, _ = sampled(count, True, max_tokens=40, **changes)
    graphs.multi_step.most = 1
    del scheduler._decode_step
    equal(found, expected)
    return steps

for most in (1, 2, 4, 8):
    steps = of_each(1, most, extra={"ignore_eos": True})
    assert max(steps) == most and sum(steps) == 39, steps  # the first token comes with the prompt
for count in (5, 9):  # padded, and more than there are places for: none is decoded ahead of a row that waits
    steps = of_each(count, extra={"ignore_eos": True})
    assert 8 in steps and 1 in steps, steps
assert 8 in of_each(4)  # rows that end by themselves drop what was decoded behind their end
assert 8 in of_each(3, logprobs=None)
assert 8 in of_each(3, temperature=0.0)
assert set(of_each(3, temperature=0.7)) == {1}  # vLLM samples those
assert set(of_each(3, extra={"stop_token_ids": [7, 9, 11, 13, 15]})) > {8}

sampling = sampling_params(Sampling(max_tokens=40, logprobs=0))
def interrupted(most):  # an unfinished request's tokens are those that were decoded
    stream, graphs.multi_step.most = EngineStream(llm, sampling, graphs=graphs), most
    with running(torch.float32), stream.open():
        key = stream.add(Request(prompt_ids=[3, 4, 5], seed=1, max_tokens=40))
        for _ in range(6):
            stream.step(True)
        return stream.sampled(key)
few, many = interrupted(1), interrupted(8)
assert len(few.token_ids) < 8 < len(many.token_ids) < 40
assert many.token_ids[: len(few.token_ids)] == few.token_ids
assert len(many.logprobs) == len(many.token_ids)
print("several at once as one by one")
"""

OTHERWISE = """
for changes in ({"temperature": 0.7}, {"min_p": 0.1}, {"repetition_penalty": 1.3},
                {"extra": {"min_tokens": 5}}, {"extra": {"logit_bias": {7: 3.0}}}):
    assert same(2, **changes) == 0, changes

sampling = sampling_params(Sampling(max_tokens=9, logprobs=0))
mixed = [Request(prompt_ids=[3, 4 + i, 5], seed=i) for i in range(4)]
def together(with_graphs):  # one row of four asks for more
    stream = EngineStream(llm, sampling, graphs=graphs if with_graphs else None)
    with running(torch.float32), stream.open():
        keys = [stream.add(request) for request in mixed]
        done = {}
        for _ in range(2):
            done.update(stream.step(True)[0])
        before = graphs.replayed
        stream._stepper._params["min_p"] = 0.2
        stream._stepper._pattern = None
        keys.append(stream.add(Request(prompt_ids=[9, 9, 9], seed=5, max_tokens=2)))
        for _ in range(3):
            done.update(stream.step(True)[0])
        between = graphs.replayed - before
        while len(done) < len(keys):
            done.update(stream.step(True)[0])
        return [done[key].token_ids for key in keys], between, graphs.replayed - before
expected, found = together(False), together(True)
assert found[0] == expected[0]
assert found[1] <= 1 and found[2] > 2, found  # none while that row samples, and again when it is done
print("other steps are vLLM's")
"""

ENGINES_THAT_ARE_NOT_SERVED = """
from unittest.mock import patch

from vllm.lora.layers import LogitsProcessorWithLoRA

config, model_config = llm.llm_engine.vllm_config.parallel_config, llm.llm_engine.model_config
sampler = runner.sampler
for owner, name, value in (
    (config, "world_size", 2),
    (type(model_config), "is_multimodal_model", True),
    *((runner, part, object()) for part in ("speculator", "rejection_sampler", "batch_sharder")),
    *((runner, part, object()) for part in ("pcp_manager", "pp_handler")),
    (runner, "sampler", object()),
    (runner, "cudagraph_manager", None),
    (runner.cudagraph_manager, "graphs", {}),
    (runner.cudagraph_manager, "hidden_states", None),
    (sampler, "trace_replay_state", object()),
    (sampler, "compute_nans", True),
    (sampler, "return_sampling_mask", True),
    (sampler, "logprobs_mode", "raw_logits"),
    (sampler, "logits_processors", [*sampler.logits_processors, object()]),
):
    with patch.object(owner, name, value):
        assert not sampling_graphs.serves(llm), name
assert sampling_graphs.serves(llm)

class Recurrent(type(runner.model_state)):  # whose state has its own part in a step
    def postprocess_state(self, *args):
        raise AssertionError

own_sampler = type("OwnSampler", (type(sampler),), {})
for owner, cls in (
    (runner.model_state, Recurrent), (runner.model.logits_processor, LogitsProcessorWithLoRA), (sampler, own_sampler),
):
    plain = owner.__class__
    owner.__class__ = cls
    assert not sampling_graphs.serves(llm), cls
    owner.__class__ = plain
graphs.close()
assert not {"sample", "postprocess_sampled"} & vars(runner).keys()
assert not {"add_request", "apply_staged_writes"} & vars(sampler).keys()
print("other engines are vLLM's")
"""


def test_they_are_vllms():
    said, errors = interpreted("AHEAD = False\n" + ENGINE + DECODING + OTHERWISE + ENGINES_THAT_ARE_NOT_SERVED)
    assert said.splitlines()[-3:] == ["as vLLM decodes", "other steps are vLLM's", "other engines are vLLM's"], errors[
        -4000:
    ]


@pytest.mark.parametrize("ahead", [True, False])
def test_several_steps_at_once_are_single_steps(ahead):
    said, errors = interpreted(f"AHEAD = {ahead}\n" + ENGINE + SEVERAL_AT_ONCE)
    assert said.splitlines()[-1:] == ["several at once as one by one"], errors[-4000:]
