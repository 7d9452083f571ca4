"""Tools in threads: order, bounds, deadlines, and threads that never come back."""

import asyncio
import contextvars
import math
import queue
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from trlx_hybrid.errors import HybridError
from trlx_hybrid_multiturn.tools.event_loop import DaemonLoop
from trlx_hybrid_multiturn.tools.threads import ThreadWorkers, ToolsUnavailableError

PATIENCE = 60  # seconds: nothing here takes one, unless the machine is busy


@pytest.fixture
def start():
    """Makes pools; at the end they are closed and none of their threads is left."""
    before, pools = of_tools(), []

    def make(limit=4, lost_limit=2):
        pools.append(ThreadWorkers(limit, lost_limit))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
        assert not pool._queue
    until(lambda: of_tools() <= before)


def of_tools():
    """Threads of pools; libraries of other tests start some of their own at any time."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("tool")}


@pytest.fixture
def inbox():
    return queue.Queue()


def until(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def take(inbox):
    return inbox.get(timeout=PATIENCE)


def call(pool, function, deadline=PATIENCE, **arguments):
    inbox = queue.Queue()
    pool.submit(function, arguments, inbox.put, deadline)
    return take(inbox)


def add(a, b):
    return a + b


def fail(error):
    raise error


def test_tools_compute_on_the_trainers_gpu(start, monkeypatch):
    """CUDA's current device is each thread's own; every rank's tools would meet on GPU 0."""
    current = threading.local()
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        current_device=lambda: getattr(current, "device", 0),
        set_device=lambda device: setattr(current, "device", device),
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    cuda.set_device(3)
    pool = start()
    assert call(pool, cuda.current_device).value == 3
    cuda.set_device(1)
    loop = DaemonLoop()
    monkeypatch.undo()

    async def device():
        return cuda.current_device()

    assert asyncio.run_coroutine_threadsafe(device(), loop.loop).result(PATIENCE) == 1
    loop.close()


def test_a_call_returns_its_value_and_its_times(start):
    def spin():
        end = time.thread_time() + 0.06  # the clocks differ by a little
        while time.thread_time() < end:
            pass
        return "done"

    pool = start()
    assert call(pool, add, a=1, b=2).value == 3
    outcome = call(pool, spin)
    assert (outcome.value, outcome.error, outcome.lost) == ("done", None, None)
    assert outcome.cpu_seconds >= 0.05
    assert outcome.seconds >= 0.05


def test_calls_start_in_the_order_they_came_and_never_more_than_the_limit(start, inbox):
    order, lock, now, most = [], threading.Lock(), [], []

    def tool(i):
        with lock:
            order.append(i)
            now.append(i)
            most.append(len(now))
        time.sleep(0.001)
        with lock:
            now.remove(i)

    pool = start(limit=3)
    for i in range(60):
        pool.submit(tool, {"i": i}, inbox.put, PATIENCE)
    assert all(take(inbox).error is None for _ in range(60))
    assert max(most) <= 3
    one = start(limit=1)
    order.clear()
    for i in range(20):
        one.submit(tool, {"i": i}, inbox.put, PATIENCE)
    for _ in range(20):
        take(inbox)
    assert order == list(range(20))


def test_threads_are_reused(start):
    pool = start(limit=8)
    used = set()
    for _ in range(20):
        until(lambda: pool._idle == len(pool._threads))  # an outcome is told before its thread waits for the next call
        used.add(call(pool, threading.get_ident).value)
    assert len(used) == 1


def test_what_runs_is_shown_with_its_seconds(start, gate, inbox):
    pool = start(limit=1)
    pool.submit(gate.wait, {}, inbox.put, PATIENCE, name="search")
    pool.submit(add, {"a": 1, "b": 2}, inbox.put, PATIENCE)
    until(lambda: pool.busy == 1)
    ((name, seconds),) = pool.running()
    assert (name, len(pool._queue), len(pool._hung)) == ("search", 1, 0)
    assert 0 <= seconds < PATIENCE
    gate.set()
    assert [take(inbox).value for _ in range(2)] == [True, 3]
    assert (pool.busy, pool.running()) == (0, [])


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt("stop"), GeneratorExit()])
def test_whatever_a_tool_raises_is_its_outcome_and_the_worker_lives_on(start, error):
    pool = start(limit=1)
    outcome = call(pool, fail, error=error)
    assert outcome.error is error
    assert outcome.lost is None
    assert call(pool, add, a=1, b=1).value == 2


@pytest.mark.parametrize("arguments", [{"wrong": 1}, ["no mapping"]])
def test_arguments_that_do_not_fit_are_the_tools_error(start, inbox, arguments):
    start().submit(add, arguments, inbox.put, PATIENCE)
    assert isinstance(take(inbox).error, TypeError)


def test_the_submitters_context_variables_are_seen(start):
    variable = contextvars.ContextVar("variable", default="unset")
    variable.set("set")
    assert call(start(), variable.get).value == "set"


def test_no_deadline_is_a_deadline_too(start):
    assert call(start(), add, deadline=math.inf, a=1, b=2).value == 3


def test_a_call_past_its_deadline_is_lost_and_the_pool_keeps_its_width(start, gate, inbox):
    pool = start(limit=1)
    pool.submit(gate.wait, {}, inbox.put, 0.05, name="search")
    pool.submit(add, {"a": 1, "b": 2}, inbox.put, PATIENCE)
    lost = take(inbox)
    assert lost.lost == "tool 'search' did not return within 0.05 s; its thread hangs."
    assert (lost.value, lost.error) == (None, None)
    assert lost.seconds >= 0.05
    assert take(inbox).value == 3
    assert (len(pool._hung), pool.busy) == (1, 0)


