"""Conversations of a model with random weights: the tool calls that are read from its turns, and the tools.

Random weights call no tools, so the tokenizer reads one call out of every turn, whatever was sampled. It is the same in
all arms: the benchmark measures who waits for whom, and that does not depend on what is said.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from transformers import PreTrainedTokenizerFast

from .rollout import tokenizer

TEMPLATE = (
    "{% for message in messages %}{{ message.role }} {{ message.content }}"
    "{% for call in message.tool_calls or [] %} {{ call.function.name }} {{ call.function.arguments }}{% endfor %}"
    "<eos>{% endfor %}{% if add_generation_prompt %} assistant{% endif %}"
)
"""A chat template with little text, since words that are not hexadecimal numbers all become one meaningless token."""

PLACE = 1  # index of the first word of a prompt's text among its tokens, after the role
Arguments = dict[str, Any]


class Talker(PreTrainedTokenizerFast):  # type: ignore[misc]
    """A tokenizer that finds one tool call in every turn.

    Attributes:
        call: returns the tool's name and arguments, given the id of the conversation's first word.
    """

    call: Callable[[int], tuple[str, Arguments]]

    def parse_response(self, response: Any, *args: Any, prefix: Sequence[int], **kwargs: Any) -> dict[str, Any]:
        """Return an assistant's message with a tool call."""
        name, arguments = self.call(prefix[PLACE])
        function = {"name": name, "arguments": arguments}
        return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def talker(vocabulary: int) -> Talker:
    """Return a `Talker` for a model with this vocabulary size."""
    inner = tokenizer(vocabulary)
    made = Talker(
        tokenizer_object=inner._tokenizer,
        eos_token="<eos>",
        pad_token="<eos>",
        padding_side="left",
        chat_template=TEMPLATE,
    )
    made.response_template = {}  # if it were missing, TRL would look for one that it knows
    return made


def prompt(first: int, words: Sequence[int]) -> list[dict[str, str]]:
    """Return a user's message that begins with the word of id `first`."""
    return [{"role": "user", "content": " ".join(f"{word:x}" for word in (first, *words))}]


def compute(loops: int) -> str:
    """Compute, and hold the interpreter's lock meanwhile.

    Args:
        loops: number of loops.
    """
    total = 0
    for value in range(loops):
        total += value * value
    return f"{total % 251:x}"


class Waiting:
    """A tool that waits, as a call to a server would; its lock-step arm can start the call early.

    Args:
        answer: text that the tool returns.
    """

    def __init__(self, answer: str) -> None:
        self._answer = answer
        self._threads = ThreadPoolExecutor(256)
        self._called: dict[tuple[int, int], Future[str]] = {}

    def wait(self, row: int, turn: int, seconds: float) -> str:
        """Wait for the given time, or for the rest of a call that was started early.

        Args:
            row: row of the conversation.
            turn: turn of the conversation.
            seconds: how long to wait.
        """
        early = self._called.pop((row, turn), None)
        return early.result() if early is not None else self._wait(seconds)

    def call(self, row: int, turn: int, seconds: float) -> None:
        """Start the call now; `wait` then waits for the rest of it.

        TRL reads the messages of a whole turn before it calls its tools one after another. When calls start as they are
        read, all calls of a turn run at the same time, and TRL's own loop takes only as long as the slowest.
        """
        self._called[row, turn] = self._threads.submit(self._wait, seconds)

    def _wait(self, seconds: float) -> str:
        time.sleep(seconds)
        return self._answer


class Turns:
    """A thread-safe counter of each conversation's turns."""

    def __init__(self) -> None:
        self._turns: Counter[int] = Counter()
        self._lock = threading.Lock()

    def next(self, row: int) -> int:
        """Return 0 at the first call for a row, then 1, …"""
        with self._lock:
            self._turns[row] += 1
            return self._turns[row] - 1
