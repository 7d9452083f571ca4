"""Fixtures of all test suites. Everything real: TRL, accelerate, vLLM; only the models are tiny."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os

# Before torch and vLLM are imported, which read them once.
os.environ.update(
    HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", TOKENIZERS_PARALLELISM="false", TRL_EXPERIMENTAL_SILENCE="1"
)
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import FileLock

pytest_plugins = ["trlx_hybrid.testing.fixtures"]

with contextlib.suppress(ImportError):  # which environments of adapters lack
    from hypothesis import settings

    settings.load_profile("ci")  # no deadline, which a busy machine misses; the same examples in each run


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Without garbage collection: almost all that imports and the rewriting of assertions make stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure() -> None:
    """Hide what is left from pytest, which now collects garbage ten times, each over all that was imported: two times
    find what was not awaited or closed."""
    gc.collect()
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # libraries that count what is left at the end would complain


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the simulated cluster first: then one of xdist's processes has them all, and starts the only one."""
    items.sort(key=lambda item: "session_cluster" not in getattr(item, "fixturenames", ()))


@dataclass
class Recorder:
    """A reward function that remembers what it was given: digits in the completion, plus a share of its length."""

    prompts: list[Any] = field(default_factory=list)
    completions: list[list[int]] = field(default_factory=list)
    kwargs: list[set[str]] = field(default_factory=list)
    contrast: float = 0.0  # how much a completion's place in the batch counts: greedy groups differ in nothing else
    __name__: str = "digits"

    def __call__(
        self, prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], **kwargs: Any
    ) -> list[float]:
        self.prompts += prompts
        self.completions += [list(ids) for ids in completion_ids]
        self.kwargs.append(set(kwargs))
        texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
        return [
            sum(ch.isdigit() for ch in text) + len(ids) / 100 + self.contrast * (i * 7 % 5)
            for i, (text, ids) in enumerate(zip(texts, completion_ids, strict=True))
        ]


LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class FinishedRun:
    """A finished run: the trainer, and what its reward function saw."""

    trainer: Any
    recorder: Recorder
    environment: dict[str, str]  # as it was before this run
    closed: bool = False

    @property
    def logs(self) -> list[dict[str, Any]]:
        timing = ("runtime", "per_second", "step_time", "hybrid/", "num_input_tokens_seen")
        return [
            {k: v for k, v in log.items() if not any(t in k for t in timing)} for log in self.trainer.state.log_history
        ]

    def weights(self) -> dict[str, Any]:
        return {name: p.detach().clone() for name, p in self.trainer.model.named_parameters()}

    def close(self) -> None:
        """Free the engine, whoever made it, so that the next run of this process starts clean."""
        if self.closed:
            return
        self.closed = True
        if hasattr(self.trainer, "session"):
            self.trainer.session.close()
        elif getattr(self.trainer, "vllm_generation", None) is not None:
            from trlx_hybrid_vllm.private.ending import shut_down

            shut_down(self.trainer.vllm_generation.llm, made_default_group=True)
        for name in LAUNCHER_VARIABLES:  # TRL sets them and leaves them: the next accelerator would believe them
            os.environ.pop(name, None)
            if name in self.environment:
                os.environ[name] = self.environment[name]


