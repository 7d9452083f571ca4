"""Programs of all kinds behind each of the walls that work here."""

import os
import subprocess
import sys
import time

import psutil
import pytest
from trlx_hybrid.doctor import Finding
from trlx_hybrid.errors import ConfigError
from trlx_hybrid_cure import plugin, sandbox
from trlx_hybrid_cure.sandbox import WALLS, ProgramTests, Sandbox, SandboxError, missing, run_jobs

PROGRAMS = {
    "f = lambda x: x + 3": "passed",
    "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass A:\n    n: int = 5\n"
    "    def __call__(self, x): return self.n\nf = A()": "passed",
    "import __main__": "error",
    "f = lambda x: x + 4": "failed",
    "f = lambda x: y": "error",
    "f = (": "error",
    "f = lambda x: exit()": "error",
    "import os\nf = lambda x: os._exit(0)": "error",
    "import numpy": "error",
    "while True: pass": "cpu",
    "f = lambda x: 9**9**9": "cpu",
    "f = lambda x: bytearray(1 << 30)": "memory",
    "open('/tmp/written', 'w')": "files",
    "import os\nos.remove('/tmp/written')": "files",
    "import os\ntry:\n    os.fork()\nexcept BaseException: pass": "processes",
    "import subprocess\nsubprocess.run(['true'])": "processes",
    "import threading\nthreading.Thread(target=print).start()": "error",
    "import socket\nsocket.socket()": "network",
    "import urllib.request\nurllib.request.urlopen('http://127.0.0.1')": "network",
    "import os\nos.kill(os.getppid(), 9)": "refused",
    "import ctypes\nctypes.string_at(0)": "refused",
    "import faulthandler\nfaulthandler._sigsegv()": "crashed",
}
WAITING = [
    "import time\nf = lambda x: time.sleep(60)",
    "import signal\nsignal.signal(signal.SIGPROF, signal.SIG_IGN)\nwhile True: pass",
]
REFUSED_BY_THE_KERNEL = [
    "import _thread\ntry: _thread.start_new_thread(print, ())\nexcept RuntimeError: pass\nelse: raise AssertionError",
    "import os\nassert os.getuid() != 0\nassert 'CapEff:\\t0000000000000000' in open('/proc/self/status').read()",
    "import os\nassert not set(os.environ) - {'PYTHONHASHSEED', 'LC_CTYPE', 'PWD'}",
]
ENCLOSED = [
    "assert open('/proc/self/net/dev').read().count(':') == 1  # the loopback",
    "import os\nassert all(os.statvfs(f).f_flag & os.ST_RDONLY for f in ('/', '/tmp', '/var'))",
]


@pytest.fixture(params=WALLS)
def walls(request):
    if missing(request.param):
        pytest.skip(missing(request.param))
    return request.param


def test_each_program_has_its_verdict_and_the_sandbox_goes_on(walls):
    limited = Sandbox(walls=walls, seconds=0.5, wall_seconds=30, memory_mib=256, workers=2)
    assert limited.using == walls
    jobs = [ProgramTests(program, ["assert f(2) == 5"]) for program in PROGRAMS]
    assert [verdict for (verdict,) in limited.run(jobs)] == list(PROGRAMS.values())
    impatient = Sandbox(walls=walls, seconds=30, wall_seconds=0.5, workers=2)
    assert impatient.run([ProgramTests(program, ["f(2)"]) for program in WAITING]) == [["wall"]] * 2
    assert not os.path.exists("/tmp/written")


def test_what_python_does_not_report_the_kernel_refuses(walls):
    programs = REFUSED_BY_THE_KERNEL[:2] if walls == "limits" and os.getuid() else REFUSED_BY_THE_KERNEL
    programs = programs + (ENCLOSED if walls != "limits" else [])
    assert Sandbox(walls=walls).run([ProgramTests(program, ["pass"]) for program in programs]) == [["passed"]] * len(
        programs
    )


def test_tests_of_a_program_share_a_process_and_one_that_ends_it_costs_the_others_nothing():
    tests = ["assert os.getpid() == mine"] * 20
    ends = ["while True: pass", "os._exit(0)", "open('/tmp/written', 'w')", "mine = 0", "assert mine != 0"]
    (verdicts,) = Sandbox(seconds=0.2, workers=1).run(
        [ProgramTests("import os\nmine = os.getpid()", [*tests, *ends, *tests])]
    )
    assert verdicts == ["passed"] * 20 + ["cpu", "error", "files", "passed", "passed"] + ["passed"] * 20


@pytest.mark.parametrize(("trusted", "then"), [(0, "passed"), (1, "cpu")])
def test_a_program_that_loops_in_a_trusted_test_is_not_started_again(trusted, then):
    job = ProgramTests("def f(x):\n    while True: pass", ["assert f(2) == 5", "pass"], trusted)
    assert Sandbox(seconds=0.2).run([job]) == [["cpu", then]]


def test_jobs_of_several_processes_come_back_in_their_order():
    jobs = [
        ProgramTests(f"f = lambda x: x + {i}", [f"assert f(0) == {i}", f"assert f(0) == {k}"])
        for i in range(7)
        for k in (3, 5)
    ]
    expected = [["passed", "passed" if i == k else "failed"] for i in range(7) for k in (3, 5)]
    assert Sandbox(workers=3).run(jobs) == expected
    assert Sandbox().run([]) == []


def test_walls_that_do_not_work_are_said(monkeypatch, tmp_path, caplog):
    with pytest.raises(ConfigError, match="walls must be one of bubblewrap, namespaces, limits, got 'nsjail'"):
        Sandbox(walls="nsjail")
    with pytest.raises(ConfigError, match="seconds must be a positive number, got 0"):
        Sandbox(seconds=0)
    monkeypatch.setattr(sandbox, "missing", lambda walls: None if walls == "limits" else "not here")
    assert Sandbox().using == "limits"
    assert "Not bubblewrap: not here. Not namespaces: not here" in caplog.text
    with pytest.raises(SandboxError, match=r"cannot be run here\. Not namespaces: not here\. Install bubblewrap"):
        Sandbox(walls="namespaces").run([ProgramTests("", [""])])
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(SandboxError, match=r"runs programs \(walls='limits'\) failed"):
        run_jobs([ProgramTests("", [""])], "limits", {"wall": 1.0})


def test_nothing_is_left_where_who_asked_is_killed(walls):
    job = "ProgramTests('import time', ['time.sleep(60)'])"
    code = f"from trlx_hybrid_cure.sandbox import *\nSandbox(walls={walls!r}, wall_seconds=60).run([{job}])"
    with subprocess.Popen([sys.executable, "-c", code]) as asking:
        end = time.monotonic() + 20
        while len(processes := psutil.Process(asking.pid).children(recursive=True)) < (2 if walls == "limits" else 3):
            assert time.monotonic() < end
            time.sleep(0.02)
        asking.kill()
    assert psutil.wait_procs(processes, timeout=5)[1] == []


def test_the_doctor_says_which_walls_there_are():
    assert plugin.trlx_doctor(None) == [Finding("sandbox", f"programs of CURE run behind {Sandbox().using}")]
