"""The choice of where a run begins: at step 0, or at the newest complete checkpoint of its own."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...config import LAUNCH_VARIABLE, STARTS_VARIABLE
from ...errors import ConfigError, listed
from . import manifest
from .run_identity import RunIdentity, new_identity, read_identity, write_identity

if TYPE_CHECKING:
    from ...interprocess.ranks import Ranks

logger = logging.getLogger(__name__)

CHECKPOINT = re.compile(r"checkpoint-(\d+)")
WAY_OUT = f"Resume from another one, or remove its {manifest.MANIFEST_FILE} to have it loaded as it is."


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A starting point of a run: step 0 or a checkpoint, and the identity with which the run begins there.

    Attributes:
        identity: ids of the run and of this start, as they are written to the output folder.
        checkpoint: the checkpoint that the run resumes from; None to begin at step 0.
        saved_by: how many ranks saved the checkpoint; None where that is unknown.
        known: whether the checkpoint has a manifest, which says whose it is and what it must contain.
        passed: newer checkpoints that are not used, each with the reason.
    """

    identity: RunIdentity
    checkpoint: Path | None = None
    saved_by: int | None = None
    known: bool = True
    passed: tuple[str, ...] = ()


def numbered(output_dir: Path) -> list[Path]:
    """Return the folders `checkpoint-<step>` in a folder, complete or not, highest step first."""
    found = {
        int(match[1]): path
        for path in (output_dir.iterdir() if output_dir.is_dir() else ())
        if (match := CHECKPOINT.fullmatch(path.name)) and path.is_dir()
    }
    return [found[step] for step in sorted(found, reverse=True)]


def examined(checkpoint: Path, identity: RunIdentity | None) -> tuple[manifest.Manifest | None, str | None]:
    """Return a checkpoint's manifest, None where it has none; and the reason why this run cannot resume from the
    checkpoint, None where it can.

    Args:
        identity: identity of the run; None where a checkpoint of any run will do.
    """
    try:
        known = manifest.read(checkpoint)
    except ValueError as error:
        return None, str(error)
    if known is None and identity is not None and checkpoint.name in identity.foreign:
        return None, "it was there before this run began"
    if known is not None and identity is not None and known.run != identity.run:
        return known, f"another run saved it ({known.run}; this one is {identity.run})"
    return known, manifest.fault(checkpoint, known)


def newest_start(output_dir: Path) -> Start:
    """Return the starting point at the newest complete checkpoint of the run that a folder belongs to, or at step 0
    where there is none.

    The folder's identity file says which run it belongs to. A folder without one belongs to the run of its newest
    complete checkpoint.

    Raises:
        ConfigError: the identity file cannot be read.
    """
    identity, passed = read_identity(output_dir), list[str]()
    for checkpoint in numbered(output_dir):
        known, reason = examined(checkpoint, identity)
        if reason is not None:
            passed.append(f"{checkpoint.name}: {reason}")
            continue
        return Start(
            identity=_of_this_start(output_dir, identity, known.run if known is not None else None, checkpoint),
            checkpoint=checkpoint,
            saved_by=_ranks_of(checkpoint, known),
            known=known is not None,
            passed=tuple(passed),
        )
    return Start(identity=_of_this_start(output_dir, identity, None, None), passed=tuple(passed))


def launched_again(output_dir: Path) -> Start:
    """Decide where a process begins that a launcher has started again: at the last complete checkpoint of its run in
    `output_dir`, or at step 0.

    It begins at step 0 if no earlier start of the same `trlx-hybrid launch` got as far as `train()`: any checkpoint in
    the folder is then of an older run.

    Raises:
        ConfigError: the file that records which run the folder belongs to cannot be read.
    """
    launch = os.environ.get(LAUNCH_VARIABLE) if os.environ.get(STARTS_VARIABLE, "0") != "0" else None
    identity = read_identity(output_dir)
    if launch is None or identity is None or identity.launch == launch:
        return newest_start(output_dir)
    why = "it is of an earlier run: no start of this launch came to train() before"
    return replace(first_start(output_dir), passed=tuple(f"{path.name}: {why}" for path in numbered(output_dir)))


def first_start(output_dir: Path) -> Start:
    """Return a starting point at step 0 for a new run, to which no checkpoint in the folder belongs."""
    return Start(identity=_of_this_start(output_dir, None, None, None))


def named_start(output_dir: Path, checkpoint: Path) -> Start:
    """Return the starting point at a checkpoint that a script names. The run continues that checkpoint's run if the
    checkpoint lies in `output_dir`, else it is a new run.

    Raises:
        ConfigError: the checkpoint's files differ from those that its manifest lists.
    """
    known, reason = examined(checkpoint, None) if checkpoint.is_dir() else (None, None)  # TRL reports a missing folder
    if reason is not None and (checkpoint / manifest.MANIFEST_FILE).exists():
        raise ConfigError(f"{checkpoint} is not whole: {reason}. {WAY_OUT}")
    own = known is not None and checkpoint.resolve().parent == output_dir.resolve()
    identity = read_identity(output_dir) if own else None
    if known is not None and identity is not None and identity.run != known.run:
        identity = None
    return Start(
        identity=_of_this_start(output_dir, identity, known.run if own and known is not None else None, checkpoint),
        checkpoint=checkpoint,
        saved_by=_ranks_of(checkpoint, known) if checkpoint.is_dir() else None,
    )


