"""An engine made of engines: vLLM servers in Ray actors, sampled from as if they were one."""

from __future__ import annotations

import dataclasses
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from trlx_hybrid.config import NoOptions, build
from trlx_hybrid.errors import EngineError, listed
from trlx_hybrid.protocols import NamedTensors
from trlx_hybrid.serving import ServerDiedError, ServerPlan
from trlx_hybrid.trl.arguments import trainer_arguments
from trlx_hybrid.types import Completion, LoadReport, Request, Sampling

from ..errors import brief
from ..reaper import OWNER_VARIABLE
from ..remote.connection import connected
from ..workers.register import timeout
from .crew import Crew, Member
from .options import RemoteOptions
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
        crew: the engines that it is made of.
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
        connected()
        self.crew = Crew(self.plan, options, session.ranks, _trainers(session))
        try:
            self.crew.restore()
        except BaseException:
            self.crew.close()
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

    @contextmanager
    def stream(self, sampling: Sampling) -> Iterator[RemoteStream]:
        """Requests one at a time. Several ranks need not step together."""
        channel = f"{self._session.ranks.rank}-{secrets.token_hex(8)}"
        stream = RemoteStream(self.crew, self._holding(), sampling, channel, self._options.deadline, self._revived)
        with stream.open():
            yield stream

    def _holding(self) -> list[int]:
        return [number for number in self.crew.members if number in self._current]

    def _revived(self) -> list[int]:
        """After the last engine died: others with the current weights, if this process can have them by itself.

        Raises:
            EngineError: it cannot; names the engine that died and why.
        """
        session = self._session
        last = self.crew.causes[-1] if self.crew.causes else "none was started"
        if session.ranks.world > 1:
            raise EngineError(
                f"No remote engine is left: {last}. With several training processes they are replaced between "
                "rollouts only: resume from the last checkpoint, or ask for more replicas."
            )
        session.freshness.forget()
        assert session.weights is not None
        try:
            session.freshness.sync(session.live_engine, session.weights)
        except EngineError as error:
            raise EngineError(f"No remote engine is left: {last}. Others could not take its place: {error}") from error
        return self._holding()

    # --- weights ----------------------------------------------------------------------------------------------------

    @property
    def weights_lost(self) -> bool:
        """Whether an engine has joined, or none was ever given weights, since the last sync."""
        return not self.crew.members.keys() <= self._current or not self._current

    def load_weights(self, weights: NamedTensors) -> LoadReport:
        """Not this way."""
        raise EngineError("Weights reach remote engines through weights='transfer'. Let weights='auto' choose it.")

    def differing(self, weights: NamedTensors) -> list[str]:
        """Not this way: the weight sync compares."""
        raise EngineError("What remote engines hold is compared by weights='transfer'. Let weights='auto' choose it.")

    def weights_written(self) -> None:
        """Every engine holds the policy's weights."""
        self._current = frozenset(self.crew.members)

    @property
    def address(self) -> str:
        """Of this process's node, as the cluster knows it."""
        import ray

        return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]

    @property
    def servers(self) -> tuple[int, ...]:
        """Numbers of the engines that live."""
        return tuple(sorted(self.crew.members))

    def restore(self) -> None:
        """See `ServedEngine.restore`."""
        self.crew.restore()

    def call(self, method: str, arguments: Sequence[Sequence[Any]], deadline: float) -> list[Any]:
        """See `ServedEngine.call`. A death is told at once: the others may wait for who died."""
        import ray

        members = [self.crew.members[number] for number in self.servers]
        waiting = {
            member.handle.call.remote(method, list(given)): member
            for member, given in zip(members, arguments, strict=True)
        }
        end = time.monotonic() + deadline
        answers: dict[int, Any] = {}
        while waiting:
            ready, _ = ray.wait(list(waiting), timeout=timeout(max(0.0, end - time.monotonic())))
            if not ready:
                late = listed([str(member) for member in waiting.values()])
                raise EngineError(f"No answer to {method!r} within {deadline:g} s: {late}.")
            member = waiting.pop(ready[0])
            answers[member.number] = _answer(member, ready[0])
        return [answers[member.number] for member in members]

    # --- memory -----------------------------------------------------------------------------------------------------

    def sleep(self, keep_weights: bool = False) -> None:
        """Nothing to give back here."""

    def wake(self, what: str) -> None:
        """Before the weights are needed, see that the engines live. Collective."""
        if what == "weights":
            self.crew.restore()

    def resident(self, what: str) -> list[Any]:
        """Nothing on this device."""
        return []

    def close(self) -> None:
        """End the engines."""
        self.crew.close()


def _trainers(session: Session) -> Mapping[str, int]:
    """By node, how many ranks train on GPUs that Ray does not know to be in use. Collective."""
    import ray

    context = ray.get_runtime_context()
    apart = session.policy.device.type == "cuda" and OWNER_VARIABLE not in os.environ and context.get_actor_id() is None
    nodes = session.ranks.gather(context.get_node_id() if apart else None)
    return {node: nodes.count(node) for node in set(nodes) if node is not None}


def _answer(member: Member, reference: Any) -> Any:
    import ray

    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ServerDiedError):
            raise ServerDiedError(f"{member}: {error.cause}") from error
        raise EngineError(f"{member}: {brief(error)}") from error
    except ray.exceptions.RayError as error:
        raise ServerDiedError(f"{member} died: {brief(error)}") from error
