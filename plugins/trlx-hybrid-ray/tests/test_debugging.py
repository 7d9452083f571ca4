"""Ray's two debuggers, each on its own, with the real thing attached."""

import json
import os
import pty
import re
import select
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
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

    def until(self, pattern, seconds=180):
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


class Editor:
    """Attaches to a worker as an editor does: the Debug Adapter Protocol, over a socket."""

    def __init__(self, host, port):
        self._socket = socket.create_connection((host, int(port)), timeout=60)
        self._stream = self._socket.makefile("rwb")
        self._sent = 0
        self.ask("initialize", adapterID="debugpy")
        self.send("attach", justMyCode=False)  # answered when the configuration is done
        self.event("initialized")
        self.ask("setExceptionBreakpoints", filters=["uncaught"])  # as VS Code does unless told otherwise
        self.ask("configurationDone")

    def send(self, command, **arguments):
        self._sent += 1
        request = {"seq": self._sent, "type": "request", "command": command, "arguments": arguments}
        body = json.dumps(request).encode()
        self._stream.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self._stream.flush()
        return self._sent

    def ask(self, command, **arguments):
        """What a request is answered."""
        number = self.send(command, **arguments)
        answer = self._until(lambda message: message.get("request_seq") == number)
        assert answer["success"], answer
        return answer.get("body", {})

    def event(self, name):
        return self._until(lambda message: message.get("event") == name).get("body", {})

    def _until(self, wanted):
        """Read on to the first message that is wanted."""
        while True:
            header = b""
            while not header.endswith(b"\r\n\r\n"):
                header += self._stream.read(1) or pytest.fail(f"the debugger has hung up after {header!r}")
            message = json.loads(self._stream.read(int(header.partition(b"Content-Length: ")[2].split()[0])))
            if wanted(message):
                return message

    def close(self):
        self._stream.close()
        self._socket.close()


@contextmanager
def looked_at(run, environment, marker):
    """Type `ray debug` as the run says, look at `marker` at the first breakpoint, and let the worker go on."""
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
        yield
    finally:
        run.close()
        if debugger is not None:
            debugger.close()


STOPS = [
    ("reward", 40, "[41.0]"),
    ("environment", 50, "51"),
    ("register", 60, "[61]"),
    ("post-mortem", 40, "ValueError('marker 40')"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("where", "marker", "result"), STOPS)
def test_ray_debug_attaches_and_continues(where, marker, result, environment):
    told = environment | {"RAY_DEBUG": "legacy"} | ({"RAY_DEBUG_POST_MORTEM": "1"} if where == "post-mortem" else {})
    run = Terminal([sys.executable, str(SCRIPT), where], told)
    with looked_at(run, environment, marker):
        run.until(rf"result {re.escape(result)}")
        assert run.process.wait(timeout=180) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("where", "marker", "result"), STOPS)
def test_an_editor_attaches_and_continues(where, marker, result, environment):
    told = environment | {"RAY_DEBUG": "1"} | ({"RAY_DEBUG_POST_MORTEM": "1"} if where == "post-mortem" else {})
    run = Terminal([sys.executable, str(SCRIPT), where], told)
    editor = None
    try:
        assert run.until(r"dashboard (http://\S+)")
        host, port = run.until(r"Ray debugger is listening on (\S+):(\d+)").groups()
        assert run.process.poll() is None
        editor = Editor(host, port)
        thread = editor.event("stopped")["threadId"]
        frames = editor.ask("stackTrace", threadId=thread)["stackFrames"]
        (frame,) = [frame["id"] for frame in frames if frame["name"].rpartition(".")[2] in ("score", "run")][:1]
        assert editor.ask("evaluate", expression="marker", frameId=frame)["result"] == str(marker)
        editor.ask("continue", threadId=thread)
        run.until(rf"result {re.escape(result)}")
        assert run.process.wait(timeout=180) == 0
    finally:
        run.close()
        if editor is not None:
            editor.close()


@pytest.mark.slow
def test_a_launched_rank_that_fails_is_looked_at_where_it_failed(environment, tmp_path):
    (tmp_path / "train.py").write_text("def train():\n    marker = 70\n    raise ValueError('no reward')\ntrain()\n")
    launch = [
        sys.executable,
        "-m",
        "trlx_hybrid",
        "launch",
        "--cpu",
        "--processes-per-node",
        "1",
        "--debug",
    ]
    run = Terminal([*launch, str(tmp_path / "train.py")], environment | {"RAY_DEBUG": "legacy"})
    with looked_at(run, environment, 70):
        run.until(r"Rank 0 failed first .* ValueError: no reward")
        assert run.process.wait(timeout=180) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "from trlx_hybrid_ray.actors import ensure_connected\nensure_connected()\nbreakpoint()\nprint('over')",
        "from trlx_hybrid_ray.cluster import connect\nwith connect():\n    breakpoint()\nprint('over')",
    ],
    ids=["remote part", "connect"],
)
def test_breakpoints_in_the_users_own_script_stay_pdbs(code, environment):
    run = Terminal([sys.executable, "-c", code], environment)
    try:
        run.until(r"\(Pdb\) ")
        run.type("continue")
        run.until("over")
        assert run.process.wait(timeout=180) == 0
    finally:
        run.close()


def test_an_unknown_debugger_is_refused(monkeypatch):
    monkeypatch.setenv("RAY_DEBUG", "vscode")
    with pytest.raises(ConfigError, match="RAY_DEBUG=vscode: choose 1"):
        debugging.check()


def test_a_debugger_that_is_missing_is_refused_rather_than_passed_over(monkeypatch):
    monkeypatch.setenv("RAY_DEBUG", "1")
    debugging.check()
    monkeypatch.setitem(sys.modules, "debugpy", None)  # as if it were not installed
    with pytest.raises(ConfigError, match="needs debugpy"):
        debugging.check()


def test_deadlines_are_lifted_while_debugging(monkeypatch):
    monkeypatch.delenv("RAY_DEBUG", raising=False)
    assert debugging.patience(5) == 5
    monkeypatch.setenv("RAY_DEBUG", "legacy")
    assert debugging.patience(5) == float("inf")
