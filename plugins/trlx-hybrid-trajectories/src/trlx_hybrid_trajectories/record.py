"""Files of recorded trajectories: their format, writing and reading. Each trajectory is a line of JSON, which holds the
text of every token, so that a viewer needs no tokenizer."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import logging
import math
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trlx_hybrid.errors import HybridError

if TYPE_CHECKING:
    from io import FileIO

    from trlx_hybrid.contract.types import Trajectory

logger = logging.getLogger(__name__)

JsonObject = dict[str, Any]
"""A JSON object, as `json.loads` returns it."""

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""Values of `OSError.errno` that mean a full or failing disk, and not a mistake in the file's name."""

DEEPEST = 24  # levels of a message that are kept, as a message may contain itself
REPLACEMENT = "\ufffd"  # a decoder's output for bytes that are not a whole character
LONGEST = 64  # tokens that may share characters before they count as bytes that will never be text
PER_TOKEN = ("completion_texts", "loss_mask", "logprobs", "weight_versions")
LONGEST_DATA_URL = 256  # characters; a longer one is an image
CUT = "A run that was stopped while writing leaves such a line; remove it with:"
OTHER_FILE = (
    "Give a file written by plugin_options={'trajectories': {'record': …}}, or report/trajectories.jsonl of a run "
    "that was recorded for its report."
)


class RecordError(HybridError, ValueError):
    """Raised where a file of trajectories cannot be read or written. The message names the file, the line, and what to
    do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One trajectory as it is read from a file.

    Attributes:
        line: its line in the file; the first is 1.
        step: the number of optimizer steps done when it was sampled.
        training: False if it was sampled in an evaluation.
        weight_version: version of the batch's weights, which have sampled it unless `weight_versions` says otherwise: a
            number that grows with each change of the weights.
        reward: the weighted sum of the reward functions' rewards; None if it has no reward.
        prompt_ids, completion_ids: token ids. All tokens after the prompt, sampled or observed, belong to the
            completion.
        prompt_texts, completion_texts: the text of each token; None for a token that completes the character which the
            token before it began.
        loss_mask: for each token of the completion, 1 if the model sampled it, 0 if it was observed.
        logprobs: for each token of the completion its log-prob, in nats; None if no log-probs were requested.
        special_ids: the trajectory's token ids that are special tokens, such as EOS.
        completion: the completion as text or as chat messages, in a form that JSON can hold; images and the like are
            replaced by a short note.
        weight_versions: for each token of the completion the version of the weights that sampled it; None where the
            weights of the batch sampled all of them.
    """

    line: int
    step: int
    training: bool
    weight_version: int
    reward: float | None
    prompt_ids: list[int]
    prompt_texts: list[str | None]
    completion_ids: list[int]
    completion_texts: list[str | None]
    loss_mask: list[int]
    logprobs: list[float | None] | None
    special_ids: frozenset[int]
    completion: Any
    weight_versions: list[int] | None = None

    @property
    def failed(self) -> bool:
        """True where no token of the trajectory is trained on: its loss mask is 0 throughout."""
        return not any(self.loss_mask)


def lines_of(
    trajectories: Sequence[Trajectory],
    tokenizer: Any,
    *,
    step: int,
    limit: int | None = None,
    training: bool = True,
) -> list[str]:
    """Return trajectories as lines of a file, without line breaks: one line of strict JSON for each, in which NaN and
    infinities are the strings "nan", "inf" and "-inf".

    Args:
        trajectories: the trajectories of a batch.
        tokenizer: the tokenizer, or a processor that has one, for the text of each token.
        step: the number of optimizer steps done.
        limit: the largest number of trajectories to return, from the first on; None returns all.
        training: False in an evaluation.
    """
    chosen = trajectories[: max(0, limit)] if limit is not None else trajectories
    texts = TokenTexts(tokenizer)
    return [json.dumps(_row(t, texts, step, training), allow_nan=False, separators=(",", ":")) for t in chosen]


