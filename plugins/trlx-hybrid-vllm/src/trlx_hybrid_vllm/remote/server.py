"""A server that runs vLLM's `AsyncLLM` in a process of its own, and the description from which it is built there."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from trlx_hybrid.contract.serving import ServerDiedError
from trlx_hybrid.contract.types import Completion, Request, Sampling
from trlx_hybrid.errors import EngineError

from ..arguments import (
    CPU_KV_CACHE_LIMIT,
    MASKS,
    UNCHECKED,
    context_length,
    engine_dtype,
    kv_cache_bytes,
    on_cpu,
    shared_arguments,
    write_without_weights,
)
from ..private.engine import keep_expanded_prompts
from ..private.process import EXACT, FLOAT32_PRODUCTS, KERNELS, folder_of_compiled, folder_of_kernels

if TYPE_CHECKING:
    from trlx_hybrid.session import Session
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

    from ..generate.support import ServedIds
    from ..options import VLLMOptions

ABORTED = "abort"  # vLLM's finish reason of a request that was aborted
AGAIN = 0.01  # seconds after which a request is aborted again, or the prefix cache dropped
DROP_SECONDS = 10.0
SHARE = 0.9  # of each GPU: an engine of its own has it to itself
FOLLOWING = ("VLLM_", "HF_", FLOAT32_PRODUCTS)
"""Prefixes of environment variables that change what vLLM does: the trainer's values are passed on to the servers."""
STAYING = ("VLLM_DIST_IDENT", "VLLM_HOST_IP", "VLLM_PORT", "HF_HOME", "HF_TOKEN", "HF_TOKEN_PATH", "HF_HUB_CACHE")
"""Variables with a prefix in `FOLLOWING` that belong to a process, a machine or a user, so they are not passed on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMServerPlan:
    """A description of a vLLM server, made by the trainer and pickled; the server is built from it in another process.

    Attributes:
        architecture: name of the model's class, for messages.
        arguments: keyword arguments of vLLM's `AsyncEngineArgs`, without the model's folder.
        files: the contents of the model's folder by relative path: config, generation config and tokenizer.
        environment: variables to set before vLLM is imported.
        backend: name of the weight-transfer backend in vLLM's factories.
        ranks: workers of one server: the tensor-parallel size.
        gpus: GPUs for each worker: 1, or 0 on a CPU.
        max_model_len: the longest prompt plus completion, in tokens.
        dtype: the dtype that the engine computes in.
        quantized: whether the engine quantises the weights that it gets.
        keeps: whether completions must name the ids that each token was sampled from (what top-k and top-p left).
    """

    architecture: str
    arguments: Mapping[str, Any]
    backend: str
    ranks: int
    gpus: float
    max_model_len: int
    dtype: torch.dtype
    quantized: bool
    keeps: bool = False
    files: Mapping[str, bytes] = field(repr=False)
    environment: Mapping[str, str] = field(repr=False)

    def server(self, gpus: Sequence[str]) -> VLLMServer:
        """Return a server that has not started. `gpus` is not used: this process sees no other GPUs than its own."""
        return VLLMServer(self)


def server_plan(session: Session, options: VLLMOptions) -> VLLMServerPlan:
    """Describe the vLLM servers of a run, all of which are built alike, from the options and the policy in memory."""
    from .sender import backend_of

    cpu = on_cpu()
    dtype = engine_dtype(options, session.policy, session.args)
    size, backend = options.tensor_parallel_size, backend_of(session)
    arguments = shared_arguments(session, options, dtype, cpu) | {
        "distributed_executor_backend": "mp" if size > 1 else "uni",
        "worker_extension_cls": "trlx_hybrid_vllm.remote.worker.ServedWorker",
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
        keeps=session.over_support and session.sampling.truncated_by() is not None,
        files=_folder(session),
        environment=_environment(cpu, size, dtype),
    )


def _folder(session: Session) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory(prefix="trlx-hybrid-") as name:
        folder = Path(name)
        write_without_weights(session.policy, folder)
        return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


@contextmanager
def model_folder(files: Mapping[str, bytes], kept: bool) -> Iterator[Path]:
    """Write the files of a model's folder to disk, for an engine that is built inside the context.

    vLLM keeps compiled models under a hash of its config, which includes the path of the model's folder. Where the
    engine compiles, the folder therefore lies in vLLM's cache, under a hash of its contents, and stays there: another
    start of the same model finds what this one compiled. `compiled_once` does the same for an engine in the trainer's
    process; it cannot here, where the hash is computed in a child of vLLM's.

    Args:
        files: contents by relative path.
        kept: whether to keep the folder; otherwise it is temporary, and has a random name.
    """
    with tempfile.TemporaryDirectory(prefix="trlx-hybrid-") as temporary:
        folder = Path(temporary)
        if kept:
            digest = hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:16]
            folder = folder_of_compiled() / "trlx-hybrid" / digest
        for name, body in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            # Moved into place: another server may be reading the same file.
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as written:
                written.write(body)
            Path(written.name).replace(path)
        yield folder


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


class VLLMServer:
    """A replica of a vLLM engine in a process of its own, which samples completions and receives weights.

    vLLM's engine core runs in a child of this process. Where there are several workers, they run in children of the
    engine core.

    Args:
        plan: what to build, as the trainer described it.
    """

    def __init__(self, plan: VLLMServerPlan) -> None:
        self._plan = plan
        self._llm: AsyncLLM = None  # until `start`
        self._ids: ServedIds | None = None
        self._numbers = itertools.count()
        self._updating = False
        self._pictures: list[str | None] | None = None  # for each worker, why it cannot sample prompts with pictures
        self._methods: dict[str, Callable[..., Awaitable[Any]]] = {
            "init_weight_transfer_engine": self._init_transfer,
            "start_weight_update": self._start_update,
            "update_weights": self._update,
            "finish_weight_update": self._finish_update,
            "learn": lambda *given: self._llm.collective_rpc("served_learn", args=given),
            "digests": lambda *given: self._llm.collective_rpc("served_digests", args=given),
        }

    async def start(self) -> None:
        """Build vLLM's engine and start its core. This blocks the event loop: there is nothing else to do yet.

        Raises:
            EngineError: vLLM could not build the engine, or cannot use NCCL, by which the engine is to get its weights.
        """
        os.environ.update(self._plan.environment)
        os.environ[KERNELS] = folder_of_kernels()
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from ..private.distributed import nccl_missing
        from .sender import REMEDY

        if self._plan.backend == "nccl" and (why := nccl_missing()):
            raise EngineError(f"The engine could not get its weights by `nccl`: where it runs, {why} {REMEDY}.")
        with model_folder(self._plan.files, kept=not self._plan.arguments.get("enforce_eager")) as folder:
            try:
                arguments = AsyncEngineArgs(model=str(folder), **self._plan.arguments)
                self._llm = AsyncLLM.from_engine_args(arguments)
                keep_expanded_prompts(self._llm)
                self._ids = self._kept_ids()
            except Exception as error:
                raise EngineError(
                    f"vLLM could not build an engine for {self._plan.architecture}: {str(error)[:500]} The actor's log "
                    "has what its processes printed. Change server_options in HybridConfig.engine_options (or TRL's "
                    "vllm_* arguments)."
                ) from error

    async def generate(self, request: Request, sampling: Sampling, interrupted: asyncio.Event) -> Completion:
        """Sample one completion. The request brings its own seed, so other requests do not change its tokens.

        Args:
            interrupted: once it is set, the completion is returned with the tokens that were sampled so far.

        Raises:
            EngineError: vLLM cannot serve the request.
            ServerDiedError: vLLM's engine core died.
        """
        from ..sampling import (
            completion_of,
            forbidden,
            prompt_of,
            refuse_another_prompt,
            sampling_params,
            with_seed,
            without_placeholders,
        )

        masks = bool(getattr(self._llm.model_config, MASKS, False))
        shared = without_placeholders(sampling_params(sampling, masks), self._llm.vllm_config)
        params, request_id = with_seed(shared, request), str(next(self._numbers))
        final: RequestOutput = None  # vLLM yields one at least
        ids = None if sampling.truncated_by() is None else self._ids
        try:
            if ids is not None:
                await ids.open(request_id, forbidden(shared))
            if request.images is not None and (reason := await self._causal_pictures()) is not None:
                raise EngineError(reason)
            async with self._ended_with(interrupted, request_id):
                async for output in self._llm.generate(prompt_of(request), params, request_id):
                    final = output
            refuse_another_prompt(request, final.prompt_token_ids)
            completion = completion_of(final.outputs[0])
            if completion.finish_reason == ABORTED:
                if not interrupted.is_set():  # vLLM's core aborts all requests when a signal ends it
                    raise ServerDiedError("vLLM aborted a request by itself: its engine core is ending, or died.")
                completion = replace(completion, finish_reason=None)
            if ids is None:
                return completion
            support = await ids.take(request_id, len(request.prompt_ids), len(completion.token_ids))
            return replace(completion, support=support)
        except EngineError:
            raise
        except Exception as error:
            raise self._explained(error, "sample") from error
        finally:
            if ids is not None:
                ids.close(request_id)

    @asynccontextmanager
    async def _ended_with(self, interrupted: asyncio.Event, request_id: str) -> AsyncIterator[None]:
        """Abort a request of vLLM's when an event is set; vLLM then yields what it has sampled. Until the end of the
        `async with` block it is aborted again and again, because vLLM may not know the request yet."""

        async def abort() -> None:
            await interrupted.wait()
            while True:
                await self._llm.abort(request_id)
                await asyncio.sleep(AGAIN)

        task = asyncio.create_task(abort())
        try:
            yield
        finally:
            task.cancel()

    def _kept_ids(self) -> ServedIds | None:
        """Return the object that collects the ids that each token is sampled from; None where nobody needs the ids."""
        from ..generate.support import ReturnedIds, WorkersIds

        if getattr(self._llm.model_config, MASKS, False):
            return ReturnedIds(self._llm)
        return WorkersIds(self._llm) if self._plan.keeps else None

    async def _causal_pictures(self) -> str | None:
        """Return why vLLM cannot serve prompts with images correctly here, or None; the workers are asked only once."""
        if self._pictures is None:
            self._pictures = await self._llm.collective_rpc("served_causal_pictures")
        return next((reason for reason in self._pictures if reason is not None), None)

    async def check(self) -> None:
        """Raise an EngineError unless vLLM's engine core is alive and healthy; a `ServerDiedError` if it died."""
        try:
            await self._llm.check_health()
        except Exception as error:
            raise self._explained(error, "answer") from error

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call one of the methods that a weight sync needs, by name, and return its result.

        - `init_weight_transfer_engine`, `start_weight_update`, `update_weights`, `finish_weight_update`: as in vLLM's
          `VLLMWeightSyncClient`; the last one also drops the prefix cache and the embeddings of images.
        - `learn(names, dtypes, shapes)`: finds out, from names, dtypes and shapes of checkpoint tensors, which slices
          each worker keeps. Returns a list with an entry per worker.
        - `digests(names)`: hashes the bits of these slices. Returns a list with an entry per worker.

        Raises:
            EngineError: there is no such method, or it failed.
            ServerDiedError: vLLM's engine core died.
        """
        if method not in self._methods:
            raise EngineError(f"vLLM's server knows no {method!r}; it knows {', '.join(self._methods)}.")
        try:
            return await self._methods[method](*arguments)
        except Exception as error:
            raise self._explained(error, method) from error

    def close(self) -> None:
        """End the engine core and its workers."""
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.shutdown()

    def _explained(self, error: Exception, doing: str) -> EngineError:
        from vllm.v1.engine.exceptions import EngineDeadError

        if isinstance(error, EngineDeadError) or self._llm is None or self._llm.errored:
            return ServerDiedError("vLLM's engine core died. The actor's log has what it printed last.")
        reason = f"{type(error.__cause__ or error).__name__}: {error.__cause__ or error}"
        return EngineError(f"vLLM could not {doing.replace('_', ' ')}: {reason[:1000]}")

    # --- weights ----------------------------------------------------------------------------------------------------

    async def _init_transfer(self, init_info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info))

    async def _start_update(self) -> None:
        if self._updating:  # the last update was given up half-way, because another server died
            with contextlib.suppress(Exception):  # or the update had failed here, and is over
                await self._llm.finish_weight_update()
        self._updating = True
        await self._llm.start_weight_update()

    async def _update(self, update_info: Any) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._llm.update_weights(WeightTransferUpdateRequest(update_info=update_info))

    async def _finish_update(self, weight_version: str | None = None) -> None:
        await self._llm.finish_weight_update(weight_version)
        self._updating = False
        await self._drop_prefixes()
        await self._llm.reset_encoder_cache()  # and so do its embeddings of images

    async def _drop_prefixes(self) -> None:
        """Drop the prefix cache, whose keys and values belong to the old weights. vLLM refuses to, and only logs it, as
        long as a request runs; one that was aborted ends within a few steps.

        Raises:
            EngineError: requests run for longer than `DROP_SECONDS`.
        """
        deadline = time.monotonic() + DROP_SECONDS
        while not await self._llm.reset_prefix_cache():
            if time.monotonic() > deadline:
                raise EngineError(
                    f"vLLM has kept its prefix cache, which belongs to earlier weights, for {DROP_SECONDS:g} s: "
                    "requests are still running."
                )
            await asyncio.sleep(AGAIN)
