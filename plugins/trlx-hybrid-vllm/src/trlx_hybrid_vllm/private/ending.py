"""Functions that end an in-process engine: they free its memory, graphs and process groups one by one.

vLLM's own shutdown also destroys torch's default process group, which under DDP and FSDP is accelerate's.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from trlx_hybrid.interprocess.ranks import abort

from . import Patch
from .distributed import device_groups, forget_groups, forget_queues
from .engine import model_of, runner_of
from .process import frozen_heap

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.device_allocator.cumem import AllocationData


PATCHES = (
    Patch(
        of=("vllm.v1.engine.core_client.InprocClient._finalizer",),
        when="from the engine's start on",
        why="It destroys every process group of the process, accelerate's too, when the interpreter exits.",
        until="an engine ends without the groups that it did not make",
    ),
    Patch(
        of=("vllm.device_allocator.cumem.CuMemAllocator.pointer_to_data",),
        when="from the engine's end on",
        why="vLLM unmaps memory when it is freed, also where it sleeps and is not mapped: on H200s that crashes.",
        until="vLLM frees memory that sleeps",
    ),
    Patch(
        of=("torch._dynamo.convert_frame._bytecode_hooks",),
        when="from the engine's end on",
        why="vLLM leaves hooks there that hold the model, so its memory would never be freed.",
        until="vLLM removes all hooks that it has registered",
    ),
    Patch(
        of=("vllm.compilation.caching.VllmSerializableFunction.example_inputs",),
        when="from the engine's end on",
        why="torch.compile keeps it as a global, and it holds the weights that the model was traced with.",
        until="vLLM drops the inputs of a trace once it is compiled",
    ),
    Patch(
        of=("vllm.distributed.parallel_state._WORLD", "vllm.distributed.parallel_state._NODE_COUNT"),
        when="from the engine's end on",
        why="vLLM's own shutdown destroys them together with the trainer's groups, so they are dropped one by one.",
        until="an engine ends without the groups that it did not make",
    ),
)


ABORT_SECONDS = 5.0
"""The time that an abort of NCCL communicators may take, in seconds; vLLM has the same limit."""


def detach_finalizer(llm: LLM) -> None:
    """Detach vLLM's finalizer, so that the engine ends only when it is told to.

    The finalizer would end the engine when vLLM's client is collected or the interpreter exits. It would then destroy
    every process group of the process, including the groups of accelerate and of other plugins, and wait for all work
    that still uses a group.
    """
    llm.llm_engine.engine_core._finalizer.detach()


def release_at_exit(llm: LLM | None, made_default_group: bool) -> None:
    """Release an engine's CUDA graphs and communicators before the interpreter exits, which might otherwise hang.

    NCCL (`commDestroySync`) destroys a communicator only after the CUDA graphs that use it, and only together with all
    of its ranks. So the graphs are freed first. The communicators are then aborted, which waits for no rank. If the
    engine made torch's default group and the job has a single process, that group is aborted last: nobody else would
    destroy it, and torch warns of groups that are left.

    On a CPU there are no CUDA graphs and no NCCL. There `gc.unfreeze` is called, so that Python collects the objects
    that vLLM has frozen; otherwise Triton would print a list of its objects that are left.

    Args:
        llm: vLLM's LLM; None where a `shut_down` failed half-way.
        made_default_group: whether the engine made torch's default process group.
    """
    _make_freeable()
    _forget_graphs(llm)
    forget_queues()
    groups: list[Any] = list(device_groups())
    if made_default_group and dist.is_initialized() and dist.get_world_size() == 1:
        groups.append(dist.group.WORLD)
    abort(groups, ABORT_SECONDS)
    if not torch.cuda.is_available():
        gc.unfreeze()


class _Unmapped:
    """A stand-in for vLLM's record of an allocation in sleep mode, which maps the memory again when it is to be freed.

    vLLM 0.31 unmaps memory when it frees it. If the memory sleeps, it is not mapped, and unmapping it fails: on H200s
    with the error "invalid argument" or a segmentation fault. So this class maps an allocation directly before vLLM
    frees it. Allocations are mapped one after the other, because all of them together might not fit beside the memory
    that the trainer holds at that time.

    Args:
        data: vLLM's `AllocationData`.
    """

    cpu_backup_tensor = None
    is_asleep = False

    def __init__(self, data: AllocationData) -> None:
        self.tag, self._handle, self._mapped = data.tag, data.handle, False

    @property
    def handle(self) -> Any:
        from vllm.device_allocator.cumem import create_and_map

        if not self._mapped:
            self._mapped = True
            create_and_map(self._handle)
        return self._handle


_ALLOCATORS: list[Any] = []
"""Allocators of closed engines, kept alive: policies may use memory that is freed through them (pytorch#145168)."""


def _make_freeable() -> None:
    """Prepare the pool of vLLM's sleep mode, so that its memory can be freed while the engine sleeps or is closed."""
    if not torch.cuda.is_available():
        return
    from vllm.device_allocator.cumem import CuMemAllocator

    memory = CuMemAllocator.instance
    if memory is not None:
        asleep = {address: data for address, data in memory.pointer_to_data.items() if data.is_asleep}
        memory.pointer_to_data |= {address: _Unmapped(data) for address, data in asleep.items()}
        _ALLOCATORS.extend(allocator for _, allocator in memory.allocator_and_pools.values())


def _forget_graphs(llm: LLM | None) -> None:
    from vllm.compilation.cuda_graph import CUDAGraphWrapper

    if torch.cuda.is_available():
        CUDAGraphWrapper.clear_all_graphs()  # the graphs of parts of the model
        if llm is None:
            return
        manager = getattr(runner_of(llm), "cudagraph_manager", None)
        if manager is not None:
            manager.graphs.clear()  # the graphs of whole steps


def _forget_hooks(llm: LLM) -> None:
    """Remove the hooks by which an engine's model watches what Dynamo compiles, so that the model can be freed.

    vLLM 0.31 decorates classes of models for torch.compile. For each decorated class among a model's base classes it
    registers a method of the model as a hook, but it removes only the hook that it registered last. The other hooks
    would keep the model, with its weights, until the end of the process.
    """
    from torch._dynamo.convert_frame import _bytecode_hooks as hooks

    modules = set(model_of(llm).modules())
    for number, hook in list(hooks.items()):
        if getattr(hook, "__self__", None) in modules:
            del hooks[number]


def _forget_traced_weights() -> None:
    """Drop the weights that the engine's model was traced with, so that their memory is freed.

    torch.compile stores the compiled function as a global of the module that defines the model's class. The function
    contains an object of vLLM 0.31 (`VllmSerializableFunction`) that keeps the inputs of the trace, with all weights.
    So the next engine in the process would find the memory of the first engine in use, which vLLM refuses in sleep
    mode. After compilation, the inputs are needed only to store the compiled function in vLLM's cache.

    Call this after vLLM has shut down. Until then vLLM's objects are frozen (`gc.freeze`), and `gc.get_objects()`,
    which finds them here, leaves out frozen objects.
    """
    from vllm.compilation.caching import VllmSerializableFunction

    for held in gc.get_objects():
        if type(held) is VllmSerializableFunction:
            held.example_inputs = []


def shut_down(llm: LLM, made_default_group: bool, peers_lost: bool = False, heap_kept: bool = False) -> None:
    """Free the engine and the process groups it made.

    vLLM's own shutdown also destroys the default process group, which under DDP and FSDP is accelerate's; so this
    function shuts down vLLM's parts one by one.

    Args:
        llm: vLLM's LLM.
        made_default_group: whether the engine made torch's default process group, which is then destroyed as well.
        peers_lost: whether some rank will not shut its part of the engine down. Communicators are then aborted,
            because they can only be destroyed by all ranks together.
        heap_kept: whether the user froze Python objects (`gc.freeze`) before the engine was built, which stay frozen.
    """
    detach_finalizer(llm)
    core = llm.llm_engine.engine_core.engine_core
    _make_freeable()
    _forget_graphs(llm)
    _forget_hooks(llm)
    core.structured_output_manager.clear_backend()
    with frozen_heap(heap_kept):
        core.model_executor.shutdown()  # unfreezes the heap: otherwise engine and trainer could not be collected
    _forget_traced_weights()
    core.scheduler.shutdown()
    if peers_lost:
        abort(list(device_groups()), ABORT_SECONDS)
    forget_groups(made_default_group)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
