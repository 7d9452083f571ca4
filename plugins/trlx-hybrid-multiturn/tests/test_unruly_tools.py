"""Tools that fork, leave daemons behind, and answer with too much or with what is no answer: no other call notices."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from PIL import Image
from trlx_hybrid.config import HybridConfig
from trlx_hybrid.errors import ConfigError

sys.path.insert(0, str(Path(__file__).parent))
from test_processes import PATIENCE, call, gone, pid, script, shared, sleep, start, until, value  # noqa: F401

DAEMON = """
import os, sys, time
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
with open(sys.argv[1] + ".new", "w") as file: file.write(str(os.getpid()))
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(1000)
"""
LONG = 40 << 20  # characters


def daemon(file):
    """Start a process with a session of its own and without a parent; returns its number."""
    import subprocess

    subprocess.run([sys.executable, "-c", DAEMON, str(file)], check=True)
    while not file.exists():
        time.sleep(0.01)
    return int(file.read_text())


def fork(gate):
    """As code for parallel work does, with nothing that ends the child."""
    child = os.fork()
    if child:
        return child
    while not gate.exists():
        time.sleep(0.01)
    return "of another conversation"


def wait_for(child, gate):
    gate.touch()
    os.waitpid(child, 0)
    return "waited"


def echo(number):
    return number


def test_calls_behind_one_that_forked_get_their_own_results(start, tmp_path):  # noqa: F811
    pool, gate = start(), tmp_path / "gate"
    child = value(pool, fork, gate=gate)
    assert call(pool, wait_for, child=child, gate=gate).value == "waited"
    outcomes = [call(pool, echo, number=number) for number in range(20)]
    assert [outcome.value for outcome in outcomes] == [str(number) for number in range(20)]


def test_what_a_forked_process_ends_with_is_its_own(start):  # noqa: F811
    def in_parallel():
        child = os.fork()
        if child == 0:
            sys.exit(3)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    pool = start()
    assert call(pool, in_parallel).value == "3"
    assert value(pool, echo, number=1) == 1


def test_an_answer_by_another_number_is_no_answer(start):  # noqa: F811
    def answer_before():
        import gc
        import socket

        channel = next(o for o in gc.get_objects() if isinstance(o, socket.socket))
        body = b'{"kind": "value", "content": "forged"}'
        for number in range(100):
            channel.sendall(number.to_bytes(8, "big") + len(body).to_bytes(8, "big") + body)
        return os.getpid()

    pool = start()
    first = value(pool, answer_before)
    assert [value(pool, echo, number=number) for number in range(5)] == list(range(5))
    assert value(pool, pid) == first


def test_a_process_with_an_answer_to_no_call_is_not_asked_again(start, tmp_path):  # noqa: F811
    def answer_afterwards(gate, sent):
        import gc
        import socket

        channel = next(o for o in gc.get_objects() if isinstance(o, socket.socket))
        if os.fork() == 0:
            while not gate.exists():
                time.sleep(0.01)
            channel.sendall(bytes(16))
            sent.touch()
            os._exit(0)
        return os.getpid()

    pool, gate, sent = start(), tmp_path / "gate", tmp_path / "sent"
    first = value(pool, answer_afterwards, gate=gate, sent=sent)
    gate.touch()
    until(sent.exists)
    assert value(pool, pid) != first


def test_a_daemon_ends_at_the_deadline_of_a_later_call(start, tmp_path):  # noqa: F811
    pool = start()
    left = value(pool, daemon, file=tmp_path / "pid")
    assert not gone(left)
    assert "was killed" in call(pool, sleep, deadline=0.1, seconds=1000).lost
    until(lambda: gone(left))


def test_a_daemon_ends_with_a_process_that_crashes(start, tmp_path):  # noqa: F811
    pool = start()
    left = value(pool, daemon, file=tmp_path / "pid")
    assert call(pool, os._exit, status=3).lost == "tool '_exit' ended its process: exit code 3."
    until(lambda: gone(left))


def test_a_daemon_ends_with_the_pool(start, tmp_path):  # noqa: F811
    pool = start()
    left = value(pool, daemon, file=tmp_path / "pid")
    pool.close()
    until(lambda: gone(left))


TRAINER = """
import subprocess
def daemon(file):
    subprocess.run([sys.executable, "-c", {code!r}, file], check=True)
    while not os.path.exists(file): time.sleep(0.01)
