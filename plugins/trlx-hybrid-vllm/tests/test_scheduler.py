"""The quick scheduler against vLLM's own: the same tokens, log-probs to the bit, and the same state left behind."""

import dataclasses
from concurrent.futures import Future
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from trlx_hybrid.contract.types import Request
from trlx_hybrid.testing.models import character_tokenizer, tiny_model
from trlx_hybrid_vllm.generate.streaming import EngineStream
from trlx_hybrid_vllm.generate.streaming import collect as collect_from
from trlx_hybrid_vllm.private.ending import shut_down
from trlx_hybrid_vllm.private.process import running
from trlx_hybrid_vllm.private.scheduler import DecodeScheduler
from trlx_hybrid_vllm.rendezvous import launcher_environment
from vllm.v1.outputs import LogprobsLists

OURS = "trlx_hybrid_vllm.private.scheduler.DecodeScheduler"
BOTH = (None, OURS)


class ThreeAtOnce(DecodeScheduler):
    """Schedules three tokens of each request in one step, as on a GPU, where `one_by_one` executes the step."""

    most = 3

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.counts = set()

    def _decode_step(self, *args, **kwargs):
        step = super()._decode_step(*args, **kwargs)
        self.counts |= {step.tokens} if step is not None else set()
        return step

    @property
    def tokens_at_once(self):
        return (lambda ids: self.most) if self.holding else None

    @tokens_at_once.setter
    def tokens_at_once(self, value):
        pass


class ManyAtOnce(ThreeAtOnce):
    most = 40  # more than a block has


def one_by_one(executor, patch):
    """Lets an executor run a step of several tokens as that many steps of one."""
    execute_model, sample_tokens, earlier = executor.execute_model, executor.sample_tokens, []

    def executed(output, non_block=False):
        earlier.clear()
        for done in range(getattr(output, "tokens", 1) - 1):
            execute_model(after(output, done))
            earlier.append(sample_tokens(None))
        return execute_model(after(output, len(earlier)) if earlier else output, non_block=non_block)

    def sampled(grammar, non_block=False):
        last = sample_tokens(grammar, non_block=non_block)
        if not earlier:
            return last
        steps = [*earlier, last.result() if non_block else last]
        merged = dataclasses.replace(
            steps[0],
            sampled_token_ids=[
                [t for step in row for t in step] for row in zip(*(s.sampled_token_ids for s in steps), strict=True)
            ],
            logprobs=steps[0].logprobs and interleaved([s.logprobs for s in steps]),
        )
        if not non_block:
            return merged
        future = Future()
        future.set_result(merged)
        return future

    patch.setattr(executor, "execute_model", executed)
    patch.setattr(executor, "sample_tokens", sampled)


def after(output, done):
    """The single step for the next token of a step of several, of which some are decoded."""
    cached = output.scheduled_cached_reqs
    moved = dataclasses.replace(
        cached,
        new_block_ids=cached.new_block_ids if done == 0 else [None] * len(cached.req_ids),
        num_computed_tokens=[n + done for n in cached.num_computed_tokens],
        num_output_tokens=[n + done for n in cached.num_output_tokens],
    )
    return dataclasses.replace(
        output, scheduled_cached_reqs=moved, finished_req_ids=output.finished_req_ids if done == 0 else set(), tokens=1
    )


def interleaved(steps):
    """The log-probs of several steps, those of one request beside each other."""
    arrays = [np.stack(arrays, 1) for arrays in zip(*(s[:3] for s in steps), strict=True)]
    edges = list(range(0, len(steps) * len(steps[0].logprobs) + 1, len(steps)))
    return LogprobsLists(*(array.reshape(-1, *array.shape[2:]) for array in arrays), edges)


