"""Settings of the algorithms, `HybridConfig.algorithm_options[name]`."""

from __future__ import annotations

from dataclasses import dataclass

from trlx_hybrid.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicSamplingOptions:
    """Settings of `dynamic_sampling`, which samples until enough groups have completions with different rewards.

    Attributes:
        rounds: how many times prompts are sampled for one batch, at most.
        oversampling: the number of prompts that the first round samples, as a multiple of the batch's number of
            prompts. With a larger multiple, fewer batches need a second round. A round takes about as long as its
            longest completion.
        function: number of the reward function, from 0, whose rewards must differ. None: the rewards of all functions,
            weighted and summed. A penalty for length or format makes this sum differ in most groups.
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
    """Settings of `curriculum`, which prefers prompts that are sometimes solved.

    Attributes:
        lowest: the reward, weighted and summed over functions, of a completion that is entirely wrong.
        highest: the reward, weighted and summed over functions, of a completion that is entirely right.
        explore: the share of prompts that are drawn uniformly, regardless of their solve rates; above 0 and at most 1.
        memory: the weight of the older solve rate when a prompt is sampled again, from 0 to below 1.
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
    """Settings of `length_reward`, which adds a bonus to the rewards of short right completions.

    Attributes:
        weight: the difference that length makes to the reward: the shortest right completion of a group gains half of
            `weight`, and the longest right completion loses half of `weight`.
        right: the reward, weighted and summed over functions, from which on a completion counts as right.
    """

    weight: float = 0.2
    right: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PositiveNllOptions:
    """Settings of `positive_nll`, which adds the negative log-likelihood of completions with a positive advantage to
    the loss.

    Attributes:
        weight: the factor of this term of the loss.
    """

    weight: float = 0.1
