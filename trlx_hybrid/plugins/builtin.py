"""The components that come with the host. The `transformers` engine is TRL's own path and needs no component."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..protocols import Rows, Scores, Scoring
from ..rollout.single_turn import SingleTurn
from ..weights.gather import GatherSync
from .hookspecs import hookimpl

if TYPE_CHECKING:
    from .registry import Registry


class Padded(Scoring):
    """The default scoring component: log-probs from TRL's own forward passes, over rows padded to the longest."""

    name = "padded"

    def score(self, rows: Rows) -> Scores:
        """Return the log-probs and entropies that TRL's own forward passes compute."""
        return rows.padded()


@hookimpl
def trlx_register(registry: Registry) -> None:
    """Offer the default components: the weight sync `gather`, the rollout `single_turn` and the scoring `padded`."""
    registry.offer(
        "weights",
        "gather",
        lambda session, options: GatherSync(
            session.policy, session.live_engine, session.selection.engine and session.selection.engine.component
        ),
        order=100,
        summary="all-gathers full tensors and loads them with the engine's weight loader; always available",
    )
    registry.offer("rollout", "single_turn", lambda session, options: SingleTurn(), summary="one completion per prompt")
    registry.offer("scoring", "padded", lambda session, options: Padded(), summary="TRL's own forward passes")
