"""The checkpoint that a run goes on from when its launcher has started it again."""

from __future__ import annotations

import json
import os
import re
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import ConfigError, listed

if TYPE_CHECKING:
    from .ranks import Ranks

RESUME_VARIABLE = "TRLX_HYBRID_RESUME"
"""Set to 1 by `trlx-hybrid launch --restart N` from the second start on; not set at the first."""
CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def resumed(ranks: Ranks, output_dir: str | Path) -> str | None:
    """The checkpoint that a trainer goes on from which was not told one. Collective where a launcher asks for it.

    None at a run's first start, and where nothing was saved yet: the run then starts over, and says so.

    Raises:
        ConfigError: ranks see different checkpoints, so part of them would start over.
    """
    if os.environ.get(RESUME_VARIABLE) != "1":
        return None
    found = ranks.gather(newest_checkpoint(output_dir, ranks.world))
    if len(set(found)) > 1:
        seen = [f"rank {rank}: {path.name if path else 'none'}" for rank, path in enumerate(found)]
        raise ConfigError(
            f"The ranks see different checkpoints in {os.path.abspath(output_dir)} ({listed(seen, 8)}), so this run "
            "cannot go on from one. Let output_dir be a folder that all nodes share."
        )
    checkpoint = found[0]
    if ranks.rank == 0:
        goes_on = f"going on from {checkpoint}" if checkpoint else f"no whole checkpoint in {output_dir}: starting over"
        print(f"trlx_hybrid: started again, {goes_on}", file=sys.stderr, flush=True)
    return None if checkpoint is None else str(checkpoint)


def checkpoint_to_resume(output_dir: str | Path) -> str | None:
    """The same for a trainer of another kind: what to pass to `trainer.train(resume_from_checkpoint=...)`."""
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