def test_a_deadline_counts_from_the_start_not_from_the_queue(start, gate, inbox):
    pool = start(limit=1)
    pool.submit(gate.wait, {}, lambda outcome: None, PATIENCE)
    pool.submit(add, {"a": 1, "b": 2}, inbox.put, 1.0)
    time.sleep(1.2)
    assert inbox.empty()
    gate.set()
    assert take(inbox).value == 3


def test_a_sooner_deadline_than_the_one_watched_is_kept(start, gate, inbox):
    pool = start(limit=2)
    pool.submit(gate.wait, {}, inbox.put, 1000)
    until(lambda: pool.busy == 1)
    pool.submit(gate.wait, {}, inbox.put, 0.05, name="second")
    assert "'second'" in take(inbox).lost


def test_a_late_return_is_forgotten(start, gate, inbox):
    pool = start(limit=2)
    pool.submit(gate.wait, {}, inbox.put, 0.02)
    assert take(inbox).lost
    assert len(pool._hung) == 1
    gate.set()
    until(lambda: len(pool._hung) == 0)
    assert call(pool, add, a=1, b=2).value == 3
    assert inbox.empty()


def test_too_many_hanging_threads_stop_the_pool_until_they_return(start, gate, inbox):
    pool = start(limit=1, lost_limit=1)
    for name in ("search", "search", "never", "never"):
        pool.submit(gate.wait, {}, inbox.put, 0.05, name=name)
    lost = [take(inbox).lost for _ in range(4)]
    assert sum("did not return" in reason for reason in lost) == len(pool._hung) == 2
    assert sum("'never' was not started: 2 tool threads hang" in reason for reason in lost) == 2
    with pytest.raises(
        ToolsUnavailableError, match=r"'add' is not called: 2 .* 1 may: 'search' ×2\..*run them in processes"
    ):
        pool.submit(add, {"a": 1, "b": 2}, inbox.put, 1)
    assert issubclass(ToolsUnavailableError, HybridError)
    gate.set()
    until(lambda: len(pool._hung) == 0)
    assert call(pool, add, a=1, b=2).value == 3


def test_an_abandoned_call_is_lost_at_once_whether_it_waits_or_runs(start, gate, inbox):
    pool, ran = start(limit=1), []
    running = pool.submit(gate.wait, {}, inbox.put, PATIENCE, name="first")
    waiting = pool.submit(ran.append, {}, inbox.put, PATIENCE, name="second")
    until(lambda: pool.busy == 1)
    pool.abandon(waiting, "waited longer than its trajectory may last.")
    assert take(inbox).lost == "tool 'second' waited longer than its trajectory may last."
    pool.abandon(running, "took too long.")
    assert take(inbox).lost == "tool 'first' took too long."
    assert (pool.busy, len(pool._queue), len(pool._hung)) == (1, 0, 0)  # a running thread keeps its place
    gate.set()
    assert call(pool, add, a=1, b=2).value == 3
    pool.abandon(running, "again.")
    assert inbox.empty()
    assert not ran


def test_closing_loses_what_waits_and_what_runs(start, gate, inbox):
    pool = start(limit=1)
    pool.submit(gate.wait, {}, inbox.put, PATIENCE, name="first")
    until(lambda: pool.busy == 1)
    pool.submit(add, {}, inbox.put, PATIENCE, name="second")
    pool.close()
    lost = [take(inbox).lost for _ in range(2)]
    assert lost[0] == "tool 'second' was not started: the workers were closed."
    assert lost[1] == "tool 'first' still ran when the workers were closed."
    with pytest.raises(ToolsUnavailableError, match="closed"):
        pool.submit(add, {}, inbox.put, 1)
    pool.close()
    gate.set()
    until(lambda: pool.busy == 0)
    assert inbox.empty()


def test_idle_threads_keep_nothing_of_the_last_call(start):
    import gc
    import weakref

    class Big:
        pass

    big, pool = Big(), start()
    alive = weakref.ref(big)
    assert call(pool, lambda it: it, it=big).value is big
    del big
    until(lambda: gc.collect() >= 0 and alive() is None)


def test_outcomes_come_exactly_once_when_returns_race_with_deadlines(start, inbox):
    pool = start(limit=8, lost_limit=1000)
    for i in range(200):
        pool.submit(time.sleep, {}, inbox.put, 0.01)  # a TypeError: at once
        pool.submit(lambda s: time.sleep(s), {"s": 0.01 + i % 3 / 1000}, lambda o, i=i: inbox.put(i), 0.011)
    seen = [take(inbox) for _ in range(400)]
    assert sorted(i for i in seen if isinstance(i, int)) == list(range(200))
    until(lambda: len(pool._hung) == 0 and pool.busy == 0)
    assert inbox.empty()


def test_a_hung_tool_does_not_keep_the_interpreter_from_ending():
    code = (
        "import threading; from trlx_hybrid_multiturn.tools.threads import ThreadWorkers; lost = threading.Event();"
        "pool = ThreadWorkers(2, 2); pool.submit(threading.Event().wait, {}, lambda o: lost.set(), 0.01);"
        "pool.submit(threading.Event().wait, {}, print, 1000); lost.wait(); print('end', len(pool._hung))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "end 1\n"
    assert done.stderr == ""
