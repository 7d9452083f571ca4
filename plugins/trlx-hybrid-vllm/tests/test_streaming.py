"""Requests that come and go while the engine steps: what each gets is what `LLM.generate` gives it."""

import contextlib
import random

import numpy as np
import pytest
import torch
from trlx_hybrid.contract.types import Request, Sampling
from trlx_hybrid.errors import EngineError
from trlx_hybrid.testing.models import character_tokenizer, tiny_model
from trlx_hybrid_vllm.generate.streaming import EngineStream
from trlx_hybrid_vllm.private.ending import shut_down
from trlx_hybrid_vllm.private.engine import drain
from trlx_hybrid_vllm.private.process import running
from trlx_hybrid_vllm.rendezvous import launcher_environment
from trlx_hybrid_vllm.sampling import completion_of, prompt_of, sampling_params, with_seed
from vllm.exceptions import VLLMValidationError

PLACES = 6
BLOCK_BYTES = 2 * 2 * 2 * 32 * 32 * 4  # keys and values, layers, heads, head size, tokens of a block, float32


@pytest.fixture(scope="module", params=["stock", "ours, a step ahead"])
def llm(tmp_path_factory, request, started_once):
    """vLLM's own scheduler, and the one that GPUs get, which runs a step ahead; vLLM refuses that on a CPU."""
    from vllm import LLM
    from vllm.platforms.cpu import CpuPlatform

    folder, ahead = tmp_path_factory.mktemp("model"), request.param != "stock"
    model = tiny_model()
    model.config.architectures = ["Qwen3ForCausalLM"]
    model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    stock = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls, config):
        stock(cls, config)
        config.scheduler_config.async_scheduling = ahead

    with (
        pytest.MonkeyPatch.context() as patch,
        launcher_environment(0, 0, 1),
        running(torch.float32),
    ):
        patch.setattr(CpuPlatform, "check_and_update_config", classmethod(check_and_update_config))
        llm = LLM(
            model=str(folder),
            scheduler_cls="trlx_hybrid_vllm.private.scheduler.DecodeScheduler" if ahead else None,
            dtype="float32",
            enforce_eager=True,
            kv_cache_memory_bytes=64 * BLOCK_BYTES,
            block_size=32,
            max_num_seqs=PLACES,
            max_model_len=160,
            distributed_executor_backend="external_launcher",
            worker_cls="trlx_hybrid_vllm.private.cpu.PlainWeightsCPUWorker",
            logprobs_mode="processed_logprobs",
        )
        assert llm.llm_engine.engine_core.engine_core.batch_queue_size == 1 + ahead
        yield llm
        shut_down(llm, made_default_group=True)


@pytest.fixture(autouse=True)
def at_rest(llm):
    """Every test leaves the engine without requests, and all blocks of its cache free."""
    yield
    drain(llm)
    assert not llm.llm_engine.has_unfinished_requests()
    assert not llm.llm_engine.output_processor.request_states
    assert free_blocks(llm) == pool_of(llm).num_gpu_blocks - 1
    llm.reset_prefix_cache()


def pool_of(llm):
    return llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool


def free_blocks(llm):
    return pool_of(llm).get_num_free_blocks()


def requests_of(count, first=0, length=6, **given):
    """Different prompts and seeds; the later, the longer."""
    return [
        Request(prompt_ids=[5 + (i * 7 + j) % 80 for j in range(length + i)], seed=i, **given)
        for i in range(first, first + count)
    ]


def params_of(**given):
    return sampling_params(Sampling(**{"max_tokens": 24, "logprobs": 0, **given}))


def generated(llm, requests, params):
    """What `LLM.generate` makes of them, all at once."""
    outputs = llm.generate([prompt_of(r) for r in requests], [with_seed(params, r) for r in requests], use_tqdm=False)
    llm.reset_prefix_cache()
    return [completion_of(output.outputs[0]) for output in outputs]


def assert_same(found, expected):
    """The same tokens; log-probs but for what other company in the batch changes of a sum's order."""
    for one, other in zip(found, expected, strict=True):
        assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
        assert one.logprob_token_ids == other.logprob_token_ids
        assert (one.logprobs is None) == (other.logprobs is None)
        for values, others in zip(one.logprobs or [], other.logprobs or [], strict=True):
            assert values == pytest.approx(others, abs=1e-5)


def finish(stream, found=None):
    found = {} if found is None else found
    while stream.busy:
        finished, more = stream.step(True)
        assert more
        for key, completion in finished:
            assert key not in found
            found[key] = completion
    assert stream.step(False) == ([], False)
    return found


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"logprobs": None},
        {"logprobs": 3},
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.02, "repetition_penalty": 1.1},
        {"extra": {"stop": ["a", "b", "7", "Q"]}},
        {"extra": {"stop": ["e", "f"]}, "logprobs": 2},
        {"extra": {"stop_token_ids": [*range(20, 40)]}},
        {"extra": {"min_tokens": 12}},
    ],
    ids=str,
)
def test_requests_added_on_the_way_get_what_they_get_at_once(llm, given):
    requests = [r for i in range(7) for r in requests_of(2, first=2 * i, max_tokens=24 - 2 * i)]
    params, found = params_of(**given), {}
    expected = generated(llm, requests, params)
    with EngineStream(llm, params).open() as stream:
        keys = [stream.add(request) for request in requests[:3]]
        for request in requests[3:]:
            finished, _ = stream.step(True)
            found.update(finished)
            keys.append(stream.add(request))
        finish(stream, found)
    assert_same([found[key] for key in keys], expected)
    reasons = {completion.finish_reason for completion in expected}
    assert "stop" in reasons or not {"stop", "stop_token_ids"} & set(given.get("extra", {}))
    assert all((c.logprobs is None) == (params["logprobs"] is None) for c in expected)


