"""What a hybrid trainer does with checkpoints: goes on from one, tells its session, and saves the session beside."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .resuming import resumed

if TYPE_CHECKING:
    from .session import Session


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
        super()._save_checkpoint(model, trial)  # type: ignore[misc]
        trainer: Any = self
        if trainer.args.should_save and not self.session.selection.stock:
            folder = Path(trainer._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
            self.session.save_state(folder)
