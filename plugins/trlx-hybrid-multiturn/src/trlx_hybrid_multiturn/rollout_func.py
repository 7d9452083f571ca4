"""Episodes with environments, through TRL's own argument `rollout_func`."""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trlx_hybrid.contract.conversation import (
    Conversation,
    EpisodePool,
    Limits,
    Message,
    PooledEpisode,
    RequestMaker,
    images_of,
    opening,
)
from trlx_hybrid.contract.types import Completion, Request
from trlx_hybrid.episodes.tokenizer import own_tokenizer
from trlx_hybrid.errors import ConfigError, EngineError

from .environment import CheckedEnvironment, Environment, Row, refuse_prompts
from .episode import Episode, broken, rendered
from .in_flight import Play, fill_versions, over_rollouts
from .loop import Generate, OutOfTimeError
from .multi_turn import MultiTurn
from .tokens import TemplateTokens, preserving_tokens
from .tool_calls import LostCallError

logger = logging.getLogger(__name__)


def episodes(factory: Callable[[], Environment], *, max_turns: int | None = None) -> Episodes:
    """Return a TRL `rollout_func` that plays one episode per row with a fresh environment.

        trainer = GRPOTrainer(
            ..., rollout_func=episodes(Game, max_turns=6), reward_funcs=episode_reward,
            hybrid=HybridConfig(engine="vllm"),
        )

    Reward functions receive two more columns. `episode_reward` is the sum of the steps' rewards; None where no step
    gave one, or the episode broke off. `episode_messages` holds the messages after the prompt. The reward function
    `episode_reward` returns the column `episode_reward` unchanged. All limits of `rollout_options` hold, and
    `max_completion_length` is the budget of sampled and observed tokens together: an observation that exceeds it is
    dropped, and the episode ends.

    Args:
        factory: makes an environment; usually its class.
        max_turns: the largest number of completions in one episode; None sets no limit here. After the last turn, the
            episode ends when the environment's `step` has returned; the environment is not told that this turn was the
            last.

    Raises:
        ConfigError: `max_turns` is less than 1.
    """
    refuse_no_turns("episodes", max_turns)
    return Episodes(factory, max_turns)


def refuse_no_turns(function: str, max_turns: int | None) -> None:
    """Refuse a limit of less than one turn.

    Args:
        function: the name of the function that was given it, for the message.
        max_turns: the limit; None for no limit.

    Raises:
        ConfigError: the limit is less than 1.
    """
    if max_turns is not None and max_turns < 1:
        raise ConfigError(f"{function}(max_turns={max_turns}): an episode has at least one turn.")


def episode_reward(
    prompts: Sequence[object],
    completions: Sequence[object],
    episode_reward: Sequence[float | None],
    **kwargs: object,
) -> list[float | None]:
    """Return the rewards that environments gave, for use as a reward function of TRL.

    Args:
        prompts, completions, kwargs: not used.
        episode_reward: the column that `episodes` adds to the batch: each row's sum of rewards. It is None for an
            episode that broke off; such a row is not trained on.
    """
    return list(episode_reward)


