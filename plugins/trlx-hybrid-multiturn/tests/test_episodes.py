"""Environments that are no tools, through TRL's `rollout_func`."""

import asyncio
import threading
import time
from typing import ClassVar

import pytest
import torch
import trlx_hybrid
from datasets import Dataset
from trlx_hybrid.errors import ConfigError
from trlx_hybrid.testing.chat import chat_tokenizer, chatty_model
from trlx_hybrid_multiturn import Step, episode_reward, episodes
from trlx_hybrid_multiturn.environment import refuse_prompts
from trlx_hybrid_multiturn.multi_turn import TrajectoriesFailedError

TURNS = ["left", "right", "forward", "a longer sentence"]
MULTI = {"engine": "vllm"}


class Maze:
    """Goes on for as many steps as the row says; pays for each."""

    threads: ClassVar[set] = set()
    closed = 0

    async def reset(self, row):
        self.row, self.said = row, []
        return f" door {row['door']}"

    async def step(self, completion):
        Maze.threads.add(threading.current_thread().name)
        await asyncio.sleep(0.001 * (self.row["door"] % 3))
        self.said.append(completion)
        return Step(observation=f"door {len(completion)}", done=len(self.said) > self.row["door"] % 4, reward=0.5)

    async def close(self):
        Maze.closed += 1


class SyncMaze(Maze):
    """The same without a coroutine."""

    def reset(self, row):
        self.row, self.said = row, []
        return f" door {row['door']}"

    def step(self, completion):
        Maze.threads.add(threading.current_thread().name)
        self.said.append(completion)
        return Step(observation=f"door {len(completion)}", done=len(self.said) > self.row["door"] % 4, reward=0.5)

    def close(self):
        Maze.closed += 1


class Seen:
    __name__ = "seen"

    def __init__(self):
        self.calls = []

    def __call__(self, prompts, completions, completion_ids, **columns):
        self.calls.append((prompts, completions, [list(ids) for ids in completion_ids], columns))
        return [None] * len(prompts)


@pytest.fixture
def play(run):
    def start(factory, *, template="qwen3", rows=8, prompts=None, max_turns=None, **given):
        batches = []

        class Recording(trlx_hybrid.GRPOTrainer):
            def _generate(self, prompts):
                batches.append(super()._generate(prompts))
                return batches[-1]

        tokenizer, seen = chat_tokenizer(TURNS, template), Seen()
        prompts = prompts or [[{"role": "user", "content": f"go {i * 7919 % 1000}"}] for i in range(rows)]
        settings = {"max_completion_length": 200, "max_steps": 1, "vllm_max_model_length": 400, "hybrid": MULTI}
        done = run(
            Recording,
            model=chatty_model(tokenizer, TURNS, "llama" if template == "llama3_1" else "qwen3"),
            processing_class=tokenizer,
            train_dataset=Dataset.from_dict({"prompt": prompts, "door": list(range(len(prompts)))}),
            reward_funcs=[episode_reward, seen],
            **({"rollout_func": episodes(factory, max_turns=max_turns)} | settings | given),
        )
        done.trainer.batches = batches
        return done.trainer, seen, batches[0]

    return start


EPISODES = {factory: episodes(factory) for factory in (Maze, SyncMaze)}
"""Each plays for two trainers, whose tokenizers differ."""


@pytest.mark.parametrize("template", ["qwen3", "llama3_1"])
@pytest.mark.parametrize("factory", EPISODES)
def test_episodes_token_for_token(play, template, factory):
    """What was sampled is kept as it was, what was shown stands between, and the mask tells them apart."""
    Maze.threads, Maze.closed = set(), 0
    trainer, seen, (prompt_ids, completion_ids, masks, *_) = play(
        factory, template=template, rollout_func=EPISODES[factory]
    )
    assert Maze.closed == len(prompt_ids)
    assert threading.main_thread().name not in Maze.threads
    tokenizer = trainer.processing_class
    ((prompts, _, given_ids, columns),) = seen.calls
    assert given_ids == completion_ids
    lengths = set()
    for i, (prompt, completion, mask) in enumerate(zip(prompt_ids, completion_ids, masks, strict=True)):
        messages, door = columns["episode_messages"][i], columns["door"][i]
        said = [m["content"] for m in messages if m["role"] == "assistant"]
        asked = [{"role": "user", "content": f"{prompts[i][0]['content']} door {door}"}]
        assert prompt == tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        assert columns["episode_reward"][i] == 0.5 * len(said)
        assert [m["content"] for m in messages if m["role"] == "user"] == [f"door {len(text)}" for text in said[:-1]]
        runs = sampled_runs(completion, mask)
        assert [tokenizer.decode(ids, skip_special_tokens=True) for ids in runs] == said
        lengths.add(len(said))
    assert len(lengths) > 1
    log = trainer.state.log_history[0]
    assert log["hybrid/turns/max"] == max(lengths)
    assert log["hybrid/trajectories/failed"] == 0


def sampled_runs(completion, mask):
    """The sampled stretches of a completion."""
    runs, before = [], 0
    for token, sampled in zip(completion, mask, strict=True):
        if sampled and not before:
            runs.append([])
        if sampled:
            runs[-1].append(token)
        before = sampled
    return runs


