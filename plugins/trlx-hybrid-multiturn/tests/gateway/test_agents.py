"""Agents with OpenAI's official client, answered by the real engine in the trainer."""

import asyncio
import itertools
import json
import shlex
import sys
import threading
import time
import uuid

import psutil
import pytest
import torch
from anthropic import AsyncAnthropic
from datasets import Dataset
from openai import APIStatusError, BadRequestError, OpenAI
from transformers import TrainerCallback
from trlx_hybrid.errors import ConfigError
from trlx_hybrid.testing.chat import chat_tokenizer, chatty_model
from trlx_hybrid.testing.models import tiny_model
from trlx_hybrid_multiturn import Step, episodes
from trlx_hybrid_multiturn.gateway import agents, boxes, command, sandbox
from trlx_hybrid_multiturn.gateway.agent_rollout import Agents
from trlx_hybrid_multiturn.gateway.episode import AgentEpisode
from trlx_hybrid_multiturn.gateway.program import CommandError
from trlx_hybrid_multiturn.loop import CallTool, Outcome
from trlx_hybrid_multiturn.progress import Progress

from tests.support.agents import CLIENT, PARAMETERS, QUESTIONS, TOOLS, TURNS, adds, rewrites
from tests.support.branches import branches_of

MESSAGES = AsyncAnthropic(base_url="http://localhost", api_key="none")


def test_what_is_trained_is_what_was_sampled(train):
    done, batches = train(adds, max_steps=1)
    (batch,) = batches
    model = chatty_model(chat_tokenizer(TURNS), TURNS).eval()
    for trajectory in batch:
        mask = trajectory.loss_mask
        assert len(mask) == len(trajectory.completion_ids) == len(trajectory.logprobs)
        ids = torch.tensor([trajectory.prompt_ids + trajectory.completion_ids])
        with torch.no_grad():
            scored = model(ids).logits[0, len(trajectory.prompt_ids) - 1 : -1].log_softmax(-1)
        for token, sampled in enumerate(mask):
            wanted = scored[token, trajectory.completion_ids[token]].item() * sampled
            assert trajectory.logprobs[token] == pytest.approx(wanted, abs=1e-5)
    rendered = [
        chat_tokenizer(TURNS).apply_chat_template(prompt, tools=TOOLS, add_generation_prompt=True, return_dict=False)
        for prompt in QUESTIONS
    ]
    assert all(trajectory.prompt_ids in rendered for trajectory in batch)
    assert done.trainer.state.log_history[0]["hybrid/turns/mean"] > 1
    assert any(0 in trajectory.loss_mask for trajectory in batch)
    assert done.trainer.state.log_history[0]["hybrid/trajectories/failed"] == 0


