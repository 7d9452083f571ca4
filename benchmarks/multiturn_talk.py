"""A model of random weights in conversation: what it is taken to say, and the tools that answer.

Random weights call no tools, so the tokenizer reads one call out of every turn, whatever was sampled. The same in all
arms: what is measured is who waits for whom, and that does not depend on what is said.
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
"""Little text, since words that are no hexadecimal number all become one token that says nothing."""

PLACE = 1  # of the first word of a prompt's text among its tokens, behind its role
Arguments = dict[str, Any]


class Talker(PreTrainedTokenizerFast):  # type: ignore[misc]
    """Finds one tool call in every turn.

    Attributes:
        call: which one: the tool's name and arguments, of the conversation's first word, as an id.
    """

    call: Callable[[int], tuple[str, Arguments]]

    def parse_response(self, response: Any, *args: Any, prefix: Sequence[int], **kwargs: Any) -> dict[str, Any]:
        """An assistant's message that calls."""
        name, arguments = self.call(prefix[PLACE])
        function = {"name": name, "arguments": arguments}
        return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def talker(vocabulary: int) -> Talker:
    """One for a model of so many words."""
    inner = tokenizer(vocabulary)
    made = Talker(
        tokenizer_object=inner._tokenizer,
        eos_token="<eos>",
        pad_token="<eos>",
        padding_side="left",
        chat_template=TEMPLATE,
    )
    made.response_template = {}  # TRL looks for one it knows, unless there is one
    return made


def prompt(first: int, words: Sequence[int]) -> list[dict[str, str]]:
    """A user's message that begins with the word of id `first`."""
    return [{"role": "user", "content": " ".join(f"{word:x}" for word in (first, *words))}]


def compute(loops: int) -> str:
    """Compute, and hold the interpreter for as long as it takes.

    Args:
        loops: how much.
    """
    total = 0
    for value in range(loops):
        total += value * value
    return f"{total % 251:x}"


class Waiting:
    """The tool that waits, as a call to some server would, and for its lock-step arm a way to call early.

    Args:
        answer: what it says.
    """

    def __init__(self, answer: str) -> None:
        self._answer = answer
        self._threads = ThreadPoolExecutor(256)
        self._called: dict[tuple[int, int], Future[str]] = {}

    def wait(self, row: int, turn: int, seconds: float) -> str:
        """Wait.

        Args:
            row: whose call this is.
            turn: and which.
            seconds: how long.
        """
        early = self._called.pop((row, turn), None)
        return early.result() if early is not None else self._wait(seconds)

    def call(self, row: int, turn: int, seconds: float) -> None:
        """Begin the call now; `wait` then waits for what is left of it.

        TRL reads the messages of a whole turn before it calls its tools one after another. Begun as they are read, all
        calls of a turn run at the same time, and TRL's own loop takes only as long as the slowest.
        """
        self._called[row, turn] = self._threads.submit(self._wait, seconds)

    def _wait(self, seconds: float) -> str:
        time.sleep(seconds)
        return self._answer


class Turns:
    """Counts the turns of each conversation, from any thread."""

    def __init__(self) -> None:
        self._turns: Counter[int] = Counter()
        self._lock = threading.Lock()

    def next(self, row: int) -> int:
        """0 at the first call for a row, then 1, …"""
        with self._lock:
            self._turns[row] += 1
            return self._turns[row] - 1