BLOCK_BYTES = 2 * 2 * 2 * 32 * 32 * 4  # keys and values, layers, heads, head size, tokens of a block, float32


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model = tiny_model()
    model.config.architectures = ["Qwen3ForCausalLM"]
    model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def engine(checkpoint, monkeypatch, started_once):
    """Builds an engine with the scheduler of this name; asynchronous, which vLLM refuses on a CPU but can do."""

    @contextmanager
    def build(scheduler, *, ahead=True, blocks=64, places=8):
        from vllm import LLM
        from vllm.platforms.cpu import CpuPlatform

        stock = CpuPlatform.check_and_update_config.__func__

        def check_and_update_config(cls, config):
            stock(cls, config)
            config.scheduler_config.async_scheduling = ahead

        with monkeypatch.context() as patch, launcher_environment(0, 0, 1), running(torch.float32):
            patch.setattr(CpuPlatform, "check_and_update_config", classmethod(check_and_update_config))
            llm = LLM(
                model=checkpoint,
                scheduler_cls=scheduler,
                dtype="float32",
                enforce_eager=True,
                kv_cache_memory_bytes=blocks * BLOCK_BYTES,
                block_size=32,
                max_num_seqs=places,
                max_model_len=128,
                distributed_executor_backend="external_launcher",
                worker_cls="trlx_hybrid_vllm.private.cpu.PlainWeightsCPUWorker",
                logprobs_mode="processed_logprobs",
            )
            if scheduler not in BOTH:
                one_by_one(core_of(llm).model_executor, patch)
            try:
                yield llm
            finally:
                shut_down(llm, made_default_group=True)

    return build


class GivenParams(EngineStream):
    """Each request has parameters of its own: those of its row."""

    def __init__(self, llm, params):
        from vllm.inputs.engine import tokens_input

        super().__init__(llm, {"detokenize": False, "logprobs": 0})
        self._stepper._queue = lambda r: llm._add_request(tokens_input(r.prompt_ids), params[r.row])


def collect(llm, prompts, params):
    return collect_from(
        GivenParams(llm, params),
        [Request(prompt_ids=p["prompt_token_ids"], seed=0, row=i) for i, p in enumerate(prompts)],
    )


def core_of(llm):
    return llm.llm_engine.engine_core.engine_core


def left_behind(llm):
    """What the next run finds: cached blocks by hash, and how many are free."""
    scheduler = core_of(llm).scheduler
    pool = scheduler.kv_cache_manager.block_pool
    assert not scheduler.requests
    assert not scheduler.running
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    return set(pool.cached_block_hash_to_block._cache)


def assert_mostly_quick(llm, share=0.8):
    scheduler = core_of(llm).scheduler
    if hasattr(scheduler, "decode_steps"):
        assert scheduler.decode_steps > share * scheduler.current_step


def prompts_of(count, length=6):
    return [{"prompt_token_ids": [5 + (i * 7 + j) % 80 for j in range(length + i)]} for i in range(count)]


def params_of(count, **given):
    from vllm import SamplingParams

    given = {"logprobs": 0, "detokenize": False} | given
    return [SamplingParams(seed=i, **{"max_tokens": 9 + 7 * (i % 12), **given}) for i in range(count)]


def every_way_to_end(count):
    params = params_of(count)
    for i in range(3, count, 4):
        params[i].stop_token_ids = list(range(3, 40, i))
    params[5].ignore_eos, params[6].min_tokens, params[7].max_tokens, params[8].max_tokens = True, 12, 1, 500
    params[8].ignore_eos = True
    params[9].logprobs = None
    return params


def losing_the_device(llm, patch, broken):
    """Lets the engine's step of this number fail; how many tokens each step was to decode."""
    executor, counts = core_of(llm).model_executor, []
    stock = executor.execute_model

    def execute_model(output, **kwargs):
        counts.append(getattr(output, "tokens", 1))
        if len(counts) == broken:
            raise RuntimeError("a lost device")
        return stock(output, **kwargs)

    patch.setattr(executor, "execute_model", execute_model)
    return counts


def told(outputs):
    """All that a caller of `LLM.generate` sees."""
    return [
        (
            list(output.outputs[0].token_ids),
            output.outputs[0].text,
            [{t: (lp.logprob, lp.rank) for t, lp in position.items()} for position in output.outputs[0].logprobs or []],
            output.outputs[0].finish_reason,
            output.outputs[0].stop_reason,
            output.num_cached_tokens,
        )
        for output in outputs
    ]


