"""Isolation of the processes that execute programs: their user, the files that they see, and the processes that they
can reach."""

from __future__ import annotations

import ctypes
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
    """Isolate this process: give up its privileges, its user if that is root, and its view of the machine.

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
    """Continue as the first process in new namespaces, where only the paths of `visible` exist, read-only.

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
    """Call the system call `mount(2)`: mount a file system, or make a path appear at another one as well.

    Args:
        source: the path to mount, or the name of the file system.
        target: the path at which it appears.
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
