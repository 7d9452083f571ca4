"""`alias` and `copy`: full fine-tuning, where policy and engine are one replica on one device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trlx_hybrid.protocols import WeightSync
from trlx_hybrid.types import LoadReport

from .base import SharedWeights

if TYPE_CHECKING:
    from trlx_hybrid.session import Session


class SharedSync(WeightSync):
    """The policy's parameters are the engine's memory (`alias`), or are cast into it (`copy`).

    Attributes:
        keeps_weights: whether the engine's memory must outlive the rollout, because the policy is in it.
    """

    def __init__(self, session: Session, alias: bool) -> None:
        self.name = "alias" if alias else "copy"
        self.keeps_weights = alias
        self._session = session
        self._shared: SharedWeights | None = None
        self._alias = alias

    def refuses(self) -> str | None:
        """Why this path cannot serve this model and engine, or None."""
        from ..engine import VLLMEngine

        session = self._session
        engine = session.live_engine
        if not isinstance(engine, VLLMEngine):
            return "it reaches into vLLM's memory, and another engine is in use"
        if session.policy.adapters:
            return "the policy has adapters: they are served (`lora`) or merged (`gather`)"
        self._shared = SharedWeights(engine, session.policy, self._alias, session.optimizer())
        return self._shared.refuses()

    def open(self) -> None:
        """Make it one memory."""
        assert self._shared is not None, "refuses() comes first"
        self._shared.bind()

    def sync(self) -> LoadReport:
        """Copy what is not aliased."""
        assert self._shared is not None, "refuses() comes first"
        tensors, moved = self._shared.refresh()
        return LoadReport(tensors=tensors, bytes=moved)

    def put_back(self) -> bool:
        """See `SharedWeights.put_back`."""
        return self._shared is not None and self._shared.put_back()

    def forget(self) -> None:
        """Frozen weights move again, too."""
        if self._shared is not None:
            self._shared.forget()

    def check(self, full: bool) -> int:
        """Prove it, see `SharedWeights.check`."""
        assert self._shared is not None
        return self._shared.check(full)

    def release(self) -> None:
        """The engine is closed: the policy takes its weights with it."""
        if self._shared is not None:
            self._shared.release()
