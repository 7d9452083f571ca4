"""The tool calls of one turn: what TRL's own loop makes of them, wherever they run, and what ends a trajectory."""

import asyncio
import contextlib
import contextvars
import dataclasses
import gc
import inspect
import os
import random
import signal
import sqlite3
import threading
import time
import types
import warnings
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import trl
from trlx_hybrid.contract.conversation import Conversation, Dialogue, Limits
from trlx_hybrid.contract.types import Completion
from trlx_hybrid.errors import ConfigError
from trlx_hybrid_multiturn.environment import CheckedEnvironment, Step
from trlx_hybrid_multiturn.episode import ToolEpisode
from trlx_hybrid_multiturn.loop import Loop, OutOfTimeError
from trlx_hybrid_multiturn.multi_turn import MultiTurn
from trlx_hybrid_multiturn.options import MultiTurnOptions
from trlx_hybrid_multiturn.progress import heavy_tools
from trlx_hybrid_multiturn.tool_calls import LostCallError, run_calls
from trlx_hybrid_multiturn.tools import runner as runner_module
from trlx_hybrid_multiturn.tools.runner import ToolRunner, bound_to_a_thread
from trlx_hybrid_multiturn.tools.threads import ToolsUnavailableError

PATIENCE = 60  # seconds: nothing here takes long, unless the machine is busy
SHORT = 2.0  # seconds that a call may take beside one that hangs: nothing else takes that long
VARIABLE = contextvars.ContextVar("VARIABLE", default="unset")


class Idle:
    """An engine with nothing to do, and what is told about it."""

    shared = busy = False

    def step(self, more):
        return [], more

    def moved(self, *numbers):
        pass


@pytest.fixture(scope="module")
def pool():
    """ToolRunner per set of options, kept for the module; at the end nothing of theirs is left."""
    me = psutil.Process()
    children, threads = set(me.children(recursive=True)), of_tools()
    made = {}

    def make(**given):
        key = repr(sorted(given.items()))
        if key not in made:
            made[key] = ToolRunner(MultiTurnOptions(**{"max_processes": 2, "tool_timeout": PATIENCE, **given}))
        return made[key]

    yield make
    for runner in made.values():
        runner.close()
    until(lambda: of_tools() <= threads and set(me.children(recursive=True)) <= children)


def of_tools():
    """Threads of pools and of their event loops; libraries of other tests start some of their own at any time."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("tool")}


def until(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, (threading.enumerate(), psutil.Process().children(recursive=True))
        time.sleep(0.01)


@contextlib.contextmanager
def nothing_left_unawaited():
    """Every coroutine that is made meanwhile is awaited or closed."""
    gc.collect()  # those of other tests speak up before
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
        gc.collect()
    assert [str(w.message) for w in caught if "never awaited" in str(w.message)] == []


@pytest.fixture
def event_loop():
    """A trainer's, in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop, thread
    loop.call_soon_threadsafe(loop.stop)
    thread.join(PATIENCE)
    assert not thread.is_alive()
    loop.close()


def dialogue(tools, event_loop=None):
    asynchronous = {f.__name__: f for f in tools if asyncio.iscoroutinefunction(f)}
    synchronous = {f.__name__: f for f in tools if f.__name__ not in asynchronous}
    return Dialogue(
        prompt_ids=[1],
        parse=None,
        observe=None,
        sync_tools=synchronous,
        async_tools=asynchronous,
        event_loop=event_loop,
    )


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def run_many(runner, batches, tools, event_loop=None, seconds=None):
    """One trajectory per list of calls, all at once: (messages or what ended it, conversation) of each."""
    found = [(None, Conversation()) for _ in batches]

    async def one(i):
        conversation = found[i][1]
        try:
            messages = await run_calls(batches[i], dialogue(tools, event_loop), conversation, runner)
        except LostCallError as lost:
            messages = str(lost)
        found[i] = messages, conversation

    Loop(Idle(), Idle(), width=len(batches), seconds=seconds).run([one(i) for i in range(len(batches))])
    return found


def run(runner, calls, tools, **given):
    return run_many(runner, [calls], tools, **given)[0]


