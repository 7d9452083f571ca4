"""Runs all escapes and forgeries behind some walls, as some user, and prints which of them succeeded.

    python try_escapes.py WALLS USER

As root, another user is become, with Python and this repository shown to them.
"""

import ctypes
import json
import os
import socket
import stat
import sys
import tempfile
import threading
from pathlib import Path

HERE = Path(__file__).resolve().parent
KEY = 0x7A11 + (os.getpid() & 0xFFF)


def needed():
    """Folders that a process of another user must be able to read."""
    import trlx_hybrid
    import trlx_hybrid_cure

    modules = [Path(module.__file__).resolve().parent.parent for module in (trlx_hybrid, trlx_hybrid_cure)]
    return {Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), HERE, *modules}


def show_to_others():
    """Cover the folders in which others may not look by ones that hold what is `needed`, for this process alone."""
    libc = ctypes.CDLL(None, use_errno=True)

    def mount(source, target, kind, flags, data=None):
        if libc.mount(str(source).encode(), str(target).encode(), kind, ctypes.c_ulong(flags), data):
            raise OSError(ctypes.get_errno(), f"mount {target}: {os.strerror(ctypes.get_errno())}")

    closed = {
        next(folder for folder in [*reversed(path.parents), path] if not folder.stat().st_mode & stat.S_IXOTH): None
        for path in needed()
        if not all(folder.stat().st_mode & stat.S_IXOTH for folder in [path, *path.parents])
    }
    if not closed:
        return
    if libc.unshare(0x00020000):
        raise OSError(ctypes.get_errno(), "unshare")
    mount("none", "/", None, 0x4000 | 1 << 18)
    for folder in closed:
        held = Path(tempfile.mkdtemp())
        mount(folder, held, None, 0x1000 | 0x4000)
        mount("tmpfs", folder, b"tmpfs", 0, b"mode=755")
        for path in sorted(path for path in needed() if path.is_relative_to(folder)):
            if not path.exists():
                path.mkdir(parents=True)
                mount(held / path.relative_to(folder), path, None, 0x1000 | 0x4000)


def become(user):
    """Go on as another user, in a new process image that is like any other of theirs."""
    try:
        if os.getuid() == 0:
            show_to_others()
    except OSError as error:
        print(json.dumps({"missing": f"Python lies where user {user} may not look, and cannot be shown: {error}"}))
        raise SystemExit from error
    if user:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    os.environ["SECRET_OF_THE_TRAINER"] = "x"
    os.environ["SHOWN"] = "1"
    os.execv(sys.executable, [sys.executable, *sys.argv])


def listen(family, address, got, name):
    """A socket, and a thread that notes who spoke to it."""
    server = socket.socket(family)
    server.bind(address)
    server.listen()

    def note():
        while True:
            if server.accept()[0].recv(9):
                got.add(name)

    threading.Thread(target=note, daemon=True).start()
    return server


def segments(kind):
    """Keys of System V objects of this machine."""
    rows = Path(f"/proc/sysvipc/{kind}").read_text().splitlines()[1:]
    return {int(row.split()[0]) & 0xFFFFFFFF: row.split()[1] for row in rows}


def main():
    """Try all, and print the names of those that succeeded."""
    walls, user = sys.argv[1], int(sys.argv[2])
    if "SHOWN" not in os.environ:
        become(user if os.getuid() == 0 else 0)
    from escapes import FORGERIES, FREE, OUT
    from trlx_hybrid_cure.sandbox import ProgramTests, Sandbox, SandboxError, missing

    if missing(walls):
        print(json.dumps({"missing": missing(walls)}))
        return
    folder, got = Path(tempfile.mkdtemp()), set()
    folder.chmod(0o777)
    (folder / "secret").write_text("secret")
    (folder / "secret").chmod(0o600)
    (folder / "kept").touch()
    name = folder.name
    servers = [
        listen(socket.AF_UNIX, str(folder / "socket"), got, "unix_socket"),
        listen(socket.AF_UNIX, f"\0{name}", got, "abstract_socket"),
        listen(socket.AF_INET, ("127.0.0.1", 0), got, "tcp"),
    ]
    (folder / "socket").chmod(0o777)
    filled = {"folder": folder, "name": name, "port": servers[2].getsockname()[1], "key": KEY, "trainer": os.getpid()}
    jobs = {key: ProgramTests(FREE + text.format(**filled), ["pass"]) for key, text in OUT.items()}
    jobs |= {key: ProgramTests(*job) for key, job in FORGERIES.items()}
    sandbox = Sandbox(walls=walls, workers=2)
    try:
        verdicts = sandbox.run(list(jobs.values()))
    except SandboxError:
        verdicts = []
        for job in jobs.values():
            try:
                verdicts += sandbox.run([job])
            except SandboxError:  # one program ended the run
                verdicts.append(["passed"])
    got |= {key for key, told in zip(jobs, verdicts, strict=True) if "passed" in told}
    traces = {
        "folder_in_a_shared_one": "made",
        "file_in_a_shared_folder": "written",
        "link_in_a_shared_folder": "linked",
    }
    got |= {key for key, trace in traces.items() if os.path.lexists(folder / trace)}
    got |= {"removed_file"} - ({"removed_file"} if (folder / "kept").exists() else set())
    if (shared := Path("/dev/shm", name)).exists():
        got.add("file_in_shared_memory")
        if os.access(shared, os.W_OK):
            shared.unlink()
    for kind, key, command in (("shm", "shared_memory_left_behind", "-m"), ("msg", "message_queue", "-q")):
        if KEY in segments(kind):
            got.add(key)
            os.system(f"ipcrm {command} {segments(kind)[KEY]}")
    print(json.dumps({"tried": len(jobs), "succeeded": sorted(got)}))


if __name__ == "__main__":
    main()
