"""The rollout of plain GRPO: one completion per prompt, one call of the engine."""

from __future__ import annotations

from collections.abc import Sequence

from ..protocols import Rollout, Run
from ..types import Completion, Request, Sampling


class SingleTurn(Rollout):
    """Also serves TRL's tool loop, which calls once per turn."""

    name = "single_turn"

    def run(self, session: Run, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """One completion per request, in order."""
        return session.live_engine.generate(requests, sampling)