def stock(calls, tools, event_loop):
    """Messages, calls and failures, of TRL's own loop: each result is too long for it, so it ends after one turn."""
    seen = []

    def suffix(messages):
        seen.extend(messages)
        return [0] * 10

    ours = dialogue(tools)
    trainer = types.SimpleNamespace(
        max_tool_calling_iterations=1,
        _sync_tool_dicts=[ours.sync_tools],
        _async_tool_dicts=[ours.async_tools],
        async_loop=event_loop,
        _get_tool_suffix_ids=suffix,
        max_completion_length=5,
        use_vllm=False,
        _is_vlm=False,
        model=types.SimpleNamespace(config=types.SimpleNamespace(max_position_embeddings=100)),
    )
    completions = [[{"role": "assistant", "content": "", "tool_calls": calls}]]
    loop = trl.GRPOTrainer._tool_call_loop
    done = loop(trainer, [[{"role": "user", "content": ""}]], [[1]], [[2]], completions, [[0.0]], None, {})
    return seen, *done[4:6]


# --- tools ------------------------------------------------------------------------------------------------------------


class Point:
    def __str__(self):
        return "a point"


class Peculiar(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


class Unprintable:
    def __str__(self):
        raise RuntimeError("no text")


class Silent(Exception):
    def __str__(self):
        raise RuntimeError("no text")


VALUES = {
    "none": None,
    "dict": {"a": [1, "b"]},
    "list": [1, "b"],
    "blocks": [{"type": "text", "text": "shown"}],
    "tuple": ([], 2),
    "bytes": b"\xff",
    "error": ValueError("returned, not raised"),
    "text": "ünï",
    "empty": "",
}
ERRORS = {
    "value": lambda: ValueError("wrong"),
    "key": lambda: KeyError("key"),
    "empty": lambda: RuntimeError(),
    "lines": lambda: OSError(2, "line\nline"),
    "peculiar": lambda: Peculiar("one", "two"),
    "stop": lambda: StopIteration("stopped"),
    "timeout": lambda: TimeoutError("mine"),
}


def add(a: int, b: int) -> int:
    return a + b


def give(what):
    return Point() if what == "point" else VALUES[what]


def fail(how):
    raise ERRORS[how]()


async def fetch(what):
    await asyncio.sleep(0)
    return Point() if what == "point" else VALUES[what]


async def break_off(how):
    await asyncio.sleep(0)
    raise ERRORS[how]()


TOOLS = (add, give, fail, fetch, break_off)
CALLS = [
    call("add", a=1, b=2),
    call("add", a="x", b=2),
    call("add", a=1),
    call("add", a=1, b=2, c=3),
    call("fetch", wrong=1),
    call("nothing", a=1),
    {"type": "function", "function": {"name": "add", "arguments": "text"}},
    {"type": "function", "function": {"name": "fetch", "arguments": [1]}},
    {"type": "other", "name": "add"},
    {"type": "other"},
    *(call(tool, what=what) for tool in ("give", "fetch") for what in [*VALUES, "point"]),
    *(call(tool, how=how) for tool in ("fail", "break_off") for how in ERRORS),
]


@pytest.mark.parametrize("mode", ["thread", "process", "main"])
def test_messages_and_counts_are_those_of_trls_loop(pool, event_loop, mode):
    """Every call alone, and many mixed turns of several: sync and async, with results and errors of every kind."""
    draw = random.Random(0)
    batches = [[each] for each in CALLS] + [draw.choices(CALLS, k=draw.randint(2, 6)) for _ in range(60)]
    ours = run_many(pool(tools=mode), batches, TOOLS, event_loop[0])
    for calls, (messages, conversation) in zip(batches, ours, strict=True):
        theirs = stock(calls, TOOLS, event_loop[0])
        assert (messages, conversation.calls, conversation.failed_calls) == theirs, calls
    assert sum(conversation.failed_calls > 0 for _, conversation in ours) > 40


@pytest.mark.parametrize("mode", ["thread", "main"])
def test_synchronous_calls_follow_each_other_and_asynchronous_ones_come_last_together(pool, mode):
    log, met = [], asyncio.Event()

    def first():
        log.append("first starts")
        time.sleep(0.02)
        log.append("first ends")

    def second():
        log.append("second")

    async def waits():
        log.append("waits starts")
        await asyncio.wait_for(met.wait(), PATIENCE)
        log.append("waits ends")

    async def meets():
        log.append("meets")
        met.set()

    calls = [call("waits"), call("first"), call("meets"), call("second"), call("nothing"), call("first")]
    messages, conversation = run(pool(tools=mode), calls, [first, second, waits, meets])
    in_order = ["first starts", "first ends", "second", "first starts", "first ends"]
    assert log == [*in_order, "waits starts", "meets", "waits ends"]
    assert [m["name"] for m in messages] == ["first", "second", "nothing", "first", "waits", "meets"]
    assert (conversation.calls, conversation.failed_calls) == (6, 1)


def test_calls_of_different_trajectories_run_at_once(pool):
    barrier = threading.Barrier(8)

    def meet():
        return barrier.wait(PATIENCE)

    found = run_many(pool(), [[call("meet")]] * 8, [meet])
    assert sorted(messages[0]["content"] for messages, _ in found) == [str(i) for i in range(8)]


def test_modes_are_chosen_by_name(pool):
    def where():
        return f"{os.getpid()} {threading.get_ident()}"

    there = types.FunctionType(where.__code__, globals(), "there")
    here = types.FunctionType(where.__code__, globals(), "here")
    runner = pool(tools="main", tool_modes={"there": "process", "where": "thread"})
    messages, _ = run(runner, [call("here"), call("where"), call("there")], [here, where, there])
    (pid, thread), (thread_pid, other), (child, _) = [m["content"].split() for m in messages]
    assert (int(pid), int(thread)) == (os.getpid(), threading.get_ident())
    assert (int(thread_pid), int(other) != threading.get_ident()) == (os.getpid(), True)
    assert int(child) != os.getpid()
    assert [runner.mode(name) for name in ("here", "where", "there")] == ["main", "thread", "process"]


def test_tools_see_the_context_of_the_trainers_thread(pool):
    def sync():
        return VARIABLE.get()

    async def later():
        return VARIABLE.get()

    token = VARIABLE.set("set")
    try:
        for mode in ("thread", "main"):
            messages, _ = run(pool(tools=mode), [call("sync"), call("later")], [sync, later])
            assert [m["content"] for m in messages] == ["set", "set"]
    finally:
        VARIABLE.reset(token)


def test_asynchronous_tools_run_on_the_trainers_loop_or_on_one_of_our_own(pool, event_loop):
    async def where():
        return threading.get_ident()

    on_theirs, _ = run(pool(), [call("where")], [where], event_loop=event_loop[0])
    assert int(on_theirs[0]["content"]) == event_loop[1].ident
    alone, again = (run(pool(), [call("where")], [where])[0][0]["content"] for _ in range(2))
    assert alone == again
    assert int(alone) not in (event_loop[1].ident, threading.get_ident())


def test_asynchronous_calls_take_turns(pool, event_loop):
    """At most so many at once, over all trajectories, and each in the order in which it was called."""
    now, most, order = 0, 0, []

    async def work(n):
        nonlocal now, most
        order.append(n)
        now += 1
        most = max(most, now)
        while most < 3:  # until as many are here as may be
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.002)
        now -= 1
        return n

    batches = [[call("work", n=2 * i), call("add", a=i, b=i), call("work", n=2 * i + 1)] for i in range(12)]
    found = run_many(pool(max_tools=3), batches, [work, add], event_loop[0])
    for i, (messages, _) in enumerate(found):
        assert [m["content"] for m in messages] == [str(2 * i), str(2 * i), str(2 * i + 1)]
    assert most == 3
    assert [n for n in order if n % 2] == [n + 1 for n in order if n % 2 == 0]


