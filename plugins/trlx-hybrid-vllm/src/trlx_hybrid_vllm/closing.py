"""Taking an engine down in a process that goes on; of vLLM's internals, what that takes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch
from trlx_hybrid.groups import abort

ABORT_SECONDS = 5.0
"""What vLLM gives an abort of its own communicators."""


def shut_down(llm: Any, made_default_group: bool, peers_lost: bool = False) -> None:
    """Free the engine and the process groups it made.

    vLLM's own shutdown destroys the default process group as well, which under DDP and FSDP is accelerate's; so its
    parts are taken down here one by one.

    Args:
        peers_lost: some rank will not do the same.
    """
    from vllm.distributed import parallel_state

    client = llm.llm_engine.engine_core
    client._finalizer.detach()
    core = client.engine_core
    core.structured_output_manager.clear_backend()
    core.model_executor.shutdown()
    core.scheduler.shutdown()
    gc.unfreeze()  # vLLM froze the heap when it started: engine and trainer could not be collected
    if peers_lost:
        abort(list(_device_groups()), ABORT_SECONDS)
    parallel_state.destroy_model_parallel()
    if parallel_state._WORLD is not None:
        parallel_state._WORLD.destroy()
    parallel_state._WORLD = parallel_state._NODE_COUNT = None
    if made_default_group and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _device_groups() -> Iterator[Any]:
    """vLLM's NCCL groups, which it knows no more, since it destroys those that it knows."""
    from vllm.distributed import parallel_state

    for coordinator in vars(parallel_state).values():
        if not isinstance(coordinator, parallel_state.GroupCoordinator) or not hasattr(coordinator, "device_group"):
            continue
        if torch.distributed.get_backend(coordinator.device_group) == "nccl":
            yield coordinator.device_group
            del coordinator.device_group
