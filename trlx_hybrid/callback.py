"""What a session hears of the training loop, as a callback of transformers' Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from .proof import FirstStep

if TYPE_CHECKING:
    from .session import Session


class Follower(TrainerCallback):  # type: ignore[misc]
    """Tells the session what the training loop does."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._first: FirstStep | None = None

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Open it: the model is prepared, sharded, its checkpoint loaded."""
        session = self._session
        session.open()
        self._first = None if session.selection.stock else FirstStep(session.policy, session.ranks)

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Note what the first steps start from."""
        if self._first is not None:
            self._first.begins(kwargs["optimizer"])

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Move the weight version on; see that the first steps changed something."""
        self._session.freshness.changed()
        if self._first is not None:
            self._first.ended(self._session.step, kwargs["optimizer"])