def test_the_time_of_an_asynchronous_call_begins_with_its_turn(pool, monkeypatch):
    """Eight calls one after another take longer together than any may, and none is lost."""
    monkeypatch.setattr(runner_module, "GRACE", 0.1)

    async def work(n):
        await asyncio.sleep(0.5)
        return n

    found = run_many(pool(max_tools=1, tool_timeout=3.5), [[call("work", n=n)] for n in range(8)], [work])
    assert [messages[0]["content"] for messages, _ in found] == [str(n) for n in range(8)]


def test_calls_whose_turn_never_came_are_closed_and_hold_nothing(pool, event_loop):
    started, ended = [], []

    async def stuck(n):
        started.append(n)
        try:
            await asyncio.sleep(1000)
        finally:
            ended.append(n)

    async def one(n):
        with pytest.raises(OutOfTimeError):
            await run_calls([call("stuck", n=n)], dialogue([stuck], event_loop[0]), Conversation(), runner)

    runner = pool(max_tools=2)
    with nothing_left_unawaited():
        Loop(Idle(), Idle(), width=5, seconds=SHORT).run([one(n) for n in range(5)])
        fetches = [[call("fetch", what="text")] * 3] * 3  # more than there are turns
        assert all(len(messages) == 3 for messages, _ in run_many(runner, fetches, [fetch], event_loop[0]))
    assert started[:2] == [0, 1]
    assert sorted(ended) == started  # a third may have begun when the first was given up, but not for long
    assert runner.running() == []


