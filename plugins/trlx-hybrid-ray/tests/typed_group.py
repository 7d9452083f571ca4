"""What a type checker makes of groups. Read by `test_group_types.py`, never run."""

from __future__ import annotations

from typing import reveal_type

from trlx_hybrid_ray.worker_group import LocalWorkerGroup, WorkerGroup, register


class Scorer:
    def __init__(self, model: str) -> None:
        self.model = model

    @register(dispatch="scatter")
    def score(self, prompts: list[str], temperature: float = 1.0) -> list[float]:
        reveal_type(self.score)  # the method as it is written
        return [temperature for _ in prompts]

    @register(dispatch="scatter", execute="future")
    def score_later(self, prompts: list[str]) -> list[float]:
        return self.score(prompts)

    @register("scatter", "future")
    def shorten(self, prompts: list[str]) -> list[str]:
        return [prompt[:10] for prompt in prompts]

    @register("broadcast")
    def load(self, path: str) -> int:
        return 1

    @register("one_to_all")
    def memory(self) -> int:
        return 1

    @register("one_to_all", "future")
    def memory_later(self) -> int:
        return 1

    @register("rank_zero", deadline=5.0)
    def save(self, path: str) -> str:
        return path


with WorkerGroup(Scorer, 4, ("m",)) as group:
    reveal_type(group.score)
    reveal_type(group.score(["a"], temperature=0.5))
    reveal_type(group.score_later(["a"]))
    reveal_type(group.score_later(["a"]).result())
    reveal_type(group.load("here"))
    reveal_type(group.memory())
    reveal_type(group.memory_later().result(timeout=3))
    reveal_type(group.save("here"))

with LocalWorkerGroup(Scorer, 1) as local:
    reveal_type(local.memory())
    local.score([1])  # wrong: not strings
    local.score(["a"], temprature=1.0)  # wrong: misspelt
    local.scor(["a"])  # wrong: no such method
    local.score(local.score_later(["a"]))  # wrong: a future of something else
    reveal_type(local.score(local.shorten(["a"])))

bare = WorkerGroup(Scorer, 4, ("m",))
reveal_type(bare.workers.memory())
bare.close()