def _ranks_of(checkpoint: Path, known: manifest.Manifest | None) -> int | None:
    return known.ranks if known is not None else manifest.generators(checkpoint)


def _of_this_start(
    output_dir: Path, identity: RunIdentity | None, run: str | None, checkpoint: Path | None
) -> RunIdentity:
    """Return the identity (the ids of the run and of this start) with which this process starts. It continues the run
    of `identity`, or else the run with the id `run`, or else begins a new run.

    Args:
        identity: the identity in the folder's file; None where there is none, or where it does not apply.
        run: the id of the run that saved the checkpoint; None where no run is continued, or where it is not known.
        checkpoint: the checkpoint that the run resumes from; None at step 0. Without `identity`, all other checkpoints
            in the folder that have no manifest are recorded as foreign to the run.
    """
    if identity is not None:
        return new_identity(identity.foreign, identity.run)
    others = [path for path in numbered(output_dir) if path != checkpoint]
    return new_identity((path.name for path in others if not (path / manifest.MANIFEST_FILE).exists()), run)


# --- all ranks ----------------------------------------------------------------------------------------------------


def started(ranks: Ranks, output_dir: Path, choose: Callable[[], Start], *, saves: bool, writes: bool) -> Start:
    """Choose where a run begins, the same on all ranks, and write the run's identity into its folder. Collective.

    Rank 0 chooses, and so does each rank that saves on a disk of its own. The other ranks check that they see the
    chosen checkpoint.

    Args:
        choose: a function that returns the starting point, for example `newest_start` of the folder.
        saves: whether this rank writes checkpoints.
        writes: whether the run writes checkpoints at all.

    Returns:
        Where this rank begins.

    Raises:
        ConfigError: `choose` raised it on a rank; or the ranks see different checkpoints, so that they would begin at
            different steps.
    """
    first = ranks.by_first(choose)
    own, problem = first if ranks.rank == 0 else None, None
    try:
        if saves:
            own = own if own is not None else choose()
            own = replace(own, identity=replace(first.identity, foreign=own.identity.foreign))
            if writes or read_identity(output_dir) is not None or numbered(output_dir):
                write_identity(output_dir, own.identity)
    except ConfigError as error:
        problem = str(error)
    seen = own if own is not None else first if _sees(first) else None
    name = seen.checkpoint.name if seen is not None and seen.checkpoint is not None else None
    names, problems = zip(*ranks.gather((name, problem)), strict=True)
    for found in filter(None, problems):
        raise ConfigError(found)
    if len(set(names)) > 1:
        texts = [f"rank {rank}: {found or 'none'}" for rank, found in enumerate(names)]
        raise ConfigError(
            f"The ranks see different checkpoints in {output_dir.absolute()} ({listed(texts, 8)}), so this run "
            "cannot go on from one. Let output_dir be a folder that all nodes share."
        )
    return own if own is not None else first


def _sees(start: Start) -> bool:
    return start.checkpoint is None or start.checkpoint.is_dir()


def announce(start: Start, output_dir: str | Path) -> None:
    """Print from where a restarted run continues, and which checkpoints it passes over and why. For rank 0."""
    for passed in start.passed:
        _say(f"passed over {passed}")
    none = f"no whole checkpoint{' of this run' if start.passed else ''} in {output_dir}: starting over"
    _say(f"started again, {none if start.checkpoint is None else f'going on from {start.checkpoint}'}")


def warn(start: Start, ranks: int) -> None:
    """Warn, on rank 0, if the checkpoint that a run resumes from has no manifest, or was saved by another number of
    ranks."""
    if start.checkpoint is not None and not start.known:
        logger.warning(
            "%s has no manifest, as one of stock TRL or of an older version: whose it is, and whether its files are "
            "those that were saved, nobody can tell. It is taken because their form is right.",
            start.checkpoint,
        )
    if start.checkpoint is not None and start.saved_by not in (None, ranks):
        logger.warning("%s", world_text(start.checkpoint, start.saved_by or 0, ranks))


def world_text(checkpoint: Path, then: int, now: int) -> str:
    """Return a warning for a run that resumes with another number of ranks: it says which random states and files do
    not carry over.

    Args:
        checkpoint: the checkpoint that the run resumes from.
        then: how many ranks saved it.
        now: how many ranks the run has.
    """
    if then == 1 or now == 1:  # transformers names the files of one rank differently
        lost = "no rank takes up the states of its random generators"
    elif now > then:
        lost = f"the random generators of ranks {then} to {now - 1} begin anew"
    else:
        lost = f"the states of the random generators of ranks {now} to {then - 1} are left out"
    text = f"{checkpoint} was saved by {ranks_text(then)}, and goes on with {ranks_text(now)}: {lost}"
    if next(checkpoint.glob("global_step*"), None) is not None:
        text += f", and DeepSpeed's files are for {then} ranks"
    return f"{text}. Where the batch size changes with it, steps get other prompts."


def ranks_text(count: int) -> str:
    """Return a count of ranks as text: "1 rank", "2 ranks"."""
    return f"{count} rank{'s' if count > 1 else ''}"


def _say(text: str) -> None:
    print(f"trlx_hybrid: {text}", file=sys.stderr, flush=True)
