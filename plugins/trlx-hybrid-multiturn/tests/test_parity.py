"""Against TRL's own tool loop: the same tokens, masks, messages, rewards' arguments, and log-probs."""

import asyncio
import copy
import operator

import pytest
import torch
import trl
import trlx_hybrid
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trlx_hybrid.errors import ConfigError
from trlx_hybrid.testing.chat import chat_tokenizer, chatty_model

QUESTIONS = [[{"role": "user", "content": f"question {'?' * i} {i * 7919 % 1000}"}] for i in range(16)]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


def fail(why: str) -> str:
    """Fail.

    Args:
        why: the reason.
    """
    raise RuntimeError(f"failed because {why}")


def blocks(text: str) -> list:
    """Content blocks.

    Args:
        text: what they say.
    """
    return [{"type": "text", "text": text}]


async def fetch(key: str) -> dict:
    """Look something up.

    Args:
        key: what to look up.
    """
    await asyncio.sleep(0.001)
    if key == "none":
        raise KeyError(key)
    return {"key": key, "value": len(key)}


class Counter:
    """An environment with state: its tools answer by what was called before."""

    made = 0

    def __init__(self):
        Counter.made += 1
        self.total, self.resets = 0, 0

    def reset(self, start: int, **row) -> str:
        self.total, self.resets = start, self.resets + 1
        return f" start {start}"

    def count(self, by: int) -> str:
        """Count on.

        Args:
            by: how far.
        """
        self.total += by
        return f"now {self.total}"

    async def peek(self) -> int:
        """Look at the count."""
        return self.total

    def get_reward(self) -> float:
        return float(self.total % 7)


def call(template, name, **arguments):
    import json

    key = "parameters" if template.startswith("llama") else "arguments"
    text = json.dumps({"name": name, key: arguments})
    return text if template.startswith("llama") else f"<tool_call>\n{text}\n</tool_call>"


def turns_of(template, names=("add", "fail", "fetch", "blocks", "nothing")):
    """What the model can say in one token."""
    known = {
        "add": [call(template, "add", a=1, b=2), call(template, "add", a=4, b=38), call(template, "add", a="x")],
        "fail": [call(template, "fail", why="it may")],
        "fetch": [call(template, "fetch", key="abc"), call(template, "fetch", key="none")],
        "blocks": [call(template, "blocks", text="text")],
        "nothing": [call(template, "nothing")],
        "count": [call(template, "count", by=3), call(template, "count", by=5)],
        "peek": [call(template, "peek")],
    }
    single = [text for name in names for text in known[name]]
    both = [] if template.startswith("llama") else [single[-1] + "\n" + single[0], "\n".join(single[:3])]
    return [*single, *both, "a plain answer", "<tool_call>\n{broken"]


TOOLS_OF_TEMPLATES = [
    pytest.param("qwen3", ("add", "fail", "fetch", "blocks", "nothing"), id="qwen3"),
    pytest.param("llama3_1", ("add", "fetch", "nothing"), id="llama3_1", marks=pytest.mark.slow),
]


class Seen:
    """What a reward function was given."""

    __name__ = "seen"

    def __init__(self):
        self.calls = []

    def __call__(self, prompts, completions, completion_ids, **kwargs):
        kept = {k: v for k, v in kwargs.items() if k in ("start", "question")}
        environments = [(e.total, e.resets) for e in kwargs.get("environments") or []]
        self.calls.append(copy.deepcopy((prompts, completions, completion_ids, kept, sorted(kwargs), environments)))
        return [float(len(ids) % 5) for ids in completion_ids]


