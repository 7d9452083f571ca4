"""Tools in processes: what comes back, what is lost and why, and that nothing is left behind."""

import ast
import contextlib
import ctypes
import dataclasses
import functools
import importlib
import importlib.util
import math
import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest
from trlx_hybrid.episodes.answers import UnshowableError
from trlx_hybrid.interprocess.remote_errors import RemoteError
from trlx_hybrid_multiturn.options import MultiTurnOptions
from trlx_hybrid_multiturn.tools.processes import ProcessWorkers
from trlx_hybrid_multiturn.tools.threads import ToolsUnavailableError

PATIENCE = 60  # seconds: nothing here takes long, unless the machine is busy


@pytest.fixture(scope="module")
def shared():
    """One pool for the tests that leave their worker as it was."""
    pool = ProcessWorkers(1)
    yield pool
    pool.close()


@pytest.fixture
def start():
    """Makes pools; at the end they are closed, and no process, zombie, thread or descriptor of theirs is left."""
    me = psutil.Process()
    children, threads, descriptors = set(me.children()), of_tools(), me.num_fds()
    pools = []

    def make(limit=1):
        pools.append(ProcessWorkers(limit))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
    until(lambda: set(me.children()) <= children)
    until(lambda: of_tools() <= threads)
    until(lambda: me.num_fds() <= descriptors)


def of_tools():
    """Threads of pools; libraries of other tests start some of their own at any time."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("tool")}


def until(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def gone(pid):
    """Ended. Its new parent may take its time to bury it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def call(pool, function, deadline=PATIENCE, **arguments):
    inbox = queue.Queue()
    pool.submit(function, arguments, inbox.put, deadline)
    return inbox.get(timeout=PATIENCE)


def value(pool, function, deadline=PATIENCE, **arguments):
    """What it returned, where the model can read that from the text it is shown."""
    return ast.literal_eval(call(pool, function, deadline, **arguments).value)


def add(a, b):
    return a + b


def pid():
    return os.getpid()


def sleep(seconds):
    time.sleep(seconds)


def test_a_call_returns_its_value_and_its_times(shared):
    def spin():
        end = time.process_time() + 0.06  # the clocks differ by a little
        while time.process_time() < end:
            pass
        return {"pid": os.getpid()}

    outcome = call(shared, spin)
    assert (outcome.error, outcome.lost) == (None, None)
    assert ast.literal_eval(outcome.value)["pid"] != os.getpid()
    assert outcome.seconds >= 0.05
    assert value(shared, add, deadline=math.inf, a=1, b=2) == 3
    assert value(shared, functools.partial(add, b=2), a=1) == 3


def test_a_worker_is_reused_and_keeps_its_functions(shared):
    def count(counter=[]):  # noqa: B006 - one list per copy of the function
        counter.append(0)
        return len(counter), os.getpid()

    first, second = value(shared, count), value(shared, count)
    assert (first[0], second[0]) == (1, 2)
    assert first[1] == second[1]


def test_more_functions_than_a_worker_keeps(shared):
    functions = [functools.partial(add, b=i) for i in range(80)]
    for order in (range(80), reversed(range(80))):
        for i in order:
            assert value(shared, functions[i], a=1) == 1 + i
    assert len(shared._pickled) <= 64


def test_a_worker_imports_nothing_by_itself(start):
    def loaded():
        return {name.split(".")[0] for name in sys.modules}, sys.stdin.read(), sys.argv[1:]

    modules, stdin, arguments = value(start(), loaded)
    heavy = {"torch", "numpy", "transformers", "trl", "vllm", "trlx_hybrid_multiturn"}
    assert not modules & heavy
    assert (stdin, arguments) == ("", [])


def test_the_limit_holds_and_calls_start_in_order(start):
    pool, inbox = start(limit=2), queue.Queue()
    spans = []

    def span():
        begin = time.monotonic()
        time.sleep(0.01)
        return begin, time.monotonic()

    for _ in range(20):
        pool.submit(span, {}, inbox.put, PATIENCE)
    spans = sorted(ast.literal_eval(inbox.get(timeout=PATIENCE).value) for _ in range(20))
    assert all(sum(b <= begin < e for b, e in spans) <= 2 for begin, _ in spans)
    one, order = start(limit=1), []
    for i in range(20):
        one.submit(add, {"a": i, "b": 0}, lambda o: (order.append(int(o.value)), inbox.put(o)), PATIENCE)
    for _ in range(20):
        inbox.get(timeout=PATIENCE)
    assert order == list(range(20))