def _append(file: FileIO, path: str | os.PathLike[str], lines: Sequence[str]) -> None:
    """Append lines to an open file: all of them, or none if that fails.

    Args:
        file: the file, open for appending and reading, unbuffered.
        path: the file's path, for the error message.
        lines: the lines, without line breaks.

    Raises:
        RecordError: the lines cannot be written.
    """
    try:
        end = file.seek(0, 2)
        cut = end > 0 and (file.seek(-1, 2), file.read(1))[1] != b"\n"
        # A run that was killed while writing left half a line: begin a new one. A single write, for readers.
        left = memoryview(b"\n" * cut + "".join(f"{line}\n" for line in lines).encode())
        try:
            while left:
                left = left[file.write(left) :]
        except OSError:
            with contextlib.suppress(OSError):  # a device cannot be truncated
                file.truncate(end)
            raise
    except OSError as error:
        raise RecordError(f"cannot write to {path}: {error.strerror}. Make room, or name another file.") from error


def opened(path: str | os.PathLike[str]) -> FileIO:
    """Open a file for appending and reading, unbuffered. The file and its folders are created if necessary.

    Raises:
        RecordError: the file cannot be opened.
    """
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return Path(path).open("a+b", buffering=0)
    except OSError as error:
        raise RecordError(f"cannot write trajectories to {path}: {error.strerror}. Name another file.") from error


