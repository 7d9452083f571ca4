"""The connection to a Ray cluster for one run: the cluster is started here and ends with the run, or is joined and left
running.

Address, namespace and token reach the processes of a run in their environment. Ray's own search for a cluster looks
through the process table and takes the first cluster that it meets, and a child that names no namespace gets an empty
one.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from trlx_hybrid.errors import ConfigError
from trlx_hybrid.interprocess.deadline import granted, in_thread
from trlx_hybrid.interprocess.environment_variables import restored

from . import debugging, reaper, token
from .errors import ClusterError
from .internals import LOOPBACK_VARIABLE, discovered, pause_error_listener
from .token import MODE, PATH, TOKEN

ADDRESS, NAMESPACE = "RAY_ADDRESS", "TRLX_HYBRID_RAY_NAMESPACE"
LOCAL, AUTO = "local", "auto"
START_SECONDS = 60.0
RAY_GAVE_UP = "The current node timed out during startup"
"""The text of Ray's error where a node is not up 30 s after its start, a limit that cannot be set. On a busy host a
start takes longer."""
STOP_SECONDS = 8.0
ANSWER_SECONDS = 8.0
"""Seconds that Ray's cluster may take to answer a call. Ray's own client would wait a minute, and then end this
process."""
POLL = 0.1
OBJECT_STORE = 1 << 30
REFUSED_SECONDS = 10.0
"""Seconds during which a refused connection is tried again, because a head may be about to start."""
GREETING_SECONDS = 5.0
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""The first bytes that every client of gRPC, the protocol of Ray's head, sends: HTTP/2's preface and an empty SETTINGS
frame."""
JOIN_VARIABLE, JOIN_SECONDS = "RAY_gcs_server_port_wait_time_s", "5"
"""The name and the value of one of Ray's environment variables. They limit how often Ray tries to join a cluster whose
port is open. Each attempt takes about a second, and Ray tries again even after a wrong token."""
NO_IDLE_WORKERS = {"RAY_enable_worker_prestart": "0", "RAY_prestart_worker_first_driver": "0"}
"""Ray's environment variables by which a cluster starts no worker before there is work for it. By default Ray starts a
Python process for each core with the cluster, and actors of a launch, which have variables of their own, use none."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A Ray cluster that this process is connected to, as `connect` yields it.

    Attributes:
        address: host:port of the cluster's head, which another process can pass to `connect` to join the cluster.
        namespace: Ray's namespace of this run's named actors.
        dashboard: the dashboard's URL, or None where no dashboard runs.
        token: the file with the cluster's token, where this process made the token or was given one.
        started: whether this process started the cluster, so that it ends with the context.
    """

    address: str
    namespace: str
    dashboard: str | None
    token: Path | None
    started: bool

    def __str__(self) -> str:
        shown = f"Ray {'started' if self.started else 'joined'} at {self.address}, namespace {self.namespace}"
        shown += f", dashboard {self.dashboard}" if self.dashboard else ""
        return shown + (f"\n{debugging.attaching(self.address, self.token)}" if debugging.legacy() else "")


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
) -> Iterator[Cluster]:
    """Start a Ray cluster on this machine, or join a running one, for as long as the context lasts.

    A started cluster is shut down at the end; a joined one keeps running, without this driver's actors. Children of
    this process inherit the cluster's address, namespace and token in environment variables.

    Args:
        address: "local" starts a cluster; host:port joins one; "auto" joins the cluster that Ray finds on this machine.
        namespace: the namespace of named actors; by default a new one for each run, which keeps runs apart.
        cpus, gpus: the resources of a started cluster; by default those of the machine. Tests may state more GPUs than
            the machine has.
        dashboard: start a dashboard with the cluster.
        everywhere: let a started cluster listen on all interfaces, for nodes on other machines. By default dashboard
            and ports are reachable from this machine only.
        token_file: the file with the token of the cluster to join or to start. By default a started cluster gets a new
            token, and a joined one gets the token of Ray's variables or `~/.ray/auth_token`.
        object_store_memory: the size in bytes of a started cluster's object store.

    Raises:
        ConfigError: arguments that contradict each other, or a debugger that is not installed.
        ClusterError: no cluster answers at the address, its token differs, or it does not start.
    """
    asked = {"cpus": cpus is not None, "gpus": gpus is not None, "dashboard": dashboard, "everywhere": everywhere}
    for name in (name for name, given in asked.items() if given and address != LOCAL):
        raise ConfigError(f"{name}= is of a cluster that is started; the one at {address} runs already. Leave it out.")
    debugging.check()
    namespace = namespace or f"trlx-{secrets.token_hex(4)}"
    started = address == LOCAL
    with ExitStack() as stack:
        stack.enter_context(restored("RAY_", NAMESPACE))
        secret = Path(token_file) if token_file else None
        if started:
            # A socket's path may have 107 characters, and Ray's part of it takes 65.
            parent = tempfile.gettempdir() if len(tempfile.gettempdir()) < 20 else "/tmp"
            made = tempfile.TemporaryDirectory(prefix="ray-", dir=parent, ignore_cleanup_errors=True)
            folder = Path(stack.enter_context(made))
            secret = secret or token.make(folder)
        else:
            address = _answering(address)
            everywhere = not address.startswith("127.")
        _refuse_second_connection()
        stack.enter_context(token.presented(secret, everywhere=everywhere))
        if started:
            settings = {
                "num_cpus": cpus,
                "num_gpus": gpus,
                "include_dashboard": dashboard or (debugging.wanted() and not debugging.legacy()),
                "dashboard_host": "0.0.0.0" if everywhere else "127.0.0.1",
                "object_store_memory": object_store_memory,
                "_temp_dir": str(folder / "r"),  # Ray opens it to all users; only we can enter the folder around it
            }
            address = stack.enter_context(_started(settings, folder))
        url = stack.enter_context(_joined(address, namespace))
        announce()
        yield Cluster(
            address=address,
            namespace=namespace,
            dashboard=f"http://{url}" if url else None,
            token=secret,
            started=started,
        )


