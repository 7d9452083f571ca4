"""Agents that ask the model over HTTP, through TRL's own argument `rollout_func`."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from trlx_hybrid.contract.conversation import EpisodePool, Message, PooledEpisode
from trlx_hybrid.errors import ConfigError

from ..environment import Row
from ..in_flight import Play
from ..rollout_func import Batch, EpisodeRollout, PlayedEpisode, refuse_no_turns
from ..tokens import TemplateTokens
from .episode import AgentEpisode
from .host import Agent, Host, OwnHost
from .parsing import Parser
from .processes import ProcessHost

logger = logging.getLogger(__name__)


def agents(agent: Agent, *, max_turns: int | None = None, processes: int = 0) -> Agents:
    """Return a TRL `rollout_func` that runs one agent per row, whose requests the run's engine answers.

        async def solve(base_url, row):
            client = AsyncOpenAI(base_url=base_url, api_key="none")
            ...
            return reward

        trainer = GRPOTrainer(
            ..., rollout_func=agents(solve), reward_funcs=episode_reward, hybrid=HybridConfig(engine="vllm")
        )

    Args:
        agent: a function or a coroutine function of the base URL of OpenAI's API and the dataset's row. It returns the
            episode's reward, or None where reward functions compute it. Many run at once, functions in threads.
        max_turns: the largest number of the model's messages in one episode; None sets no limit here.
        processes: the number of processes of each rank in which agents run, and with them the endpoint, so that they
            do not hold up the trainer's own Python. They share no state with the script. 0: in the trainer's process.

    Raises:
        ConfigError: `max_turns` is less than 1, `processes` less than 0, or the agent cannot be sent to a process.
    """
    refuse_no_turns("agents", max_turns)
    if processes < 0:
        raise ConfigError(f"agents(processes={processes}): give the number of processes, or 0 for none.")
    return Agents(agent, max_turns, processes)


class Agents(EpisodeRollout):
    """The `rollout_func` that `agents` returns.

    Attributes:
        agent: the agent.
    """

    def __init__(self, agent: Agent, max_turns: int | None, processes: int = 0) -> None:
        super().__init__(max_turns)
        self.agent = agent
        self._host: Host = ProcessHost(agent, processes) if processes else OwnHost(agent)
        self._parser: tuple[tuple[object, ...], Parser] | None = None  # with what it was made of
        self._begins: dict[int, Sequence[tuple[int, int]]] = {}  # by the hash of a row's tokens
        self._told: set[str] = set()  # parameters that were said to be overridden

    def _played(self, trainer: Any, prompts: Sequence[Any]) -> Sequence[PlayedEpisode]:
        """Run one agent per prompt to its end.

        Raises:
            ConfigError: a process for agents did not start, or could not load the agent.
        """
        self._host.prepare(len(prompts))
        return super()._played(trainer, prompts)

    def _in_flight(self, trainer: Any, pool: EpisodePool, rows: Sequence[PooledEpisode]) -> list[Play]:
        """Return the coroutine functions that run agents of a pool to their end. Raises what `_played` raises."""
        self._host.prepare(pool.in_flight)
        return super()._in_flight(trainer, pool, rows)

    def _returned(self, trainer: Any, runs: Sequence[PlayedEpisode]) -> dict[str, Any]:
        """Return what TRL asks of a `rollout_func`, and keep where branches begin."""
        self._begins = {hash((*run.prompt_ids, *run.conversation.completion_ids)): run.branches for run in runs}
        trainer.session.metrics["hybrid/agents/branches"] = [1 + len(run.branches) for run in runs]
        return super()._returned(trainer, runs)

    def branches(self, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> Sequence[tuple[int, int]]:
        """Return where later branches begin in a row of the last batch: for each, its place in the completion, and the
        number of its prompt's tokens."""
        return self._begins.get(hash((*prompt_ids, *completion_ids)), ())

    def _episode(self, batch: Batch, index: int, prompt: list[Message], row: Row) -> AgentEpisode:
        trainer = batch.trainer
        kept = weakref.ref(trainer)  # an agent may outlive its training

        def tokens(tools: Sequence[Mapping[str, Any]]) -> TemplateTokens:
            return self._tokens_of(kept(), tools=list(tools)) if tools else self._tokens_of(kept())

        return AgentEpisode(
            index,
            row,
            prompt,
            self._host,
            tokens,
            self._parser_of(trainer),
            batch.limits,
            batch.request,
            batch.failed,
            lambda given: self._note_overridden(kept(), given),
            branching=branching(trainer),
            logprobs=trainer.session.sampling.logprobs is not None,
            sees_images=bool(trainer._is_vlm),
            generate=batch.generate,
        )

    def _note_overridden(self, trainer: Any, given: Mapping[str, Any]) -> None:
        """Say once of each parameter that the run's own settings take its place."""
        for name in sorted(given.keys() - self._told):
            self._told.add(name)
            if hasattr(trainer.args, name):
                logger.warning(
                    "An agent asks for %s=%r. The run samples with its own settings (%s=%r), with which log-probs are "
                    "computed. Set it in the trainer's arguments.",
                    name,
                    given[name],
                    name,
                    getattr(trainer.args, name),
                )
            else:
                logger.warning(
                    "An agent asks for %s=%r. The run decides this, not the request: the model samples freely, from "
                    "prompts that the run's chat template renders.",
                    name,
                    given[name],
                )

    def _parser_of(self, trainer: Any) -> Parser:
        tokenizer = trainer.processing_class
        made_of = (tokenizer, tokenizer.chat_template)
        if self._parser is None or self._parser[0] != made_of:
            self._parser = made_of, Parser(tokenizer)
        return self._parser[1]


def branching(trainer: Any) -> bool:
    """Return whether an episode may have several branches. The router's experts, truncated sampling, images and TRL's
    Liger loss are known for whole rows only."""
    session = trainer.session
    part_of_the_ids = session.over_support and session.sampling.truncated_by()
    whole = session.router_replay is not None or part_of_the_ids or trainer.args.use_liger_kernel
    return not (whole or trainer._is_vlm)