class OptionalLines:
    """A file of lines of JSON that training can do without: if the disk is full, lines are lost and counted, and
    nothing raises.

    The file stays open, because opening it for each line would cost a call to the server of a network file system.
    Writes are unbuffered, so that a killed run loses none of them. A forked process, or a pickled copy of this object,
    opens the file anew.

    Args:
        path: the file; it and its folders are created if necessary.
        what: what the lines are, for the warning about lost ones.
        note: takes the number of lost lines, and returns a line that reports it. This line is written to the file as
            soon as lines can be written again. None writes no such line.

    Attributes:
        lost: how many lines were not written.

    Raises:
        RecordError: the file cannot be opened for another reason than a full or failing disk, such as a wrong path.
    """

    def __init__(self, path: str | os.PathLike[str], what: str, note: Callable[[int], str] | None = None) -> None:
        self._path, self._what, self._note = path, what, note
        self.lost, self._told = 0, 0
        self._file: FileIO | None = None
        self._opened_by = 0  # process id
        try:
            self._open()
        except RecordError as error:
            if not isinstance(error.__cause__, OSError) or error.__cause__.errno not in FULL:
                raise
            self._warn(error)

    def add(self, lines: Sequence[str]) -> None:
        """Append lines to the file: all of them, or none if they cannot be written, in which case they are counted in
        `lost`.

        Warns when the first lines are lost. Each call tries again, because somebody may have made room.

        Args:
            lines: the lines, without line breaks.
        """
        missing = self.lost - self._told
        told = [self._note(missing)] if self._note is not None and missing else []
        try:
            _append(self._open(), self._path, [*told, *lines])
            self._told = self.lost
        except RecordError as error:  # if it raised, the other ranks would wait for this one
            self.close()
            if self.lost == 0:
                self._warn(error)
            self.lost += len(lines)

    def close(self) -> None:
        """Close the file. The next `add` opens it again."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def _open(self) -> FileIO:
        """Return the open file. It is opened anew in a forked process, and after somebody has deleted it."""
        if self._opened_by != os.getpid() or (self._file is not None and os.fstat(self._file.fileno()).st_nlink == 0):
            self.close()
        if self._file is None:
            self._file, self._opened_by = opened(self._path), os.getpid()
        return self._file

    def __getstate__(self) -> dict[str, object]:
        return vars(self) | {"_file": None}

    def __del__(self) -> None:
        if "_file" in vars(self):
            self.close()

    def _warn(self, error: RecordError) -> None:
        logger.warning("%s are lost from here on, and training goes on without: %s", self._what, error)


def read(path: str | os.PathLike[str], broken: list[int] | None = None) -> Iterator[Recorded]:
    """Yield the trajectories of a file, in its order.

    A last line without a line break is skipped, because a run may still be writing it.

    Args:
        path: the file.
        broken: a list. Lines that are not a trajectory are skipped, and their numbers are appended to this list. If
            None, such a line raises.

    Raises:
        RecordError: the file cannot be read, or a line is not a trajectory and `broken` is None.
    """
    try:
        with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
            whole = ((n, line[:-1]) for n, line in enumerate(file, 1) if line.endswith("\n") and line.strip())
            found = False
            for number, line in whole:
                recorded = _parsed(line, number)
                if isinstance(recorded, str) and broken is not None:
                    broken.append(number)
                    continue
                if isinstance(recorded, str):
                    found = found or any(isinstance(_parsed(line, n), Recorded) for n, line in whole)
                    way_out = f"{CUT} sed -i {number}d {shlex.quote(str(path))}" if found else OTHER_FILE
                    raise RecordError(f"{path}, line {number}: not a recorded trajectory: {recorded}. {way_out}")
                found = True
                yield recorded
    except OSError as error:
        raise RecordError(f"cannot read trajectories from {path}: {error.strerror}. {OTHER_FILE}") from error


def _row(trajectory: Trajectory, texts: TokenTexts, step: int, training: bool) -> JsonObject:
    prompt, completion, mask = trajectory.prompt_ids, trajectory.completion_ids, trajectory.loss_mask
    token_texts = texts.of([*prompt, *completion], [None] * len(prompt) + [bool(m) for m in mask])
    return {
        "step": step,
        "training": training,
        "weight_version": trajectory.weight_version,
        "reward": as_json_number(trajectory.reward),
        "prompt_ids": [int(token) for token in prompt],
        "prompt_texts": token_texts[: len(prompt)],
        "completion_ids": [int(token) for token in completion],
        "completion_texts": token_texts[len(prompt) :],
        "loss_mask": [int(m) for m in mask],
        "logprobs": None if trajectory.logprobs is None else [as_json_number(value) for value in trajectory.logprobs],
        "special_ids": sorted(texts.special_ids.intersection([*prompt, *completion])),
        "completion": _plain(trajectory.completion),
        "weight_versions": _runs(trajectory.weight_versions),
    }


def _runs(versions: Sequence[int] | None) -> list[tuple[int, int]] | None:
    """Return the version of each token in a short form: each run of equal versions as (version, number of tokens). None
    stays None."""
    runs = itertools.groupby(versions or ())
    return None if versions is None else [(int(version), len(list(run))) for version, run in runs]


def _of_runs(runs: Any) -> list[int] | None:
    """Return the version of each token, from what `_runs` returned, as JSON holds it.

    Raises:
        ValueError: it is something else.
    """
    if runs is None:
        return None
    pairs = runs if isinstance(runs, list) else [runs]
    if not all(isinstance(pair, list) and [type(value) for value in pair] == [int, int] for pair in pairs):
        raise ValueError("its weight_versions are not pairs of a version and a number of tokens")
    return [version for version, tokens in pairs for _ in range(tokens)]


def as_json_number(value: float | None) -> float | str | None:
    """Return a number in a form that strict JSON can hold: NaN and infinities become the strings "nan", "inf" and
    "-inf"; None stays None."""
    if value is None:
        return None
    return float(value) if math.isfinite(value) else str(float(value))


def _plain(value: Any, depth: int = 0) -> Any:
    """Return a value in a form that JSON can hold. What JSON cannot hold is replaced by a note, such as
    `<image 640x480>`.

    Args:
        value: a message, or any value in one.
        depth: how deeply the value is nested in the message; values below level `DEEPEST` are replaced.
    """
    if isinstance(value, str):
        long = value.startswith("data:") and len(value) > LONGEST_DATA_URL
        return f"<data URL, {len(value)} characters>" if long else str(value)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return as_json_number(value)
    if isinstance(value, Mapping | list | tuple) and depth == DEEPEST:
        return "<nested too deeply>"
    if isinstance(value, Mapping):
        return {str(key): _plain(entry, depth + 1) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry, depth + 1) for entry in value]
    size = getattr(value, "size", None)
    if isinstance(size, tuple) and len(size) == 2 and hasattr(value, "mode"):
        return f"<image {size[0]}x{size[1]}>"
    return f"<{type(value).__name__}>"


TYPES: dict[str, type] = {
    "step": int,
    "training": bool,
    "weight_version": int,
    "prompt_ids": list,
    "prompt_texts": list,
    "completion_ids": list,
    "completion_texts": list,
    "loss_mask": list,
    "special_ids": list,
}
"""The types of the fields of a recorded trajectory, by name. They are checked when a file is read: viewers show these
values unescaped, so that a text in place of a number could inject a script."""

ELEMENTS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("prompt_ids", "completion_ids", "loss_mask", "special_ids"), (int,)),
    **dict.fromkeys(("prompt_texts", "completion_texts"), (str, type(None))),
}


def _parsed(line: str, number: int) -> Recorded | str:
    """Return the trajectory that a line of a file holds; if the line holds none, return a text that says why.

    Args:
        line: the line, without its line break.
        number: its number in the file; the first is 1.
    """
    try:
        row = json.loads(line)
        if not isinstance(row, dict):
            raise ValueError("it holds no JSON object")
        row["reward"] = _float(row["reward"])
        for name, of in TYPES.items():
            if type(row[name]) is not of:
                raise ValueError(f"its {name} is of type {type(row[name]).__name__}, and not {of.__name__}")
        for name, each in ELEMENTS.items():
            if not all(type(value) in each for value in row[name]):
                raise ValueError(f"its {name} hold other values than {' and '.join(of.__name__ for of in each)}")
        row["special_ids"] = frozenset(row["special_ids"])
        if row["logprobs"] is not None:
            row["logprobs"] = [_float(value) for value in row["logprobs"]]
        row["weight_versions"] = _of_runs(row.get("weight_versions"))  # files of earlier versions lack it
        recorded = Recorded(line=number, **row)
        for ids, fields in (("prompt_ids", ["prompt_texts"]), ("completion_ids", PER_TOKEN)):
            for name in fields:
                if row[name] is not None and len(row[name]) != len(row[ids]):
                    raise ValueError(f"it has {len(row[ids])} {ids} and {len(row[name])} {name}")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        return f"it has no field {error}" if isinstance(error, KeyError) else str(error)
    return recorded


def _float(value: Any) -> float | None:
    return None if value is None else float(value)


class TokenTexts:
    """Decodes each token of a sequence to its own text, with one tokenizer. The texts of single tokens are cached.

    Args:
        tokenizer: a tokenizer of transformers, or a processor that has one.

    Attributes:
        special_ids: ids of the tokenizer's special tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer if hasattr(tokenizer, "all_special_ids") else tokenizer.tokenizer
        self._singles: dict[int, str] = {}
        added = getattr(self._tokenizer, "added_tokens_decoder", None) or {}
        special = {index for index, token in added.items() if getattr(token, "special", False)}
        self.special_ids: frozenset[int] = frozenset(special | set(self._tokenizer.all_special_ids))

    def of(self, ids: Sequence[int], kinds: Sequence[object]) -> list[str | None]:
        """Return the text of each token; None for a token whose text is part of the text of the token before it.

        Byte-level tokenizers may split one character over several tokens: then the first gets the character, and the
        others get None.

        Args:
            ids: token ids.
            kinds: for each token a value that says which kind it is, such as True for a sampled and False for an
                observed token. Neighbours of different kinds are decoded separately: if a character is split between
                them, each half is unreadable.
        """
        texts: list[str | None] = []
        start = 0
        for end in range(1, len(ids) + 1):
            if end == len(ids) or kinds[end] != kinds[start]:
                texts += self._run(list(ids[max(0, start - 1) : end]), min(start, 1))
                start = end
        return texts

    def _run(self, ids: list[int], start: int) -> list[str | None]:
        """Return the texts of the tokens `ids[start:]`; None for a token whose text is part of the text of the token
        before it.

        Args:
            ids: token ids.
            start: 0, or 1 if the first id is only context for the decoder, because sentencepiece drops the leading
                space of a text.
        """
        if self._single(ids[0]).endswith(REPLACEMENT):
            ids, start = ids[start:], 0  # half a character as context would absorb what follows
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
