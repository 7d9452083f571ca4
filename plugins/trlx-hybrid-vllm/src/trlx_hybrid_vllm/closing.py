"""Taking an engine down, in a process that goes on or at its end; of vLLM's internals, what that takes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from trlx_hybrid.ranks import abort

from .internals import frozen_heap

ABORT_SECONDS = 5.0
"""What vLLM gives an abort of its own communicators."""


def own_end(llm: Any) -> None:
    """From now on the engine ends when it is told to, and not when vLLM's client is collected or the interpreter exits:
    vLLM would then destroy every process group of the process, those of accelerate and of other plugins included, and
    wait in that for whatever still uses one."""
    llm.llm_engine.engine_core._finalizer.detach()


def let_go(llm: Any, made_default_group: bool) -> None:
    """Before the interpreter exits: nothing of the engine's may be waited for.

    A communicator that a CUDA graph names is destroyed only after the graph (NCCL, `commDestroySync`), and one with a
    rank that is elsewhere not at all. So the graphs go first, and the communicators are aborted; last the default one
    of a single process, where the engine made it: nobody else would, and torch warns of what nobody destroyed.

    Args:
        llm: None where a `shut_down` failed half-way.
    """
    _make_freeable()
    _forget_graphs(llm)
    groups = list(_device_groups())
    if made_default_group and dist.is_initialized() and dist.get_world_size() == 1:
        groups.append(dist.group.WORLD)
    abort(groups, ABORT_SECONDS)


class _Unmapped:
    """What vLLM's allocator knows of memory that sleeps, for the moment it is freed.

    vLLM 0.31 unmaps what it frees, and memory that sleeps is not mapped: seen on H200s, that ends in "invalid argument"
    or in a segmentation fault. So it is mapped when it is freed, one allocation after the other, since all of them
    together might not fit beside what the trainer holds by now.

    Args:
        data: vLLM's `AllocationData`.
    """

    cpu_backup_tensor = None
    is_asleep = False

    def __init__(self, data: Any) -> None:
        self.tag, self._handle, self._mapped = data.tag, data.handle, False

    @property
    def handle(self) -> Any:
        from vllm.device_allocator.cumem import create_and_map

        if not self._mapped:
            self._mapped = True
            create_and_map(self._handle)
        return self._handle


_ALLOCATORS: list[Any] = []
"""Of engines that are gone: policies may still live in their memory, which goes back through them (pytorch#145168)."""


def _make_freeable() -> None:
    """What sleeps may be freed from now on, and what is in use may be freed after the engine."""
    if not torch.cuda.is_available():
        return
    from vllm.device_allocator.cumem import CuMemAllocator

    memory: Any = CuMemAllocator.instance
    if memory is not None:
        asleep = {address: data for address, data in memory.pointer_to_data.items() if data.is_asleep}
        memory.pointer_to_data |= {address: _Unmapped(data) for address, data in asleep.items()}
        _ALLOCATORS.extend(allocator for _, allocator in memory.allocator_and_pools.values())


def _forget_graphs(llm: Any) -> None:
    from vllm.compilation.cuda_graph import CUDAGraphWrapper

    if torch.cuda.is_available():
        CUDAGraphWrapper.clear_all_graphs()  # those of parts of the model
        if llm is None:
            return
        manager = getattr(llm.llm_engine.model_executor.driver_worker.model_runner, "cudagraph_manager", None)
        if manager is not None:
            manager.graphs.clear()  # those of whole steps


def shut_down(llm: Any, made_default_group: bool, peers_lost: bool = False, heap_kept: bool = False) -> None:
    """Free the engine and the process groups it made.

    vLLM's own shutdown destroys the default process group as well, which under DDP and FSDP is accelerate's; so its
    parts are taken down here one by one.

    Args:
        peers_lost: some rank will not do the same.
        heap_kept: as in `internals.frozen_heap`.
    """
    from vllm.distributed import parallel_state

    own_end(llm)
    core = llm.llm_engine.engine_core.engine_core
    _make_freeable()
    _forget_graphs(llm)
    core.structured_output_manager.clear_backend()
    with frozen_heap(heap_kept):
        core.model_executor.shutdown()  # unfreezes the heap: engine and trainer could not be collected
    core.scheduler.shutdown()
    if peers_lost:
        abort(list(_device_groups()), ABORT_SECONDS)
    parallel_state.destroy_model_parallel()
    if parallel_state._WORLD is not None:
        parallel_state._WORLD.destroy()
    parallel_state._WORLD = parallel_state._NODE_COUNT = None
    if made_default_group and dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _device_groups() -> Iterator[Any]:
    """vLLM's NCCL groups, which it knows no more, since it destroys those that it knows."""
    from vllm.distributed import parallel_state

    for coordinator in vars(parallel_state).values():
        if not isinstance(coordinator, parallel_state.GroupCoordinator) or not hasattr(coordinator, "device_group"):
            continue
        if dist.get_backend(coordinator.device_group) == "nccl":
            yield coordinator.device_group
            del coordinator.device_group
