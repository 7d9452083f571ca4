"""A stream of requests to the remote engines. It assigns requests to engines, collects the completions, and sends
requests to another engine if one dies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from trlx_hybrid.contract.serving import ServerDiedError
from trlx_hybrid.contract.types import Completion, Request, Sampling
from trlx_hybrid.errors import EngineError

from .. import debugging
from ..errors import brief
from ..waiting import Reference, RunningClock
from .actor import Output
from .pool import CHECK_SECONDS, EnginePool

TICK = 0.01  # seconds that a step waits for a completion: answers of tools wait for the step to end
COLLECT_SECONDS = 1.0  # seconds that a call waits in the actor for completions
WAIT = 1.0  # seconds of one wait where there is no other work
NOTHING = Completion(token_ids=[], logprobs=[])
"""The tokens of a request that was interrupted before an engine had sampled any."""


class RemoteStream:
    """A stream of requests over all engines that hold the current weights. Every rank opens its own streams to the same
    engines, and ranks do not coordinate them.

    A request carries its seed. If its engine dies, another engine samples the request anew from the beginning, and gets
    the same tokens.

    Args:
        pool: the engines of the run.
        servers: the numbers of the engines to use, keys of `pool.replicas`.
        sampling: the sampling parameters of all requests.
        channel: the stream's name in the engines' actors, which no other stream of any rank may have.
        deadline: seconds that an engine may work without finishing a request; then it counts as dead.
        revive: a function that is called when no engine is left. It returns the numbers of new engines that hold the
            current weights, or raises.
    """

    shared = False

    def __init__(
        self,
        pool: EnginePool,
        servers: Sequence[int],
        sampling: Sampling,
        channel: str,
        deadline: float,
        revive: Callable[[], Sequence[int]],
    ) -> None:
        self._pool, self._sampling, self._channel, self._revive = pool, sampling, channel, revive
        self._deadline = debugging.patience(deadline)
        self._router = Router(servers)
        self._requests: dict[int, Request] = {}  # unfinished
        self._unsent: list[int] = []
        self._collecting: dict[Reference, int] = {}  # reference of a `collect` call -> engine
        self._clock = RunningClock()  # an engine is not silent while this process is stopped
        self._progress: dict[int, float] = {}  # engine -> when it last finished something, or got something to do
        self._heard: dict[int, float] = {}  # engine -> when it last answered a call
        self._next = 0
        self._interrupted: dict[int, Completion] | None = None  # by key, once the requests were interrupted

    def add(self, request: Request) -> int:
        """Queue a request, which the next step sends. Returns the request's key, which comes back with its
        completion."""
        key, self._next = self._next, self._next + 1
        self._requests[key] = request
        self._unsent.append(key)
        return key

    def abort(self, key: int) -> None:
        """Abort the request with this key and free its resources. A request that has finished is ignored."""
        if self._requests.pop(key, None) is None:
            return
        server = self._router.done(key)
        if server is None:
            self._unsent.remove(key)
        elif server in self._pool.replicas:
            self._pool.replicas[server].handle.abort.remote(self._channel, [key])

    def interrupt(self) -> None:
        """Interrupt all unfinished requests, and wait for the tokens that they have sampled. The stream takes no
        further requests. A request whose engine is dead has sampled nothing, and is not sent to another.

        Raises:
            EngineError: an engine refused a request.
        """
        if self._interrupted is not None:
            return
        self._interrupted = {}
        now = self._clock.now()
        for server in self._router.servers:
            if server in self._pool.replicas and self._router.load(server):
                self._progress[server] = self._heard[server] = now  # the trainer may not have listened for a while
                self._pool.replicas[server].handle.interrupt.remote(self._channel)
        while self._requests:
            self._interrupted.update(self._collected(WAIT))
            self._interrupted.update((key, NOTHING) for key in self._unsent)
            for key in self._unsent:
                del self._requests[key]
            self._unsent = []

    def sampled(self, key: int) -> Completion:
        """Return the tokens of an unfinished request, and end it. The first call interrupts all requests."""
        self.interrupt()
        assert self._interrupted is not None
        return self._interrupted.pop(key)

    def step(self, more: bool) -> tuple[list[tuple[int, Completion]], bool]:
        """Send queued requests, and return the requests that have finished as (key, completion). If none has finished,
        it waits for up to `TICK` (0.01 s) first.

        Args:
            more: whether the caller will go on stepping.

        Returns:
            The finished requests, and `more` as it was passed. For other engines the second value says whether any rank
            goes on; ranks need not step together here.
        """
        return self.advance(TICK), more

    @property
    def busy(self) -> bool:
        """True while a request is unfinished."""
        return bool(self._requests)

    def advance(self, wait: float) -> list[tuple[int, Completion]]:
        """Send queued requests, and return the requests that have finished as (key, completion), after waiting at most
        `wait` seconds for the first.

        Raises:
            EngineError: an engine refused a request, or none is left and none can be started.
        """
        self._send()
        return self._collected(wait) if self._requests else []

    def _collected(self, wait: float) -> list[tuple[int, Completion]]:
        """Return the requests that have finished, as (key, completion), after waiting at most `wait` seconds for the
        first. Requests of engines that have died are queued again.

        Raises:
            EngineError: an engine refused a request.
        """
        import ray

        self._forget_the_dead()
        for server in self._router.servers:
            if self._router.load(server) and server not in self._collecting.values():
                handle = self._pool.replicas[server].handle
                self._collecting[handle.collect.remote(self._channel, COLLECT_SECONDS)] = server
        if not self._collecting:
            return []
        ready, _ = ray.wait(list(self._collecting), num_returns=1, timeout=wait)
        if ready:
            ready, _ = ray.wait(list(self._collecting), num_returns=len(self._collecting), timeout=0)
        finished: list[tuple[int, Completion]] = []
        for reference in ready:
            sender = self._collecting.pop(reference, None)
            if sender is not None:
                finished += self._taken(sender, reference)
        self._notice_silence()
        return finished

    @contextmanager
    def open(self) -> Iterator[RemoteStream]:
        """Keep the stream open for the length of a `with` block. At its end, unfinished requests are aborted."""
        try:
            yield self
        finally:
            for server in self._router.servers:
                if server in self._pool.replicas:
                    self._pool.replicas[server].handle.end.remote(self._channel)
            self._requests.clear()
            self._interrupted = {}

    # --- to the engines and back ------------------------------------------------------------------------------------

    def _send(self) -> None:
        """Send the queued requests. Before that, queue those of dead engines again."""
        self._forget_the_dead()
        if not self._unsent:
            return
        if not self._router.servers:
            for server in self._revive():
                self._router.join(server)
        keys, self._unsent = self._unsent, []
        batches: dict[int, list[tuple[int, Request]]] = {}
        for key in keys:
            request = self._requests[key]
            batches.setdefault(self._router.assign(key, request.row), []).append((key, request))
        for server, batch in batches.items():
            self._pool.replicas[server].handle.add.remote(self._channel, batch, self._sampling)
            if self._router.load(server) == len(batch):  # it was idle before
                self._progress[server] = self._heard[server] = self._clock.now()

    def _forget_the_dead(self) -> None:
        """Queue the requests of engines that another part of this process, such as a weight sync, has found dead and
        removed from the pool."""
        for server in [s for s in self._router.servers if s not in self._pool.replicas]:
            self._resend(server)

    def _taken(self, server: int, reference: Reference) -> list[tuple[int, Completion]]:
        """Read the result of an engine's `collect` call, and return the requests that have finished as (key,
        completion). If the engine has died, queue its requests for other engines.

        Args:
            server: the engine's number.
            reference: Ray's reference to the call's result.

        Raises:
            EngineError: the engine refused a request.
        """
        import ray

        try:
            outputs: list[Output] = ray.get(reference)
        except (ray.exceptions.RayError, EngineError) as error:
            self._lose(server, brief(error))
            return []
        self._heard[server] = self._clock.now()
        finished = []
        for key, found in outputs:
            if isinstance(found, ServerDiedError):
                self._lose(server, str(found))
                break
            if self._requests.pop(key, None) is None:
                continue  # aborted before it arrived
            self._router.done(key)
            self._progress[server] = self._heard[server]
            if isinstance(found, EngineError):
                raise EngineError(f"{self._pool.replicas[server]} refused a request: {found}") from found
            finished.append((key, found))
        return finished

    def _notice_silence(self) -> None:
        now = self._clock.now()
        for server in self._router.servers:
            if not self._router.load(server):
                continue
            if now - self._heard[server] > debugging.patience(CHECK_SECONDS) + COLLECT_SECONDS:
                self._lose(server, f"it did not answer for {CHECK_SECONDS:g} s")
            elif now - self._progress[server] > self._deadline:
                self._lose(
                    server, f"it finished no request in {self._deadline:g} s. Raise deadline= if they are that long"
                )

    def _lose(self, server: int, cause: str) -> None:
        """Remove an engine that died from the pool, and queue its requests for other engines.

        Args:
            server: the engine's number.
            cause: why it counts as dead, for messages.
        """
        self._pool.lose(server, cause)
        self._resend(server)

    def _resend(self, server: int) -> None:
        self._collecting = {reference: s for reference, s in self._collecting.items() if s != server}
        self._unsent = [*self._router.lose(server), *self._unsent]


class Router:
    """An object that chooses an engine for each request of a stream. It only counts requests, and does not use Ray.

    Later turns of a trajectory, which have the same `Request.row`, go to the engine of its first turn, which has its
    prefix cached. A new trajectory goes to the engine with the fewest requests. Ties go to the engine with fewer
    trajectories, then to the lower number, so the choice depends on nothing but the requests and their order.

    Args:
        servers: the numbers of the living engines.
    """

    def __init__(self, servers: Iterable[int]) -> None:
        self._requests: dict[int, dict[int, None]] = {server: {} for server in servers}
        self._home: dict[int, int] = {}  # row -> server
        self._rows: dict[int, int] = dict.fromkeys(self._requests, 0)  # server -> number of its rows

    @property
    def servers(self) -> tuple[int, ...]:
        """The numbers of the engines that are alive."""
        return tuple(self._requests)

    def assign(self, request: int, row: int) -> int:
        """Choose an engine for a request, record the choice, and return the engine's number. At least one engine must
        be left, and the request must not be assigned yet.

        Args:
            request: the request's key.
            row: the row of the batch to which the request belongs; the turns of a trajectory share it.
        """
        server = self._home.get(row)
        if server is None:
            server = min(self._requests, key=lambda s: (len(self._requests[s]), self._rows[s], s))
            self._home[row] = server
            self._rows[server] += 1
        self._requests[server][request] = None
        return server

    def done(self, request: int) -> int | None:
        """Remove a request that has finished or was aborted. Returns the number of the engine that had it, or None
        where it was not assigned."""
        server = next((server for server, requests in self._requests.items() if request in requests), None)
        if server is not None:
            del self._requests[server][request]
        return server

    def load(self, server: int) -> int:
        """Return the number of unfinished requests that an engine has."""
        return len(self._requests[server])

    def lose(self, server: int) -> list[int]:
        """Remove a dead engine, and return the keys of its unfinished requests in the order of their arrival, so that
        they can be assigned again. Trajectories that were bound to this engine may then go to any other.

        Args:
            server: the engine's number.
        """
        requests = list(self._requests.pop(server, ()))
        self._home = {row: home for row, home in self._home.items() if home != server}
        self._rows.pop(server, None)
        return requests

    def join(self, server: int) -> None:
        """Add a newly started engine; `assign` may choose it from now on."""
        self._requests.setdefault(server, {})
        self._rows.setdefault(server, 0)
