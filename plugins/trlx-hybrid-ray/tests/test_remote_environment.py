"""Environments in actors: as TRL sees them, and what becomes of them when they die or hang."""

import asyncio
import dataclasses
import functools
import inspect
import os
import signal
import sys
import threading
import time

import pytest
from transformers.utils import get_json_schema
from trlx_hybrid.errors import ConfigError
from trlx_hybrid_ray.remote import EnvironmentLostError, environment, remote_environment


@pytest.fixture(scope="module", autouse=True)
def nodes(session_cluster):
    """Actors do not find test modules, so they get classes by value."""
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield session_cluster
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


class WrongSignError(Exception):
    def __init__(self, number, sign):
        super().__init__(f"{number} is {sign}")


@dataclasses.dataclass(frozen=True)
class Seen:
    words: str
    held: object = None


class Counter:
    """Counts.

    Not thread-safe across instances, and need not be.
    """

    def __init__(self, step=1):
        self.step, self.total, self.lock = step, 0, threading.Lock()

    def reset(self, start=0, **row):
        self.total = start
        return f"from {start}"

    def add(self, number: int) -> int:
        """
        Add a number.

        Args:
            number: How much.
        """
        if number < 0:
            raise WrongSignError(number, "negative")
        self.total += number * self.step
        return self.total

    async def later(self, number: int) -> int:
        """
        Add a number after a moment.

        Args:
            number: How much.
        """
        await asyncio.sleep(0.01)
        self.total += number
        return self.total

    async def arrive(self) -> int:
        """Say how many came before."""
        self.total += 1
        return self.total - 1

    @staticmethod
    def twice(number: int) -> int:
        """
        Double a number.

        Args:
            number: Which one.
        """
        return 2 * number

    def drained(self) -> int:
        """Take from what is empty."""
        return next(iter(()))

    def secret(self) -> object:
        """Return what cannot be sent."""
        return self.lock

    def look(self, lock: bool) -> Seen:
        """
        Look around.

        Args:
            lock: Whether to hold what cannot be sent.
        """
        return Seen("a door", held=(self.step, [self.lock if lock else {"open": None}]))

    def crash(self) -> None:
        """End the process."""
        os.kill(os.getpid(), signal.SIGKILL)

    def hang(self) -> None:
        """Take too long."""
        time.sleep(30)

    def nap(self, seconds: float) -> None:
        """Sleep.

        Args:
            seconds: How long.
        """
        time.sleep(seconds)

    def get_reward(self) -> float:
        return self.total / 10

    def where(self) -> int:
        """Say which process this is."""
        return os.getpid()

    def imported(self) -> list[str]:
        """Say what this process has imported."""
        return list(sys.modules)


@pytest.fixture(scope="module")
def counters(nodes):
    with remote_environment(Counter, workers=2, per_worker=3) as found:
        yield found


def tools(environment):
    """As TRL 1.16 finds them."""
    members = inspect.getmembers(type(environment), predicate=inspect.isfunction)
    names = [name for name, _ in members if name not in ("reset", "get_reward") and not name.startswith("_")]
    return [getattr(environment, name) for name in names]


def test_trl_finds_the_same_tools(counters):
    here, there = tools(Counter()), tools(counters())
    assert [tool.__name__ for tool in there] == [tool.__name__ for tool in here]
    assert [get_json_schema(tool) for tool in there] == [get_json_schema(tool) for tool in here]
    assert [inspect.iscoroutinefunction(tool) for tool in there] == [inspect.iscoroutinefunction(tool) for tool in here]
    assert type(counters()) is type(counters())
    assert type(counters()).__name__ == counters.__name__ == "Counter"


def test_each_has_a_state_of_its_own(counters):
    first, second = counters(), counters()
    assert first.reset(start=5, prompt="unused") == "from 5"
    assert second.reset() == "from 0"
    assert [first.add(1), second.add(number=2), first.twice(4), asyncio.run(first.later(3))] == [6, 2, 8, 9]
    assert (first.get_reward(), second.get_reward()) == (0.9, 0.2)
    assert (first.total, second.total) == (9, 2)
    with pytest.raises(AttributeError, match="nothing"):
        _ = first.nothing
    with pytest.raises(AttributeError):
        first.total = 3


def test_a_worker_imports_no_training_stack_of_its_own(counters):
    """There may be hundreds, and each would take a second of a core and 100 MB for torch alone."""
    assert not {"torch", "transformers", "datasets", "trl", "vllm"} & set(counters().imported())


def test_asynchronous_calls_of_one_turn_start_in_their_order(counters):
    """As on an event loop here: what they answer can depend on it, and with it the tokens that follow."""

    async def together(environment):
        return await asyncio.gather(*(environment.arrive() for _ in range(6)))

    environment = counters()
    for turn in range(10):
        environment.reset(start=6 * turn)
        assert asyncio.run(together(environment)) == [6 * turn + i for i in range(6)]


def test_errors_are_the_environments_own(counters):
    environment = counters()
    environment.reset()
    with pytest.raises(Exception, match="-1 is negative") as caught:
        environment.add(-1)
    assert str(caught.value) == "-1 is negative"  # what the model is shown
    assert "in add" in caught.value.__notes__[0]
    with pytest.raises(StopIteration):
        environment.drained()
    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'number'"):
        environment.add()
    with pytest.raises(EnvironmentLostError, match=r"'Counter.secret' returned a lock, which cannot be sent"):
        environment.secret()
    assert environment.add(1) == 1


