"""Boxes in which agents run what a model wrote: a copy of a folder, without network, on this machine's programs."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol, Self

from trlx_hybrid.errors import HybridError

OUTPUT = 1 << 20
"""The number of bytes that are read of a program's output, and of its errors, from their ends."""
LARGEST_FILE = 1 << 30
"""Bytes of the largest file that a program in a box can write."""
INSIDE = "/box"
SOCKET = "/run/gateway.sock"
PORT = 8000
"""The port of the endpoint for agents inside a box."""
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store")
SETTINGS = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "ssl/certs", "ssl/openssl.cnf", "localtime")
"""The parts of /etc that a box has. None holds a secret, which a box of root's could read."""
KERNEL = ("sys", "sysrq-trigger", "irq", "bus", "fs", "acpi")
"""The parts of /proc with which a root user sets the kernel, of which bwrap hides some. A box only reads them."""
KEPT = ("LANG", "LC_ALL", "TZ", "TERM")
"""The environment variables that a box inherits."""
FRESH = {"PYTHONDONTWRITEBYTECODE": "1"}
"""Python takes what it has compiled of a file for current where the file has the same size and second. A file that an
agent mends may have both."""
START_SECONDS = 30.0


class BoxError(HybridError):
    """Raised where no box can be made on this machine. The message says why, and what to install."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """The result of a program.

    Attributes:
        code: its exit code, the negative number of the signal that ended it, or None where its time was over.
        output: what it printed; the last MiB of it.
        errors: what it printed on its standard error; the last MiB of it.
    """

    code: int | None
    output: str
    errors: str


class Sandbox(Protocol):
    """A box, as agents see it. Another kind, such as one on another machine, is any object with these methods."""

    async def run(self, arguments: Sequence[str], *, seconds: float | None = 60.0, given: bytes = b"") -> Ran:
        """Run a program in the box's folder, and return how it ended.

        Args:
            arguments: the program and its arguments.
            seconds: wall time after which it is killed, with all that it has started; None for no limit.
            given: what it reads on its standard input.
        """

    async def read(self, path: str) -> str:
        """Return the text of a file, whose path is relative to the box's folder.

        Raises:
            OSError: there is no such file, or it lies outside of the box.
        """

    async def write(self, path: str, text: str) -> None:
        """Write a file, with the folders above it.

        Raises:
            OSError: it cannot be written, or lies outside of the box.
        """


class Folder:
    """A box without walls: a new folder. Programs run as this user and see this machine.

    It is a context manager. At its end, programs that still run are killed with all that they have started, except
    those that have left their process group, and the folder is removed.

    Args:
        source: a folder whose content the box begins with; None for an empty box.
        environment: environment variables of the programs, besides those of this process.
    """

    def __init__(self, source: str | Path | None = None, environment: Mapping[str, str] | None = None) -> None:
        self.environment = dict(environment or {})
        self._source = source
        self._running: set[asyncio.subprocess.Process] = set()

    async def __aenter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="box-", ignore_cleanup_errors=True)
        self.path = Path(os.path.realpath(self._folder.name))
        if self._source is not None:
            await asyncio.to_thread(shutil.copytree, self._source, self.path, symlinks=True, dirs_exist_ok=True)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in [*self._running]:
            await _end(process)
        await asyncio.to_thread(self._folder.cleanup)

    async def run(self, arguments: Sequence[str], *, seconds: float | None = 60.0, given: bytes = b"") -> Ran:
        """Run a program, see `Sandbox.run`."""
        with tempfile.TemporaryFile() as read, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
            read.write(given)
            read.seek(0)
            process = await asyncio.create_subprocess_exec(
                *self.command_line(arguments),
                stdin=read,
                stdout=out,
                stderr=errors,
                cwd=self.path,
                env=self.variables(),
                start_new_session=True,
            )
            self._running.add(process)
            code: int | None = None
            try:
                with contextlib.suppress(TimeoutError):
                    code = await asyncio.wait_for(process.wait(), seconds)
            finally:
                await _end(process)
                self._running.discard(process)
            return Ran(code=code, output=_end_of(out), errors=_end_of(errors))

    async def read(self, path: str) -> str:
        """Return the text of a file, see `Sandbox.read`."""
        return await asyncio.to_thread(self._within(path).read_text, errors="replace")

    async def write(self, path: str, text: str) -> None:
        """Write a file, see `Sandbox.write`."""
        file = self._within(path)

        def write() -> None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

        await asyncio.to_thread(write)

    def command_line(self, arguments: Sequence[str]) -> list[str]:
        """Return the command line that runs a program in the box."""
        return [*arguments]

    def variables(self) -> dict[str, str]:
        """Return the environment variables of a program in the box."""
        return {**os.environ, **FRESH, **self.environment}

    def _within(self, path: str) -> Path:
        """Return a path of this machine for one of the box's. A program in the box may have made links to elsewhere."""
        found = Path(os.path.realpath(self.path / path))
        if not found.is_relative_to(self.path):
            raise PermissionError(f"{path!r} lies outside of the box.")
        return found


