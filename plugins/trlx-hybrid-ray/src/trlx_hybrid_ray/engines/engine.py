"""The remote engine (`engine="remote"`): servers of an inference library such as vLLM in Ray actors, from which a
trainer samples as if they were one engine."""

from __future__ import annotations

import dataclasses
import os
import secrets
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from trlx_hybrid.config import NoOptions, build
from trlx_hybrid.contract.protocols import NamedTensors
from trlx_hybrid.contract.serving import ServerDiedError, ServerPlan
from trlx_hybrid.contract.types import Completion, LoadReport, Request, Sampling
from trlx_hybrid.errors import EngineError, listed
from trlx_hybrid.trl.arguments import trainer_arguments

from ..actors import Worker, ensure_connected
from ..errors import brief
from ..internals import node_address
from ..reaper import OWNER_VARIABLE
from ..waiting import replies
from .options import RemoteOptions
from .pool import EnginePool, gpu_name
from .stream import WAIT, RemoteStream

if TYPE_CHECKING:
    from torch import Tensor
    from trlx_hybrid.plugins.registry import Component
    from trlx_hybrid.session import Session


def served_by(session: Session, options: RemoteOptions) -> tuple[Component, Any]:
    """Return the server component that the options choose, and its validated options. A server component is what a
    plugin offers to be run in the actors, such as "vllm". TRL's arguments fill options that the user did not set.

    Raises:
        ComponentError: no plugin offers the component, or it cannot work here.
        ConfigError: the component does not have an option that the user set.
    """
    component = session.host.registry.choose("server", options.server)
    owner = component.options or NoOptions
    known = {f.name for f in dataclasses.fields(owner)} - {"enable_sleep_mode"}
    given = dict(trainer_arguments(session.args).engine_options)
    if given.get("max_num_seqs") is not None:  # any engine may be the last one left, with the rows of all ranks
        given["max_num_seqs"] *= session.ranks.world
    given["tensor_parallel_size"] = options.tensor_parallel_size
    settled = {name: value for name, value in given.items() if name in known} | dict(options.server_options)
    return component, build(owner, settled, f"server_options for server {component.name!r}")