async def adds_by_messages(base_url, row):
    """As `adds`, with Anthropic's client."""
    client, said = MESSAGES.with_options(base_url=base_url.removesuffix("/v1")), list(row["prompt"])
    tools = [{"name": "add", "description": "Add.", "input_schema": PARAMETERS}]
    for turn in range(3):
        request = {"model": "any", "messages": said, "tools": tools, "max_tokens": 100}
        if turn == 1:
            async with client.messages.stream(**request) as stream:
                done = await stream.get_final_message()
        else:
            done = await client.messages.create(**request)
        counted = await client.messages.count_tokens(**{k: v for k, v in request.items() if k != "max_tokens"})
        assert counted.input_tokens > 5
        said.append({"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in done.content]})
        calls = [block for block in done.content if block.type == "tool_use"]
        if not calls:
            break
        results = [{"type": "tool_result", "tool_use_id": c.id, "content": str(c.input["a"] + 2)} for c in calls]
        said.append({"role": "user", "content": results})
    return float(len(said))


async def adds_by_responses(base_url, row):
    """As `adds`, with OpenAI's responses."""
    client, said = CLIENT.with_options(base_url=base_url), list(row["prompt"])
    tools = [{"type": "function", **TOOLS[0]["function"], "strict": True}]
    for turn in range(3):
        request = {"model": "any", "input": said, "tools": tools, "max_output_tokens": 100, "store": False}
        if turn == 1:
            async with client.responses.stream(**request) as stream:
                done = await stream.get_final_response()
        else:
            done = await client.responses.create(**request)
        said += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in done.output]
        calls = [item for item in done.output if item.type == "function_call"]
        if not calls:
            break
        for call in calls:
            output = str(json.loads(call.arguments)["a"] + 2)
            said.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
    return float(len(said))


def test_all_apis_sample_the_same(train):
    _, mine = train(adds, max_steps=1)
    for agent in (adds_by_messages, adds_by_responses):
        done, others = train(agent, max_steps=1)
        log = done.trainer.state.log_history[0]
        assert (log["hybrid/trajectories/failed"], log["hybrid/agents/branches"]) == (0, 1)
        assert log["hybrid/turns/max"] == 3
        for one, other in zip(*mine, *others, strict=True):
            assert (one.prompt_ids, one.completion_ids) == (other.prompt_ids, other.completion_ids)
            assert one.loss_mask == other.loss_mask


class Answers:
    """The environment that says what the agent `asks_twice` says."""

    def reset(self, row):
        self.turn = 0

    def step(self, completion):
        self.turn += 1
        return Step(observation="go on", done=self.turn == 2, reward=float(len(completion)))


async def asks_twice(base_url, row):
    client, messages, reward = CLIENT.with_options(base_url=base_url), list(row["prompt"]), 0.0
    for _ in range(2):
        done = await client.chat.completions.create(model="any", messages=messages, temperature=0.1, seed=3)
        text = done.choices[0].message.content
        reward += len(text)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
    return reward


def test_tokens_masks_and_log_probs_are_those_of_an_environment(train):
    """Log-probs, too, are the same bits where the same requests are sampled together: one at a time."""
    given = {"max_steps": 1, "max_completion_length": 400, "options": {"max_trajectories": 1}}
    _, mine = train(asks_twice, **given)
    _, others = train(episodes(Answers), **given)
    for one, other in zip(*mine, *others, strict=True):
        assert (one.prompt_ids, one.completion_ids) == (other.prompt_ids, other.completion_ids)
        assert one.loss_mask == other.loss_mask
        assert one.logprobs == other.logprobs
        assert one.reward == other.reward


@pytest.mark.parametrize("cut", [{"stop": ["egg", '"arguments"']}, {"max_tokens": 1}], ids=["stop", "max_tokens"])
def test_a_message_that_was_cut_goes_on(train, cut):
    """The end of the turn is put behind it, and is not trained. What a `stop` drops is sampled, but not trained."""
    heard = []

    async def agent(base_url, row):
        client, messages = CLIENT.with_options(base_url=base_url), list(row["prompt"])
        for _ in range(2):
            done = await client.chat.completions.create(model="any", messages=messages, **cut)
            choice = done.choices[0]
            heard.append((choice.message.content, choice.finish_reason, done.usage.completion_tokens))
            messages += [choice.message.model_dump(exclude_none=True), {"role": "user", "content": "go on"}]
        return 1.0

    done, batches = train(agent, max_steps=1, max_completion_length=400)
    assert done.trainer.state.log_history[0]["hybrid/trajectories/failed"] == 0
    if "stop" in cut:
        assert ('<tool_call>\n{"name": "add", ', "stop", 1) in heard
    else:
        assert {(reason, tokens) for _, reason, tokens in heard} == {("length", 1)}
    tokenizer = chat_tokenizer(TURNS)
    for trajectory in batches[0]:
        text = tokenizer.decode(trajectory.prompt_ids + trajectory.completion_ids)
        ends = [i for i, token in enumerate(trajectory.completion_ids) if token == tokenizer.eos_token_id]
        assert "<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n" in text
        if "max_tokens" in cut:
            assert [trajectory.loss_mask[end] for end in ends] == [0, 0]
            assert sum(trajectory.loss_mask) == 2


def test_what_the_run_overrides_is_said_once(train, caplog):
    train(asks_twice, max_steps=1, max_completion_length=400)
    said = [record.message for record in caplog.records if "asks for" in record.message]
    assert said == [
        "An agent asks for seed=3. The run samples with its own settings (seed=42), with which log-probs are computed. "
        "Set it in the trainer's arguments.",
        "An agent asks for temperature=0.1. The run samples with its own settings (temperature=1.0), with which "
        "log-probs are computed. Set it in the trainer's arguments.",
    ]


def test_functions_are_agents_and_their_clients_may_send_a_request_again(train):
    """A client that asks the same thing twice gets two samples; one that sends a request again gets its answer."""
    again = []

    def agent(base_url, row):
        client = OpenAI(base_url=base_url, api_key="none")
        asked = {"model": "any", "messages": row["prompt"]}
        first = client.chat.completions.create(**asked)
        retried = client.chat.completions.create(**asked, extra_headers={"x-stainless-retry-count": "1"})
        client.chat.completions.create(**asked)
        again.append(first.choices[0].message.content == retried.choices[0].message.content)
        return 1.0

    done, _ = train(agent, max_steps=1, max_completion_length=400)
    assert again == [True] * 8
    assert done.trainer.state.log_history[0]["hybrid/turns/mean"] == 2
    assert done.trainer.state.log_history[0]["hybrid/agents/branches"] == 2


@pytest.mark.parametrize("scoring", ["padded", "packed"])
def test_each_branch_is_trained_as_it_was_sampled(train, scoring):
    """The engine's log-probs are those of the model that saw the branch alone, and so are the trainer's."""
    given = {"max_steps": 2, "max_completion_length": 800, "optim": "sgd", "per_device_train_batch_size": 4}
    done, batches = train(rewrites, scoring=scoring, gradient_accumulation_steps=2, **given)
    assert all(len(branches_of(trajectory)) == 3 for trajectory in batches[0])
    logs = [log for log in done.trainer.state.log_history if "loss" in log]
    assert [log["hybrid/agents/branches"] for log in logs] == [3.0, 3.0]
    assert max(log["sampling/sampling_logp_difference/max"] for log in logs) < 1e-4
    assert all(log["hybrid/trajectories/failed"] == 0 for log in logs)


async def asks_helpers(base_url, row):
    """Asks several helpers at a time, and goes on from the first message in two ways at a time."""
    client = CLIENT.with_options(base_url=base_url)

    async def ask(*messages):
        done = await client.chat.completions.create(model="any", messages=messages)
        return done.choices[0].message.model_dump(exclude_none=True)

    prompt = row["prompt"][0]
    first = await ask(prompt)
    ways = [ask(prompt, first, {"role": "user", "content": way}) for way in ("more", "less")]
    helped = [ask({"role": "system", "content": f"{number}"}, prompt) for number in range(3)]
    return float(len(await asyncio.gather(*ways, *helped)))


def test_requests_of_one_episode_are_sampled_together_each_as_if_alone(train, monkeypatch):
    sampling = []
    monkeypatch.setattr(Progress, "stepped", lambda self, seconds, open, finished: sampling.append(open))
    given = {"max_steps": 2, "max_completion_length": 1000, "optim": "sgd"}
    done, batches = train(asks_helpers, options={"progress": False}, **given)
    assert max(sampling) > len(batches[0])  # more than one of each episode
    logs = [log for log in done.trainer.state.log_history if "loss" in log]
    assert [log["hybrid/agents/branches"] for log in logs] == [5.0, 5.0]
    assert all(log["hybrid/trajectories/failed"] == 0 for log in logs)
    assert max(log["sampling/sampling_logp_difference/max"] for log in logs) < 1e-4
    for trajectory in batches[0]:
        (first, sampled), *others = branches_of(trajectory)
        said = first[: sampled[0] + next(i for i, (a, b) in enumerate(itertools.pairwise(sampled), 1) if b > a + 1)]
        assert sum(branch[: len(said)] == said for branch, _ in others) == 1  # the other way: the very same tokens


def test_one_answer_of_several_is_continued_from_its_tokens(train):
    heard = []

    async def agent(base_url, row):
        client, messages = CLIENT.with_options(base_url=base_url), list(row["prompt"])
        asked = {"model": "any", "n": 3, "logprobs": True}
        done = await client.chat.completions.create(**asked, messages=messages)
        heard.append([[token.logprob for token in choice.logprobs.content] for choice in done.choices])
        assert done.usage.completion_tokens == sum(map(len, heard[-1]))
        said = [choice.message.content for choice in done.choices]
        chosen = max(range(3), key=lambda choice: len(said[choice]))
        messages += [{"role": "assistant", "content": said[chosen]}, {"role": "user", "content": "go on"}]
        await client.chat.completions.create(model="any", messages=messages)
        return float(len(set(said)))

    done, batches = train(agent, max_steps=1, max_completion_length=600)
    assert done.trainer.state.log_history[0]["hybrid/trajectories/failed"] == 0
    assert max(trajectory.reward for trajectory in batches[0]) > 1  # each is a sample of its own
    for trajectory in batches[0]:
        sampled = [lp for lp, mask in zip(trajectory.logprobs, trajectory.loss_mask, strict=True) if mask]
        assert len(branches_of(trajectory)) == 3
        assert any(sampled[: len(choices[0])] == choices[0] for choices in heard)


def test_requests_at_one_time_share_the_room(train):
    """The last ones are cut, and nothing is sampled beyond `max_completion_length`."""
    reasons = []

    async def agent(base_url, row):
        client = CLIENT.with_options(base_url=base_url, max_retries=0)
        asked = [client.chat.completions.create(model="any", messages=row["prompt"]) for _ in range(8)]
        for done in await asyncio.gather(*asked, return_exceptions=True):
            reasons.append("refused" if isinstance(done, BadRequestError) else done.choices[0].finish_reason)
        return 1.0

    done, batches = train(agent, max_steps=1, max_completion_length=60)
    assert done.trainer.state.log_history[0]["hybrid/trajectories/failed"] == 0
    assert all(len(trajectory.completion_ids) <= 60 for trajectory in batches[0])
    assert {"stop", "refused"} <= {*reasons} <= {"stop", "refused", "length"}


def test_a_request_that_its_agent_did_not_wait_for_is_not_trained(train, monkeypatch):
    """It is still being answered when the agent ends."""
    answered = AgentEpisode._answered

    async def never(self, turn):
        if len(turn.asked.messages) == 2:
            await CallTool("never", lambda report: lambda reason: None)
        await answered(self, turn)

    async def agent(base_url, row):
        client = CLIENT.with_options(base_url=base_url)
        left = asyncio.ensure_future(client.chat.completions.create(model="any", messages=[row["prompt"][0]] * 2))
        await client.chat.completions.create(model="any", messages=row["prompt"], max_tokens=1)
        await asyncio.sleep(0.2)
        left.cancel()
        return 1.0

    monkeypatch.setattr(AgentEpisode, "_answered", never)
    done, batches = train(agent, max_steps=1, max_completion_length=400)
    assert done.trainer.state.log_history[0]["hybrid/trajectories/failed"] == 0
    assert [sum(trajectory.loss_mask) for trajectory in batches[0]] == [1] * 8
    assert done.trainer.state.log_history[0]["hybrid/agents/branches"] == 1


@pytest.mark.parametrize("between", [0.0, 0.3], ids=["together", "one after the other"])
def test_what_an_agent_did_not_hear_is_not_trained(train, monkeypatch, between):
    """It gives up a request, goes on without it, and gives up another at its end; the model answers both later."""
    answered, held, given_up, told = AgentEpisode._answered, [], [], asyncio.Event()

    async def later(self, turn):
        if len(turn.asked.messages) > 1:  # whichever request arrives first
            await CallTool("later", lambda report: held.append(report) or (lambda reason: None))
        await answered(self, turn)

    async def agent(base_url, row):
        client, messages = CLIENT.with_options(base_url=base_url, max_retries=0), list(row["prompt"])
        gone = asyncio.ensure_future(client.chat.completions.create(model="any", messages=[*messages] * 2))
        await asyncio.sleep(between)
        done = await client.chat.completions.create(model="any", messages=messages, max_tokens=1)
        gone.cancel()
        messages += [done.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "and?"}]
        left = asyncio.ensure_future(client.chat.completions.create(model="any", messages=messages))
        await asyncio.sleep(0.5)
        left.cancel()
        given_up.append(row)
        if len(given_up) == 8:
            await asyncio.sleep(1.0)  # until the server knows
            for report in held:
                report(Outcome())
            await asyncio.sleep(1.0)  # until the model has answered all
            told.set()
        await told.wait()
        return 1.0

    monkeypatch.setattr(AgentEpisode, "_answered", later)
    done, batches = train(agent, max_steps=1, max_completion_length=400)
    assert held
    assert done.trainer.state.log_history[0]["hybrid/trajectories/failed"] == 0
    assert [sum(trajectory.loss_mask) for trajectory in batches[0]] == [1] * 8
    assert [len(trajectory.completion_ids) for trajectory in batches[0]] == [1] * 8


