"""The training stack in a process that many tests share: imported once, and prepared once for all engines."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec

import pytest

STACK = (
    "accelerate",
    "datasets",
    "peft",
    "torch.distributed.fsdp",
    "transformers.models.qwen3.modeling_qwen3",
    "trl.trainer.grpo_trainer",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.llm",
    "vllm.lora.layers",
    "vllm.model_executor.layers.quantization.online.base",
    "trlx_hybrid.trl.trainer",
)
ON_A_CPU = "vllm.v1.worker.cpu_worker"
"""Imported on machines without a GPU only: it replaces torch's streams of CUDA for the whole process, so that no graph
could be captured."""

_for_children = ExitStack()  # open until the process exits


def import_stack() -> None:
    """Import the training stack. Environments without some of its packages, such as vLLM, import the rest.

    Raises:
        ImportError: an installed package lacks a module.
    """
    for name in STACK:
        if find_spec(name.partition(".")[0]):
            importlib.import_module(name)
    if find_spec("vllm") and importlib.import_module("vllm.platforms").current_platform.is_cpu():
        importlib.import_module(ON_A_CPU)


@contextmanager
def models_inspected_here() -> Iterator[None]:
    """A context in which vLLM inspects model classes in this process.

    By default vLLM inspects each class that is new on this machine in a subprocess, because the inspection could
    initialise CUDA. On a CPU it cannot, and the subprocess would spend ten seconds of CPU time on imports.
    """
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr("vllm.model_executor.models.registry._run_in_subprocess", lambda look: look())
        yield


@contextmanager
def kernels_replaced_once() -> Iterator[None]:
    """A context in which vLLM's CPU platform replaces its Triton kernels once, and not at each engine's start.

    It looks for them among all names of all modules, which takes a third of a second.
    """
    platform = importlib.import_module("vllm.platforms.cpu").CpuPlatform
    with pytest.MonkeyPatch.context() as changed:
        replace_kernels = functools.cache(platform.register_triton_kernel_overrides)
        changed.setattr(platform, "register_triton_kernel_overrides", staticmethod(replace_kernels))
        yield


def prepare_for_engines() -> None:
    """Prepare this process for the engines of its children, until it exits; without vLLM there is nothing to do."""
    if "vllm.entrypoints.llm" not in sys.modules:
        return
    _for_children.enter_context(models_inspected_here())
    platform = importlib.import_module("vllm.platforms").current_platform
    if platform.is_cpu():
        _for_children.enter_context(kernels_replaced_once())
        platform.register_triton_kernel_overrides()
