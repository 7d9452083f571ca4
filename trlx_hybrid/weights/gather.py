"""The weight sync that serves every policy: every parameter in full, streamed through the engine's own loader."""

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
    """The weight sync `gather`: makes the policy's weights full tensors, layer by layer, and streams them into the
    engine's own loader.

    Each sync moves the full model (all-gathered first where it is sharded) and needs the memory of one more layer.
    Adapters are merged out of place, so the trainer's weights stay bitwise what they were.

    Args:
        source: the component that offers the engine; errors of the engine name it.
    """

    name = "gather"

    def __init__(self, policy: Policy, engine: Engine, source: Component | None = None) -> None:
        self._policy, self._engine, self._source = policy, engine, source

    def refuses(self) -> str | None:
        """Return why the policy's weights cannot be read in full, or None."""
        return self._policy.refuses_gather()

    def sync(self) -> LoadReport:
        """Stream all weights of the policy into the engine."""
        return asked(self._source, self._engine, "load_weights", self._policy.full_weights())  # type: ignore[no-any-return]
