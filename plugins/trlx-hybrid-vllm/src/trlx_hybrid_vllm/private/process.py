"""Context managers that protect the trainer's process while a vLLM engine starts and runs in it.

Python's heap, the caches of torch and vLLM, and transformers' classes stay as they were.
"""

from __future__ import annotations

import functools
import gc
import importlib
import io
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from trlx_hybrid.interprocess.environment_variables import restored
from trlx_hybrid.memory.heap import note_unfrozen

from . import Patch, replaced
from .models import inspected_here

PATCHES = (
    Patch(
        of=("gc.freeze", "gc.unfreeze"),
        when="while an engine starts, and where the user had frozen the heap, while it ends",
        why="vLLM freezes and unfreezes the whole heap, and so would unfreeze what the user has frozen.",
        until="vLLM leaves a heap frozen that was frozen before it started",
    ),
    Patch(
        of=("torch.cuda.empty_cache", "torch.accelerator.empty_cache", "gc.collect"),
        when="while the engine falls asleep and wakes up",
        why="vLLM empties the cache of torch's allocator, and the next loss asks the driver for the memory again. "
        "Before it does so, it collects garbage, 5 ms each time.",
        until="vLLM's sleep and wake-up can leave the allocator's cache alone",
    ),
    Patch(
        of=("vllm.config.ModelConfig.compute_hash",),
        when="while an engine starts",
        why="The hash of what was compiled has the path of the model's folder in it, which is another at each start.",
        until="vLLM leaves the model's path out of the hash, or takes a name for it",
    ),
    Patch(
        of=("transformers.PreTrainedModel",),
        when="while an engine starts: what vLLM has changed is undone",
        why="vLLM changes base classes and attributes of transformers' classes when it builds its own model of them.",
        until="vLLM makes subclasses of transformers' classes instead",
    ),
)


MODULES_WITH_TENSORS = ("compressed_tensors.compressors.nvfp4.helpers", "flashinfer.quantization.fp4_quantization")
"""Modules that allocate tensors when they are imported, as seen in a history of torch's allocations on H200s."""


def import_modules_with_tensors() -> None:
    """Import the modules that allocate tensors when they are imported, before vLLM does so while it builds a model.

    The tensors would otherwise lie in the memory pool of vLLM's sleep mode. Their contents would be lost at the first
    sleep, and the memory could never be freed for another engine.
    """
    if torch.cuda.is_available():
        for name in MODULES_WITH_TENSORS:
            with suppress(ImportError):
                importlib.import_module(name)


@contextmanager
def frozen_heap(kept: bool, starts: bool = False) -> Iterator[None]:
    """Keep the Python objects frozen (`gc.freeze`) that the user has frozen, while vLLM starts or ends inside the
    context.

    vLLM freezes the whole heap when it starts. It unfreezes the whole heap after a capture of graphs and when it ends,
    since otherwise the engine's objects could never be collected. Python cannot tell the objects that vLLM froze from
    the objects that were frozen before. So if the user froze some before, `gc.freeze` and `gc.unfreeze` do nothing
    inside the context.

    Otherwise vLLM must freeze. It collects garbage whenever the engine falls asleep or wakes up, three times a step. On
    an H200, each collection took 0.2 s of a step of 1.3 s, since it visited all objects of engine and trainer. While
    vLLM starts, it only freezes: all is frozen at the end anyway, and its collections between visit what is new.

    Args:
        kept: whether the user froze objects before the engine was built (`frozen_by_the_user`). Pass False, too, if
            the user's code has called `gc.freeze` since then: this froze the engine's objects as well, and they must be
            unfrozen to be collected.
        starts: whether vLLM starts. If this fails, the heap is unfrozen.
    """
    with ExitStack() as stack:
        if kept:
            stack.enter_context(replaced(gc, "freeze", lambda: None))
        elif starts:
            stack.push(_unfreeze_after_failure)
        if kept or starts:
            stack.enter_context(replaced(gc, "unfreeze", lambda: None))
        yield


