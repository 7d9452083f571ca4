"""The weight sync that always works: every parameter in full, streamed through the engine's own loader."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..plugins.blame import asked
from ..protocols import WeightSync
from ..types import LoadReport

if TYPE_CHECKING:
    from ..plugins.registry import Component
    from ..protocols import Engine
    from .policy import Policy


class GatherSync(WeightSync):
    """Materialise the policy's weights group by group and hand them to the engine in one streamed load.

    Moves the full model each time (all-gathered first where it is sharded); extra memory is one layer. Adapters are
    merged out of place, so the trainer's weights stay bitwise what they were.

    Args:
        source: what offers the engine, whose errors are its own.
    """

    name = "gather"

    def __init__(self, policy: Policy, engine: Engine, source: Component | None = None) -> None:
        self._policy, self._engine, self._source = policy, engine, source

    def refuses(self) -> str | None:
        """Why the weights cannot be read in full, or None."""
        return self._policy.refuses_gather()

    def sync(self) -> LoadReport:
        """Stream the whole policy into the engine."""
        return asked(self._source, self._engine, "load_weights", self._policy.full_weights())  # type: ignore[no-any-return]
