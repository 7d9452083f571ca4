"""Programs of all kinds behind each of the walls that work here."""

import os
import resource
import socket
import subprocess
import sys
import time

import psutil
import pytest
from trlx_hybrid.contract.types import Finding
from trlx_hybrid.errors import ConfigError
from trlx_hybrid_cure import plugin, sandbox, wire
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
    "import os\nassert os.getuid() != 0",
    "import os\nassert not set(os.environ) - {'PYTHONHASHSEED', 'LC_CTYPE', 'PWD'}",
]
ENCLOSED = [
    "import os\nassert not os.path.exists('/proc') and os.listdir('/tmp') == []",
    "import os\nassert all(os.statvfs(f).f_flag & os.ST_RDONLY for f in ('/', '/tmp', '/usr', '/dev'))",
]
WITHOUT_RIGHTS = ["assert 'CapEff:\\t0000000000000000' in open('/proc/self/status').read()"]
HONEST = {
    "a generator": (
        "def f(n):\n    for i in range(n): yield i, i * i",
        "assert list(f(3)) == [(0, 0), (1, 1), (2, 4)]",
    ),
    "a set of tuples, bytes and a large number": (
        "f = lambda: ({(1, 'a'), (2, 'b')}, b'\\0\\xff', 1 << 100, 0.1, None)",
        "assert f() == ({(2, 'b'), (1, 'a')}, b'\\0\\xff', 1 << 100, 0.1, None)",
    ),
    "types of the library": (
        "from collections import Counter, OrderedDict, deque\nfrom fractions import Fraction\nimport datetime\n"
        "f = lambda: [Counter('aab'), deque([1]), OrderedDict(a=1), Fraction(1, 3), datetime.datetime(2024, 2, 29, 1)]",
        "import datetime\nfrom fractions import Fraction\n"
        "assert f() == [{'a': 2, 'b': 1}, Counter and __import__('collections').deque([1]), {'a': 1}, Fraction(1, 3), "
        "datetime.datetime(2024, 2, 29, 1)]",
    ),
    "an argument that is changed": (
        "def f(rows):\n    rows.sort()\n    rows[0].append(9)\ndef g(d): d['b'] = d.pop('a')",
        "inner = [1]\nrows = [[2], inner]\nf(rows)\nassert rows == [[1, 9], [2]]\nd = {'a': 1}\ng(d)\n"
        "assert d == {'b': 1}",
    ),
    "functions and iterators that are handed over": (
        "def f(function, items): return [function(item) for item in items]",
        "seen = []\nassert f(lambda x: seen.append(x) or x + 1, (x for x in range(3))) == [1, 2, 3]\n"
        "assert seen == [0, 1, 2] and f(len, ['ab']) == [2] and f(str, [1]) == ['1']",
    ),
    "classes": (
        "import dataclasses\n@dataclasses.dataclass(order=True)\nclass Point:\n    x: int\n    y: int = 0\n"
        "    def __add__(self, other): return Point(self.x + other.x, self.y + other.y)\n"
        "    def __mul__(self, k): return Point(self.x * k, self.y * k)\n    __rmul__ = __mul__\n"
        "    def __abs__(self): return (self.x ** 2 + self.y ** 2) ** 0.5\n    def __len__(self): return 2\n"
        "    def __getitem__(self, i): return (self.x, self.y)[i]",
        "p = Point(3, y=4)\np.x += 0\nassert p == Point(3, 4) != Point(4, 3) and p < Point(4) and abs(p) == 5\n"
        "assert p + p == 2 * p == p * 2 and (p * 2).x == 6 and len(p) == 2 and p[1] == 4 and isinstance(p, Point)\n"
        "assert str(p) == 'Point(x=3, y=4)' and p != (3, 4)",
    ),
    "a tree that the test builds": (
        "class Node:\n    def __init__(self, v): self.v, self.left = v, None\n"
        "depth = lambda node: 1 + depth(node.left) if node else 0",
        "root = Node(1)\nroot.left = Node(2)\nroot.left.left = Node(3)\nassert depth(root) == 3 and root.left.v == 2",
    ),
    "a class of the test": (
        "def f(node):\n    node.next.v += 1\n    return node.next",
        "class Node:\n    def __init__(self, v, next=None): self.v, self.next = v, next\n"
        "last = Node(2)\nassert f(Node(1, last)) is last and last.v == 3",
    ),
    "classes of plain types": (
        "import collections, enum\nPair = collections.namedtuple('Pair', 'a b')\n"
        "class Colour(enum.IntEnum):\n    RED = 1\nf = lambda: Pair(1, 2)\ng = lambda: Colour.RED",
        "assert f() == (1, 2) and f().b == 2 and g() == 1 and g() + 1 == 2 and g() < 2 and g().name == 'RED'",
    ),
    "exceptions": (
        "class Empty(LookupError): pass\ndef f(x):\n    if x: raise Empty('nothing', x)\n    raise ValueError('zero')",
        "for x, kind in ((0, ValueError), (1, Empty), (2, LookupError)):\n    try: f(x)\n"
        "    except kind as error: assert error.args == (('nothing', x) if x else ('zero',))\n"
        "    else: raise AssertionError",
    ),
    "an import": ("def f(): return 1", "import program\nfrom program import f as g\nassert g() == program.f() == 1"),
    "a module of the program": (
        "import math, os.path as p",
        "assert math.isclose(1, 1 + 1e-12) and p.basename('a/b') == 'b'",
    ),
    "functions of the test": (
        "f = lambda x: x + 1",
        "def test(x):\n    return [f(y) for y in x]\nassert test([1]) == [2]",
    ),
}


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
    programs = REFUSED_BY_THE_KERNEL + (WITHOUT_RIGHTS if walls == "limits" else ENCLOSED)
    if os.getuid() and walls == "limits":  # there, the user's own identity is all that programs have
        programs = programs[:1] + programs[2:]
    verdicts = Sandbox(walls=walls).run([ProgramTests(program, ["pass"]) for program in programs])
    assert verdicts == [["passed"]] * len(programs)


