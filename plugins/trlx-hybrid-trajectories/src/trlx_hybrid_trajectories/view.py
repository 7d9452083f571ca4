"""Views of a recorded trajectory: its tokens cut into sections (prompt, sampled, observed), and the whole trajectory as
text for a terminal."""

from __future__ import annotations

import itertools
import json
import math
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .record import Recorded

Kind = Literal["prompt", "sampled", "observed", "masked"]

# Characters that would control a terminal, reorder a line or break a page; each is shown as a sign or its number.
_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpan:
    """The smallest part of a trajectory that can be shown: one token, or several tokens that together form a character.

    Attributes:
        text: the tokens' text; never empty. Control characters other than line break and tab are replaced by visible
            signs.
        ids: the token ids.
        logprobs: the log-prob of each token, in nats; None where a token has none.
        special: True for a special token, and for a token without any text.
    """

    text: str
    ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    special: bool

    @property
    def logprob(self) -> float | None:
        """The sum of the tokens' log-probs, in nats; None if one of them has none."""
        known = [value for value in self.logprobs if value is not None]
        return sum(known) if len(known) == len(self.logprobs) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of a recorded trajectory: consecutive tokens of one kind, such as those of one sampled turn.

    Attributes:
        kind: "prompt"; "sampled" for tokens of the model; "observed" for tokens of a tool or an environment; "masked"
            for the completion of a failed trajectory, whose loss mask is 0 everywhere, so that sampled and observed
            tokens cannot be told apart.
        turn: number of the turn that the section belongs to. The first sampled section begins turn 1; sections before
            it have turn 0.
        spans: the section's tokens.
        version: version of the weights that sampled the section, where other weights than those of the batch sampled
            tokens of the trajectory; else None.
    """

    kind: Kind
    turn: int
    spans: tuple[TokenSpan, ...]
    version: int | None = None

    @property
    def tokens(self) -> int:
        """The number of tokens in this section."""
        return sum(len(span.ids) for span in self.spans)

    @property
    def mean(self) -> str:
        """The mean log-prob of a sampled section's tokens as a text, such as "mean log-prob −0.35"; "" for other
        sections, and where a token has no log-prob."""
        values = [value for span in self.spans for value in span.logprobs if value is not None]
        if self.kind != "sampled" or len(values) < self.tokens:
            return ""
        return f"mean log-prob {sum(values) / len(values):.2f}".replace("-0.00", "0.00").replace(" -", " −")

    @property
    def label(self) -> str:
        """A label for the section: its kind, its number of tokens, and the version of its weights if other weights
        than those of the batch sampled the trajectory, such as "sampled · 12 tokens · weights version 3"."""
        weights = "" if self.version is None else f" · weights version {self.version}"
        return f"{self.kind} · {number_of(self.tokens, 'token')}{weights}"


def sections(recorded: Recorded) -> list[Section]:
    """Return the sections of a trajectory, that is, its tokens cut into parts of one kind, in order: first the prompt,
    then the sampled and the observed sections, which alternate. A sampled turn has a section for each version of the
    weights that sampled a part of it. A failed trajectory has a single section after the prompt, "masked"."""
    found = _cut(recorded, "prompt", 0, recorded.prompt_ids, recorded.prompt_texts, None)
    start, turn, mask = 0, 0, [bool(value) for value in recorded.loss_mask]
    versions = _versions(recorded)
    for end in range(1, len(mask) + 1):
        if end < len(mask) and (mask[end], versions[end]) == (mask[start], versions[start]):
            continue
        kind: Kind = "masked" if recorded.failed else "sampled" if mask[start] else "observed"
        turn += kind == "sampled" and not (start and mask[start - 1])
        logprobs = None if recorded.logprobs is None else recorded.logprobs[start:end]
        ids, texts = recorded.completion_ids[start:end], recorded.completion_texts[start:end]
        found += _cut(recorded, kind, turn, ids, texts, logprobs, versions[start])
        start = end
    return found


def _versions(recorded: Recorded) -> list[int | None]:
    """Return for each token of the completion the version of the weights that sampled it; a token that completes a
    character counts with its begin. None for observed tokens, and for all tokens where the batch's weights sampled
    them."""
    versions, mask = recorded.weight_versions, recorded.loss_mask
    if versions is None or {*itertools.compress(versions, mask)} <= {recorded.weight_version}:
        return [None] * len(mask)
    found: list[int | None] = []
    for version, sampled, text in zip(versions, mask, recorded.completion_texts, strict=True):
        continues = text is None and found and found[-1] is not None
        found.append((found[-1] if continues else version) if sampled else None)
    return found


def visible(text: str) -> str:
    """Return a text with a visible sign in place of every control character, except line breaks and tabs."""

    def sign(match: re.Match[str]) -> str:
        code = ord(match[0])
        if code == 0x7F:
            return "\u2421"
        return chr(0x2400 + code) if code < 0x20 else f"⟨U+{code:04X}⟩"

    return _UNSEEN.sub(sign, text)


def facts(recorded: Recorded) -> list[tuple[str, str]]:
    """Return the facts that are shown above a trajectory (reward, step, weight version, turns, tokens), as pairs of
    name and value, both texts."""
    sampled = sum(map(bool, recorded.loss_mask))
    total = len(recorded.completion_ids)
    tokens = f"{total} masked" if recorded.failed else f"{sampled} sampled, {total - sampled} observed"
    versions = sorted({version for version in _versions(recorded) if version is not None})
    weights = f"version {recorded.weight_version}"
    if versions:
        weights += f", sampled with {' to '.join(map(str, sorted({versions[0], versions[-1]})))}"
    return [
        ("reward", number(recorded.reward)),
        ("step", str(recorded.step) + ("" if recorded.training else ", evaluation")),
        ("weights", weights),
        ("turns", "unknown" if recorded.failed else str(turns(recorded))),
        ("tokens", f"{len(recorded.prompt_ids)} prompt, {tokens}"),
    ]


def turns(recorded: Recorded) -> int:
    """Return how many turns of a trajectory the model sampled, counted as the runs of ones in its loss mask. It is 0
    for a failed trajectory, whose loss mask is all zeros, however many turns it had."""
    mask = [bool(m) for m in recorded.loss_mask]
    return sum(here and not before for here, before in zip(mask, [False, *mask[:-1]], strict=True))


def messages(recorded: Recorded) -> list[tuple[str, str]]:
    """Return the role and the text of each message of the completion. A completion that is plain text is one message
    with the role ""."""
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
    """Format a number for reading: up to four significant digits, a true minus sign, and a dash for None."""
    if value is None:
        return "–"
    return (f"{value:.4g}" if math.isfinite(value) else str(value)).replace("-", "−")


def number_of(count: int, noun: str, plural: str = "") -> str:
    """Return a count with its noun in singular or plural: "1 token", "2 tokens". By default the plural has an s."""
    return f"{count} {noun}" if count == 1 else f"{count} {plural or noun + 's'}"


def _cut(
    recorded: Recorded,
    kind: Kind,
    turn: int,
    ids: list[int],
    texts: list[str | None],
    logprobs: list[float | None] | None,
    version: int | None = None,
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
    return [Section(kind=kind, turn=turn, spans=tuple(spans), version=version)] if spans else []


def _text(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


BOLD, DIM, RED, RESET = "\x1b[1m", "\x1b[2m", "\x1b[31m", "\x1b[0m"
SAMPLED, OBSERVED = "  ", "│ "  # the first column tells them apart without colour, and in a copy
FAILED = "✗ failed: excluded from training (loss mask all 0)"


def as_text(recorded: Recorded, *, colour: bool, width: int) -> str:
    """Return one trajectory as text for a terminal, without a line break at the end.

    Sampled text is indented by two spaces; prompts and observed text are dimmed, with a bar before each line.

    Args:
        recorded: the trajectory.
        colour: whether to use escape codes for bold, dim and red. The caller decides, by `NO_COLOR` and whether the
            output is a terminal.
        width: the number of columns that a line may have; less than 4 counts as 4.
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
    """Yield the lines of a text, broken at its line breaks and where a line is longer than `width` columns, between
    words if possible."""
    if not text:
        return
    for line in text.removesuffix("\n").split("\n"):
        yield from _wrapped(line.expandtabs(4), width)


def _wrapped(line: str, width: int) -> Iterator[str]:
    """Cut a line of text, between words if possible, and yield its parts, each of which takes at most `width` columns
    in a terminal."""
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
    """Return how many columns a character takes in a terminal: 2 for East Asian wide characters and emoji, 0 for
    combining accents, else 1.

    The rules are those of Markus Kuhn's wcwidth, in which the soft hyphen is visible.
    """
    if unicodedata.east_asian_width(character) in "WF":
        return 2
    return 0 if unicodedata.category(character) in ("Mn", "Me", "Cf") and character != "\N{SOFT HYPHEN}" else 1
