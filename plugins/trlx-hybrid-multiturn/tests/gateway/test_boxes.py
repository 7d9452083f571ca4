"""Boxes: what a program in one can do, and that it can do nothing else."""

import asyncio
import os
import shutil
import socket
import sys
import time
import uuid

import psutil
import pytest
from trlx_hybrid_multiturn.gateway import boxes, sandbox
from trlx_hybrid_multiturn.gateway.boxes import BoxError, Folder

WALLS = pytest.mark.skipif(boxes._refusal() is not None, reason="needs the command bwrap")
KINDS = [pytest.param(Folder, id="folder"), pytest.param(sandbox, id="sandbox", marks=WALLS)]


def python(text):
    return [sys.executable, "-c", text]


@pytest.fixture(params=KINDS)
def make(request):
    """Either kind of a box."""
    return request.param


@pytest.fixture
def repository(tmp_path):
    """A folder with a module, its failing test, and a link."""
    (tmp_path / "source" / "tests").mkdir(parents=True)
    (tmp_path / "source" / "sums.py").write_text("def add(a, b):\n    return a - b\n")
    (tmp_path / "source" / "tests" / "test_sums.py").write_text("from sums import add\n\nassert add(2, 3) == 5\n")
    (tmp_path / "source" / "link.py").symlink_to("sums.py")
    return tmp_path / "source"


def in_box(make, work, *args, **given):
    """The result of a coroutine function of a box."""

    async def run():
        async with make(*args, **given) as box:
            return await work(box)

    return asyncio.run(run())


def test_programs_work_on_a_copy_of_a_folder(make, repository):
    async def mend(box):
        tried = python("import runpy; runpy.run_path('tests/test_sums.py')")
        before = await box.run(tried)
        assert before.code == 1
        assert "AssertionError" in before.errors
        await box.write("sums.py", (await box.read("link.py")).replace("-", "+"))
        await box.write("new/deep.txt", "made")
        return await box.run(tried), await box.run(["cat", "new/deep.txt"]), box.path

    after, shown, path = in_box(make, mend, repository)
    assert (after.code, shown.output) == (0, "made")
    assert "a - b" in (repository / "sums.py").read_text()
    assert not path.exists()


def test_what_a_program_is_given_and_how_it_ends(make):
    async def runs(box):
        return [
            await box.run(python("import sys; print(sys.stdin.read()[::-1]); sys.exit(3)"), given=b"abc"),
            await box.run(python("import os; print(os.environ['TOLD'], os.getcwd() == os.environ['HOME'])")),
            await box.run(python("print('x' * (3 << 20) + 'end')")),
            await box.run(["sh", "-c", "kill -9 $$"]),
        ]

    back, told, long, killed = in_box(make, runs, environment={"TOLD": "this"})
    assert (back.code, back.output, back.errors) == (3, "cba\n", "")
    assert told.output == f"this {make is sandbox}\n"
    assert (len(long.output), long.output[-4:]) == (1 << 20, "end\n")
    assert killed.code in (-9, 137)


def running(mark):
    found = [process for process in psutil.process_iter(["cmdline"]) if mark in (process.info["cmdline"] or [])]
    return [process for process in found if process.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("ended_by", ["its time", "the box's end"])
def test_what_a_program_has_started_ends_with_it(make, ended_by):
    mark = str(1000 + uuid.uuid4().int % 10**9)
    starts = ["sh", "-c", f"sleep {mark} & touch begun; sleep {mark}"]

    async def runs(box):
        if ended_by == "its time":
            return await box.run(starts, seconds=2.0)
        task = asyncio.ensure_future(box.run(starts, seconds=None))
        while not (box.path / "begun").exists():
            await asyncio.sleep(0.02)
        task.cancel()
        return None

    ran = in_box(make, runs)
    assert ran is None or ran.code is None
    until = time.monotonic() + 20
    while running(mark) and time.monotonic() < until:
        time.sleep(0.05)
    assert not running(mark)


def test_files_outside_of_a_box_are_neither_read_nor_written(make, tmp_path):
    (tmp_path / "secret").write_text("hidden")

    async def tries(box):
        await box.run(["ln", "-s", str(tmp_path / "secret"), "link"])
        await box.run(["ln", "-s", str(tmp_path), "folder"])
        for path in ("link", "../secret", str(tmp_path / "secret"), "folder/secret"):
            with pytest.raises(PermissionError, match="outside of the box"):
                await box.read(path)
            with pytest.raises(PermissionError, match="outside of the box"):
                await box.write(path, "changed")

    in_box(make, tries)
    assert (tmp_path / "secret").read_text() == "hidden"


ATTEMPTS = {
    "read this machine's files": "open({secret!r}).read()",
    "read root's secrets": "open('/etc/shadow').read()",
    "change the system": "open('/usr/x', 'w')",
    "change Python": "import os, sys; open(os.path.join(sys.prefix, 'x'), 'w')",
    "mount the system to be written": "import subprocess; subprocess.run({mount}, check=True); open('/usr/x', 'w')",
    "change the kernel's settings": "p = '/proc/sys/vm/swappiness'; t = open(p).read(); open(p, 'w').write(t)",
    "see environment variables": "import os; os.environ['SECRET_OF_THE_RUN']",
    "see other processes": "import os; os.kill({pid}, 0)",
    "reach this machine": "import socket; socket.create_connection(('127.0.0.1', {port}), timeout=2)",
    "write without end": "f = open('f', 'wb'); [f.write(bytes(1 << 24)) for _ in range(80)]",
    "take all memory": "x = bytearray(600 << 20)",
}
HARMLESS = ("read this machine's files", "see environment variables", "see other processes", "reach this machine")


@WALLS
@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_a_program_in_a_sandbox_cannot(attempt, tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_RUN", "hidden")
    (tmp_path / "secret").write_text("hidden")
    with socket.create_server(("127.0.0.1", 0)) as server:
        known = {"secret": str(tmp_path / "secret"), "pid": os.getpid(), "port": server.getsockname()[1]}
        known["mount"] = ["mount", "-o", "remount,rw,bind", "/usr"]
        text = ATTEMPTS[attempt].format(**known)
        if attempt in HARMLESS:
            assert in_box(Folder, lambda box: box.run(python(text))).code == 0  # it can without walls
        ran = in_box(sandbox, lambda box: box.run(python(text), seconds=60), memory_mib=512)
    assert ran.code not in (0, None)
    assert not os.path.exists("/usr/x")


@WALLS
def test_a_sandbox_shows_the_folders_that_are_named(tmp_path):
    (tmp_path / "data.txt").write_text("shown")
    shows = ["sh", "-c", f"cat {tmp_path}/data.txt; echo x > {tmp_path}/data.txt"]
    ran = in_box(sandbox, lambda box: box.run(shows), shown=[tmp_path])
    assert (ran.output, ran.code) == ("shown", 2)
    assert (tmp_path / "data.txt").read_text() == "shown"


def test_a_machine_without_bubblewrap_is_told_what_to_install(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    boxes._refusal.cache_clear()
    try:
        with pytest.raises(BoxError, match="Install bubblewrap"):
            sandbox()
    finally:
        boxes._refusal.cache_clear()
