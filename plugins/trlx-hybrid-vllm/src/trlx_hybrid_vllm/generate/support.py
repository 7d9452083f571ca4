"""Collectors of the ids that vLLM samples each token from, which top-k, top-p and min-p leave of the vocabulary.

Completions name them in `Completion.support`, so that log-probs are computed over the same ids.

On GPUs vLLM returns the ids (`return_sampling_mask`), with its second model runner, which needs Triton. On CPUs the
first one runs: the log-probs that its sampler has computed after all processing are minus infinity for ids that are
left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from trlx_hybrid.contract.support import Support, words_of, words_of_ids
from trlx_hybrid.errors import EngineError

Words = np.ndarray[Any, Any]


class KeptIds:
    """Collects the ids that each token of unfinished requests was sampled from, where vLLM returns them.

    Args:
        vocabulary: the size of the vocabulary that vLLM samples from.
        name: turns vLLM's internal id of a request into the name by which `take` asks for it; by default the id itself.

    Attributes:
        forbidden: ids that a bias forbids, which vLLM does not leave out by itself.
    """

    def __init__(self, vocabulary: int, name: Callable[[str], str] = str) -> None:
        self.forbidden: Sequence[int] = ()
        self._vocabulary, self._name = vocabulary, name
        self._words: defaultdict[str, dict[int, Words]] = defaultdict(dict)  # by request and place in its sequence

    def open(self, forbidden: Sequence[int]) -> None:
        """Prepare for a rollout; `forbidden` are ids that a logit bias forbids in all of its requests."""
        self.forbidden = forbidden

    def close(self) -> None:
        """Drop the ids that nobody took, those of aborted requests, after the last request."""
        self._words.clear()

    def returned(self, request_id: str, prompt_tokens: int, ids: Any) -> None:
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
            request_id: the request's name, see the class's `name`.
            prompt_tokens: how many tokens the prompt has, as in `returned`.
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

    It reads them from the log-probs that vLLM's sampler computes after all processing, so vLLM must compute log-probs.

    Args:
        runner: vLLM's model runner, in this process.
        vocabulary, name: the arguments of `KeptIds`.
    """

    def __init__(self, runner: Any, vocabulary: int, name: Callable[[str], str] = str) -> None:
        super().__init__(vocabulary, name)
        self._runner, self._active = runner, False
        self._places: dict[str, int] = {}  # by request: the place in its sequence of the token of this step
        runner.execute_model = partial(self._execute, runner.execute_model)
        runner.sampler.sample = partial(self._sample, runner.sampler.sample)

    def open(self, forbidden: Sequence[int]) -> None:
        """Start collecting for a rollout; `forbidden` are ids that a logit bias forbids in all of its requests."""
        super().open(forbidden)
        self._active = True

    def close(self) -> None:
        """Stop collecting after the last request, and drop the ids that nobody took."""
        super().close()
        self._active = False

    def _execute(self, execute: Any, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        if self._active:
            cached = scheduled.scheduled_cached_reqs
            computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            computed |= {request.req_id: request.num_computed_tokens for request in scheduled.scheduled_new_reqs}
            self._places = {key: computed[key] + count for key, count in scheduled.num_scheduled_tokens.items()}
        return execute(scheduled, *args, **kwargs)

    def _sample(self, sample: Any, *args: Any, **kwargs: Any) -> Any:
        sampled, logprobs = sample(*args, **kwargs)
        if self._active and logprobs is not None:
            kept = (logprobs > -torch.inf).numpy()
            kept[:, list(self.forbidden)] = False
            for key, row in zip(self._runner.input_batch.req_ids, kept, strict=True):
                # a token of a preempted request comes twice, the same both times
                self._words[self._name(key)][self._places[key]] = words_of(row)
        return sampled, logprobs