def test_exceptions_come_back_with_their_text_and_where_they_were_raised(shared):
    def look_up(key):
        return {}[key]

    error = call(shared, look_up, key="x").error
    assert (type(error), str(error)) == (KeyError, "'x'")
    assert "in look_up" in error.__notes__[0]
    assert isinstance(call(shared, add, wrong=1).error, TypeError)


class NeedsTwo(Exception):
    def __init__(self, code, text):
        super().__init__(f"{code}: {text}")


class HoldsALock(Exception):
    lock = None


class Unprintable(Exception):
    def __str__(self):
        raise ValueError("no text")


def test_exceptions_come_back_as_data_and_stand_for_themselves_where_they_hold_more(shared):
    def raise_two():
        raise NeedsTwo(404, "not found")

    def raise_lock():
        error = HoldsALock("locked")
        error.lock = threading.Lock()
        raise error

    two, locked = call(shared, raise_two).error, call(shared, raise_lock).error
    assert str(two) == "404: not found"
    assert isinstance(locked, RemoteError)
    assert (str(locked), locked.kind) == ("locked", "HoldsALock")


def test_an_exception_without_a_text_and_those_that_end_programs(shared):
    def unprintable():
        raise Unprintable

    def leave():
        sys.exit(3)

    def interrupt():
        raise KeyboardInterrupt

    before = value(shared, pid)
    assert str(call(shared, unprintable).error) == "<Unprintable without a text>"
    assert isinstance(call(shared, leave).error, SystemExit)
    assert isinstance(call(shared, interrupt).error, KeyboardInterrupt)
    assert value(shared, pid) == before


class Point:
    def __init__(self, x):
        self.x = x

    def __str__(self):
        return f"point {self.x}"


def test_whatever_is_no_list_comes_back_as_its_text(shared):
    def move(point):
        return Point(point.x + 1)

    assert call(shared, move, point=Point(1)).value == "point 2"
    assert call(shared, lambda: 0.5).value == "0.5"
    assert call(shared, lambda: None).value == "None"


def test_a_result_without_a_text_cannot_be_shown(shared):
    class Silent:
        def __str__(self):
            raise ValueError("nothing to say")

    error = call(shared, lambda: Silent()).error
    assert isinstance(error, UnshowableError)
    assert str(error) == "the result, a Silent, cannot be turned into a string: ValueError: nothing to say"


def test_lists_come_back_as_they_are_with_their_images(shared):
    def search():
        from PIL import Image

        image = Image.new("RGB", (3, 2), (250, 4, 7))
        return [{"type": "image", "image": image}, {"type": "text", "text": "red"}, ("a", 1, None), 2.5, b"\x00"]

    block, *others = call(shared, search).value
    assert (block["image"].size, block["image"].getpixel((2, 1))) == ((3, 2), (250, 4, 7))
    assert others == [{"type": "text", "text": "red"}, ("a", 1, None), 2.5, b"\x00"]


def test_a_list_that_is_no_plain_data_is_lost_by_tool_and_type(shared):
    def generate():
        return [1, {"found": (i for i in range(3))}]

    outcome = call(shared, generate)
    assert outcome.lost == (
        "tool 'generate' returned a list, of which [1]['found'] is a generator, which cannot be sent from its process. "
        "Return plain data, or run it in threads."
    )
    assert outcome.error is None


def test_a_result_of_a_class_that_is_not_known_here_is_lost(shared):
    def make():
        @dataclasses.dataclass
        class OnlyThere:
            x: int

        return [OnlyThere(1)]

    before = value(shared, pid)
    assert "'make' returned a " in call(shared, make).lost
    assert value(shared, pid) == before


def raise_here():
    raise RuntimeError("only there")


class OnlyThere:
    def __reduce__(self):
        return raise_here, ()


