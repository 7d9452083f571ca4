"""Environments of the library verifiers, which run in a separate process with verifiers' own packages."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import subprocess
import sys
import urllib.error
import urllib.request
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trlx_hybrid.contract.conversation import Message
from trlx_hybrid.errors import ConfigError

from ..environment import Row, Step
from .connection import Connection, ServerError, require_websockets

if TYPE_CHECKING:
    from datasets import Dataset

PROCESS = Path(__file__).parent / "verifiers_process"
CONNECT_SECONDS = 30.0  # to a server that is up, on this machine
STOP_SECONDS = 5.0


def from_verifiers(
    taskset: str,
    *,
    python: str = sys.executable,
    env: Mapping[str, object] | None = None,
    start_seconds: float = 120.0,
) -> Verifiers:
    """Return the tasks of a verifiers taskset (verifiers 0.4), with the environment that goes with them.

        words = from_verifiers("my-words", python=".venv-verifiers/bin/python", env={"agent": {"max_turns": 4}})
        GRPOTrainer(
            ..., train_dataset=words.dataset(), rollout_func=episodes(words), reward_funcs=episode_reward
        )

    verifiers and vLLM ask for different versions of the same packages, so verifiers runs in a process of its own, with
    the interpreter of a Python environment in which it is installed.

    The task computes the reward when verifiers ends the episode. An episode has no reward if a limit of this package
    ends it first: `max_completion_length`, or the `max_turns` of `episodes` or of `rollout_options`. To limit the
    turns and still get rewards, set `max_turns` in `env`.

    With `episodes`, only conversations can be played. A trajectory ends with an error if the environment offers its
    agent tools, shows it images, shortens the conversation, or lets two agents speak with the trained model. With
    `agents`, verifiers asks the model itself, as it asks any server, so tools, rewritten conversations and several
    agents are trained, too:

        GRPOTrainer(
            ..., train_dataset=words.dataset(), rollout_func=agents(words.agent), reward_funcs=episode_reward
        )

    Args:
        taskset: verifiers' id of an installed taskset, or the name of a module in the current directory.
        python: the interpreter of the Python environment with verifiers.
        env: settings of verifiers' environment, as in its `[env]` block: "taskset", "id", its agents. Agents run as
            plain conversations on this machine unless `env` says otherwise.
        start_seconds: how long the imports of verifiers and of the taskset may take.

    Raises:
        ConfigError: verifiers is not installed in the environment of `python`, knows no such taskset, or did not start
            in time.
    """
    require_websockets("from_verifiers")
    return Verifiers(taskset, _Process(taskset, python, env or {}, start_seconds))


class Verifiers:
    """A factory of environments for one taskset; pass it to `episodes`.

    The process that runs verifiers ends when `close` is called, when this object is deleted, or when the trainer's
    process ends.
    """

    def __init__(self, taskset: str, process: _Process) -> None:
        self._taskset, self._process = taskset, process
        self.__name__ = "Verifiers"  # name of its environments in messages

    def __call__(self) -> VerifiersEpisode:
        """Return a fresh environment for one episode. It connects to verifiers' process at `reset`."""
        return VerifiersEpisode(self._process.address)

    async def agent(self, base_url: str, row: Row) -> float | None:
        """Let verifiers play the task of a dataset's row with the model at an address, and return the sum of the
        rewards of all its agents; None where verifiers gave none. For use with `trlx_hybrid_multiturn.gateway.agents`.

        Args:
            base_url: the address of OpenAI's API that asks the model.
            row: the row.
        """
        connection = await _connected(self._process.address)
        try:
            told = await connection.ask("play", {"task": json.loads(row["task"]), "base_url": base_url})
        finally:
            await connection.close()
        reward: float | None = told["reward"]
        return reward

    def rows(self, size: int | None = None) -> list[dict[str, Any]]:
        """Return tasks as rows of a dataset, with the columns `prompt` (chat messages) and `task` (the task as JSON
        text).

        Args:
            size: how many tasks are returned, the first ones; None returns all.

        Raises:
            ConfigError: the taskset fails, or it is endless and no size is given.
        """
        query = "" if size is None else f"?size={size}"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the server is on this machine
        try:
            with opener.open(f"http://{self._process.address}/tasks{query}") as reply:
                answer = json.load(reply)
        except OSError as error:
            raise ConfigError(f"The process of taskset {self._taskset!r} is gone: {error}.") from error
        if "error" in answer:
            raise ConfigError(f"Taskset {self._taskset!r} gives no tasks: {answer['error']}")
        # A conversation that the environment opens has no prompt; TRL wants one.
        empty = [{"role": "user", "content": ""}]
        return [{"prompt": row["prompt"] or empty, "task": json.dumps(row["task"])} for row in answer["tasks"]]

    def dataset(self, size: int | None = None) -> Dataset:
        """Return tasks as a `datasets.Dataset` with the columns `prompt` (chat messages) and `task` (the task as JSON
        text).

        Args:
            size: how many tasks are returned, the first ones; None returns all.

        Raises:
            ConfigError: the taskset fails, or it is endless and no size is given.
        """
        from datasets import Dataset

        return Dataset.from_list(self.rows(size))

    def close(self) -> None:
        """End verifiers' process. Safe to call twice."""
        self._process.stop()