@pytest.mark.parametrize("text", [False, True], ids=["tokens", "text"])
def test_an_aborted_request_frees_its_blocks_and_never_comes_back(llm, text):
    params = params_of(max_tokens=90, extra={"ignore_eos": True} | ({"stop": ["never this"]} if text else {}))
    requests = requests_of(PLACES + 3, length=20)
    expected = generated(llm, requests, params)
    with EngineStream(llm, params).open() as stream:
        keys = [stream.add(request) for request in requests]
        for _ in range(40):
            assert stream.step(True) == ([], True)
        before, gone = free_blocks(llm), {keys[0], keys[2], keys[-1]}  # two that run, one that waits for a place
        for key in gone:
            stream.abort(key)
        assert free_blocks(llm) >= before + 2 * 2
        stream.abort(keys[0])  # again: nothing left to do
        found = finish(stream)
        stream.abort(keys[1])  # it has finished
        assert not stream.busy
    kept = [i for i, key in enumerate(keys) if key not in gone]
    assert sorted(found) == [keys[i] for i in kept]
    assert_same([found[keys[i]] for i in kept], [expected[i] for i in kept])


def test_an_aborted_request_may_be_the_last(llm):
    with EngineStream(llm, params_of()).open() as stream:
        keys = [stream.add(request) for request in requests_of(2)]
        stream.step(True)
        for key in keys:
            stream.abort(key)
        assert not stream.busy
        assert stream.step(True) == ([], True)
        late = stream.add(requests_of(1, first=5)[0])
        assert list(finish(stream)) == [late]
        assert late not in keys


@pytest.mark.parametrize("error", [None, KeyError("mine")], ids=["done", "broken"])
@pytest.mark.parametrize("text", [False, True], ids=["tokens", "text"])
def test_what_is_unfinished_at_the_end_is_aborted(llm, text, error):
    params = params_of(max_tokens=90, extra={"stop": ["never this"]} if text else {})
    expected = generated(llm, requests_of(3), params)
    ending = contextlib.nullcontext() if error is None else pytest.raises(KeyError, match="mine")
    with ending, EngineStream(llm, params).open() as stream:
        for request in requests_of(PLACES + 4, first=3):
            stream.add(request)
        for _ in range(5):
            stream.step(True)
        assert free_blocks(llm) < pool_of(llm).num_gpu_blocks - 1
        if error is not None:
            raise error
    assert not stream.busy
    assert free_blocks(llm) == pool_of(llm).num_gpu_blocks - 1
    with EngineStream(llm, params).open() as stream:  # the next run finishes nothing of the last
        for request in requests_of(3):
            stream.add(request)
        assert_same([completion for _, completion in sorted(finish(stream).items())], expected)


def test_a_request_may_have_a_lower_limit_of_its_own(llm):
    """Also below the least that all are to sample."""
    params = params_of(extra={"min_tokens": 10, "ignore_eos": True})
    (request,) = requests_of(1)
    with EngineStream(llm, params).open() as stream:
        keys = {
            stream.add(Request(prompt_ids=request.prompt_ids, seed=0, max_tokens=limit)): most
            for limit, most in ((None, 24), (1, 1), (4, 4), (16, 16), (99, 24))
        }
        found = finish(stream)
    assert {key: len(completion.token_ids) for key, completion in found.items()} == keys
    longest = max(found.values(), key=lambda completion: len(completion.token_ids)).token_ids
    assert all(c.token_ids == longest[: len(c.token_ids)] for c in found.values())
    assert {c.finish_reason for c in found.values()} == {"length"}


def test_a_prompt_that_vllm_refuses_leaves_the_others_alone(llm):
    params = params_of()
    expected = generated(llm, requests_of(2), params)
    with EngineStream(llm, params).open() as stream:
        first = stream.add(requests_of(1)[0])
        stream.step(True)
        with pytest.raises(VLLMValidationError, match=r"length 200.*maximum model length of 160"):
            stream.add(Request(prompt_ids=[5] * 200, seed=0))
        second = stream.add(requests_of(2)[1])
        found = finish(stream)
    assert_same([found[first], found[second]], expected)


def test_requests_that_vllm_lost_are_an_error_and_no_endless_loop(llm):
    with EngineStream(llm, params_of(max_tokens=90)).open() as stream:
        stream.add(requests_of(1)[0])
        stream.step(True)
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        llm.llm_engine.abort_request(list(scheduler.requests), internal=True)
        with pytest.raises(EngineError, match="vLLM lost 1 requests"):
            stream.step(True)


