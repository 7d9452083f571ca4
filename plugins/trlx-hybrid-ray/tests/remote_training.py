"""A small GRPO run with engines in actors, and what to look at in them."""

import os
import signal
import sys
import time
from pathlib import Path

import psutil
from trl import GRPOConfig
from trlx_hybrid import GRPOTrainer
from trlx_hybrid.contract.types import Request
from trlx_hybrid.testing.models import character_tokenizer, sorting_prompts, tiny_model

sys.path.insert(0, str(Path(__file__).parent))

STEPS = 2


class Trained:
    """A trainer that has trained, and what its reward function saw."""

    def __init__(self, folder, hybrid, plugins=(), callbacks=(), resume=None, **settings):
        self.completions, self.rewards = [], []
        evaluated = settings.pop("eval_dataset", None)
        self.trainer = GRPOTrainer(
            model=tiny_model(),
            reward_funcs=self._digits,
            callbacks=list(callbacks),
            args=GRPOConfig(
                output_dir=str(folder),
                **{
                    "per_device_train_batch_size": 8,
                    "num_generations": 4,
                    "max_completion_length": 12,
                    "max_steps": STEPS,
                    "learning_rate": 0.1,
                    "optim": "sgd",  # Adam divides rounding noise by itself where a gradient is zero
                    "logging_steps": 1,
                    "report_to": [],
                    "use_cpu": True,
                    "bf16": False,
                    "save_strategy": "no",
                    "vllm_max_model_length": 64,
                    "disable_tqdm": True,
                }
                | settings,
            ),
            train_dataset=sorting_prompts(),
            eval_dataset=evaluated,
            processing_class=character_tokenizer(),
            hybrid=hybrid,
            plugins=plugins,
        )
        self.session = self.trainer.session
        self.trainer.train(resume_from_checkpoint=resume)
        self.losses = [log["loss"] for log in self.trainer.state.log_history if "loss" in log]

    def _digits(self, completions, completion_ids, **_):
        rewards = [sum(c.isdigit() for c in text) + len(ids) / 100 for text, ids in zip(completions, completion_ids)]
        self.completions += [list(ids) for ids in completion_ids]
        self.rewards += rewards
        return rewards


def pids(engine):
    """Of all processes of each engine: its actor first."""
    actors = [psutil.Process(int(m.where.rpartition(" ")[2])) for _, m in sorted(engine.pool.replicas.items())]
    return [[actor.pid, *(child.pid for child in actor.children(recursive=True))] for actor in actors]


def core_of(processes):
    """vLLM's engine core among the processes of one engine: its actor's child that is no resource tracker.

    The title that vLLM gives it is there only where setproctitle finds room for it.
    """
    children = [psutil.Process(pid) for pid in processes if psutil.Process(pid).ppid() == processes[0]]
    (core,) = [child.pid for child in children if "resource_tracker" not in " ".join(child.cmdline())]
    return core


def killed_in_mid_rollout(engine, requests, sampling, victim="actor"):
    """Tokens of requests whose first engine's actor, or vLLM's engine core in it, is killed while it samples."""
    processes = pids(engine)[0]
    pid = processes[0] if victim == "actor" else core_of(processes)
    return disturbed(engine, requests, sampling, lambda: os.kill(pid, signal.SIGKILL))


def disturbed(engine, requests, sampling, disturb):
    """Tokens of requests, something having been done while they were sampled."""
    with engine.stream(sampling) as stream:
        keys = [stream.add(request) for request in requests]
        found = dict(stream.step(True)[0])
        disturb()
        while stream.busy:
            found.update(stream.step(True)[0])
    return tokens([found[key] for key in keys])


def gone(groups, seconds=60):
    """Wait until none of these processes runs."""
    deadline = time.monotonic() + seconds
    while left := [pid for group in groups for pid in group if running(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def no_segments(segments, seconds=60):
    """Wait until none of ours is left. The reaper removes them when nobody maps them any more."""
    deadline = time.monotonic() + seconds
    while left := segments.left():
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    segments.over.set()


def running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def requests_of(count):
    """Different prompts, seeds and rows."""
    return [Request(prompt_ids=[5 + (i * 7 + j) % 80 for j in range(6 + i % 5)], seed=i, row=i) for i in range(count)]


def tokens(completions):
    return [(c.token_ids, c.finish_reason) for c in completions]
