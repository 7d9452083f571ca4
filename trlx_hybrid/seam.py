"""What TRL sees as `trainer.vllm_generation`: the two methods and one attribute its trainers use of it.

Source: trl 1.16, `trl/generation/vllm_generation.py` and the trainers' `_generate_single_turn`, `_tool_call_loop`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .session import Session

GenerateResult = tuple[
    list[list[int]], list[list[int]], list[list[list[float | None]]] | None, list[list[list[int]]] | None
]


class Generation:
    """Stands where TRL expects its own VLLMGeneration."""

    mode = "colocate"

    def __init__(self, session: Session) -> None:
        self._session = session

    def sync_weights(self) -> None:
        """Nothing to do: the rollout phase has synced, by version and not by `global_step`."""

    def generate(
        self,
        prompts: list[list[int]],
        images: list[list[Any] | None] | None,
        num_generations: int,
        profiler: AbstractContextManager[Any] | None = None,
    ) -> GenerateResult:
        """Sample one completion per prompt.

        Returns:
            (prompt_ids, completion_ids, logprobs, logprob_token_ids), the latter two (batch, tokens, candidates) or
            None where no log-probs were asked for.
        """
        completions = self._session.generate(prompts, images, num_generations, profiler)
        completion_ids = [c.token_ids for c in completions]
        if any(c.logprobs is None for c in completions):
            return prompts, completion_ids, None, None
        logprobs = [c.logprobs or [] for c in completions]
        return prompts, completion_ids, logprobs, [c.logprob_token_ids or [] for c in completions]

    @property
    def llm(self) -> Any:
        """vLLM's own LLM where that is the engine, for custom rollouts that use it; else what TRL's loop reads."""
        engine = self._session.live_engine
        limits = SimpleNamespace(model_config=SimpleNamespace(max_model_len=engine.max_model_len))
        return getattr(engine, "llm", None) or SimpleNamespace(llm_engine=limits)
