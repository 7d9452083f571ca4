"""The tree of what was said in an episode: which of the model's messages a request continues, and its place in it.

A path from a first request to a message without a continuation is a conversation. A branch is the part of one that is
its own: it begins where its history is another than that of all branches before.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .asked import Asked, Message, compared
from .errors import RefusedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of a request in the tree.

    Attributes:
        branch: the number of the branch that gets the model's next message.
        after: the message of the model that the request continues, as the number of its branch and its number among the
            model's messages there; None where the request begins a conversation.
        new: the messages that follow it (`Asked.after`).
        draw: the number that, together with the row, determines the seed. It depends on what is asked and on how often
            the same was asked before, and not on the order of other requests, with one exception: in the conversation
            that begins with the row's prompt, the first continuation of each message is numbered as the turns of an
            environment are, so that both sample the same.
        said: the whole request as it is compared (`Asked.compared`).
    """

    branch: int
    after: tuple[int, int] | None
    new: Sequence[Message]
    draw: int
    said: list[Any]


@dataclass(slots=True, eq=False)
class Branch:
    """One branch, as requests are compared with it.

    Attributes:
        form: the tools that the model is offered, and how prompts are given (`Asked.form`).
        plain: whether it is the conversation that begins with the row's prompt.
        said: its conversation up to the model's last message, as it is compared.
        ends: for each message of the model in this branch, the number of elements of `said` up to it.
        waits: whether a request of it has not been answered.
    """

    form: list[Any]
    plain: bool
    said: list[Any] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    waits: bool = True


class Tree:
    """The branches of an episode.

    Args:
        prompt: messages of the row's prompt.
        branching: whether there may be several branches. If not, a request that begins another is refused.

    Attributes:
        refusal: why a request was refused, None as long as none was.
    """

    def __init__(self, prompt: Sequence[Message] = (), *, branching: bool = True) -> None:
        self.refusal: str | None = None
        self._prompt = [compared(message) for message in prompt]
        self._branching = branching
        self._branches: list[Branch] = []
        self._draws: Counter[str] = Counter()

    def placed(self, asked: Asked) -> Place:
        """Return the place of a request. Its branch waits from then on.

        A request continues a message of the model: of those whose histories it begins with, the one with the longest.
        Where this message has been continued, or is being continued, the request begins a branch that shares its tokens
        up to there. Where there is no such message, it begins a conversation.

        Raises:
            RefusedError: it begins a branch, and there may be one only.
        """
        said, form = asked.compared, asked.form
        after = self._continued(said, form)
        continues = after is not None and self._last(*after)
        plain = after is None and said == self._prompt and not any(branch.plain for branch in self._branches)
        number = after[0] if after is not None and continues else len(self._branches)
        if not continues:
            self._refuse_another()
            self._branches.append(Branch(form, plain))
        branch = self._branches[number]
        branch.waits = True
        key = json.dumps([said, form], sort_keys=True, default=str)
        before, self._draws[key] = self._draws[key], self._draws[key] + 1
        begun = 0 if after is None else self._branches[after[0]].ends[after[1]]
        return Place(
            branch=number,
            after=after,
            new=asked.after(begun),
            draw=len(branch.ends) if branch.plain else _draw(key, before),
            said=said,
        )

    def _refuse_another(self) -> None:
        """Refuse a further branch where there may be one only.

        Raises:
            RefusedError: there is one, and there may be one only.
        """
        if self._branching or not any(branch.waits or branch.ends for branch in self._branches):
            return
        self.refusal = self.refusal or (
            "its messages or tools are others than before, or two requests are open at a time, and this run trains on "
            "one conversation for an episode"
        )
        raise RefusedError(
            "The messages or tools are others than before, or another request is open. This run trains on one "
            "conversation for an episode.",
            parameter="messages",
        )

    def answered(self, place: Place, said: Sequence[Any]) -> None:
        """Note the model's message: it can be continued from then on.

        Args:
            place: the place of the request.
            said: the message as it is compared (`Said.compared`).
        """
        branch = self._branches[place.branch]
        branch.said = [*place.said, *said]
        branch.ends.append(len(branch.said))
        branch.waits = False

    def refused(self, place: Place) -> None:
        """Note that a request was refused. Its branch can be continued from where it was; one that it would have begun
        stays empty, and does not count."""
        branch = self._branches[place.branch]
        branch.waits, branch.plain = False, branch.plain and bool(branch.ends)

    def _continued(self, said: Sequence[Any], form: Sequence[Any]) -> tuple[int, int] | None:
        """Return the message of the model that a request continues, as `Place.after`: of several with equal histories,
        the first one that has no continuation."""
        found = [
            (end, self._last(number, turn), -number, turn)
            for number, branch in enumerate(self._branches)
            if branch.form == form
            for turn, end in enumerate(branch.ends)
            if end < len(said) and branch.said[:end] == said[:end]
        ]
        if not found:
            return None
        _, _, number, turn = max(found)
        return -number, turn

    def _last(self, number: int, turn: int) -> bool:
        """Return whether a message of the model has no continuation in its branch, and none that is being sampled."""
        branch = self._branches[number]
        return turn == len(branch.ends) - 1 and not branch.waits


def _draw(key: str, before: int) -> int:
    """Return a number for a seed, which is not that of a turn.

    Args:
        key: the request.
        before: how often the same was asked before.
    """
    digest = hashlib.blake2b(f"{before} {key}".encode(), digest_size=8).digest()
    return 1 << 62 | int.from_bytes(digest, "little") >> 2
