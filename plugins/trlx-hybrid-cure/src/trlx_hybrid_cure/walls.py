"""Isolation of the processes that execute programs: their user, the files that they see, the processes that they can
reach, and a filter of system calls (seccomp). With the filter, the kernel allows these processes only the system calls
that are needed for computing and for reading files."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import signal
import struct
import sys

NOBODY = 65534
NEW_MOUNTS, NEW_IPC, NEW_USER, NEW_PROCESSES, NEW_NETWORK = 0x00020000, 0x08000000, 0x10000000, 0x20000000, 0x40000000
NO_SET_USER, NO_DEVICES, BIND, RECURSIVE_MOUNT, PRIVATE_MOUNT = 2, 4, 0x1000, 0x4000, 1 << 18
MOUNT_SETATTR, PIVOT_ROOT, HERE, RECURSIVE = 442, {"x86_64": 155, "aarch64": 41}, -100, 0x8000
READ_ONLY, DETACH = 1, 2
PARENT_DEATH_SIGNAL, DUMPABLE, NO_NEW_PRIVILEGES = 1, 4, 38
SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
BUBBLEWRAP = (
    "--unshare-user --unshare-ipc --unshare-net --unshare-pid --unshare-uts --unshare-cgroup-try --die-with-parent "
    "--as-pid-1 --new-session --dev /dev --dir /tmp"
)
LIBC = ctypes.CDLL(None, use_errno=True)

MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # the column below, the kernel's id of the machine
ALLOWED = """
read 0 63|write 1 64|close 3 57|fstat 5 80|lseek 8 62|mmap 9 222|mprotect 10 226|munmap 11 215|brk 12 214
rt_sigaction 13 134|rt_sigprocmask 14 135|rt_sigreturn 15 139|pread64 17 67|readv 19 65|writev 20 66|sched_yield 24 124
mremap 25 216|madvise 28 233|dup 32 23|nanosleep 35 101|getitimer 36 102|setitimer 38 103|getpid 39 172|exit 60 93
uname 63 160|getcwd 79 17|umask 95 166|gettimeofday 96 169|getrlimit 97 163|getrusage 98 165|sysinfo 99 179
times 100 153|getuid 102 174|getgid 104 176|geteuid 107 175|getegid 108 177|getppid 110 173|sigaltstack 131 132
gettid 186 178|futex 202 98|sched_getaffinity 204 123|getdents64 217 61|clock_gettime 228 113|clock_getres 229 114
clock_nanosleep 230 115|exit_group 231 94|newfstatat 262 79|readlinkat 267 78|faccessat 269 48|pselect6 270 72
ppoll 271 73|set_robust_list 273 99|pipe2 293 59|getrandom 318 278|statx 332 291|rseq 334 293|faccessat2 439 439
stat 4 -|lstat 6 -|poll 7 -|access 21 -|pipe 22 -|select 23 -|readlink 89 -|arch_prctl 158 -|time 201 -
statfs 137 43|fstatfs 138 44
"""
"""The allowed system calls: name, number on x86_64, number on aarch64 ("-": there is none), separated by "|" or a line
break."""
WRITING = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC | os.O_APPEND
DESCRIPTOR_FLAGS = (0, 1, 2, 3, 1030)  # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC
NONE = 0xFFFFFFFF  # the number of no call
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
KILL, REFUSE, ALLOW = 0x80000000, 0x00050000 | errno.EPERM, 0x7FFF0000
NUMBER, MACHINE = 0, 4  # offsets in the filter's input; argument n is at 16 + 8 n
SET_SECCOMP, FILTER = 22, 2

Instruction = tuple[int, int, int, int]  # operation, instructions to skip if true and if false, operand


def visible() -> list[str]:
    """Return the paths that isolated programs can read: those of Python's standard library and of the system's
    libraries."""
    library = os.path.dirname(os.path.realpath(os.__file__))
    own = [library, os.path.dirname(library), os.path.dirname(os.path.realpath(sys.executable))]
    own += [os.path.join(os.path.realpath(prefix), "lib") for prefix in (sys.base_prefix, sys.base_exec_prefix)]
    found: list[str] = []
    for path in (*SYSTEM, *sorted(own), os.path.dirname(os.path.realpath(__file__))):
        if os.path.exists(path) and not any(path == other or path.startswith(f"{other}/") for other in found):
            found.append(path)
    return found


def bubblewrap() -> list[str]:
    """Return a `bwrap` command line, up to and including its "--"; append the command that is to run isolated."""
    command = [shutil.which("bwrap") or "bwrap", *BUBBLEWRAP.split()]
    for path in visible():
        command += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind", path, path]
    return [*command, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/", "--"]


def enclose(namespaces: bool) -> None:
    """Isolate this process: give up its privileges, become the user nobody if it is root, and, on request, lose sight
    of the machine's network, files and processes.

    Args:
        namespaces: whether to enter new namespaces of network, mounts, IPC and processes. Not needed under bubblewrap,
            which has entered them already.
    """
    root = os.getuid() == 0
    end_with_parent()
    if namespaces:
        enter_namespaces(new_user=not root)
    if root:
        if not namespaces:
            look_from_inside()
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    must(LIBC.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)))
    must(LIBC.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    must(LIBC.prctl(DUMPABLE, 0, 0, 0, 0))  # no other process of this user reads its memory, which holds the tests
    end_with_parent()  # again: the setting is lost by a change of user, and in a forked process


def enter_namespaces(new_user: bool) -> None:
    """Continue as the first process in new namespaces, where only the paths that the function `visible` returns exist,
    read-only. It returns in a forked child; the calling process waits for the child and exits with its status.

    Args:
        new_user: whether to enter a new user namespace, too, which a process without root rights needs in order to
            enter the others.
    """
    user, group = os.getuid(), os.getgid()
    must(LIBC.unshare(NEW_MOUNTS | NEW_IPC | NEW_PROCESSES | NEW_NETWORK | (NEW_USER if new_user else 0)))
    if new_user:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    show_only(visible())
    process = os.fork()
    if process:  # the child is the first process of its namespace: when it ends, all others there end
        os._exit(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) & 255)


def show_only(paths: list[str]) -> None:
    """Replace this process's root folder with a new one that holds only some paths and a few devices, read-only.

    Args:
        paths: absolute paths of the files and folders to keep.
    """
    os.umask(0o022)
    mount("none", "/", RECURSIVE_MOUNT | PRIVATE_MOUNT)
    mount("tmpfs", "/tmp", NO_SET_USER | NO_DEVICES, "tmpfs")
    os.mkdir("/tmp/.outside")
    must(LIBC.syscall(PIVOT_ROOT[os.uname().machine], b"/tmp", b"/tmp/.outside"))
    os.chdir("/")
    for path in (*paths, *DEVICES):
        outside = f"/.outside{path}"
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if os.path.islink(outside):
            os.symlink(os.readlink(outside), path)
        elif os.path.isdir(outside):
            os.makedirs(path, exist_ok=True)
            mount(outside, path, BIND | RECURSIVE_MOUNT)
        else:
            os.close(os.open(path, os.O_CREAT | os.O_RDONLY))
            mount(outside, path, BIND)
    os.mkdir("/tmp")
    must(LIBC.umount2(b"/.outside", DETACH))
    os.rmdir("/.outside")
    read_only = struct.pack("QQQQ", READ_ONLY | NO_SET_USER, 0, 0, 0)
    must(LIBC.syscall(MOUNT_SETATTR, HERE, b"/", RECURSIVE, read_only, len(read_only)))


def mount(source: str, target: str, flags: int, kind: str | None = None) -> None:
    """Call the system call `mount(2)`: mount a file system, or make the files of one path visible at a second path (a
    bind mount).

    Args:
        source: the path to mount, or the name of the file system.
        target: the path at which the file system or the files appear.
        flags: the mount flags (`MS_…`), combined.
        kind: type of the file system; None where a path is mounted.

    Raises:
        OSError: the call failed.
    """
    must(LIBC.mount(source.encode(), target.encode(), kind and kind.encode(), ctypes.c_ulong(flags), None))


def look_from_inside() -> None:
    """Keep Python's standard library importable after this process becomes the user nobody, who may not be allowed to
    enter the library's parent folders.

    The library becomes the working directory, which stays accessible, and `sys.path` refers to it as /proc/self/cwd.
    """
    library = os.path.dirname(os.__file__)
    os.chdir(library)
    for paths in (sys.path, *(vars(module).get("__path__", []) for module in sys.modules.values())):
        if isinstance(paths, list):
            paths[:] = [path.replace(library, "/proc/self/cwd") for path in paths]


def must(result: int) -> None:
    """Check the return value of a function of the C library.

    Args:
        result: the return value.

    Raises:
        OSError: `result` is not 0; the error has the C library's errno.
    """
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def end_with_parent() -> None:
    """Ask the kernel to kill this process as soon as its parent process ends."""
    must(LIBC.prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0))


def can_restrict() -> bool:
    """Return whether the kernel of this machine can filter system calls, by setting a filter in a forked process."""
    process = os.fork()
    if process == 0:
        try:
            restrict()
        finally:
            os._exit(0 if refused() else 1)
    return os.waitpid(process, 0)[1] == 0


def refused() -> bool:
    """Return whether the filter of `restrict` is active in this process, by trying a system call that it refuses."""
    try:
        os.kill(os.getpid(), 0)
    except PermissionError:
        return True
    return False


def restrict() -> None:
    """Let the kernel refuse all system calls of this process, until it ends, except the calls that are needed for
    computing and for reading files. The calls in `ALLOWED` stay allowed, and a few more with certain arguments
    (`instructions`).

    Raises:
        OSError: the kernel has no such filters, or this process may not set one.
    """
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in instructions(os.uname().machine, os.getpid()))
    kept = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(kept))
    must(LIBC.prctl(SET_SECCOMP, FILTER, program, 0, 0))


def instructions(machine: str, process: int) -> list[Instruction]:
    """Return the program of the system-call filter, as instructions for the kernel's packet-filter machine (BPF).

    Args:
        machine: the processor architecture, as in `os.uname().machine`: "x86_64" or "aarch64".
        process: id of the process whose calls are to be filtered. The process may send signals to itself only.
    """
    column, name = MACHINES[machine]
    filter_ = [(LOAD, 0, 0, MACHINE), (EQUAL, 1, 0, name), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER)]
    if machine == "x86_64":  # numbers of another interface, x32, begin here
        filter_ += [(AT_LEAST, 0, 1, 0x40000000), (RETURN, 0, 0, KILL)]
    for line in ALLOWED.replace("\n", "|").strip("|").split("|"):
        number = line.split()[1 + column]
        if number != "-":
            filter_ += [(EQUAL, 0, 1, int(number)), (RETURN, 0, 0, ALLOW)]
    rules = [  # number on x86_64 and on aarch64, argument, test, values
        (2, NONE, 1, ANY_BIT, (WRITING,)),  # open: to read
        (257, 56, 2, ANY_BIT, (WRITING,)),  # openat
        (72, 25, 1, EQUAL, DESCRIPTOR_FLAGS),  # fcntl: not who gets signals
        (302, 261, 0, EQUAL, (0,)),  # prlimit64: of this process
        (234, 131, 0, EQUAL, (process,)),  # tgkill: to this process
    ]
    for x86_64, aarch64, argument, test, values in rules:
        checks = rule(argument, test, values)
        filter_ += [(EQUAL, 0, len(checks), (x86_64, aarch64)[column]), *checks]
    return [*filter_, (RETURN, 0, 0, REFUSE)]


def rule(argument: int, test: int, values: tuple[int, ...]) -> list[Instruction]:
    """Return filter instructions that allow a system call, or refuse it, depending on one of its arguments.

    Args:
        argument: position of the argument, from 0.
        test: `EQUAL` allows the call if the argument equals one of `values`; `ANY_BIT` allows it if there is one of
            `values` with which the argument has no bit in common.
        values: the values to compare with.
    """
    checks: list[Instruction] = [(LOAD, 0, 0, 16 + 8 * argument)]
    for value in values:
        checks += [(test, *((1, 0) if test == ANY_BIT else (0, 1)), value), (RETURN, 0, 0, ALLOW)]
    return [*checks, (RETURN, 0, 0, REFUSE)]
