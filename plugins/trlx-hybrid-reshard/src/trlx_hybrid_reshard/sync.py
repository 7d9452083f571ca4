"""The weight path `reshard`, one of the ways to bring the policy's weights into the engines: it copies from the
trainer's shards into the engines' tensor-parallel slices. Each rank receives only the bytes that it lacks."""

from __future__ import annotations

import hashlib
import logging
import socket
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from trlx_hybrid.contract.protocols import Regions, WeightSync
from trlx_hybrid.contract.types import LoadReport
from trlx_hybrid.errors import ConfigError, EngineError, PeerLostError, SyncError
from trlx_hybrid.interprocess.ranks import abort
from trlx_hybrid.policy.adapters import beyond_lora

from .agreement import Agreement, model_difference, plan_difference
from .buckets import Buckets, bucketed
from .descriptors import DIMENSIONS, lower
from .layouts import Boxes, LiveSharding, Model, read_engines
from .options import ReshardOptions
from .plan import plan
from .program import program
from .sharding import Sharding
from .shards import Shards
from .transport import Transport

if TYPE_CHECKING:
    from trlx_hybrid.contract.protocols import Run

logger = logging.getLogger(__name__)

SHOWN = 3
"""The number of syncs, from the first, whose log line is printed even if logging is not set up. The first sync also
connects the ranks and so takes longer; the third is like all later ones."""

WARM, SEEN = 3, 3
"""Two numbers for the warning that syncs are slow: how many syncs at the start do not count, and how many consecutive
syncs must be slow before the log warns."""
LIMIT = 0.1
"""The fraction of an iteration (the time between the ends of two syncs) that a sync may take before it counts as
slow."""