def test_of_several_answers_those_are_given_that_have_room(train):
    told = []

    async def agent(base_url, row):
        client = CLIENT.with_options(base_url=base_url, max_retries=0)
        done = await client.chat.completions.create(model="any", messages=row["prompt"], n=4, max_tokens=1)
        told.append(len(done.choices))
        with pytest.raises(BadRequestError, match="no further turns"):
            await client.chat.completions.create(model="any", messages=row["prompt"], n=2)
        return 1.0

    _, batches = train(agent, max_steps=1, max_completion_length=400, options={"max_turns": 3})
    assert told == [3] * 8
    assert [sum(trajectory.loss_mask) for trajectory in batches[0]] == [3] * 8


def test_equal_requests_that_are_open_when_the_time_is_over_are_all_refused(train, monkeypatch):
    ended, answered = [], AgentEpisode._answered

    def ask(base_url, messages):
        client = OpenAI(base_url=base_url, api_key="none", max_retries=0)
        try:
            client.chat.completions.create(model="any", messages=messages)
        except APIStatusError as error:
            ended.append(error.status_code)

    def agent(base_url, row):
        ask(base_url, row["prompt"])
        more = [*row["prompt"], {"role": "user", "content": "more"}]
        threads = [threading.Thread(target=ask, args=(base_url, more), daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return 1.0

    async def never_the_second(self, turn):
        if turn.place.branch:
            await CallTool("never", lambda report: lambda reason: None)
        await answered(self, turn)

    monkeypatch.setattr(AgentEpisode, "_answered", never_the_second)
    given = {"max_steps": 1, "per_device_train_batch_size": 4, "max_completion_length": 400}
    done, _ = train(agent, options={"max_seconds": 10.0}, **given)
    assert done.trainer.state.log_history[0]["hybrid/trajectories/failed"] == 0
    until = time.monotonic() + 30
    while len(ended) < 8 and time.monotonic() < until:
        time.sleep(0.05)
    assert ended == [410] * 8


@pytest.mark.parametrize("prompt", [[1, 10**6], [[5, 10**6]]], ids=["ids", "a list of ids"])
def test_a_token_that_does_not_exist_is_refused_and_the_run_goes_on(train, prompt):
    refused = []

    async def agent(base_url, row):
        client = CLIENT.with_options(base_url=base_url)
        try:
            await client.completions.create(model="any", prompt=prompt)
        except BadRequestError as error:
            refused.append(error.message)
        await client.completions.create(model="any", prompt=[1, 5] * 50)  # the row's prompt, of any length
        return 1.0

    done, batches = train(agent, max_steps=1, max_completion_length=60)
    assert done.trainer.state.log_history[0]["hybrid/trajectories/failed"] == 0
    assert sum("there is no token 1000000" in message for message in refused) == 8
    assert all(trajectory.prompt_ids == [1, 5] * 50 for trajectory in batches[0])


async def forks(base_url, row):
    """Eight turns; after the fourth, another continuation of four turns."""
    client = CLIENT.with_options(base_url=base_url)

    async def talk(messages, turns):
        for turn in range(turns):
            done = await client.chat.completions.create(model="any", messages=messages, max_tokens=6)
            messages.append(done.choices[0].message.model_dump(exclude_none=True))
            messages.append({"role": "user", "content": f"{turn} and on"})
        return messages

    first = await talk(list(row["prompt"]), 4)
    await asyncio.gather(talk([*first], 4), talk([*first[:-1], {"role": "user", "content": "another way"}], 4))
    return float(len(first))


class Computed(TrainerCallback):
    """Counts the tokens that the first linear layer computes in passes with gradients, and these passes in each
    step."""

    def __init__(self):
        self.tokens, self.passes = 0, []

    def on_train_begin(self, args, state, control, model, **kwargs):
        def count(module, given, out):
            if torch.is_grad_enabled():
                self.tokens += given[0].shape[:-1].numel()
                self.passes[-1] += 1

        model.model.layers[0].self_attn.q_proj.register_forward_hook(count)

    def on_step_begin(self, *args, **kwargs):
        self.passes.append(0)


def test_what_several_branches_begin_with_is_computed_once(train):
    """Counted by another way: the different beginnings of all branches, and each branch's own copy of the token before
    its first sampled one."""
    counted = Computed()
    given = {"max_completion_length": 3000, "vllm_max_model_length": 4096, "gradient_checkpointing": False}
    model = tiny_model(vocab_size=len(chat_tokenizer(TURNS)), max_position_embeddings=4096)  # rounds less
    done, batches = train(forks, max_steps=1, callbacks=[counted], model=model, **given)
    log = done.trainer.state.log_history[0]
    assert (log["hybrid/agents/branches"], log["hybrid/trajectories/failed"]) == (2, 0)
    assert log["sampling/sampling_logp_difference/max"] < 1e-4
    branches = []
    for trajectory in batches[0]:
        ids = trajectory.completion_ids
        ((begin, tokens),) = done.trainer.rollout_func.branches(trajectory.prompt_ids, ids)
        branches += [(trajectory.prompt_ids, ids[:begin]), (ids[begin : begin + tokens], ids[begin + tokens :])]
    held, computed = set(), 0
    for prompt, completion in sorted(branches, key=lambda branch: len(branch[0])):
        whole = (*prompt, *completion)
        own = [whole[:end] for end in range(1, len(whole) + 1)]
        computed += sum(end >= len(prompt) or beginning not in held for end, beginning in enumerate(own, 1))
        held.update(own)
    assert counted.tokens == computed < 0.75 * sum(len(prompt) + len(completion) for prompt, completion in branches)


def test_micro_batches_with_branches_share_a_pass(train):
    """Each token is computed once for all rows of a step, and they are trained as they are apart."""
    given = {"max_completion_length": 800, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    found = {}
    for joined in (False, True):
        scoring, counted = {"scoring": "packed", "scoring_options": {"joined": joined}}, Computed()
        hybrid = {"engine": "vllm", "rollout_options": {"progress": False}} | scoring
        done, _ = train(rewrites, max_steps=3, optim="sgd", hybrid=hybrid, callbacks=[counted], **given)
        logs = [log for log in done.trainer.state.log_history if "loss" in log]
        assert [log["hybrid/agents/branches"] for log in logs] == [3.0] * 3
        found[joined] = counted, logs, done.weights()
    (apart, logs, weights), (ours, same_logs, same_weights) = found[False], found[True]
    assert apart.passes[-1] >= 4
    assert ours.passes[-1] == 1
    assert ours.tokens < 0.8 * apart.tokens
    for name, weight in weights.items():
        torch.testing.assert_close(same_weights[name], weight, rtol=0, atol=1e-6)
    for log, same in zip(logs, same_logs, strict=True):
        assert (same["loss"], same["grad_norm"]) == pytest.approx((log["loss"], log["grad_norm"]), abs=1e-4, rel=1e-4)


class MaskedBranches(Agents):
    """Agents whose later branches are masked."""

    def __call__(self, prompts, trainer):
        rows = super().__call__(prompts, trainer)
        for mask, *ids in zip(rows["env_mask"], rows["prompt_ids"], rows["completion_ids"], strict=True):
            for at, _ in self.branches(*ids):
                mask[at:] = [0] * (len(mask) - at)
        return rows


async def asks_a_helper(base_url, row):
    """The reward is what a helper says that knows nothing of the first conversation."""
    client = CLIENT.with_options(base_url=base_url)
    short = {"model": "any", "max_tokens": 8}
    await client.chat.completions.create(**short, messages=row["prompt"])
    asked = [{"role": "system", "content": "help"}, row["prompt"][0]]
    helped = await client.chat.completions.create(**short, messages=asked)
    return float("plain" in helped.choices[0].message.content)


@pytest.mark.slow
@pytest.mark.parametrize("rollout", [Agents, MaskedBranches])
def test_a_helper_learns_what_is_rewarded_unless_its_branch_is_masked(train, rollout):
    given = {"max_steps": 8, "per_device_train_batch_size": 32, "learning_rate": 3e-3, "max_completion_length": 200}
    done, _ = train(rollout(asks_a_helper, None), **given)
    rewards = [log["reward"] for log in done.trainer.state.log_history if "loss" in log]
    assert rewards[0] < 0.3
    assert min(rewards[-3:]) > 0.9 if rollout is Agents else max(rewards[-3:]) < 0.3, rewards


def test_a_run_with_truncated_sampling_masks_an_episode_with_two_branches(train, caplog):
    refused = []

    async def agent(base_url, row):
        client, messages = CLIENT.with_options(base_url=base_url), list(row["prompt"])
        done = await client.chat.completions.create(model="any", messages=messages)
        if "???" in messages[0]["content"]:
            try:
                shorter = [{"role": "user", "content": "in short: " + done.choices[0].message.content}]
                await client.chat.completions.create(model="any", messages=shorter)
            except BadRequestError as error:
                refused.append(error.message)
        return 1.0

    done, batches = train(agent, options={"max_failed": 1.0}, top_k=5)
    failed = [log["hybrid/trajectories/failed"] for log in done.trainer.state.log_history[:-1]]
    assert 0 < sum(failed) == len(refused) < 16
    assert "one conversation for an episode" in refused[0]
    assert sum(not any(t.loss_mask) for batch in batches for t in batch) == sum(failed)
    assert "broke off" in caplog.text


@pytest.mark.parametrize(
    ("agent", "reason"),
    [
        (lambda base_url, row: 1.0, "the agent has not asked the model"),
        (lambda base_url, row: 1 / 0, "the agent raised ZeroDivisionError: division by zero"),
    ],
    ids=["asks nothing", "raises"],
)
def test_agents_that_fail_are_named(train, agent, reason):
    from trlx_hybrid_multiturn.multi_turn import TrajectoriesFailedError

    with pytest.raises(TrajectoriesFailedError, match=reason):
        train(agent)


def test_an_agent_that_never_ends_is_ended(train):
    cancelled = []

    async def agent(base_url, row):
        client = CLIENT.with_options(base_url=base_url)
        await client.chat.completions.create(model="any", messages=row["prompt"])
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            cancelled.append(base_url)
            raise

    done, batches = train(agent, max_steps=1, options={"max_seconds": 3.0})
    assert len(batches[0]) == 8
    assert done.trainer.state.log_history[0]["hybrid/trajectories/failed"] == 0  # what was said is kept
    late = threading.Event()
    for _ in range(100):
        if len(cancelled) == 8:
            break
        late.wait(0.05)
    assert len(cancelled) == 8
    with pytest.raises(APIStatusError, match="No episode is played"):
        OpenAI(base_url=cancelled[0], api_key="none", max_retries=0).models.list()


def test_a_conversation_without_room_gets_the_code_that_clients_know(train):
    codes = []

    async def agent(base_url, row):
        client, messages = CLIENT.with_options(base_url=base_url), list(row["prompt"])
        try:
            for _ in range(20):
                done = await client.chat.completions.create(model="any", messages=messages)
                messages += [{"role": "assistant", "content": done.choices[0].message.content}]
                messages += [{"role": "user", "content": "and then? " * 5}]
        except BadRequestError as error:
            codes.append(error.code)
        return 1.0

    done, batches = train(agent, max_steps=1)
    assert codes == ["context_length_exceeded"] * 8
    assert all(len(t.completion_ids) <= 150 for t in batches[0])
    assert done.trainer.state.log_history[0]["hybrid/trajectories/failed"] == 0


@pytest.mark.slow
def test_200_episodes_at_once(train):
    dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"{i}"}] for i in range(50)]})
    given = {"train_dataset": dataset, "per_device_train_batch_size": 200, "max_steps": 1, "max_completion_length": 400}
    done, batches = train(adds, **given)
    assert len(batches[0]) == 200
    assert done.trainer.state.log_history[0]["hybrid/trajectories/failed"] == 0