class EpisodeRollout:
    """A TRL `rollout_func` that plays an episode for each prompt. TRL calls it once per batch and rank. Subclasses say
    what an episode is.

    Attributes:
        max_turns: the largest number of completions in one episode; None sets no limit here.
        rollout: "multi_turn", the name of the rollout component that runs the episodes. A run whose trainer has this
            `rollout_func` selects that component by itself.
        interrupts: True: its episodes may stay in flight over several rollouts (`play`).
        samples_from_session: True: the run's own engine samples the tokens, so their log-probs may be compared with the
            trainer's. If a `rollout_func` does not have this attribute, the package assumes that its tokens are sampled
            elsewhere.
    """

    rollout = MultiTurn.name
    interrupts = True
    samples_from_session = True

    def __init__(self, max_turns: int | None) -> None:
        self.max_turns = max_turns
        self._tokens: dict[str, TemplateTokens] = {}  # by further arguments of the template
        self._made_of: tuple[object, ...] = ()

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Play one episode per prompt.

        Args:
            prompts: this rank's prompts, lists of chat messages.
            trainer: a trainer of trlx_hybrid, such as its `GRPOTrainer`.

        Returns:
            The dict that TRL asks of a `rollout_func`, with a list of one value per prompt in each field: "prompt_ids",
            "completion_ids", "logprobs" (None if the engine returned none), "env_mask" (1 for sampled tokens, 0 for
            tokens that the environment added), "episode_reward" and "episode_messages"; for a model that takes images,
            "images" as well.

        Raises:
            ConfigError: the trainer's rollout is not `multi_turn`, the trainer has tools, a prompt cannot begin a
                conversation, or the chat template renders messages differently depending on what follows them.
            TrajectoriesFailedError: more episodes broke off than the option `max_failed` allows.
        """
        _multi_turn(trainer)
        refuse_prompts(prompts, sees_images=bool(trainer._is_vlm))
        session = trainer.session
        known, session.sampled = session.sampled, None  # `play` has played them, where rows stay in flight
        return self._returned(trainer, self._played(trainer, prompts) if known is None else known)

    def play(self, trainer: Any, pool: EpisodePool) -> None:
        """Play a pool's episodes until those of a batch are over, where rows stay in flight. The others are
        interrupted: their environments and agents live on, and their requests wait for the next rollout.

        Args:
            trainer: a trainer of trlx_hybrid.
            pool: the episodes, over all rollouts.

        Raises:
            ConfigError, TrajectoriesFailedError: as in `__call__`.
        """
        kept = weakref.ref(trainer)  # the rollout component keeps the function
        _multi_turn(trainer).play_in_flight(trainer.session, pool, lambda rows: self._in_flight(kept(), pool, rows))

    def _played(self, trainer: Any, prompts: Sequence[Any]) -> Sequence[PlayedEpisode]:
        """Play one episode per prompt to its end."""
        rollout, session = _multi_turn(trainer), trainer.session
        group = trainer.num_generations if session.training else trainer.num_generations_eval
        # The prompts' lengths are known once the environments are reset; each episode checks its own.
        request = session.sampler.converse(session.live_engine, [[]] * len(prompts), group)
        failed = rollout.failures(len(prompts))
        batch = Batch(trainer, rollout, self._limits(trainer, rollout), request, failed)
        runs = [
            self._episode(batch, index, list(prompt), dict(row))
            for index, (prompt, row) in enumerate(zip(prompts, session.rows, strict=True))
        ]
        rollout.run_trajectories(session, [run.run() for run in runs], [run.conversation for run in runs])
        return runs

    def _in_flight(self, trainer: Any, pool: EpisodePool, rows: Sequence[PooledEpisode]) -> list[Play]:
        """Return the coroutine functions that play episodes of a pool to their end."""
        rollout, most = _multi_turn(trainer), trainer.session.sampling.max_tokens
        limits = self._limits(trainer, rollout)
        found: list[Play] = []
        for row in rows:
            row.seconds, row.sampled = 0.0, 0  # it begins anew where an engine was closed in the middle
            index, given = pool.given(row)
            refuse_prompts([given["prompt"]], sees_images=bool(trainer._is_vlm))
            generate = functools.partial(over_rollouts, row, pool, most)
            batch = Batch(trainer, rollout, limits, pool.request(row), broken, generate)
            episode = self._episode(batch, index, list(given["prompt"]), given)
            found.append(functools.partial(_pooled, episode, row, pool))
        return found

    def _limits(self, trainer: Any, rollout: MultiTurn) -> Limits:
        turns = [limit for limit in (self.max_turns, rollout.options.max_turns) if limit is not None]
        return Limits(
            completion_tokens=trainer.max_completion_length,
            model_tokens=trainer.session.live_engine.max_model_len,
            tool_turns=min(turns, default=sys.maxsize) - 1,
        )

    def _returned(self, trainer: Any, runs: Sequence[PlayedEpisode]) -> dict[str, Any]:
        """Return what TRL asks of a `rollout_func`, from episodes that were played."""
        conversations, session = [run.conversation for run in runs], trainer.session
        for run, conversation in zip(runs, conversations, strict=True):
            session.endings.add(run.prompt_ids, conversation.completion_ids, conversation.finish_reason)
            session.supports.add(run.prompt_ids, conversation.completion_ids, conversation.support)
        logprobs = [conversation.logprobs for conversation in conversations]
        return {
            "prompt_ids": [run.prompt_ids for run in runs],
            "completion_ids": [conversation.completion_ids for conversation in conversations],
            "logprobs": None if any(values is None for values in logprobs) else logprobs,
            "env_mask": [conversation.loss_mask for conversation in conversations],
            "episode_reward": [run.reward for run in runs],
            "episode_messages": [conversation.messages for conversation in conversations],
        } | ({"images": [list(run.images) or None for run in runs]} if trainer._is_vlm else {})

    def _episode(self, batch: Batch, index: int, prompt: list[Message], row: Row) -> PlayedEpisode:
        """Return the episode of one row.

        Args:
            index: number of the row in this rank's batch.
            prompt: messages of the row's prompt.
            row: the dataset's row.
        """
        raise NotImplementedError

    def _tokens_of(self, trainer: Any, **more: object) -> TemplateTokens:
        """Return the encoder of prompts and observations for the trainer's tokenizer and chat template.

        It is made when it is first asked for, and again when the tokenizer or the template has changed since.

        Args:
            more: further arguments of the template.
        """
        tokenizer, template = trainer.processing_class, trainer.chat_template
        options, end_ids = dict(trainer.chat_template_kwargs or {}), trainer.eos_token_ids
        made_of = (tokenizer, tokenizer.chat_template, template, options, end_ids)
        if self._made_of != made_of:
            self._made_of, self._tokens = made_of, {}
        key = repr(more)
        if key not in self._tokens:
            own = own_tokenizer(tokenizer)  # environments in threads may use the shared one meanwhile
            training, given = trainer.training_chat_template, options | more
            self._tokens[key] = preserving_tokens(own, template, training, options=given, end_ids=end_ids)
        return self._tokens[key]


class Episodes(EpisodeRollout):
    """The `rollout_func` that `episodes` returns: it plays an episode with an environment for each prompt.

    Attributes:
        factory: makes an environment.
    """

    def __init__(self, factory: Callable[[], Environment], max_turns: int | None) -> None:
        super().__init__(max_turns)
        self.factory = factory

    def _episode(self, batch: Batch, index: int, prompt: list[Message], row: Row) -> PlayedEpisode:
        trainer = batch.trainer
        event_loop, sees_images = getattr(trainer, "async_loop", None), bool(trainer._is_vlm)
        environment = CheckedEnvironment(self.factory, batch.rollout.runner, event_loop, sees_images=sees_images)
        tokens, tokenizer = self._tokens_of(trainer), trainer.processing_class
        return EnvironmentEpisode(
            index,
            row,
            prompt,
            environment,
            tokens,
            tokenizer,
            batch.limits,
            batch.request,
            batch.failed,
            batch.generate,
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """Objects that the episodes of one batch share.

    Attributes:
        trainer: the trainer.
        rollout: the rollout component that plays them.
        limits: limits of tokens and turns.
        request: makes the engine's request for one turn.
        failed: called with a conversation that breaks off; raises if too many have.
        generate: samples a request to its end.
    """

    trainer: Any
    rollout: MultiTurn
    limits: Limits
    request: RequestMaker
    failed: Callable[[Conversation], None]
    generate: Callable[[Request], Awaitable[Completion]] = Generate


class PlayedEpisode(Protocol):
    """An episode of a batch, as `EpisodeRollout` reads it after it was played."""

    conversation: Conversation
    prompt_ids: list[int]
    reward: float | None
    branches: list[tuple[int, int]]
    """The later branches: where each begins in the completion, and the number of its prompt's tokens."""

    @property
    def images(self) -> Sequence[object]:
        """The images of the prompt and of the observations after it."""

    async def run(self) -> None:
        """Play the whole episode."""