@pytest.mark.parametrize("ahead", [True, False])
def test_a_rollout_is_the_same(engine, ahead):
    """More requests than places, every way to end, and a context that runs out."""
    prompts, params, seen = prompts_of(20), every_way_to_end(20), []
    for scheduler in BOTH:
        with engine(scheduler, ahead=ahead) as llm:
            assert core_of(llm).batch_queue_size == 1 + ahead
            collected = collect(llm, prompts, [p.clone() for p in params])
            assert_mostly_quick(llm)
            cached = left_behind(llm)
            seen.append((collected, told(llm.generate(prompts, params, use_tqdm=False)), cached))
            left_behind(llm)
    assert seen[0] == seen[1]
    collected = seen[0][0]
    assert {c.finish_reason for c in collected} == {"stop", "length"}
    assert len(prompts[8]["prompt_token_ids"]) + len(collected[8].token_ids) == 128
    assert collected[9].logprobs is None


def test_a_cache_too_small_preempts_the_same(engine):
    seen = []
    for scheduler in BOTH:
        with engine(scheduler, blocks=14) as llm:
            outputs = collect(llm, prompts_of(12), params_of(12, ignore_eos=True))
            if scheduler:
                assert core_of(llm).scheduler._preemptions > 0
                assert core_of(llm).scheduler.decode_steps > 20
            seen.append((outputs, left_behind(llm)))
    assert seen[0] == seen[1]


def test_a_second_turn_finds_as_much_in_the_prefix_cache(engine):
    seen = []
    for scheduler in BOTH:
        with engine(scheduler, places=16) as llm:
            # Lengths so that completions end at, just before and just after a block's end.
            params = params_of(12, ignore_eos=True)
            for i, p in enumerate(params):
                p.max_tokens = 55 - i + i % 5
            first = collect(llm, prompts_of(12), params)
            turns = [
                {"prompt_token_ids": [*prompt["prompt_token_ids"], *completion.token_ids, 9]}
                for prompt, completion in zip(prompts_of(12), first, strict=True)
            ]
            second = told(llm.generate(turns, params_of(12), use_tqdm=False))
            assert_mostly_quick(llm)
            seen.append((first, second, left_behind(llm)))
    assert seen[0] == seen[1]
    assert {turn[-1] for turn in seen[0][1]} == {32, 64}


def test_requests_come_and_go_in_mid_run(engine):
    """Step by step the same, through slow and quick steps in turn."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    def params(i):
        return SamplingParams(
            seed=i, max_tokens=20 + i % 9, logprobs=0, detokenize=False, output_kind=RequestOutputKind.DELTA
        )

    seen = []
    for scheduler in BOTH:
        steps = []
        with engine(scheduler) as llm:
            prompts = prompts_of(12)
            names = {i: llm.llm_engine.add_request(str(i), prompts[i], params(i)) for i in range(5)}
            while llm.llm_engine.has_unfinished_requests():
                steps.append([(o.request_id, *told([o])[0]) for o in llm.llm_engine.step()])
                if len(steps) in (6, 7, 12, 13, 14, 25):
                    new = len(names)
                    names[new] = llm.llm_engine.add_request(str(new), prompts[new], params(new))
                if len(steps) == 10:
                    llm.llm_engine.abort_request([names[1]], internal=True)
                if len(steps) == 17:
                    llm.llm_engine.abort_request(["0", "3"])
            assert_mostly_quick(llm, share=0.9)
            seen.append((steps, left_behind(llm)))
    assert seen[0] == seen[1]


def test_stop_strings_ranked_logprobs_and_what_is_not_plain(engine):
    """Through `LLM.generate`: text stops a request behind the scheduler's back; others ask for more than counting."""
    from vllm.sampling_params import RepetitionDetectionParams

    seen = []
    for scheduler in BOTH:
        with engine(scheduler) as llm:
            text = params_of(10, detokenize=True, stop=["a", "Q5", "z"])
            ranked = params_of(10, logprobs=3)
            odd = params_of(10, prompt_logprobs=2)
            odd[4].repetition_detection = RepetitionDetectionParams(max_pattern_size=3, min_count=2)
            seen.append([told(llm.generate(prompts_of(10), p, use_tqdm=False)) for p in (text, ranked, odd)])
            left_behind(llm)
    assert seen[0] == seen[1]
    assert {output[4] for output in seen[0][0]} & {"a", "Q5", "z"}


