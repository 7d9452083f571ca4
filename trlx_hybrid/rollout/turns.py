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
        """Delete the records of the last rollout."""
        self._truncated.clear()

    def add(self, prompt_ids: Sequence[int], completion_ids: Sequence[int], finish_reason: str | None) -> None:
        """Record how a turn ended.

        Args:
            prompt_ids: all tokens before the turn; fewer where `completion_ids` begins earlier in the row.
            completion_ids: all tokens from there to the end of the turn.
            finish_reason: the engine's reason ("stop", "length" or "abort"); None records nothing.
        """
        if finish_reason is not None:
            self._truncated[hash((*prompt_ids, *completion_ids))] = finish_reason == "length"

    def truncated(self, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> bool | None:
        """Return whether a row was cut off at its length limit; None if no turn is recorded whose tokens, together with
        all tokens before the turn, equal the row's tokens.

        Args:
            prompt_ids: the tokens of the row's prompt.
            completion_ids: all tokens after the prompt.
        """
        return self._truncated.get(hash((*prompt_ids, *completion_ids)))


Turn = tuple[list[int], Support]
"""The token ids that were sampled in one turn, and the ids that each of them could be sampled from."""


class Supports:
    """A record of the supports of all turns sampled in one rollout, looked up by the turns' tokens. A support holds,
    for each token, the ids that the engine could sample it from (after top-k, top-p and the like).

    TRL and users' own rollouts pass on tokens only, may sample a row of a batch in several turns, and may cut the last
    turn. So the support of a row is assembled turn by turn. For each turn, a recorded completion is used that was
    sampled after the same tokens, and that begins with the tokens which the row has there.
    """

    def __init__(self) -> None:
        self._turns: defaultdict[int, list[Turn]] = defaultdict(list)  # by the hash of the context

    def clear(self) -> None:
        """Delete the records of the last rollout."""
        self._turns.clear()

    def add(self, prompt_ids: Sequence[int], completion_ids: Sequence[int], support: Support | None) -> None:
        """Record, for the completion of a turn or of a whole conversation, the ids that each of its tokens could be
        sampled from. `of_row` finds them again by the tokens.

        Args:
            prompt_ids: all tokens before the completion.
            completion_ids: the tokens of the completion.
            support: the ids for each token of the completion; None records nothing.

        Raises:
            ComponentError: `support` is for another number of tokens than the completion has.
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
        """Return, for each token of a row's completion, the ids that it could be sampled from; None where they were not
        recorded for one of the sampled tokens.

        Args:
            prompt_ids: the tokens of the row's prompt.
            completion_ids: all tokens after the prompt.
            mask: for each token of the completion, 0 if it was not sampled or is not trained on; None where all were
                sampled.
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
        """Return the recorded support of one turn (for each token, the ids that it could be sampled from), for as many
        of the tokens as were sampled in this turn; None where no such turn was recorded. Of several turns with equal
        tokens, each call returns the next: their supports may differ by rounding.

        Args:
            context: all tokens before the turn.
            tokens: the tokens from the turn's first one on, later turns included.
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
