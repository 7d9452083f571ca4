"""Settings of the algorithms, `HybridConfig.algorithm_options[name]`."""

from __future__ import annotations

from dataclasses import dataclass

from trlx_hybrid.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicSamplingOptions:
    """Of `dynamic_sampling`.

    Attributes:
        rounds: how often prompts are sampled for a batch at most.
        oversampling: how many times a batch's prompts the first round has. With more, fewer batches need a second,
            which takes about as long as its longest completion.
        function: number of the reward function, from 0, whose rewards must differ; None: those of all functions,
            weighted and summed. A penalty for length or format makes these differ in most groups.
    """

    rounds: int = 3
    oversampling: float = 1.0
    function: int | None = None

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ConfigError(f"dynamic_sampling: rounds={self.rounds}, and a batch has at least one.")
        if not self.oversampling >= 1:
            raise ConfigError(
                f"dynamic_sampling: oversampling={self.oversampling}, and a batch has all of its prompts."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumOptions:
    """Of `curriculum`.

    Attributes:
        lowest, highest: what rewards lie between, weighted and summed over functions: nothing right, all right.
        explore: the share of prompts that are drawn whatever is known of them, above 0 and at most 1.
        memory: what an older solve rate still counts when a prompt was sampled again, from 0 to below 1.
    """

    lowest: float = 0.0
    highest: float = 1.0
    explore: float = 0.2
    memory: float = 0.5

    def __post_init__(self) -> None:
        if not self.lowest < self.highest:
            raise ConfigError(f"curriculum: lowest={self.lowest} must be below highest={self.highest}.")
        if not (0 < self.explore <= 1 and 0 <= self.memory < 1):
            raise ConfigError(
                f"curriculum: explore={self.explore} must be above 0 and at most 1, and memory={self.memory} from 0 to "
                "below 1."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthRewardOptions:
    """Of `length_reward`.

    Attributes:
        weight: what the shortest completion of a group gains, and the longest loses, is half of it.
        right: from which reward on, weighted and summed over functions, a completion is right.
    """

    weight: float = 0.2
    right: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PositiveNllOptions:
    """Of `positive_nll`.

    Attributes:
        weight: of the term in the loss.
    """

    weight: float = 0.1
