"""Two engines in actors, held against one in the trainer: the same tokens, whoever samples and whoever dies."""

import copy
import os
import random
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from trlx_hybrid import HybridConfig
from trlx_hybrid.contract.types import Request, Sampling
from trlx_hybrid.errors import EngineError, SyncError
from trlx_hybrid.testing.models import tiny_model

sys.path.insert(0, str(Path(__file__).parent))
from remote_training import STEPS, Trained, gone, pids, requests_of, tokens

GREEDY = Sampling(max_tokens=16, temperature=0.0)
TRUNCATED = {"top_k": 40, "top_p": 0.9}
"""What both runs sample with; of 92 ids."""


@pytest.fixture(scope="module")
def local(session_cluster, tmp_path_factory):
    """First: an engine that is built in this process ends every other trainer's."""
    trained = Trained(tmp_path_factory.mktemp("local"), HybridConfig(engine="vllm"), **TRUNCATED)
    with trained.session.rollout_phase(training=False):
        trained.greedy = tokens(trained.session.live_engine.generate(requests_of(12), GREEDY))
    trained.session.close()
    return trained


@pytest.fixture(scope="module")
def remote(local, tmp_path_factory):
    options = {"replicas": 2, "restarts": 0}  # a replacement takes as long to start as these two
    hybrid = HybridConfig(engine="remote", engine_options=options)
    trained = Trained(tmp_path_factory.mktemp("remote"), hybrid, **TRUNCATED)
    yield trained
    started = pids(trained.session.live_engine)
    trained.session.close()
    gone(started)


@pytest.fixture
def engine(remote):
    """With the trained weights, in a rollout."""
    with remote.session.rollout_phase(training=False):
        yield remote.session.live_engine


def test_training_is_that_of_the_engine_inside(remote, local):
    assert remote.session.weights.name == "transfer"
    assert remote.completions == local.completions
    assert remote.rewards == local.rewards
    assert len(set(remote.rewards)) > 4
    assert remote.losses == pytest.approx(local.losses, abs=1e-5)
    assert len(remote.losses) == STEPS
    untrained = tiny_model()
    for (name, mine), theirs in zip(remote.trainer.model.named_parameters(), local.trainer.model.parameters()):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=0.0, msg=name)
        if name.endswith("proj.weight"):
            assert (theirs - untrained.get_parameter(name)).abs().max() > 1e-4, name


def test_greedy_tokens_are_those_of_the_engine_inside(engine, local):
    assert tokens(engine.generate(requests_of(12), GREEDY)) == local.greedy
    assert len({tuple(ids) for ids, _ in local.greedy}) > 6


def test_log_probs_are_the_policys(remote, engine):
    sampling = Sampling(max_tokens=16, temperature=0.7, logprobs=0)
    requests = requests_of(6)
    for request, completion in zip(requests, engine.generate(requests, sampling), strict=True):
        expected = remote.session.policy.log_probs(request.prompt_ids, completion.token_ids, temperature=0.7)
        assert [p[0] for p in completion.logprobs] == pytest.approx(expected.tolist(), abs=1e-5)
        assert [ids[0] for ids in completion.logprob_token_ids] == completion.token_ids


def test_the_trainer_scores_over_the_ids_that_remote_engines_kept(remote, local):
    """Over all ids, the ratio of these rows was 5e-6."""
    logs = [[log for log in run.trainer.state.log_history if "loss" in log] for run in (remote, local)]
    for mine, theirs in zip(*logs, strict=True):
        assert mine["sampling/importance_sampling_ratio/min"] == pytest.approx(1, abs=1e-3)
        assert mine["sampling/sampling_logp_difference/max"] < 1e-4
        assert mine["ratio/truncation"] == pytest.approx(theirs["ratio/truncation"], abs=1e-5)
        assert mine["ratio/truncation"] < -0.1


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 20},
        {"top_p": 0.8, "temperature": 0.7},
        {"min_p": 0.3},
        {"regex": "[0-9a-f]{3,9}"},
        {"extra": {"min_tokens": 6, "logit_bias": dict.fromkeys(range(20, 60), -100.0)}},
        {"top_k": 30, "extra": {"stop": ["7", "e"]}},
    ],
    ids=lambda settings: ", ".join(settings),
)
def test_completions_name_the_ids_that_their_tokens_were_sampled_from(remote, engine, settings):
    sampling, requests = Sampling(max_tokens=10, logprobs=0, **settings), requests_of(8)
    model = copy.deepcopy(remote.trainer.model).double()
    for request, completion in zip(requests, engine.generate(requests, sampling), strict=True):
        ids, start = request.prompt_ids + completion.token_ids, len(request.prompt_ids)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0, start - 1 : -1] / sampling.temperature
        assert len(completion.support) == len(completion.token_ids)
        for token, (sampled, row) in enumerate(zip(completion.token_ids, logits, strict=True)):
            kept = torch.tensor(completion.support.ids(token))
            assert len(kept) < len(row)
            exact = row[sampled] - row[kept].logsumexp(0)
            assert completion.logprobs[token][0] == pytest.approx(float(exact), abs=1e-4)