class ReshardSync(WeightSync):
    """The weight path `reshard`: a way to bring the weights of an FSDP2, HSDP or DDP policy into engines with any
    tensor parallelism.

    The way in which trainer and engines shard each parameter is read once. From it, this class plans which rank sends
    which slice to which rank; each sync repeats these transfers. Frozen parameters move only if the engine's weights
    were lost, or if the parameters were written to or replaced since the last sync. The run verifies a sync without
    this class, by gathering whole tensors.

    Args:
        run: the run of the trainer, which has the policy, the engine and the ranks.
        options: the user's options.

    Attributes:
        prepared: the transfers of the last sync. Before the first sync, the transfers of a sync of all parameters;
            before `open`, None.
    """

    name = "reshard"

    def __init__(self, run: Run, options: ReshardOptions) -> None:
        self._run, self._options = run, options
        self._agreement: Agreement | None = None
        self._sides: _Sides | None = None
        self._group: dist.ProcessGroup | None = None
        self._known: dict[tuple[str, ...], PreparedPlan] = {}
        self._synced = self._lost = False
        self._log = SyncLog(run.ranks.rank, self._advice)
        self.prepared: PreparedPlan | None = None

    # --- choosing ---------------------------------------------------------------------------------------------------

    def refuses(self) -> str | None:
        """Return why this weight path cannot serve this model and engine, or None if it can. Collective: if one rank
        refuses, all do.

        Raises:
            SyncError: the ranks have different models.
            PeerLostError: a rank does not take part.
        """
        reason = self._refuses_at_sight()
        if reason is not None:
            return reason
        with self._abandoning_lost_ranks():
            return self._refuses_together()

    def _refuses_together(self) -> str | None:
        """Return why this weight path cannot be used on some rank, or None if it can be used on all. Collective: the
        ranks exchange the shapes of their models and what their engines hold, and keep the latter for planning.

        Raises:
            SyncError: the ranks have different models.
        """
        ranks = self._run.ranks
        self._agreement = agreement = Agreement(ranks.rank, ranks.world, self._options.deadline, self._options.stall)
        shards = Shards(self._run.policy)
        odd = model_difference(agreement.exchange("the comparison of the ranks' models", shards.shapes))
        if odd is not None:
            raise SyncError(odd)
        shards.merge()
        regions, boxes, reason = Regions({}), {}, None
        try:
            regions = self._regions_of_engine(shards)
            boxes = {name: tuple(r.box for r in found) for name, found in regions.of.items()}
        except (EngineError, ConfigError) as error:
            reason = str(error)
        mine = reason, boxes, socket.gethostname()
        reasons, held, hosts = zip(*agreement.exchange("the comparison of what the engines hold", mine), strict=True)
        found = next((f"rank {rank}: {why}" for rank, why in enumerate(reasons) if why is not None), None)
        if found is not None:
            self.release()
            return reason or found
        used = set[str]().union(*held)
        names = tuple(name for name in shards.shapes if name in used)  # in the order of a forward pass
        self._sides = _Sides(shards, regions, held, names, ranks_per_node(hosts))
        return None

    def _refuses_at_sight(self) -> str | None:
        """Return why this weight path cannot serve this rank's model or engine, or None. It checks only what can be
        seen without asking other ranks."""
        policy = self._run.policy
        if policy.adapters and self._run.ranks.world == 1:
            return "a single rank has nothing to reshard; `gather` merges adapters that vLLM cannot serve"
        reason = beyond_lora(policy.base) or policy.refuses_gather()
        if reason is not None:
            return reason
        if not hasattr(self._run.live_engine, "regions"):
            return "the engine does not say where its weights lie"
        for name, p in policy.base_parameters().items():
            if hasattr(p, "ds_id"):
                return f"{name} is in ZeRO-3's flat buffers, whose layout is DeepSpeed's own; use FSDP2"
            if not 1 <= p.dim() <= DIMENSIONS:
                return f"{name} has {p.dim()} dimensions"
        return None

    def _regions_of_engine(self, shards: Shards) -> Regions:
        """Return where this rank's engine keeps each parameter: views of the engine's memory, each with the index
        ranges of the parameter that the view holds.

        Args:
            shards: this rank's shards of the trainer's parameters.

        Raises:
            EngineError, ConfigError: weights cannot be written to the engine, or read from the trainer's shards; the
                message says why.
        """
        engine = self._run.live_engine
        regions: Regions = engine.regions(self._run.policy)
        unknown = regions.of.keys() - shards.shapes.keys()
        if unknown:
            raise EngineError(f"the engine holds {min(unknown)}, which is no parameter of the policy")
        other = {r.memory.dtype for found in regions.of.values() for r in found} - {engine.dtype}
        if other:
            raise EngineError(f"the engine keeps weights in {other.pop()} beside {engine.dtype}")
        shards.layout(self._run.ranks.world)
        return regions

    def open(self) -> None:
        """Plan the transfers of a sync of all parameters, and make the process group over which they go. Collective.

        Raises:
            PeerLostError: a rank does not take part.
        """
        agreement, sides = self._opened
        with self._abandoning_lost_ranks():
            self._group = agreement.group
            if agreement.group is not None and sides.device.type == "cuda":
                # NCCL's own watchdog ends the process without telling other ranks, so it must come after our deadline.
                patience = timedelta(seconds=2 * self._options.deadline + 60)
                self._group = dist.new_group(backend="nccl", timeout=patience)
                dist.all_reduce(torch.zeros(1, device=sides.device), group=self._group)  # not point-to-point first
                agreement.compare_over(self._group, sides.device)
        self.prepared = self._prepare(sides.names)

    @property
    def _opened(self) -> tuple[Agreement, _Sides]:
        """The checks among the ranks (`Agreement`), and the memory of the trainer and of the engine (`_Sides`). Both
        exist once `refuses` has returned None."""
        assert self._agreement is not None, "refuses() comes first"
        assert self._sides is not None, "refuses() comes first"
        return self._agreement, self._sides

    @property
    def summary(self) -> str:
        """A text on what a sync moves on this rank: the bytes received, the least possible, and the extra memory. The
        numbers describe the last sync; before the first sync, they describe a sync that moves all parameters, which
        `open` plans."""
        return "not planned yet" if self.prepared is None else str(self.prepared)

    def note(self) -> str:
        """Return a line for the start of the run: the bytes that a sync moves on this rank, and the memory it takes."""
        return f"[Reshard] a sync on rank {self._run.ranks.rank}: {self.summary}"

    # --- syncing ----------------------------------------------------------------------------------------------------

    def sync(self) -> LoadReport:
        """Bring the policy's current weights into the engines: send each rank what it lacks, and copy the rest from its
        own shards. Collective.

        Returns:
            The number of parameters that this rank's engine holds, and the bytes that this rank received.

        Raises:
            SyncError: the ranks differ in weight version or in the transfers that they have planned, or modules were
                replaced.
            PeerLostError: a rank has died, does not come within the deadline, or nothing moves any more.
        """
        agreement, sides = self._opened
        engine = self._run.live_engine
        logger.info("[Reshard] start, weight version %d", self._run.weight_version)
        started = time.perf_counter()
        if not self._synced:
            sides.shards.refuse_other_modules()
        changed = sides.shards.refresh()
        everything, self._synced = changed or engine.weights_lost or not self._synced, False
        with self._abandoning_lost_ranks():
            self.prepared = prepared = self._agreed(everything)
            sides.shards.merge()
            try:
                prepared.run()
            except PeerLostError as error:
                raise PeerLostError(f"{error} {agreement.roll_call()}") from error
        if sides.regions.padding:
            torch._foreach_zero_(list(sides.regions.padding))
        engine.weights_written()
        self._synced = True
        self._log.done(started, time.perf_counter(), str(prepared))
        return LoadReport(tensors=prepared.tensors, bytes=prepared.received_bytes)

    def forget(self) -> None:
        """Make the next sync move frozen parameters, too, and check that no module was replaced since the engine was
        built."""
        self._synced = False

    def _agreed(self, everything: bool) -> PreparedPlan:
        """Return the transfers of this sync. Before that, wait for all ranks, and check that they have the same weight
        version and have planned the same transfers.

        Args:
            everything: whether this rank must move all parameters, frozen ones included. If one rank must, all ranks
                do.

        Raises:
            SyncError: the ranks differ in weight version or in the transfers that they have planned.
        """
        agreement, sides = self._opened
        trained = tuple(name for name in sides.names if name not in sides.shards.frozen)
        small, whole = self._prepare(trained or sides.names), self._prepare(sides.names)
        mine = [self._run.weight_version, whole.digest, small.digest]
        same, anyone = agreement.compare("the start of the weight sync", mine, everything)
        if not same:
            raise SyncError(plan_difference(agreement.exchange("the comparison of the ranks' plans", mine)))
        return whole if anyone else small

    @contextmanager
    def _abandoning_lost_ranks(self) -> Iterator[None]:
        """Return a context that cleans up when a `PeerLostError` leaves it: the sync's NCCL group is aborted, and the
        engine is told that a rank is lost. Then neither work on this device nor the destruction of the process groups
        waits for that rank."""
        try:
            yield
        except PeerLostError:
            self._lost = self._run.live_engine.peers_lost = True
            if self._agreement is not None and self._group not in (None, self._agreement.group):
                abort([self._group])
            raise

    def _prepare(self, names: tuple[str, ...]) -> PreparedPlan:
        """Return the transfers of the parameters with these names. They are planned at the first call and kept for
        later ones."""
        if names not in self._known:
            _, sides = self._opened
            rank, dtype = self._run.ranks.rank, self._run.live_engine.dtype
            self._known[names] = PreparedPlan(sides, names, dtype, rank, self._group, self._options)
        return self._known[names]

    def _advice(self) -> str:
        """Return advice on how else the trainer or the engines could shard the parameters, so that a sync moves fewer
        bytes; "" if the policy has no transformers config.

        Only the sharding of the largest parameter is looked at: every layer is sharded in the same way, so it stands
        for the rest.
        """
        from .planner.advice import advice_for_run  # a run needs the planner for this alone

        config = getattr(self._run.policy.base, "config", None)
        if config is None:
            return ""
        _, sides = self._opened
        largest = max(sides.shards.parameters(sides.names), key=lambda p: p.elements)
        train, rollout = (layout.sharding(largest) for layout in sides.layouts())
        return advice_for_run(config, train, rollout, self._run.live_engine.dtype.itemsize)

    def release(self) -> None:
        """Forget the memory of an engine that was closed, and destroy the sync's process groups. `refuses` and `open`
        must be called again before the next sync."""
        own, self._group = self._group, None
        self.prepared, self._known = None, {}
        if self._agreement is not None:
            whole = not self._lost  # destroying a group would wait for its lost rank
            if whole and own is not None and own is not self._agreement.group and dist.is_initialized():
                dist.destroy_process_group(own)
            self._agreement.close()
        self._agreement = self._sides = None
        self._synced = self._lost = False


