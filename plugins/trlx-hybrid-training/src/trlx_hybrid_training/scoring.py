"""`scoring="packed"`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trlx_hybrid.protocols import Rows, Scores, Scoring

if TYPE_CHECKING:
    from trlx_hybrid.protocols import Run

    from .options import PackedOptions


class Packed(Scoring):
    """Scores rows without their padding."""

    name = "packed"

    def __init__(self, session: Run, options: PackedOptions) -> None:
        self.deferred = options.deferred

    def score(self, rows: Rows) -> Scores:
        """Padded."""
        return rows.padded()
