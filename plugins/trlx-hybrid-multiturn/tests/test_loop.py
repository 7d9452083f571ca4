"""The loop against a scripted engine: order, bounds, deadlines, and that nothing is left when it ends."""

import inspect
import threading
import time
from types import SimpleNamespace

import pytest
from trlx_hybrid.contract.types import Completion, Request
from trlx_hybrid.errors import EngineError
from trlx_hybrid_multiturn import loop as loop_module
from trlx_hybrid_multiturn.loop import CallTool, Generate, Loop, Outcome, OutOfTimeError, Start

PATIENCE = 60  # seconds: nothing here takes one, unless the machine is busy


class Script:
    """An engine whose requests take as many steps as they may sample tokens. A second passes with every step."""

    def __init__(self, shared=False, others=0):
        self.shared, self.others = shared, others  # steps that other ranks still have to do
        self.left, self.events, self.clock, self.steps, self.most = {}, [], 0.0, 0, 0
        self.asked = {}
        self.breaks_at = None
        self.hook = lambda: None

    def add(self, request):
        key = len([event for event in self.events if event[0] == "add"])
        self.events.append(("add", key))
        self.left[key] = self.asked[key] = request.max_tokens
        self.most = max(self.most, len(self.left))
        return key

    def abort(self, key):
        self.events.append(("abort", key))
        del self.left[key]

    def step(self, more):
        self.steps += 1
        self.clock += 1
        self.others -= 1
        self.hook()
        if self.steps == self.breaks_at:
            raise EngineError("the engine broke")
        self.left = {key: left - 1 for key, left in self.left.items()}
        over = [key for key, left in self.left.items() if left <= 0]
        for key in over:
            del self.left[key]
        return [(key, Completion(token_ids=[key], finish_reason="stop")) for key in over], more or self.others > 0

    def sampled(self, key):
        return Completion(token_ids=[key] * (self.asked[key] - self.left[key]))

    @property
    def busy(self):
        return bool(self.left)


class Watching:
    def __init__(self):
        self.steps, self.moves, self.pieces = [], [], []

    def stepped(self, seconds, sampling, finished):
        assert seconds >= 0
        self.steps.append((sampling, len(finished)))

    def interrupted(self, sampled):
        self.pieces += [len(piece.token_ids) for piece in sampled]

    def moved(self, done, sampling, calling):
        self.moves.append((done, sampling, calling))


class Tool:
    """A call whose answer the test gives, or a thread."""

    def __init__(self, name="tool", answer=None, after=None, expires=None):
        self.name, self.answer, self.after, self.expires = name, answer, after, expires
        self.done, self.reasons = None, []

    def call(self):
        call = CallTool(self.name, self._start)
        if self.expires is not None:
            call.expires = self.expires
        return call

    def _start(self, done):
        self.done = done
        if self.after is not None:
            threading.Timer(self.after, done, [Outcome(value=self.answer)]).start()
        return self.reasons.append


@pytest.fixture
def drive(monkeypatch):
    """Runs trajectories over a scripted engine whose steps are the clock; returns the observer."""

    def start(stream, trajectories, *, width=100, seconds=None, wait=0.001, clocked=True):
        monkeypatch.setattr(loop_module, "WAIT", wait)
        if clocked:
            clock = SimpleNamespace(monotonic=lambda: stream.clock, perf_counter=time.perf_counter)
            monkeypatch.setattr(loop_module, "time", clock)
        watching = Watching()
        Loop(stream, watching, width=width, seconds=seconds).run(trajectories)
        return watching

    return start


def sampling(steps):
    return Generate(Request(prompt_ids=[1], seed=0, max_tokens=steps))


async def talk(log, name, *waits):
    """Waits for each in turn: steps of the engine, or tools."""
    log.append((name, "starts"))
    try:
        for wait in waits:
            got = await (sampling(wait) if isinstance(wait, int) else wait.call())
            log.append((name, got.token_ids if isinstance(got, Completion) else got.value or got.lost))
    except OutOfTimeError:
        log.append((name, "out of time"))
    except GeneratorExit:
        log.append((name, "closed"))
        raise
    log.append((name, "ends"))


def of(log, name):
    return [what for who, what in log if who == name]


