"""The rollout of plain GRPO: one completion per prompt, one call of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..protocols import Rollout
from ..types import Completion, Request, Sampling

if TYPE_CHECKING:
    from ..session import Session


class SingleTurn(Rollout):
    """Also serves TRL's tool loop, which calls once per turn."""

    name = "single_turn"

    def run(self, session: Session, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """One completion per request, in order."""
        return session.live_engine.generate(requests, sampling)
