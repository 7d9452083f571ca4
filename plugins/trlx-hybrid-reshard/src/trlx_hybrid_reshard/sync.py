"""The weight sync `reshard`: from the trainer's shards into the slices of the engines, only what each rank lacks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from trlx_hybrid.errors import ConfigError, EngineError, PeerLostError, SyncError
from trlx_hybrid.protocols import Regions, WeightSync
from trlx_hybrid.ranks import abort
from trlx_hybrid.types import LoadReport

from . import differences
from .agreement import Agreement
from .live import LiveLayout
from .merged import unmergeable
from .moves import Moves
from .remedies import remedies
from .served import read_boxes
from .shards import Shards
from .sync_log import SyncLog

if TYPE_CHECKING:
    from trlx_hybrid.session import Session

    from .options import ReshardOptions


class ReshardSync(WeightSync):
    """FSDP2, HSDP or DDP to engines with any tensor parallelism.

    Where weights lie is read from both sides, once; then each sync replays the plan. Frozen parameters move when the
    engine's weights were lost, and when they were written to or replaced since the last sync, and otherwise not.
    The proof of a sync is left to the session, which gathers whole tensors on another path.

    Attributes:
        moves: of the last sync, or of all parameters before there was one.
    """

    name = "reshard"

    def __init__(self, session: Session, options: ReshardOptions) -> None:
        self._session, self._options = session, options
        self._agreement: Agreement | None = None
        self._shards: Shards | None = None
        self._regions: Regions | None = None
        self._held: list[dict[str, Any]] = []
        self._everything: tuple[str, ...] = ()
        self._group: Any = None
        self._known: dict[tuple[str, ...], Moves] = {}
        self._synced = self._lost = False
        self._log = SyncLog(session.ranks.rank, self._advice)
        self.moves: Moves | None = None

    # --- choosing ---------------------------------------------------------------------------------------------------

    def refuses(self) -> str | None:
        """Why this path cannot serve this model and engine, or None. All ranks give the same answer.

        Raises:
            SyncError: the ranks have different models.
            PeerLostError: one does not take part.
        """
        reason = self._refuses_at_sight()
        if reason is not None:
            return reason
        with self._giving_up():
            return self._refuses_together()

    def _refuses_together(self) -> str | None:
        ranks = self._session.ranks
        self._agreement = agreement = Agreement(ranks.rank, ranks.world, self._options.deadline, self._options.stall)
        self._shards = shards = Shards(self._session.policy)
        odd = differences.of_models(agreement.exchange("the comparison of the ranks' models", shards.shapes))
        if odd is not None:
            raise SyncError(odd)
        shards.merge()
        reason, boxes = self._inspect(shards)
        gathered = agreement.exchange("the comparison of what the engines hold", (reason, boxes))
        found = next((f"rank {rank}: {why}" for rank, (why, _) in enumerate(gathered) if why is not None), None)
        if found is not None:
            self.release()
            return reason or found
        self._held = [theirs for _, theirs in gathered]
        used = set[str]().union(*self._held)
        self._everything = tuple(name for name in shards.shapes if name in used)  # in the order of a forward pass
        return None

    def _refuses_at_sight(self) -> str | None:
        policy = self._session.policy
        if policy.adapters and self._session.ranks.world == 1:
            return "one rank has nothing to reshard; what cannot be served is merged (`gather`)"
        reason = unmergeable(policy) or policy.refuses_gather()
        if reason is not None:
            return reason
        if not hasattr(self._session.live_engine, "regions"):
            return "the engine does not say where its weights lie"
        for name, p in policy.base_parameters().items():
            if hasattr(p, "ds_id"):
                return f"{name} is in ZeRO-3's flat buffers, whose layout is DeepSpeed's own; use FSDP2"
            if not 1 <= p.dim() <= 3:
                return f"{name} has {p.dim()} dimensions"
        return None

    def _inspect(self, shards: Shards) -> tuple[str | None, dict[str, Any]]:
        """This rank's reason against, and the boxes that its engine holds."""
        engine = self._session.live_engine
        try:
            self._regions = regions = engine.regions(self._session.policy)
            unknown = regions.of.keys() - shards.shapes.keys()
            if unknown:
                return f"the engine holds {min(unknown)}, which is no parameter of the policy", {}
            other = {r.memory.dtype for found in regions.of.values() for r in found} - {engine.dtype}
            if other:
                return f"the engine keeps weights in {other.pop()} beside {engine.dtype}", {}
            shards.layout(self._session.ranks.world)
        except (EngineError, ConfigError) as error:
            return str(error), {}
        return None, {name: tuple(r.box for r in found) for name, found in regions.of.items()}

    def open(self) -> None:
        """Make the plan of a whole sync, and the group its bytes go over.

        Raises:
            PeerLostError: a rank does not take part.
        """
        assert self._agreement is not None, "refuses() comes first"
        with self._giving_up():
            self._join(self._agreement)
        self.moves = self._plan(self._everything)

    def _join(self, agreement: Agreement) -> None:
        self._group = agreement.group
        if agreement.group is not None and self._device.type == "cuda":
            # NCCL's own watchdog ends the process without a word to the others: it comes after our deadline.
            patience = timedelta(seconds=2 * self._options.deadline + 60)
            self._group = dist.new_group(backend="nccl", timeout=patience)
            dist.all_reduce(torch.zeros(1, device=self._device), group=self._group)  # point-to-point cannot be first
            agreement.use(self._group, self._device)

    @property
    def summary(self) -> str:
        """What a whole sync moves on this rank."""
        return str(self.moves)

    # --- syncing ----------------------------------------------------------------------------------------------------

    def sync(self) -> LoadReport:
        """Move what the ranks lack, and copy the rest from their own shards.

        Raises:
            SyncError: a rank means something else.
            PeerLostError: a rank has died, does not come within the deadline, or nothing moves any more.
        """
        assert self._agreement is not None
        assert self._shards is not None
        engine = self._session.live_engine
        started = time.perf_counter()
        changed = self._shards.refresh()
        everything, self._synced = changed or engine.weights_lost or not self._synced, False
        with self._giving_up():
            self._agree(everything)
            self._shards.merge()
            moves = self._move()
        if self._regions is not None and self._regions.padding:
            torch._foreach_zero_(list(self._regions.padding))
        engine.weights_written()
        self._synced = True
        self._log.done(started, time.perf_counter(), str(moves))
        return LoadReport(tensors=moves.tensors, bytes=moves.received_bytes)

    def _move(self) -> Moves:
        """Carry it out. Where it stands still, every rank asks who is still there."""
        assert self._agreement is not None
        assert self.moves is not None
        try:
            self.moves.run()
        except PeerLostError as error:
            raise PeerLostError(f"{error} {self._agreement.roll_call()}") from error
        return self.moves

    def forget(self) -> None:
        """Frozen parameters move again, too."""
        self._synced = False

    def _agree(self, everything: bool) -> None:
        """All ranks are there, at one weight version and one plan; if one must move everything, all do."""
        assert self._agreement is not None
        assert self._shards is not None
        trained = tuple(name for name in self._everything if name not in self._shards.frozen)
        small = self._plan(trained or self._everything)
        whole = self._plan(self._everything)
        mine = [self._session.freshness.version, whole.digest, small.digest]
        same, anyone = self._agreement.same("the start of the weight sync", mine, everything)
        if not same:
            raise SyncError(differences.of_plans(self._agreement.exchange("the comparison of the ranks' plans", mine)))
        self.moves = whole if anyone else small

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Where a rank is lost, nothing of a sync is left waiting for it, on this device or when all is closed."""
        try:
            yield
        except PeerLostError:
            self._lost = self._session.live_engine.peers_lost = True
            if self._agreement is not None and self._group not in (None, self._agreement.group):
                abort([self._group])
            raise

    def _plan(self, names: tuple[str, ...]) -> Moves:
        """The moves of some parameters, made at their first use."""
        assert self._shards is not None
        assert self._regions is not None
        if names not in self._known:
            ranks, engine = self._session.ranks, self._session.live_engine
            self._known[names] = Moves(
                self._shards,
                names,
                self._layouts(),
                self._regions,
                engine.dtype,
                self._device,
                (ranks.rank, self._group),
                self._options,
            )
        return self._known[names]

    def _layouts(self) -> tuple[LiveLayout, LiveLayout]:
        """Where all parameters lie in the trainer, and where in the engines."""
        assert self._shards is not None
        parameters = self._shards.parameters(self._everything)
        return self._shards.layout(self._session.ranks.world), read_boxes(parameters, self._held)

    def _advice(self) -> str:
        """By the largest parameter: layers are placed alike. Nothing for a module that is no model of transformers."""
        config = getattr(self._session.policy.base, "config", None)
        if config is None:
            return ""
        assert self._shards is not None
        parameters = self._shards.parameters(self._everything)
        largest = max(parameters, key=lambda p: p.elements)
        train, rollout = (layout.sharding(largest) for layout in self._layouts())
        return remedies(config, train, rollout, self._session.live_engine.dtype.itemsize)

    @property
    def _device(self) -> torch.device:
        assert self._regions is not None
        return next((r.memory.device for found in self._regions.of.values() for r in found), torch.device("cpu"))

    def release(self) -> None:
        """The engine was closed: forget its memory, and give the groups back."""
        own, self._group = self._group, None
        self.moves, self._known = None, {}
        if self._agreement is not None:
            whole = not self._lost  # a group that lost a rank would be waited for
            if whole and own is not None and own is not self._agreement.group and dist.is_initialized():
                dist.destroy_process_group(own)
            self._agreement.close()
        self._agreement = self._shards = self._regions = None
        self._held, self._synced, self._lost = [], False, False