# --- what belongs to the main thread ----------------------------------------------------------------------------------


def by_alarm():
    """As TRL's own example guards its query."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(0)
    return "found"


def wrapped():
    """As math-verify says it."""
    try:
        return by_alarm()
    except ValueError as error:
        raise ValueError("does not support threads") from error


class Database:
    """As TRL makes an environment: in the trainer's thread."""

    def __init__(self):
        self.connection = sqlite3.connect(":memory:")
        self.threads = []

    def count(self):
        self.threads.append(threading.get_ident())
        return str(self.connection.execute("select 1").fetchall())


def test_a_tool_that_cannot_work_in_a_thread_moves_to_the_trainers_and_says_so_once(caplog):
    database, runner = Database(), ToolRunner(MultiTurnOptions(tool_modes={"wrapped": "thread"}))
    calls = [call("by_alarm"), call("wrapped"), call("count"), call("add", a=1, b=2)]
    for _ in range(2):
        for messages, conversation in run_many(runner, [calls] * 3, [by_alarm, wrapped, database.count, add]):
            assert [m["content"] for m in messages] == ["found", "found", "[(1,)]", "3"]
            assert conversation.failed_calls == 0
    assert set(database.threads[-3:]) == {threading.get_ident()}
    assert [runner.mode(name) for name in ("by_alarm", "wrapped", "count", "add")] == ["main"] * 3 + ["thread"]
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == 3
    assert any("'count' cannot run in a thread" in w and "{'tool_modes': {'count': 'main'}}" in w for w in warned)
    runner.close()


WRITTEN = {  # by the model
    "pretends": "raise ValueError('signal only works in main thread of the main interpreter')",
    "means it": "import signal\nsignal.signal(signal.SIGALRM, signal.SIG_DFL)",
    "knows": "import sqlite3\nraise sqlite3.ProgrammingError('can only be used in that same thread')",
}


@pytest.mark.parametrize("code", WRITTEN.values(), ids=WRITTEN)
def test_an_error_of_code_that_the_model_wrote_moves_no_tool(pool, code):
    made, runner = [], pool()

    def run_code(code):
        made.append(code)
        exec(code, {})

    def run_and_say(code):
        try:
            run_code(code)
        except Exception as error:
            raise RuntimeError(f"There is no current event loop in thread 'x', said {code}") from error

    calls = [call("run_code", code=code), call("run_and_say", code=code)]
    _, conversation = run(runner, calls, [run_code, run_and_say])
    assert conversation.failed_calls == 2
    assert len(made) == 2
    assert [runner.mode(name) for name in ("run_code", "run_and_say")] == ["thread"] * 2


def test_a_tool_that_was_typed_in_moves_as_one_of_a_file_does():
    typed = {}
    exec(compile(f"import signal\n{inspect.getsource(by_alarm)}", "<stdin>", "exec"), typed)
    runner = ToolRunner(MultiTurnOptions())
    assert run(runner, [call("by_alarm")], [typed["by_alarm"]])[0][0]["content"] == "found"
    assert runner.mode("by_alarm") == "main"
    runner.close()


@pytest.mark.parametrize("bound", [asyncio.get_event_loop, by_alarm, wrapped, Database().count])
def test_what_libraries_raise_in_a_thread_that_is_not_theirs_is_known(bound):
    with ThreadPoolExecutor(1) as pool:
        assert "thread" in bound_to_a_thread(pool.submit(bound).exception())


def test_a_tool_that_can_work_in_no_thread_stops_the_run(gate):
    """Its connection was made in a thread, which still lives, and no other may use it."""
    made, ready, runner = [], threading.Event(), ToolRunner(MultiTurnOptions())

    def connect():
        made.append(Database())
        ready.set()
        gate.wait()

    def count():
        return made[0].count()

    threading.Thread(target=connect, daemon=True).start()
    assert ready.wait(PATIENCE)
    with pytest.raises(ConfigError, match=r"'count' works neither in a thread .*SQLite objects .*'tools': 'main'"):
        run(runner, [call("count")], [count])
    runner.close()