def stop_parent(): os.kill(os.getppid(), 19)
pool.submit(daemon, {{"file": {file!r}}}, inbox.put, 60); inbox.get()
print("started", flush=True)
if {stopped}: pool.submit(stop_parent, {{}}, inbox.put, 60); inbox.get()
if {busy}:
    pool.submit(hang, {{}}, inbox.put, 300)
    while not pool.busy: time.sleep(0.01)
{last}
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's part of it is Linux's")
@pytest.mark.parametrize(
    ("busy", "stopped", "last"),
    [
        (True, False, "os.kill(os.getpid(), 9)"),
        (False, False, "os.kill(os.getpid(), 9)"),
        (True, True, "os.kill(os.getpid(), 9)"),
        (True, False, "sys.exit(0)"),
        (False, False, "sys.exit(0)"),
    ],
)
def test_a_daemon_ends_with_the_trainer(tmp_path, busy, stopped, last):
    """However it ends, and also where a tool has stopped what watches over it."""
    file = tmp_path / "pid"
    with script(
        tmp_path, TRAINER.format(code=DAEMON, file=str(file), busy=busy, stopped=stopped, last=last)
    ) as process:
        assert [process.stdout.readline() for _ in range(2)] == ["script runs\n", "started\n"]
        left = int(file.read_text())
        until(lambda: process.poll() is not None or stopped_by_its_tool(process.pid))
        process.kill()
    try:
        until(lambda: gone(left))
    finally:
        if not gone(left):
            os.kill(left, signal.SIGKILL)


def stopped_by_its_tool(number):
    """Whether a tool's signal for its parent has reached the trainer."""
    return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_a_tool_that_ends_its_parent_ends_no_trainer(tmp_path):
    process = script(
        tmp_path,
        """
        def end_parent():
            os.kill(os.getppid(), 15)
            time.sleep(1000)
        pool.submit(end_parent, {}, inbox.put, 60); print(inbox.get().lost, flush=True)
        pool.submit(tool, {"x": 4}, inbox.put, 60); print(inbox.get().value, flush=True)
        """,
    )
    out, _ = process.communicate(timeout=PATIENCE)
    assert "tool 'end_parent' crashed its process" in out
    assert (out.splitlines()[-1], process.returncode) == ("40", 0)


def test_a_long_text_comes_back_as_its_beginning_with_a_note(shared):  # noqa: F811
    shown = call(shared, lambda: "x" * LONG).value
    assert len(shown) <= 1 << 20
    kept = shown.index("\n")
    assert shown[kept:] == f"\n[This answer was cut: {kept:,} of its {LONG:,} characters are shown.]"
    assert value(shared, echo, number=1) == 1


def test_a_list_comes_back_as_its_beginning_with_a_note(shared):  # noqa: F811
    def blocks():
        from PIL import Image

        image = {"type": "image", "image": Image.new("RGB", (2, 3))}
        return [image, {"type": "text", "text": "x" * LONG}, {"type": "text", "text": "never seen"}]

    shown = call(shared, blocks).value
    assert sum(len(block["text"]) for block in shown[1:]) <= 1 << 20
    assert (shown[0]["image"].size, [block["type"] for block in shown]) == ((2, 3), ["image", "text", "text"])
    assert shown[2]["text"].startswith("[This answer was cut: its first 1,0")


def test_an_error_with_a_long_text_comes_back_as_its_beginning(shared):  # noqa: F811
    def fail():
        raise ValueError("x" * LONG)

    error = call(shared, fail).error
    assert len(str(error)) <= 1 << 20
    assert str(error).endswith("characters are shown.]")


def test_an_answer_that_only_says_how_long_it_is(start):  # noqa: F811
    def boast():
        import gc
        import socket

        channel = next(o for o in gc.get_objects() if isinstance(o, socket.socket))
        channel.sendall(b"\x00" * 8 + (1 << 40).to_bytes(8, "big"))
        time.sleep(1000)

    pool = start()
    outcome = call(pool, boast)
    assert outcome.lost == "tool 'boast' gave an answer of 1,099,511,627,776 bytes, more than 67,108,864."
    assert outcome.by_tool
    assert value(pool, echo, number=1) == 1


def test_an_image_that_is_small_only_as_a_file(shared):  # noqa: F811
    outcome = call(shared, lambda: [{"type": "image", "image": Image.new("1", (9000, 9000))}])
    assert outcome.value is None
    assert "images of more than 67,108,864 pixels" in outcome.lost


def test_a_class_of_the_trainers_is_no_answer(shared):  # noqa: F811
    outcome = call(shared, lambda: [HybridConfig()])
    assert outcome.value is None
    assert outcome.lost.startswith("tool '<lambda>' returned a list, of which [0] is a HybridConfig")


def test_a_class_of_the_trainers_cannot_be_named_in_an_answer(start):  # noqa: F811
    def forge():
        from trlx_hybrid.interprocess import plain_data

        body = b'[{"@": "dataclass", "class": "trlx_hybrid.config:HybridConfig", "fields": {"engine": "another"}}]'
        plain_data.dumps = lambda *args, **kwargs: body
        return "nothing"

    outcome = call(start(), forge)
    assert outcome.value is None
    assert "tool 'forge' returned 'dataclass', which is no plain value" in outcome.lost


def test_an_exception_of_the_trainers_is_told_by_its_name(shared):  # noqa: F811
    def fail():
        raise ConfigError("stop the run")

    error = call(shared, fail).error
    assert not isinstance(error, ConfigError)
    assert (error.kind, str(error)) == ("ConfigError", "stop the run")