@pytest.mark.parametrize("scheduler", BOTH)
@pytest.mark.parametrize("broken", [1, 9, 10])
def test_a_failed_step_leaves_a_usable_engine(engine, monkeypatch, scheduler, broken):
    with engine(scheduler) as llm:
        expected = collect(llm, prompts_of(6), params_of(6))
        llm.reset_prefix_cache()
        losing_the_device(llm, monkeypatch, broken)
        with pytest.raises(RuntimeError, match="a lost device"):
            collect(llm, prompts_of(6), params_of(6))
        assert not llm.llm_engine.has_unfinished_requests()
        llm.reset_prefix_cache()
        assert collect(llm, prompts_of(6), params_of(6)) == expected
        left_behind(llm)


def test_collecting_holds_and_then_lets_go(engine):
    """Tokens are handed over late only while the collector asks for it."""
    with engine(OURS) as llm:
        scheduler, handed = core_of(llm).scheduler, []
        stock = scheduler.update_from_output

        def update_from_output(*args):
            outputs = stock(*args)
            handed.extend(len(o.new_token_ids) for core in outputs.values() for o in core.outputs)
            return outputs

        scheduler.update_from_output = update_from_output
        completions = collect(llm, prompts_of(4), params_of(4, ignore_eos=True, max_tokens=30))
        assert [len(c.token_ids) for c in completions] == [30] * 4
        assert sorted(handed) == [1] * 4 + [29] * 4
        assert not scheduler.holding
        handed.clear()
        llm.generate(prompts_of(4), params_of(4, ignore_eos=True, max_tokens=30), use_tqdm=False)
        assert set(handed) == {1}


@pytest.mark.parametrize("ahead", [True, False])
def test_prompts_that_arrive_are_read_beside_rows_that_decode(engine, ahead):
    """As answers of tools do. The rows' steps stay quick, and their tokens held back, whatever arrives."""
    seen = []
    for scheduler in BOTH:
        with engine(scheduler, ahead=ahead, places=6) as llm:
            stream = GivenParams(llm, params_of(10, ignore_eos=True, max_tokens=25))
            requests = [Request(prompt_ids=p["prompt_token_ids"], seed=0, row=i) for i, p in enumerate(prompts_of(10))]
            ours, handed, completions, steps = core_of(llm).scheduler, [], {}, 0
            stock = ours.update_from_output

            def update_from_output(*args, stock=stock, handed=handed):
                outputs = stock(*args)
                handed.extend(len(o.new_token_ids) for core in outputs.values() for o in core.outputs)
                return outputs

            ours.update_from_output = update_from_output
            with stream.open():
                stream.add(requests.pop(0))
                while stream.busy:
                    completions |= dict(stream.step(True)[0])
                    steps += 1
                    if requests and steps % 3 == 0:
                        stream.add(requests.pop(0))
            if scheduler:
                assert sorted(handed) == [1] * 10 + [24] * 10
                assert_mostly_quick(llm, share=0.95)
            seen.append(({key: (c.token_ids, c.logprobs) for key, c in completions.items()}, left_behind(llm)))
    assert seen[0] == seen[1]
    assert len(seen[0][0]) == 10


def test_a_long_prompt_is_read_in_parts_beside_rows_that_decode(engine):
    """It is longer than what one step reads; its later parts are vLLM's own steps."""
    seen = []
    for scheduler in BOTH:
        with engine(scheduler) as llm:
            core_of(llm).scheduler.max_num_scheduled_tokens = 24
            if scheduler:
                core_of(llm).scheduler._budget = 24
            params = params_of(3, ignore_eos=True, max_tokens=30, temperature=0.0)
            for each in params:
                each.seed = None  # vLLM's parts of a prompt and its generators do not go together on a CPU
            stream = GivenParams(llm, params)
            long = [Request(prompt_ids=list(range(5, 75)), seed=0, row=row) for row in (1, 2)]
            completions = {}
            with stream.open():
                stream.add(Request(prompt_ids=[7, 8], seed=0, row=0))
                while stream.busy:
                    completions |= dict(stream.step(True)[0])
                    if long and len(completions) == 0:
                        stream.add(long.pop(0))
            assert_mostly_quick(llm, share=0.5)
            seen.append(({key: (c.token_ids, c.logprobs) for key, c in completions.items()}, left_behind(llm)))
    assert seen[0] == seen[1]
    assert len(seen[0][0]) == 3


