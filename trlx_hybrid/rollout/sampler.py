"""The sampler: turns TRL's prompts into requests with their own seeds, and returns their completions."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from ..blame import blaming
from ..contract.types import Completion, Request, Sampling
from ..errors import ComponentError, EngineError
from .seeding import RowTracker, preserved_generators, request_seed

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ..contract.conversation import RequestMaker
    from ..contract.protocols import Engine
    from ..interprocess.ranks import Ranks
    from ..plugins.registry import Component


IN_FLIGHT = -1
"""The weight version in the seeds of rows that are sampled over several versions."""


class Sampler:
    """Makes the requests of a run's rollouts, each with its own seed, and has the engine or a plugin's rollout sample
    them.

    Args:
        ranks: the ranks of the run.
        sampling: the run's sampling parameters; a `seed` in its `extra` replaces the run's seed.
        run_seed: TRL's `seed`.
        source: the component that returns the completions: a plugin's rollout, or the engine behind the built-in one.

    Attributes:
        source: the component that returns the completions; errors name it.
    """

    def __init__(self, ranks: Ranks, sampling: Sampling, run_seed: int, source: Component | None) -> None:
        extra = dict(sampling.extra)
        self._run_seed = int(extra.pop("seed", run_seed))
        self.sampling = dataclasses.replace(sampling, extra=extra)
        self._ranks, self.source = ranks, source
        self._tracker: RowTracker | None = None
        self._conversing = 0  # rows with conversations in this batch
        self._group = 1  # size of a group, from the first turn: TRL requests later turns one by one
        self._version = -1
        self._drawn: Counter[str] = Counter()  # rows sampled with this weight version, per stream

    def begin(self, stream: str, version: int) -> None:
        """Begin a batch. If the weight version is a new one, the numbers of its rows, which determine their seeds,
        begin at 0 again.

        Args:
            stream: "train" or "eval", which get different seeds.
            version: the version of the weights that the engine samples with.
        """
        self._stream, self._tracker, self._conversing = stream, None, 0
        if version != self._version:
            self._version = version
            self._drawn.clear()

    def forget(self) -> None:
        """Restart the row count of the current weight version from 0, because a checkpoint was loaded. Row numbers
        determine seeds."""
        self._version = -1

    def end(self) -> None:
        """End the batch, and add its rows to the row count, which the next batch of this weight version continues.
        Collective."""
        rows = len(self._tracker) if self._tracker is not None else self._conversing
        self._drawn[self._stream] += self._ranks.sum(rows)
        self._tracker = None

    def sample(
        self,
        engine: Engine,
        run: Callable[[Sequence[Request], Sampling], list[Completion]],
        prompts: Sequence[list[int]],
        images: Sequence[list[Any] | None] | None,
        num_generations: int,
        timer: AbstractContextManager[Any] | None = None,
        sampling: Sampling | None = None,
    ) -> list[Completion]:
        """Sample one completion per prompt of this rank, and return them in order.

        Args:
            run: the method `run` of the rollout, with its first argument bound; it is called with (requests, sampling).
            images: images of each prompt, or None.
            prompts: token ids; each prompt comes once per completion of its group, the copies next to each other, as in
                TRL.
            num_generations: number of completions per prompt.
            timer: a context that is entered while the engine or the rollout samples (TRL's profiler).
            sampling: sampling parameters of this call; by default the run's.

        Raises:
            EngineError: a prompt is empty, or leaves no room for a completion.
            ComponentError: the component failed, or returned something else than one completion per prompt.
        """
        assert self.source is not None
        source, sampling = self.source, sampling or self.sampling
        refuse_empty(prompts)
        refuse_long(prompts, engine.max_model_len)
        if self._tracker is None:
            self._tracker, self._group = RowTracker(self._first_row(len(prompts))), num_generations
        places = self._tracker.place(prompts)
        requests = [
            Request(
                prompt_ids=list(prompts[i]),
                row=row,
                turn=turn,
                images=images[i] if images is not None else None,
                seed=self._seed(row, turn),
            )
            for i, (row, turn) in enumerate(places)
        ]
        method = "generate" if source.slot == "engine" else "run"
        with preserved_generators(), timer or nullcontext(), blaming(source, method):
            sampled = run(requests, sampling)
        completions = source.completions(sampled, requests, sampling)
        self._tracker.extend(places, prompts, [c.token_ids for c in completions])
        return completions

    def experts(self, completions: Sequence[Completion]) -> list[npt.NDArray[np.int16]]:
        """Return for each completion the experts that its tokens were routed to: `Completion.experts`, int16 (tokens,
        layers, experts per token).

        Raises:
            ComponentError: a completion has no experts, because a rollout has not passed them on.
        """
        found = [completion.experts for completion in completions]
        if any(experts is None for experts in found):
            raise ComponentError(
                f"The {self.source} returned completions without `experts`, which HybridConfig.router_replay needs. "
                "It must hand on those of the engine's completions: report it, or leave router_replay out."
            )
        return [experts for experts in found if experts is not None]

    def converse(self, engine: Engine, prompts: Sequence[list[int]], num_generations: int) -> RequestMaker:
        """Return a function that makes the requests for the turns of conversations that start with these prompts.
        Requests get the row numbers and seeds that `sample` would give them.

        Args:
            prompts: token ids of the prompts of this rank.
            num_generations: number of completions per prompt.

        Raises:
            EngineError: a prompt leaves no room for a completion.
        """
        refuse_long(prompts, engine.max_model_len)
        self._conversing, self._group = len(prompts), num_generations
        first = self._first_row(len(prompts))

        def request(
            index: int, turn: int, prompt_ids: list[int], images: list[Any] | None, max_tokens: int | None
        ) -> Request:
            return Request(
                prompt_ids=prompt_ids,
                row=first + index,
                turn=turn,
                images=images,
                max_tokens=max_tokens,
                seed=self._seed(first + index, turn),
            )

        return request

    def _first_row(self, rows: int) -> int:
        """Return the number of this rank's first row in a batch; the rows' seeds are made from their numbers. Rows are
        counted over all ranks, rank after rank, and over all batches sampled with the current weight version.

        Args:
            rows: the number of rows of each rank in this batch.
        """
        return self._drawn[self._stream] + self._ranks.rank * rows

    def seed_in_flight(self, group: int, generation: int, rollouts: int) -> int:
        """Return the seed of a row that is sampled over several weight versions. It does not depend on the version, so
        that the number of the group never begins at 0 again.

        Args:
            group: the number of the row's group among all groups of the run.
            generation: index within the group.
            rollouts: the number of rollouts in which the row was sampled before.
        """
        return request_seed(self._run_seed, "train", IN_FLIGHT, group, generation, turn=rollouts)

    def _seed(self, row: int, turn: int) -> int:
        prompt, generation = divmod(row, self._group)
        return request_seed(self._run_seed, self._stream, self._version, prompt, generation, turn=turn)


def refuse_empty(prompts: Sequence[list[int]]) -> None:
    """Raise an EngineError that names the first prompt without tokens."""
    for index, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise EngineError(
                f"Prompt {index} of this batch has no tokens: there is nothing to continue. Filter such rows from the "
                "dataset, or give them a text."
            )


def refuse_long(prompts: Sequence[list[int]], max_model_len: int) -> None:
    """Raise an EngineError that names the first prompt which leaves no room for a completion."""
    for index, prompt in enumerate(prompts):
        if len(prompt) >= max_model_len:
            raise EngineError(
                f"Prompt {index} of this batch has {len(prompt)} tokens; the engine's context holds {max_model_len}, "
                "prompt and completion together. Shorten or filter the prompts, or raise vllm_max_model_length "
                "(HybridConfig.engine_options max_model_len) up to what the model supports."
            )
