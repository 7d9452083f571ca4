"""A record of which completions of a rollout were cut off at the length limit, and which ended by themselves."""

from __future__ import annotations

from collections.abc import Sequence


class Endings:
    """A record of how each turn sampled in a rollout ended (at the length limit, or by itself), looked up by the turn's
    tokens.

    TRL and users' own rollouts pass on tokens only, and may sample one row of a batch in several turns. A row's tokens
    are the prompt and the completion of its last turn, so the row ended as the turn with the same tokens did.
    """

    def __init__(self) -> None:
        self._truncated: dict[int, bool] = {}  # by the hash of all tokens: about 20 ms for a million

    def clear(self) -> None:
        """Forget the endings of the last rollout."""
        self._truncated.clear()

    def add(self, prompt_ids: Sequence[int], completion_ids: Sequence[int], finish_reason: str | None) -> None:
        """Record how a turn ended; a `finish_reason` of None records nothing.

        Args:
            prompt_ids: all tokens before the turn, or before any part of the row that ends with the turn.
            completion_ids: the tokens after `prompt_ids`.
            finish_reason: the engine's reason, see `Completion`.
        """
        if finish_reason is not None:
            self._truncated[hash((*prompt_ids, *completion_ids))] = finish_reason == "length"

    def truncated(self, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> bool | None:
        """Return whether a row with these tokens was cut off at its length limit; None where no turn with them was
        recorded."""
        return self._truncated.get(hash((*prompt_ids, *completion_ids)))
