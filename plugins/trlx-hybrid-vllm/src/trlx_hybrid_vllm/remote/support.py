"""Collectors of the ids that each token of a server was sampled from, what top-k and top-p left of the vocabulary.

They bring the ids from vLLM's engine core to completions (`Completion.support`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from trlx_hybrid.contract.support import Support

from ..generate.support import KeptIds
from ..private import engine as internals


class ReturnedIds:
    """Collects the ids that each token was sampled from, where vLLM returns them with the token.

    Args:
        llm: vLLM's `AsyncLLM`.
    """

    def __init__(self, llm: Any) -> None:
        self._kept = KeptIds(llm.model_config.get_vocab_size(), internals.outside)
        internals.hand_over_masks(llm, self._kept.returned)
        self._live: set[str] = set()

    async def open(self, request_id: str, forbidden: Sequence[int]) -> None:
        """Prepare for a request.

        Args:
            request_id: as vLLM is given it.
            forbidden: ids that a bias forbids; the same for all requests of a rollout.
        """
        self._live.add(request_id)
        self._kept.open(forbidden)

    async def take(self, request_id: str, prompt_tokens: int, tokens: int) -> Support:
        """Return the ids that the tokens of a finished request were sampled from, and drop them here.

        Args:
            request_id: as vLLM is given it.
            prompt_tokens: how many tokens the prompt has; not used.
            tokens: how many tokens were sampled.

        Raises:
            EngineError: the ids of some token are not known.
        """
        return self._kept.take(request_id, 0, tokens)

    def close(self, request_id: str) -> None:
        """Drop the ids of a request, also of one that was aborted."""
        self._live.discard(request_id)
        self._kept.forget_but(self._live)


class WorkersIds:
    """Collects the ids that each token was sampled from, where vLLM does not return them.

    vLLM's workers keep the ids (`ServedWorker`) until they are asked when a request has finished.

    Args:
        llm: vLLM's `AsyncLLM`.
    """

    def __init__(self, llm: Any) -> None:
        self._llm, self._vocabulary = llm, llm.model_config.get_vocab_size()
        self._live: set[str] = set()
        self._told: list[int] | None = None

    async def open(self, request_id: str, forbidden: Sequence[int]) -> None:
        """Prepare for a request: let the workers keep ids, if they do not yet; arguments as in `ReturnedIds`."""
        self._live.add(request_id)
        if self._told != list(forbidden):
            await self._llm.collective_rpc("served_keep", args=(list(forbidden),))
            self._told = list(forbidden)

    async def take(self, request_id: str, prompt_tokens: int, tokens: int) -> Support:
        """Ask the workers for the ids that a finished request's tokens were sampled from; see `ReturnedIds`.

        Every worker of an engine knows them, so the first one's answer is taken.
        """
        given = request_id, prompt_tokens, tokens, sorted(self._live)
        words, bounds = (await self._llm.collective_rpc("served_kept", args=given))[0]
        return Support(np.frombuffer(words, np.int32), np.frombuffer(bounds, np.int64).reshape(-1, 2), self._vocabulary)

    def close(self, request_id: str) -> None:
        """Forget a request; the workers drop its ids when the next request is finished."""
        self._live.discard(request_id)


ServedIds = ReturnedIds | WorkersIds
"""The collector of ids: of those that vLLM returns, or of those that its workers keep."""