def test_in_the_trainers_thread_a_tool_shows_what_it_raises_as_in_trl():
    """Also where that speaks of threads: it is there by the user's choice, or has worked there."""

    def run_code(code):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        if code == "bad":
            raise RuntimeError("There is no current event loop in thread 'MainThread'.")
        return "ran"

    chosen, moved = ToolRunner(MultiTurnOptions(tools="main")), ToolRunner(MultiTurnOptions())
    assert run(moved, [call("run_code", code="good")], [run_code])[0][0]["content"] == "ran"
    for runner in (chosen, moved):
        messages, conversation = run(runner, [call("run_code", code="bad")], [run_code])
        assert messages[0]["content"] == str({"error": "There is no current event loop in thread 'MainThread'."})
        assert conversation.failed_calls == 1
        runner.close()


@pytest.mark.parametrize("tools", ["thread", "main"])
def test_an_environment_that_needs_the_main_thread_gets_it(tools):
    """One that scores by a timeout of `signal`; with "main", one that keeps a connection as well."""

    class Scoring:
        def __init__(self):
            self.database = Database() if tools == "main" else None

        def reset(self, row):
            return str(self.database.count()) if self.database else None

        def step(self, completion):
            return Step(observation=by_alarm(), reward=float(threading.current_thread() is threading.main_thread()))

    runner, steps = ToolRunner(MultiTurnOptions(tools=tools)), []
    watch = types.SimpleNamespace(seconds=1e-9, inflation=lambda: None)  # everything is heavy

    async def one():
        player = CheckedEnvironment(Scoring, runner, None)
        await player.reset({})
        steps.append(await player.step(""))

    Loop(Idle(), Idle(), width=4).run([one() for _ in range(4)])
    assert steps == [Step(observation="found", reward=1.0)] * 4
    assert runner.usage["Scoring.step"].cpu_seconds > 0
    assert heavy_tools(runner.usage, watch, runner) == {}  # none runs in a thread
    runner.close()


def test_what_calls_took_is_counted_by_tool(pool):
    def work():
        end = time.thread_time() + 0.06  # the clocks differ by a little
        while time.thread_time() < end:
            pass

    async def sleep():
        await asyncio.sleep(0.05)

    runner = pool(tool_timeout=PATIENCE - 1)
    run(runner, [call("work"), call("sleep"), call("work"), call("nothing")], [work, sleep])
    assert {name: use.calls for name, use in runner.usage.items()} == {"work": 2, "sleep": 1}
    assert runner.usage["work"].cpu_seconds >= 0.1
    assert 0.1 <= runner.usage["work"].seconds < PATIENCE
    assert runner.usage["sleep"].slowest >= 0.04
    assert runner.usage["sleep"].cpu_seconds == 0
    assert runner.running() == []


# --- what ends a trajectory -------------------------------------------------------------------------------------------


def unprintable():
    return Unprintable()


def silent():
    raise Silent


def leave():
    raise SystemExit(3)


def interrupt():
    raise KeyboardInterrupt("stop")


async def unprintable_later():
    return Unprintable()


async def silent_later():
    raise Silent


async def leave_later():
    raise SystemExit(3)


async def interrupt_later():
    raise KeyboardInterrupt("stop")


async def cancelled_later():
    raise asyncio.CancelledError


class LostError(asyncio.CancelledError):
    """As a remote environment raises it."""


async def lost_later():
    raise LostError("its worker died")


@pytest.mark.parametrize("mode", ["thread", "process", "main"])
def test_a_result_without_a_text_is_shown_as_an_error(pool, mode):
    """The model may have written what was run."""
    calls = [call("add", a=1, b=2), call("unprintable"), call("add", a=1, b=2)]
    messages, conversation = run(pool(tools=mode), calls, [add, unprintable])
    cannot = "the result, a Unprintable, cannot be turned into a string: RuntimeError: no text"
    assert [m["content"] for m in messages] == ["3", str({"error": cannot}), "3"]
    assert (conversation.calls, conversation.failed_calls) == (3, 1)