def _unfreeze_after_failure(kind: type[BaseException] | None, *_: object) -> None:
    if kind is not None:
        gc.unfreeze()
        note_unfrozen()


@contextmanager
def cache_kept(wanted: int = 0) -> Iterator[None]:
    """Keep the cache of torch's allocator while vLLM sleeps or wakes up, since vLLM would return the whole cache to the
    driver.

    The trainer's next loss then need not ask the driver for the memory again, in some five hundred calls. Inside the
    context, no thread of the process can empty the cache, or call the garbage collector, which vLLM does before.

    Args:
        wanted: the number of bytes of device memory that must be free. If fewer are free, vLLM may empty the cache.
    """
    if not torch.cuda.is_available() or torch.cuda.mem_get_info()[0] < wanted:
        yield
        return
    with ExitStack() as stack:
        for module in (torch.accelerator, torch.cuda):
            stack.enter_context(replaced(module, "empty_cache", lambda: None))
        stack.enter_context(replaced(gc, "collect", lambda *generation: 0))
        yield


@contextmanager
def compiled_once(folder: str, joined: bool) -> Iterator[None]:
    """Let vLLM reuse the code that an earlier start compiled, although the model's folder has a new random name each
    time.

    vLLM keeps compiled models under a hash of its config, which includes the model's path. With a new path, every start
    would compile again, and leave one more folder in vLLM's cache. It would also time and choose kernels again, and
    other kernels may round differently. The hash covers the model's config as well, so different models still have
    different hashes.

    Args:
        folder: the model's path.
        joined: whether vLLM's layers compute base and adapter in one product (`adapted_linear.py`), which compiles to
            other code, and so needs another hash.
    """
    from vllm.config import ModelConfig

    plain = ModelConfig.compute_hash

    @functools.wraps(plain)
    def compute_hash(config: ModelConfig) -> str:
        path = config.model
        config.model = f"trlx-hybrid{', adapters under weights' * joined}" if path == folder else path
        try:
            hashed: str = plain(config)
            return hashed
        finally:
            config.model = path

    with replaced(ModelConfig, "compute_hash", compute_hash):
        yield


def folder_of_compiled() -> Path:
    """Return the folder in which vLLM keeps compiled models, and all else that a later start finds."""
    from vllm import envs

    return Path(envs.VLLM_CACHE_ROOT)


FLOAT32_PRODUCTS = "TRITON_F32_DEFAULT"
"""The environment variable for the precision of Triton's float32 products, read when a kernel is compiled.

By default they are TF32, and attention, and so each log-prob, is off by 1e-3. PyTorch's products, and so the trainer's,
are exact by default.
"""


EXACT = "ieee"

KERNELS = "TRITON_CACHE_DIR"
"""The environment variable for the folder in which Triton keeps compiled kernels. Triton reads it for each kernel."""


def folder_of_kernels() -> str:
    """Return the folder in which Triton keeps compiled kernels: the one that the user has set, or Triton's default.

    An engine must start with the variable `KERNELS` set to it. While vLLM compiles or loads a model, torch's inductor
    sets the variable if it is not set, to a folder that belongs to this one configuration of the engine
    (`torch/_inductor/runtime/triton_heuristics.py`). The kernels that are launched later, such as those of vLLM's
    sampler, are the same for each configuration, and would be compiled again for each: for 25 s on an H200.
    """
    home = Path(os.environ.get("TRITON_HOME", "~/")).expanduser()
    return os.environ.get(KERNELS) or str(home / ".triton" / "cache")


@contextmanager
def stdout_with_descriptor() -> Iterator[None]:
    """Give `sys.stdout` a file descriptor, which vLLM duplicates as it starts. In some notebooks it has none."""
    try:
        sys.stdout.fileno()
    except (AttributeError, io.UnsupportedOperation):
        with redirect_stdout(sys.__stdout__):
            yield
    else:
        yield


