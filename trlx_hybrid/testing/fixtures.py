"""A pytest plugin with fixtures for the tests of plugins. To use it, write `pytest_plugins =
["trlx_hybrid.testing.fixtures"]` in conftest.py.

Everything is real and runs on a CPU; only the models are tiny.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def tiny_model() -> Any:
    """A Qwen3 model with a few hundred thousand random weights, newly built for each test."""
    from .models import tiny_model

    return tiny_model()


@pytest.fixture
def tiny_tokenizer() -> Any:
    """A tokenizer with one token per printable character."""
    from .models import character_tokenizer

    return character_tokenizer()


@pytest.fixture
def tiny_dataset() -> Any:
    """A `datasets.Dataset` of prompts that `tiny_tokenizer` can read."""
    from .models import sorting_prompts

    return sorting_prompts()


@pytest.fixture
def tiny_trainer(
    tiny_model: Any, tiny_tokenizer: Any, tiny_dataset: Any, tmp_path: Path
) -> Iterator[Callable[..., Any]]:
    """A function that makes a GRPO trainer of `trlx_hybrid` which trains in seconds: `tiny_trainer(plugins=[...],
    max_steps=3)`.

    Keyword arguments that `GRPOTrainer` has go to the trainer; all others go to its `GRPOConfig`. Model, tokenizer,
    dataset and reward function are tiny by default. The trainer samples as TRL does, with transformers, unless
    `use_vllm=True` or `hybrid=HybridConfig(engine=...)` is passed. After the test the trainer's engine is closed.
    """
    made: list[Any] = []

    def make(**given: Any) -> Any:
        import inspect

        from trl import GRPOConfig
        from trl import GRPOTrainer as BaseGRPOTrainer
        from trlx_hybrid import GRPOTrainer

        from .models import tiny_grpo

        own = {"plugins", "hybrid", *inspect.signature(BaseGRPOTrainer.__init__).parameters}
        arguments = {name: given.pop(name) for name in list(given) if name in own}
        defaults = {"model": tiny_model, "processing_class": tiny_tokenizer}
        if getattr(arguments.get("hybrid"), "environment", None) is None:  # an environment brings these
            defaults |= {"train_dataset": tiny_dataset, "reward_funcs": _digits}
        settings = {"use_vllm": False, "per_device_train_batch_size": 4} | given
        trainer = GRPOTrainer(**defaults | arguments, args=GRPOConfig(**tiny_grpo(tmp_path, **settings)))
        made.append(trainer)
        return trainer

    yield make
    for trainer in made:
        trainer.session.close()


def _digits(completions: list[str], **_: Any) -> list[float]:
    """Return a reward for each completion that differs between completions: the number of digits in it."""
    return [float(sum(c.isdigit() for c in text)) for text in completions]


@pytest.fixture
def two_processes(tmp_path: Path) -> Callable[..., list[Any]]:
    """A function that runs a script on the two ranks of a job, `two_processes(script, *arguments, timeout=400.0)`, and
    returns the two results.

    The script is called as `SCRIPT FOLDER ARGUMENTS`, with the environment variables that torchrun sets. Each rank has
    to write its result as JSON to `FOLDER/rank<rank>.json` and to exit with code 0. A rank that takes longer than
    `timeout` seconds makes the function raise a TimeoutError.
    """
    from .processes import rank_reports

    def run(script: Path | str, *arguments: object, timeout: float = 400.0) -> list[Any]:
        return rank_reports(script, tmp_path, *arguments, count=2, timeout=timeout)

    return run


class FakeClock:
    """A clock for tests. Its time passes only when `sleep` is called, which returns at once.

    Attributes:
        seconds: time since the clock was made, in seconds.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        """Return the time in seconds, as `time.monotonic` does."""
        return self.seconds

    def sleep(self, seconds: float) -> None:
        """Advance the time by some seconds, and return at once."""
        self.seconds += max(0.0, seconds)


@pytest.fixture
def fake_clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """A `FakeClock` that replaces `time.monotonic`, `time.perf_counter`, `time.time` and `time.sleep` during the
    test."""
    clock = FakeClock()
    for name in ("monotonic", "perf_counter", "time"):
        monkeypatch.setattr(time, name, clock.now)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    return clock
