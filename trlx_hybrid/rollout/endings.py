"""How the completions of a rollout ended: at the limit of their length, or by themselves."""

from __future__ import annotations

from collections.abc import Sequence


class Endings:
    """The endings of all that was sampled in one rollout, found again by the tokens.

    TRL and rollouts of a user's own hand on tokens alone, and ask for one row in several turns. A row is the prompt of
    its last turn and what was sampled for it. So its ending is that of the turn with the same tokens.
    """

    def __init__(self) -> None:
        self._truncated: dict[int, bool] = {}  # by the hash of all tokens: some 20 ms for a million

    def clear(self) -> None:
        """Forget those of an earlier rollout."""
        self._truncated.clear()

    def add(self, prompt_ids: Sequence[int], completion_ids: Sequence[int], finish_reason: str | None) -> None:
        """Keep how a turn ended; None says nothing.

        Args:
            prompt_ids: all tokens before the turn, or before any part of the row that ends with it.
            completion_ids: those after them.
            finish_reason: the engine's, see `Completion`.
        """
        if finish_reason is not None:
            self._truncated[hash((*prompt_ids, *completion_ids))] = finish_reason == "length"

    def truncated(self, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> bool | None:
        """Return whether a row was cut at its limit; None where nobody has said it of these tokens."""
        return self._truncated.get(hash((*prompt_ids, *completion_ids)))