@contextmanager
def running(dtype: torch.dtype, collecting: bool = False) -> Iterator[None]:
    """Prepare the process for calls of an engine; all of an engine's calls are made inside this context.

    For float32 engines, Triton's products are made exact. Compiled Triton kernels are kept for engines of all
    configurations (`folder_of_kernels`). The garbage collector pauses, because a rollout allocates a few objects per
    token. On a CPU, torch.compile is switched off: it costs 14 s at the first call.

    Args:
        dtype: the dtype that the engine computes in.
        collecting: keep the garbage collector on, for long calls that run the user's code. Collections do not visit the
            objects that existed when the engine was built: vLLM has frozen them.
    """
    from vllm.platforms import current_platform

    stance: Any = torch.compiler.set_stance("force_eager") if current_platform.is_cpu() else nullcontext()
    paused = gc.isenabled() and not collecting
    with stance, restored(FLOAT32_PRODUCTS, KERNELS):
        os.environ[KERNELS] = folder_of_kernels()
        if dtype == torch.float32:
            os.environ.setdefault(FLOAT32_PRODUCTS, EXACT)
        if paused:
            gc.disable()
        try:
            yield
        finally:
            if paused:
                gc.enable()


@contextmanager
def starting(
    dtype: torch.dtype, folder: str, rank: int | None, trained: nn.Module, heap_kept: bool
) -> Iterator[list[nn.Module]]:
    """Return a context in which to build an engine: it prepares the process, and at its end undoes what vLLM has done
    to the process.

    Args:
        dtype: the dtype that the engine computes in.
        folder: the path of the model's folder.
        rank: the rank for which vLLM allocates LoRA's A and B; None for an engine without adapters or with several.
        trained: the policy's module, whose classes stay as they are.
        heap_kept: whether the user froze Python objects (`gc.freeze`) before, which stay frozen.

    Yields:
        An empty list, to which the caller appends the engine's model. vLLM changes classes of the policy when it builds
        this model: at the end, the policy's classes are as before, and the model's modules get changed subclasses.
    """
    from .adapted_linear import adapters_under_weights

    with (
        running(dtype),
        stdout_with_descriptor(),
        inspected_here(),
        frozen_heap(heap_kept, starts=True),
        adapters_under_weights(rank) as joined,
        compiled_once(folder, joined),
        trainer_classes_kept(trained) as built,
    ):
        yield built


@contextmanager
def trainer_classes_kept(trained: nn.Module) -> Iterator[list[nn.Module]]:
    """Restore, when the context ends, the classes of the trained model's modules, which vLLM changes as it builds its
    own model: it adds base classes to them.

    The models that vLLM built need these changes. At the end of the context, their modules are given subclasses of the
    restored classes, which have the changes.

    Yields:
        An empty list, to which the caller appends the models that vLLM built.
    """
    classes = {c for module in trained.modules() for c in type(module).__mro__ if c is not object}
    before = {c: (c.__bases__, dict(vars(c))) for c in classes}
    built: list[nn.Module] = []
    try:
        yield built
    finally:
        for cls, (bases, attributes) in before.items():
            if cls.__bases__ != bases:
                own = _moved_into_subclass(cls, bases, attributes)
                for module in (m for model in built for m in model.modules() if type(m) is cls):
                    module.__class__ = own


def _moved_into_subclass(cls: type, bases: tuple[type, ...], attributes: dict[str, Any]) -> type:
    """Undo changes to a class, and return a subclass of it that has the changes, and the same name.

    Args:
        cls: the class, with base classes and attributes that vLLM has added or replaced.
        bases: the base classes that the class had before.
        attributes: the `vars()` that the class had before.
    """
    added = tuple(base for base in cls.__bases__ if base not in bases)
    changed = {key: value for key, value in vars(cls).items() if attributes.get(key) is not value}
    cls.__bases__ = bases
    for key in changed:
        if key in attributes:
            setattr(cls, key, attributes[key])
        else:
            delattr(cls, key)
    return type(cls)(cls.__name__, (cls, *added), {**changed, "__module__": cls.__module__})
