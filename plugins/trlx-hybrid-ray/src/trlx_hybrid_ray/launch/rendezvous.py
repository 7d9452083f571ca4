"""Where the ranks find each other: a store that the launcher hosts, on a port that it holds from the beginning."""

from __future__ import annotations

import ipaddress
import socket
from datetime import timedelta
from types import TracebackType
from typing import Any


class Rendezvous:
    """A TCPStore that all ranks join as clients, as under torchrun.

    Asking the system for a free port and handing its number to rank 0 loses a race sooner or later: the port is free
    until somebody else takes it. Here the listening socket is made once, and the store is built on it. It listens on
    the cluster's own address only. One store serves one start of all ranks: a restarted run gets a new one, so that it
    finds no keys of the last.

    Attributes:
        host, port: what ranks get as MASTER_ADDR and MASTER_PORT.
    """

    def __init__(self, host: str, world: int) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self._socket = bound(host)
        self.host = host
        self.port: int = self._socket.getsockname()[1]
        self._store: Any = TCPStore(
            host,
            self.port,
            world,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
            master_listen_fd=self._socket.fileno(),
        )
        self._socket.detach()  # the store's own now

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._store = None


def bound(host: str) -> socket.socket:
    """A listening socket on this address and no other, on a port that the system chose."""
    version = ipaddress.ip_address(host).version
    listener = socket.socket(socket.AF_INET6 if version == 6 else socket.AF_INET)
    listener.bind((host, 0))
    listener.listen(1024)
    return listener