class EnvironmentEpisode(Episode):
    """An episode of one row, in which the model and its environment take turns.

    Args:
        index: number of the row in this rank's batch.
        row: the dataset's row, which the environment's `reset` is given.
        prompt: messages of the row's prompt.
        environment: answers the model.
        tokens: encodes the prompt and the observations.
        tokenizer: decodes completions.
        limits: limits of tokens and turns.
        request: makes the engine's request for one turn.
        failed: called with the conversation if it breaks off; raises if too many have.
        generate: samples a request to its end.

    Attributes:
        reward: sum of the steps' rewards; None where no step gave one, or the episode broke off.
        branches: none.
    """

    def __init__(
        self,
        index: int,
        row: Row,
        prompt: list[Message],
        environment: CheckedEnvironment,
        tokens: TemplateTokens,
        tokenizer: Any,
        limits: Limits,
        request: RequestMaker,
        failed: Callable[[Conversation], None],
        generate: Callable[[Request], Awaitable[Completion]],
    ) -> None:
        super().__init__(index, [], limits, request, failed, generate)
        self.reward: float | None = None
        self.branches: list[tuple[int, int]] = []
        self._prompt_images = images_of(prompt)
        self._row, self._prompt, self._environment = row, prompt, environment
        self._tokens, self._tokenizer = tokens, tokenizer

    @property
    def images(self) -> list[object]:
        """The images of the prompt and of the observations after it."""
        return [*self._prompt_images, *self.conversation.images]

    def give_up(self) -> None:
        """Clean up after the episode broke off: remove its reward, and set `prompt_ids` to the row's prompt if the
        environment's `reset` has not returned yet."""
        self.reward = None
        self.prompt_ids = self.prompt_ids or self._tokens.prompt(self._prompt)

    async def run(self) -> None:
        """Play the whole episode, then close its environment. Where the run ends before the episode does, the
        environment is closed without waiting for it."""
        try:
            await super().run()
        except GeneratorExit:
            self._environment.leave()
            raise
        try:
            await self._environment.close()
        except (LostCallError, OutOfTimeError) as error:  # the episode itself is over, and is kept
            logger.warning("An environment was not closed: %s", error or "its episode's time was over.")

    async def play(self) -> None:
        """Play until the environment says that the episode is over, or a limit is reached."""
        conversation, limits = self.conversation, self.limits
        context = self.prompt_ids = self._opened(await self._environment.reset(self._row))
        room: int | None = None  # for the first turn the run's limit holds
        while True:
            completion = await self.sample(context, self.images or None, room)
            text = str(self._tokenizer.decode(completion.token_ids, skip_special_tokens=True))
            conversation.messages.append({"role": "assistant", "content": text})
            step = await self._environment.step(text)
            conversation.calls += 1
            if step.reward is not None:
                self.reward = (self.reward or 0.0) + float(step.reward)
            if step.done or step.observation is None or len(conversation.turns) > limits.tool_turns:
                return
            shown = step.observation
            messages = [{"role": "user", "content": shown}] if isinstance(shown, str) else shown
            last = conversation.completion_ids[-1] if conversation.completion_ids else None
            observed = rendered(self._tokens.observation, messages, last)
            room = limits.completion_tokens - len(conversation.completion_ids) - len(observed)
            context = [*self.prompt_ids, *conversation.completion_ids, *observed]
            if room <= 0 or len(context) >= limits.model_tokens:
                return  # no room for an answer: the observation is dropped, the completion stays
            self.observed(observed, messages)
            conversation.images += images_of(messages)

    def _opened(self, observation: str | list[Message] | None) -> list[int]:
        messages = opening(self._prompt, observation)
        prompt_ids = rendered(self._tokens.prompt, messages)
        self._prompt_images = images_of(messages)
        if len(prompt_ids) >= self.limits.model_tokens:
            raise EngineError(
                f"The prompt of row {self._index} has {len(prompt_ids)} tokens with what its environment showed; the "
                f"engine's context holds {self.limits.model_tokens}, prompt and completion together. Show less, or "
                "raise vllm_max_model_length (HybridConfig.engine_options max_model_len)."
            )
        return prompt_ids


