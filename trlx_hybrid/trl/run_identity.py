"""The identity of a run: a number in its output folder, and in the manifest of each of its checkpoints.

    trlx_hybrid_run.json    {"run": "5f0c…", "process": "77ab…", "foreign": ["checkpoint-10"], "launch": "c1e0…"}

A run gets it when it starts first, and keeps it when it is started again, by a launcher or by a queue: the folder is
what both starts share. A run that starts first in a folder that held another one gets a new identity.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from ..config import LAUNCH_VARIABLE
from ..errors import ConfigError

IDENTITY_FILE = "trlx_hybrid_run.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """Whose output folder it is.

    Attributes:
        run: the identity, which all starts of a run share.
        process: of the latest start.
        foreign: names of checkpoints without a manifest that were in the folder before the run began.
        launch: of `trlx-hybrid launch`, which that start belongs to; None of another.
    """

    run: str
    process: str
    foreign: tuple[str, ...] = ()
    launch: str | None = None


def new_identity(foreign: Iterable[str] = (), run: str | None = None) -> RunIdentity:
    """Return the identity of a start: of a new run, or of one that is known."""
    return RunIdentity(
        run=run or secrets.token_hex(8),
        process=secrets.token_hex(8),
        foreign=tuple(foreign),
        launch=os.environ.get(LAUNCH_VARIABLE),
    )


def read_identity(output_dir: Path) -> RunIdentity | None:
    """Return whose folder it is; None where nobody has said.

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
    """Write whose folder it is. Of two starts at one time the later one stays, as a whole.

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