class RemoteEngine:
    """An engine that samples on servers in Ray actors, each one replica of an inference engine such as vLLM; it
    implements `trlx_hybrid.contract.serving.ServedEngine`. Its memory is in other processes, so `sleep` frees nothing.

    Attributes:
        pool: the actors, called engines here, that it samples on.
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
        self._streams: weakref.WeakSet[RemoteStream] = weakref.WeakSet()  # some are open while the trainer trains
        ensure_connected()
        self.pool = EnginePool(self.plan, options, session.ranks, _gpus_of_trainers(session))
        try:
            self.pool.restore()
        except BaseException:
            self.pool.close()
            raise

    # --- sampling ---------------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Sample completions for all requests on all engines, and return them in the order of the requests. A request's
        tokens do not depend on the engine that samples it."""
        with self.stream(sampling) as stream:
            keys = [stream.add(request) for request in requests]
            completions: dict[int, Completion] = {}
            while stream.busy:
                completions.update(stream.advance(WAIT))
        return [completions[key] for key in keys]

    def stream(self, sampling: Sampling) -> AbstractContextManager[RemoteStream]:
        """Return a context with a stream, to which requests are added one by one while earlier ones are sampled.
        Leaving the context aborts unfinished requests. Several ranks may have streams at a time, and each steps its own
        independently.

        Args:
            sampling: the sampling parameters of all requests.
        """
        channel = f"{self._session.ranks.rank}-{secrets.token_hex(8)}"
        stream = RemoteStream(self.pool, self._holding(), sampling, channel, self._options.deadline, self._revived)
        self._streams.add(stream)
        return stream.open()

    def _holding(self) -> list[int]:
        """Return the numbers of the living engines that hold the weights of the last sync."""
        return [number for number in self.pool.replicas if number in self._current]

    def _revived(self) -> list[int]:
        """Start new engines after the last one died, and give them the current weights. Returns their numbers.

        Raises:
            EngineError: there are several training processes (one of them cannot sync weights alone), or the sync
                failed; the message names the engine that died and why.
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
        """True where some engine does not hold the weights of the last sync, because it was started after that sync, or
        because there was no sync yet."""
        return not self.pool.replicas.keys() <= self._current or not self._current

    def load_weights(self, weights: NamedTensors) -> LoadReport:
        """Raise an EngineError: remote engines receive weights only from the weight sync that `weights="transfer"`
        selects, which calls their servers directly."""
        raise EngineError("Weights reach remote engines through weights='transfer'. Let weights='auto' choose it.")

    def differing(self, weights: NamedTensors) -> list[str]:
        """Raise an EngineError: the weights of remote engines are compared by the weight sync that `weights="transfer"`
        selects, which calls their servers directly."""
        raise EngineError("What remote engines hold is compared by weights='transfer'. Let weights='auto' choose it.")

    def weights_written(self) -> None:
        """Record, after a weight sync, that every engine holds the policy's weights."""
        self._current = frozenset(self.pool.replicas)

    @property
    def address(self) -> str:
        """The IP address of this process's node, as the Ray cluster knows it."""
        return node_address()

    @property
    def servers(self) -> tuple[int, ...]:
        """The numbers of the engines that are alive."""
        return tuple(sorted(self.pool.replicas))

    def restore(self) -> None:
        """Replace engines that died by new ones, so that `servers` is the same on all ranks, and has
        `RemoteOptions.replicas` entries if possible. Collective.

        Raises:
            PlacementError, ConfigError: there is no place for the new engines.
            EngineError: no engine lives and none can be started.
        """
        self.pool.restore()

    def call(self, method: str, arguments: Sequence[Sequence[object]], deadline: float) -> list[Any]:
        """Call a method of every engine's server at once, each with its own arguments, and return the results in the
        order of `servers`. Rank 0 calls this at a weight sync. An engine's death is raised at once, because the other
        engines may wait for the dead one.

        Args:
            method: the name of the server's method.
            arguments: the method's arguments for each engine, in the order of `servers`.
            deadline: seconds for all calls together.

        Raises:
            ServerDiedError: an engine died.
            EngineError: the method raised, or an engine did not answer in time.
        """
        from ray.exceptions import GetTimeoutError, RayError, RayTaskError

        replicas = [self.pool.replicas[number] for number in self.servers]
        calls = {r: r.handle.call.remote(method, list(given)) for r, given in zip(replicas, arguments, strict=True)}
        results: dict[Worker, object] = {}
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
        """Do nothing: the engines run in other processes, and their memory is not needed for training."""

    def wake(self, what: str) -> None:
        """Interrupt all requests of this rank and replace dead engines if `what` is "weights", which the trainer wakes
        before a weight sync: no request is sampled by two versions of the weights. Otherwise do nothing, because the
        memory of remote engines is never given up. Collective."""
        if what == "weights":
            for stream in self._streams:
                stream.interrupt()
            self.pool.restore()

    def resident(self, what: str) -> list[Tensor]:
        """Return an empty list: the engine holds no tensors on this process's device."""
        return []

    def close(self) -> None:
        """End the engines' actors and give their resources back."""
        self.pool.close()


def _gpus_of_trainers(session: Session) -> Mapping[str, Sequence[str]]:
    """Return the GPUs on which ranks train although Ray takes them to be free, because the ranks were not started
    through Ray. The result has the GPUs' numbers or UUIDs by the hexadecimal id of their node; it is empty if Ray knows
    which GPUs the ranks use. Collective."""
    import ray

    context, device = ray.get_runtime_context(), session.policy.device
    unknown = device.type == "cuda" and OWNER_VARIABLE not in os.environ and context.get_actor_id() is None
    found: dict[str, list[str]] = {}
    for used in session.ranks.gather((context.get_node_id(), gpu_name(device)) if unknown else None):
        if used is not None:
            found.setdefault(used[0], []).append(used[1])
    return found