@pytest.mark.parametrize("mode", ["thread", "main"])
def test_an_error_without_a_text_is_shown_by_its_name(pool, mode):
    messages, conversation = run(pool(tools=mode), [call("silent")], [silent])
    assert messages[0]["content"] == str({"error": "Silent, whose text cannot be made: RuntimeError"})
    assert conversation.failed_calls == 1


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_a_tool_that_wants_to_exit_is_shown_as_an_error(pool, mode):
    """The model may have written what was run."""
    messages, conversation = run(
        pool(tools=mode), [call("leave"), call("interrupt"), call("add", a=1, b=2)], [leave, interrupt, add]
    )
    errors = [str({"error": text}) for text in ("SystemExit: 3", "KeyboardInterrupt: stop")]
    assert [m["content"] for m in messages] == [*errors, "3"]
    assert (conversation.calls, conversation.failed_calls) == (3, 2)


@pytest.mark.parametrize(("tool", "raised"), [(leave, SystemExit), (interrupt, KeyboardInterrupt)])
def test_in_the_trainers_thread_wanting_to_exit_is_the_users_own(pool, tool, raised):
    with pytest.raises(raised):
        run(pool(tools="main"), [call(tool.__name__)], [tool])


def test_what_goes_wrong_on_the_event_loop_ends_one_trajectory_at_most_and_never_the_loop(pool, event_loop):
    tools = [unprintable_later, silent_later, leave_later, interrupt_later, cancelled_later, lost_later, fetch]
    batches = [[call("fetch", what="text"), call(tool.__name__)] for tool in tools[:-1]]
    found = run_many(pool(), [*batches, [call("fetch", what="text")]], tools, event_loop[0])
    assert [messages if isinstance(messages, str) else messages[1]["content"] for messages, _ in found[:-1]] == [
        "{'error': 'the result, a Unprintable, cannot be turned into a string: RuntimeError: no text'}",
        "{'error': 'Silent, whose text cannot be made: RuntimeError'}",
        "{'error': 'SystemExit: 3'}",
        "{'error': 'KeyboardInterrupt: stop'}",
        "tool 'cancelled_later' was cancelled, by itself or by something else.",
        "tool 'lost_later' raised LostError: its worker died.",
    ]
    assert found[-1][0][0]["content"] == VALUES["text"]
    assert event_loop[1].is_alive()


def test_a_call_past_its_deadline_is_shown_as_an_error(pool, gate):
    cancelled = []

    def stuck():
        gate.wait()

    async def stuck_later():
        try:
            await asyncio.sleep(1000)
        finally:
            cancelled.append(True)

    async def stubborn():
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            cancelled.append(True)

    batches = [[call(name)] for name in ("stuck", "stuck_later", "stubborn")]
    batches.append([call("fetch", what="text"), call("stuck_later"), call("add", a=1, b=2)])
    runner = pool(tool_timeout=SHORT)
    found = run_many(runner, batches, [stuck, stuck_later, stubborn, fetch, add])
    hung = "tool {!r} did not return within 2 s; {}."
    how = {"stuck": "its thread hangs", "stuck_later": "it was cancelled", "stubborn": "it was cancelled"}
    errors = [str({"error": hung.format(name, what)}) for name, what in how.items()]
    assert [[m["content"] for m in messages] for messages, _ in found] == [
        *([error] for error in errors),
        ["3", VALUES["text"], errors[1]],
    ]
    assert [(conversation.calls, conversation.failed_calls) for _, conversation in found] == [(1, 1)] * 3 + [(3, 1)]
    assert sum(use.cut_off for use in runner.usage.values()) == 4
    until(lambda: len(cancelled) == 3)


def test_an_environment_is_left_alone_while_a_call_of_it_hangs(gate):
    """Its calls follow each other, and what hangs may go on at any time. No other row gets it either."""

    class Slow:
        def hang(self):
            gate.wait()

        def look(self):
            return "seen"

    runner, slow, other = ToolRunner(MultiTurnOptions(tool_timeout=SHORT)), Slow(), Slow()
    contents, discarded, conversation = [], [], Conversation()

    async def turn(calls, environment):
        given = Dialogue(
            prompt_ids=[1],
            parse=None,
            observe=None,
            sync_tools={"hang": environment.hang, "look": environment.look},
            async_tools={},
            environment=environment,
            discard=lambda: discarded.append(environment),
        )
        contents.extend(m["content"] for m in await run_calls(calls, given, conversation, runner))

    def turns(*each):
        contents.clear()
        Loop(Idle(), Idle(), width=1).run([turn(*given) for given in each])
        return contents

    hung, busy, seen = turns(([call("hang"), call("look")], slow), ([call("look")], other))
    assert "'hang' did not return within 2 s" in hung
    assert busy == "{'error': 'look was not called: an earlier call is still running.'}"
    assert (seen, discarded, conversation.failed_calls) == ("seen", [slow], 2)
    gate.set()
    until(lambda: turns(([call("look")], slow)) == ["seen"])
    runner.close()


