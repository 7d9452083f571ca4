"""The host that runs agents in processes, so that neither they nor their clients hold up the trainer."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import tempfile
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
from trlx_hybrid.errors import ConfigError
from trlx_hybrid.interprocess import plain_data
from trlx_hybrid.interprocess.deadline import granted, in_thread

from ..tools.processes import by_value_if_needed
from ..tools.supervised_process import SupervisedProcess
from ..tools.worker_process import ANSWER_BYTES, receive, send
from . import agent_process
from .asked import Asked, Said
from .errors import RefusedError
from .host import Agent, Begun
from .seat import Events, Turn
from .tree import Place

START_SECONDS = 60.0  # for the interpreter, and for the imports of the agent's module


class ProcessHost:
    """The host that runs agents in processes, each with a gateway of its own.

    The processes start with the first batch, and serve all batches. An episode belongs to the process that has
    the fewest. A process that crashes loses its episodes only. A process shares no state with the trainer: it imports
    what the agent needs, but never the trainer's script, whose functions are pickled by value. It gets copies of rows.

    Args:
        agent: the agent.
        processes: the number of processes.

    Raises:
        ConfigError: the agent cannot be sent to a process.
    """

    def __init__(self, agent: Agent, processes: int) -> None:
        try:
            with by_value_if_needed(agent):
                self._agent = bytes(cloudpickle.dumps(agent))
        except Exception as error:  # pickling may run any code
            raise ConfigError(
                f"agents(processes={processes}): the agent cannot be sent to a process ({type(error).__name__}: "
                f"{error}). Let it make what it needs inside, such as its client, or leave processes out."
            ) from error
        self._number, self._episodes = processes, itertools.count()
        self._processes: list[AgentProcess] = []
        folder = tempfile.TemporaryDirectory(prefix="agents-", ignore_cleanup_errors=True)
        self._temporary = folder.name
        weakref.finalize(self, _close, self._processes, folder)

    def prepare(self, episodes: int) -> None:
        """Start the processes that so many episodes need and that do not run, and wait until they have loaded the
        agent. An episode's time does not count this.

        Raises:
            ConfigError: a process did not start in time, or cannot load the agent.
        """
        for process in [process for process in self._processes if process.lost]:
            self._processes.remove(process)
            process.close()
        while len(self._processes) < min(self._number, episodes):
            self._processes.append(AgentProcess(self._agent, self._temporary))
        for process in self._processes:
            if lost := process.loaded():
                raise ConfigError(f"agents(processes={self._number}): {lost}")

    def begin(self, begun: Begun) -> RemoteSeat:
        """Start the agent of an episode."""
        seat = RemoteSeat(next(self._episodes), begun.count)
        if not any(process.open(seat) for process in sorted(self._processes, key=lambda p: p.episodes)):
            self._processes.append(AgentProcess(self._agent, self._temporary))  # all others have ended meanwhile
            self._processes[-1].open(seat)
        try:
            message = cloudpickle.dumps(("begin", dict(begun.row), begun.prompt, begun.branching))
        except Exception as error:
            seat.ended(None, f"its row cannot be sent to a process: {type(error).__name__}: {error}")
            seat.process.forget(seat)
        else:
            seat.process.send(seat.episode, message)
        return seat

    def end(self, seat: RemoteSeat) -> None:
        """End an episode and its agent."""
        seat.tell("close")
        seat.process.forget(seat)


class RemoteSeat(Events):
    """The place of one episode at the gateway of another process.

    Args:
        episode: the episode's number.
        count: returns the number of tokens of a request.

    Attributes:
        process: the process that runs the agent.
    """

    process: AgentProcess

    def __init__(self, episode: int, count: Callable[[Asked], int]) -> None:
        super().__init__()
        self.episode, self._count = episode, count

    def tell(self, name: str, *given: Any) -> None:
        """Send a message to the process."""
        self.process.send(self.episode, pickle.dumps((name, *given), protocol=pickle.HIGHEST_PROTOCOL))

    def answer(self, turn: Turn, said: Said) -> None:
        """Answer a request. Its answer can be continued from then on."""
        self.tell("answer", turn.number, said)

    def refuse(self, turn: Turn, error: RefusedError) -> None:
        """Refuse a request. What was said before can be continued from where it was."""
        self.tell("refuse", turn.number, vars(error))

    def end(self, error: RefusedError) -> None:
        """Refuse all open requests, and all later ones."""
        self.tell("end", vars(error))

    def received(self, content: dict[str, Any]) -> None:
        """Take a message of the process."""
        match content["kind"]:
            case "asked":
                place = Place(**content["place"], said=[])
                self.put(Turn(asked=Asked(**content["asked"]), place=place, number=content["number"]))
            case "heard":
                self.heard.update(content["places"])
            case "ended":
                self.ended(content["reward"], content["failure"])
            case "count":
                self._answer_count(content["question"], Asked(**content["asked"]))

    def _answer_count(self, question: int, asked: Asked) -> None:
        try:
            self.tell("counted", question, self._count(asked))
        except RefusedError as error:
            self.tell("counted", question, vars(error))


class AgentProcess(SupervisedProcess):
    """The trainer's handle of a process in which agents run. A thread reads what it sends.

    Args:
        agent: the pickled agent.
        temporary: the folder of its temporary files, some of which a process that is killed leaves behind.

    Attributes:
        lost: how it ended, in words that follow its name; None while it runs.
    """

    def __init__(self, agent: bytes, temporary: str) -> None:
        super().__init__(Path(agent_process.__file__), environment={"TMPDIR": temporary})
        self.lost: str | None = None
        self._seats: dict[int, RemoteSeat] = {}
        self._lock, self._sending = threading.Lock(), threading.Lock()
        self._told, self._loaded = threading.Event(), False  # it has loaded the agent or has ended; it has loaded it
        self.send(0, agent)
        in_thread(self._read, "trlx-hybrid-agents")

    @property
    def episodes(self) -> int:
        """The number of episodes that it plays."""
        return len(self._seats)

    def loaded(self) -> str | None:
        """Wait until it has loaded the agent; return None then, or why it has not."""
        self._told.wait()  # the thread that reads has a deadline
        return None if self._loaded else self.lost

    def open(self, seat: RemoteSeat) -> bool:
        """Take an episode, and return True; False where the process has ended."""
        with self._lock:
            if self.lost is None:
                seat.process = self
                self._seats[seat.episode] = seat
            return self.lost is None

    def forget(self, seat: RemoteSeat) -> None:
        """Forget an episode. What the process still sends of it is dropped."""
        with self._lock:
            self._seats.pop(seat.episode, None)

    def send(self, episode: int, message: bytes) -> None:
        """Send a message. One to a process that has ended is dropped: the thread that reads learns of the end."""
        with self._sending, contextlib.suppress(OSError):
            send(self.channel, episode, message)

    def _read(self) -> None:
        """Pass on what the process sends, until it ends; then end its episodes."""
        try:
            why = self._read_all()
        except (EOFError, OSError):
            why = f"the agents' process {self.gone()}"
        except Exception as error:  # an agent wrote to the socket itself: nothing that follows can be trusted
            why = f"the agents' process sent something that cannot be read: {type(error).__name__}: {error}"
        self.kill()
        with self._lock:
            self.lost = why
            seats, self._seats = [*self._seats.values()], {}
        self._told.set()
        for seat in seats:
            seat.ended(None, why)

    def _read_all(self) -> str:
        """Pass on what the process sends. Returns why it takes no episodes."""
        seconds = granted(START_SECONDS)
        if not self.readable(seconds):
            return f"the agents' process did not start within {seconds:g} s."
        while True:
            episode, body = receive(self.channel, ANSWER_BYTES)
            content = plain_data.loads(body, classes=False)
            if content["kind"] == "refused":
                advice = "Define it in a module that can be imported there, or leave agents(processes=...) out."
                return f"the agent cannot be loaded in a process of its own: {content['reason']}. {advice}"
            if content["kind"] == "loaded":
                self._loaded = True
                self._told.set()
            elif (seat := self._seats.get(episode)) is not None:
                seat.received(content)


def _close(processes: list[AgentProcess], folder: tempfile.TemporaryDirectory[str]) -> None:
    for process in processes:
        process.kill()
    for process in processes:  # after `kill` they end in parallel
        process.close()
    folder.cleanup()
