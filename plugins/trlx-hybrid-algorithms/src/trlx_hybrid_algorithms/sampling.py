"""Dynamic sampling: an algorithm that trains only on groups (the completions of one prompt) whose rewards differ, and
has more prompts sampled in place of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trlx_hybrid.contract.protocols import Algorithm, Groups
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


class DynamicSampling(Algorithm):
    """An algorithm that trains only on groups whose completions have different rewards, and samples more prompts until
    the batch is full.

    In groups with equal rewards, every advantage is 0, so they teach nothing.

    Args:
        options: the user's options.
        each: whether TRL normalizes the rewards of each function separately, before it sums them.

    Source: DAPO, arXiv 2503.14476, section 3.2.
    """

    name = "dynamic_sampling"

    def __init__(self, options: DynamicSamplingOptions, each: bool) -> None:
        self.rounds, self.oversampling = options.rounds, options.oversampling
        self._function, self._each = options.function, each

    def keep(self, groups: Groups) -> Sequence[bool]:
        """Return for each group whether to train on it, that is, whether its highest reward is above its lowest.

        The rewards are those of the function that the options name, or else the weighted sum of all functions. If TRL
        normalizes the rewards of each function separately, it is enough that the rewards of one function differ.

        Args:
            groups: the groups that were sampled, with their rewards.

        Raises:
            ConfigError: the options name a function that does not exist.
        """
        functions = groups.rewards.shape[-1]
        if self._function is not None and not 0 <= self._function < functions:
            raise ConfigError(
                f"dynamic_sampling: function={self._function}, and there are {functions} reward functions, counted "
                "from 0."
            )
        if self._function is not None:
            rewards = groups.rewards[..., self._function : self._function + 1]
        else:
            rewards = groups.rewards if self._each else groups.totals.unsqueeze(-1)
        highest = rewards.nan_to_num(nan=float("-inf")).amax(dim=1)
        lowest = rewards.nan_to_num(nan=float("inf")).amin(dim=1)
        differ: list[bool] = (highest > lowest).any(dim=-1).tolist()
        return differ

    def note(self) -> str:
        """Return the line about this algorithm that is printed when a run starts: the number of rounds and the
        oversampling."""
        return f"up to {self.rounds} rounds a batch, the first with {self.oversampling:g} times its prompts"
