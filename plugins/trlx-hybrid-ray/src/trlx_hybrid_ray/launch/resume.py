"""The checkpoint that a restarted run goes on from."""

from __future__ import annotations

import json
import os
import re
import zipfile
from pathlib import Path

RESUME_VARIABLE = "TRLX_HYBRID_RESUME"
"""Set to 1 by `trlx-hybrid launch --restart N` from the second start on; not set at the first."""
CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def checkpoint_to_resume(output_dir: str | Path) -> str | None:
    """What to pass to `trainer.train(resume_from_checkpoint=...)`.

    None unless the launcher has started this run again, and where nothing was saved yet: the run then starts over.
    """
    if os.environ.get(RESUME_VARIABLE) != "1":
        return None
    newest = newest_checkpoint(output_dir, ranks=int(os.environ.get("WORLD_SIZE", "1")))
    return None if newest is None else str(newest)


def newest_checkpoint(output_dir: str | Path, ranks: int = 1) -> Path | None:
    """The newest checkpoint that was written to its end; None if there is none.

    transformers takes the one with the highest number, and a run that is killed while it saves leaves one that cannot
    be loaded: every restart would fail on it. Rank 0 writes `trainer_state.json` last, each rank its generators.
    """
    folder = Path(output_dir)
    numbered = {
        int(match[1]): path
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := CHECKPOINT.fullmatch(path.name)) and path.is_dir()
    }
    return next((numbered[step] for step in sorted(numbered, reverse=True) if _complete(numbered[step], ranks)), None)


def _complete(checkpoint: Path, ranks: int) -> bool:
    try:
        json.loads((checkpoint / "trainer_state.json").read_text())
    except (OSError, ValueError):
        return False
    generators = list(checkpoint.glob("rng_state*.pth"))
    if not generators:  # saved with save_only_model
        return True
    return len(generators) >= ranks and all(zipfile.is_zipfile(path) for path in generators)
