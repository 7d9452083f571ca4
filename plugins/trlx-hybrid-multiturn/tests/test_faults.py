"""Tools that hang, crash, raise and return garbage, in a real trainer on real vLLM: nothing is lost, nothing leaks.

`FAULT_SEEDS=20` runs more seeds than `make test` does.
"""

import asyncio
import copy
import dataclasses
import json
import os
import random
import signal
import sys
import threading
import time

import cloudpickle
import psutil
import pytest
import torch
import trlx_hybrid
from datasets import Dataset
from trl import GRPOConfig
from trlx_hybrid.testing.chat import chat_tokenizer, chatty_model
from trlx_hybrid_multiturn.multi_turn import TrajectoriesFailedError

SEEDS = int(os.environ.get("FAULT_SEEDS", "3"))
PATIENCE = 60  # seconds: for what ends soon, unless the machine is busy
TIMEOUT = 2.5  # seconds a call may take
BRACKETS = '<tool_call>\n{"name": "work", "arguments": ' + "[" * 5000  # which no parser takes
ROWS, GROUP, TURNS, NUMBERS = 16, 4, 3, 7
GATE = threading.Event()  # what hanging threads wait for

# By tool: what may go wrong with it. Some of it is shown to the model; all else ends the trajectory.
KINDS = {
    "work": ("exit", "segfault", "leave", "unprintable", "unencodable", "unsendable", "raise", "hang"),
    "think": ("leave", "unprintable", "unencodable", "imageless", "raise", "hang"),
    "fetch": ("cancelled", "leave", "unprintable", "unencodable", "raise", "hang"),
    "count": ("unencodable", "leave", "unprintable", "raise", "hang"),
}
SHOWN = {
    "unprintable": "a Unprintable, cannot be turned into a string",
    "imageless": "a block of an image without the image",
    "raise": "it went wrong",
    "hang": "did not return within",
    "exit": "ended its process: exit code 3",
    "segfault": "SIGSEGV",
    "leave": "SystemExit: 1",
}
REASONS = {
    "unsendable": "a list, of which [0] is a generator, which cannot be sent",
    "cancelled": "was cancelled",
}


class Unprintable:
    def __str__(self):
        raise RuntimeError("no text")


def planned(tool, n):
    """What goes wrong with this call, by a file: processes read it too."""
    with open(os.environ["FAULT_PLAN"]) as file:
        return json.load(file).get(f"{tool}{n}")


def garbage(kind):
    if kind == "raise":
        raise ValueError("it went wrong")
    if kind == "leave":
        raise SystemExit(1)
    return {
        "unprintable": Unprintable(),
        "unencodable": "\ud800",
        "unsendable": [(i for i in ())],
        "imageless": [{"type": "image"}],
    }[kind]


def work(n: int) -> str:
    """Work in a process.

    Args:
        n: at what.
    """
    kind = planned("work", n)
    if kind == "hang":
        time.sleep(1000)
    if kind == "exit":
        os._exit(3)
    if kind == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    return garbage(kind) if kind else f"worked at {n}"


def think(n: int) -> str:
    """Think in a thread.

    Args:
        n: about what.
    """
    kind = planned("think", n)
    if kind == "hang":
        return str(GATE.wait())
    return garbage(kind) if kind else f"thought about {n}"


async def fetch(n: int) -> str:
    """Wait for something.

    Args:
        n: for what.
    """
    kind = planned("fetch", n)
    await asyncio.sleep(0.001)
    if kind == "hang":
        await asyncio.sleep(1000)
    if kind == "cancelled":
        raise asyncio.CancelledError
    return garbage(kind) if kind else f"fetched {n}"


class Counter:
    """An environment with state."""

    def reset(self, start: int, **row) -> None:
        self.total, self.hangs = start, False

    def count(self, n: int) -> int:
        """Count on.

        Args:
            n: how far.
        """
        kind = planned("count", n)
        if kind == "hang":
            self.hangs = True
            GATE.wait()
        if kind:
            return garbage(kind)
        self.total += n
        return self.total


def call(tool, n):
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': {'n': n}})}\n</tool_call>"


