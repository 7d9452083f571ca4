"""What tools answered as token ids, by TRL's own method, which renders and encodes an opening for every answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from .own_tokenizer import own_tokenizer


def observer(trainer: Any) -> Callable[[Sequence[dict[str, Any]]], list[int]]:
    """The ids that follow a turn's tool calls; the opening is rendered once per tool's name, and encoded once.

    Good for one batch: the template, and what it is given, may be others in the next. To be called from several threads
    at once. A trainer that has a method of its own in place of TRL's is asked as it is.
    """
    method = getattr(type(trainer), "_get_tool_suffix_ids", None)
    if method is None or not method.__module__.startswith("trl."):
        return trainer._get_tool_suffix_ids  # type: ignore[no-any-return]
    reads = ("_is_vlm", "chat_template", "chat_template_kwargs", "_tokenizer")
    stand_in = SimpleNamespace(**{name: getattr(trainer, name) for name in reads})
    stand_in.processing_class = _Openings(own_tokenizer(trainer.processing_class))
    return lambda messages: method(stand_in, messages)


@dataclass(frozen=True, slots=True)
class _Opening:
    """A conversation up to where its last turn ended, with the token that ends it."""

    text: str
    ids: list[int]


class _Openings:
    """The tokenizer or processor; remembers the ids of conversations that have no answers yet.

    Of a conversation with answers only what follows the opening is encoded. That gives the same ids where the opening
    ends with a token at which texts are split before anything else happens to them, and which takes no spaces with it.
    What a tokenizer does at a text's beginning alone is seen at the first answer, which is encoded both ways.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._known: dict[str, Any] = {}
        self._openings: dict[str, _Opening | None] = {}
        self._splits = _splits_at_its_end_of_turn(inner)

    def apply_chat_template(self, messages: Sequence[dict[str, Any]], **given: Any) -> Any:
        name = messages[1]["tool_calls"][0]["function"]["name"]
        if not given["add_generation_prompt"]:
            if name not in self._known:
                self._known[name] = self._inner.apply_chat_template(messages, **given)
            return self._known[name]
        opening = self._openings.get(name)
        if opening is not None:
            text = self._inner.apply_chat_template(messages, **given | {"tokenize": False})
            if text.startswith(opening.text):
                return opening.ids + self._encoded(text[len(opening.text) :])
        ids = self._inner.apply_chat_template(messages, **given)
        if self._splits and name not in self._openings:
            self._openings[name] = self._opening(name, messages, ids, given)
        return ids

    def _opening(
        self, name: str, messages: Sequence[dict[str, Any]], ids: list[int], given: dict[str, Any]
    ) -> _Opening | None:
        """What may be left out, if encoding the rest of this conversation gives the rest of its ids."""
        end, end_id = self._inner.eos_token, self._inner.eos_token_id
        as_text = given | {"tokenize": False}
        text = self._inner.apply_chat_template(messages, **as_text)
        before = self._inner.apply_chat_template(messages[:2], **as_text | {"add_generation_prompt": False})
        known = self._known.get(name, [])
        if end not in before or end_id not in known:
            return None
        cut = before.rindex(end) + len(end)
        opening = _Opening(before[:cut], known[: len(known) - known[::-1].index(end_id)])
        same = text.startswith(opening.text) and opening.ids + self._encoded(text[cut:]) == ids
        return opening if same else None

    def _encoded(self, text: str) -> list[int]:
        """Past what transformers does around it: no setting of an earlier call is there."""
        return self._inner.backend_tokenizer.encode(text, add_special_tokens=False).ids  # type: ignore[no-any-return]


def _splits_at_its_end_of_turn(inner: Any) -> bool:
    """Whether this is a tokenizer of the `tokenizers` library that cuts texts at its end-of-sequence token."""
    if not getattr(inner, "is_fast", False) or getattr(inner, "split_special_tokens", False):
        return False
    end = inner.added_tokens_decoder.get(inner.eos_token_id)
    return end is not None and not (end.normalized or end.single_word or end.lstrip or end.rstrip)
