"""The conformance check of chat templates: whether a conversation can be continued by appending tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from ...episodes.tokenizer import common_prefix
from .findings import ConformanceError, require

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    from ...contract.conversation import Message

ASKED: Message = {"role": "user", "content": "what is it?"}
SAID: Message = {"role": "assistant", "content": "a word I said"}
SHOWN: tuple[Message, ...] = ({"role": "user", "content": "first"}, {"role": "user", "content": "2 and more"})
CALLED: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "look_up", "arguments": {"entry": "snow"}}}],
}
ANSWERED: Message = {"role": "tool", "name": "look_up", "content": "frozen water"}

WAY_OUT = "Let the template render each message alone, whatever follows it: keep the reasoning of earlier turns, too."


def check_template(
    processing_class: PreTrainedTokenizerBase | ProcessorMixin,
    chat_template: str | None = None,
    *,
    options: Mapping[str, object] | None = None,
    end_ids: Collection[int] = (),
    tools: bool = False,
) -> None:
    """Render short conversations with a chat template, and check that a conversation can be continued by appending
    tokens: sampled tokens are never encoded again, so the rendered text before a message must not depend on the
    messages after it.

    Args:
        processing_class: the tokenizer, or the processor, that the trainer is given.
        chat_template: the template; by default that of `processing_class`.
        options: TRL's `chat_template_kwargs`.
        end_ids: tokens that end a turn when the model samples them, as in the model's generation config; the
            tokenizer's EOS is always one of them.
        tools: whether the model calls tools. Then tool calls and their results are checked, too, and that the tokenizer
            parses a call from its tokens.

    Raises:
        ConformanceError: the template cannot be used for such conversations. The message says what the template changes
            or leaves out, and how to fix it.
    """
    template = _Template(processing_class, chat_template, options or {}, end_ids)
    template.continues(SAID, SHOWN, "user")
    if tools:
        template.continues(CALLED, [ANSWERED], "tool")
        template.calls()


class _Template:
    """A chat template, and the tokenizer that encodes what it renders."""

    def __init__(
        self,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin,
        chat_template: str | None,
        options: Mapping[str, object],
        end_ids: Collection[int],
    ) -> None:
        inner = getattr(processing_class, "tokenizer", None)
        self._blocks = inner is not None  # a processor's template takes lists of content blocks
        self._tokenizer = cast("PreTrainedTokenizerBase", inner or processing_class)
        self._template = chat_template or cast("str | None", processing_class.chat_template)
        require(bool(self._template), "There is no chat template.", "Pass one, or set it on the tokenizer.")
        self._options = options
        self._ends = {*end_ids, self._tokenizer.eos_token_id}

    def continues(self, turn: Message, following: Sequence[Message], role: str) -> None:
        """Check that the conversation up to the end of the model's turn is rendered to the same tokens, whichever
        message follows it.

        Args:
            turn: the model's message.
            following: messages, each of which may follow the turn.
            role: the role of these messages, for error messages.
        """
        asked, ids = self._ids([ASKED], speak=True), self._ids([ASKED, turn])
        begun = common_prefix(asked, ids)
        ends = [place for place in range(begun, len(ids)) if ids[place] in self._ends]
        for message in following:
            whole = self._ids([ASKED, turn, message], speak=True)
            held = [place for place in ends if place < common_prefix(ids, whole)] or ends
            turn_ids = ids[: held[-1] + 1] if held else ids
            if whole[: len(turn_ids)] != turn_ids:
                place = common_prefix(whole, turn_ids)
                before, after = (self._tokenizer.decode(one[max(0, place - 5) :][:20]) for one in (turn_ids, whole))
                found = f"A {role}'s message after the model's changes what stands before it: {before!r} to {after!r}."
                raise ConformanceError(f"{found} {WAY_OUT}")
            shown = self._text([ASKED, turn, message], speak=True)
            require(
                str(message["content"]) in shown,
                f"The {role}'s message {message['content']!r} after the model's is not shown in full.",
                f"Let the template render messages of the role {role!r}.",
            )
        if turn is SAID:
            require(
                str(turn["content"]) in self._tokenizer.decode(turn_ids[begun:]),
                "The end of the model's message cannot be told from its tokens.",
                "Render the message's content as it is, and an end-of-turn token after it.",
            )

    def calls(self) -> None:
        """Check that the template renders a tool call, and that the tokenizer parses the call from the tokens of its
        turn."""
        text = self._text([ASKED, CALLED])
        require(
            all(part in text for part in ("look_up", "entry", "snow")),
            "The template does not show a tool call with its name and arguments.",
            "Render `message.tool_calls`.",
        )
        tokenizer = self._tokenizer
        parses = any(getattr(tokenizer, name, None) is not None for name in ("response_template", "response_schema"))
        require(
            parses,
            "The tokenizer has no `response_template`, by which calls are read from what the model samples.",
            "Set it, or call `trl.chat_template_utils.add_response_schema(tokenizer)` where TRL knows the template.",
        )
        prompt, answered = self._ids([ASKED], speak=True), self._ids([ASKED, CALLED])
        turn = answered[common_prefix(prompt, answered) :]
        try:
            if getattr(tokenizer, "response_template", None) is not None:
                parsed = tokenizer.parse_response(turn, prefix=prompt)
            else:
                parsed = tokenizer.parse_response(turn)
        except (ValueError, TypeError) as error:
            raise ConformanceError(f"The tokenizer cannot read a call as the template renders it: {error}") from error
        calls = [call.get("function") for call in (parsed or {}).get("tool_calls", [])]
        require(
            calls == [{"name": "look_up", "arguments": {"entry": "snow"}}],
            f"Of a call of look_up(entry='snow') the tokenizer reads {calls!r:.200}.",
            "Let `response_template` take the form in which the template shows calls.",
        )

    def _ids(self, messages: Sequence[Message], speak: bool = False) -> list[int]:
        """Return the token ids of messages; with `speak`, also the token ids that begin the model's turn."""
        return cast("list[int]", self._rendered(messages, speak, tokenize=True))

    def _text(self, messages: Sequence[Message], speak: bool = False) -> str:
        return cast(str, self._rendered(messages, speak, tokenize=False))

    def _rendered(self, messages: Sequence[Message], speak: bool, tokenize: bool) -> object:
        shaped = [
            {**message, "content": [{"type": "text", "text": message["content"]}]} if self._blocks else message
            for message in messages
        ]
        try:
            return self._tokenizer.apply_chat_template(
                shaped,
                chat_template=self._template,
                add_generation_prompt=speak,
                tokenize=tokenize,
                return_dict=False,
                **self._options,
            )
        except Exception as error:  # a template may raise anything, jinja's errors included
            roles = ", ".join(str(message["role"]) for message in messages)
            found = f"Messages of the roles {roles} cannot be rendered: {type(error).__name__}: {error}."
            raise ConformanceError(f"{found} Let the template take these roles in this order.") from error
