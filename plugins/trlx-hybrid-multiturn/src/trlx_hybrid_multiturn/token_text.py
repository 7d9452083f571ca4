"""The text of each single token, such that the texts put together are the text of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"  # what a decoder makes of bytes that are no whole character
LONGEST = 64  # tokens that may share characters before they count as bytes that will never be text


class TokenTexts:
    """Decodes tokens one by one with one tokenizer; remembers what it has seen.

    Args:
        tokenizer: a transformers tokenizer, or a processor that has one.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer if hasattr(tokenizer, "all_special_ids") else tokenizer.tokenizer
        self._singles: dict[int, str] = {}
        added = getattr(self._tokenizer, "added_tokens_decoder", None) or {}
        special = {index for index, token in added.items() if getattr(token, "special", False)}
        self.special_ids: frozenset[int] = frozenset(special | set(self._tokenizer.all_special_ids))

    def of(self, ids: Sequence[int], kinds: Sequence[Any]) -> list[str | None]:
        """The text of every token; None where a token's text is part of the one before it.

        Byte-level tokenizers split a character over several tokens: the first gets the text, the others None. Tokens
        of different `kinds` (one per token, compared with their neighbours) never share a text: half a character that
        was sampled and half a character that was observed are two unreadable halves.
        """
        texts: list[str | None] = []
        start = 0
        for end in range(1, len(ids) + 1):
            if end == len(ids) or kinds[end] != kinds[start]:
                texts += self._run(list(ids[max(0, start - 1) : end]), min(start, 1))
                start = end
        return texts

    def _run(self, ids: list[int], start: int) -> list[str | None]:
        """Texts of `ids[start:]`. What precedes is context: sentencepiece drops the space a text begins with."""
        if self._single(ids[0]).endswith(REPLACEMENT):
            ids, start = ids[start:], 0  # half a character as context would take in what follows
        singles = [self._single(token) for token in ids]
        if "".join(singles) == self._decode(ids):
            return list(singles[start:])
        texts: list[str | None] = []
        anchor, begin = 0, start
        for end in range(start + 1, len(ids) + 1):
            known, text = self._decode(ids[anchor:begin]), self._decode(ids[anchor:end])
            if text.endswith(REPLACEMENT) and end < len(ids) and end - begin < LONGEST:
                continue  # more bytes may complete the character
            new = text[len(known) :] if text.startswith(known) else ""
            new = new or self._decode(ids[begin:end])
            texts += singles[begin:end] if "".join(singles[begin:end]) == new else [new, *[None] * (end - begin - 1)]
            anchor, begin = begin, end
        return texts

    def _single(self, token: int) -> str:
        if token not in self._singles:
            self._singles[token] = self._decode([token])
        return self._singles[token]

    def _decode(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)