def assert_alike(found, expected):
    """The same tokens and ends. Rows that have stopped stay in the batch until the step's end, so rounding differs."""
    assert [(c.token_ids, c.finish_reason) for c in found] == [(c.token_ids, c.finish_reason) for c in expected]
    for mine, theirs in zip(found, expected, strict=True):
        values = [np.array(each.logprobs or [], float) for each in (mine, theirs)]
        np.testing.assert_allclose(*values, atol=1e-5, rtol=0)


@pytest.mark.parametrize("ahead", [True, False])
def test_several_tokens_at_once_are_the_same(engine, ahead):
    """More requests than places, and a context that runs out; then again with what is cached."""
    prompts, seen = prompts_of(20), []
    for scheduler in (None, ThreeAtOnce, ManyAtOnce):
        with engine(scheduler, ahead=ahead) as llm:
            runs = [collect(llm, prompts, every_way_to_end(20)) for _ in range(2)]
            if scheduler:
                assert len(core_of(llm).scheduler.counts) > 1
            seen.append((*runs, left_behind(llm)))
    for other in seen[1:]:
        assert_alike(other[0], seen[0][0])
        assert_alike(other[1], seen[0][1])
        assert other[2] == seen[0][2]  # no block is cached beyond a request's end, and none is missing


@pytest.mark.parametrize("blocks", [14, 11, 9])
def test_several_tokens_at_once_where_the_cache_is_too_small(engine, blocks):
    """A preempted request loses what was under way, which the others' steps go on without."""
    seen = []
    for scheduler in (None, ThreeAtOnce, ManyAtOnce):
        with engine(scheduler, blocks=blocks) as llm:
            seen.append(collect(llm, prompts_of(12), params_of(12, ignore_eos=True)))
            if scheduler:
                assert core_of(llm).scheduler._preemptions > 0
                assert len(core_of(llm).scheduler.counts) > 1
            left_behind(llm)
    assert_alike(seen[1], seen[0])
    assert_alike(seen[2], seen[0])


@pytest.mark.parametrize("scheduler", [ThreeAtOnce, ManyAtOnce])
def test_requests_come_and_go_between_steps_of_several_tokens(engine, scheduler):
    """Some arrive while others decode, and some are aborted: all that stay get the tokens that they get alone."""
    with engine(scheduler, places=6) as llm:
        params = params_of(12, ignore_eos=True, max_tokens=60)
        stream = GivenParams(llm, params)
        requests = [Request(prompt_ids=p["prompt_token_ids"], seed=0, row=i) for i, p in enumerate(prompts_of(12))]
        waiting, completions, kept, steps = requests[:], {}, {}, 0
        with stream.open():
            while stream.busy or waiting:
                if waiting and steps % 2 == 0:
                    stream.add(waiting.pop(0))
                completions |= dict(stream.step(True)[0])
                steps += 1
                if steps in (7, 12):
                    key = min(set(range(12 - len(waiting))) - completions.keys() - kept.keys())
                    kept[key] = stream.sampled(key)
                    stream.abort(key)
        assert len(completions) == 10
        assert len(core_of(llm).scheduler.counts) > 1
        left_behind(llm)
        alone = collect(llm, prompts_of(12), params)
        assert_alike([completions[key] for key in sorted(completions)], [alone[key] for key in sorted(completions)])
        for key, part in kept.items():
            assert part.token_ids == alone[key].token_ids[: len(part.token_ids)]
            assert len(part.logprobs) == len(part.token_ids)


@pytest.mark.parametrize("broken", [3, 4])
def test_a_failed_step_of_several_tokens_leaves_a_usable_engine(engine, monkeypatch, broken):
    with engine(ThreeAtOnce) as llm:
        expected = collect(llm, prompts_of(6), params_of(6))
        llm.reset_prefix_cache()
        counts = losing_the_device(llm, monkeypatch, broken)
        with pytest.raises(RuntimeError, match="a lost device"):
            collect(llm, prompts_of(6), params_of(6))
        assert counts[-1] > 1
        assert not llm.llm_engine.has_unfinished_requests()
        llm.reset_prefix_cache()
        assert_alike(collect(llm, prompts_of(6), params_of(6)), expected)
        left_behind(llm)
