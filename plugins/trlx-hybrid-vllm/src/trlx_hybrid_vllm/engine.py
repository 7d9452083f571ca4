"""The vLLM engine inside the trainer's process."""

from __future__ import annotations

import gc
import tempfile
import traceback
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from trlx_hybrid.contract.protocols import NamedTensors, Regions
from trlx_hybrid.contract.types import Completion, LoadReport, Request, Sampling
from trlx_hybrid.errors import EngineError, SyncError, listed
from trlx_hybrid.memory import heap
from trlx_hybrid.memory.ledger import policy_tensors, storages
from trlx_hybrid.notices import named_when_long
from trlx_hybrid.policy.policy import Policy, modules_of
from trlx_hybrid.session import Session

from .arguments import (
    MASKS,
    engine_arguments,
    engine_dtype,
    lora_arguments,
    returns_no_experts,
    returns_no_masks,
    write_without_weights,
)
from .generate.streaming import EngineStream, ReplicaStream, collect
from .generate.support import CapturedIds, KeptIds
from .options import VLLMOptions
from .private.adapted_linear import clear_adapters
from .private.distributed import Replica, forget_groups
from .private.ending import detach_finalizer, release_at_exit, shut_down
from .private.engine import (
    config_of,
    derive_from_weights,
    drain,
    forget_images,
    keep_expanded_prompts,
    kv_caches,
    max_model_len,
    model_of,
    prefixes,
    runner_of,
    serve_directly,
)
from .private.lora import adapter_slots_of
from .private.models import latent_attention, refuses_writes
from .private.process import cache_kept, import_modules_with_tensors, running, starting
from .private.recorders import RoutingCapture
from .private.sampling_graphs import SamplingGraphs, sampling_graphs
from .rendezvous import address_of_this_host, launcher_environment, told_when_late
from .sampling import sampling_params
from .versions import untested
from .weights.loader import WeightLoader, counted
from .weights.weight_map import Places, WeightMap, regions

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

WEIGHTS, KV_CACHE = "weights", "kv_cache"
SPARE = 2 << 30
"""Bytes of the device that are left for allocations outside torch: NCCL, cuBLAS, recorded graphs."""

COMPILES = (
    "vLLM compiles the model and records CUDA graphs: a minute or more at a machine's first start, less at later ones. "
    "engine_options={'enforce_eager': True} starts faster and samples slower."
)