def test_an_interrupt_parts_with_an_environment_whose_call_still_runs(pool, gate):
    """In a notebook the next `train()` would give it to another row."""

    class Slow:
        def hang(self):
            gate.wait()

    async def interrupted():
        raise KeyboardInterrupt

    environment, discarded = Slow(), []
    dialogue = Dialogue(
        prompt_ids=[1],
        parse=lambda ids, before: {"role": "assistant", "tool_calls": [call("hang")]},
        observe=None,
        sync_tools={"hang": environment.hang},
        async_tools={},
        first=Completion(token_ids=[2]),
        environment=environment,
        discard=lambda: discarded.append(environment),
    )
    limits = Limits(completion_tokens=9, model_tokens=9, tool_turns=1)
    episode = ToolEpisode(0, dialogue, limits, None, pool(), None)
    with pytest.raises(KeyboardInterrupt):
        Loop(Idle(), Idle(), width=2).run([episode.run(), interrupted()])
    gate.set()
    assert discarded == [environment]


def spin():
    while True:
        pass


def crash():
    os._exit(7)


def segfault():
    os.kill(os.getpid(), signal.SIGSEGV)


def test_an_object_that_all_rows_share_answers_others_while_a_call_of_it_hangs(gate):
    """As a client whose methods are tools. It is no row's environment."""

    class Client:
        def open(self, page):
            if page == "slow":
                gate.wait()
            return page

    runner, opened = ToolRunner(MultiTurnOptions(tool_timeout=SHORT)), Client().open
    hung, _ = run(runner, [call("open", page="slow")], [opened])
    assert "'open' did not return within 2 s" in hung[0]["content"]
    messages, conversation = run(runner, [call("open", page="quick")], [opened])
    assert (messages[0]["content"], conversation.failed_calls) == ("quick", 0)
    runner.close()


def test_a_process_that_hangs_or_crashes_is_shown_as_an_error(pool):
    runner = pool(tools="process", tool_timeout=SHORT)
    batches = [[call("spin")], [call("crash")], [call("segfault")], [call("add", a=1, b=2)]]
    found = run_many(runner, batches, [spin, crash, segfault, add])
    shown = [messages[0]["content"] for messages, _ in found]
    assert "tool 'spin' did not return within 2 s" in shown[0]
    assert "tool 'crash' ended its process: exit code 7." in shown[1]
    assert "SIGSEGV" in shown[2]
    assert [conversation.failed_calls for _, conversation in found] == [1, 1, 1, 0]
    assert run(runner, [call("add", a=1, b=2)], [add])[0][0]["content"] == "3"


def test_a_coroutine_that_blocks_its_loop_is_given_up(pool, monkeypatch, gate):
    """Nothing on that loop can report any more, so the trainer's side stops waiting; what it queued is not leaked."""
    monkeypatch.setattr(runner_module, "GRACE", 0.1)
    runner, blocked = ToolRunner(MultiTurnOptions(tool_timeout=SHORT)), threading.Event()

    async def block():
        blocked.set()
        gate.wait()

    def see_it_blocked():
        return blocked.wait()

    with nothing_left_unawaited():
        # One beside it in the same turn, and one of another trajectory that the loop never gets to.
        batches = [[call("block"), call("fetch", what="text")], [call("see_it_blocked"), call("fetch", what="text")]]
        found = run_many(runner, batches, [block, fetch, see_it_blocked])
        reason = "never reported, not even that its time is over: it blocks the event loop it runs on."
        assert found[0][0] == f"tool 'block, fetch' {reason}"
        assert found[1][0] == f"tool 'fetch' {reason}"
        gate.set()
        assert run(runner, [call("fetch", what="text")], [fetch])[0][0]["content"] == VALUES["text"]
        runner.close()


def test_a_coroutine_whose_turn_never_comes_is_closed(pool):
    def cancelled():
        raise asyncio.CancelledError("the loop has gone")

    with nothing_left_unawaited():
        lost, _ = run(pool(), [call("fetch", what="text"), call("cancelled")], [fetch, cancelled])
        assert lost == "tool 'cancelled' raised CancelledError: the loop has gone."


