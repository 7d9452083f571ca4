"""Ray's two debuggers, each on its own, with the real thing attached."""

import importlib.util
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
from trlx_hybrid.errors import ConfigError
from trlx_hybrid_ray import debugging

SCRIPT = Path(__file__).parent / "scripts" / "stopping.py"


@pytest.fixture
def environment():
    """For a script that starts a cluster of its own, and for the debugger beside it."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "TRLX_", "PYTHONBREAK"))}


class Terminal:
    """A program in a pseudo-terminal, as somebody has it who types."""

    def __init__(self, command, environment):
        self._own, theirs = pty.openpty()
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
        )
        os.close(theirs)
        self.seen = ""

    def until(self, pattern, seconds=60):
        """Read on to a text, and return the match; what was read before it is forgotten."""
        end = time.monotonic() + seconds
        while (found := re.search(pattern, self.seen)) is None:
            assert time.monotonic() < end, f"no {pattern!r} in {self.seen!r}"
            if select.select([self._own], [], [], 0.2)[0]:
                try:
                    self.seen += os.read(self._own, 4096).decode(errors="replace")
                except OSError:  # the program has ended, and this is all that it said
                    pytest.fail(f"no {pattern!r} in {self.seen!r}")
        self.seen = self.seen[found.end() :]
        return found

    def type(self, line):
        os.write(self._own, f"{line}\n".encode())

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self._own)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "marker", "result"),
    [
        ("reward", 40, "[41.0]"),
        ("environment", 50, "51"),
        ("register", 60, "[61]"),
        ("post-mortem", 40, "ValueError('marker 40')"),
    ],
)
def test_ray_debug_attaches_and_continues(where, marker, result, environment):
    told = environment | {"RAY_DEBUG": "legacy"} | ({"RAY_DEBUG_POST_MORTEM": "1"} if where == "post-mortem" else {})
    run = Terminal([sys.executable, str(SCRIPT), where], told)
    debugger = None
    try:
        command = run.until(r"debugger: (.*) ray debug (\S+) (\S+)\r")
        run.until("RemotePdb session open")
        assert run.process.poll() is None
        given = dict(setting.split("=", 1) for setting in command.group(1).split())
        ray = str(Path(sys.executable).parent / "ray")
        debugger = Terminal([ray, "debug", *command.group(2, 3)], environment | given)
        debugger.until("Enter breakpoint index")
        debugger.type("0")
        debugger.until(r"\(Pdb\) ")
        debugger.type("p marker")
        debugger.until(rf"(?m)^{marker}\r")
        debugger.type("continue")
        run.until(rf"result {re.escape(result)}")
        assert run.process.wait(timeout=60) == 0
    finally:
        run.close()
        if debugger is not None:
            debugger.close()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("debugpy") is None, reason="debugpy is not installed: pip install debugpy")
def test_a_worker_listens_for_the_distributed_debugger(environment):
    run = Terminal([sys.executable, str(SCRIPT), "reward"], environment | {"RAY_DEBUG": "1"})
    try:
        run.until(r"Ray debugger is listening on (\S+):(\d+)", seconds=90)
        assert run.process.poll() is None
    finally:
        run.close()


@pytest.mark.slow
def test_breakpoints_in_the_users_own_script_stay_pdbs(environment):
    connecting = "from trlx_hybrid_ray.remote.connection import connected; connected()"
    code = f"{connecting}\nbreakpoint()\nprint('over')"
    run = Terminal([sys.executable, "-c", code], environment)
    try:
        run.until(r"Ray started at 127\.0\.0\.1")
        run.until(r"\(Pdb\) ")
        run.type("continue")
        run.until("over")
        assert run.process.wait(timeout=60) == 0
    finally:
        run.close()


def test_an_unknown_debugger_is_refused(monkeypatch):
    monkeypatch.setenv("RAY_DEBUG", "vscode")
    with pytest.raises(ConfigError, match="RAY_DEBUG=vscode: choose 1"):
        debugging.check()


@pytest.mark.skipif(importlib.util.find_spec("debugpy") is not None, reason="debugpy is installed")
def test_a_debugger_that_is_missing_is_refused_rather_than_passed_over(monkeypatch):
    monkeypatch.setenv("RAY_DEBUG", "1")
    with pytest.raises(ConfigError, match="needs debugpy"):
        debugging.check()


def test_deadlines_are_lifted_while_debugging(monkeypatch):
    monkeypatch.delenv("RAY_DEBUG", raising=False)
    assert debugging.patience(5) == 5
    monkeypatch.setenv("RAY_DEBUG", "legacy")
    assert debugging.patience(5) == float("inf")