class VLLMEngine:
    """A vLLM engine in the trainer's process, built from the config of the policy in memory, without a checkpoint.

    The engine starts with random weights. The first weight sync writes the policy's weights into it.

    Attributes:
        dtype: the dtype that the engine computes in.
        llm: vLLM's own LLM, for custom rollouts.
        adapter: the `LoRARequest` with which every prompt is sampled. It is set by the weight sync `LoraSync`, which
            copies the policy's LoRA adapter into the engine. None if the engine holds no adapter apart from the
            weights.
        adapters_refused: why this engine has no LoRA slots, or None if it has them.
        weights_lost: True before the first sync, and after a sleep that freed the weights.
        quantized: True where the engine quantises the weights that it gets.
        sleeps: True where vLLM's sleep mode is on.
        ranks_per_replica: how many ranks run one engine together.
        max_model_len: the longest prompt plus completion, in tokens.
        peers_lost: True once a component has found that another rank of the run is gone or stuck: `close` then waits
            for no rank.
    """

    def __init__(self, session: Session, options: VLLMOptions) -> None:
        from vllm import LLM

        self.dtype = engine_dtype(options, session.policy, session.args)
        self.weights_lost = True
        self.peers_lost = False
        self.adapter: LoRARequest | None = None
        wanted: dict[str, Any] | str = "no weight path of this run asks for adapter slots"
        if options.pipeline_parallel_size > 1:
            wanted = "the engine has pipeline stages, each with the slots of its own layers"
        elif any("lora_slots" in path.component.needs for path in session.selection.weight_paths):
            wanted = lora_arguments(session.policy, self.dtype)
        self.adapters_refused = wanted if isinstance(wanted, str) else None
        self._policy = session.policy
        self._buffers = bool(session.policy.buffers())  # read before the policy makes room
        adapters = {} if isinstance(wanted, str) else wanted
        arguments = adapters | engine_arguments(session, options, self.dtype)
        self.quantized = options.quantization is not None
        self.untested = untested()
        alone = arguments.get("max_loras") == 1 and not arguments.get("fully_sharded_loras")
        rank = arguments["max_lora_rank"] if adapters and alone and self.untested is None else None
        self.sleeps = options.enable_sleep_mode
        self.ranks_per_replica = options.ranks
        self._made_default_group = not dist.is_initialized()
        self._frozen = heap.frozen_by_the_user()
        ranks = session.ranks
        address = address_of_this_host(ranks.gather) if ranks.world > 1 else None
        with (
            tempfile.TemporaryDirectory(prefix="trlx-hybrid-") as folder,
            launcher_environment(ranks.rank, ranks.local_rank, ranks.world, address),
            starting(self.dtype, folder, rank, session.policy.module, bool(self._frozen)) as built,
            told_when_late(options.ranks),
            named_when_long("building the vLLM engine", "" if arguments["enforce_eager"] else COMPILES, ranks.rank),
        ):
            write_without_weights(session.policy, Path(folder))
            if self.sleeps:
                import_modules_with_tensors()
            try:
                self.llm = LLM(model=folder, **arguments)
                built.append(model_of(self.llm))
            except Exception as error:
                forget_groups(self._made_default_group)  # the next engine would take them for its own
                traceback.clear_frames(error.__traceback__)  # they hold what was built, in the policy's memory
                session.memory.reclaim()
                raise EngineError(
                    f"vLLM could not build an engine for {session.policy.architecture}: {str(error)[:500]} "
                    "Change HybridConfig.engine_options (or TRL's vllm_* arguments), or generate with "
                    "engine='transformers'."
                ) from error
        detach_finalizer(self.llm)
        self._replica = Replica.of_this_rank(options.ranks)
        keep_expanded_prompts(self.llm)
        self._routes = session.config.router_replay
        self._routing = RoutingCapture(self.llm) if self._routes and returns_no_experts() else None
        self._support = self._kept_ids(session)
        self._graphs: SamplingGraphs | None = None if self.untested else sampling_graphs(self.llm)
        serve_directly(self.llm, weakref.WeakMethod(self._own_requests))
        self.max_model_len = max_model_len(self.llm)
        self._asleep: dict[str, int] = {}  # bytes that waking will take, of "weights" and "kv_cache"
        self._loader = WeightLoader(model_of(self.llm))
        latent = latent_attention(model_of(self.llm))
        self._latent = [] if self.quantized else [layer for _, layer in latent]  # vLLM's reload does it again
        self._map: WeightMap | None = None
        self._places: Places | None = None

    # --- generation -------------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Sample one completion per request, and return them in the order of the requests.

        Where several ranks run the engine, they must call this together; each gets the completions of its requests.
        """
        self._require_awake()
        requests, mine = self._pooled(list(requests), sampling)
        with running(self.dtype):
            stream = EngineStream(
                self.llm,
                sampling_params(sampling, self._returns_masks),
                self.adapter,
                self._routing,
                self._graphs,
                self._support_of(sampling),
            )
            return collect(stream, requests)[mine]

    @contextmanager
    def stream(self, sampling: Sampling) -> Iterator[EngineStream]:
        """Open a stream to which requests can be added while others are being decoded.

        Where several ranks run the engine, they must open the stream together, and make each of its steps together.
        """
        self._require_awake()
        params, support = sampling_params(sampling, self._returns_masks), self._support_of(sampling)
        stream = EngineStream(self.llm, params, self.adapter, self._routing, self._graphs, support)
        if self.ranks_per_replica > 1:
            self._pooled([], sampling)
            stream = ReplicaStream(self.llm, params, self.adapter, self._replica, self._routing, support)
        with running(self.dtype, collecting=True), stream.open():
            yield stream

    def _kept_ids(self, session: Session) -> KeptIds | None:
        """Return the object that records the ids that each token is sampled from (what top-k, top-p and min-p leave).

        None where the run computes log-probs over the whole vocabulary, and so does not need them.
        """
        vocabulary: int = config_of(self.llm).model_config.get_vocab_size()
        if self._returns_masks:
            return KeptIds(vocabulary)
        if session.over_support and returns_no_masks():
            return CapturedIds(runner_of(self.llm), vocabulary)
        return None

    def _support_of(self, sampling: Sampling) -> KeptIds | None:
        """Return the object that records the ids that each token is sampled from (what top-k, top-p and min-p leave).

        None where these sampling settings leave no ids out, or the run does not need the ids.
        """
        return None if sampling.truncated_by() is None else self._support

    @property
    def _returns_masks(self) -> bool:
        """True where vLLM returns with each token the ids that it was sampled from (what top-k and top-p leave)."""
        return bool(getattr(config_of(self.llm).model_config, MASKS, False))

    def _own_requests(self) -> LoRARequest | None:
        """Return the `LoRARequest` for a request that names no adapter, or None to sample it without an adapter.

        Called whenever vLLM's `LLM` is about to queue a request. So the requests that custom rollouts add to `llm` are
        sampled from the policy as well.

        Raises:
            EngineError: the engine is asleep or holds no weights.
        """
        self._require_awake()
        return self.adapter

    def _require_awake(self) -> None:
        if self._asleep or self.weights_lost:
            raise EngineError(
                "The vLLM engine is asleep or holds no weights: wake it and sync before generating "
                "(`session.rollout_phase` does both)."
            )

    def _pooled(self, requests: list[Request], sampling: Sampling) -> tuple[list[Request], slice]:
        """Return the requests of all ranks that run this engine in one list, and the slice of the list that has this
        rank's requests.

        Raises:
            EngineError: the ranks have different sampling settings, and so would soon decode different tokens.
        """
        if self.ranks_per_replica == 1:
            return requests, slice(None)
        group = self._replica
        gathered: list[Any] = [None] * group.world_size
        dist.all_gather_object(gathered, (requests, sampling), group=group.cpu_group)
        for rank, (_, other) in enumerate(gathered):
            if other != gathered[0][1]:
                raise EngineError(
                    f"Rank 0 of an engine samples with {gathered[0][1]}, rank {rank} with {other}, and they decode all "
                    "requests together. Sample alike on all of them."
                )
        parts = [part for part, _ in gathered]
        start = sum(map(len, parts[: group.rank_in_group]))
        return [r for part in parts for r in part], slice(start, start + len(requests))

    # --- weights ----------------------------------------------------------------------------------------------------

    def load_weights(self, weights: NamedTensors) -> LoadReport:
        """Write unsharded checkpoint tensors into the engine through vLLM's loader, and report how many were written.

        Raises:
            SyncError: an engine parameter was not written, or the weights are asleep.
        """
        if WEIGHTS in self._asleep:
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
        """Finish a weight sync that has written the policy's parameters straight into the engine's memory.

        Copies the policy's persistent buffers into the engine, drops what was computed with the old weights, and sets
        `weights_lost` to False.
        """
        if self._buffers:
            self._loader.write(self._policy.buffers().items())
        self._weights_are_current()

    def _weights_are_current(self) -> None:
        derive_from_weights(self._latent, self.dtype)
        self.forget_computed()
        self.weights_lost = False

    def forget_computed(self) -> None:
        """Drop what was computed with the old weights.

        This is the prefix cache with the experts that its tokens were routed to, and the embeddings of images. The
        cache is dropped only where it may hold something: vLLM walks all of its blocks, 2 ms for 27 GiB.

        Raises:
            EngineError: requests are still unfinished, so the prefix cache is in use.
        """
        if (prefixes(self.llm) or self._routes) and not self.llm.reset_prefix_cache():
            drain(self.llm)
            self.llm.reset_prefix_cache()
        forget_images(self.llm)

    def _reload(self, weights: NamedTensors) -> LoadReport:
        """Load weights into a quantised engine by vLLM's `reload_weights`, which quantises them layer by layer.

        Args:
            weights: (checkpoint name, full tensor) pairs.
        """
        given: dict[str, int] = {}
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": counted(weights, given)})
        return LoadReport(tensors=len(given), bytes=sum(given.values()))

    def differing(self, weights: NamedTensors) -> list[str]:
        """Compare checkpoint tensors with the engine's copies bit for bit, and return the names of the tensors that
        differ.

        The list is always empty for a quantised engine, because it stores other bits than the policy in any case. For
        such an engine, only the session's comparison of the engine's and the policy's log-probs for a short sequence
        tells whether the weights arrived.
        """
        return [] if self.quantized else self._loader.differing(weights)

    def places(self, policy: Policy) -> Places:
        """Return where each parameter of the policy, apart from adapters, lies in this engine's memory.

        The first call loads the policy's weights through vLLM's loader, and records to where it copies them.
        """
        if self._places is None:
            self._places = Places(policy, self._weight_map(policy))
        return self._places

    def regions(self, policy: Policy) -> Regions:
        """Return which parts of each weight of the policy this rank's engine memory holds, and where.

        The first call loads the policy's weights through vLLM's loader, and records to where it copies them.

        Raises:
            EngineError: the engine's memory must not be written to from outside: a layer perhaps does not keep what is
                written into it, or holds a part of a weight that is not one index range per dimension.
        """
        model = model_of(self.llm)
        reason = "a quantised engine keeps no copy of the weights" if self.quantized else refuses_writes(model)
        if reason is not None:
            raise EngineError(reason)
        return regions(model, self._weight_map(policy))

    def _weight_map(self, policy: Policy) -> WeightMap:
        if self._map is None:
            if not self._loader.routes:
                self.load_weights(policy.full_weights(merge=False))
            self._map = WeightMap(policy, self._loader)
        return self._map

    # --- memory -----------------------------------------------------------------------------------------------------

    def sleep(self, keep_weights: bool = False) -> None:
        """Free memory if sleep mode is on. Weights that are not kept are lost until the next sync.

        If weights are kept, only the KV cache is freed: its pages are unmapped, and nothing is copied or saved.
        Otherwise, weights and KV cache are freed by vLLM's sleep level 2, which saves only the few buffers that no sync
        would restore. Memory that was freed before (`asleep`) stays freed.
        """
        awake = ({KV_CACHE} if keep_weights else {WEIGHTS, KV_CACHE}) - self.asleep
        if not self.sleeps or not awake:
            return
        drain(self.llm)
        self.forget_computed()
        sizes = {what: self._bytes(what) for what in awake}
        if WEIGHTS in awake:
            with cache_kept():
                self.llm.collective_rpc("sleep", args=(2,))
            self.weights_lost = True
        else:
            self.llm.collective_rpc("discard", args=((KV_CACHE,),))
        self._asleep |= sizes
        self._asleep |= {what: size - self._bytes(what) for what, size in sizes.items()}  # a CPU's worker keeps buffers

    def wake(self, what: str) -> None:
        """Allocate the memory of "weights" or "kv_cache" again. Does nothing if `sleep` has not freed it."""
        if what not in self._asleep:
            return
        with cache_kept(self._asleep[what] + SPARE):
            self.llm.collective_rpc("wake_up", args=([what],))
        if what == WEIGHTS and self.weights_lost:
            clear_adapters(model_of(self.llm))
        del self._asleep[what]

    @property
    def asleep(self) -> set[str]:
        """The parts that are asleep: "weights", "kv_cache", both or neither."""
        return set(self._asleep)

    @property
    def asleep_bytes(self) -> int:
        """The bytes of the device's memory that waking will take."""
        return sum(self._asleep.values())

    def resident(self, what: str) -> list[torch.Tensor]:
        """Return the tensors of the "weights" or of the "kv_cache" that hold memory now.

        The weights include buffers and the tensors for LoRA adapters. On a CPU, tensors that were emptied in place are
        included.
        """
        if what in self._asleep and torch.cuda.is_available():  # unmapped, though torch still counts it
            return []
        if what == KV_CACHE:
            return kv_caches(self.llm)
        modules = list(modules_of(model_of(self.llm)))
        slots = [t for m in modules for t in adapter_slots_of(m)]
        return [*policy_tensors(modules), *slots]

    def _bytes(self, what: str) -> int:
        return sum(storage.nbytes() for storage in storages(self.resident(what)))

    def close(self) -> None:
        """Shut the engine down, and free its memory and the process groups that it made."""
        llm, self.llm = self.llm, None
        if llm is not None:
            self._map = self._places = self._routing = None
            self._forget_sampling_graphs()
            self._latent = []
            self._replica.close()
            # Nobody has frozen the engine since.
            kept = bool(self._frozen) and 0 < gc.get_freeze_count() <= self._frozen
            shut_down(llm, self._made_default_group, self.peers_lost, kept)
            heap.note_unfrozen()

    def _forget_sampling_graphs(self) -> None:
        graphs, self._graphs = self._graphs, None
        if graphs is not None:
            graphs.close()

    def leave(self) -> None:
        """Free the CUDA graphs and abort the communicators, so that the process can exit without waiting for any rank.

        Called in place of `close` when the process ends.
        """
        self._forget_sampling_graphs()
        release_at_exit(self.llm, self._made_default_group)
