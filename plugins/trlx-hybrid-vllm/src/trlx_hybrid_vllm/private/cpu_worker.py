"""vLLM's CPU worker, made to behave like the GPU's: weights stay where they were loaded, and sleeping frees memory.

vLLM hands `worker_cls` to its executor by name; this is its public way to replace a worker.
"""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_worker import CPUWorker

from .cpu_layers import PLAIN_LAYERS
from .engine import flat

IDENTITY = "VLLM_DIST_IDENT"
"""The environment variable with the prefix of vLLM's shared-memory names."""
MAPS = Path("/proc/self/maps")
SEGMENTS = "/dev/shm/"


class PlainWeightsCPUWorker(CPUWorker):  # type: ignore[misc]
    """A CPU worker whose layers compute with the weights as loaded, so that a weight sync can write to them.

    Its sleep frees the memory of weights and KV cache. It samples with the requests' seeds only, and draws nothing from
    torch's default generator.
    """

    def init_device(self) -> None:
        """Initialize as vLLM does, but keep `torch.set_num_threads`, and give each job its own shared-memory names.

        vLLM would replace `torch.set_num_threads` for the whole process. It names the memory that its ranks share after
        their rendezvous, which is "env://" in every job of a machine. A second job would fail with errno 17, and so
        would all later ones where a killed one left the name behind. Ranks of several hosts share no memory: where
        their names differ, vLLM goes through gloo.
        """
        set_num_threads, connect = torch.set_num_threads, cpu_worker.init_worker_distributed_environment

        def connect_this_job(*args: Any, **kwargs: Any) -> None:
            if self.distributed_init_method == "env://":
                master = [os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT")]
                os.environ[IDENTITY] = "-".join([*master, socket.gethostname(), _shared_memory()])
            connect(*args, **kwargs)
            unlink_segments(os.environ[IDENTITY])

        try:
            with patch.object(cpu_worker, "init_worker_distributed_environment", connect_this_job):
                super().init_device()
        finally:
            torch.set_num_threads = set_num_threads

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model with layers that keep and use the weights as they are loaded."""
        with ExitStack() as patches:
            for name, plain in PLAIN_LAYERS.items():
                patches.enter_context(patch(f"vllm.model_executor.layers.{name}", plain))
            super().load_model(*args, **kwargs)
        # vLLM's sampler for CPUs draws from torch's generator even where every request has a seed. Tools in threads may
        # draw from it at the same time, so restoring the generator's state would undo their draws, too.
        sampler = self.model_runner.sampler.topk_topp_sampler
        sampler.forward = sampler.forward_native
        runner = self.model_runner
        if not get_pp_group().is_first_rank:  # where the GPU's runner receives what the stage before has computed
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )

    def sleep(self, level: int = 2) -> None:
        """Free the memory of weights and KV cache: the tensor objects stay, their contents are lost.

        `level` is not used.
        """
        self.discard(("weights", "kv_cache"))

    def discard(self, tags: tuple[str, ...]) -> None:
        """Free the memory of the parts that `tags` names, "weights" or "kv_cache", if it is not free yet."""
        owners = {"weights": list(self.model_runner.model.parameters()), "kv_cache": flat(self.model_runner.kv_caches)}
        freed = getattr(self, "_freed", {})
        self._freed = {tag: _free(owners[tag]) for tag in tags if tag not in freed} | freed

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Allocate freed memory again, that of the parts that `tags` names or of both.

        Floating-point weights are NaN until a sync writes them; the KV cache is zeros.
        """
        for tag in tags or ["weights", "kv_cache"]:
            for storage, size in self._freed.pop(tag, []):
                storage.resize_(size)
                raw = torch.empty(0, dtype=torch.uint8).set_(storage)
                raw.fill_(255 if tag == "weights" else 0)


def unlink_segments(identity: str) -> None:
    """Unlink the shared-memory files that this process has mapped, so that none is left when the processes end.

    The memory stays mapped. All ranks must have mapped it before, because it can no longer be found by name.

    Args:
        identity: the prefix of the names.
    """
    for line in MAPS.read_text().splitlines() if MAPS.exists() else ():
        _, _, name = line.partition(SEGMENTS)
        if name.startswith(f"{identity}-") and not name.endswith(" (deleted)"):
            with suppress(FileNotFoundError):  # a peer was faster
                os.unlink(SEGMENTS + name)


def _shared_memory() -> str:
    """Return the device number of this process's `/dev/shm`, or "" if there is none.

    It tells containers of one host apart, which may see different ones.
    """
    return str(os.stat(SEGMENTS).st_dev) if os.path.isdir(SEGMENTS) else ""


def _free(tensors: list[torch.Tensor]) -> list[tuple[torch.UntypedStorage, int]]:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
    freed = [(storage, storage.nbytes()) for storage in storages.values()]
    for storage, _ in freed:
        storage.resize_(0)
    return freed