def test_no_pickle_of_a_tool_is_opened_here(start, tmp_path):
    def answer(file):
        import gc
        import socket

        class Evil:
            def __reduce__(self):
                return file.write_text, ("opened",)

        channel = next(o for o in gc.get_objects() if isinstance(o, socket.socket))
        frame = sys._getframe()
        while "number" not in frame.f_locals:  # of this call
            frame = frame.f_back
        body = __import__("pickle").dumps(("value", Evil(), 0.0))
        channel.sendall(frame.f_locals["number"].to_bytes(8, "big") + len(body).to_bytes(8, "big") + body)
        time.sleep(1000)

    pool = start()
    before = value(pool, pid)
    assert "gave an answer that cannot be read" in call(pool, answer, file=tmp_path / "opened").lost
    assert not (tmp_path / "opened").exists()
    until(lambda: gone(before))


@pytest.mark.parametrize(
    ("folder", "package", "by_value"),
    [
        ("here", False, True),  # found or not by how the trainer was started
        ("here", True, False),
        ("elsewhere", False, False),
        ("elsewhere", True, False),
    ],
)
def test_modules_are_imported_where_any_process_would_find_them(
    start, tmp_path, monkeypatch, folder, package, by_value
):
    """A copy knows what has happened to its globals since they were imported; a module imported anew does not."""
    name = f"tools_{folder}_{package}".lower()
    (tmp_path / "here").mkdir()
    place = tmp_path / folder / name
    place.mkdir(parents=True)
    if package:
        (place / "__init__.py").touch()
    (place / "search.py").write_text("STATE = []\ndef tool(): return list(STATE)\n")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.syspath_prepend(tmp_path / folder)
    module = importlib.import_module(f"{name}.search")
    module.STATE.append("changed")
    assert call(start(), module.tool).value == (["changed"] if by_value else [])
    for loaded in (name, f"{name}.search"):
        del sys.modules[loaded]


def test_a_folder_by_the_name_of_a_module_is_not_taken_for_it(start, tmp_path, monkeypatch):
    (tmp_path / "odd_tools").mkdir()
    file = tmp_path / "somewhere.py"
    file.write_text("def tool(): return 'found'\n")
    spec = importlib.util.spec_from_file_location("odd_tools", file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "odd_tools", module)
    spec.loader.exec_module(module)
    monkeypatch.syspath_prepend(tmp_path)
    assert call(start(), module.tool).value == "found"


def test_large_arguments_and_results(shared):
    data = os.urandom(1 << 19).hex() * 50

    def turn(data):
        return data[: -(1 << 20) - 1 : -1]  # as much as is shown

    assert call(shared, turn, data=data).value == data[: -(1 << 20) - 1 : -1]


def test_prints_go_to_stderr_and_not_into_the_answer(start, capfd):
    def chat():
        print("printed")
        os.write(1, b"written\n")
        subprocess.run(["echo", "echoed"], check=True)
        print("unfinished", end="")
        return "answer"

    pool = start()
    assert call(pool, chat).value == "answer"
    pool.close()
    shown = capfd.readouterr()
    assert shown.out == ""
    assert shown.err == "printed\nwritten\nechoed\nunfinished"


def test_a_call_past_its_deadline_is_killed_with_all_it_started(start, tmp_path):
    file = tmp_path / "pid"

    def hang(file):
        child = subprocess.Popen(["sleep", "1000"])
        file.write_text(f"{os.getpid()} {child.pid}")
        child.wait()

    pool = start()
    before = value(pool, pid)
    lost = call(pool, hang, deadline=2.0, file=file)
    assert lost.lost == "tool 'hang' did not return within 2 s; its process was killed."
    assert lost.seconds >= 2.0
    processes = [int(number) for number in file.read_text().split()]
    assert processes[0] == before
    until(lambda: all(gone(process) for process in processes))
    assert value(pool, pid) != before


def test_a_tool_that_ignores_all_signals_is_killed_too(start):
    def deaf():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        while True:
            with contextlib.suppress(BaseException):
                time.sleep(1000)

    assert "was killed" in call(start(), deaf, deadline=0.1).lost


def test_a_deadline_leaves_out_the_start_and_the_imports(start, tmp_path, monkeypatch):
    (tmp_path / "slow_tool.py").write_text(
        "import os, time\nif str(os.getpid()) != os.environ['TRAINER']: time.sleep(3)\ndef tool(): return 'ready'\n"
    )
    monkeypatch.setenv("TRAINER", str(os.getpid()))
    monkeypatch.syspath_prepend(tmp_path)
    import slow_tool

    assert call(start(), slow_tool.tool, deadline=2.9).value == "ready"
    del sys.modules["slow_tool"]


