"""The object that TRL sees as `trainer.vllm_generation`: the two methods and the one attribute that TRL's trainers use.

Source: trl 1.16, `trl/generation/vllm_generation.py` and the trainers' `_generate_single_turn`, `_tool_call_loop`.
"""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ...contract.types import Phase, Trajectory
from ...errors import StaleWeightsError
from ..arguments import refuse_penalties, refuse_reserved

if TYPE_CHECKING:
    from ...session import Session
    from ..state import Batch
    from ..stock import StockTrainer

GenerateResult = tuple[
    list[list[int]], list[list[int]], list[list[list[float | None]]] | None, list[list[list[int]]] | None
]


SETTINGS = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logprobs")} | {
    "max_completion_length": "max_tokens",
    "generation_kwargs": "extra",
    "structured_outputs_regex": "regex",
}
"""The sampling attributes of TRL's VLLMGeneration, and their names in `Sampling`."""


class Generation:
    """The object in place of TRL's own VLLMGeneration, which passes TRL's requests on to the session's engine.

    The sampling settings can be read and set here as in TRL's (`trainer.vllm_generation.temperature = 0.8`), with
    effect from the next rollout. Setting anything else raises an AttributeError, since nothing would read it.
    """

    mode = "colocate"

    def __init__(self, session: Session) -> None:
        object.__setattr__(self, "_session", session)

    def __getattr__(self, name: str) -> Any:
        if name not in SETTINGS:
            raise AttributeError(
                f"trlx_hybrid's vllm_generation has no {name!r}. It has {', '.join(SETTINGS)} and llm. The engine's "
                "settings come before the trainer is made: TRL's vllm_* arguments, or HybridConfig.engine_options."
            )
        return getattr(self._session.sampler.sampling, SETTINGS[name])

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in SETTINGS:
            getattr(self, name)  # raises if there is no such attribute
            object.__setattr__(self, name, value)
            return
        if name == "generation_kwargs":
            refuse_reserved(value)
        plain = {"generation_kwargs": {}, "min_p": 0.0}.get(name) if value is None else value
        session = self._session
        sampling = dataclasses.replace(session.sampler.sampling, **{SETTINGS[name]: plain})
        refuse_penalties(sampling, session.args)
        session.sampler.sampling = sampling

    def sync_weights(self) -> None:
        """Copy the policy's weights into the engine. TRL calls it before each rollout; scripts may call it before
        requests of their own between rollouts. Collective.

        Within a rollout, or where the batch is sampled already, this does nothing: the rollout has begun with a weight
        sync, decided by weight version rather than by `global_step`.
        """
        session = self._session
        if session.phase is Phase.ROLLOUT or session.sampled is not None:
            return
        kept = session.training, session.metrics  # state of the trainer's own rollout, which is logged later
        with session.rollout_phase(training=False):
            pass
        session.training, session.metrics = kept

    def generate(
        self,
        prompts: list[list[int]],
        images: list[list[Any] | None] | None,
        num_generations: int,
        profiler: AbstractContextManager[Any] | None = None,
    ) -> GenerateResult:
        """Sample one completion per prompt.

        Args:
            prompts: ids of each prompt. A prompt comes once for each completion of its group, one after the other.
            images: images of each prompt, or None.
            num_generations: the number of completions in a group.
            profiler: TRL's context that measures the time of sampling.

        Returns:
            (prompt_ids, completion_ids, logprobs, logprob_token_ids), the latter two (batch, tokens, candidates) or
            None where no log-probs were asked for.

        Raises:
            StaleWeightsError: no rollout is running, so the weights have not been synced.
        """
        if self._session.phase is not Phase.ROLLOUT and self._session.sampled is None:
            raise StaleWeightsError(
                "vllm_generation.generate() outside of a rollout, which `_generate` of trlx_hybrid's trainers begins. "
                "Where a subclass replaces it, derive the class from TRL's and have it wrapped: hybrid(MyTrainer)."
            )
        completions = self._session.generate(prompts, images, num_generations, profiler)
        completion_ids = [c.token_ids for c in completions]
        if any(c.logprobs is None for c in completions):
            return prompts, completion_ids, None, None
        logprobs = [c.logprobs or [] for c in completions]
        return prompts, completion_ids, logprobs, [c.logprob_token_ids or [] for c in completions]

    @property
    def llm(self) -> Any:
        """vLLM's own LLM if the engine is vLLM, for custom rollouts that use it; else an object with only the maximum
        model length, which TRL's tool loop reads.

        Requests that name no adapter are served by the policy's adapter.
        """
        engine = self._session.live_engine
        limits = SimpleNamespace(model_config=SimpleNamespace(max_model_len=engine.max_model_len))
        return getattr(engine, "llm", None) or SimpleNamespace(llm_engine=limits)


def trajectories_of(trainer: StockTrainer, batch: Batch) -> list[Trajectory]:
    """Return this rank's trajectories of one batch, in TRL's order.

    Args:
        batch: the batch, with its rewards and what TRL's `_generate` returned.
    """
    generated, rewards, staleness = batch.generated, batch.rewards, batch.staleness
    weights, rank = getattr(trainer, "reward_weights", None), trainer.session.ranks.rank
    version = trainer.session.weight_version
    mask, completions, logprobs = None, None, None
    if trainer._base_name == "GRPO":
        prompts, ids, mask, completions, logprobs, *_ = generated
    elif trainer._base_name == "RLOO":
        prompts, ids, completions = generated
    else:
        prompts, ids, mask, *_ = generated
    scores = None
    if rewards is not None:
        mine = rewards[rank * len(ids) : (rank + 1) * len(ids)]
        weighted = mine if weights is None else mine * weights.to(mine.device)
        sums, scored = weighted.nansum(dim=1).tolist(), (~mine.isnan()).any(dim=1).tolist()
        scores = [value if some else None for value, some in zip(sums, scored, strict=True)]
    return [
        Trajectory(
            prompt_ids=list(prompts[i]),
            completion_ids=list(ids[i]),
            loss_mask=list(mask[i]) if mask is not None else [1] * len(ids[i]),
            logprobs=list(logprobs[i]) if logprobs is not None else None,
            completion=completions[i] if completions is not None else None,
            reward=scores[i] if scores is not None else None,
            weight_version=version,
            weight_versions=None if staleness is None else [version - age for age in staleness[i]],
        )
        for i in range(len(ids))
    ]
