"""Which groups are trained on."""

from __future__ import annotations

from collections.abc import Sequence

from trlx_hybrid.protocols import Algorithm, Groups

from .options import DynamicSamplingOptions


class DynamicSampling(Algorithm):
    """Only groups whose completions have different rewards: all others have no gradient. The batch is sampled on until
    it is full of them.

    Source: DAPO, arXiv 2503.14476, section 3.2.
    """

    name = "dynamic_sampling"

    def __init__(self, options: DynamicSamplingOptions) -> None:
        self.rounds, self.oversampling = options.rounds, options.oversampling

    def keep(self, groups: Groups) -> Sequence[bool]:
        """Where the highest reward of a group is above its lowest."""
        totals = groups.totals
        highest = totals.nan_to_num(nan=float("-inf")).amax(dim=1)
        lowest = totals.nan_to_num(nan=float("inf")).amin(dim=1)
        return (highest > lowest).tolist()  # type: ignore[no-any-return]

    def note(self) -> str:
        """How far it goes."""
        return f"up to {self.rounds} rounds a batch, the first with {self.oversampling:g} times its prompts"
