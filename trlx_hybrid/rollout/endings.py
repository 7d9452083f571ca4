"""The endings of a rollout's completions: cut off at the length limit, or ended by themselves."""

from __future__ import annotations

from collections.abc import Sequence


class Endings:
    """The endings of all turns sampled in one rollout, looked up by their tokens.

    TRL and users' own rollouts pass on tokens only, and request one row in several turns. A row consists of its last
    turn's prompt and completion. So its ending is that of the turn with the same tokens.
    """

    def __init__(self) -> None:
        self._truncated: dict[int, bool] = {}  # by the hash of all tokens: about 20 ms for a million

    def clear(self) -> None:
        """Forget the endings of the last rollout."""
        self._truncated.clear()

    def add(self, prompt_ids: Sequence[int], completion_ids: Sequence[int], finish_reason: str | None) -> None:
        """Record how a turn ended; a `finish_reason` of None records nothing.

        Args:
            prompt_ids: all tokens before the turn, or before any part of the row that ends with it.
            completion_ids: the tokens after `prompt_ids`.
            finish_reason: the engine's reason, see `Completion`.
        """
        if finish_reason is not None:
            self._truncated[hash((*prompt_ids, *completion_ids))] = finish_reason == "length"

    def truncated(self, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> bool | None:
        """Return whether a row was cut at its limit; None where no ending was recorded for these tokens."""
        return self._truncated.get(hash((*prompt_ids, *completion_ids)))