def test_too_many_hanging_threads_stop_the_run(gate):
    def stuck():
        gate.wait()

    runner = ToolRunner(MultiTurnOptions(tool_timeout=0.05, max_hung=1))
    for _ in range(2):
        assert "its thread hangs" in run(runner, [call("stuck")], [stuck])[0][0]["content"]
    with pytest.raises(ToolsUnavailableError, match="2 tool threads hang at once, 1 may: 'stuck'"):
        run(runner, [call("stuck")], [stuck])
    runner.close()


# --- what is refused before anything is sampled -----------------------------------------------------------------------


class Counter:
    def count(self):
        return 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tool_modes": {"ad": "process"}}, r"names 'ad', .*Did you mean 'add'\? Tools: add, count, give\."),
        ({"tool_modes": {"zzzzzz": "main"}}, r"names 'zzzzzz', .* run\. Tools: add, count, give\."),
        ({"tools": "process"}, r"'count' is a method of a Counter: .*Run it in threads, or make it a function\."),
        ({"tool_modes": {"count": "process"}}, r"'count' is a method"),
    ],
)
def test_what_cannot_run_where_it_is_to_run_is_refused(options, message):
    tools = {"add": add, "give": give, "count": Counter().count}
    runner = ToolRunner(MultiTurnOptions(**options))
    with pytest.raises(ConfigError, match=message):
        runner.check(tools)
    ToolRunner(MultiTurnOptions(tool_modes={"add": "process", "count": "main"})).check(tools)


def test_a_mode_may_be_for_a_tool_that_no_row_of_the_batch_has(monkeypatch):
    """Rows choose among environments, and a batch may hold those of one only."""
    ranks = types.SimpleNamespace(rank=0)
    session = types.SimpleNamespace(ranks=ranks, args=None, on_conversation=None, metrics={})
    rows = dataclasses.replace(dialogue([add]), run_tools={"add": add, "give": give, "count": Counter().count})
    limits = Limits(completion_tokens=1, model_tokens=1, tool_turns=1)
    rollout = MultiTurn(session, MultiTurnOptions(tool_modes={"give": "main"}))
    monkeypatch.setattr(rollout, "run_trajectories", lambda *given: [run.close() for run in given[1]])
    assert len(rollout.converse(session, [rows, rows], limits, None)) == 2
    rollout.close()
    refused = MultiTurn(session, MultiTurnOptions(tool_modes={"count": "process"}))
    with pytest.raises(ConfigError, match="'count' is a method of a Counter"):
        refused.converse(session, [rows], limits, None)
    refused.close()


@pytest.mark.parametrize("tools", [[fetch], [fetch, add], []])
@pytest.mark.parametrize("name", ["fetch", "ftech"])
def test_a_mode_for_what_is_no_synchronous_tool_is_refused_before_anything_is_sampled(tools, name):
    session = types.SimpleNamespace(ranks=types.SimpleNamespace(rank=0), args=None, on_conversation=None)
    rollout = MultiTurn(session, MultiTurnOptions(tool_modes={name: "thread"}))
    there = "add" if add in tools else "none"
    others = r" Asynchronous ones, which run on the event loop: fetch\." if tools else ""
    message = rf"names '{name}', which is no synchronous tool of this run\. Tools: {there}\.{others}\nSee docs"
    with pytest.raises(ConfigError, match=message):
        rollout.converse(session, [dialogue([]), dialogue(tools)], None, None)
    rollout.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": "proces"}, "'tools' is to run in 'proces'; choose one of thread, process, main"),
        ({"tool_modes": {"add": "fork"}}, "'add' is to run in 'fork'"),
        ({"tool_timeout": 0}, "tool_timeout must be more than 0, got 0"),
        ({"max_tools": 0}, "max_tools must be more than 0"),
        ({"max_turns": 0}, "max_turns must be more than 0"),
        ({"max_seconds": -1.0}, "max_seconds must be more than 0"),
        ({"max_failed": 1.1}, "share from 0 to 1, got 1.1"),
        ({"max_answer": 200}, "max_answer must be more than 200, got 200"),
        ({"max_hung": -1}, "max_hung must be 0 or more, got -1"),
        ({"max_processes": 0}, "max_processes must be more than 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        MultiTurnOptions(**options)