async def completes(base_url, row):
    """Goes on with a text, and with token ids, in two turns each; then with a text that ended at a stop."""
    client, text = CLIENT.with_options(base_url=base_url), "Question: " + row["prompt"][0]["content"]
    ids = None
    for _ in range(2):
        done = await client.completions.create(
            model="any", prompt=ids or text, max_tokens=4, extra_body={"return_token_ids": True}, logprobs=0
        )
        (choice,) = done.choices
        assert len(choice.token_ids) == len(choice.logprobs.tokens) == done.usage.completion_tokens <= 4
        ids = [*choice.prompt_token_ids, *choice.token_ids, 40]
    for turn in range(3):
        parts = await client.completions.create(
            model="any", prompt=text, max_tokens=30, stop=["a", "e"] if turn else None, stream=True
        )
        text += "".join([part.choices[0].text async for part in parts]) + " and"
    return float(len(text))


def test_texts_and_token_ids_are_continued_without_a_chat_template(train):
    """The ids of the first answer and the text that is asked again begin branches, and so does a text after a stop."""
    done, batches = train(completes, max_steps=1, max_completion_length=1000)
    log = done.trainer.state.log_history[0]
    assert (log["hybrid/trajectories/failed"], log["hybrid/turns/mean"]) == (0, 5)
    tokenizer, find = done.trainer.processing_class, done.trainer.rollout_func.branches
    for trajectory in batches[0]:
        ids = trajectory.completion_ids
        (first, tokens), *_ = begins = find(trajectory.prompt_ids, ids)
        assert ids[first : first + tokens] == [*trajectory.prompt_ids, *ids[:first], 40]  # the very same tokens
        for at, length in begins:
            model = chatty_model(chat_tokenizer(TURNS), TURNS).eval()
            end = min([place for place, _ in begins if place > at], default=len(ids))
            with torch.no_grad():
                scored = model(torch.tensor([ids[at:end]])).logits[0].log_softmax(-1)
            for place in range(at + length, end):
                if trajectory.loss_mask[place]:
                    wanted = scored[place - at - 1, ids[place]].item()
                    assert trajectory.logprobs[place] == pytest.approx(wanted, abs=1e-5)
    assert tokenizer.decode(batches[0][0].prompt_ids).startswith("Question: ")


