"""Weight sync to vLLM engines in other processes (`weights="transfer"`), by vLLM's weight-transfer engines."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import TYPE_CHECKING, Any

from trlx_hybrid.contract.protocols import WeightSync
from trlx_hybrid.contract.serving import ServerDiedError
from trlx_hybrid.contract.types import LoadReport
from trlx_hybrid.errors import HybridError, SyncError, listed
from trlx_hybrid.weights.verify import sampled_names

from ..arguments import on_cpu
from ..options import TransferOptions
from ..private.distributed import destroy_group, free_port
from .server import VLLMServerPlan

if TYPE_CHECKING:
    from trlx_hybrid.session import Session
    from vllm.distributed.weight_transfer import TrainerWeightTransferEngine

    from .sender import PolicySource
    from .worker import Routes

ATTEMPTS = 3  # of one sync: engines that die in it are replaced
SLACK = 30.0  # seconds that the whole has beyond the calls inside, so that the error of a call is reported


class TransferSync(WeightSync):
    """Sends the policy's full weights from the trainer's rank 0 to every worker of every remote engine.

    All ranks of the trainer take part, because it takes all ranks to gather sharded tensors. The process group with the
    engines is made once, and again when an engine was replaced. After each attempt to send the weights, rank 0
    broadcasts its error, or that there was none, so that no rank waits for rank 0 after an error there.
    """

    name = "transfer"

    def __init__(self, session: Session, options: TransferOptions) -> None:
        self._session, self._options = session, options
        self._source: PolicySource | None = None
        self._sender: TrainerWeightTransferEngine | None = None
        self._joined: tuple[int, ...] = ()
        self._routes: Routes | None = None

    def refuses(self) -> str | None:
        """Return why vLLM's weight transfer cannot send the policy's weights to this engine, or None if it can."""
        engine: Any = self._session.live_engine
        if not hasattr(engine, "servers"):
            return "the engine lives in the trainer's process"
        if not isinstance(engine.plan, VLLMServerPlan):
            return f"it speaks to vLLM, and the engine's servers are {engine.kind!r}"
        return self._session.policy.refuses_gather()

    def note(self) -> str | None:
        """Return a note that the weights go through host memory because vLLM cannot use NCCL; None if they do not.

        Printed when the run starts.
        """
        from ..private.distributed import nccl_missing
        from .sender import REMEDY

        if on_cpu() or self._engine.plan.backend != "gloo" or not (why := nccl_missing()):
            return None
        return f"note: weights go to the remote engines through host memory (gloo). {why} {REMEDY}."

    # --- syncing ----------------------------------------------------------------------------------------------------

    def sync(self) -> LoadReport:
        """Send all weights to every engine. If engines die meanwhile, they are replaced, and all is sent again.

        Raises:
            SyncError: the sync failed for another reason than an engine's death, or engines died at each attempt.
            EngineError: no engine is left.
        """
        from .sender import PolicySource

        source = self._source = self._source or PolicySource(self._session.policy)
        told = ""
        for _ in range(ATTEMPTS):
            self._engine.restore()
            source.begin()
            died, told, _, error = self._attempt(self._send)
            if not told:
                self._engine.weights_written()
                return LoadReport(tensors=len(source.described), bytes=source.bytes)
            self._leave()
            if not died:
                raise SyncError(f"The weights did not reach the remote engines: {told}") from error
        raise SyncError(f"Engines died at each of {ATTEMPTS} attempts to send them the weights, at last: {told}")

    def _attempt(self, work: Callable[[], Any]) -> tuple[bool, str, Any, Exception | None]:
        """Call a function on every rank, and broadcast its result or error on rank 0 to all ranks.

        An error on another rank is raised there at once. Where an error on rank 0 was caused by the death of an engine,
        the death is reported in its place.

        Args:
            work: a function without arguments.

        Returns:
            Whether an engine died, the text of the error ("" without one), what `work` returned on rank 0 (None after
            an error), and the error itself, which is None on other ranks than 0.
        """
        result, error = None, None
        try:
            result = work()
        except Exception as met:  # vLLM's backends raise what their libraries raise
            if self._session.ranks.rank:
                raise
            error = met if isinstance(met, ServerDiedError) else self._death() or met
        if self._source is not None:
            self._source.finish()
        told = "" if error is None else str(error) or repr(error)
        died, told, result = self._session.ranks.broadcast((isinstance(error, ServerDiedError), told, result))
        return died, told, result, error

    def _death(self) -> ServerDiedError | None:
        engine = self._engine
        try:
            engine.call("check", [()] * len(engine.servers), SLACK)
        except ServerDiedError as death:
            return death
        except HybridError:
            return None
        return None

    def _send(self) -> None:
        sender = self._joined_sender()
        self._within("the weights to be sent", sender.send_weights)

    def _joined_sender(self) -> TrainerWeightTransferEngine:
        """Return vLLM's weight-transfer engine on the trainer's side, joined with all engines that live now.

        It is made anew if the engines have changed since the last sync.
        """
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

        from . import gloo
        from .sender import GroupClient, init_info

        engine, options, rank = self._engine, self._options, self._session.ranks.rank
        if self._sender is None or self._joined != engine.servers:
            self._leave()
            gloo.register()
            if rank == 0 and not engine.quantized:
                self._learn()
            fields = {
                "rank": rank,
                "master_address": engine.address,
                "master_port": free_port(),
                "world_size": 1 + len(engine.servers) * engine.plan.ranks,
                "deadline": options.deadline,
            }
            info = init_info(self._engine.plan.backend, fields, options.backend_options)
            client = GroupClient(engine, options.deadline)

            def join() -> TrainerWeightTransferEngine:
                return WeightTransferTrainerFactory.trainer_init(info, client=client, source=self._source)

            self._sender = self._within("the engines to join", join)
            self._joined = engine.servers
        return self._sender

    def _learn(self) -> None:
        from .worker import Routes

        assert self._source is not None
        meta = self._source.described
        names, dtypes = [m.name for m in meta], [str(m.dtype).removeprefix("torch.") for m in meta]
        self._routes = Routes.learned(names, self._call("learn", names, dtypes, [list(m.shape) for m in meta]))
        self._source.send_as(self._routes.wire({m.name: m.dtype for m in meta}))

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        engine = self._engine
        answers: list[Any] = engine.call(method, [arguments] * len(engine.servers), self._options.deadline)
        return answers

    def _within(self, what: str, work: Callable[[], Any]) -> Any:
        """Call a function in a thread, and return its result; stop waiting for it after the deadline.

        The thread is then left behind: a wait in NCCL for an engine that is gone never ends.

        Args:
            what: what is waited for, for the error.
            work: a function without arguments.

        Raises:
            ServerDiedError: an engine died meanwhile.
            SyncError: the function takes longer than the deadline.
        """
        from .gloo import in_threads

        def watch() -> None:
            death = self._death() if self._session.ranks.rank == 0 else None
            if death is not None:
                raise death

        try:
            return in_threads(work, seconds=self._options.deadline + SLACK, watch=watch)[0]
        except TimeoutError as error:
            late = f"Waited {self._options.deadline:g} s for {what}. Raise deadline= in weights_options."
            raise SyncError(late) from error

    # --- check ------------------------------------------------------------------------------------------------------

    def check(self, full: bool) -> int:
        """Compare digests (hashes of the bits) of the policy's tensors with those of every worker of every engine.

        An engine that dies meanwhile is replaced, and all weights are sent again.

        Args:
            full: compare all tensors; else a few, others at each sync.

        Returns:
            How many tensors were compared; 0 where the engines quantise, and so keep no copy of the weights.

        Raises:
            SyncError: names the tensors that differ.
        """
        if self._engine.quantized or self._source is None:
            return 0
        names = [m.name for m in self._source.described]
        chosen = set(names if full else sampled_names(names, self._session.weight_version))
        for _ in range(ATTEMPTS):
            died, told, found, error = self._attempt(lambda: self._differing(chosen))
            if not died:
                break
            self.sync()  # the engine that replaces it has no weights yet
        if told:
            raise SyncError(f"What the remote engines hold could not be checked: {told}") from error
        if found:
            raise SyncError(
                f"After the weight sync a remote engine holds other bits than the policy in {listed(found)}. Sampling "
                "would be off policy without a trace, so the run stops. Report it with `trlx-hybrid env`."
            )
        return len(chosen)

    def _differing(self, names: Set[str]) -> list[str]:
        """Return, on rank 0, which of these tensors an engine holds with other bits than the policy.

        Collective, because the tensors may be sharded. Other ranks return an empty list.
        """
        from .worker import differing

        weights = self._session.policy.full_weights(names)
        if self._session.ranks.rank:
            for _ in weights:
                pass
            return []
        assert self._routes is not None
        expected = self._routes.digests(weights)
        return differing(expected, self._call("digests", list(expected)))

    def release(self) -> None:
        """Leave the process group with the engines, after these were closed."""
        self._leave()
        self._source = self._routes = None

    def _leave(self) -> None:
        sender, self._sender, self._joined = self._sender, None, ()
        if sender is None:
            return
        destroy = destroy_group(sender)
        sender.shutdown()
        if destroy is not None:  # vLLM's NCCL kernels would occupy the device while they wait for a dead engine
            destroy()

    @property
    def _engine(self) -> Any:
        """The run's engine: a `trlx_hybrid.contract.serving.ServedEngine` with a `VLLMServerPlan`."""
        return self._session.live_engine
