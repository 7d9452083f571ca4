"""What runs inside the walls: executes programs and their tests, and says what became of each pair.

`sandbox` starts this file as a script with the standard library alone. It reads jobs from its standard input, forks a
process for each program, and writes verdicts to its standard output.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import struct
import sys
from enum import StrEnum
from types import ModuleType
from typing import Any, NoReturn

NOBODY = 65534
NEW_MOUNTS, NEW_IPC, NEW_USER, NEW_PROCESSES, NEW_NETWORK = 0x00020000, 0x08000000, 0x10000000, 0x20000000, 0x40000000
MOUNT_SETATTR, HERE, RECURSIVE, READ_ONLY, PRIVATE = 442, -100, 0x8000, 1, 1 << 18
PARENT_DEATH_SIGNAL, NO_NEW_PRIVILEGES = 1, 38
LIBC = ctypes.CDLL(None, use_errno=True)
ENDED = 64  # the exit status of a process that the audit hook ended, plus the verdict's place


class Verdict(StrEnum):
    """What became of a program and a test.

    Attributes:
        FAILED: an assertion does not hold.
        ERROR: another exception, a text that is no Python, or an exit.
        CPU, WALL, MEMORY: more than allowed; of wall time, where it waits for something.
        FILES, PROCESSES, NETWORK: it would have changed a file, started a process, opened a socket.
        REFUSED: it would have sent a signal or called native code.
        CRASHED: a signal ended its process, as after a segmentation fault.
    """

    PASSED = "passed"
    FAILED = "failed"
    ERROR = "error"
    CPU = "cpu"
    WALL = "wall"
    MEMORY = "memory"
    FILES = "files"
    PROCESSES = "processes"
    NETWORK = "network"
    REFUSED = "refused"
    CRASHED = "crashed"


VERDICTS = list(Verdict)
BY_SIGNAL = {signal.SIGPROF: Verdict.CPU, signal.SIGXCPU: Verdict.CPU, signal.SIGXFSZ: Verdict.FILES}
REFUSALS = (
    (("os.list", "os.scandir", "os.walk", "os.fwalk", "os.getxattr", "os.putenv", "os.unsetenv"), None),
    (("socket.",), Verdict.NETWORK),
    (("os.fork", "os.exec", "os.spawn", "os.posix_spawn", "os.system", "subprocess.", "pty."), Verdict.PROCESSES),
    (("os.kill", "signal.", "ctypes.", "resource.", "sys.addaudithook"), Verdict.REFUSED),
    (("os.", "shutil.", "tempfile.", "sqlite3."), Verdict.FILES),
)
"""Python's audit events by their beginnings; the first that fits decides, None lets pass."""


def enclose(namespaces: bool) -> None:
    """Give up what this process could do to the machine.

    Args:
        namespaces: enter new ones here, of the network, mounts, IPC and processes; bubblewrap has done so already.
    """
    root = os.getuid() == 0
    end_with_parent()
    if namespaces:
        must(LIBC.unshare(NEW_MOUNTS | NEW_IPC | NEW_PROCESSES | NEW_NETWORK | (0 if root else NEW_USER)))
        read_only = struct.pack("QQQQ", READ_ONLY, 0, PRIVATE, 0)
        must(LIBC.syscall(MOUNT_SETATTR, HERE, b"/", RECURSIVE, read_only, len(read_only)))
        process = os.fork()
        if process:  # the child is the first process of its namespace: with it, all others of that end
            os._exit(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) & 255)
    if root:
        library = os.path.dirname(os.__file__)  # may lie where nobody may look; as its working directory it stays open
        os.chdir(library)
        for paths in (sys.path, *(vars(module).get("__path__", []) for module in sys.modules.values())):
            paths[:] = [path.replace(library, "/proc/self/cwd") for path in paths]
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    must(LIBC.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)))
    must(LIBC.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    end_with_parent()  # again: a process that changes its user, or is another one, has lost it


def must(result: int) -> None:
    """Raise what a call of the C library failed for."""
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def end_with_parent() -> None:
    """Have this process killed when the one that forked it ends."""
    must(LIBC.prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0))


