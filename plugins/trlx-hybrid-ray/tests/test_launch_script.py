"""A script cannot tell that it was not started by `python script.py`."""

import json
import signal
import subprocess
import sys

import pytest

HOST = """
import json, sys
from trlx_hybrid_ray.launch.script import run_as_main
def failed(error): print("FAILED", type(error).__name__, file=sys.__stderr__)
sys.exit(run_as_main(sys.argv[1], sys.argv[2:], failed))
"""
SEEN = """
import json, multiprocessing, os, pickle, signal, sys
import neighbour
class Here: pass
def square(x): return x * x
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        squares = pool.map(square, [1, 2, 3])
    assert pickle.loads(pickle.dumps(Here())).__class__ is Here
    print(json.dumps({
        "argv": sys.argv, "file": __file__, "name": __name__, "package": __package__, "spec": repr(__spec__),
        "path": sys.path, "cwd": os.getcwd(), "squares": squares, "neighbour": neighbour.WORD,
        "main": sys.modules["__main__"].__dict__ is globals(), "annotations": __annotations__,
        "signals": [str(signal.getsignal(s)) for s in (signal.SIGTERM, signal.SIGINT)],
    }))
"""
ENDINGS = {
    "nothing": "print('bye')",
    "exit": "import sys; sys.exit()",
    "code": "import sys; sys.exit(3)",
    "large code": "import sys; sys.exit(259)",
    "message": "import sys; sys.exit('no data')",
    "error": "def f():\n    raise ValueError('bad\\nreward')\nf()",
    "chained": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('x') from e",
    "syntax": "x = = 1",
    "hook": "import sys\nsys.excepthook = lambda *e: print('hook', e[0].__name__)\nraise ValueError",
    "at exit": "import atexit; atexit.register(print, 'later'); 1 / 0",
    "thread": "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()",
}


def run(command, folder):
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=60)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def both(tmp_path):
    """How a script ends by itself, and how through us: exit code, output, errors; and what we were told of it."""

    def compare(text, *arguments):
        (tmp_path / "sub").mkdir()
        (tmp_path / "sub" / "script.py").write_text(text)
        (tmp_path / "sub" / "neighbour.py").write_text("WORD = 'hello'")
        alone = run([sys.executable, "sub/script.py", *arguments], tmp_path)
        ours = run([sys.executable, "-c", HOST, "sub/script.py", *arguments], tmp_path)
        told = [line for line in ours[2].splitlines() if line.startswith("FAILED")]
        return alone, (*ours[:2], "".join(line for line in ours[2].splitlines(True) if line[:6] != "FAILED")), told

    return compare


@pytest.fixture(autouse=True)
def interruptible():
    """A process that was started in the background ignores SIGINT, and so do its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_it_sees_what_it_would_see_by_itself(both):
    alone, ours, told = both(SEEN, "--lr", "1e-3")
    assert alone[0] == ours[0] == 0, ours[2]
    assert told == []
    one, other = json.loads(alone[1]), json.loads(ours[1])
    assert other.pop("path")[: len(one["path"])] == one.pop("path")
    assert other == one


@pytest.mark.parametrize("ending", ENDINGS)
def test_it_ends_as_it_would_by_itself(both, ending):
    alone, ours, told = both(ENDINGS[ending])
    assert ours == alone
    kinds = {"error": "ValueError", "chained": "KeyError", "syntax": "SyntaxError", "hook": "ValueError"}
    kinds["at exit"] = "ZeroDivisionError"
    assert told == ([f"FAILED {kinds[ending]}"] if ending in kinds else [])
