"""A Ray cluster for one run: started here and gone with it, or joined and left as it was.

Address, namespace and token reach the processes of a run in their environment. Ray's own search for a cluster looks
through the process table and takes whichever it meets, and a child that names no namespace looks into an empty one.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trlx_hybrid.errors import ConfigError

from . import token
from .asking import ask
from .errors import ClusterError
from .internals import LOOPBACK_VARIABLE, apart, discovered, reachable
from .token import MODE, PATH, TOKEN

ADDRESS, NAMESPACE = "RAY_ADDRESS", "TRLX_HYBRID_RAY_NAMESPACE"
LOCAL = "local"
AUTO = "auto"
POLL = 0.1
START_SECONDS = 60.0
STOP_SECONDS = 15.0
OBJECT_STORE = 1 << 30
JOIN_VARIABLE, JOIN_SECONDS = "RAY_gcs_server_port_wait_time_s", "5"
"""Attempts, about a second each, that Ray makes to join once the port is open: a wrong token makes it try again too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A cluster that this process is connected to.

    Attributes:
        address: host:port, what `connect` takes to join it from elsewhere.
        namespace: of this run's named actors.
        dashboard: its URL, or None where no dashboard runs.
        token: the file with its token where this process made or was given one.
        started: whether it was started here, and ends with the context.
    """

    address: str
    namespace: str
    dashboard: str | None
    token: Path | None
    started: bool

    def __str__(self) -> str:
        shown = f"Ray {'started' if self.started else 'joined'} at {self.address}, namespace {self.namespace}"
        return shown + (f", dashboard {self.dashboard}" if self.dashboard else "")


@contextmanager
def connect(
    address: str = LOCAL,
    *,
    namespace: str | None = None,
    cpus: int | None = None,
    gpus: int | None = None,
    dashboard: bool = False,
    everywhere: bool = False,
    token_file: str | Path | None = None,
    object_store_memory: int = OBJECT_STORE,
    forward_logs: bool = False,
    deadline: float | None = START_SECONDS,
) -> Iterator[Cluster]:
    """Start a local cluster, or join a running one, for as long as the context lasts.

    What was started is shut down; what was joined keeps running, without this driver's actors. Children of this process
    find the cluster and its namespace in the environment, see `announce`.

    Args:
        address: "local" starts one; host:port joins; "auto" joins the one on this machine, however Ray finds it.
        namespace: of named actors; by default one of its own for each run, so that runs cannot meet.
        cpus, gpus: of a started cluster; by default what the machine has. More GPUs than it has are pretended, for
            tests.
        dashboard: start one with the cluster.
        everywhere: let a started cluster listen on all interfaces, for nodes on other machines. By default dashboard
            and ports answer this machine only.
        token_file: the token of the cluster to join, or to start with. By default a started cluster gets a new one,
            and a joined one is shown what Ray's variables or `~/.ray/auth_token` hold.
        object_store_memory: bytes, of a started cluster.
        forward_logs: print what actors print.
        deadline: seconds to wait for a running cluster to answer; None waits for ever.

    Raises:
        ConfigError: arguments that contradict each other.
        ClusterError: no cluster answers at the address, its token is another, or it does not start.
    """
    _refuse(address, cpus, gpus, dashboard, everywhere)
    namespace = namespace or f"trlx-{secrets.token_hex(4)}"
    with ExitStack() as stack:
        stack.enter_context(_environment_restored())
        secret: Path | None
        if address == LOCAL:
            folder = Path(stack.enter_context(_short_folder()))
            secret = Path(token_file) if token_file else token.make(folder)
            settings: dict[str, Any] = {
                "num_cpus": cpus,
                "num_gpus": gpus,
                "include_dashboard": dashboard,
                "dashboard_host": "0.0.0.0" if everywhere else "127.0.0.1",
                "object_store_memory": object_store_memory,
                "_temp_dir": str(folder),
            }
        else:
            secret = Path(token_file) if token_file else None
            address = _answering(address, deadline)
            everywhere = not address.startswith("127.")
            settings = {}
            os.environ.setdefault(JOIN_VARIABLE, JOIN_SECONDS)
        stack.enter_context(reachable(everywhere))
        stack.enter_context(token.presented(secret))
        yield stack.enter_context(_initialised(address, namespace, secret, forward_logs, settings))


def environment() -> dict[str, str]:
    """What a child of this process needs to join the same run, whether this is the driver, an actor or a task.

    The token is named by its path; it stands in the environment itself only where the user put it there.
    """
    import ray

    context = ray.get_runtime_context()
    inherited = (MODE, PATH, TOKEN, LOOPBACK_VARIABLE)
    return {ADDRESS: context.gcs_address, NAMESPACE: context.namespace} | {
        name: os.environ[name] for name in inherited if name in os.environ
    }


def announce() -> None:
    """Put `environment()` into this process's own, for children that others start. For actors, at their start."""
    os.environ.update(environment())


