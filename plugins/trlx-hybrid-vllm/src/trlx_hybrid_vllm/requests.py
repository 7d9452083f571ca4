"""vLLM's requests of one stream. What they have in common is worked out once: vLLM would do it for each."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from typing import Any

from trlx_hybrid.errors import EngineError
from trlx_hybrid.types import Request

from . import internals
from .sampling import own_params, prompt_of, refuse_another_prompt, with_seed


class Requests:
    """Queues requests that share their sampling parameters.

    The first prompt of token ids goes through vLLM's input processing, which checks the parameters and completes them;
    the others are made after its pattern, and only their prompts are checked. That is a third of the time that a turn
    of a conversation costs the host between two steps.

    Args:
        llm: vLLM's LLM with an in-process engine core.
        params: arguments of `SamplingParams`.
        adapter: the LoRARequest that serves all of them, or None.
    """

    def __init__(self, llm: Any, params: Mapping[str, Any], adapter: Any) -> None:
        self._llm, self._params, self._adapter = llm, params, adapter
        self._pattern: Any = None

    def add(self, request: Request) -> str:
        """Queue one; returns the id that vLLM works with.

        Raises:
            VLLMValidationError: where the prompt is too long or not of its vocabulary, or the parameters are invalid.
            EngineError: vLLM makes another prompt of one with images.
        """
        if request.images is not None:
            params = with_seed(self._params, request)
            key = str(self._llm.enqueue([prompt_of(request)], [params], self._adapter, use_tqdm=False)[0])
            engine = self._llm.llm_engine
            try:
                refuse_another_prompt(request, engine.output_processor.request_states[key].prompt_token_ids)
            except EngineError:
                engine.abort_request([key], internal=True)
                raise
            return key
        if self._pattern is None:
            params = with_seed(self._params, request)
            self._pattern = internals.processed(self._llm, request.prompt_ids, params, self._adapter)
        return internals.add_like(self._llm, self._pattern, request.prompt_ids, self._own(request), time.time())

    def _own(self, request: Request) -> Any:
        params = copy.copy(self._pattern.sampling_params)
        for name, value in own_params(self._params, request).items():
            setattr(params, name, value)
        return params
