"""Which engine gets a request. Pure: it counts, and knows nothing of Ray."""

from __future__ import annotations

from collections.abc import Iterable


class Router:
    """Deals requests out: a trajectory's later turns go where its first one went, whose prefix cache knows it; a new
    trajectory goes where least is to do. Ties go to the engine with fewer trajectories, then to the lower number, so
    that the same requests in the same order are dealt out alike.

    Args:
        servers: numbers of those that live.
    """

    def __init__(self, servers: Iterable[int]) -> None:
        self._requests: dict[int, dict[int, None]] = {server: {} for server in servers}
        self._at: dict[int, int] = {}  # request -> server
        self._home: dict[int, int] = {}  # row -> server
        self._rows: dict[int, int] = dict.fromkeys(self._requests, 0)  # server -> how many rows live there

    @property
    def servers(self) -> tuple[int, ...]:
        """Those that live."""
        return tuple(self._requests)

    def assign(self, request: int, row: int) -> int:
        """The engine for a request of a row. There must be one, and the request must not be assigned yet."""
        server = self._home.get(row)
        if server is None:
            server = min(self._requests, key=lambda s: (len(self._requests[s]), self._rows[s], s))
            self._home[row] = server
            self._rows[server] += 1
        self._requests[server][request] = None
        self._at[request] = server
        return server

    def done(self, request: int) -> int | None:
        """A request is over, finished or not wanted any more: the engine that had it, or None."""
        server = self._at.pop(request, None)
        if server is not None:
            del self._requests[server][request]
        return server

    def at(self, server: int) -> int:
        """How many requests it has."""
        return len(self._requests[server])

    def lose(self, server: int) -> list[int]:
        """An engine died: its requests, in the order of their arrival. They, and its rows, are nobody's now."""
        requests = list(self._requests.pop(server, ()))
        for request in requests:
            del self._at[request]
        self._home = {row: home for row, home in self._home.items() if home != server}
        self._rows.pop(server, None)
        return requests

    def join(self, server: int) -> None:
        """An engine came."""
        self._requests.setdefault(server, {})
        self._rows.setdefault(server, 0)
