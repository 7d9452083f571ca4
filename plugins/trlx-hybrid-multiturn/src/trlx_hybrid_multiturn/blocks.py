"""A recorded trajectory as blocks of one kind of token, which is what every view shows."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any, Literal

from .record import Recorded

Kind = Literal["prompt", "sampled", "observed", "masked"]

# What would steer a terminal, reorder a line or break a page instead of being read, shown by its sign or its number.
_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The least that can be shown: a token, or the tokens that share a character.

    Attributes:
        text: what they read, fit to be seen: no control characters but line break and tab; never empty.
        ids, logprobs: of its tokens; the log-probs are None where there is none.
        special: whether it is a special token, or one without any text.
    """

    text: str
    ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    special: bool

    @property
    def logprob(self) -> float | None:
        """Log-prob of the whole span; None where that of a token is missing."""
        known = [value for value in self.logprobs if value is not None]
        return sum(known) if len(known) == len(self.logprobs) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Consecutive tokens of one kind.

    Attributes:
        kind: "prompt"; "sampled" by the model; "observed", from a tool or an environment; "masked", the completion of
            a failed trajectory, whose mask no longer tells sampled from observed.
        turn: number of the turn it belongs to, the first sampled block begins turn 1; 0 before that.
    """

    kind: Kind
    turn: int
    spans: tuple[Span, ...]

    @property
    def tokens(self) -> int:
        """How many tokens it has."""
        return sum(len(span.ids) for span in self.spans)

    @property
    def mean_logprob(self) -> float | None:
        """Mean log-prob of its tokens; None where one is missing."""
        values = [value for span in self.spans for value in span.logprobs]
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known and len(known) == len(values) else None

    @property
    def mean(self) -> str:
        """The mean log-prob of a sampled block in words; empty where there is none."""
        if self.kind != "sampled" or self.mean_logprob is None:
            return ""
        return f"mean log-prob {self.mean_logprob:.2f}".replace("-0.00", "0.00").replace(" -", " −")

    @property
    def label(self) -> str:
        """Its kind and its number of tokens, in words."""
        return f"{self.kind} · {counted(self.tokens, 'token')}"


def blocks(recorded: Recorded) -> list[Block]:
    """All tokens of a trajectory, in their order: the prompt, then what was sampled and observed in turn."""
    found = _cut(recorded, "prompt", 0, recorded.prompt_ids, recorded.prompt_texts, None)
    start, turn, mask = 0, 0, recorded.loss_mask
    for end in range(1, len(mask) + 1):
        if end < len(mask) and bool(mask[end]) == bool(mask[start]):
            continue
        kind: Kind = "masked" if recorded.failed else "sampled" if mask[start] else "observed"
        turn += kind == "sampled"
        logprobs = None if recorded.logprobs is None else recorded.logprobs[start:end]
        ids, texts = recorded.completion_ids[start:end], recorded.completion_texts[start:end]
        found += _cut(recorded, kind, turn, ids, texts, logprobs)
        start = end
    return found


def visible(text: str) -> str:
    """`text` with every control character shown as a sign, line breaks and tabs excepted."""

    def sign(match: re.Match[str]) -> str:
        code = ord(match[0])
        if code == 0x7F:
            return "\u2421"
        return chr(0x2400 + code) if code < 0x20 else f"⟨U+{code:04X}⟩"

    return _UNSEEN.sub(sign, text)


def facts(recorded: Recorded) -> list[tuple[str, str]]:
    """What stands above a trajectory: name and value."""
    sampled = sum(map(bool, recorded.loss_mask))
    total = len(recorded.completion_ids)
    tokens = f"{total} masked" if recorded.failed else f"{sampled} sampled, {total - sampled} observed"
    return [
        ("reward", number(recorded.reward)),
        ("step", str(recorded.step) + ("" if recorded.training else ", evaluation")),
        ("weights", f"version {recorded.weight_version}"),
        ("turns", "unknown" if recorded.failed else str(turns(recorded))),
        ("tokens", f"{len(recorded.prompt_ids)} prompt, {tokens}"),
    ]


def turns(recorded: Recorded) -> int:
    """How often the model spoke; 0 for a failed trajectory, whose mask cannot tell."""
    mask = [bool(m) for m in recorded.loss_mask]
    return sum(here and not before for here, before in zip(mask, [False, *mask[:-1]], strict=True))


def messages(recorded: Recorded) -> list[tuple[str, str]]:
    """Role and text of each message of the completion; a single one, without a role, for a completion of text."""
    if not isinstance(recorded.completion, list):
        return [] if recorded.completion is None else [("", visible(_text(recorded.completion)))]
    found = []
    for message in recorded.completion:
        if not isinstance(message, dict):
            found.append(("", visible(_text(message))))
            continue
        rest = {key: value for key, value in message.items() if key not in ("role", "content") and value}
        parts = [_text(message.get("content"))] + [f"{key}: {_text(value)}" for key, value in rest.items()]
        found.append((visible(str(message.get("role", ""))), visible("\n".join(filter(None, parts)))))
    return found


def number(value: float | None) -> str:
    """A number for reading: up to four digits, a true minus sign, a dash for None."""
    if value is None:
        return "–"
    return (f"{value:.4g}" if math.isfinite(value) else str(value)).replace("-", "−")


def counted(count: int, noun: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def _cut(
    recorded: Recorded, kind: Kind, turn: int, ids: list[int], texts: list[str | None], logprobs: Any
) -> list[Block]:
    spans: list[Span] = []
    start = 0
    for end in range(1, len(ids) + 1):
        if end < len(ids) and texts[end] is None:
            continue
        group = tuple(ids[start:end])
        text = visible(texts[start] or "")
        spans.append(
            Span(
                # A token without text (an id of a padded vocabulary) would be lost from sight.
                text=text or " ".join(f"⟨{token}⟩" for token in group),
                ids=group,
                logprobs=tuple(logprobs[start:end]) if logprobs is not None else (None,) * len(group),
                special=not text or recorded.special_ids.issuperset(group),
            )
        )
        start = end
    return [Block(kind=kind, turn=turn, spans=tuple(spans))] if spans else []


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