def test_trajectories_start_in_order_and_no_more_than_the_width_at_once(drive):
    log, stream = [], Script()
    watching = drive(stream, [talk(log, i, 1 + i % 3, 2) for i in range(10)], width=3)
    assert [who for who, what in log if what == "starts"] == list(range(10))
    assert all(of(log, i)[-1] == "ends" for i in range(10))
    assert stream.most == 3
    assert max(sampling + calling for _, sampling, calling in watching.moves) == 3
    assert watching.moves[-1] == (10, 0, 0)
    assert sum(finished for _, finished in watching.steps) == 20
    # 2 turns of 1..3 and 2 steps in 3 places: a place that comes free is taken before the next step.
    assert stream.steps - 1 <= -(-sum(1 + i % 3 + 2 for i in range(10)) // 3) + 4


def test_completions_go_to_the_trajectory_that_asked(drive):
    log = []
    drive(Script(), [talk(log, i, 3 - i, 1) for i in range(3)])
    assert [what for what in of(log, 0) if isinstance(what, list)] == [[0], [5]]
    assert [what for what in of(log, 1) if isinstance(what, list)] == [[1], [4]]
    assert [what for what in of(log, 2) if isinstance(what, list)] == [[2], [3]]


def test_a_slow_tool_holds_nobody_else_back(drive):
    log, stream, slow = [], Script(), Tool()

    def answer_late():
        if stream.steps == 12:
            slow.done(Outcome(value="late"))

    stream.hook = answer_late
    drive(stream, [talk(log, "slow", 1, slow, 1), talk(log, "quick", *[1] * 8)])
    assert log.index(("quick", "ends")) < log.index(("slow", "late"))
    assert of(log, "slow") == ["starts", [0], "late", [9], "ends"]


def test_answers_are_handed_out_in_the_order_they_came_and_before_the_next_step(drive):
    log, stream = [], Script()
    tools = [Tool() for _ in range(3)]

    def answer():
        if stream.steps == 2:
            for i in (2, 0, 1):
                tools[i].done(Outcome(value=f"answer {i}"))

    stream.hook = answer
    trajectories = [talk(log, i, tools[i], 1) for i in range(3)]
    drive(stream, [*trajectories, talk(log, "busy", 5)])
    answers = [what for _, what in log if str(what).startswith("answer")]
    assert answers == ["answer 2", "answer 0", "answer 1"]
    # Asked for before the third step, sampled by it: they end long before the fifth.
    assert log.index((1, "ends")) < log.index(("busy", [0]))


def test_tools_that_answer_at_once_need_no_step(drive):
    """As those do that run in the trainer's own thread."""

    class Now(Tool):
        def _start(self, done):
            done(Outcome(value=self.answer))
            return self.reasons.append

    log, stream = [], Script()
    drive(stream, [talk(log, 0, *[Now(answer=i + 1) for i in range(50)])])
    assert of(log, 0) == ["starts", *range(1, 51), "ends"]
    assert stream.steps == 1


def test_the_loop_sleeps_while_only_tools_work(drive):
    log, stream = [], Script()
    watching = drive(stream, [talk(log, i, 2, Tool(answer=1, after=0.3)) for i in range(3)], wait=PATIENCE)
    assert all(of(log, i)[-2:] == [1, "ends"] for i in range(3))
    assert stream.steps <= 2 + 2 * 3 + 1
    assert watching.steps == [(3, 0), (3, 3)]  # an idle engine is not counted as stepping


def test_the_engine_never_waits_for_a_tool_while_it_can_step(drive):
    log, stream, never = [], Script(), Tool()

    def answer():
        if stream.steps == 400:
            never.done(Outcome(value=1))

    stream.hook = answer
    started = time.monotonic()
    drive(stream, [talk(log, 0, never), talk(log, 1, 400)], wait=PATIENCE)
    assert time.monotonic() - started < PATIENCE / 2
    assert stream.steps <= 402


@pytest.mark.parametrize("last", [1, "tool"])
def test_a_rollout_that_is_over_ends_at_once(drive, last):
    """Not after a last look for answers that cannot come."""
    log = []
    started = time.monotonic()
    drive(Script(), [talk(log, 0, 1, last if last == 1 else Tool(answer=1, after=0.01))], wait=2 * PATIENCE)
    assert time.monotonic() - started < PATIENCE
    assert of(log, 0)[-1] == "ends"


def test_nothing_to_run_is_over_at_once(drive):
    stream = Script()
    drive(stream, [], wait=PATIENCE)
    assert stream.steps == 1


# --- deadlines --------------------------------------------------------------------------------------------------------


def test_time_over_while_sampling_aborts_the_request(drive):
    log, stream = [], Script()
    watching = drive(stream, [talk(log, "long", 1, 1000, 1), talk(log, "short", 7, 1, 1)], seconds=10)
    assert of(log, "long") == ["starts", [0], "out of time", "ends"]
    assert of(log, "short")[-1] == "ends"
    assert "out of time" not in of(log, "short")
    assert stream.events.count(("abort", 2)) == 1
    assert [kind for kind, _ in stream.events].count("abort") == 1
    assert stream.steps < 20
    assert watching.moves[-1] == (2, 0, 0)


def test_time_over_at_a_tool_gives_the_call_up_and_drops_its_answer(drive):
    log, stream, never = [], Script(), Tool("search")
    stream.hook = lambda: stream.steps > 9 and never.done(Outcome(value="too late"))
    drive(stream, [talk(log, "stuck", 1, never, 1), talk(log, "other", *[4] * 4)], seconds=8)
    assert of(log, "stuck") == ["starts", [0], "out of time", "ends"]
    assert never.reasons == ["was not waited for: its trajectory's time is over."]
    assert of(log, "other")[-2:] == ["out of time", "ends"]
    assert stream.steps < 30


def test_time_counts_from_a_trajectorys_own_start(drive):
    log, stream = [], Script()
    drive(stream, [talk(log, i, 3, 3) for i in range(6)], width=1, seconds=9)
    assert not any(what == "out of time" for _, what in log)
    assert stream.steps >= 36


def test_a_trajectory_whose_time_is_over_may_still_say_goodbye(drive):
    """What it waits for after that is granted, without a second deadline; answers to what it gave up stay dropped."""
    log, stream, first, second = [], Script(), Tool("first"), Tool("second")

    async def stubborn():
        try:
            await first.call()
        except OutOfTimeError:
            log.append((await sampling(20)).token_ids)
            log.append((await second.call()).value)

    def answer():
        if second.done is not None:
            first.done(Outcome(value="of the first"))
            second.done(Outcome(value="of the second"))

    stream.hook = answer
    drive(stream, [stubborn()], seconds=5)
    assert log == [[0], "of the second"]
    assert not second.reasons


def test_a_second_answer_to_one_call_is_dropped(drive):
    log, stream, first, second = [], Script(), Tool("first"), Tool("second")

    def answer():
        if second.done is None:
            first.done(Outcome(value="one"))
            first.done(Outcome(value="two"))
        elif stream.steps > 4:
            second.done(Outcome(value="three"))

    stream.hook = answer
    drive(stream, [talk(log, 0, first, second)])
    assert of(log, 0) == ["starts", "one", "three", "ends"]


def test_a_call_that_never_reports_is_lost_when_it_should_have(drive):
    log, stream, blocked = [], Script(), Tool("fetch, peek", expires=6.0)
    stream.hook = lambda: stream.steps > 8 and blocked.done(Outcome(value="too late"))
    drive(stream, [talk(log, "blocked", 1, blocked, 6), talk(log, "other", 20)])
    reason = "never reported, not even that its time is over: it blocks the event loop it runs on."
    assert of(log, "blocked") == ["starts", [0], f"tool 'fetch, peek' {reason}", [2], "ends"]
    assert blocked.reasons == [reason]
    assert of(log, "other") == ["starts", [1], "ends"]


def test_deadlines_pass_while_the_loop_sleeps(drive):
    """By the real clock: it wakes for them, long before it would look around by itself."""
    log, started = [], time.monotonic()
    waiting = [talk(log, "out", Tool()), talk(log, "lost", Tool("search", expires=time.monotonic() + 0.1))]
    drive(Script(), waiting, seconds=2.0, wait=2 * PATIENCE, clocked=False)
    assert time.monotonic() - started < PATIENCE
    assert of(log, "out") == ["starts", "out of time", "ends"]
    assert "tool 'search' never reported" in of(log, "lost")[1]


# --- what ends all ----------------------------------------------------------------------------------------------------


async def breaks(log, wait):
    await (sampling(wait) if isinstance(wait, int) else wait.call())
    raise ValueError("mine")


@pytest.mark.parametrize("wait", [3, "tool"])
def test_what_a_trajectory_raises_ends_all_and_leaves_none_open(drive, wait):
    log, stream, calling = [], Script(), Tool("search")
    others = [talk(log, "sampling", 10**9), talk(log, "calling", calling), talk(log, "waiting", 1)]
    broken = breaks(log, wait if wait == 3 else Tool(answer=1, after=0.05))
    with pytest.raises(ValueError, match="mine"):
        drive(stream, [*others[:2], broken, others[2]], width=3)
    assert [of(log, name) for name in ("sampling", "calling", "waiting")] == [["starts", "closed"]] * 2 + [[]]
    assert all(inspect.getcoroutinestate(each) == inspect.CORO_CLOSED for each in [*others, broken])
    assert calling.reasons == ["was not waited for: the rollout ended."]
    calling.done(Outcome(value="nobody asks any more"))


def test_a_broken_engine_ends_all(drive):
    log, stream, calling = [], Script(), Tool()
    stream.breaks_at = 3
    trajectories = [talk(log, "sampling", 1000), talk(log, "calling", calling)]
    with pytest.raises(EngineError, match="the engine broke"):
        drive(stream, trajectories)
    assert of(log, "sampling") == of(log, "calling") == ["starts", "closed"]
    assert calling.reasons


def test_a_call_that_cannot_be_started_ends_all(drive):
    log = []

    class Refused(Tool):
        def _start(self, done):
            raise EngineError("too many hang")

    trajectories = [talk(log, "sampling", 1000), talk(log, "refused", Refused()), talk(log, "waiting", 1)]
    with pytest.raises(EngineError, match="too many hang"):
        drive(Script(), trajectories)
    assert of(log, "sampling") == ["starts", "closed"]
    assert all(inspect.getcoroutinestate(each) == inspect.CORO_CLOSED for each in trajectories)


# --- several ranks ----------------------------------------------------------------------------------------------------


def test_who_has_finished_keeps_the_others_company(drive):
    log, stream, started = [], Script(shared=True, others=30), time.monotonic()
    drive(stream, [talk(log, 0, 2)], wait=2 * PATIENCE)
    assert of(log, 0)[-1] == "ends"
    assert stream.steps == 30
    assert time.monotonic() - started < PATIENCE


def test_no_rank_makes_the_others_wait_for_its_tools(drive, monkeypatch):
    """It steps on while its own tools work, without spinning."""
    monkeypatch.setattr(loop_module, "SHARED_WAIT", 0.02)
    log, stream, tool, started = [], Script(shared=True), Tool(), time.monotonic()
    stream.hook = lambda: stream.steps == 12 and tool.done(Outcome(value=1))
    drive(stream, [talk(log, 0, 1, tool)], wait=2 * PATIENCE)
    assert of(log, 0)[-2:] == [1, "ends"]
    assert 10 * 0.02 <= time.monotonic() - started < PATIENCE


# --- several rollouts -------------------------------------------------------------------------------------------------


class Playing:
    """What records a trajectory's time."""

    def __init__(self, seconds=0.0):
        self.seconds = seconds


async def in_pieces(log, name, *waits):
    """As `talk`, but a completion may take several rollouts."""
    log.append((name, "starts"))
    try:
        for wait in waits:
            if not isinstance(wait, int):
                log.append((name, (await wait.call()).value))
                continue
            while wait:
                got = await sampling(wait)
                log.append((name, len(got.token_ids) if got.finish_reason is None else "sampled"))
                wait = 0 if got.finish_reason else wait - len(got.token_ids)
    except OutOfTimeError:
        log.append((name, "out of time"))
    log.append((name, "ends"))


@pytest.fixture
def rollouts(monkeypatch):
    """`rollouts(first, trajectories, ...)`: a loop, and a function that plays its next rollout on a stream, for a
    number of steps of the engine, or until a condition holds."""

    def start(first, trajectories, *, width=100, seconds=None):
        monkeypatch.setattr(loop_module, "WAIT", 0.001)
        now = [0.0]
        streams = [first]

        def clock():
            return now[0] + streams[-1].clock

        monkeypatch.setattr(
            loop_module, "time", SimpleNamespace(monotonic=clock, perf_counter=time.perf_counter, sleep=time.sleep)
        )
        watching = Watching()
        loop = Loop(first, watching, width=width, seconds=seconds)
        playing = [Playing() for _ in trajectories]
        loop.add(zip(trajectories, playing, strict=True))

        def play(stream, over, training=0.0, begin=lambda: ()):
            now[0] += streams[-1].clock + training
            streams.append(stream)
            if isinstance(over, int):
                steps = over
                over = lambda: stream.steps >= steps  # noqa: E731
            loop.go_on(stream, watching, begin, over)

        return loop, play, watching, playing

    return start


def test_an_interrupted_request_goes_on_in_the_next_rollout(rollouts):
    log, one, two = [], Script(), Script()
    _, play, watching, _ = rollouts(one, [in_pieces(log, name, 2, 5) for name in "ab"])
    play(one, 4)
    assert of(log, "a") == of(log, "b") == ["starts", "sampled", 2]
    assert watching.pieces == [2, 2]
    assert one.events == [("add", key) for key in range(4)]  # what is left is not asked of a stream that ends
    play(two, 3)
    assert of(log, "a") == of(log, "b") == ["starts", "sampled", 2, "sampled", "ends"]
    assert [two.asked[key] for key in (0, 1)] == [3, 3]


def test_held_requests_come_in_the_order_in_which_their_trajectories_began(rollouts):
    """Whatever the order in which they were interrupted, or their tools answered."""
    log, one, two = [], Script(), Script()
    tool = Tool()
    one.hook = lambda: one.steps == 3 and tool.done(Outcome(value="answer"))
    _, play, _, _ = rollouts(one, [in_pieces(log, "a", tool, 11), in_pieces(log, "b", 2, 12), in_pieces(log, "c", 13)])
    play(one, 3)
    play(two, 1)
    assert [two.asked[key] for key in range(3)] == [11, 11, 10]


def test_tools_go_on_between_rollouts(rollouts):
    log, one, two, tool = [], Script(), Script(), Tool()
    loop, play, _, _ = rollouts(one, [in_pieces(log, "slow", tool, 2), in_pieces(log, "other", 2)])
    play(one, lambda: ("other", "ends") in log)  # not held up
    assert of(log, "slow") == ["starts"]
    tool.done(Outcome(value="in between"))
    assert of(log, "slow") == ["starts"]  # its trajectory waits for the next rollout
    play(two, lambda: ("slow", "ends") in log)
    assert of(log, "slow") == ["starts", "in between", "sampled", "ends"]
    assert not tool.reasons
    loop.close()


def test_time_between_rollouts_does_not_count(rollouts):
    log, streams = [], [Script() for _ in range(3)]
    loop, play, _, playing = rollouts(streams[0], [in_pieces(log, "a", 100)], seconds=12.0)
    play(streams[0], 5)
    assert playing[0].seconds == 5.0
    play(streams[1], 5, training=1000.0)
    assert playing[0].seconds == 10.0
    assert of(log, "a") == ["starts", 5, 5]
    play(streams[2], lambda: ("a", "ends") in log, training=1000.0)
    assert of(log, "a") == ["starts", 5, 5, "out of time", "ends"]
    assert streams[2].steps <= 4
    assert ("abort", 0) in streams[2].events
    loop.add([(in_pieces(log, "restored", 100), Playing(9.0))])  # as from a checkpoint
    again = Script()
    play(again, lambda: ("restored", "ends") in log)
    assert of(log, "restored") == ["starts", "out of time", "ends"]
    assert again.steps <= 4


def test_further_trajectories_begin_as_there_is_room_until_the_rollout_is_over(rollouts):
    log, one, begun = [], Script(), []

    def begin():
        if len(begun) == 4:
            return ()
        begun.append(len(begun))
        return [(in_pieces(log, (begun[-1], place), 3), Playing()) for place in range(2)]

    loop, play, watching, _ = rollouts(one, [], width=3)
    play(one, lambda: ((2, 0), "ends") in log, begin=begin)
    assert one.most == 3
    assert begun == [0, 1, 2]
    assert max(sampling + calling for _, sampling, calling in watching.moves) == 3
    play(Script(), lambda: ((3, 1), "ends") in log, begin=begin)
    assert sorted(name for name, what in log if what == "ends") == [
        (group, place) for group in range(4) for place in (0, 1)
    ]
    loop.close()


def test_a_rollout_that_earlier_ones_have_completed_takes_no_step(rollouts):
    log, one, none = [], Script(), Script()
    loop, play, _, _ = rollouts(one, [in_pieces(log, "a", 5)])
    play(one, 2)
    play(none, lambda: True)
    assert (none.steps, none.events) == (0, [])
    play(Script(), lambda: ("a", "ends") in log)
    assert of(log, "a") == ["starts", 2, "sampled", "ends"]
    loop.close()


def test_a_rank_whose_rollout_is_over_asks_nothing_more_of_the_shared_engine(rollouts):
    """Its requests go on until the others are over, too; what they ask for then is held."""
    log, one, two = [], Script(shared=True, others=8), Script(shared=True, others=3)
    loop, play, _, _ = rollouts(one, [in_pieces(log, "a", 4, 6), in_pieces(log, "b", 3)])
    play(one, lambda: ("b", "ends") in log)
    assert one.steps == 8
    assert of(log, "a") == ["starts", "sampled"]
    assert one.events == [("add", 0), ("add", 1)]
    play(two, 3)
    assert two.asked == {0: 6}
    loop.close()


def test_what_ends_a_rollout_early_ends_its_trajectories(rollouts):
    log, one, tool = [], Script(), Tool()
    trajectories = [in_pieces(log, "a", 5), in_pieces(log, "b", tool), breaks(log, 2)]
    _, play, _, _ = rollouts(one, trajectories)
    with pytest.raises(ValueError, match="mine"):
        play(one, 4)
    assert all(inspect.getcoroutinestate(each) == inspect.CORO_CLOSED for each in trajectories)
    assert tool.reasons == ["was not waited for: the rollout ended."]


# --- further coroutines of a trajectory -------------------------------------------------------------------------------


async def several(log, name, *furthers, until):
    """Starts further coroutines, and ends after a wait of its own."""
    for number, waits in enumerate(furthers):
        await Start(talk(log, f"{name}.{number}", *waits))
    await talk(log, name, until)


def test_a_trajectory_has_several_requests_open_and_ends_what_is_left(drive):
    log, stream, tool = [], Script(), Tool()
    watching = drive(stream, [several(log, "one", [2, 2], [3], [9], [tool], until=5), talk(log, "two", 6)], width=1)
    assert stream.most == 4  # three further ones and its own; the second trajectory waits for its place
    assert of(log, "one.0")[-1] == of(log, "one.1")[-1] == of(log, "one")[-1] == "ends"
    assert of(log, "one.2")[-1] == of(log, "one.3")[-1] == "closed"
    assert [event for event in stream.events if event[0] == "abort"] == [("abort", 2)]
    assert tool.reasons == ["was not waited for: its trajectory ended."]
    assert log.index(("one", "ends")) < log.index(("two", "starts"))
    assert watching.moves[-1] == (2, 0, 0)


def test_a_trajectory_that_ends_with_its_further_requests_in_one_step_leaves_nothing(drive):
    log, stream = [], Script()
    drive(stream, [several(log, "one", [3], [4], until=3)])
    assert not stream.left
    assert of(log, "one")[-1] == "ends"
    assert of(log, "one.1")[-1] == "closed"


def test_when_its_time_is_over_a_trajectory_ends_its_further_coroutines(drive):
    log, stream = [], Script()
    drive(stream, [several(log, "one", [50], until=50)], seconds=5)
    assert of(log, "one")[-2:] == ["out of time", "ends"]
    assert of(log, "one.0")[-1] == "closed"
    assert stream.clock < 10
    assert not stream.left


def test_an_error_in_a_further_coroutine_ends_all(drive):
    async def fails():
        await sampling(2)
        raise ValueError("no")

    async def one():
        await Start(fails())
        await sampling(9)

    log = []
    with pytest.raises(ValueError, match="no"):
        drive(Script(), [one(), talk(log, "other", 9)])
    assert of(log, "other")[-1] == "closed"
