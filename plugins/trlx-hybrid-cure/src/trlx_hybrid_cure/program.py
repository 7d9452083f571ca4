"""The code of the processes that execute what a model wrote: one process for each program, and one for each of its
tests.

These processes are forked from a process that has read neither programs nor tests. Each forked process reads a single
source, its own program or test, from its socket.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import resource
import signal
import sys
from collections.abc import Iterable, Mapping
from types import CodeType, ModuleType
from typing import Any, NoReturn

from .peer import TEST, Peer
from .verdict import ENDED, VERDICTS, Verdict, of_error
from .walls import LIBC, end_with_parent, restrict
from .wire import MODULES, Channel, is_module

FOR_PROGRAM, USES_NOTHING, VERDICT = b"a", b"u", b"v"  # how the frames of a test begin
REFUSALS = (
    (("os.list", "os.scandir", "os.walk", "os.fwalk", "os.getxattr", "os.putenv", "os.unsetenv"), None),
    (("socket.",), Verdict.NETWORK),
    (("os.fork", "os.exec", "os.spawn", "os.posix_spawn", "os.system", "subprocess.", "pty."), Verdict.PROCESSES),
    (("os.kill", "signal.", "ctypes.", "resource.", "sys.addaudithook"), Verdict.REFUSED),
    (("os.", "shutil.", "tempfile.", "sqlite3."), Verdict.FILES),
)
"""Prefixes of the names of Python's audit events (`sys.addaudithook`), with the verdict on a program or test that
causes an event with this prefix. The first matching prefix decides; None allows the event."""


def audit(event: str, given: tuple[Any, ...]) -> None:
    """End this process if an audit event shows that the executed code is about to do something forbidden.

    The function is a hook for `sys.addaudithook`. The exit status tells the verdict to the judge, the process that
    collects the verdicts.

    Args:
        event: name of the audit event, such as "open".
        given: the event's arguments.
    """
    verdict = next((verdict for beginnings, verdict in REFUSALS if event.startswith(beginnings)), None)
    if event == "open" and given[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND):
        verdict = Verdict.FILES
    if verdict is not None:
        os._exit(ENDED + VERDICTS.index(verdict))


def be_process(descriptor: int, filtered: bool) -> NoReturn:
    """Run a freshly forked process: read one program or test from the socket, set the process's limits, execute what
    was read, and exit.

    Args:
        descriptor: file descriptor of the socket to the judge, the process that collects the verdicts.
        filtered: whether to have the kernel filter the system calls of this process (`walls.restrict`).
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
    """Set the limits of this process, and forbid it what programs and tests must not do. Called before the process
    executes its program or test.

    Args:
        seconds: limit of CPU time for each source (a program or a test), in seconds.
        memory: limit of the address space, in bytes.
        sources: for how many sources this process may need CPU time: 1 for a test; for a program, 1 plus the number of
            its tests, because the program's process executes the functions that they call.
        filtered: whether to have the kernel filter the system calls of this process (`walls.restrict`).
    """
    total = int(seconds * sources) + 1  # the timer below is finer, but a source could stop it
    resource.setrlimit(resource.RLIMIT_CPU, (total, total + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    for nothing in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE, resource.RLIMIT_NPROC):
        resource.setrlimit(nothing, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    if filtered:
        restrict()
    vars(LIBC).clear()  # the source could find it
    sys.modules.pop("__main__", None)
    sys.addaudithook(audit)
    signal.setitimer(signal.ITIMER_PROF, seconds)


def execute_program(channel: Channel, source: str, seconds: float) -> None:
    """Execute a program, send its verdict to the judge, and then answer the requests of its tests until the judge
    closes the connection.

    Args:
        channel: the connection to the judge, which collects the verdicts and passes on the tests' requests.
        source: the program's source.
        seconds: limit of CPU time for the program's answers to each test, in seconds.
    """
    module = sys.modules["program"] = ModuleType("program")
    verdict = execute(source, vars(module))
    channel.send(bytes([VERDICTS.index(verdict)]))
    if verdict is Verdict.PASSED:

        def before(operation: str) -> None:
            if operation == "begin":  # of another test
                signal.setitimer(signal.ITIMER_PROF, seconds)

        Peer(channel, vars(module)).serve(before)


def execute_test(channel: Channel, source: str, nonce: bytes) -> None:
    """Execute a test with the global names of the program, and send the verdict to the judge.

    Args:
        channel: the connection to the judge, which collects the verdicts and passes on the test's requests.
        source: the test's source.
        nonce: a random secret. It is sent with the verdict, to show that the verdict was not written by the executed
            test.
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
    """The connection of a test's process to the judge (the process that judges programs by their tests), for the test's
    requests to the program. The judge passes each request on to the program's process."""

    def send(self, frame: bytes, deadline: float | None = None) -> None:
        """Write a message that the judge is to pass on to the program.

        Args:
            frame: the bytes to send.
            deadline: the time on the monotonic clock, in seconds, by which the judge must have taken them; None waits
                without a limit.

        Raises:
            TimeoutError: the deadline has passed.
            OSError: the judge has closed the connection.
        """
        super().send(FOR_PROGRAM + frame, deadline)


def named(peer: Peer, name: str) -> Any:
    """Return the value of a global name of the program, for a test that has `from program import name`.

    Args:
        peer: the test's connection to its program.
        name: the global name.

    Raises:
        AttributeError: the program has no such name.
    """
    found = peer.ask("names", name)
    if name not in found:
        raise AttributeError(name)
    return found[name]


def refuse_other_meanings(found: Mapping[str, object], modules: set[str]) -> None:
    """Raise NameError if a program redefines a builtin or a standard-library module that the test uses. If the program
    defined its own `abs`, for example, a test that calls `abs` could pass with a wrong result.

    Args:
        found: the program's global names that the test uses, with their values.
        modules: names of the standard-library modules that the test uses.
    """
    for name, value in found.items():
        if hasattr(builtins, name) or (name in modules and not is_module(value)):
            raise NameError(f"the program gives {name!r} another meaning than Python does")


def modules_in(source: str) -> set[str]:
    """Return the names of the standard-library modules of which a test's source uses attributes, such as "math" for
    `math.pi`."""
    nodes = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)]
    return {node.id for node in nodes if isinstance(node, ast.Name)} & MODULES


def mentioned(code: CodeType) -> Iterable[str]:
    """Return the global names, attributes and imports that a code object uses, sorted, including those in its nested
    functions."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= set(mentioned(constant))
    return sorted(names)


def execute(source: str | CodeType, scope: dict[str, Any]) -> Verdict:
    """Execute Python code, and return the verdict on it: PASSED if the code raised no exception, else the verdict that
    `of_error` gives the exception.

    Args:
        source: source text, or a compiled code object.
        scope: the global names to execute it with; the code may change them.
    """
    try:
        exec(source, scope)
    except BaseException as error:
        return of_error(error)
    return Verdict.PASSED