def test_log_probs_are_the_models(play):
    trainer, _, (prompt_ids, completion_ids, masks, _, logprobs, *_) = play(Maze, learning_rate=0.0)
    model = trainer.model.eval()
    for prompt, completion, mask, values in zip(prompt_ids, completion_ids, masks, logprobs, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0].tolist()
        for sampled, value, wanted in zip(mask, values, expected, strict=True):
            assert value == pytest.approx(wanted, abs=1e-5) if sampled else value == 0.0


def test_turns_and_tokens_are_limits_and_what_is_logged_of_turns_counts_every_trajectory_once(play):
    """Over the batches of one log line: only some trajectories of each have a second turn, not as many in both."""
    trainer, seen, _ = play(
        Maze, max_turns=2, max_completion_length=40, max_steps=2, logging_steps=2, per_device_train_batch_size=4
    )
    second, total = [], 0
    for (*_, columns), (_, completion_ids, masks, *_) in zip(seen.calls, trainer.batches, strict=True):
        turns = [sum(m["role"] == "assistant" for m in messages) for messages in columns["episode_messages"]]
        assert max(turns) <= 2
        assert all(len(ids) <= 40 and mask[-1] == 1 for ids, mask in zip(completion_ids, masks, strict=True))
        runs = [sampled_runs(ids, mask) for ids, mask in zip(completion_ids, masks, strict=True)]
        second.append([len(run[1]) for run in runs if len(run) > 1])
        total += len(runs)
    lengths = [length for batch in second for length in batch]
    assert len(second[0]) != len(second[1])
    (log,) = [log for log in trainer.state.log_history if "hybrid/turn_2/reached" in log]
    assert log["hybrid/turn_2/reached"] == len(lengths) / total
    assert log["hybrid/turn_2/sampled"] == pytest.approx(sum(lengths) / len(lengths))
    assert log["hybrid/turn_3/reached"] == 0


def test_the_first_observation_may_be_messages(play):
    class Told(Maze):
        def reset(self, row):
            self.row, self.said = row, []
            return [{"role": "assistant", "content": "who are you"}, {"role": "user", "content": "a guest"}]

    trainer, _, (prompt_ids, *_) = play(Told)
    assert "who are you" in trainer.processing_class.decode(prompt_ids[0])


def broken(how):
    class Broken(Maze):
        async def step(self, completion):
            if self.row["door"] == 1:
                if how == "raises":
                    raise RuntimeError("no way")
                if how == "hangs":
                    await asyncio.sleep(1000)
                return {"nonsense": "a string", "empty": Step(), "content": Step(observation=[{"role": "user"}])}[how]
            return await super().step(completion)

    return Broken


REASONS = {
    "raises": "environment 'Broken.step' raised RuntimeError: no way",
    "hangs": "environment 'Broken.step' did not return within 2 s",
    "nonsense": "environment 'Broken.step' returned a str, no Step",
    "empty": "environment 'Broken.step' is not done, but has nothing to show",
    "content": "environment 'Broken.step' showed a list that holds something else than messages",
}


@pytest.mark.parametrize("how", REASONS)
def test_an_episode_that_breaks_off_is_masked_and_counted(play, caplog, how):
    hybrid = MULTI | {"rollout_options": {"tool_timeout": 2.0, "max_failed": 1.0}}
    started = time.monotonic()
    trainer, seen, (_, _, masks, *_) = play(broken(how), hybrid=hybrid, rows=2)
    assert time.monotonic() - started < 500
    ((*_, columns),) = seen.calls
    for door, reward, mask in zip(columns["door"], columns["episode_reward"], masks, strict=True):
        assert (reward is None, not any(mask)) == (door == 1, door == 1)
    assert trainer.state.log_history[0]["hybrid/trajectories/failed"] == columns["door"].count(1)
    assert REASONS[how] in caplog.text


def test_too_many_failures_stop_the_run(play):
    with pytest.raises(TrajectoriesFailedError, match=r"Broken.step' raised RuntimeError: no way \(\d times\)"):
        play(broken("raises"), rows=2)


def test_rollouts_that_cannot_play_are_refused(play):
    with pytest.raises(ConfigError, match=r"this trainer's is 'single_turn'.*multi_turn"):
        play(Maze, hybrid={"engine": "vllm", "rollout": "single_turn"})
    with pytest.raises(ConfigError, match="TRL's own generation"):
        play(Maze, hybrid=None)
    with pytest.raises(ConfigError, match="prompts that are lists of messages"):
        play(Maze, prompts=["plain"] * 8)
    with pytest.raises(ConfigError, match="shows this model text, and a prompt holds content of type 'image'"):
        refuse_prompts([[{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it"}]}]])
    with pytest.raises(ConfigError, match=r"shows this model text and image, and a prompt holds .* 'audio'"):
        refuse_prompts([[{"role": "user", "content": [{"type": "audio"}]}]], sees_images=True)
    with pytest.raises(ConfigError, match="at least one turn"):
        episodes(Maze, max_turns=0)


def test_episodes_are_scored_over_the_ids_that_they_were_sampled_from(play):
    trainer, _, _ = play(Maze, top_k=3, temperature=2.0)
    (log,) = [log for log in trainer.state.log_history if "ratio/truncation" in log]
    assert log["sampling/sampling_logp_difference/max"] < 1e-4
    assert log["ratio/truncation"] < -0.1