def environment() -> dict[str, str]:
    """Return the environment variables by which a child of this process joins the same cluster and namespace: address,
    namespace and authentication. Works in the driver, an actor or a task.

    The variables name the token's file; they hold the token itself only where the user put it into the environment.
    """
    import ray

    context = ray.get_runtime_context()
    inherited = (MODE, PATH, TOKEN, LOOPBACK_VARIABLE)
    return {ADDRESS: context.gcs_address, NAMESPACE: context.namespace} | {
        name: os.environ[name] for name in inherited if name in os.environ
    }


def announce() -> None:
    """Set the variables that `environment` returns (the cluster's address, the namespace and the authentication) in
    `os.environ`, so that every child process inherits them, including those that other code starts. `connect` calls
    it."""
    os.environ.update(environment())


# --- calls that must not last -----------------------------------------------------------------------------------------

_hung: list[Future[Any]] = []


def answer(work: Callable[[], T], seconds: float | None = None) -> T:
    """Make a call of Ray's client in a thread, and return its result or give up in time. Ray's client may wait for ever
    for a head that is gone or stopped.

    Args:
        work: a function that makes the call.
        seconds: how long to wait; by default `ANSWER_SECONDS`, and more on a busy host.

    Raises:
        ClusterError: no answer came in time.
        Exception: what `work` raised.
    """
    seconds = granted(ANSWER_SECONDS) if seconds is None else seconds
    call, seconds = in_thread(work, "asks Ray"), 1.0 if hung() else seconds
    if wait([call], seconds).not_done:
        _hung.append(call)
        raise ClusterError(f"The head of the Ray cluster has not answered within {seconds:g} s.")
    return call.result()