PROGRAM = """
import json, os, sys
from openai import OpenAI
row = json.load(sys.stdin)
with OpenAI() as client:
    for _ in range(2):
        done = client.chat.completions.create(model="policy", messages=row["prompt"])
        row["prompt"] += [done.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "and?"}]
assert os.environ["ANTHROPIC_BASE_URL"] + "/v1" == os.environ["OPENAI_BASE_URL"] and not os.listdir()
open("mine", "w").close()
print(len(row["prompt"]), "ended" in os.environ["TOLD"])
"""


def test_a_program_is_an_agent(train):
    def reward(row, output):
        length, told = output.split()
        return int(length) - len(row["prompt"]) + 0.5 * (told == "True")

    agent = command([sys.executable, "-c", PROGRAM], reward=reward, environment={"TOLD": "it ended"})
    given = {"max_steps": 1, "per_device_train_batch_size": 4, "max_completion_length": 400}
    done, batches = train(agent, **given)
    log = done.trainer.state.log_history[0]
    assert (log["hybrid/trajectories/failed"], log["hybrid/turns/mean"], log["reward"]) == (0, 2, 4.5)
    assert all(any(trajectory.loss_mask) for trajectory in batches[0])


@pytest.mark.skipif(boxes._refusal() is not None, reason="needs the command bwrap")
@pytest.mark.parametrize("processes", [0, 1])
def test_a_program_in_a_sandbox_reaches_the_engine_and_nothing_else(train, tmp_path, processes):
    (tmp_path / "agent.py").write_text(PROGRAM.replace(" and not os.listdir()", ""))

    def box(base_url, row):
        return sandbox(tmp_path, base_url=base_url, environment={"TOLD": "it ended"})

    agent = command(["python", "agent.py"], reward=lambda row, output: float(len(output)), box=box)
    given = {"max_steps": 1, "per_device_train_batch_size": 4, "max_completion_length": 400}
    done, batches = train(agents(agent, processes=processes), **given)
    log = done.trainer.state.log_history[0]
    assert (log["hybrid/trajectories/failed"], log["hybrid/turns/mean"], log["reward"]) == (0, 2, 7.0)
    assert all(any(trajectory.loss_mask) for trajectory in batches[0])
    with pytest.raises(ConfigError, match="give the environment to the box"):
        command(["true"], environment={}, box=box)


def test_a_program_that_fails_says_why_and_one_that_never_ends_is_killed(tmp_path):
    said = "import sys; sys.exit('no model named policy')"
    with pytest.raises(CommandError, match="ended with exit code 1: no model named policy"):
        asyncio.run(command(lambda row: [sys.executable, "-c", said])("http://localhost/v1", {}))
    begun = tmp_path / "begun"
    mark = str(1000 + uuid.uuid4().int % 10**9)
    starts = f"import subprocess, sys; subprocess.Popen(['sleep', '{mark}']); open(sys.argv[1], 'w'); input()"
    agent = command(["bash", "-c", f"sleep 99 | {shlex.join([sys.executable, '-c', starts, str(begun)])}"])

    async def ended_early():
        task = asyncio.ensure_future(agent("http://localhost/v1", {}))
        while not begun.exists():
            await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(ended_early(), 60))
    until = time.monotonic() + 20
    while (left := _running(mark)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not left


def _running(mark):
    found = [process for process in psutil.process_iter(["cmdline"]) if mark in (process.info["cmdline"] or [])]
    return [process for process in found if process.status() != psutil.STATUS_ZOMBIE]
