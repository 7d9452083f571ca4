"""The rollout of plain GRPO: one completion per prompt."""

from __future__ import annotations

from collections.abc import Sequence

from ..protocols import Rollout, Run
from ..types import Completion, Request, Sampling


class SingleTurn(Rollout):
    """The built-in rollout: one completion per prompt. It also serves TRL's tool loop, which calls it once per turn."""

    name = "single_turn"
    tells = True

    def run(self, session: Run, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Sample one completion per request, and return them in the order of the requests. Calls
        `session.on_completion`, if it is set, as soon as each is finished."""
        engine, tell = session.live_engine, session.on_completion
        if tell is None:
            return engine.generate(requests, sampling)
        completions: dict[int, Completion] = {}
        with engine.stream(sampling) as stream:
            numbers = {stream.add(request): number for number, request in enumerate(requests)}
            more = True
            while more:
                finished, more = stream.step(len(completions) < len(requests))
                for key, completion in finished:
                    number = numbers[key]
                    completions[number] = completion
                    tell(number, requests[number], completion)
        return [completions[number] for number in range(len(requests))]
