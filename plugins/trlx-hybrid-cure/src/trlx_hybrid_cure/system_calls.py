"""A filter of system calls (seccomp): the kernel lets a program make those that computing and reading files need, and
refuses all others."""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from .walls import LIBC, must

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


def can_restrict() -> bool:
    """Return whether the kernel of this machine can filter system calls. A forked process tries it."""
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
    """Have the kernel refuse this process, for the rest of its life, every system call that is not allowed.

    Raises:
        OSError: the kernel has no such filters, or this process may not set one.
    """
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in instructions(os.uname().machine, os.getpid()))
    kept = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(kept))
    must(LIBC.prctl(SET_SECCOMP, FILTER, program, 0, 0))


def instructions(machine: str, process: int) -> list[Instruction]:
    """Return the program of the filter, instructions of the kernel's packet-filter machine (BPF).

    Args:
        machine: the processor architecture, as in `os.uname().machine`: "x86_64" or "aarch64".
        process: id of the process that is to be filtered. It may send signals to itself only.
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
        test: `EQUAL` allows the call if the argument equals one of `values`; `ANY_BIT` allows it if the argument has no
            bit of any of them.
        values: the values to compare with.
    """
    checks: list[Instruction] = [(LOAD, 0, 0, 16 + 8 * argument)]
    for value in values:
        checks += [(test, *((1, 0) if test == ANY_BIT else (0, 1)), value), (RETURN, 0, 0, ALLOW)]
    return [*checks, (RETURN, 0, 0, REFUSE)]
