"""The entry point by which this package offers its algorithms to the plugin manager.

The module imports little: all installed plugins are loaded at each start, which must stay cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trlx_hybrid.plugins.hookspecs import hookimpl

from .options import CurriculumOptions, DynamicSamplingOptions, LengthRewardOptions, PositiveNllOptions

if TYPE_CHECKING:
    from trlx_hybrid.contract.protocols import Algorithm, Run
    from trlx_hybrid.plugins.registry import Registry


def _dynamic_sampling(session: Run, options: DynamicSamplingOptions) -> Algorithm:
    from .sampling import DynamicSampling

    each = getattr(session.args, "multi_objective_aggregation", "") == "normalize_then_sum"
    return DynamicSampling(options, each)


def _curriculum(session: Run, options: CurriculumOptions) -> Algorithm:
    from .curriculum import Curriculum

    return Curriculum(options, session.args.seed)


def _length_reward(session: Run, options: LengthRewardOptions) -> Algorithm:
    from .rewards import LengthReward

    return LengthReward(options)


def _positive_nll(session: Run, options: PositiveNllOptions) -> Algorithm:
    from .losses import PositiveNll

    return PositiveNll(options)


def _advantages(name: str) -> Any:
    def make(session: Run, options: object) -> Algorithm:
        from . import advantages

        algorithm: Algorithm = getattr(advantages, name)()
        return algorithm

    return make


@hookimpl
def trlx_register(registry: Registry) -> None:
    """Offer the algorithms of this package to the plugin manager, by the names that users give."""

    def offer(name: str, factory: Any, summary: str, options: type[Any] | None = None) -> None:
        registry.offer("algorithm", name, factory, options=options, summary=summary)

    offer("dynamic_sampling", _dynamic_sampling, "samples until all groups have a gradient", DynamicSamplingOptions)
    offer("curriculum", _curriculum, "draws prompts that are sometimes solved", CurriculumOptions)
    offer("length_reward", _length_reward, "more for short right completions of a group", LengthRewardOptions)
    offer("positive_nll", _positive_nll, "imitates completions better than their group", PositiveNllOptions)
    offer("leave_one_out", _advantages("LeaveOneOut"), "advantages against the mean of the others")
    offer("optimal_baseline", _advantages("OptimalBaseline"), "advantages against a mean weighted by length")
    offer("pass_at_k", _advantages("PassAtK"), "advantages for the best of a group alone")
