"""`engine="remote"`: vLLM servers in Ray actors, sampled from as if they were one engine."""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from trlx_hybrid.config import NoOptions, build
from trlx_hybrid.errors import EngineError, listed
from trlx_hybrid.protocols import NamedTensors
from trlx_hybrid.serving import ServerDiedError, ServerPlan
from trlx_hybrid.trl.arguments import trainer_arguments
from trlx_hybrid.types import Completion, LoadReport, Request, Sampling

from ..actors import ensure_connected
from ..errors import brief
from ..reaper import OWNER_VARIABLE
from ..waiting import replies
from .options import RemoteOptions
from .pool import EnginePool, gpu_name
from .stream import WAIT, RemoteStream

if TYPE_CHECKING:
    from trlx_hybrid.plugins.registry import Component
    from trlx_hybrid.session import Session


def served_by(session: Session, options: RemoteOptions) -> tuple[Component, Any]:
    """The server component that was chosen, and its options: the user's, and TRL's arguments where those say nothing.

    Raises:
        ComponentError: no plugin offers it, or it cannot work here.
        ConfigError: an option that it does not have.
    """
    component = session.host.registry.choose("server", options.server)
    owner = component.options or NoOptions
    known = {f.name for f in dataclasses.fields(owner)} - {"enable_sleep_mode"}
    given = dict(trainer_arguments(session.args).engine_options)
    if given.get("max_num_seqs") is not None:  # every engine may be the last one, with the rows of all ranks
        given["max_num_seqs"] *= session.ranks.world
    given["tensor_parallel_size"] = options.tensor_parallel_size
    settled = {name: value for name, value in given.items() if name in known} | dict(options.server_options)
    return component, build(owner, settled, f"server_options for server {component.name!r}")


class RemoteEngine:
    """See `trlx_hybrid.serving.ServedEngine`. Its memory is elsewhere, so it neither sleeps nor wakes.

    Attributes:
        pool: the engines that it is made of.
    """

    sleeps = False
    asleep_bytes = 0

    def __init__(self, session: Session, options: RemoteOptions) -> None:
        self._session, self._options = session, options
        component, server_options = served_by(session, options)
        self.kind = component.name
        self.plan: ServerPlan = component.build(session, server_options)
        self.max_model_len, self.dtype, self.quantized = self.plan.max_model_len, self.plan.dtype, self.plan.quantized
        self._current: frozenset[int] = frozenset()  # engines that hold the weights of the last sync
        ensure_connected()
        self.pool = EnginePool(self.plan, options, session.ranks, _gpus_of_trainers(session))
        try:
            self.pool.restore()
        except BaseException:
            self.pool.close()
            raise

    # --- sampling ---------------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Sample on all engines; whichever does it, a request's tokens are the same."""
        with self.stream(sampling) as stream:
            keys = [stream.add(request) for request in requests]
            completions: dict[int, Completion] = {}
            while stream.busy:
                completions.update(stream.advance(WAIT))
        return [completions[key] for key in keys]

    def stream(self, sampling: Sampling) -> AbstractContextManager[RemoteStream]:
        """Requests one at a time. Several ranks need not step together."""
        channel = f"{self._session.ranks.rank}-{secrets.token_hex(8)}"
        return RemoteStream(self.pool, self._holding(), sampling, channel, self._options.deadline, self._revived).open()

    def _holding(self) -> list[int]:
        return [number for number in self.pool.replicas if number in self._current]

    def _revived(self) -> list[int]:
        """After the last engine died: others with the current weights, if this process can have them by itself.

        Raises:
            EngineError: it cannot; names the engine that died and why.
        """
        session = self._session
        last = self.pool.causes[-1] if self.pool.causes else "none was started"
        if session.ranks.world > 1:
            raise EngineError(
                f"No remote engine is left: {last}. With several training processes they are replaced between "
                "rollouts only: resume from the last checkpoint, or ask for more replicas."
            )
        session.versions.forget()
        assert session.weights is not None
        try:
            session.versions.sync(session.live_engine, session.weights)
        except EngineError as error:
            raise EngineError(f"No remote engine is left: {last}. Others could not take its place: {error}") from error
        return self._holding()

    # --- weights ----------------------------------------------------------------------------------------------------

    @property
    def weights_lost(self) -> bool:
        """Whether an engine has joined, or none was ever given weights, since the last sync."""
        return not self.pool.replicas.keys() <= self._current or not self._current

    def load_weights(self, weights: NamedTensors) -> LoadReport:
        """Not this way."""
        raise EngineError("Weights reach remote engines through weights='transfer'. Let weights='auto' choose it.")

    def differing(self, weights: NamedTensors) -> list[str]:
        """Not this way: the weight sync compares."""
        raise EngineError("What remote engines hold is compared by weights='transfer'. Let weights='auto' choose it.")

    def weights_written(self) -> None:
        """Every engine holds the policy's weights."""
        self._current = frozenset(self.pool.replicas)

    @property
    def address(self) -> str:
        """Of this process's node, as the cluster knows it."""
        import ray

        return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]

    @property
    def servers(self) -> tuple[int, ...]:
        """Numbers of the engines that live."""
        return tuple(sorted(self.pool.replicas))

    def restore(self) -> None:
        """See `ServedEngine.restore`."""
        self.pool.restore()

    def call(self, method: str, arguments: Sequence[Sequence[Any]], deadline: float) -> list[Any]:
        """See `ServedEngine.call`. A death is told at once: the others may wait for who died."""
        from ray.exceptions import GetTimeoutError, RayError, RayTaskError

        replicas = [self.pool.replicas[number] for number in self.servers]
        calls = {r: r.handle.call.remote(method, list(given)) for r, given in zip(replicas, arguments, strict=True)}
        results: dict[Any, Any] = {}
        for replica, found in replies(calls, deadline):
            if isinstance(found, GetTimeoutError):
                late = listed([str(replica) for replica in replicas if replica not in results])
                raise EngineError(f"No answer to {method!r} within {deadline:g} s: {late}.")
            if isinstance(found, RayTaskError) and isinstance(found.cause, ServerDiedError):
                raise ServerDiedError(f"{replica}: {found.cause}") from found
            if isinstance(found, RayTaskError):
                raise EngineError(f"{replica}: {brief(found)}") from found
            if isinstance(found, RayError):
                raise ServerDiedError(f"{replica} died: {brief(found)}") from found
            results[replica] = found
        return [results[replica] for replica in replicas]

    # --- memory -----------------------------------------------------------------------------------------------------

    def sleep(self, keep_weights: bool = False) -> None:
        """Nothing to give back here."""

    def wake(self, what: str) -> None:
        """Before the weights are needed, see that the engines live. Collective."""
        if what == "weights":
            self.pool.restore()

    def resident(self, what: str) -> list[Any]:
        """Nothing on this device."""
        return []

    def close(self) -> None:
        """End the engines."""
        self.pool.close()


def _gpus_of_trainers(session: Session) -> Mapping[str, Sequence[str]]:
    """By node, the GPUs that ranks train on without Ray knowing that they are in use. Collective."""
    import ray

    context, device = ray.get_runtime_context(), session.policy.device
    unknown = device.type == "cuda" and OWNER_VARIABLE not in os.environ and context.get_actor_id() is None
    found: dict[str, list[str]] = {}
    for used in session.ranks.gather((context.get_node_id(), gpu_name(device)) if unknown else None):
        if used is not None:
            found.setdefault(used[0], []).append(used[1])
    return found
