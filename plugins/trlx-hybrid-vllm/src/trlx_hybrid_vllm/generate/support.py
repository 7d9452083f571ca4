"""Collectors of the ids that vLLM samples each token from: what top-k, top-p and min-p leave of the vocabulary.

Completions carry the ids in `Completion.support`, so that the trainer computes log-probs over these ids only.

On GPUs vLLM returns the ids (`return_sampling_mask`), with its second model runner, which needs Triton. On CPUs its
first model runner runs, and `CapturedIds` reads the ids from the sampler's log-probs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from trlx_hybrid.contract.support import Support, words_of, words_of_ids
from trlx_hybrid.errors import EngineError

from ..private.engine import hand_over_masks, outside
from ..private.recorders import SampledRows

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

Words = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
Ids = np.ndarray[tuple[int, ...], np.dtype[np.int32]]


class KeptIds:
    """Collects the ids that each token of unfinished requests was sampled from, where vLLM returns them.

    Args:
        vocabulary: the size of the vocabulary that vLLM samples from.
        name: converts vLLM's internal id of a request to the name that `take` gets as its `request_id`; by default the
            id itself.

    Attributes:
        forbidden: ids that a logit bias forbids; vLLM returns them among the others, and they are left out here.
    """

    def __init__(self, vocabulary: int, name: Callable[[str], str] = str) -> None:
        self.forbidden: Sequence[int] = ()
        self._vocabulary, self._name = vocabulary, name
        self._words: defaultdict[str, dict[int, Words]] = defaultdict(dict)  # by request and place in its sequence

    def open(self, forbidden: Sequence[int]) -> None:
        """Set, for the rollout that starts, the ids that a logit bias forbids in all of its requests: they are left out
        of what is recorded."""
        self.forbidden = forbidden

    def close(self) -> None:
        """Forget what was recorded of requests whose ids nobody took, such as aborted ones. Called after a rollout's
        last request."""
        self._words.clear()

    def returned(self, request_id: str, prompt_tokens: int, ids: Ids) -> None:
        """Record the ids that a request's next token was sampled from, as vLLM returned them.

        Args:
            request_id: vLLM's internal id.
            prompt_tokens: how many tokens the prompt has.
            ids: (n,) int32, ascending.
        """
        known = self._words[self._name(request_id)]
        if self.forbidden:
            ids = np.setdiff1d(ids, self.forbidden, assume_unique=True)
        known[prompt_tokens + len(known)] = words_of_ids(np.asarray(ids), self._vocabulary)

    def forget_but(self, requests: Collection[str]) -> None:
        """Drop the ids recorded for all requests but these, because nobody will take them."""
        for request_id in self._words.keys() - requests:
            del self._words[request_id]

    def take(self, request_id: str, prompt_tokens: int, tokens: int) -> Support:
        """Return the ids that a finished request's tokens were sampled from, and drop the record.

        Args:
            request_id: the request's name: what the constructor's `name` makes of vLLM's internal id.
            prompt_tokens: how many tokens the prompt has, the number that `returned` was given.
            tokens: how many tokens were sampled.

        Raises:
            EngineError: the ids of some token are not known.
        """
        known = self._words.pop(request_id, {})
        missing = [i for i in range(tokens) if prompt_tokens + i not in known]
        if missing:
            raise EngineError(
                f"vLLM sampled {tokens} tokens of a request, and did not say which ids it kept for token {missing[0]}. "
                "Report it with `trlx-hybrid env`, or set vllm_importance_sampling_correction=False."
            )
        return Support.of([known[prompt_tokens + i] for i in range(tokens)], self._vocabulary)


class CapturedIds(KeptIds):
    """Collects the ids that each token was sampled from, where vLLM does not return them.

    The ids come from the log-probs that vLLM's sampler computes after all processing, which are minus infinity for ids
    that top-k and the like leave out. So vLLM must compute log-probs.

    Args:
        runner: vLLM's model runner, in this process.
        vocabulary: the size of the vocabulary that vLLM samples from.
        name: converts vLLM's internal id of a request to the name that `take` gets as its `request_id`; by default the
            id itself.
    """

    def __init__(self, runner: Any, vocabulary: int, name: Callable[[str], str] = str) -> None:
        super().__init__(vocabulary, name)
        self._rows = SampledRows(runner, self._sampled)

    def open(self, forbidden: Sequence[int]) -> None:
        """Start collecting for a rollout; `forbidden` are ids that a logit bias forbids in all of its requests, which
        are left out of what is recorded."""
        super().open(forbidden)
        self._rows.active = True

    def close(self) -> None:
        """Stop collecting after a rollout's last request, and forget what was recorded of requests whose ids nobody
        took."""
        super().close()
        self._rows.active = False

    def _sampled(self, requests: Sequence[str], places: Sequence[int], logprobs: Tensor) -> None:
        kept = (logprobs > -torch.inf).numpy()
        kept[:, list(self.forbidden)] = False
        for key, place, row in zip(requests, places, kept, strict=True):
            self._words[self._name(key)][place] = words_of(row)  # of a preempted request it comes twice, the same


# --- of remote engines -----------------------------------------------------------------------------------------------


class ReturnedIds:
    """Collects the ids that each token was sampled from, for a server whose vLLM returns them with each token.

    Args:
        llm: vLLM's `AsyncLLM`.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        self._kept = KeptIds(llm.model_config.get_vocab_size(), outside)
        hand_over_masks(llm, self._kept.returned)
        self._live: set[str] = set()

    async def open(self, request_id: str, forbidden: Sequence[int]) -> None:
        """Prepare for a request.

        Args:
            request_id: the request's id, as vLLM is given it.
            forbidden: ids that a logit bias forbids, the same ids for all requests of a rollout.
        """
        self._live.add(request_id)
        self._kept.open(forbidden)

    async def take(self, request_id: str, prompt_tokens: int, tokens: int) -> Support:
        """Return the ids that the tokens of a finished request were sampled from, and drop them here.

        Args:
            request_id: the request's id, as vLLM is given it.
            prompt_tokens: how many tokens the prompt has; not used.
            tokens: how many tokens were sampled.

        Raises:
            EngineError: the ids of some token are not known.
        """
        return self._kept.take(request_id, 0, tokens)

    def close(self, request_id: str) -> None:
        """Drop the ids recorded for a request that has finished or was aborted."""
        self._live.discard(request_id)
        self._kept.forget_but(self._live)


