"""vLLM inside the trainer's process."""

from __future__ import annotations

import gc
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from trlx_hybrid.errors import EngineError, SyncError, listed
from trlx_hybrid.protocols import NamedTensors, Regions
from trlx_hybrid.session import Session
from trlx_hybrid.types import Completion, LoadReport, Request, Sampling
from trlx_hybrid.weights.policy import Policy

from . import internals
from .adapters import lora_arguments
from .agreeing import AgreeingStream
from .arguments import engine_arguments
from .checkpoint import write_without_weights
from .closing import let_go, own_end, shut_down
from .loading import WeightLoader, counted
from .memory import EngineMemory
from .model_classes import trainer_classes_kept
from .options import VLLMOptions
from .parameters import Places
from .preflight import engine_dtype
from .regions import refuses, regions
from .sampling import sampling_params
from .streaming import EngineStream, collect


class VLLMEngine:
    """An engine over the live policy. Weights come through the weight sync only: it starts with random ones.

    Attributes:
        llm: vLLM's own LLM, for custom rollouts.
        peers_lost: a rank of this run is gone or elsewhere: `close` then waits for none.
    """

    def __init__(self, session: Session, options: VLLMOptions) -> None:
        from vllm import LLM

        self._options = options
        self.dtype = engine_dtype(options, session.policy, session.args)
        self.weights_lost = True
        self.peers_lost = False
        self.adapter: Any = None
        chosen = session.selection.weights
        if chosen is None or chosen.component.name == "lora":
            wanted = lora_arguments(session.policy, self.dtype)
        else:
            wanted = f"weights={chosen.component.name!r} was chosen"
        self.adapters_refused = wanted if isinstance(wanted, str) else None
        adapters = {} if isinstance(wanted, str) else wanted
        arguments = adapters | engine_arguments(session, options, self.dtype)
        self.quantized = options.quantization is not None
        self.sleeps = options.enable_sleep_mode
        self.tensor_parallel_size = options.tensor_parallel_size
        self._made_default_group = not torch.distributed.is_initialized()
        self._frozen = gc.get_freeze_count()
        ranks = session.ranks
        with (
            tempfile.TemporaryDirectory(prefix="trlx-hybrid-") as folder,
            internals.launcher_environment(ranks.rank, ranks.local_rank, ranks.world),
            internals.running(self.dtype),
            internals.frozen_heap(self._frozen > 0),
            trainer_classes_kept(session.policy.module) as built,
        ):
            write_without_weights(session.policy, Path(folder))
            if self.sleeps:
                internals.import_modules_with_tensors()
            try:
                self.llm = LLM(model=folder, **arguments)
                built.append(internals.model_of(self.llm))
            except Exception as error:
                raise EngineError(
                    f"vLLM could not build an engine for {session.policy.architecture}: {str(error)[:500]} "
                    "Change HybridConfig.engine_options (or TRL's vllm_* arguments), or generate with "
                    "engine='transformers'."
                ) from error
        own_end(self.llm)
        internals.keep_expanded_prompts(self.llm)
        if adapters:
            this = weakref.ref(self)
            internals.serve_by_default(self.llm, lambda: getattr(this(), "adapter", None))
        self.max_model_len: int = self.llm.llm_engine.model_config.max_model_len
        self.memory = EngineMemory(self.llm, options.enable_sleep_mode)
        self._loader = WeightLoader(internals.model_of(self.llm))
        self._places: Places | None = None
        self._policy = session.policy
        self._buffers = bool(session.policy.buffers())

    # --- generation -------------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Sample; the ranks of a replica pool their requests, and each keeps its own rows."""
        self._require_awake()
        requests, mine = self._pooled(list(requests))
        with internals.running(self.dtype):
            return collect(EngineStream(self.llm, sampling_params(sampling), self.adapter), requests)[mine]

    @contextmanager
    def stream(self, sampling: Sampling) -> Iterator[EngineStream]:
        """Requests one at a time; the ranks of a replica step together."""
        self._require_awake()
        params = sampling_params(sampling)
        stream = EngineStream(self.llm, params, self.adapter)
        if self.tensor_parallel_size > 1:
            stream = AgreeingStream(self.llm, params, self.adapter, internals.tensor_parallel_group())
        with internals.running(self.dtype, collecting=True), stream.open():
            yield stream

    def _require_awake(self) -> None:
        if self.memory.asleep or self.weights_lost:
            raise EngineError(
                "The vLLM engine is asleep or holds no weights: wake it and sync before generating "
                "(`session.rollout_phase` does both)."
            )

    def _pooled(self, requests: list[Request]) -> tuple[list[Request], slice]:
        if self._options.tensor_parallel_size == 1:
            return requests, slice(None)
        group = internals.tensor_parallel_group()
        gathered: list[Any] = [None] * group.world_size
        torch.distributed.all_gather_object(gathered, requests, group=group.cpu_group)
        start = sum(len(part) for part in gathered[: group.rank_in_group])
        return [r for part in gathered for r in part], slice(start, start + len(requests))

    # --- weights and memory -----------------------------------------------------------------------------------------

    def load_weights(self, weights: NamedTensors) -> LoadReport:
        """Write full tensors through vLLM's loader.

        Raises:
            SyncError: an engine parameter was not written, or the weights are asleep.
        """
        if "weights" in self.memory.asleep:
            raise SyncError("The engine's weights are asleep: `engine.wake('weights')` before a sync.")
        report = self._reload(weights) if self.quantized else self._loader.load(weights)
        if report.unwritten:
            raise SyncError(
                f"The weight sync left engine parameters unwritten: {listed(report.unwritten)}. The model and vLLM's "
                "definition of it disagree; use engine='transformers' and report it."
            )
        self._weights_are_current()
        return report

    def weights_written(self) -> None:
        """The parameters are the policy's again, whoever wrote them. Its persistent buffers are brought here."""
        if self._buffers:
            self._loader.write(self._policy.buffers().items())
        self._weights_are_current()

    def _weights_are_current(self) -> None:
        """What was cached (keys, values, embeddings of images) belongs to the old ones."""
        self.memory.forget_computed()
        self.weights_lost = False

    def _reload(self, weights: NamedTensors) -> LoadReport:
        """A quantised engine derives what it keeps from the weights: vLLM's reload does that again, layer by layer."""
        given: dict[str, int] = {}
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": counted(weights, given)})
        return LoadReport(tensors=len(given), bytes=sum(given.values()))

    def differing(self, weights: NamedTensors) -> list[str]:
        """Tensors whose bits are not in the engine.

        A quantised engine keeps none of them, so it has nothing to compare: the log-prob probe stands alone there.
        """
        return [] if self.quantized else self._loader.differing(weights)

    def places(self, policy: Policy) -> Places:
        """Where each base parameter of the policy lies in this engine; the first call loads them to find out."""
        if self._places is None:
            self.load_weights(policy.full_weights(merge=False))
            self._places = Places(policy, self._loader)
        return self._places

    def regions(self, policy: Policy) -> Regions:
        """What this rank's memory holds of each weight of the policy; the first call loads them to find out.

        Raises:
            EngineError: a layer may not keep what is written into it, or holds what no box of a weight is.
        """
        model = internals.model_of(self.llm)
        reason = "a quantised engine keeps no copy of the weights" if self.quantized else refuses(model)
        if reason is not None:
            raise EngineError(reason)
        if not self._loader.routes:
            self.load_weights(policy.full_weights(merge=False))
        return regions(model, self._loader, policy)

    def sleep(self, keep_weights: bool = False) -> None:
        """Give memory back, where sleep mode is on; weights that are not kept are lost until the next sync."""
        self.memory.sleep(keep_weights)
        self.weights_lost = self.weights_lost or "weights" in self.memory.asleep

    def wake(self, what: str) -> None:
        """Allocate "weights" or "kv_cache" again."""
        self.memory.wake(what)

    @property
    def asleep_bytes(self) -> int:
        """What waking will take of the device's memory."""
        return self.memory.asleep_bytes

    def resident(self, what: str) -> list[torch.Tensor]:
        """Tensors of "weights" or "kv_cache" that hold memory now."""
        return self.memory.resident(what)

    def close(self) -> None:
        """Free the engine and what it made."""
        llm, self.llm = self.llm, None
        if llm is not None:
            kept = 0 < gc.get_freeze_count() <= self._frozen  # nobody has frozen the engine since
            shut_down(llm, self._made_default_group, self.peers_lost, kept)

    def leave(self) -> None:
        """The process ends: see `closing.let_go`."""
        let_go(self.llm, self._made_default_group)