@contextmanager
def _initialised(
    address: str, namespace: str, secret: Path | None, forward_logs: bool, settings: dict[str, Any]
) -> Iterator[Cluster]:
    import ray

    if ray.is_initialized():
        raise ClusterError(
            f"This process is already connected to the Ray cluster at {ray.get_runtime_context().gcs_address}. Call "
            "ray.shutdown() first, or use that connection."
        )
    os.environ.pop(ADDRESS, None)
    try:
        with apart():
            context: Any = ray.init(
                address=address,
                namespace=namespace,
                log_to_driver=forward_logs,
                logging_level=logging.ERROR,
                **settings,
            )
    except (ray.exceptions.RayError, ConnectionError, RuntimeError, TimeoutError, ValueError, OSError) as error:
        if _unauthenticated(error):
            raise ClusterError(
                f"The Ray cluster at {address} refused our token, or we showed none. Name the file with the cluster's "
                "token: token_file=, or --token-file on the command line."
            ) from error
        doing = "start" if settings else f"join the Ray cluster at {address}"
        raise ClusterError(f"Ray did not {doing}: {type(error).__name__}: {error}") from error
    try:
        announce()
        url = context.dashboard_url
        yield Cluster(
            address=context.address_info["gcs_address"],
            namespace=namespace,
            dashboard=f"http://{url}" if url else None,
            token=secret,
            started=bool(settings),
        )
    finally:
        ask(lambda: ray.shutdown(wait_for_processes=True), STOP_SECONDS)


def _unauthenticated(error: BaseException | None) -> bool:
    """Whether the token is what lies behind an error: Ray tells it somewhere down the chain, as text."""
    while error is not None:
        if "Unauthenticated" in str(error) or "AuthenticationError" in f"{type(error).__name__} {error}":
            return True
        error = error.__cause__ or error.__context__
    return False


def _refuse(address: str, cpus: int | None, gpus: int | None, dashboard: bool, everywhere: bool) -> None:
    if address == LOCAL:
        return
    asked = {"cpus": cpus is not None, "gpus": gpus is not None, "dashboard": dashboard, "everywhere": everywhere}
    for name in (name for name, given in asked.items() if given):
        raise ConfigError(f"{name}= is of a cluster that is started; the one at {address} runs already. Leave it out.")


def _answering(address: str, deadline: float | None) -> str:
    """host:port of a cluster whose port is open.

    Raises:
        ClusterError: it is no address, "auto" found nothing, or nobody answers before the deadline.
    """
    if address == AUTO:
        found = discovered()
        if found is None:
            raise ClusterError(
                "address='auto' found no Ray cluster on this machine. Start one with `ray start --head`, or name one "
                "by host:port."
            )
        address = found
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "//" in host:
        raise ClusterError(
            f"{address!r} is no address of a Ray cluster. Write host:port as `ray start` printed it (port 6379, not "
            "that of the dashboard or of Ray Client), 'auto' or 'local'."
        )
    started, last = time.monotonic(), "no attempt was made"
    while deadline is None or time.monotonic() - started < deadline:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
            return address
        except OSError as error:
            last = str(error)
            time.sleep(POLL)
    raise ClusterError(
        f"No Ray cluster answered at {address} within {deadline:g} s ({last}). Start one with `ray start --head`, or "
        "name another with address= (--address)."
    )


@contextmanager
def _short_folder() -> Iterator[str]:
    """A folder for sockets: their paths may have 107 characters, Ray's part of them takes 65."""
    folder = tempfile.mkdtemp(prefix="ray-", dir=tempfile.gettempdir() if len(tempfile.gettempdir()) < 20 else "/tmp")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _environment_restored() -> Iterator[None]:
    """Ray's variables and ours, afterwards, as they were: Ray sets some by itself."""

    def own() -> dict[str, str]:
        return {k: v for k, v in os.environ.items() if k.startswith("RAY_") or k == NAMESPACE}

    before = own()
    try:
        yield
    finally:
        for name in own():
            del os.environ[name]
        os.environ.update(before)
