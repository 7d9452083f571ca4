"""Nothing of a process stays once it is gone, and nothing that is somebody else's goes."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import shared_memory
from pathlib import Path

import pytest
from trlx_hybrid_ray import reaper
from trlx_hybrid_ray.reaper import SEGMENT, SHARED_MEMORY, Segments, descendants, mapped, state

OWNER = """
import json, os, subprocess, sys, time
from multiprocessing import resource_tracker, shared_memory
from trlx_hybrid_ray.reaper import Reaper
reaper = Reaper(grace=0.5)
stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(600)"
sleep = [sys.executable, "-c", stubborn]
children = [
    subprocess.Popen(sleep, stdout=subprocess.PIPE, start_new_session=new_session) for new_session in (False, True)
]
if (forked := os.fork()) == 0:
    time.sleep(600)
for child in children:
    child.stdout.readline()
segment = shared_memory.SharedMemory(create=True, size=4096)
resource_tracker.unregister(segment._name, "shared_memory")  # as for code that knows nothing of Python's tracker
import mmap
with open(sys.argv[1] + "/data.bin", "r+b") as file:
    data = mmap.mmap(file.fileno(), 0)
print(json.dumps({"pids": [child.pid for child in children] + [forked], "segment": segment.name}), flush=True)
if sys.stdin.readline() == "finish\\n":
    segment.close()
    print(json.dumps(reaper.finish()), flush=True)
    del data
    os._exit(0)
"""


@pytest.fixture
def owner(tmp_path):
    """A process with a reaper and descendants, and files that it has mapped and not made."""
    import json
    import shutil
    import tempfile

    folder = Path(tempfile.mkdtemp(dir=SHARED_MEMORY))
    (folder / "data.bin").write_bytes(b"kept" * 1000)
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    left = json.loads(process.stdout.readline())
    yield process, left, folder / "data.bin"
    process.kill()
    process.communicate()
    shutil.rmtree(folder)


def wait_until_looked():
    """The reaper looks at shared memory as soon as a name appears there, after a rest of five times the processor time
    of the last look: as long as one takes here."""
    began = time.monotonic()
    descendants("nobody", 0)
    time.sleep(1 + 10 * (time.monotonic() - began))


def gone(left, seconds=60):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(map(state, left["pids"])) and not os.path.exists(SHARED_MEMORY + left["segment"]):
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_descendants_and_segments_go_when_their_owner_is_killed(owner, how):
    process, left, data = owner
    wait_until_looked()
    assert os.path.exists(SHARED_MEMORY + left["segment"])
    process.send_signal(how)
    assert gone(left)
    assert data.read_bytes() == b"kept" * 1000


def test_they_go_when_they_are_to_and_it_is_said_what_was_left(owner):
    process, left, data = owner
    wait_until_looked()
    process.stdin.write("finish\n")
    process.stdin.flush()
    said = process.stdout.readline()
    assert gone(left, seconds=1)
    assert all(f"process {pid}" in said for pid in left["pids"][:2])
    assert process.wait(60) == 0
    assert data.exists()


def test_processes_are_looked_at_only_where_a_segment_is_new(monkeypatch, tmp_path):
    """Other files come and go there all the time, and there may be thousands of processes."""
    looks = []
    monkeypatch.setattr(reaper, "SHARED_MEMORY", f"{tmp_path}/")
    monkeypatch.setattr(reaper, "NEW_SECONDS", 0.2)
    monkeypatch.setattr(reaper, "descendants", lambda *_: looks.append(1) or [])
    segments = Segments("owner", os.getpid())
    for number in range(5):
        (tmp_path / f"model-{number}.safetensors").write_bytes(b"")
        segments.look()
    assert looks == []
    (tmp_path / "psm_1a2b3c4d").write_bytes(b"")
    segments.look()
    assert looks == [1]
    time.sleep(0.3)  # somebody else's: by now it would be mapped
    segments.look()
    assert looks == [1]


def test_the_maker_of_a_semaphore_is_known():
    """glibc maps it under a name that it never has later."""
    lock = multiprocessing.get_context("spawn").Lock()
    name = f"sem.{lock._semlock.name.removeprefix('/')}"
    assert SEGMENT.fullmatch(name)
    assert name in mapped(os.getpid())
    segment = shared_memory.SharedMemory(create=True, size=4096)
    assert segment.name in mapped(os.getpid())
    segment.unlink()
    assert segment.name not in mapped(os.getpid())
    segment.close()


def test_a_new_name_in_shared_memory_is_told_and_not_waited_for(tmp_path, monkeypatch):
    """Who makes a segment may be killed before anybody would look by the clock, and then nobody knows whose it was."""
    monkeypatch.setattr(reaper, "SHARED_MEMORY", f"{tmp_path}/")
    segments = Segments("owner", 0)
    assert segments.wait([], 0.01) is False  # nothing has happened
    reading, writing = os.pipe()
    threading.Timer(0.05, (tmp_path / "psm_1a2b3c4d").touch).start()
    started = time.monotonic()
    assert segments.wait([reading], 60) is False
    assert time.monotonic() - started < 60
    os.write(writing, b"\n")
    assert segments.wait([reading], 60) is True
    for descriptor in (reading, writing):
        os.close(descriptor)


@pytest.mark.parametrize(
    ("name", "segment"),
    [
        ("psm_1a2b3c4d", True),
        ("torch_4711_1536544658_0", True),
        ("nccl-Ab3xYz", True),
        ("sem.mp-m__aq7as", True),
        ("127.0.0.1-29500-tp_0-cpushm", True),
        ("stage/model.safetensors", False),
        ("model.safetensors", False),
        ("torch_dataset", False),
        ("psm_weights.bin", False),
    ],
)
def test_what_is_a_segment_and_what_somebodys_file(name, segment):
    assert bool(SEGMENT.fullmatch(name)) == segment
