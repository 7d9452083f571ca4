"""Agents that are programs: a command line, run in a process of its own for each episode."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager

from trlx_hybrid.errors import ConfigError, HybridError

from ..environment import Row
from .boxes import Folder, Sandbox, client_variables

TOLD = 2000
"""The number of characters of a failed program's last output that the error shows."""

Box = Callable[[str, Row], AbstractAsyncContextManager[Sandbox]]
"""A function of the base URL and the dataset's row that returns the box in which the program runs."""


class CommandError(HybridError):
    """Raised where a program ended with another exit code than 0. The message shows its last output."""


def command(
    arguments: Sequence[str] | Callable[[Row], Sequence[str]],
    *,
    reward: Callable[[Row, str], float | None] | None = None,
    environment: Mapping[str, str] | None = None,
    box: Box | None = None,
) -> Callable[[str, Row], Awaitable[float | None]]:
    """Return an agent that runs a program, for `agents`.

        program = [sys.executable, os.path.abspath("agent.py")]
        rollout_func=agents(command(program, reward=lambda row, output: float(row["answer"] in output)))

    The program finds the endpoint as official clients do: in OPENAI_BASE_URL and OPENAI_API_KEY, and in
    ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY. It gets the dataset's row as JSON on its standard input, and a new folder
    as its working directory, which is removed afterwards; so paths are absolute. When it ends, or its episode is over,
    the processes that it has started are killed, except those that have left its process group. It runs as this user
    and sees this machine, but for a `box`, which isolates it:

        command(["python", "agent.py"], box=lambda base_url, row: sandbox("agent", base_url=base_url))

    Args:
        arguments: the program and its arguments, or a function that returns them for a row.
        reward: returns the episode's reward from the row and the program's standard output; the last MiB of it. None
            where reward functions compute it.
        environment: further environment variables.
        box: where the program runs, such as a `sandbox`; None for a new folder of this machine.

    Raises:
        ConfigError: `environment` is given beside `box`, which has one of its own.
    """
    if box is not None and environment is not None:
        raise ConfigError("command(environment=..., box=...): give the environment to the box, which the program sees.")

    async def agent(base_url: str, row: Row) -> float | None:
        words = [*(arguments(row) if callable(arguments) else arguments)]
        given = json.dumps(row, default=str).encode()
        opened: AbstractAsyncContextManager[Sandbox]
        if box is None:
            opened = Folder(environment={**client_variables(base_url), **(environment or {})})
        else:
            opened = box(base_url, row)
        async with opened as folder:
            ran = await folder.run(words, seconds=None, given=given)
        if ran.code:
            told = (ran.errors or ran.output)[-TOLD:].strip()
            raise CommandError(f"{words[0]!r} ended with exit code {ran.code}: {told}")
        return None if reward is None else reward(row, ran.output)

    return agent
