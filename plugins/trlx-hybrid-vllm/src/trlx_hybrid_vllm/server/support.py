"""The ids that a server's tokens were sampled from, on their way from vLLM's engine core to completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from trlx_hybrid.support import Support

from .. import internals
from ..support import KeptIds


class ReturnedIds:
    """Names the ids that the tokens of a server's requests were sampled from, as vLLM returns them with each token.

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
        """Return the support of a finished request.

        Args:
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
    """Names the ids where vLLM does not return them: its workers keep them (`ServedWorker`) until they are asked.

    Args:
        llm: vLLM's `AsyncLLM`.
    """

    def __init__(self, llm: Any) -> None:
        self._llm, self._vocabulary = llm, llm.model_config.get_vocab_size()
        self._live: set[str] = set()
        self._told: list[int] | None = None

    async def open(self, request_id: str, forbidden: Sequence[int]) -> None:
        """Prepare for a request; see `ReturnedIds`."""
        self._live.add(request_id)
        if self._told != list(forbidden):
            await self._llm.collective_rpc("served_keep", args=(list(forbidden),))
            self._told = list(forbidden)

    async def take(self, request_id: str, prompt_tokens: int, tokens: int) -> Support:
        """Return the support of a finished request; see `ReturnedIds`. Every worker of an engine knows it."""
        given = request_id, prompt_tokens, tokens, sorted(self._live)
        words, bounds = (await self._llm.collective_rpc("served_kept", args=given))[0]
        return Support(np.frombuffer(words, np.int32), np.frombuffer(bounds, np.int64).reshape(-1, 2), self._vocabulary)

    def close(self, request_id: str) -> None:
        """Forget a request; the workers drop its ids when the next request is finished."""
        self._live.discard(request_id)


ServedIds = ReturnedIds | WorkersIds
"""The object that names the ids, whether vLLM returns them or its workers keep them."""
