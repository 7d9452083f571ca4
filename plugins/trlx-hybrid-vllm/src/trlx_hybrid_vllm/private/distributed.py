"""Access to vLLM's process groups, and to its transfer of weights to other processes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator
    from vllm.distributed.weight_transfer import TrainerWeightTransferEngine


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica: the ranks that run one engine together.

    Attributes:
        cpu_group: their process group, over gloo.
        world_size: how many ranks there are.
        rank_in_group: this process's rank in the group.
        owned: True where `of_this_rank` made the group, rather than vLLM, so that `close` must destroy it.
    """

    cpu_group: dist.ProcessGroup
    world_size: int
    rank_in_group: int
    owned: bool = False

    @classmethod
    def of_this_rank(cls, size: int) -> Replica:
        """Return the replica (the `size` ranks of one engine) of this rank, right after its engine was built.

        Collective over all ranks.

        vLLM has a group of the ranks that share layers (tensor parallelism), and one of the ranks with successive
        layers (pipeline stages), but none of all ranks of an engine that has both.
        """
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        if get_pp_group().world_size == 1:
            group = get_tp_group()
            return cls(group.cpu_group, group.world_size, group.rank_in_group)
        new_subgroups: Callable[..., tuple[dist.ProcessGroup, object]] = dist.new_subgroups
        own, _ = new_subgroups(size, backend="gloo")
        return cls(own, size, dist.get_rank() % size, owned=True)

    def close(self) -> None:
        """Destroy `cpu_group` if `of_this_rank` made it; a group of vLLM's is left to vLLM.

        Does nothing if the user's script has destroyed all process groups already.
        """
        if self.owned and dist.is_initialized():
            dist.destroy_process_group(self.cpu_group)


def forget_groups(made_default_group: bool) -> None:
    """Destroy vLLM's process groups, and torch's default group if `made_default_group` (the engine made it)."""
    from vllm.distributed import parallel_state

    parallel_state.destroy_model_parallel()
    if parallel_state._WORLD is not None:
        parallel_state._WORLD.destroy()
    parallel_state._WORLD = parallel_state._NODE_COUNT = None
    if made_default_group and dist.is_initialized():
        dist.destroy_process_group()


def coordinators() -> list[GroupCoordinator]:
    """Return vLLM's `GroupCoordinator`s of this process (tensor parallel, pipeline parallel and so on)."""
    from vllm.distributed import parallel_state

    return [each for each in vars(parallel_state).values() if isinstance(each, parallel_state.GroupCoordinator)]


def forget_queues() -> None:
    """Drop the message queues in shared memory between an engine's ranks, and so unlink their memory.

    Otherwise Python's resource tracker would unlink the memory when the interpreter exits, and warn of a leak.
    """
    for coordinator in coordinators():
        coordinator.mq_broadcaster = None


def device_groups() -> Iterator[dist.ProcessGroup]:
    """Yield vLLM's NCCL groups, for an abort, and remove them from vLLM, which would destroy the groups that it knows.

    Yields nothing where the user's script has destroyed all groups, as `accelerator.end_training()` does.
    """
    for coordinator in coordinators() if dist.is_initialized() else ():
        if not hasattr(coordinator, "device_group"):
            continue
        if dist.get_backend(coordinator.device_group) == "nccl":
            yield coordinator.device_group
            del coordinator.device_group


def layers_of_stages(layers: int, stages: int) -> list[tuple[int, int]]:
    """Return for each pipeline stage the half-open range (first, end) of its layers, as vLLM splits them.

    Args:
        layers: the number of the model's layers.
        stages: the number of pipeline stages.
    """
    from vllm.distributed.utils import get_pp_indices

    return [get_pp_indices(layers, stage, stages) for stage in range(stages)]


# --- the transfer of weights to other processes -----------------------------------------------------------------------


@functools.cache
def nccl_missing() -> str | None:
    """Return why vLLM cannot use NCCL in this process, or None.

    vLLM goes on without NCCL where the library is too old (vllm/distributed/device_communicators/pynccl.py,
    `disabled`): its `nccl` transfer then sends nothing, and reports no error.
    """
    from vllm import envs
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    if envs.VLLM_DISABLE_PYNCCL:
        return "VLLM_DISABLE_PYNCCL is set."
    try:
        NCCLLibrary()
    except Exception as error:  # an error of the loader, of ctypes, or of vLLM
        return f"vLLM cannot use the NCCL it finds ({error})."
    return None


def transfer_backends() -> dict[str, Callable[[], type[TrainerWeightTransferEngine]]]:
    """Return vLLM's weight-transfer backends by name.

    Each value is a function that returns the `TrainerWeightTransferEngine` class of the backend.
    """
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

    backends: dict[str, Callable[[], type[TrainerWeightTransferEngine]]] = WeightTransferTrainerFactory._registry
    return backends


def free_port() -> int:
    """Return a free port of this machine. If the environment variable `VLLM_PORT` is set, the search begins there."""
    from vllm.utils.network_utils import get_open_port

    return int(get_open_port())


def destroy_group(sender: TrainerWeightTransferEngine) -> Callable[[], None] | None:
    """Return a function that destroys the NCCL group of a trainer's weight-transfer engine when called; None without
    such a group. Nothing is destroyed yet: the caller fetches the function, shuts the engine down and then calls it.

    Args:
        sender: the trainer's weight-transfer engine.
    """
    destroy: Callable[[], None] | None = getattr(getattr(sender, "model_update_group", None), "destroy", None)
    return destroy
