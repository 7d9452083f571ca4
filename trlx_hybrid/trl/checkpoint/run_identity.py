"""The identity of a run: a random id in its output folder and in the manifest of each of its checkpoints.

    trlx_hybrid_run.json    {"run": "5f0c…", "process": "77ab…", "foreign": ["checkpoint-10"], "launch": "c1e0…"}

A run gets its identity at its first start, and keeps it when a launcher or a queue starts it again: both starts share
the output folder. If a run starts for the first time in a folder that held another run, it gets a new identity.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from ...config import LAUNCH_VARIABLE
from ...errors import ConfigError

IDENTITY_FILE = "trlx_hybrid_run.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """The identity of the run that an output folder belongs to.

    Attributes:
        run: the id of the run, which all starts of the run share.
        process: the id of the latest start, a new one for each process that starts the run.
        foreign: names of checkpoints without a manifest that were in the folder before the run began.
        launch: the id of the `trlx-hybrid launch` that made the latest start; None for another kind of start.
    """

    run: str
    process: str
    foreign: tuple[str, ...] = ()
    launch: str | None = None


def new_identity(foreign: Iterable[str] = (), run: str | None = None) -> RunIdentity:
    """Return the identity for a start of a run in this process: with the id of a known run, or with a new one.

    Args:
        foreign: names of checkpoints in the folder that do not belong to the run.
        run: the id of the known run; None for a new run.
    """
    return RunIdentity(
        run=run or secrets.token_hex(8),
        process=secrets.token_hex(8),
        foreign=tuple(foreign),
        launch=os.environ.get(LAUNCH_VARIABLE),
    )


def read_identity(output_dir: Path) -> RunIdentity | None:
    """Return the identity of the run that an output folder belongs to, from the folder's file `trlx_hybrid_run.json`;
    None where there is no such file.

    Raises:
        ConfigError: the file cannot be read.
    """
    file = output_dir / IDENTITY_FILE
    try:
        found = json.loads(file.read_text())
        return RunIdentity(**found | {"foreign": tuple(found["foreign"])})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{file} cannot be read ({error!r:.80}), so this run cannot tell which checkpoints are its own. Remove it: "
            "then the newest whole one is taken, whosever it is."
        ) from error


def write_identity(output_dir: Path, identity: RunIdentity) -> None:
    """Write a run's identity into its output folder, as `trlx_hybrid_run.json`. If two processes write at once, one
    of the two files replaces the other whole.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    part = output_dir / f"{IDENTITY_FILE}.{identity.process}.part"
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(asdict(identity)))
        os.replace(part, output_dir / IDENTITY_FILE)
    except OSError as error:
        raise ConfigError(f"This run cannot write to its output_dir {output_dir}: {error}. Name another.") from error
