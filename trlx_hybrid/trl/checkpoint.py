"""What a hybrid trainer does with checkpoints: goes on from one, tells its session, and saves the session beside."""

from __future__ import annotations

import json
import os
import re
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..config import RESUME_VARIABLE
from ..errors import ConfigError, listed

if TYPE_CHECKING:
    from ..ranks import Ranks
    from ..session import Session


class Checkpointing:
    """Stands between `HybridTrainer` and TRL's trainer."""

    session: Session

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As in TRL; where a launcher has started the run again and nothing is said here, from its last checkpoint."""
        trainer: Any = self
        if resume_from_checkpoint is None and trainer.state.global_step == 0:
            resume_from_checkpoint = resumed(self.session.ranks, trainer.args.output_dir)
        return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Not after the last step: transformers 5.17 takes one more where it resumes a run that had ended."""
        trainer: Any = self
        if trainer.state.global_step < trainer.state.max_steps:
            super()._run_epoch(*args, **kwargs)  # type: ignore[misc]
        else:
            trainer.control.should_training_stop = True

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_checkpoint(*args, **kwargs)  # type: ignore[misc]
        self.session.weights_changed()

    def _load_best_model(self) -> None:
        super()._load_best_model()  # type: ignore[misc]
        self.session.weights_changed()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        trainer: Any = self
        if checkpoint is not None:
            self.session.load_state(Path(checkpoint), trainer.state.global_step)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        trainer: Any = self
        if trainer.args.should_save and not (self.session.selection.stock and not self.session.algorithms):
            folder = Path(trainer._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
            folder.mkdir(parents=True, exist_ok=True)
            self.session.save_state(folder)  # first: what is written last tells that all of it is there
        super()._save_checkpoint(model, trial)  # type: ignore[misc]


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