def crash_by_segfault():
    ctypes.string_at(0)


def crash_by_kill():
    os.kill(os.getpid(), signal.SIGKILL)


def crash_by_exit():
    os._exit(3)


def crash_leaving_a_fork():
    if os.fork() == 0:  # holds the socket open
        time.sleep(1000)
    os.abort()


def close_everything():
    os.closerange(3, 1 << 16)
    time.sleep(1000)


@pytest.mark.parametrize(
    ("function", "cause"),
    [
        (crash_by_segfault, "crashed its process: SIGSEGV."),
        (crash_by_kill, "crashed its process: SIGKILL (as Linux does when memory runs out)."),
        (crash_by_exit, "ended its process: exit code 3."),
        (close_everything, "closed its process's connection to the trainer."),
    ],
)
def test_a_crash_loses_one_call_and_says_why(start, function, cause):
    pool = start()
    assert call(pool, function).lost == f"tool {function.__name__!r} {cause}"
    assert value(pool, add, a=1, b=2) == 3


def test_a_crash_behind_a_fork_is_seen_at_once(start):
    assert "crashed its process: SIGABRT" in call(start(), crash_leaving_a_fork, deadline=math.inf).lost


def test_a_worker_that_dies_idle_is_replaced_without_losing_a_call(start):
    pool = start()
    before = value(pool, pid)
    os.kill(before, signal.SIGKILL)
    until(lambda: gone(before))
    assert value(pool, pid) != before


def test_a_module_that_fails_to_import_there_is_named(start, tmp_path, monkeypatch):
    (tmp_path / "once_tool.py").write_text(
        "import os\nif str(os.getpid()) != os.environ['TRAINER']: raise ImportError('only in the trainer')\n"
        "def tool(): pass\n"
    )
    monkeypatch.setenv("TRAINER", str(os.getpid()))
    monkeypatch.syspath_prepend(tmp_path)
    import once_tool

    pool = start()
    for _ in range(2):
        lost = call(pool, once_tool.tool).lost
        assert "tool 'tool' cannot be loaded in a process of its own: ImportError: only in the trainer" in lost
    assert value(pool, add, a=1, b=2) == 3
    del sys.modules["once_tool"]


def test_arguments_that_cannot_be_sent_or_loaded(shared):
    assert "cannot be sent its arguments" in call(shared, add, a=threading.Lock(), b=1).lost
    assert "cannot be given its arguments in a process" in call(shared, add, a=OnlyThere(), b=1).lost
    assert value(shared, add, a=1, b=2) == 3


class Environment:
    def step(self):
        return 1

    @classmethod
    def make(cls):
        return 2


def test_functions_that_cannot_leave_are_refused_when_asked(shared):
    lock = threading.Lock()

    def locked():
        with lock:
            return 1

    async def later():
        return 1

    assert "'step' is a method of a Environment" in shared.refuses(Environment().step)
    assert "Run it in threads" in shared.refuses(functools.partial(Environment().step))
    assert "'locked' cannot be sent to a process (TypeError: cannot pickle" in shared.refuses(locked)
    assert "asynchronous" in shared.refuses(later)
    assert [shared.refuses(f) for f in (add, Environment.make, math.sqrt, lambda: 1, functools.partial(add, 1))] == (
        [None] * 5
    )
    with pytest.raises(ToolsUnavailableError, match="'step' is a method"):
        shared.submit(Environment().step, {}, print, 1)
    assert value(shared, Environment.make) == 2


def test_an_abandoned_call_ends_its_process_at_once(start):
    pool, inbox = start(), queue.Queue()
    before = value(pool, pid)
    running = pool.submit(sleep, {"seconds": 1000}, inbox.put, PATIENCE)
    waiting = pool.submit(sleep, {"seconds": 1000}, inbox.put, PATIENCE)
    until(lambda: pool.busy == 1)
    pool.abandon(waiting, "is not needed.")
    pool.abandon(running, "is not needed either.")
    assert [inbox.get(timeout=PATIENCE).lost for _ in range(2)] == [
        "tool 'sleep' is not needed.",
        "tool 'sleep' is not needed either.",
    ]
    until(lambda: gone(before))
    assert value(pool, pid) != before
    assert inbox.empty()


