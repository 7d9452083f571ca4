"""A real warden beside a real process: nothing that the process wrote is lost, and nothing that it left stays."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from trlx_hybrid_ray.launch.leftovers import SEAT_VARIABLE, SEGMENTS
from trlx_hybrid_ray.launch.switchboard import Switchboard

SCRIPT = Path(__file__).parent / "scripts" / "warded.py"


@pytest.fixture
def warded():
    """Start a process that does something, beside its warden; returns it with the switchboard that its warden calls."""
    started = []

    def start(what, secret=None):
        board = Switchboard("127.0.0.1", 1)
        environment = os.environ | {SEAT_VARIABLE: board.seats[0]}
        command = [sys.executable, str(SCRIPT), board.host, str(board.port), secret or board.secret, what]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        started.append((process, board))
        return process, board

    yield start
    for process, board in started:
        process.kill()
        process.communicate()
        board.close()


def listen(board, until, seconds=30):
    """Messages until an event has come."""
    messages = []
    deadline = time.monotonic() + seconds
    while until not in [message.event for message in messages]:
        assert time.monotonic() < deadline, [message.event for message in messages]
        messages += board.poll(0.2)
    return messages


def test_the_last_line_of_a_killed_process_arrives(warded):
    process, board = warded("lines")
    messages = listen(board, "gone")
    out = b"".join(m.data for m in messages if m.event == "output" and not m.error).decode()
    assert out == "first line\n" + "".join(f"line {number}\n" for number in range(20_000))
    assert b"".join(m.data for m in messages if m.event == "output" and m.error) == b"to stderr\n"
    ended = next(m for m in messages if m.event == "ended")
    assert abs(ended.fields["time"] - time.time()) < 30
    assert ended.fields["raylet_died"] is False
    assert process.wait(10) == -signal.SIGKILL


def test_children_and_shared_memory_of_a_killed_process_go(warded):
    process, board = warded("leave")
    left = listen(board, "left")[-1].fields
    assert os.path.exists(SEGMENTS + left["segment"])
    time.sleep(0.5)  # a look at shared memory takes place every 0.1 s
    process.kill()
    swept = listen(board, "swept")[-1].fields
    assert set(left["pids"]) == set(swept["killed"])
    assert left["segment"] in swept["segments"]
    assert not os.path.exists(SEGMENTS + left["segment"])
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in left["pids"])


def test_a_rank_ends_with_its_launcher(warded):
    process, board = warded("sleep")
    listen(board, "asleep")
    board.close()
    assert process.wait(20) == -signal.SIGTERM


@pytest.fixture
def interruptible():
    """A process that was started in the background ignores SIGINT, and so do its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_signals_arrive(interruptible, warded):
    process, board = warded("sleep")
    listen(board, "asleep")
    assert board.send(0, signal.SIGINT)
    messages = listen(board, "gone")
    assert process.wait(10) == -signal.SIGINT
    assert b"KeyboardInterrupt" in b"".join(m.data for m in messages if m.error)


def test_a_stranger_is_not_let_in(warded):
    process, board = warded("sleep", secret="wrong")
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and process.poll() is None:
        assert board.poll(0.2) == []
    assert not board.connected(0)
    assert process.wait(10) == -signal.SIGTERM  # its warden was hung up on
