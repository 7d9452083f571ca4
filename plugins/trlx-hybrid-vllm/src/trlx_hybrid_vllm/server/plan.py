"""What the servers of one run are built from, made in the trainer's process."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..arguments import (
    CPU_KV_CACHE_LIMIT,
    UNCHECKED,
    context_length,
    engine_dtype,
    kv_cache_bytes,
    shared_arguments,
    write_without_weights,
)
from ..internals import EXACT, FLOAT32_PRODUCTS

if TYPE_CHECKING:
    from trlx_hybrid.session import Session

    from ..options import VLLMOptions
    from .server import VLLMServer

SHARE = 0.9  # of each GPU: an engine of its own has it to itself
FOLLOWING = ("VLLM_", "HF_", FLOAT32_PRODUCTS)
"""Beginnings of variables that change what vLLM does, and so must be the same where it runs."""
STAYING = ("VLLM_DIST_IDENT", "VLLM_HOST_IP", "VLLM_PORT", "HF_HOME", "HF_TOKEN", "HF_TOKEN_PATH", "HF_HUB_CACHE")
"""Of those, what belongs to a process, a machine or a user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMServerPlan:
    """See `trlx_hybrid.serving.ServerPlan`.

    Attributes:
        architecture: of the model, for messages.
        arguments: of vLLM's `AsyncEngineArgs`, the model's folder left out.
        files: that folder, by relative path: config, generation config and tokenizer.
        environment: variables to set before vLLM is imported.
        backend: of the weight transfer, as vLLM's factories know it.
        ranks: tensor-parallel size.
    """

    architecture: str
    arguments: Mapping[str, Any]
    backend: str
    ranks: int
    gpus: float
    max_model_len: int
    dtype: torch.dtype
    quantized: bool
    files: Mapping[str, bytes] = field(repr=False)
    environment: Mapping[str, str] = field(repr=False)

    def server(self, gpus: Sequence[str]) -> VLLMServer:
        """A server that has not started; `gpus` are what this process sees already."""
        from .server import VLLMServer

        return VLLMServer(self)


def plan(session: Session, options: VLLMOptions) -> VLLMServerPlan:
    """Settle what every server is built with."""
    from vllm.platforms import current_platform

    from .sender import backend_of

    cpu: bool = current_platform.is_cpu()
    dtype = engine_dtype(options, session.policy, session.args)
    size, backend = options.tensor_parallel_size, backend_of(session)
    arguments = shared_arguments(session, options, dtype, cpu) | {
        "distributed_executor_backend": "mp" if size > 1 else "uni",
        "worker_extension_cls": "trlx_hybrid_vllm.server.worker.ServedWorker",
        "weight_transfer_config": {"backend": backend},
        "disable_log_stats": True,
    }
    size_given = options.kv_cache_memory_bytes
    if size_given is None and cpu:
        size_given = min(kv_cache_bytes(session, options, dtype), CPU_KV_CACHE_LIMIT)
    arguments |= {
        "kv_cache_memory_bytes": size_given,
        "gpu_memory_utilization": UNCHECKED if size_given else options.gpu_memory_utilization or SHARE,
    }
    return VLLMServerPlan(
        architecture=session.policy.architecture,
        arguments=arguments | dict(options.engine_args),
        backend=backend,
        ranks=size,
        gpus=0.0 if cpu else 1.0,
        max_model_len=context_length(session, options),
        dtype=dtype,
        quantized=options.quantization is not None,
        files=_folder(session),
        environment=_environment(cpu, size, dtype),
    )


def _folder(session: Session) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory(prefix="trlx-hybrid-") as name:
        folder = Path(name)
        write_without_weights(session.policy, folder)
        return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def _environment(cpu: bool, ranks: int, dtype: torch.dtype) -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if name.startswith(FOLLOWING) and name not in STAYING}
    if dtype == torch.float32:
        found.setdefault(FLOAT32_PRODUCTS, EXACT)
    if cpu:
        found |= {
            "TORCHDYNAMO_DISABLE": "1",  # compiling costs 14 s at the first request
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # engines that bind their threads would all take the first cores
            # "0" lets a single worker live in the engine core's process; vLLM starts another for it otherwise.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if ranks > 1 else "0",
        }
    return found