class Bubblewrap(Folder):
    """A box with walls, by the command `bwrap`: programs see the system's programs and Python's packages, which they
    cannot change, and the box's folder as `/box`. They have no network, no other processes, none of this process's
    environment variables, and none of its files.

    Args:
        source: a folder whose content the box begins with; None for an empty box.
        environment: environment variables of the programs.
        memory_mib: the largest number of MiB of data of each program; None sets no limit.
        shown: further folders that programs can read.
        gateway: the socket of a gateway, see `sandbox`; None for none.
    """

    def __init__(
        self,
        source: str | Path | None = None,
        environment: Mapping[str, str] | None = None,
        memory_mib: int | None = 4096,
        shown: Sequence[str | Path] = (),
        gateway: str | Path | None = None,
    ) -> None:
        super().__init__(source, environment)
        self._memory, self._shown, self._gateway = memory_mib, [*map(str, shown)], gateway

    def command_line(self, arguments: Sequence[str]) -> list[str]:
        """Return the command line that runs a program in the box."""
        words = [*_walls(), "--bind", str(self.path), INSIDE, "--chdir", INSIDE]
        for folder in self._shown:
            words += ["--ro-bind", folder, folder]
        for name, value in self.variables().items():
            words += ["--setenv", name, value]
        inside = [*arguments]
        if self._gateway is not None:
            bridge = str(Path(__file__).with_name("bridge.py"))
            words += ["--ro-bind", str(self._gateway), SOCKET, "--ro-bind", bridge, "/run/bridge.py"]
            inside = [sys.executable, "-I", "/run/bridge.py", SOCKET, str(PORT), *arguments]
        limits = [f"ulimit -f {LARGEST_FILE // 512}"]
        limits += [] if self._memory is None else [f"ulimit -d {self._memory << 10}"]
        return ["sh", "-c", " && ".join([*limits, 'exec "$@"']), "sh", *words, "--", *inside]

    def variables(self) -> dict[str, str]:
        """Return the environment variables of a program in the box."""
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        folders = [str(Path(sys.prefix) / "bin"), "/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin"]
        return {**kept, **FRESH, "PATH": ":".join(folders), "HOME": INSIDE, **self.environment}


def sandbox(
    source: str | Path | None = None,
    *,
    base_url: str | None = None,
    environment: Mapping[str, str] | None = None,
    memory_mib: int | None = 4096,
    shown: Sequence[str | Path] = (),
) -> Bubblewrap:
    """Return a box with walls, an asynchronous context manager.

        async with sandbox("repository") as box:
            await box.write("main.py", text)
            ran = await box.run([sys.executable, "-m", "pytest", "-q"])
            return float(ran.code == 0)

    It needs the command `bwrap` (bubblewrap), and works for root, too. Nothing limits the number of its processes, nor
    how much they write.

    Args:
        source: a folder whose content the box begins with; None for an empty box.
        base_url: the address of an agent that runs inside the box. A box has no network, so the endpoint's socket is
            mounted into it, and programs find it in OPENAI_BASE_URL and ANTHROPIC_BASE_URL. None: the box reaches
            nothing.
        environment: environment variables of the programs, which get none of this process's.
        memory_mib: the largest number of MiB of data of each program; None sets no limit.
        shown: further folders that programs can read.

    Raises:
        BoxError: `bwrap` is missing, or does not work on this machine.
    """
    if reason := _refusal():
        raise BoxError(reason)
    gateway = None
    if base_url is not None:
        from .server import gateway as of_process  # starlette and uvicorn, which a box alone does not need

        gateway, path = of_process().path, base_url.split("/", 3)[3]
        environment = {**client_variables(f"http://127.0.0.1:{PORT}/{path}"), **(environment or {})}
    return Bubblewrap(source, environment, memory_mib, shown, gateway)


def client_variables(base_url: str) -> dict[str, str]:
    """Return the environment variables in which official clients find an address."""
    return {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": "none",
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": "none",
    }


@functools.cache
def _walls() -> list[str]:
    """Return the `bwrap` command line without a box's folder and variables."""
    words = [shutil.which("bwrap") or "bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--clearenv"]
    words += ["--cap-drop", "ALL"]  # a box of root's could mount this machine's files anew, to write to them
    words += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--dir", "/run"]
    for name in KERNEL:
        words += ["--ro-bind-try", f"/proc/{name}", f"/proc/{name}"]
    for path in SYSTEM:
        if os.path.islink(path):
            words += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            words += ["--ro-bind", path, path]
    for name in SETTINGS:
        words += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    for prefix in dict.fromkeys(map(os.path.realpath, (sys.base_prefix, sys.base_exec_prefix, sys.prefix))):
        if not prefix.startswith("/usr"):
            words += ["--ro-bind", prefix, prefix]
    return words


@functools.cache
def _refusal() -> str | None:
    """Return why boxes cannot be made on this machine; None if they can."""
    if shutil.which("bwrap") is None:
        return "A sandbox needs the command bwrap, which is not on this machine. Install bubblewrap."
    words = [*_walls(), "--", sys.executable, "-I", "-c", ""]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=START_SECONDS)
    except subprocess.TimeoutExpired:
        return f"bwrap did not run Python within {START_SECONDS:g} s."
    if done.returncode:
        return (
            f"bwrap cannot run Python on this machine: {done.stderr.strip()[-300:]}. In a container it needs user "
            "namespaces: ask for them, or run as root."
        )
    return None


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill a process and all that it has started, except those that have left its process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def _end_of(file: IO[Any]) -> str:
    """Return the last `OUTPUT` bytes of a file as text."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - OUTPUT))
    return bytes(file.read()).decode(errors="replace")