def audit(event: str, given: tuple[Any, ...]) -> None:
    """End this process where Python says that the program is about to do what it must not."""
    verdict = next((verdict for beginnings, verdict in REFUSALS if event.startswith(beginnings)), None)
    if event == "open" and given[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND):
        verdict = Verdict.FILES
    if verdict is not None:
        os._exit(ENDED + VERDICTS.index(verdict))


def execute(sources: list[str], limits: dict[str, float], out: int) -> NoReturn:
    """Be the process of a program: execute its source and that of tests, and write a byte for each to `out`."""
    end_with_parent()
    quiet = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(quiet, standard)
    total = int(limits["seconds"] * len(sources)) + 1  # the timer below is finer, but a program could stop it
    resource.setrlimit(resource.RLIMIT_CPU, (total, total + 1))
    resource.setrlimit(resource.RLIMIT_AS, (int(limits["memory"]),) * 2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    for nothing in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE, resource.RLIMIT_NPROC):
        resource.setrlimit(nothing, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    vars(LIBC).clear()  # the program could find it
    del sys.modules["__main__"]
    module = sys.modules["program"] = ModuleType("program")
    sys.addaudithook(audit)
    for place, source in enumerate(sources):
        signal.setitimer(signal.ITIMER_PROF, limits["seconds"])
        verdict = judge(source, vars(module) if place == 0 else dict(vars(module)))
        os.write(out, bytes([VERDICTS.index(verdict)]))
        if place == 0 and verdict is not Verdict.PASSED:
            break
    os._exit(0)


def judge(source: str, scope: dict[str, Any]) -> Verdict:
    """Execute a text in `scope`, which it may change."""
    try:
        exec(source, scope)
    except BaseException as error:
        kinds = {AssertionError: Verdict.FAILED, MemoryError: Verdict.MEMORY}
        return next((verdict for kind, verdict in kinds.items() if isinstance(error, kind)), Verdict.ERROR)
    return Verdict.PASSED


def verdicts(program: str, tests: list[str], trusted: int, limits: dict[str, float]) -> list[Verdict]:
    """Of a program with each of its tests. One process runs all, and a new one goes on where a test ended it.

    Args:
        trusted: so many of the first tests are above doubt: where one takes too long, the program is at fault, and all
            that are left have this verdict.
    """
    found: list[Verdict] = []
    while len(found) < len(tests):
        said, end = attempt([program, *tests[len(found) :]], limits)
        loaded = said[0] if said else end
        if loaded is not Verdict.PASSED:
            return found + [loaded] * (len(tests) - len(found))
        found += said[1:]
        if len(found) < len(tests):
            found.append(end)
            if len(found) <= trusted and end in (Verdict.CPU, Verdict.WALL):
                return found + [end] * (len(tests) - len(found))
    return found


def attempt(sources: list[str], limits: dict[str, float]) -> tuple[list[Verdict], Verdict]:
    """What a process said of these, the program first, and the verdict on the one that ended it, if one did."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(reading)
        execute(sources, limits, writing)
    os.close(writing)
    said, late = b"", False
    ready = select.poll()
    ready.register(reading)
    while len(said) < len(sources):
        late = not ready.poll(limits["wall"] * 1000)
        more = b"" if late else os.read(reading, len(sources) - len(said))
        if not more:
            break
        said += more
    os.close(reading)
    os.kill(process, signal.SIGKILL)  # also where it closed its end and goes on; one that exits keeps its status
    status = os.waitpid(process, 0)[1]
    if late:
        end = Verdict.WALL
    elif os.WIFSIGNALED(status):
        end = BY_SIGNAL.get(signal.Signals(os.WTERMSIG(status)), Verdict.CRASHED)
    else:
        place = os.WEXITSTATUS(status) - ENDED
        end = VERDICTS[place] if 0 < place < len(VERDICTS) else Verdict.ERROR
    return [VERDICTS[place % len(VERDICTS)] for place in said], end


def main() -> None:
    """Read limits and jobs, enclose this process, and write the verdicts on each job."""
    asked = json.load(sys.stdin)
    enclose(asked["namespaces"])
    jobs, limits = asked["jobs"], asked["limits"]
    print(json.dumps([verdicts(program, tests, trusted, limits) for program, tests, trusted in jobs]), flush=True)


if __name__ == "__main__":
    main()