@pytest.mark.parametrize("text", [False, True], ids=["tokens", "text"])
def test_steps_draw_from_nobodys_generators(llm, text):
    """And what others draw between steps changes no sample, and is theirs to keep."""
    params = params_of(extra={"stop": ["never this"]} if text else {})
    expected = generated(llm, requests_of(4), params)
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(3)
    alone = [(torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()) for _ in range(8)]
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(3)
    found, drawn = {}, []
    with EngineStream(llm, params).open() as stream:
        for request in requests_of(4):
            stream.add(request)
            drawn.append((torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()))
            found.update(stream.step(True)[0])
        for _ in range(4):
            drawn.append((torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()))
            found.update(stream.step(True)[0])
        finish(stream, found)
    assert drawn == alone
    assert_same([found[key] for key in sorted(found)], expected)


def test_what_tools_draw_during_a_step_is_not_drawn_again(llm, monkeypatch):
    """A tool in another thread has torch's generator while the engine samples."""
    drawn = []

    with EngineStream(llm, params_of()).open() as stream:
        sample = llm.llm_engine.model_executor.driver_worker.model_runner.sampler.forward

        def meanwhile(*args, **kwargs):
            drawn.append(int(torch.randint(0, 2**62, ())))
            return sample(*args, **kwargs)

        monkeypatch.setattr(llm.llm_engine.model_executor.driver_worker.model_runner.sampler, "forward", meanwhile)
        for request in requests_of(4):
            stream.add(request)
        finish(stream)
    assert len(set(drawn)) == len(drawn) > 4


@pytest.mark.parametrize("text", [False, True], ids=["tokens", "text"])
def test_what_the_prefix_cache_saved_is_counted(llm, text):
    """Turn by turn, as a conversation grows: whole blocks of what was there before."""
    params = params_of(max_tokens=9, extra={"ignore_eos": True} | ({"stop": ["never this"]} if text else {}))
    prompt, counted = [5 + j % 80 for j in range(40)], []
    with EngineStream(llm, params).open() as stream:
        for turn in range(4):
            stream.add(Request(prompt_ids=prompt, seed=turn))
            (completion,) = finish(stream).values()
            counted.append((stream.cached_tokens, stream.prompt_tokens))
            prompt = [*prompt, *completion.token_ids, *range(5, 22)]
    lengths = [40, 66, 92, 118]
    # The last sampled token has no keys and values yet: 40 + 8, 66 + 8, 92 + 8 tokens can be shared.
    shared = [0, 48 // 32 * 32, 74 // 32 * 32, 100 // 32 * 32]
    assert counted == [(sum(shared[: i + 1]), sum(lengths[: i + 1])) for i in range(4)]


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"logprobs": 3, "repetition_penalty": 1.2, "min_p": 0.1},
        {"temperature": 0.0, "top_k": 3},
        {"extra": {"stop": ["1"], "min_tokens": 5, "stop_token_ids": [7, 9], "ignore_eos": True}},
        {"extra": {"logit_bias": {5: 2.0}, "bad_words": ["1"]}},
        {"regex": "[0-9]{3}"},
    ],
)
def test_a_request_is_queued_as_vllm_would(llm, given):
    """Field by field, and with the same blocks to look for; the pattern was made of another prompt."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    params = params_of(**given)
    stream = EngineStream(llm, params)
    for request in [*requests_of(2, length=40), *requests_of(2, first=2, length=70, max_tokens=4)]:
        ours = stream._ids[stream.add(request)]
        theirs = llm.enqueue([prompt_of(request)], [with_seed(params, request)], use_tqdm=False)[0]
        found, expected = (scheduler.requests[name] for name in (ours, theirs))
        differing = {
            name
            for name, value in vars(expected).items()
            if name not in ("request_id", "arrival_time", "structured_output_request", "_block_hasher")
            and not same_state(getattr(found, name), value)
        }
        assert differing == set()
        assert found.block_hashes
        assert (found.structured_output_request is None) == (expected.structured_output_request is None)
        llm.llm_engine.abort_request([ours, theirs], internal=True)


def same_state(one, other):
    """Equal, or objects of one class that hold what is equal."""
    if one == other:
        return True
    return (
        type(one) is type(other)
        and hasattr(one, "__dict__")
        and vars(one).keys() == vars(other).keys()
        and all(same_state(value, vars(other)[name]) for name, value in vars(one).items())
    )


def test_what_vllm_would_not_take_is_not_queued(llm):
    stream = EngineStream(llm, params_of())
    for good in (False, True):  # as the first of a stream, and after others
        if good:
            stream.abort(stream.add(requests_of(1)[0]))
        for prompt, reason in (([5] * 161, "longer than"), ([5, 10**6], "out of vocabulary"), ([5, -1], "vocabulary")):
            with pytest.raises(VLLMValidationError, match=reason):
                stream.add(Request(prompt_ids=prompt, seed=0))
    with pytest.raises((ValueError, VLLMValidationError), match="top_p"):
        EngineStream(llm, params_of(top_p=7.0)).add(requests_of(1)[0])