def test_a_test_and_a_program_hand_each_other_values_objects_and_functions():
    jobs = [ProgramTests(program, [test]) for program, test in HONEST.values()]
    found = dict(zip(HONEST, Sandbox().run(jobs), strict=True))
    assert found == {key: ["passed"] for key in HONEST}


def test_tests_of_a_program_share_its_process_and_one_that_ends_it_costs_the_others_nothing():
    tests = ["assert pid() == mine"] * 20
    ends = ["while True: pass", "os._exit(0)", "open('/tmp/written', 'w')", "mine = 0", "assert mine != 0"]
    program = "import os\npid, mine, end = os.getpid, os.getpid(), os._exit"
    (verdicts,) = Sandbox(seconds=0.2, workers=1).run([ProgramTests(program, [*tests, *ends, "end(0)", *tests])])
    assert verdicts == ["passed"] * 20 + ["cpu", "error", "files", "passed", "passed", "error"] + ["passed"] * 20


def test_a_batch_has_a_budget_and_programs_that_wait_spend_their_own_share(caplog):
    waits = ProgramTests("import time\nf = time.sleep", ["f(60)"] * 3)
    right = ProgramTests("f = lambda x: x", ["assert f(2) == 2"])
    sandbox = Sandbox(batch_seconds=4, wall_seconds=60, workers=1)
    assert sandbox.run([waits, right]) == [["budget"] * 3, ["passed"]]
    assert "3 of 4 tests were not run to their end: the 4 s of the batch were spent." in caplog.text


def test_a_test_that_loops_by_itself_is_not_run_with_every_program():
    jobs = [ProgramTests(f"x = {i}", ["assert x >= 0", "while True: pass"], 1) for i in range(20)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    assert Sandbox(seconds=0.5, workers=1).run(jobs) == [["passed", "cpu"]] * 20
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 5  # of CPU time, where 20 times 0.5 are 10


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
        run_jobs([ProgramTests("", [""])], "limits", {"batch": 1.0})


def test_nothing_is_left_where_who_asked_is_killed(walls):
    job = "ProgramTests('import time', ['time.sleep(60)'])"
    code = f"from trlx_hybrid_cure.sandbox import *\nSandbox(walls={walls!r}, wall_seconds=60).run([{job}])"
    with subprocess.Popen([sys.executable, "-c", code]) as asking:
        end = time.monotonic() + 20
        while len(processes := psutil.Process(asking.pid).children(recursive=True)) < (4 if walls == "limits" else 5):
            assert time.monotonic() < end
            time.sleep(0.02)
        asking.kill()
    assert psutil.wait_procs(processes, timeout=5)[1] == []


def test_the_doctor_says_which_walls_there_are():
    assert plugin.trlx_doctor(None) == [Finding("sandbox", f"programs of CURE run behind {Sandbox().using}")]


def test_a_frame_that_is_too_large_is_told_from_an_end_of_the_connection():
    near, far = socket.socketpair()
    with near, far:
        far.send((wire.LARGEST + 1).to_bytes(8, "little"))
        with pytest.raises(EOFError, match=f"announced a frame of {wire.LARGEST + 1} bytes, and {wire.LARGEST} are"):
            wire.Channel(near.fileno()).receive()
        far.send((9).to_bytes(8, "little") + b"half")
        far.shutdown(socket.SHUT_WR)
        with pytest.raises(EOFError, match="was closed, and 5 bytes of a frame are missing"):
            wire.Channel(near.fileno()).receive()