class WorkersIds:
    """Collects the ids that each token was sampled from, for a server whose vLLM does not return them.

    The server's workers record the ids (`ServedWorker`), and are asked for them when a request has finished.

    Args:
        llm: vLLM's `AsyncLLM`.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm, self._vocabulary = llm, llm.model_config.get_vocab_size()
        self._live: set[str] = set()
        self._told: list[int] | None = None

    async def open(self, request_id: str, forbidden: Sequence[int]) -> None:
        """Prepare for a request: make the workers record the ids that each token can be sampled from, if they do not
        yet.

        Args:
            request_id: the request's id, as vLLM is given it.
            forbidden: ids that a logit bias forbids, the same ids for all requests of a rollout.
        """
        self._live.add(request_id)
        if self._told != list(forbidden):
            await self._llm.collective_rpc("served_keep", args=(list(forbidden),))
            self._told = list(forbidden)

    async def take(self, request_id: str, prompt_tokens: int, tokens: int) -> Support:
        """Return the ids that a finished request's tokens were sampled from, as the workers recorded them.

        Every worker of an engine has recorded all ids, so the first worker's are returned.

        Args:
            request_id: the request's id, as vLLM is given it.
            prompt_tokens: how many tokens the prompt has.
            tokens: how many tokens were sampled.
        """
        given = request_id, prompt_tokens, tokens, sorted(self._live)
        words, bounds = (await self._llm.collective_rpc("served_kept", args=given))[0]
        return Support(np.frombuffer(words, np.int32), np.frombuffer(bounds, np.int64).reshape(-1, 2), self._vocabulary)

    def close(self, request_id: str) -> None:
        """Forget a request; the workers drop its ids when the next request is finished."""
        self._live.discard(request_id)


ServedIds = ReturnedIds | WorkersIds
"""A server's collector of the ids that each token is sampled from: vLLM returns the ids, or its workers record them."""