@pytest.fixture
def converse(run, tmp_path):
    """Train for two steps with tools; returns the trainer, what its reward function saw and what it trained on."""

    def start(trainer_class, template="qwen3", names=("add", "fail", "fetch", "blocks", "nothing"), **given):
        turns = turns_of(template, names)
        tokenizer = chat_tokenizer(turns, template)
        seen, batches = Seen(), []

        class Recording(trainer_class):
            def _generate(self, prompts):
                generated = super()._generate(prompts)
                batches.append(copy.deepcopy(generated))
                return generated

        data = {"prompt": QUESTIONS, "question": list(range(16)), "start": [i % 4 for i in range(16)]}
        if "environment_factory" not in given:
            given.setdefault("tools", [globals()[name] for name in names if name in globals()])
        architecture = "llama" if template.startswith("llama") else "qwen3"
        folder = str(tmp_path / "model")  # TRL's own engine loads one
        chatty_model(tokenizer, turns, architecture).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
        settings = {
            "max_completion_length": 300,
            "top_k": 1,
            "max_steps": 2,
            "num_generations": 4,
            "optim": "sgd",  # Adam's first step has the size of the learning rate, even where a gradient is rounding
            "learning_rate": 1e-3,
            "gradient_checkpointing": False,  # TRL's default computes these long conversations a second time
        }
        settings |= {"use_vllm": True, "vllm_max_model_length": 3200, "max_tool_calling_iterations": 4} | given
        if settings.get("config_class") is trl.DistillationConfig:
            settings["teacher_model"] = AutoModelForCausalLM.from_pretrained(folder)
        else:
            settings["reward_funcs"] = seen
        done = run(
            Recording, model=model, processing_class=tokenizer, train_dataset=Dataset.from_dict(data), **settings
        )
        done.close()
        return done.trainer, seen, batches

    return start


def assert_same(ours, theirs, tolerance=0.0):
    for mine, other in zip(ours[2], theirs[2], strict=True):
        prompt_ids, completion_ids, mask, completions, logprobs, extra, _, images = zip(mine, other, strict=True)
        for pair in (prompt_ids, completion_ids, mask, completions, extra, images):
            assert pair[0] == pair[1]
        for left, right in zip(*logprobs, strict=True):
            assert len(left) == len(right)
            assert max(map(abs, map(operator.sub, left, right))) <= tolerance
    assert ours[1].calls == theirs[1].calls
    shared = {
        k for log in theirs[0].state.log_history for k in log if k.startswith(("tools/", "completions/", "reward"))
    }
    assert {"tools/call_frequency", "tools/failure_frequency"} <= shared
    for mine, other in zip(ours[0].state.log_history, theirs[0].state.log_history, strict=True):
        assert {k: v for k, v in mine.items() if k in shared} == pytest.approx(
            {k: v for k, v in other.items() if k in shared}
        )


def spread(batches):
    """How many turns the conversations had, so that a test knows it saw some."""
    return {sum(m["role"] == "assistant" for m in c) for batch in batches for c in batch[3]}


@pytest.mark.parametrize(("template", "names"), TOOLS_OF_TEMPLATES)
def test_tools_equal_stock_trl(converse, stock_colocate, template, names):
    theirs = converse(trl.GRPOTrainer, template, names)
    ours = converse(trlx_hybrid.GRPOTrainer, template, names)
    assert ours[0].session.selection.rollout.component.name == "multi_turn"
    assert max(spread(theirs[2])) > 1
    assert_same(ours, theirs, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("template", "names"), TOOLS_OF_TEMPLATES)
def test_sampled_conversations_equal_those_of_trls_loop(converse, template, names):
    """Each request carries its own seed, so both loops sample the same tokens. Without `blocks`, as below."""
    names = tuple(name for name in names if name != "blocks")
    theirs = converse(
        trlx_hybrid.GRPOTrainer, template, names, top_k=0, temperature=0.5, hybrid={"rollout": "single_turn"}
    )
    ours = converse(trlx_hybrid.GRPOTrainer, template, names, top_k=0, temperature=0.5)
    assert max(spread(theirs[2])) > 1
    assert_same(ours, theirs, 1e-5)


@pytest.mark.parametrize(
    "limits",
    [
        {"max_completion_length": 90},  # answers are dropped, turns are cut
        {"vllm_max_model_length": 900},  # the context ends first
        {"max_tool_calling_iterations": 1},  # calls stay unexecuted
    ],
    ids=["completion", "context", "iterations"],
)
def test_limits_end_conversations_as_in_trl(converse, limits):
    given = {"top_k": 0, "temperature": 0.5, "max_steps": 1, **limits}
    theirs = converse(trlx_hybrid.GRPOTrainer, hybrid={"rollout": "single_turn"}, **given)
    ours = converse(trlx_hybrid.GRPOTrainer, **given)
    assert_same(ours, theirs, 1e-5)
    last = [c[-1] for batch in ours[2] for c in batch[3]]
    assert any(m.get("tool_calls") for m in last)  # some wanted to go on