def test_every_engine_holds_the_policys_bits(remote, engine):
    weights = remote.session.weights
    names = remote.session.policy.checkpoint_names()
    assert weights.check(full=True) == len(names)
    assert 0 < weights.check(full=False) < len(names)
    with torch.no_grad():
        remote.trainer.model.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-7
    try:
        with pytest.raises(SyncError, match=r"layers\.1\.mlp\.up_proj\.weight"):
            weights.check(full=True)
    finally:
        with torch.no_grad():
            remote.trainer.model.model.layers[1].mlp.up_proj.weight[3, 5] -= 1e-7
        remote.session.weights_changed()


def test_order_and_company_do_not_matter(engine):
    sampling = Sampling(max_tokens=16, logprobs=0)
    requests = requests_of(12)
    expected = tokens(engine.generate(requests, sampling))
    shuffled = random.Random(0).sample(range(12), 12)
    found = tokens(engine.generate([requests[i] for i in shuffled], sampling))
    assert found == [expected[i] for i in shuffled]
    assert tokens(engine.generate(requests[4:5], sampling)) == expected[4:5]


def test_a_stream_takes_requests_as_they_come_and_forgets_those_aborted(engine):
    sampling = Sampling(max_tokens=16, logprobs=None)
    requests = requests_of(8)
    expected = tokens(engine.generate(requests, sampling))
    found = {}
    with engine.stream(sampling) as stream:
        assert not stream.shared
        assert stream.step(True) == ([], True)
        keys = {stream.add(request): i for i, request in enumerate(requests[:5])}
        dropped = next(key for key, i in keys.items() if i == 1)
        stream.step(True)
        stream.abort(dropped)
        stream.abort(dropped)
        late = False
        while stream.busy:
            finished, more = stream.step(True)
            assert more
            for key, completion in finished:
                found[keys[key]] = completion
            if finished and not late:
                late = True
                keys |= {stream.add(request): 5 + i for i, request in enumerate(requests[5:])}
        assert stream.step(False) == ([], False)
    assert sorted(found) == [0, 2, 3, 4, 5, 6, 7]
    assert [tokens([found[i]])[0] for i in sorted(found)] == [expected[i] for i in sorted(found)]


def test_interrupted_requests_return_what_they_have_sampled(engine):
    """Two engines sample 8 requests at a time each. So when the first has ended, some are running and some wait."""
    sampling = Sampling(max_tokens=40, logprobs=0, extra={"ignore_eos": True})
    requests = [replace(request, max_tokens=8 + number % 32) for number, request in enumerate(requests_of(64))]
    whole = engine.generate(requests, sampling)
    with engine.stream(sampling) as stream:
        keys = [stream.add(request) for request in requests]
        found = {}
        while not found:
            found.update(stream.step(True)[0])
        found |= {key: stream.sampled(key) for key in keys if key not in found}
        assert not stream.busy
    states = set()
    for key, request, expected in zip(keys, requests, whole, strict=True):
        completion = found[key]
        tokens = len(completion.token_ids)
        over = completion.finish_reason is not None
        states.add("over" if over else "running" if tokens else "waiting")
        assert over == (tokens == request.max_tokens)
        assert completion.token_ids == expected.token_ids[:tokens]
        for mine, theirs in zip(completion.logprobs, expected.logprobs[:tokens], strict=True):
            assert mine == pytest.approx(theirs, abs=1e-5)
    assert states == {"over", "running", "waiting"}