class VerifiersEpisode:
    """An environment for one episode, which verifiers' process plays; verifiers decides when it ends.

    Args:
        address: host, port and secret path of the server in verifiers' process.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._connection: Connection | None = None

    async def reset(self, row: Row) -> str | list[Message] | None:
        """Begin the task of a dataset's row, and return the text or messages that verifiers shows the model in addition
        to the row's prompt; None if verifiers adds nothing."""
        self._connection = await _connected(self._address)
        begun = await self._connection.ask("reset", {"task": json.loads(row["task"])})
        if begun["done"]:
            raise ServerError("The episode was over before the model was asked.")
        return remainder(row["prompt"], begun["messages"])

    async def step(self, completion: str) -> Step:
        """Send the model's completion to verifiers, and return its next messages, or, at the end of the episode, the
        reward."""
        assert self._connection is not None
        told = await self._connection.ask("step", {"completion": completion})
        if told["done"]:
            return Step(done=True, reward=told["reward"])
        return Step(observation=told["messages"])

    async def close(self) -> None:
        """Close the connection. If the episode is not over, verifiers' process abandons the episode."""
        if self._connection is not None:
            await self._connection.close()


async def _connected(address: str) -> Connection:
    """Return a connection for one episode.

    Args:
        address: host, port and secret path of the server in verifiers' process.
    """
    return await Connection.open(f"ws://{address}/episode", "The verifiers process", CONNECT_SECONDS)


def remainder(prompt: list[Message], asked: list[Message]) -> str | list[Message] | None:
    """Return what must be added to a row's prompt to get the messages with which verifiers calls the model first.

    Args:
        prompt: messages of the row's prompt.
        asked: messages of verifiers' first call of the model.

    Returns:
        Text to append to the prompt's last message, messages that follow the prompt, or None if nothing is added.

    Raises:
        ServerError: the messages do not begin with the prompt.
    """
    last = len(prompt) - 1
    if asked[:last] == prompt[:last] and len(asked) > last and asked[last]["role"] == prompt[last]["role"]:
        said, wanted = prompt[last]["content"], asked[last]["content"]
        if wanted == said:
            return asked[last + 1 :] or None
        if wanted.startswith(said) and len(asked) == len(prompt):
            return str(wanted[len(said) :])
    raise ServerError(
        f"The environment asks the model something else than the row's prompt: {str(asked)[:200]} instead of "
        f"{str(prompt)[:200]}. Train on the rows that from_verifiers(…).dataset() gives."
    )


class _Process:
    """A process that runs the library `verifiers` and serves the episodes of one of its tasksets (tasks with their
    rewards). The process ends with the trainer's process, because its standard input closes then.

    Args:
        taskset: verifiers' id of an installed taskset, or the name of a module in the current directory.
        python: the interpreter of the Python environment with verifiers.
        env: settings of verifiers' environment, as in its `[env]` block.
        seconds: how long the start of the process may take.

    Attributes:
        address: host, port and secret path of the process's server.
        stop: ends the process; safe to call twice.

    Raises:
        ConfigError: the process cannot be started, did not start in time, or cannot load the taskset or its packages.
    """

    def __init__(self, taskset: str, python: str, env: Mapping[str, object], seconds: float) -> None:
        try:
            self._process = subprocess.Popen(
                [python, str(PROCESS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
        except OSError as error:
            raise ConfigError(f"from_verifiers(python={python!r}) cannot be started: {error}.") from error
        self.stop = weakref.finalize(self, _stop, self._process)
        secret = secrets.token_urlsafe(16)
        answer = self._started({"taskset": taskset, "env": dict(env), "secret": secret}, seconds)
        if answer is None:
            code = self._process.poll()
            self.stop()
            how = f"did not start within {seconds:g} s" if code is None else f"ended at its start, exit code {code}"
            raise ConfigError(
                f"The verifiers process of taskset {taskset!r} ({python}) {how}; what it printed is above."
                + (" start_seconds waits longer." if code is None else "")
            )
        if "error" in answer:
            self.stop()
            missing = str(answer.get("missing", "")).partition(".")[0]
            there = missing not in ("verifiers", "aiohttp")
            raise ConfigError(
                f"verifiers ({python}) cannot play taskset {taskset!r}: {answer['error'].rstrip('.')}."
                + ("" if there else f" Install it: {python} -m pip install 'verifiers==0.4.*'")
            )
        self.address = f"127.0.0.1:{answer['port']}/{secret}"

    def _started(self, settings: dict[str, object], seconds: float) -> dict[str, Any] | None:
        """Send settings to the process, and return the JSON object that it answers with.

        Args:
            settings: the taskset, the environment's settings and the secret.
            seconds: how long to wait for the answer.

        Returns:
            The answer; None if the process ended, or did not answer in time.
        """
        process, output = self._process, self._process.stdout
        assert process.stdin is not None
        assert output is not None
        with contextlib.suppress(BrokenPipeError):  # the process has ended, and its output ends, too
            process.stdin.write(json.dumps(settings, default=os.fspath).encode() + b"\n")
            process.stdin.flush()
        readable, _, _ = select.select([output], [], [], seconds)  # the first line, which arrives whole, or the end
        if not readable:
            return None
        if not (line := output.readline()):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
            return None
        return dict(json.loads(line))


def _stop(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.close()
        process.wait(STOP_SECONDS)
    except (subprocess.TimeoutExpired, OSError):
        process.kill()
        process.wait()
    process.stdout.close()