def test_environments_equal_stock_trl(converse, stock_colocate):
    """One instance per row, reset for each batch, its own reward, tools that are bound to it."""
    given = {"environment_factory": Counter, "names": ("count", "peek"), "max_completion_length": 120}
    theirs = converse(trl.GRPOTrainer, **given)
    made, Counter.made = Counter.made, 0
    ours = converse(trlx_hybrid.GRPOTrainer, **given)
    assert Counter.made == made
    Counter.made = 0
    assert max(spread(theirs[2])) > 1
    assert_same(ours, theirs, 1e-5)
    assert any(resets == 2 for *_, environments in ours[1].calls for _, resets in environments)


def test_custom_rollouts_first_turns_are_continued(converse):
    """TRL runs its tool loop on what a `rollout_func` sampled; so does multi_turn."""

    def rollout(prompts, trainer):
        rows = [trainer._tokenize_prompts([p])[0][0] for p in prompts]
        _, ids, logprobs, _ = trainer.vllm_generation.generate(rows, None, 4)
        return {
            "prompt_ids": rows,
            "completion_ids": ids,
            "logprobs": [[candidates[0] for candidates in row] for row in logprobs],
        }

    # without `blocks`: TRL's loop hands its lists to a template that shows nothing of them
    given = {"rollout_func": rollout, "top_k": 0, "temperature": 0.5, "max_steps": 1}
    given["names"] = ("add", "fail", "fetch", "nothing")
    theirs = converse(trlx_hybrid.GRPOTrainer, hybrid={"rollout": "single_turn"}, **given)
    ours = converse(trlx_hybrid.GRPOTrainer, **given)
    assert max(spread(theirs[2])) > 1
    assert_same(ours, theirs, 1e-5)


def test_log_probs_of_whole_conversations_are_the_models(converse):
    """Sampled tokens have the log-probs that transformers computes, observed ones 0; the mask tells them apart."""
    trainer, _, batches = converse(trlx_hybrid.GRPOTrainer, top_k=0, temperature=0.8, max_steps=1, learning_rate=0.0)
    model = trainer.model.eval()
    prompt_ids, completion_ids, masks, _, logprobs, *_ = batches[0]
    observed = 0
    for prompt, completion, mask, values in zip(prompt_ids, completion_ids, masks, logprobs, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
        expected = (logits / 0.8).log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
        told = torch.tensor(mask)
        torch.testing.assert_close(torch.tensor(values), expected * told, atol=1e-5, rtol=0.0)
        observed += mask.count(0)
    assert observed > 100


def test_distillation_converses_as_in_trl(converse, tmp_path):
    """The second trainer of TRL with tools: no log-probs, one completion per prompt."""
    given = {"config_class": trl.DistillationConfig, "names": ("add", "fail", "nothing"), "max_steps": 1}
    theirs = converse(trlx_hybrid.DistillationTrainer, hybrid={"rollout": "single_turn"}, **given)
    ours = converse(trlx_hybrid.DistillationTrainer, **given)
    assert ours[0].session.selection.rollout.component.name == "multi_turn"
    assert [b[:3] for b in ours[2]] == [b[:3] for b in theirs[2]]
    assert any(0 in mask for mask in ours[2][0][2])


def test_plain_text_prompts_are_refused_before_sampling(run):
    with pytest.raises(ConfigError, match="plain text"):
        run(
            trlx_hybrid.GRPOTrainer,
            processing_class=chat_tokenizer(["x"]),
            model=chatty_model(chat_tokenizer(["x"]), ["x"]),
            tools=[add],
            use_vllm=True,
        )


@pytest.mark.parametrize("rollout", ["multi_turn", "single_turn"])
def test_each_turn_is_scored_over_the_ids_that_it_was_sampled_from(converse, rollout):
    """Whoever runs the conversation; what tools answered was sampled from nothing."""
    chosen = {"top_k": 3, "temperature": 2.0, "hybrid": {"engine": "vllm", "rollout": rollout}}
    trainer, _, batches = converse(trlx_hybrid.GRPOTrainer, **chosen)
    assert max(spread(batches)) > 1
    logs = [log for log in trainer.state.log_history if "ratio/truncation" in log]
    assert len(logs) == 2
    assert max(log["sampling/sampling_logp_difference/max"] for log in logs) < 1e-4
    assert max(log["ratio/truncation"] for log in logs) < -0.1