def test_closing_amid_calls(start):
    pool, inbox = start(limit=2), queue.Queue()
    for _ in range(4):
        pool.submit(sleep, {"seconds": 1000}, inbox.put, PATIENCE)
    until(lambda: pool.busy == 2)
    begin = time.monotonic()
    pool.close()  # one process may not even have started
    assert time.monotonic() - begin < 20
    lost = [inbox.get(timeout=PATIENCE).lost for _ in range(4)]
    assert sum("was not started: the workers were closed" in reason for reason in lost) == 2
    assert sum("still ran when the workers were closed" in reason for reason in lost) == 2
    pool.close()
    with pytest.raises(ToolsUnavailableError, match="closed"):
        pool.submit(add, {}, print, 1)


def test_a_tool_that_left_a_thread_behind_is_ended_by_close(start):
    def leave_a_thread():
        threading.Thread(target=time.sleep, args=(1000,)).start()

    pool = start()
    assert call(pool, leave_a_thread).error is None
    pool.close()


def test_two_hundred_calls_good_and_bad_leave_nothing(start):
    pool, inbox = start(limit=2), queue.Queue()
    me = psutil.Process()

    def tool(i):
        if i % 50 == 49:
            os._exit(i)
        if i % 5 == 4:
            raise ValueError(i)
        return i

    def round_of(count):
        outcomes = {}
        for i in range(count):
            pool.submit(tool, {"i": i}, lambda outcome, i=i: inbox.put((i, outcome)), PATIENCE)
        for _ in range(count):
            i, outcome = inbox.get(timeout=PATIENCE)
            outcomes[i] = outcome
        return outcomes

    round_of(10)
    threads, descriptors = len(of_tools()), me.num_fds()
    outcomes = round_of(200)
    for i, outcome in outcomes.items():
        if i % 50 == 49:
            assert outcome.lost == f"tool 'tool' ended its process: exit code {i}."
        elif i % 5 == 4:
            assert str(outcome.error) == str(i)
        else:
            assert outcome.value == str(i)
    assert len(of_tools()) <= threads + 1  # the second worker may not have been needed before
    until(lambda: me.num_fds() <= descriptors + 1)
    assert len(pool._free) <= 2


def script(tmp_path, body):
    """Run a user's script that asks for a pool at its top level, without a guard."""
    file = tmp_path / "script.py"
    file.write_text(
        "import os, sys, time, queue\nfrom trlx_hybrid_multiturn.tools.processes import ProcessWorkers\n"
        "print('script runs', flush=True)\nSCALE = 10\ndef helper(x): return SCALE * x\ndef tool(x): return helper(x)\n"
        "class Odd(Exception): pass\n"
        "def hang(): time.sleep(1000)\ninbox = queue.Queue()\npool = ProcessWorkers(1)\n" + textwrap.dedent(body)
    )
    return subprocess.Popen([sys.executable, str(file)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_scripts_functions_go_by_value_and_the_script_is_not_run_again(tmp_path):
    process = script(
        tmp_path,
        """
        def odd(): raise Odd("strange")
        pool.submit(tool, {"x": 4}, inbox.put, 60); print(inbox.get().value)
        pool.submit(odd, {}, inbox.put, 60); print(repr(inbox.get().error))
        """,  # without close: the end of the script is the end of the processes
    )
    out, err = process.communicate(timeout=PATIENCE)
    assert (out, err, process.returncode) == ("script runs\n40\nRemoteError('strange')\n", "", 0)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's part of it is Linux's")
@pytest.mark.parametrize("busy", [True, False])
def test_a_worker_ends_with_a_killed_trainer(tmp_path, busy):
    process = script(
        tmp_path,
        f"""
        pool.submit(os.getpid, {{}}, inbox.put, 60); print(inbox.get().value, flush=True)
        if {busy}: pool.submit(hang, {{}}, inbox.put, 60)
        while pool.busy < {int(busy)}: time.sleep(0.01)
        time.sleep(1000)
        """,
    )
    with process:
        assert process.stdout.readline() == "script runs\n"
        worker = int(process.stdout.readline())
        assert not gone(worker)
        process.kill()
    until(lambda: gone(worker))


def test_the_ranks_of_a_machine_share_its_cpus(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 96)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert MultiTurnOptions().max_processes == 96
    for ranks, processes in (("8", 12), ("128", 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert MultiTurnOptions().max_processes == processes