@dataclass(frozen=True, slots=True, eq=False)
class _Sides:
    """The two sides of a sync: the trainer's shards, and the engines' memory that holds the weights.

    Attributes:
        shards: the shards of this rank's trainer.
        regions: views of this rank's engine's memory, by parameter, each with the index ranges that it holds.
        held: for each rank, the boxes (one index range per dimension) that its engine holds of each parameter, by name.
        names: the names of the parameters that some engine holds, in the order of a forward pass.
        ranks_per_node: the number of consecutive ranks that share a host; 0 counts all ranks as on one host.
    """

    shards: Shards
    regions: Regions
    held: Sequence[Mapping[str, Boxes]]
    names: tuple[str, ...]
    ranks_per_node: int

    def layouts(self) -> tuple[LiveSharding, LiveSharding]:
        """Return which rank holds which part of each parameter: first in the trainer, then in the engines."""
        return self.shards.layout(len(self.held)), read_engines(self.shards.parameters(self.names), self.held)

    @property
    def device(self) -> torch.device:
        """The device of the engine's memory; the CPU if the engine on this rank holds no parameter."""
        return next((r.memory.device for found in self.regions.of.values() for r in found), torch.device("cpu"))


def ranks_per_node(hosts: Sequence[str]) -> int:
    """Return how many consecutive ranks share a host. Returns 0, which counts all ranks as one node, if this number
    differs between hosts or if a host's ranks are not consecutive.

    Args:
        hosts: the host name of each rank.
    """
    size = hosts.count(hosts[0])
    return size if list(hosts) == [host for host in dict.fromkeys(hosts) for _ in range(size)] else 0


