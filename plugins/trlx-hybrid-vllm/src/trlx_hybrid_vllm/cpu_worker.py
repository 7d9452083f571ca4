"""vLLM's CPU worker, made to behave like the GPU's: weights stay where they were loaded, and sleeping frees memory.

vLLM hands `worker_cls` to its executor by name; this is its public way to replace a worker.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from vllm.v1.worker.cpu_worker import CPUWorker


class PlainWeightsCPUWorker(CPUWorker):  # type: ignore[misc]
    """Keeps linear weights as live parameters, and gives storages back on sleep."""

    def init_device(self) -> None:
        """As in vLLM, without replacing `torch.set_num_threads` for the whole process."""
        set_num_threads = torch.set_num_threads
        try:
            super().init_device()
        finally:
            torch.set_num_threads = set_num_threads

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load without prepacking: vLLM would pack each linear weight for oneDNN or AMX and delete the original."""
        with (
            patch("vllm._custom_ops._supports_onednn", False),
            patch("vllm.model_executor.layers.utils.check_cpu_sgl_kernel", lambda *_: False),
        ):
            super().load_model(*args, **kwargs)

    def sleep(self, level: int = 2) -> None:
        """Free the storages of weights and KV cache in place: tensors and views survive, their bits do not."""
        self.discard(("weights", "kv_cache"))

    def discard(self, tags: tuple[str, ...]) -> None:
        """Free what bears one of the tags."""
        owners = {"weights": list(self.model_runner.model.parameters()), "kv_cache": self.model_runner.kv_caches}
        self._freed = {**getattr(self, "_freed", {}), **{tag: _free(owners[tag]) for tag in tags}}

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Allocate again. Weights come back as NaN until a sync writes them; the KV cache comes back as zeros."""
        for tag in tags or ["weights", "kv_cache"]:
            for storage, size in self._freed.pop(tag, []):
                storage.resize_(size)
                raw = torch.empty(0, dtype=torch.uint8).set_(storage)
                raw.fill_(255 if tag == "weights" else 0)


def _free(tensors: list[torch.Tensor]) -> list[tuple[torch.UntypedStorage, int]]:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
    freed = [(storage, storage.nbytes()) for storage in storages.values()]
    for storage, _ in freed:
        storage.resize_(0)
    return freed