def test_what_comes_back_is_plain_data(counters):
    environment = counters()
    assert environment.look(False) == Seen("a door", held=(1, [{"open": None}]))
    wrong = r"'Counter.look' returned a Seen, of which \.held\[1\]\[0\] is a lock, which cannot be sent\. Return plain"
    with pytest.raises(EnvironmentLostError, match=wrong):
        environment.look(True)
    with pytest.raises(EnvironmentLostError, match=r"'Counter.lock' returned a lock"):
        _ = environment.lock
    assert environment.look(False).words == "a door"  # it is well


def test_places_are_bounded_and_given_back(counters):
    held = [counters() for _ in range(6)]
    assert len({environment.where() for environment in held}) == 2
    with pytest.raises(ConfigError, match=r"6 environments 'Counter' are in use.*workers=2 with per_worker=3"):
        counters()
    del held[0]
    counters()


def test_constructor_arguments():
    with remote_environment(functools.partial(Counter, step=10)) as found:
        assert found().add(2) == 20


def test_a_dead_worker_ends_its_episodes_and_no_others(counters):
    held = [counters() for _ in range(4)]
    where = [environment.where() for environment in held]
    victims = [environment for environment, pid in zip(held, where) if pid == where[0]]
    others = [environment for environment, pid in zip(held, where) if pid != where[0]]
    assert len(victims) == len(others) == 2
    lost = r"'Counter\.crash': worker \d \(node .*\) died: Actor(Died|Unavailable)Error"
    with pytest.raises(EnvironmentLostError, match=lost):
        victims[0].crash()
    assert victims[0].get_reward() is None  # its trajectory is masked: the reward does not apply
    assert victims[0].total is None
    with pytest.raises(EnvironmentLostError):
        asyncio.run(victims[1].later(1))
    assert [environment.add(1) for environment in others] == [1, 1]
    assert victims[0].reset(start=7) == "from 7"  # a new episode, in a new worker
    assert victims[0].add(1) == 8
    assert not isinstance(EnvironmentLostError(), Exception)  # or TRL would show it to the model, and go on


def test_a_call_that_hangs_ends_its_episode():
    with remote_environment(Counter, per_worker=2, deadline=2.5) as found:
        environment, other = found(), found()
        with pytest.raises(EnvironmentLostError, match=r"'Counter\.hang' did not return within 2.5 s.*may still run"):
            environment.hang()
        assert other.add(1) == 1  # the worker goes on
        assert environment.reset(start=3) == "from 3"  # another, beside what hangs
    with remote_environment(Counter, deadline=2.5, per_worker=1) as found:
        environment = found()
        with pytest.raises(EnvironmentLostError, match=r"did not return within 2.5 s"):
            environment.hang()
        with pytest.raises(EnvironmentLostError, match=r"did not return within 2.5 s"):
            environment.add(1)  # is not asked again
        assert environment.reset(start=3) == "from 3"  # nobody else is in that worker: another takes its place


def test_what_hangs_takes_places_beyond_two_and_gives_them_back():
    with remote_environment(Counter, per_worker=2, deadline=1.5) as found:
        environment, other = found(), found()
        for seconds in (60, 60, 6):
            with pytest.raises(EnvironmentLostError, match="did not return"):
                environment.nap(seconds)
            if seconds == 60:
                environment.reset()
        with pytest.raises(ConfigError, match=r"4 environments 'Counter' are in use.* 3 of them hang in a call"):
            environment.reset()
        until = time.monotonic() + 50
        while True:
            try:
                assert environment.reset(start=7) == "from 7"
                break
            except ConfigError:
                assert time.monotonic() < until
                time.sleep(0.2)
        assert (environment.add(1), other.add(1)) == (8, 1)


def test_reward_workers_can_ask_environments(counters):
    from trlx_hybrid_ray.remote import remote_reward

    environment = counters()
    environment.reset(start=30)
    with remote_reward(lambda prompts, environments, **_: [e.get_reward() + e.total for e in environments]) as reward:
        assert reward(prompts=["a"], environments=[environment]) == [33.0]


@pytest.mark.parametrize(
    ("environment", "settings", "message"),
    [
        (lambda: Counter(), {}, "takes a class.*functools.partial"),
        (Counter, {"workers": 0}, "workers=0"),
        (Counter, {"deadline": -1}, "deadline=-1"),
        (functools.partial(Counter, step=threading.Lock()), {}, "'Counter' cannot be sent.*constructor"),
    ],
)
def test_what_is_no_environment_is_refused(environment, settings, message):
    with pytest.raises(ConfigError, match=message):
        remote_environment(environment, **settings)


def test_a_call_that_comes_late_lets_no_later_one_wait(monkeypatch):
    """A first call was given up by the second, and comes after it: the third begins at once."""
    monkeypatch.setattr(environment, "ORDER_SECONDS", 0.1)
    actor = environment.EnvironmentActor.__new__(environment.EnvironmentActor)  # without an actor's process
    actor.load(list)
    environment.result_of(actor.make(0), "here")
    for turn, number in ((1, "second"), (0, "first")):
        environment.result_of(actor.call(0, "append", [number], {}, turn), "here")
    monkeypatch.setattr(environment, "ORDER_SECONDS", 60)
    begun = time.monotonic()
    environment.result_of(actor.call(0, "append", ["third"], {}, 2), "here")
    assert time.monotonic() - begun < 30
    assert environment.result_of(actor.call(0, "copy", [], {}), "here") == ["second", "first", "third"]
