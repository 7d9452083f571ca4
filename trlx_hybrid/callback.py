"""What a session hears of the training loop, as a callback of transformers' Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

if TYPE_CHECKING:
    from .session import Session


class Follower(TrainerCallback):  # type: ignore[misc]
    """Tells the session what the training loop does."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Open it: the model is prepared, sharded, its checkpoint loaded."""
        self._session.open()

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Move the weight version on."""
        self._session.weights_changed()