class PreparedPlan:
    """The transfers of a sync of some parameters on this rank, which can be run any number of times: the slices that go
    to and come from each other rank, and the views of tensors that they are read from and written to.

    Args:
        sides: the trainer's shards and the engine's memory.
        names: the names of the parameters to move.
        dtype: the dtype in which weights are sent, which is that of the engine's memory.
        rank: this rank's number.
        group: the process group of all ranks; None for a single rank.
        options: the user's options.

    Attributes:
        digest: a 64-bit hash of everything on which the ranks must agree, which they compare before each sync.
        received_bytes, floor_bytes: the bytes that this rank receives in each sync, and the least that it could
            receive.
        sent_bytes: the bytes that this rank sends in each sync.
        tensors: the number of parameters of which this rank's engine holds something.
    """

    def __init__(
        self,
        sides: _Sides,
        names: Sequence[str],
        dtype: torch.dtype,
        rank: int,
        group: dist.ProcessGroup | None,
        options: ReshardOptions,
    ) -> None:
        self._sides, self._names, self._dtype, self._group, self._options = sides, names, dtype, group, options
        shards, layouts = sides.shards, sides.layouts()
        model = Model(name="live", parameters=tuple(shards.parameters(names)), itemsize=dtype.itemsize)
        cast = any(shards.local[name].dtype != dtype for name in names)
        made = plan(model, *layouts, rank, ranks_per_node=sides.ranks_per_node)
        self.floor_bytes = made.floor_bytes
        self._buckets = bucketed(model, *layouts, options.bucket_bytes, cast=cast)
        self._lowered = lower(made, self._buckets)
        self.digest = _digest(model, layouts, self._buckets)
        self._made = -1
        self._renew()

    def _renew(self) -> None:
        """Make all views of tensors anew, and the copies and messages that use them, if the trainer's tensors were
        replaced or moved since the last call."""
        sides, options = self._sides, self._options
        if self._made == sides.shards.moved:
            return
        self._made = sides.shards.moved
        local, regions, device = sides.shards.local, sides.regions.of, sides.device
        count = self._buckets.count
        self._program = program(self._names, self._lowered, count, local, regions, self._dtype, device)
        self._transport = Transport(self._program, self._group, device, options.stall, record=options.record)
        self.received_bytes, self.sent_bytes = self._program.received_bytes, self._program.sent_bytes
        self.tensors = self._program.tensors

    def run(self) -> None:
        """Move the weights of the parameters into the engines.

        Raises:
            PeerLostError: nothing arrives for `stall` seconds (an option of the weight path), or a rank is gone.
        """
        self._renew()
        self._transport.run()

    def __str__(self) -> str:
        received, floor, extra = self.received_bytes, self.floor_bytes, self._program.staging.bytes
        return (
            f"transferred={received / 1e9:.3g}GB (minimum {floor / 1e9:.3g}GB), peak=+{extra / 1e9:.3g}GB, "
            f"buckets={self._buckets.count}"
        )