def none_left(look):
    end = time.monotonic() + PATIENCE
    while left := look():
        assert time.monotonic() < end, left
        time.sleep(0.01)


class Rig:
    """A trainer that rolls the same rows out again and again, from the same draws."""

    def __init__(self, folder):
        singles = [call(tool, n) for tool in KINDS for n in range(NUMBERS)]
        doubles = ["\n".join(singles[i::9][:2]) for i in range(9)]
        turns = [*singles, *doubles, BRACKETS, call("nothing", 1), *(f"plain answer {i}" for i in range(12))]
        tokenizer = chat_tokenizer(turns)
        questions = [f"question {'?' * (i % 9)} {i * 7919 % 1000}" for i in range(64)]
        rows = {"prompt": [[{"role": "user", "content": q}] for q in questions], "start": list(range(64))}
        self.dataset = Dataset.from_dict(rows)
        self.plan = folder / "plan.json"
        os.environ["FAULT_PLAN"] = str(self.plan)
        rig = self

        class Recording(trlx_hybrid.GRPOTrainer):
            def _generate(self, prompts):
                rig.generated = copy.deepcopy(super()._generate(prompts))
                return rig.generated

        self.trainer = Recording(
            model=chatty_model(tokenizer, turns),
            processing_class=tokenizer,
            reward_funcs=self.reward,
            train_dataset=self.dataset,
            tools=[work, think, fetch],
            environment_factory=Counter,
            args=GRPOConfig(
                output_dir=str(folder),
                per_device_train_batch_size=ROWS,
                num_generations=GROUP,
                max_completion_length=400,
                temperature=0.8,  # a lower one multiplies what logits round to
                max_tool_calling_iterations=TURNS,
                use_vllm=True,
                vllm_max_model_length=3200,
                use_cpu=True,
                bf16=False,
                report_to=[],
                disable_tqdm=True,
            ),
            hybrid={
                "rollout_options": {
                    "tool_modes": {"work": "process"},
                    "max_processes": 4,
                    "tool_timeout": TIMEOUT,
                    "max_failed": 1.0,
                    "max_hung": 1000,
                }
            },
        )
        self.session = self.trainer.session

    def reward(self, completion_ids, environments, **kwargs):
        self.totals = [environment.total for environment in environments]
        return [float(len(ids) % 5) for ids in completion_ids]

    def roll(self, plan=None, seed=0, **options):
        """One rollout: per row ids, mask, messages and log-probs; and the conversations."""
        self.plan.write_text(json.dumps(plan or {}))
        GATE.clear()
        self.session.sampler.forget()
        draw = random.Random(seed)
        inputs = [self.dataset[draw.randrange(64)] for _ in range(ROWS // GROUP)]
        rollout, before = self.session.rollout, self.session.rollout.options
        rollout.options = rollout.runner._options = dataclasses.replace(before, **options)
        try:
            self.batch = self.trainer._generate_and_score_completions([x for x in inputs for _ in range(GROUP)])
        finally:
            GATE.set()
            rollout.options = rollout.runner._options = before
        _, ids, mask, messages, logprobs, *_ = self.generated
        self.conversations = self.trainer._run.batch.conversations
        return list(zip(ids, mask, messages, logprobs, self.totals, strict=True))

    def at_rest(self):
        """The engine has nothing left of a rollout."""
        core = self.session.live_engine.llm.llm_engine
        pool = core.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        return not core.has_unfinished_requests() and pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


@pytest.fixture(scope="module")
def rig(tmp_path_factory):
    """At the end no thread, process or descriptor is left of all that went wrong."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a process need not import all that is imported here
    rig = Rig(tmp_path_factory.mktemp("faults"))
    with rig.session.rollout_phase(True):
        rig.session.generate([[5, 6]])
    me = psutil.Process()
    children, threads, descriptors = set(me.children(recursive=True)), set(threading.enumerate()), me.num_fds()
    rig.elsewhere = children
    yield rig
    GATE.set()
    rig.session.rollout.close()
    none_left(lambda: {t for t in set(threading.enumerate()) - threads if t.name != "tqdm_monitor"})
    none_left(lambda: set(me.children(recursive=True)) - children)
    none_left(lambda: max(0, me.num_fds() - descriptors))
    rig.session.close()
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    del os.environ["FAULT_PLAN"]


def expected(messages, plan):
    """What goes wrong first with a row that went like this without faults: kinds of one turn, "raise" among them."""
    return next(filter(None, ({plan.get(key) for key in turn} - {None} for turn in called(messages))), set())


def called(messages):
    """Turn by turn the calls that are executed, as keys of a plan."""
    turns = [message.get("tool_calls") or [] for message in messages if message["role"] == "assistant"][:TURNS]
    return [[f"{c['function']['name']}{c['function']['arguments']['n']}" for c in turn] for turn in turns]


def known(reference):
    """Keys that the reference calls, by tool."""
    keys = sorted({key for _, _, messages, _, _ in reference for turn in called(messages) for key in turn})
    return {tool: [key for key in keys if key.startswith(tool)] for tool in KINDS}


def assert_as_expected(rig, rows, reference, plan):
    """Every row is there, and as the plan says; returns what went wrong, row by row."""
    fates = [expected(messages, plan) for _, _, messages, _, _ in reference]
    failed = [conversation.failure for conversation in rig.conversations]
    assert len(rows) == len(reference) == ROWS
    for row, before, fate, conversation in zip(rows, reference, fates, rig.conversations, strict=True):
        ids, mask, messages, logprobs, _ = row
        assert len(ids) == len(mask) == len(logprobs) > 0
        assert messages[0]["role"] == "assistant"
        if conversation.failure is not None:
            assert not any(mask)
        if not fate:
            assert row[:3] == before[:3]
            assert row[4] == before[4]
            assert logprobs == pytest.approx(before[3], abs=1e-5)
            assert conversation.failure is None
        elif fate <= {*SHOWN, "unencodable"}:
            answers = [m["content"] for m in messages if m["role"] == "tool"]
            errors = [answer for answer in answers if answer.startswith("{'error'")]
            assert "unencodable" not in fate or (conversation.mended_answers and "\ufffd" in answers)
            assert not fate & set(SHOWN) or conversation.failed_calls
            assert all(any(SHOWN[kind] in error for error in errors) for kind in fate & set(SHOWN))
        else:
            assert any(REASONS[kind] in conversation.failure for kind in fate & set(REASONS))
            assert ids == before[0][: len(ids)]
    masks = rig.batch["tool_mask"] * rig.batch["completion_mask"]
    assert [not any(m) for m in masks.tolist()] == [failure is not None for failure in failed]
    assert rig.session.metrics["hybrid/trajectories/failed"] == ROWS - failed.count(None)
    counted = torch.tensor([failure is None for failure in failed])
    advantages = rig.batch["advantages"]
    assert not advantages[~counted].any()  # and the others are centred on the mean of their own
    assert advantages.view(-1, GROUP).sum(dim=1).tolist() == pytest.approx([0.0] * (ROWS // GROUP), abs=1e-4)
    assert rig.at_rest()
    return fates


@pytest.mark.parametrize("seed", range(SEEDS))
def test_whatever_tools_do_every_row_comes_back(rig, seed):
    draw = random.Random(seed)
    reference = rig.roll(seed=seed)
    assert not any(conversation.failure for conversation in rig.conversations)
    keys = [(tool, key) for tool, keys in known(reference).items() for key in keys]
    hit = 0
    while not 0 < hit < ROWS:
        plan = {key: draw.choice(KINDS[tool]) for tool, key in draw.sample(keys, 4)}
        hit = sum(bool(expected(messages, plan)) for _, _, messages, _, _ in reference)
    assert_as_expected(rig, rig.roll(plan, seed), reference, plan)
    assert len(set(psutil.Process().children()) - rig.elsewhere) <= 4
    assert len(set(psutil.Process().children(recursive=True)) - rig.elsewhere) <= 8  # each with what watches over it
    none_left(rig.session.rollout.runner.running)


def test_every_failure_is_named(rig):
    """All calls go wrong, in every way but hanging."""
    reference, seen = rig.roll(), set()
    for shift in range(3):
        plan = {
            key: KINDS[tool][(2 * i + shift) % (len(KINDS[tool]) - 1)]
            for tool, keys in known(reference).items()
            for i, key in enumerate(keys)
        }
        seen.update(*assert_as_expected(rig, rig.roll(plan), reference, plan))
    assert len(seen) > 5


def test_a_turn_that_no_parser_takes_is_plain_text(rig):
    """TRL itself parses each first turn once more: it must not end the run there, either."""
    for seed in range(20):
        rows = rig.roll(seed=seed)
        unparsed = [i for i, c in enumerate(rig.conversations) if c.unparsed]
        assert rig.session.metrics["hybrid/turns/unparsed"] == len(unparsed)
        assert not any(conversation.failure for conversation in rig.conversations)
        for i in unparsed:
            assert rig.conversations[i].unparsed.startswith("RecursionError")
            assert BRACKETS in rows[i][2][-1]["content"]
        if any(len(rig.conversations[i].turns) == 1 for i in unparsed):
            return
    pytest.fail("no row began with such a turn")


def test_an_environment_that_hangs_is_replaced_when_another_is_needed(rig, monkeypatch):
    """Not before: its place may be taken as long as it hangs, and a factory that fails would end the rollout."""
    plan = {f"count{n}": "hang" for n in range(NUMBERS)}
    reference = rig.roll()
    size = len(rig.trainer._environment_pool[None])
    with monkeypatch.context() as full:
        full.setitem(rig.trainer.environment_factories, None, lambda: pytest.fail("no place is left"))
        assert_as_expected(rig, rig.roll(plan), reference, plan)
    hung = [environment for environment in rig.trainer.environments if environment.hangs]
    assert len(hung) > 0
    pool = rig.trainer._environment_pool[None]
    assert len(pool) == size - len(hung)
    assert not {id(environment) for environment in hung} & {id(environment) for environment in pool}
    assert_as_expected(rig, rig.roll(), reference, {})
    assert len(pool) == size


def test_too_many_failures_stop_the_run_with_a_summary_and_leave_the_engine_usable(rig):
    reference = rig.roll()
    plan = dict.fromkeys(known(reference)["work"], "unsendable")
    with pytest.raises(TrajectoriesFailedError) as stopped:
        rig.roll(plan, max_failed=0.1)
    text = str(stopped.value)
    assert text.startswith(f"2 of {ROWS} trajectories broke off, 1 may (rollout_options max_failed=0.1): ")
    assert "a list, of which [0] is a generator, which cannot be sent from its process." in text
    assert rig.at_rest()
    with pytest.raises(TrajectoriesFailedError, match=r"1 of .* broke off, 0 may"):
        rig.roll(plan, max_failed=0.0)
    assert_as_expected(rig, rig.roll(), reference, {})


def test_time_over_keeps_what_there_is_and_replaces_the_environment(rig):
    """A row that a tool holds up too long is cut, not failed; that call may still be using its environment."""
    reference = rig.roll()
    plan = {f"count{n}": "hang" for n in range(NUMBERS)}
    rows = rig.roll(plan, tool_timeout=1000.0, max_seconds=5.0)
    hung = [environment.hangs for environment in rig.trainer.environments]
    assert 0 < sum(hung) < ROWS
    for row, before, cut, conversation in zip(rows, reference, hung, rig.conversations, strict=True):
        assert conversation.failure is None
        ids, mask = row[:2]
        assert (ids, mask) == (before[0][: len(ids)], before[1][: len(ids)])
        assert mask[-1] == 1
        if cut:
            assert row[2][-1]["role"] == "assistant"
            assert len(row[2]) <= len(before[2])
        else:
            assert row[:3] == before[:3]
    pool = {id(environment) for environment in rig.trainer._environment_pool[None]}
    assert not any(e.hangs and id(e) in pool for e in rig.trainer.environments)
    assert rig.at_rest()
    assert_as_expected(rig, rig.roll(), reference, {})
