"""The processes that execute what a model wrote: one for each program, and one for each test of it.

Both are forked from a process that holds no program and no test. Each reads its own source, and no other, from its
channel.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import resource
import signal
import sys
from collections.abc import Iterable
from types import CodeType, ModuleType
from typing import Any, NoReturn

from . import system_calls
from .peer import TEST, Peer
from .verdict import ENDED, VERDICTS, Verdict, of_error
from .walls import LIBC, end_with_parent
from .wire import MODULES, Channel, is_module

FOR_PROGRAM, USES_NOTHING, VERDICT = b"a", b"u", b"v"  # how the frames of a test begin
REFUSALS = (
    (("os.list", "os.scandir", "os.walk", "os.fwalk", "os.getxattr", "os.putenv", "os.unsetenv"), None),
    (("socket.",), Verdict.NETWORK),
    (("os.fork", "os.exec", "os.spawn", "os.posix_spawn", "os.system", "subprocess.", "pty."), Verdict.PROCESSES),
    (("os.kill", "signal.", "ctypes.", "resource.", "sys.addaudithook"), Verdict.REFUSED),
    (("os.", "shutil.", "tempfile.", "sqlite3."), Verdict.FILES),
)
"""Python's audit events by their prefixes, with the verdict on a source that raises them.

The first prefix that matches decides; None allows the event.
"""


def audit(event: str, given: tuple[Any, ...]) -> None:
    """End this process where a Python audit event shows that the source is about to do something forbidden."""
    verdict = next((verdict for beginnings, verdict in REFUSALS if event.startswith(beginnings)), None)
    if event == "open" and given[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND):
        verdict = Verdict.FILES
    if verdict is not None:
        os._exit(ENDED + VERDICTS.index(verdict))


def be_process(descriptor: int, filtered: bool) -> NoReturn:
    """Read a program or a test from a socket, give up the rights that it does not need, execute it, and exit.

    Args:
        descriptor: file descriptor of the socket to the judge.
        filtered: have the kernel refuse system calls.
    """
    end_with_parent()
    channel = Channel(os.dup2(descriptor, 3))
    os.closerange(4, 1 << 16)
    asked = json.loads(channel.receive())
    confine(asked["seconds"], asked["memory"], asked["sources"], filtered)
    if "nonce" in asked:
        execute_test(channel, asked["source"], asked["nonce"].encode())
    else:
        execute_program(channel, asked["source"], asked["seconds"])
    os._exit(0)


def confine(seconds: float, memory: int, sources: int, filtered: bool) -> None:
    """Set the limits of this process.

    Args:
        seconds: CPU time of each source.
        memory: address space, in bytes.
        sources: how many sources this process will execute or answer for.
        filtered: have the kernel refuse system calls.
    """
    total = int(seconds * sources) + 1  # the timer below is finer, but a source could stop it
    resource.setrlimit(resource.RLIMIT_CPU, (total, total + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    for nothing in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE, resource.RLIMIT_NPROC):
        resource.setrlimit(nothing, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    if filtered:
        system_calls.restrict()
    vars(LIBC).clear()  # the source could find it
    sys.modules.pop("__main__", None)
    sys.addaudithook(audit)
    signal.setitimer(signal.ITIMER_PROF, seconds)


def execute_program(channel: Channel, source: str, seconds: float) -> None:
    """Execute a program, send the verdict on it, and answer what its tests ask for."""
    module = sys.modules["program"] = ModuleType("program")
    verdict = execute(source, vars(module))
    channel.send(bytes([VERDICTS.index(verdict)]))
    if verdict is Verdict.PASSED:

        def before(operation: str) -> None:
            if operation == "begin":  # of another test
                signal.setitimer(signal.ITIMER_PROF, seconds)

        Peer(channel, vars(module)).serve(before)


def execute_test(channel: Channel, source: str, nonce: bytes) -> None:
    """Execute a test with the names of the program, and send the verdict to the judge.

    Args:
        channel: the stream of frames to the judge.
        source: the test.
        nonce: a secret, sent with the verdict to show that the test itself did not write it.
    """
    peer = Peer(Asking(channel.descriptor))
    module = sys.modules[TEST] = ModuleType(TEST)
    program = sys.modules["program"] = ModuleType("program")
    vars(program)["__getattr__"] = lambda name: named(peer, name)
    try:
        code = compile(source, "<test>", "exec")
        found = peer.ask("begin", *(name for name in mentioned(code) if not name.startswith("__")))
        if all(is_module(value) for value in found.values()):
            channel.send(USES_NOTHING)
        refuse_other_meanings(found, modules_in(source))
        vars(module).update(found)
    except BaseException as error:
        verdict = of_error(error)
    else:
        verdict = execute(code, vars(module))
    channel.send(VERDICT + nonce + bytes([VERDICTS.index(verdict)]))


class Asking(Channel):
    """The channel of a test, for what the test asks of the program."""

    def send(self, frame: bytes, deadline: float | None = None) -> None:
        """Write a frame that is for the program."""
        super().send(FOR_PROGRAM + frame, deadline)


def named(peer: Peer, name: str) -> Any:
    """Return the program's value of `name`, for a test that imports it.

    Raises:
        AttributeError: the program has no such name.
    """
    found = peer.ask("names", name)
    if name not in found:
        raise AttributeError(name)
    return found[name]


def refuse_other_meanings(found: dict[str, Any], modules: set[str]) -> None:
    """Raise NameError where a program's name hides one of Python's: a program must not redefine `abs`.

    Args:
        found: names that a test takes from the program.
        modules: names of modules that the test uses.
    """
    for name, value in found.items():
        if hasattr(builtins, name) or (name in modules and not is_module(value)):
            raise NameError(f"the program gives {name!r} another meaning than Python does")


def modules_in(source: str) -> set[str]:
    """Return the names of standard-library modules whose attributes a test uses."""
    nodes = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)]
    return {node.id for node in nodes if isinstance(node, ast.Name)} & MODULES


def mentioned(code: CodeType) -> Iterable[str]:
    """Return the names that a code object looks up or imports, including those in its nested functions."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= set(mentioned(constant))
    return sorted(names)


def execute(source: str | CodeType, scope: dict[str, Any]) -> Verdict:
    """Execute source text or a code object in `scope`, which it may change, and return the verdict."""
    try:
        exec(source, scope)
    except BaseException as error:
        return of_error(error)
    return Verdict.PASSED
