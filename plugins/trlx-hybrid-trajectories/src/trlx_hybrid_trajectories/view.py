"""Views of a recorded trajectory: cut into sections of one kind of token, and as text for a terminal."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from .record import Recorded

Kind = Literal["prompt", "sampled", "observed", "masked"]

# Characters that would control a terminal, reorder a line or break a page; each is shown as a sign or its number.
_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpan:
    """The smallest unit that can be shown: a token, or the tokens that share a character.

    Attributes:
        text: the tokens' text, without control characters except line break and tab; never empty.
        ids: the token ids.
        logprobs: log-prob of each token; None where there is none.
        special: whether it is a special token, or one without any text.
    """

    text: str
    ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    special: bool

    @property
    def logprob(self) -> float | None:
        """The log-prob of the whole span; None where a token has none."""
        known = [value for value in self.logprobs if value is not None]
        return sum(known) if len(known) == len(self.logprobs) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of a recorded trajectory: consecutive tokens of one kind, such as all tokens of one sampled turn.

    Attributes:
        kind: "prompt"; "sampled" by the model; "observed", from a tool or an environment; "masked", the completion of
            a failed trajectory, whose mask no longer tells sampled from observed.
        turn: number of the turn that it belongs to; the first sampled section begins turn 1, and before that it is 0.
        spans: the tokens.
    """

    kind: Kind
    turn: int
    spans: tuple[TokenSpan, ...]

    @property
    def tokens(self) -> int:
        """The number of tokens in this section."""
        return sum(len(span.ids) for span in self.spans)

    @property
    def mean(self) -> str:
        """The mean log-prob of a sampled section in words; empty where a token has no log-prob."""
        values = [value for span in self.spans for value in span.logprobs if value is not None]
        if self.kind != "sampled" or len(values) < self.tokens:
            return ""
        return f"mean log-prob {sum(values) / len(values):.2f}".replace("-0.00", "0.00").replace(" -", " −")

    @property
    def label(self) -> str:
        """The kind and the number of tokens, in words."""
        return f"{self.kind} · {number_of(self.tokens, 'token')}"


def sections(recorded: Recorded) -> list[Section]:
    """Return all tokens of a trajectory in order, as sections: the prompt, then sampled and observed ones in turn."""
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
    """Return `text` with a sign in place of every control character, except line breaks and tabs."""

    def sign(match: re.Match[str]) -> str:
        code = ord(match[0])
        if code == 0x7F:
            return "\u2421"
        return chr(0x2400 + code) if code < 0x20 else f"⟨U+{code:04X}⟩"

    return _UNSEEN.sub(sign, text)


def facts(recorded: Recorded) -> list[tuple[str, str]]:
    """Return what is shown above a trajectory (reward, step, tokens and so on) as pairs of name and value."""
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
    """Return how often the model spoke; 0 for a failed trajectory, whose mask cannot tell."""
    mask = [bool(m) for m in recorded.loss_mask]
    return sum(here and not before for here, before in zip(mask, [False, *mask[:-1]], strict=True))


def messages(recorded: Recorded) -> list[tuple[str, str]]:
    """Return role and text of each message of the completion; a completion of text is one message without a role."""
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
    """Format a number for reading: up to four digits, a true minus sign, a dash for None."""
    if value is None:
        return "–"
    return (f"{value:.4g}" if math.isfinite(value) else str(value)).replace("-", "−")


def number_of(count: int, noun: str) -> str:
    """Return a count with its noun: `1 token`, `2 tokens`."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def _cut(
    recorded: Recorded, kind: Kind, turn: int, ids: list[int], texts: list[str | None], logprobs: Any
) -> list[Section]:
    spans: list[TokenSpan] = []
    start = 0
    for end in range(1, len(ids) + 1):
        if end < len(ids) and texts[end] is None:
            continue
        group = tuple(ids[start:end])
        text = visible(texts[start] or "")
        spans.append(
            TokenSpan(
                # A token without text (an id of a padded vocabulary) would not be visible.
                text=text or " ".join(f"⟨{token}⟩" for token in group),
                ids=group,
                logprobs=tuple(logprobs[start:end]) if logprobs is not None else (None,) * len(group),
                special=not text or recorded.special_ids.issuperset(group),
            )
        )
        start = end
    return [Section(kind=kind, turn=turn, spans=tuple(spans))] if spans else []


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


BOLD, DIM, RED, RESET = "\x1b[1m", "\x1b[2m", "\x1b[31m", "\x1b[0m"
SAMPLED, OBSERVED = "  ", "│ "  # the first column tells them apart without colour, and in a copy
FAILED = "✗ failed: excluded from training (loss mask all 0)"


def as_text(recorded: Recorded, *, colour: bool, width: int) -> str:
    """Return one trajectory as lines of at most `width` columns (at least 4), without a line break at the end.

    Sampled text is indented by two blanks; what the model was given or shown is dimmed, behind a bar. With `colour`
    False there is no escape code; the caller decides on colour (`NO_COLOR`, whether the output is a terminal).
    """
    width = max(4, width)

    def painted(text: str, code: str, margin: str = "") -> Iterator[str]:
        for line in _lines(text, width - len(margin)):
            shown = margin + line if margin and line else (margin + line).rstrip()
            yield f"{code}{shown}{RESET}" if colour and code else shown

    title = " · ".join([f"trajectory {recorded.line}", *(f"{name} {value}" for name, value in facts(recorded))])
    lines = [*painted(title, BOLD), *painted(FAILED if recorded.failed else "", BOLD + RED)]
    for section in sections(recorded):
        text = "".join(span.text for span in section.spans)
        lines += ["", *painted(_heading(section), BOLD)]
        lines += painted(text, "", SAMPLED) if section.kind == "sampled" else painted(text, DIM, OBSERVED)
    if recorded.failed and isinstance(recorded.completion, list):  # the mask cannot tell who said what; messages can
        lines += ["", *painted("messages", BOLD)]
        for role, text in messages(recorded):
            own = role == "assistant"
            lines += [*painted(f"{role}:", BOLD, SAMPLED if own else OBSERVED)]
            lines += painted(text, "" if own else DIM, SAMPLED if own else OBSERVED)
    return "\n".join(lines)


def _heading(section: Section) -> str:
    if section.kind != "sampled":
        return section.label
    return " · ".join(filter(None, (f"turn {section.turn}", section.label, section.mean)))


def _lines(text: str, width: int) -> Iterator[str]:
    """Yield `text` cut at its line breaks and at `width` columns, between words where that is possible."""
    if not text:
        return
    for line in text.removesuffix("\n").split("\n"):
        yield from _wrapped(line.expandtabs(4), width)


def _wrapped(line: str, width: int) -> Iterator[str]:
    """Yield pieces of at most `width` columns that together are `line`."""
    piece, used = "", 0
    for word in re.findall(r"\S+|\s+", line):
        needed = sum(map(_columns, word))
        if used and used + needed > width and not word.isspace() and needed <= width:
            yield piece
            piece, used = "", 0
        for character in word:
            if used and used + _columns(character) > width:
                yield piece
                piece, used = "", 0
            piece, used = piece + character, used + _columns(character)
    yield piece


def _columns(character: str) -> int:
    """Return the columns of a character in a terminal: 2 in East Asian scripts and for emoji, 0 for combining accents.

    The rules are those of Markus Kuhn's wcwidth, in which the soft hyphen is visible.
    """
    if unicodedata.east_asian_width(character) in "WF":
        return 2
    return 0 if unicodedata.category(character) in ("Mn", "Me", "Cf") and character != "\N{SOFT HYPHEN}" else 1