async def _pooled(episode: PlayedEpisode, row: PooledEpisode, pool: EpisodePool) -> None:
    """Play an episode to its end, and then put what became of it into its row of the pool."""
    await episode.run()
    fill_versions(episode.conversation, pool.version)
    row.prompt_ids, row.reward, row.branches = episode.prompt_ids, episode.reward, episode.branches
    row.conversation = episode.conversation


def _multi_turn(trainer: Any) -> MultiTurn:
    """Return the rollout component of a trainer, which runs the episodes.

    Raises:
        ConfigError: the rollout is not `multi_turn`, or the trainer has tools.
    """
    session = getattr(trainer, "session", None)
    rollout = getattr(session, "rollout", None)
    if not isinstance(rollout, MultiTurn):
        there = "TRL's own generation" if rollout is None else f"{rollout.name!r}"
        raise ConfigError(
            f"episodes(...) plays on the rollout 'multi_turn', and this trainer's is {there}. Take the trainer from "
            'trlx_hybrid and give it hybrid=HybridConfig(engine="vllm", rollout="multi_turn").'
        )
    if getattr(trainer, "tools", None):
        raise ConfigError(
            "The trainer has tools (or an environment_factory) and episodes(...): both would answer the model. Let the "
            "environment's `step` do what the tools do, or leave rollout_func out."
        )
    return rollout
