"""Records of the turns that a rollout has sampled, looked up by their tokens: how each ended, and its support (for each
token, the ids it was sampled from)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ..contract.support import Support
from ..errors import ComponentError


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


Turn = tuple[list[int], Support]
"""The token ids that were sampled in one turn, and their support."""


class Supports:
    """A record of the supports of all turns sampled in one rollout (for each token, the ids from which the engine
    sampled it), looked up by the turns' tokens.

    TRL and users' own rollouts pass on tokens only, may sample a row of a batch in several turns, and may cut the last
    turn. So the support of a row is assembled turn by turn, each time from a recorded completion that followed the same
    tokens and begins with the same ones.
    """

    def __init__(self) -> None:
        self._turns: defaultdict[int, list[Turn]] = defaultdict(list)  # by the hash of the context

    def clear(self) -> None:
        """Forget the supports of the last rollout."""
        self._turns.clear()

    def add(self, prompt_ids: Sequence[int], completion_ids: Sequence[int], support: Support | None) -> None:
        """Record the support of a turn, or of a whole conversation; a support of None records nothing.

        Args:
            prompt_ids: all tokens before the turn.
            completion_ids: the tokens that the support belongs to.
        """
        if support is None:
            return
        if len(support) != len(completion_ids):
            raise ComponentError(
                f"A completion of {len(completion_ids)} tokens came with the support of {len(support)}: each sampled "
                "token needs its own. Report it to the author of the engine."
            )
        self._turns[hash(tuple(prompt_ids))].append((list(completion_ids), support))

    def of_row(
        self, prompt_ids: Sequence[int], completion_ids: Sequence[int], mask: Sequence[int] | None
    ) -> Support | None:
        """Return the support of a row's completion, or None where the support of a sampled token is not known.

        Args:
            mask: 0 for the tokens that were not sampled, or are not trained on; None where all were.
        """
        at = 0
        parts: list[tuple[int, Support | None]] = []
        while at < len(completion_ids):
            if mask is not None and not mask[at]:
                end = next((i for i in range(at, len(mask)) if mask[i]), len(mask))
                parts.append((end - at, None))
                at = end
                continue
            support = self._take((*prompt_ids, *completion_ids[:at]), completion_ids[at:])
            if support is None:
                return None
            parts.append((len(support), support))
            at += len(support)
        known = next((support for _, support in parts if support is not None), None)
        if known is None:
            return Support.unsampled(len(completion_ids), 0)
        whole = [Support.unsampled(n, known.vocabulary) if support is None else support for n, support in parts]
        return sum(whole[1:], whole[0])

    def _take(self, context: tuple[int, ...], tokens: Sequence[int]) -> Support | None:
        """Return the support of the first of some tokens: of as many as were sampled in one turn after the context.
        None where no such turn was recorded. Of several turns with the same tokens, each call returns the next: their
        supports may differ by rounding.

        Args:
            context: all tokens before them.
        """
        turns, tokens = self._turns.get(hash(context), []), list(tokens)
        found = next((n for n, (sampled, _) in enumerate(turns) if sampled == tokens), None)
        if found is None:  # the row goes on after this turn, or was cut
            begun = [n for n, (sampled, _) in enumerate(turns) if sampled and _begins(sampled, tokens)]
            found = max(begun, key=lambda n: len(turns[n][0]), default=None)
        if found is None:
            return None
        turns.append(turns.pop(found))  # the next row with the same tokens takes another
        return turns[-1][1][: len(tokens)]


def _begins(one: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether the shorter of two sequences is a prefix of the longer one."""
    return one[0] == other[0] and all(a == b for a, b in zip(one, other, strict=False))