def _digest(model: Model, layouts: tuple[LiveSharding, LiveSharding], buckets: Buckets) -> int:
    """Return a signed 64-bit hash by which ranks check that they have planned the same transfers.

    Args:
        model: the parameters to move.
        layouts: how the trainer and the engines shard each parameter.
        buckets: the order in which the parameters move.
    """
    state = hashlib.blake2b(digest_size=8)
    state.update(repr((model.itemsize, buckets.rounds, buckets.by_source, buckets.count)).encode())
    for parameter, numbers in zip(model.parameters, buckets.numbers, strict=True):
        state.update(f"{parameter.name}{parameter.shape}".encode() + numbers.tobytes())
        for layout in layouts:
            state.update(_bytes(layout.sharding(parameter)))
    return int.from_bytes(state.digest(), "little", signed=True)


def _bytes(sharding: Sharding) -> bytes:
    """Return the content of a sharding as bytes, to be hashed."""
    return b"|".join(array.tobytes() for array in (*sharding.parts, *sharding.coordinates, sharding.held))


class SyncLog:
    """The log of one rank's weight syncs, which warns if they take much of an iteration.

    Args:
        rank: the rank. All ranks log; only rank 0 prints and warns.
        advice: a function that returns advice on shorter syncs; called at most once.
    """

    def __init__(self, rank: int, advice: Callable[[], str]) -> None:
        self._speaks, self._advice = rank == 0, advice
        self._syncs = 0
        self._ended: float | None = None
        self._iterations: deque[tuple[float, float]] = deque(maxlen=SEEN)
        self._warned = False

    def done(self, started: float, ended: float, moved: str) -> None:
        """Log one sync.

        It warns, once, if each of the last 3 syncs (`SEEN`) took more than a tenth (`LIMIT`) of its iteration. An
        iteration is the time between the ends of two syncs. The first 3 syncs (`WARM`) do not count.

        Args:
            started, ended: the start and the end of the sync, in seconds of one clock.
            moved: what the sync moved, as text.
        """
        self._syncs += 1
        line = f"[Reshard] duration={ended - started:.3f}s, {moved}"
        logger.info(line)
        if self._speaks and self._syncs <= SHOWN and not logger.isEnabledFor(logging.INFO):
            print(line, file=sys.stderr, flush=True)
        before, self._ended = self._ended, ended
        if before is not None and self._syncs > WARM:
            self._iterations.append((ended - started, ended - before))
        seen = self._iterations
        if self._warned or len(seen) < SEEN or any(taken <= LIMIT * all_of_it for taken, all_of_it in seen):
            return
        self._warned = True
        if self._speaks:
            taken, iteration = (statistics.median(values) for values in zip(*seen, strict=True))
            logger.warning(
                "[Reshard] Resharding takes %.0f%% of an iteration, %.3g s of %.3g s. %s",
                *(100 * taken / iteration, taken, iteration, self._advice()),
            )