def ask(work: Callable[[], object], seconds: float | None = None) -> None:
    """Make a call of Ray's client in a thread, and wait for it, but give up without an error if Ray's head does not
    answer in time. Returns nothing. Used at a run's end, when the cluster may be ending as well.

    Args:
        work: a function that makes the call. What it raises is raised here.
        seconds: how long to wait; by default `ANSWER_SECONDS`, and more on a busy host.
    """
    with suppress(ClusterError):
        answer(work, seconds)


def hung() -> bool:
    """Return whether some call that `answer` or `ask` gave up waiting for has still not returned. Ray's exit handlers
    would then block the interpreter's exit, so the process must be ended with `os._exit`."""
    return any(not call.done() for call in _hung)


# --- joining ----------------------------------------------------------------------------------------------------------


def _refuse_second_connection() -> None:
    ray: Any = sys.modules.get("ray")  # not imported before its variables are set
    if ray is not None and ray.is_initialized():
        raise ClusterError(
            f"This process is already connected to the Ray cluster at {ray.get_runtime_context().gcs_address}. Call "
            "ray.shutdown() first, or use that connection."
        )


@contextmanager
def _joined(address: str, namespace: str) -> Iterator[str]:
    """Connect this process to the cluster at `address` for as long as the context lasts. Yields the dashboard's address
    as host:port; empty where no dashboard runs.

    Raises:
        ClusterError: Ray could not join, or the cluster refused the token.
    """
    import ray

    os.environ.pop(ADDRESS, None)
    os.environ.setdefault(JOIN_VARIABLE, JOIN_SECONDS)
    try:
        with restored("PYTHONBREAKPOINT"):  # keep pdb in the driver: without debugpy, Ray's debugger skips breakpoints
            context: Any = ray.init(
                address=address, namespace=namespace, log_to_driver=debugging.wanted(), logging_level=logging.ERROR
            )
        pause_error_listener()
    except (ray.exceptions.RayError, ConnectionError, RuntimeError, TimeoutError, ValueError, OSError) as error:
        if _unauthenticated(error):
            raise ClusterError(
                f"The Ray cluster at {address} refused our token, or we showed none. Name the file with the cluster's "
                "token: token_file=, or --token-file on the command line."
            ) from error
        raise ClusterError(f"Ray did not join the cluster at {address}: {type(error).__name__}: {error}") from error
    try:
        yield context.dashboard_url
    finally:
        ask(ray.shutdown, STOP_SECONDS)


def _unauthenticated(error: BaseException | None) -> bool:
    """Return whether a refused token caused this error. Ray says so only in the text of one of the chained
    exceptions."""
    while error is not None:
        if "Unauthenticated" in str(error) or "AuthenticationError" in f"{type(error).__name__} {error}":
            return True
        error = error.__cause__ or error.__context__
    return False


