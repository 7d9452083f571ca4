"""Everything this plugin uses of vLLM 0.31 beyond its documented interface, in one place.

tests/test_internals.py names what broke when a version changes it.
"""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch


def model_of(llm: Any) -> torch.nn.Module:
    """The model inside an in-process engine."""
    return llm.llm_engine.model_executor.driver_worker.model_runner.model  # type: ignore[no-any-return]


def tensor_parallel_group() -> Any:
    """This rank's replica: `.cpu_group` is its gloo group, `.world_size` its size, `.rank_in_group` our place."""
    from vllm.distributed.parallel_state import get_tp_group

    return get_tp_group()


@contextmanager
def launcher_environment(rank: int, local_rank: int, world: int) -> Iterator[None]:
    """What vLLM's "external_launcher" executor reads from the environment, set while the engine is built.

    That executor joins the process group that accelerate made, or makes one of a single process on a free port.
    """
    wanted: dict[str, int | str] = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": world}
    if "MASTER_PORT" not in os.environ or world == 1:
        wanted |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}
    saved = {name: os.environ.get(name) for name in [*wanted, "VLLM_ENABLE_V1_MULTIPROCESSING"]}
    os.environ.update({name: str(value) for name, value in wanted.items()})
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def running() -> Any:
    """Around every engine call. On a CPU torch.compile is switched off inside: it costs 14 s at the first call."""
    from vllm.platforms import current_platform

    return torch.compiler.set_stance("force_eager") if current_platform.is_cpu() else nullcontext()


def shut_down(llm: Any, made_default_group: bool) -> None:
    """Free the engine and the process groups it made; accelerate's default group survives if it was there before."""
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    default = None if made_default_group else torch.distributed.group.WORLD
    llm.llm_engine.engine_core.shutdown()
    if default is None or torch.distributed.is_initialized():
        destroy_model_parallel()
    if made_default_group:
        destroy_distributed_environment()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
