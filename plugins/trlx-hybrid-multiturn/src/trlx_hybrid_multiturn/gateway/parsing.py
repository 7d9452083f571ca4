"""The model's turns as chat messages, with the tool calls in them."""

from __future__ import annotations

import bisect
import contextlib
import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from trl.chat_template_utils import add_response_schema, parse_response
from trlx_hybrid.contract.conversation import Message, images_of
from trlx_hybrid.contract.types import Completion
from trlx_hybrid.episodes.tokenizer import own_tokenizer

from .asked import Asked, Raw
from .errors import RefusedError

CONTEXT = 8
"""The number of tokens with which the text after them is decoded."""
SCHEMAS = ("response_template", "response_schema")
"""The attributes of a tokenizer that tell transformers how a response is parsed."""


class Parser:
    """A parser of turns, by a tokenizer of its own: TRL's schema for the chat template is added where it has none.

    Args:
        tokenizer: the trainer's tokenizer.

    Attributes:
        finds_calls: whether it finds tool calls. Without a schema, every turn is plain text.
    """

    def __init__(self, tokenizer: Any) -> None:
        own = own_tokenizer(tokenizer)
        self._tokenizer = getattr(own, "tokenizer", own)  # of a processor
        self._counter, self._counting = own_tokenizer(tokenizer), threading.Lock()
        if not self._has_schema():
            with contextlib.suppress(ValueError):  # TRL does not know this chat template
                add_response_schema(own)
        self.finds_calls = self._has_schema()

    def message(self, token_ids: list[int], before: list[int], tools: Sequence[Mapping[str, Any]]) -> Message:
        """Return a turn as a message. It is plain text where it is not parsed.

        Args:
            token_ids: the sampled tokens of the turn.
            before: all tokens before them.
            tools: the tools that the model was offered, as JSON schemas.
        """
        if not tools or not self.finds_calls:
            text = self._tokenizer.decode(token_ids, skip_special_tokens=True)
            return {"role": "assistant", "content": text}
        parsed = parse_response(self._tokenizer, token_ids, prefix=before, tools=list(tools))
        message: Message = {"role": "assistant", "content": parsed.get("content") or ""}
        if reasoning := parsed.get("reasoning_content") or parsed.get("thinking"):
            message["reasoning_content"] = reasoning
        if parsed.get("tool_calls"):
            message["tool_calls"] = parsed["tool_calls"]
        return message

    def stopped(self, token_ids: Sequence[int], stops: Sequence[str]) -> tuple[int, str] | None:
        """Return how many tokens of a turn it takes until one of some texts has been said, and which text; None where
        none is said. Of several that end with the same token, it is the one that begins first.

        Args:
            token_ids: the sampled tokens of the turn.
            stops: the texts.
        """

        def said(tokens: int) -> str | None:
            text = self._tokenizer.decode(token_ids[:tokens], skip_special_tokens=True)
            places = [(text.find(stop), stop) for stop in stops if stop in text]
            return min(places)[1] if places else None

        if not stops or said(len(token_ids)) is None:
            return None
        tokens = bisect.bisect_left(range(len(token_ids) + 1), True, key=lambda tokens: said(tokens) is not None)
        stop = said(tokens)
        assert stop is not None
        return tokens, stop

    def ids(self, raw: Raw, *, begins: bool) -> list[int]:
        """Return a text without a chat template as token ids.

        Args:
            raw: the text, or its ids.
            begins: whether a conversation begins with it, so that it gets the tokenizer's special tokens.

        Raises:
            RefusedError: an id is none of the tokenizer's, or a conversation begins with no token.
        """
        ids = self._tokenizer.encode(raw, add_special_tokens=begins) if isinstance(raw, str) else raw
        if beyond := [token for token in ids if token >= len(self._tokenizer)]:
            known = f"the tokenizer has {len(self._tokenizer)} tokens"
            raise RefusedError(f"prompt: there is no token {beyond[0]}; {known}.", parameter="prompt")
        if begins and not ids:
            raise RefusedError("prompt: it has no token.", parameter="prompt")
        return list(ids)

    def text(self, token_ids: list[int], before: list[int]) -> str:
        """Return sampled tokens as the text that they add to the text before them. Some tokenizers decode the first
        token of a text without its space.

        Args:
            token_ids: the sampled tokens.
            before: all tokens before them.
        """
        decode = functools.partial(self._tokenizer.decode, skip_special_tokens=True)
        head = str(decode(before[-CONTEXT:]))
        whole = str(decode([*before[-CONTEXT:], *token_ids]))
        return whole[len(head) :] if whole.startswith(head) else str(decode(token_ids))

    def listed(self, completion: Completion) -> list[tuple[str, float]]:
        """Return the text and the log-prob of each token of a turn. The text of a token that is part of a character
        only has a replacement character.

        Args:
            completion: the turn, with log-probs.
        """
        assert completion.logprobs is not None
        texts = [self._tokenizer.decode([token]) for token in completion.token_ids]
        return [(text, of_token[0] or 0.0) for text, of_token in zip(texts, completion.logprobs, strict=True)]

    def count(self, asked: Asked) -> int:
        """Return the number of tokens of a request's messages and tools, as the chat template renders them. May be
        called from any thread.

        Raises:
            RefusedError: the messages have images.
        """
        if images_of(asked.messages):
            raise RefusedError("Tokens of images are not counted before they are sent.", parameter="messages")
        with self._counting:
            ids = self._counter.apply_chat_template(
                list(asked.messages), tools=list(asked.tools) or None, add_generation_prompt=True, return_dict=False
            )
        return len(ids)

    def _has_schema(self) -> bool:
        return any(getattr(self._tokenizer, name, None) is not None for name in SCHEMAS)
