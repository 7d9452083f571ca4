"""The entry point by which this package offers its algorithms to the plugin manager.

The module imports little: all installed plugins are loaded at each start, which must stay cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trlx_hybrid.plugins.hookspecs import hookimpl

from .advantages import LeaveOneOut, OptimalBaseline, PassAtK
from .curriculum import Curriculum, CurriculumOptions
from .losses import PositiveNll, PositiveNllOptions
from .rewards import LengthReward, LengthRewardOptions
from .sampling import DynamicSampling, DynamicSamplingOptions

if TYPE_CHECKING:
    from trlx_hybrid.contract.protocols import Algorithm, Run
    from trlx_hybrid.plugins.registry import Registry


def _dynamic_sampling(session: Run, options: DynamicSamplingOptions) -> Algorithm:
    each = getattr(session.args, "multi_objective_aggregation", "") == "normalize_then_sum"
    return DynamicSampling(options, each)


@hookimpl
def trlx_register(registry: Registry) -> None:
    """Offer the algorithms of this package to the plugin manager, by the names that users give."""

    def offer(name: str, factory: Any, summary: str, options: type[Any] | None = None) -> None:
        registry.offer("algorithm", name, factory, options=options, summary=summary)

    offer("dynamic_sampling", _dynamic_sampling, "samples until all groups have a gradient", DynamicSamplingOptions)
    offer(
        "curriculum",
        lambda session, options: Curriculum(options, session.args.seed),
        "draws prompts that are sometimes solved",
        CurriculumOptions,
    )
    offer(
        "length_reward",
        lambda session, options: LengthReward(options),
        "more for short right completions of a group",
        LengthRewardOptions,
    )
    offer(
        "positive_nll",
        lambda session, options: PositiveNll(options),
        "imitates completions better than their group",
        PositiveNllOptions,
    )
    offer("leave_one_out", lambda *_: LeaveOneOut(), "advantages against the mean of the others")
    offer("optimal_baseline", lambda *_: OptimalBaseline(), "advantages against a mean weighted by length")
    offer("pass_at_k", lambda *_: PassAtK(), "advantages for the best of a group alone")