def test_requests_that_no_engine_has_begun_are_interrupted(engine):
    with engine.stream(Sampling(max_tokens=40, logprobs=0)) as stream:
        sent = stream.add(requests_of(1)[0])
        stream.advance(0.0)
        unsent = stream.add(requests_of(1)[0])
        assert stream.sampled(unsent).token_ids == []
        assert len(stream.sampled(sent).token_ids) < 40


def test_a_request_that_cannot_be_served_is_an_error_and_the_engine_lives_on(engine):
    with pytest.raises(EngineError, match=r"engine \d .*refused a request: .*(length|token|long)"):
        engine.generate([Request(prompt_ids=[5] * 80, seed=0)], Sampling(max_tokens=4))
    assert len(engine.generate(requests_of(2), Sampling(max_tokens=4))) == 2


def test_conversations_on_their_own_clocks(engine):
    """The multi-turn plugin's loop over a stream of two engines: later turns extend earlier ones."""
    from trlx_hybrid_multiturn.loop import Generate, Loop

    class Silent:
        def stepped(self, seconds, sampling, finished): ...

        def moved(self, done, sampling, calling): ...

    def trajectory(row, turns, heard):
        async def talk():
            prompt = [5 + row, 20, 30]
            for turn in range(turns):
                request = Request(prompt_ids=list(prompt), seed=100 * row + turn, row=row, turn=turn, max_tokens=6)
                completion = await Generate(request)
                heard.append((turn, completion.token_ids))
                prompt += [*completion.token_ids, 40 + turn]

        return talk()

    sampling = Sampling(max_tokens=12, logprobs=0)
    heard = [[] for _ in range(6)]
    with engine.stream(sampling) as stream:
        Loop(stream, Silent(), width=4).run([trajectory(row, 1 + row % 3, heard[row]) for row in range(6)])
    for row, turns in enumerate(heard):
        assert len(turns) == 1 + row % 3
        prompt = [5 + row, 20, 30]
        for turn, ids in turns:
            request = Request(prompt_ids=list(prompt), seed=100 * row + turn, row=row, turn=turn, max_tokens=6)
            assert engine.generate([request], sampling)[0].token_ids == ids
            prompt += [*ids, 40 + turn]


def test_nothing_is_lost_with_an_engine_that_is_killed(remote, capfd):
    """Last: afterwards one engine is left."""
    session, sampling = remote.session, Sampling(max_tokens=40, logprobs=0, extra={"ignore_eos": True})
    engine, requests = session.live_engine, requests_of(24)
    with session.rollout_phase(training=False):
        expected = tokens(engine.generate(requests, sampling))
        _, second = engine.servers
        victims = pids(engine)[0]
        assert len(victims) >= 2  # the actor and vLLM's engine core
        with engine.stream(sampling) as stream:
            keys = [stream.add(request) for request in requests]
            found = dict(stream.step(True)[0])
            os.kill(victims[0], signal.SIGKILL)
            while stream.busy:
                found.update(stream.step(True)[0])
        assert tokens([found[key] for key in keys]) == expected
        assert engine.servers == (second,)
    gone([victims])
    assert "engine 0 (node" in capfd.readouterr().err
    session.weights_changed()
    with session.rollout_phase(training=False):
        assert engine.servers == (second,)
        assert session.weights.check(full=True) == len(session.policy.checkpoint_names())
        assert tokens(engine.generate(requests, sampling)) == expected


def test_requests_of_a_dead_engine_have_sampled_nothing(remote):
    """After the test before it: no engine is left."""
    session, sampling = remote.session, Sampling(max_tokens=40, logprobs=0, extra={"ignore_eos": True})
    engine = session.live_engine
    with session.rollout_phase(training=False), engine.stream(sampling) as stream:
        keys = [stream.add(request) for request in requests_of(24)]
        stream.advance(0.0)
        victims = pids(engine)
        os.kill(victims[0][0], signal.SIGKILL)
        tokens_of = [len(stream.sampled(key).token_ids) for key in keys]
    gone(victims)
    assert engine.servers == ()
    assert set(tokens_of) <= {0, 40}  # some may have come to their end before
    assert 0 in tokens_of
