"""Calls of the run's scoring component, which computes log-probs. They check what it returns, and errors name the
component.

TRL's own scoring is called directly: its errors come from the model and from TRL, and already name their source.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...blame import asked, fault
from ...contract.protocols import Rows, Scores
from ...plugins.registry import BUILTIN
from .micro_batches import regrouped

if TYPE_CHECKING:
    from ...plugins.registry import Component
    from ...session import Session


def scored(session: Session, rows: Rows, entropies: bool) -> Scores:
    """Compute the log-probs and entropies of rows with the run's scoring component. Collective.

    Args:
        rows: the rows, with the model and the functions that score them.
        entropies: whether entropies are needed.

    Raises:
        ComponentError: a plugin's scoring failed, or returned something else than scores of these rows.
    """
    component = _of_a_plugin(session)
    scores: Scores = asked(component, session.scoring, "score", rows)
    if component is None:
        return scores
    if not isinstance(scores, Scores):
        raise fault(component, "score", f"a {type(scores).__name__}", "a trlx_hybrid.contract.protocols.Scores")
    shape = (len(rows.input_ids), rows.completion_length)
    for name, needed in (("log_probs", True), ("entropies", entropies)):
        found = getattr(scores, name)
        if needed and (not isinstance(found, Tensor) or found.shape != shape):
            told = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"type {type(found).__name__}"
            raise fault(component, "score", f"{name} of {told}", f"a tensor of shape {shape}")
    if rows.router_loss and not isinstance(scores.router_loss, Tensor):
        raise fault(component, "score", f"a router_loss of type {type(scores.router_loss).__name__}", "a tensor")
    return scores


def grouped(
    session: Session, micro_batches: Sequence[dict[str, Any]], prompts: Tensor, tokens: Sequence[int]
) -> list[dict[str, Any]]:
    """Return the rows of a rollout's micro-batches, regrouped into other micro-batches as the scoring component
    chooses.

    Args:
        micro_batches: the micro-batches that TRL drew.
        prompts: (rows, P) ids of all rows' prompts, -1 where padded.
        tokens: number of tokens of each row.

    Raises:
        ComponentError: a plugin's scoring failed, or did not put each row into exactly one of the equally large groups.
    """
    component = session.selection.scoring.component
    groups = asked(component, session.scoring, "micro_batches", prompts, tokens, len(micro_batches))
    if not isinstance(groups, Sequence) or not all(
        isinstance(group, Sequence) and all(isinstance(row, Integral) for row in group) for group in groups
    ):
        raise fault(component, "micro_batches", f"{groups!r:.80}", f"{len(micro_batches)} lists of row numbers")
    return regrouped(micro_batches, groups, str(component))


def joined(session: Session, tokens: Sequence[int]) -> int:
    """Return how many of the next micro-batches are scored in one forward pass, as the scoring component chooses.

    Args:
        tokens: number of tokens of each of the next micro-batches.

    Raises:
        ComponentError: a plugin's scoring failed, or returned something else than an integer of at least 1.
    """
    component = session.selection.scoring.component
    count = asked(component, session.scoring, "joined", tokens)
    if not isinstance(count, int) or count < 1:
        raise fault(component, "joined", f"{count!r:.80}", "a number of micro-batches, 1 or more,")
    return count


def _of_a_plugin(session: Session) -> Component | None:
    component = session.selection.scoring.component
    return None if component.plugin == BUILTIN else component