def _answering(address: str) -> str:
    """Resolve an address or "auto" to host:port, and check that a cluster answers there.

    Raises:
        ClusterError: `address` is malformed, "auto" found no cluster, or no cluster answers.
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
    if host == "localhost":  # Ray would take this machine's outward address
        host = "127.0.0.1"
    started = time.monotonic()
    while True:
        try:
            _greet(host.strip("[]"), int(port))
            return f"{host}:{port}"
        except OSError as error:
            waited = time.monotonic() - started
            if not isinstance(error, ConnectionRefusedError) or waited > REFUSED_SECONDS:
                raise ClusterError(
                    f"No Ray cluster answered at {address} within {waited:.1f} s ({error}). Start one with `ray start "
                    "--head`, or name another with address= (--address)."
                ) from error
        time.sleep(POLL)


def _greet(host: str, port: int) -> None:
    """Check that a gRPC server listens on a port. Ray's client would wait minutes for a server that says nothing.

    Raises:
        OSError: no gRPC server listens there.
    """
    with socket.create_connection((host, port), timeout=GREETING_SECONDS) as connection:
        if os.environ.get("RAY_USE_TLS", "0") != "0":
            return
        connection.sendall(HELLO)
        try:
            told = connection.recv(9)
        except TimeoutError:
            raise OSError(f"it takes connections and says nothing for {GREETING_SECONDS:g} s") from None
        if len(told) < 4 or told[3] != 4:  # the frame's type: SETTINGS
            raise OSError("what listens there is not the head of a Ray cluster")


# --- starting ---------------------------------------------------------------------------------------------------------


@contextmanager
def _started(settings: Mapping[str, object], folder: Path) -> Iterator[str]:
    """Start a cluster from a child process with a session of its own. Yields the cluster's address as host:port, and
    ends the cluster when the context ends.

    Ray leaves the processes of a cluster in the driver's process group. `timeout` and batch systems end a whole group
    with SIGTERM. That would end the cluster while the driver still needs it to end its actors. So a child process in a
    session of its own starts the cluster, and ends it when this process is killed. Where Ray gives up before our
    deadline, the start is tried again.

    Args:
        settings: the arguments of `ray.init`.
        folder: a folder for the log of the start.

    Raises:
        ClusterError: the cluster does not start.
    """
    began = time.monotonic()
    while True:
        with _attempted(settings, folder, began) as (address, said):
            if address:
                yield address
                return
        waited = time.monotonic() - began
        if RAY_GAVE_UP not in said or waited > granted(START_SECONDS):
            raise ClusterError(f"Ray did not start within {waited:.0f} s. {said}")


@contextmanager
def _attempted(settings: Mapping[str, object], folder: Path, began: float) -> Iterator[tuple[str, str]]:
    """Start the child process of `_started` once. Yields the cluster's address, empty where it has none in time, and
    the last line that the process wrote. At the end of the context every process of the cluster is killed.

    Args:
        settings: the arguments of `ray.init`.
        folder: a folder for the log of the start.
        began: the time of `time.monotonic` from which on the deadline counts.
    """
    variables = NO_IDLE_WORKERS | {name: value for name, value in os.environ.items() if name != ADDRESS}
    command, pipe = [sys.executable, "-m", __name__, json.dumps(settings)], subprocess.PIPE
    with (
        open(folder / "start.log", "w+b") as log,
        subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=log, env=variables, start_new_session=True
        ) as process,
    ):
        try:
            assert process.stdout is not None
            ready = False
            # The host's load is measured with a delay, so the deadline is computed again each second.
            while not ready and time.monotonic() - began < granted(START_SECONDS):
                ready = bool(select.select([process.stdout], [], [], 1.0)[0])
            told = process.stdout.readline() if ready else b""
            log.seek(0)
            last = log.read().decode(errors="replace").strip().splitlines()[-1:]
            yield told.decode().strip(), "".join(last)
        finally:
            # Nothing uses it any more. Ray's own shutdown asks one process after another, and waits a second for each.
            process.kill()
            process.wait()
            reaper.end("", process.pid, grace=0.0)  # its session: the cluster's processes and workers


def _serve(settings: dict[str, Any]) -> None:
    """Start a cluster, print its address, and end the cluster when standard input ends or the parent process is gone.
    This is what the child process of `_started` runs.

    Args:
        settings: the arguments of `ray.init`.
    """
    import ray

    parent = os.getppid()
    _outlive_signals()
    told = os.dup(1)
    os.dup2(2, 1)
    context: Any = ray.init(address=LOCAL, log_to_driver=False, logging_level=logging.ERROR, **settings)
    pause_error_listener()
    _outlive_signals()  # Ray has set handlers of its own
    os.write(told, f"{context.address_info['gcs_address']}\n".encode())
    while os.getppid() == parent and not select.select([0], [], [], 0.5)[0]:
        pass
    ray.shutdown(wait_for_processes=True)
    shutil.rmtree(Path(settings["_temp_dir"]).parent, ignore_errors=True)  # it holds the token, and our parent is gone


def _outlive_signals() -> None:
    """Install handlers that do nothing for SIGINT, SIGTERM and SIGHUP, so that these do not end this process. Ignored
    signals would stay ignored in every process that Ray starts, ranks included, and Ray's log monitor would have to be
    killed."""
    for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(stop, lambda *_: None)


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]))
