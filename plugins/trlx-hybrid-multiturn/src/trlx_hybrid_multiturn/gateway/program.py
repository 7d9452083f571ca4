"""Agents that are programs: a command line, run in a process of its own for each episode."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import IO, Any

from trlx_hybrid.errors import HybridError

from ..environment import Row

OUTPUT = 1 << 20
"""The number of bytes of a program's output that are read, from its end."""
TOLD = 2000
"""The number of characters of a failed program's last output that the error shows."""


class CommandError(HybridError):
    """Raised where a program ended with another exit code than 0. The message shows its last output."""


def command(
    arguments: Sequence[str] | Callable[[Row], Sequence[str]],
    *,
    reward: Callable[[Row, str], float | None] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Callable[[str, Row], Awaitable[float | None]]:
    """Return an agent that runs a program, for `agents`.

        program = [sys.executable, os.path.abspath("agent.py")]
        rollout_func=agents(command(program, reward=lambda row, output: float(row["answer"] in output)))

    The program finds the endpoint as official clients do: in OPENAI_BASE_URL and OPENAI_API_KEY, and in
    ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY. It gets the dataset's row as JSON on its standard input, and a new folder
    as its working directory, which is removed afterwards; so paths are absolute. When it ends, or its episode is over,
    the processes that it has started are killed, except those that have left its process group. It runs as this user
    and sees this machine: nothing isolates it.

    Args:
        arguments: the program and its arguments, or a function that returns them for a row.
        reward: returns the episode's reward from the row and the program's standard output; the last MiB of it. None
            where reward functions compute it.
        environment: further environment variables.
    """

    async def agent(base_url: str, row: Row) -> float | None:
        words = [*(arguments(row) if callable(arguments) else arguments)]
        of_client = {
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_KEY": "none",
            "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": "none",
        }
        with (
            tempfile.TemporaryDirectory(prefix="agent-", ignore_cleanup_errors=True) as folder,
            tempfile.TemporaryFile() as given,
            tempfile.TemporaryFile() as out,
            tempfile.TemporaryFile() as errors,
        ):
            given.write(json.dumps(row, default=str).encode())
            given.seek(0)
            process = await asyncio.create_subprocess_exec(
                *words,
                stdin=given,
                stdout=out,
                stderr=errors,
                cwd=folder,
                env={**os.environ, **of_client, **(environment or {})},
                start_new_session=True,
            )
            try:
                code = await process.wait()
            finally:
                await _end(process)
            if code:
                told = (_end_of(errors) or _end_of(out))[-TOLD:].strip()
                raise CommandError(f"{words[0]!r} ended with exit code {code}: {told}")
            return None if reward is None else reward(row, _end_of(out))

    return agent


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill a process and all that it has started, except those that have left its process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def _end_of(file: IO[Any]) -> str:
    """Return the last `OUTPUT` bytes of a file as text."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - OUTPUT))
    return bytes(file.read()).decode(errors="replace")
