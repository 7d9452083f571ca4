"""The tokens of an episode's branches, and the one row that TRL has for all of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from trlx_hybrid.contract.conversation import Conversation, Message
from trlx_hybrid.contract.conversation import Turn as TurnSize
from trlx_hybrid.contract.types import Completion


class End(NamedTuple):
    """The end of a message of the model in its branch.

    Attributes:
        tokens: the number of tokens after the prompt, up to it.
        messages: the number of messages after the prompt, up to it.
        cut: whether it was cut, so that no token ends it.
    """

    tokens: int
    messages: int
    cut: bool


@dataclass(slots=True, eq=False)
class Branch:
    """The tokens of one branch.

    Attributes:
        number: its number in the episode.
        prompt_ids: token ids before the model's first message in this branch.
        opening: the messages that this message answers, without those that other branches have.
        conversation: all that was said after the prompt.
        ends: the ends of the model's messages.
    """

    number: int
    prompt_ids: list[int]
    opening: list[Message] = field(default_factory=list)
    conversation: Conversation = field(default_factory=Conversation)
    ends: list[End] = field(default_factory=list)

    def until(self, turn: int) -> tuple[list[int], bool]:
        """Return the token ids up to one of the model's messages, and whether this message was cut.

        Args:
            turn: the message's number among those of the branch.
        """
        end = self.ends[turn]
        return [*self.prompt_ids, *self.conversation.completion_ids[: end.tokens]], end.cut

    def said(self, completion: Completion, prompt: int, message: Message, cut: bool) -> None:
        """Append a message of the model.

        Args:
            completion: its tokens.
            prompt: the number of tokens before it.
            message: the message.
            cut: whether it was cut.
        """
        conversation = self.conversation
        conversation.sampled(completion)
        conversation.turns.append(TurnSize(prompt=prompt, sampled=len(completion.token_ids)))
        conversation.messages.append(message)
        conversation.calls += 1
        self.ends.append(End(len(conversation.completion_ids), len(conversation.messages), cut))

    def shown(self, token_ids: list[int], messages: Iterable[Message]) -> None:
        """Append what the model is shown after its last message.

        Args:
            token_ids: the tokens.
            messages: the messages.
        """
        self.conversation.observed(token_ids)
        self.conversation.turns[-1].observed = len(token_ids)
        self.conversation.messages += messages

    def until_heard(self, heard: Collection[tuple[int, int]]) -> Branch | None:
        """Return the branch up to the last message of the model that the agent has heard; None where it has heard none.

        Args:
            heard: the messages that it has heard: the number of the branch, and the message's number there.
        """
        turns = max((turn for turn in range(len(self.ends)) if (self.number, turn) in heard), default=-1) + 1
        if turns in (0, len(self.ends)):
            return self if turns else None
        spoken, end = self.conversation, self.ends[turns - 1]
        spoken.turns[turns - 1].observed = 0
        kept = Conversation(
            completion_ids=spoken.completion_ids[: end.tokens],
            loss_mask=spoken.loss_mask[: end.tokens],
            logprobs=None if spoken.logprobs is None else spoken.logprobs[: end.tokens],
            support=None if spoken.support is None else spoken.support[: end.tokens],
            messages=spoken.messages[: end.messages],
            turns=spoken.turns[:turns],
            calls=turns,
            finish_reason="length" if end.cut else "stop",
            weight_versions=spoken.weight_versions[: end.tokens],
        )
        return Branch(self.number, self.prompt_ids, self.opening, kept, self.ends[:turns])


def joined(branches: Iterable[Branch], row: Conversation) -> tuple[list[int], list[tuple[int, int]]]:
    """Put all branches into one conversation, one behind the other, the later ones with their prompts before them.

    Args:
        branches: the branches, at least one.
        row: an empty conversation, which is filled.

    Returns:
        The first branch's prompt; and for each later branch the place in the completion at which it begins, and the
        number of its prompt's tokens.
    """
    first, *later = sorted(branches, key=lambda branch: branch.number)
    begins = []
    row.logprobs = None if first.conversation.logprobs is None else []
    row.support = first.conversation.support  # where supports are kept there is one branch only
    for branch in (first, *later):
        spoken = branch.conversation
        if branch is not first:
            begins.append((len(row.completion_ids), len(branch.prompt_ids)))
            row.messages += branch.opening
            row.completion_ids += branch.prompt_ids
            row.loss_mask += [0] * len(branch.prompt_ids)
            row.weight_versions += spoken.weight_versions[:1] * len(branch.prompt_ids)
            if row.logprobs is not None:
                row.logprobs += [0.0] * len(branch.prompt_ids)
        row.completion_ids += spoken.completion_ids
        row.loss_mask += spoken.loss_mask
        row.weight_versions += spoken.weight_versions
        if row.logprobs is not None and spoken.logprobs is not None:
            row.logprobs += spoken.logprobs
        row.messages += spoken.messages
        row.turns += spoken.turns
        row.calls += spoken.calls
        row.finish_reason = spoken.finish_reason
    return first.prompt_ids, begins