@pytest.fixture
def prompts() -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"prompt": [f"sort {i * 7919 % 1000}=" for i in range(32)], "index": list(range(32))})


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], None]], Path]:
    """`made_once(name, make)`: a folder that `make(folder)` has filled, once for all processes of xdist."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def find(name: str, make: Callable[[Path], None]) -> Path:
        folder, whole = base / name, base / f"{name}.whole"
        with FileLock(base / f"{name}.lock"):
            if not whole.exists():
                folder.mkdir(exist_ok=True)
                make(folder)
                whole.touch()
        return folder

    return find


@pytest.fixture(scope="session")
def started_once() -> Iterator[None]:
    """Take out of every engine's start and end what it does to the modules of this process, which many tests share.

    Starting and closing an engine collects garbage ten times, 0.3 s each over what the stack's import leaves, and
    counts twice what is frozen, 0.1 s each; vLLM's CPU platform looks for its Triton kernels in every module anew, and
    its registry at models in other processes. So the imports are frozen, for good, and counted once. Nor is garbage
    collected before vLLM's freeze, which does nothing then, in the middle of an engine's end, or before a training for
    the caches of devices: the last lines of an engine's end do it.
    """
    import functools

    from trlx_hybrid.testing.stack import import_stack, kernels_replaced_once, models_inspected_here

    import_stack()
    changed = pytest.MonkeyPatch()
    gc.collect()
    gc.freeze()
    changed.setattr(gc, "freeze", lambda: None)
    changed.setattr(gc, "unfreeze", lambda: None)  # it would take the imports with it
    changed.setattr(gc, "get_freeze_count", functools.partial(int, gc.get_freeze_count()))
    changed.setattr("vllm.v1.engine.core.freeze_gc_heap", lambda: None, raising=False)
    changed.setattr("vllm.v1.worker.gpu_model_runner.gc", SimpleNamespace(collect=lambda: 0))
    changed.setattr("accelerate.utils.memory.clear_device_cache", lambda **given: None, raising=False)
    with models_inspected_here(), kernels_replaced_once():
        yield
    changed.undo()
    gc.unfreeze()  # libraries that count what is left at the end would complain


_freeze, _tests_ended = gc.freeze, 0


def pytest_runtest_logfinish() -> None:
    """Exclude from collections what the last tests have left for good, such as modules and caches: half a million
    objects in the end, over which every end of an engine collects garbage. A model of a module's fixture may be among
    them, and is never freed then; it has 8 MB."""
    global _tests_ended
    _tests_ended += 1
    if not _tests_ended % 50 and gc.get_freeze_count() > 100_000:
        gc.collect()
        _freeze()


@pytest.fixture
def run(tmp_path: Path, prompts: Any, started_once: None) -> Iterator[Callable[..., FinishedRun]]:
    """Build a trainer on a tiny model, train it, return the Run. Runs are closed at the end of the test."""
    from trl import GRPOConfig
    from trlx_hybrid.testing.models import character_tokenizer, tiny_model
    from trlx_hybrid.testing.processes import free_port

    runs: list[FinishedRun] = []

    def start(trainer_class: type[Any], *, train: bool = True, model: Any = None, **given: Any) -> FinishedRun:
        config_class = given.pop("config_class", GRPOConfig)
        resume = given.pop("resume", None)
        keys = (
            "teacher_model",
            "peft_config",
            "callbacks",
            "eval_dataset",
            "hybrid",
            "plugins",
            "tools",
            "train_dataset",
            "reward_funcs",
            "environment_factory",
            "rollout_func",
            "processing_class",
        )
        trainer_arguments = {key: given.pop(key) for key in keys if key in given}
        recorder = Recorder(contrast=given.pop("contrast", 0.0))
        settings: dict[str, Any] = {
            "output_dir": str(tmp_path / f"run{len(runs)}"),
            "per_device_train_batch_size": 8,
            "num_generations": 4,
            "max_completion_length": 12,
            "max_steps": 3,
            "logging_steps": 1,
            "learning_rate": 3e-3,
            "report_to": [],
            "use_cpu": True,
            "bf16": False,
            "save_strategy": "no",
            "vllm_max_model_length": 64,
            "disable_tqdm": True,
        } | given
        settings = {key: value for key, value in settings.items() if key in config_class.__dataclass_fields__}
        trainer_arguments.setdefault("train_dataset", prompts)
        trainer_arguments.setdefault("processing_class", character_tokenizer())
        environment = dict(os.environ)
        # TRL would look for a free one among four fixed ports, and lose the one it found to a neighbour.
        os.environ["MASTER_PORT"] = str(free_port())
        if config_class.__name__ != "DistillationConfig":
            trainer_arguments.setdefault("reward_funcs", recorder)
        trainer = trainer_class(
            model=model if model is not None else tiny_model(),
            args=config_class(**settings),
            **trainer_arguments,
        )
        runs.append(FinishedRun(trainer, recorder, environment))
        if train:
            trainer.train(resume_from_checkpoint=resume)
        return runs[-1]

    yield start
    for finished in runs:
        finished.close()


@pytest.fixture
def stock_colocate() -> Iterator[dict[str, Any]]:
    """Make TRL's own colocate path exact on a CPU, and yield further arguments of its engine, for a test to change."""
    from tests.support.stock_colocate import plain_colocate

    environment = dict(os.environ)
    with plain_colocate() as changes:
        yield changes
    os.environ.clear()  # TRL sets RANK and its like, and leaves them: the next accelerator would believe them
    os.environ.update(environment)
