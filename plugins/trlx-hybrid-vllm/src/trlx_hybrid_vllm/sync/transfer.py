"""`transfer`: full tensors to engines in other processes, through vLLM's own weight-transfer engines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Set
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from trlx_hybrid.errors import HybridError, SyncError, listed
from trlx_hybrid.protocols import WeightSync
from trlx_hybrid.serving import ServedEngine, ServerDiedError
from trlx_hybrid.types import LoadReport
from trlx_hybrid.weights import verify as proof

from ..internals import free_port
from ..serving.backends import backend_of, init_info
from ..serving.options import TransferOptions

if TYPE_CHECKING:
    from trlx_hybrid.session import Session

    from ..serving.proof import Routes
    from ..serving.source import PolicySource

T = TypeVar("T")
ATTEMPTS = 3  # of one sync: engines may die in it, and are replaced
SLACK = 30.0  # seconds that the whole has more than the calls inside, so that theirs is the error that is told
LOOK = 2.0  # seconds between looks at whether all engines live


class TransferSync(WeightSync):
    """Every rank reads the policy's weights, rank 0 sends them to every worker of every engine.

    The group is opened once, and again when an engine was replaced. What goes wrong on rank 0 is told to the others
    after each attempt, so that no rank waits for one that gave up.
    """

    name = "transfer"

    def __init__(self, session: Session, options: TransferOptions) -> None:
        self._session, self._options = session, options
        self._source: PolicySource | None = None
        self._sender: Any = None
        self._joined: tuple[int, ...] = ()
        self._routes: Routes | None = None

    def refuses(self) -> str | None:
        """Why this path cannot serve this model and engine, or None."""
        engine: Any = self._session.live_engine
        if not hasattr(engine, "servers"):
            return "the engine lives in the trainer's process"
        if engine.kind != "vllm":
            return f"it speaks to vLLM, and the engine's servers are {engine.kind!r}"
        return self._session.policy.refuses_gather()

    # --- syncing ----------------------------------------------------------------------------------------------------

    def sync(self) -> LoadReport:
        """Send all weights.

        Raises:
            SyncError: it failed for another reason than an engine's death, or engines died at each attempt.
            EngineError: no engine is left.
        """
        from ..serving.source import PolicySource

        engine, ranks = self._engine, self._session.ranks
        source = self._source = self._source or PolicySource(self._session.policy)
        outcome = ""
        for _ in range(ATTEMPTS):
            engine.restore()
            source.begin()
            error = self._failure(self._attempt)
            source.finish()
            died, outcome = ranks.gather((isinstance(error, ServerDiedError), _told(error)))[0]
            if not outcome:
                engine.weights_written()
                return LoadReport(tensors=len(source.described), bytes=source.bytes)
            self._leave()
            if not died:
                raise SyncError(f"The weights did not reach the remote engines: {outcome}") from error
        raise SyncError(f"Engines died at each of {ATTEMPTS} attempts to send them the weights, at last: {outcome}")

    def _attempt(self) -> None:
        sender = self._joined_sender()
        self._within("the weights to be sent", sender.send_weights)

    def _failure(self, attempt: Callable[[], None]) -> Exception | None:
        """What rank 0 met; where it was an engine's death, as such, whatever it looked like from here."""
        try:
            attempt()
        except Exception as error:  # vLLM's backends raise what their libraries raise
            if self._session.ranks.rank:
                raise
            return error if isinstance(error, ServerDiedError) else self._death() or error
        return None

    def _death(self) -> ServerDiedError | None:
        engine = self._engine
        try:
            engine.call("check", [()] * len(engine.servers), SLACK)
        except ServerDiedError as death:
            return death
        except HybridError:
            return None
        return None

    def _joined_sender(self) -> Any:
        """The trainer's end of the group of all engines that live now."""
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

        from ..serving import gloo
        from ..serving.client import GroupClient

        engine, deadline = self._engine, self._options.deadline
        assert self._source is not None
        if self._sender is None or self._joined != engine.servers:
            self._leave()
            gloo.register()
            if self._session.ranks.rank == 0 and not engine.quantized:
                self._learn()
            info = init_info(backend_of(self._session), self._fields(), self._options.backend_options)
            client = GroupClient(engine, deadline)

            def join() -> Any:
                return WeightTransferTrainerFactory.trainer_init(info, client=client, source=self._source)

            self._sender = self._within("the engines to join", join)
            self._joined = engine.servers
        return self._sender

    def _fields(self) -> dict[str, Any]:
        engine = self._engine
        return {
            "rank": self._session.ranks.rank,
            "master_address": engine.address,
            "master_port": free_port(engine.address),
            "world_size": 1 + len(engine.servers) * engine.plan.ranks,
            "deadline": self._options.deadline,
        }

    def _learn(self) -> None:
        from ..serving.proof import Routes

        assert self._source is not None
        meta, engine = self._source.described, self._engine
        arguments = (
            [m.name for m in meta],
            [str(m.dtype).removeprefix("torch.") for m in meta],
            [list(m.shape) for m in meta],
        )
        answers = engine.call("learn", [arguments] * len(engine.servers), self._options.deadline)
        self._routes = Routes.learned([m.name for m in meta], answers)
        self._source.wire = self._routes.wire({m.name: m.dtype for m in meta})

    def _within(self, what: str, work: Callable[[], T]) -> T:
        """Do it in a thread, which can be given up: what waits in NCCL for an engine that is gone waits for ever.

        Raises:
            ServerDiedError: an engine died meanwhile.
            SyncError: it takes longer than the deadline.
        """
        outcome: list[Any] = []
        device = torch.cuda.current_device() if self._session.policy.device.type == "cuda" else None

        def run() -> None:
            try:
                if device is not None:
                    torch.cuda.set_device(device)
                with torch.no_grad():
                    outcome.append((work(), None))
            except BaseException as error:  # handed to the thread that waits
                outcome.append((None, error))

        thread = threading.Thread(target=run, name=f"waits for {what}", daemon=True)
        thread.start()
        end = time.monotonic() + self._options.deadline + SLACK
        while thread.is_alive():
            thread.join(LOOK)
            death = self._death() if thread.is_alive() and self._session.ranks.rank == 0 else None
            if death is not None:
                raise death
            if time.monotonic() > end:
                raise SyncError(f"Waited {self._options.deadline:g} s for {what}. Raise deadline= in weights_options.")
        value, error = outcome[0]
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]

    # --- proof ------------------------------------------------------------------------------------------------------

    def check(self, full: bool) -> int:
        """Compare digests of all tensors, or of a few, on every worker of every engine. One that dies is replaced.

        Raises:
            SyncError: names the tensors that differ.
        """
        engine, session, source = self._engine, self._session, self._source
        if engine.quantized or source is None:
            return 0
        names = [m.name for m in source.described]
        chosen = set(names if full else proof.sampled_names(names, session.freshness.version))
        found: list[str] = []

        def compare() -> None:
            found[:] = self._differing(chosen)

        for _ in range(ATTEMPTS):
            error = self._failure(compare)
            died, outcome, told = session.ranks.gather((isinstance(error, ServerDiedError), _told(error), found))[0]
            if not died:
                break
            self.sync()  # whoever takes its place has no weights yet
        if outcome:
            raise SyncError(f"What the remote engines hold could not be checked: {outcome}") from error
        if told:
            raise SyncError(
                f"After the weight sync a remote engine holds other bits than the policy in {listed(told)}. Sampling "
                "would be off policy without a trace, so the run stops. Report it with `trlx-hybrid env`."
            )
        return len(chosen)

    def _differing(self, names: Set[str]) -> list[str]:
        """On rank 0, those of these tensors of which an engine holds other bits. Collective: they may be sharded."""
        from ..serving.proof import differing

        weights = self._session.policy.full_weights(names)
        if self._session.ranks.rank:
            for _ in weights:
                pass
            return []
        assert self._routes is not None
        expected, engine = self._routes.digests(weights), self._engine
        return differing(
            expected, engine.call("digests", [(list(expected),)] * len(engine.servers), self._options.deadline)
        )

    def release(self) -> None:
        """The engine was closed."""
        self._leave()
        self._source = self._routes = None

    def _leave(self) -> None:
        sender, self._sender, self._joined = self._sender, None, ()
        if sender is None:
            return
        destroy = getattr(getattr(sender, "model_update_group", None), "destroy", None)
        sender.shutdown()
        if destroy is not None:  # of vLLM's NCCL, whose kernels would hold the device while they wait for a dead engine
            destroy()

    @property
    def _engine(self) -> Any:
        engine: ServedEngine = self._session.live_engine  # type: ignore[assignment]
        return engine


def _told(error: Exception | None) -> str:
    return "" if error is None else str(error) or repr(error)
