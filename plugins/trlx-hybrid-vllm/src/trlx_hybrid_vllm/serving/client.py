"""vLLM's four weight-sync calls on every server of an engine: what its trainer-side engines drive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trlx_hybrid.serving import ServedEngine


class GroupClient:
    """A `VLLMWeightSyncClient`. Each call goes to all servers at once and returns when all have answered.

    Every server is an engine of its own and numbers its workers from 0, so what names workers by their rank in the
    whole group is split between them.
    """

    def __init__(self, engine: ServedEngine, deadline: float) -> None:
        self._engine, self._deadline = engine, deadline

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let all workers join the group that the trainer opens."""
        offset, size = init_info.get("rank_offset"), self._engine.plan.ranks
        self._call(
            "init_weight_transfer_engine",
            [
                (init_info if offset is None else init_info | {"rank_offset": offset + place * size},)
                for place in range(len(self._engine.servers))
            ],
        )

    def start_weight_update(self) -> None:
        """An update begins."""
        self._call("start_weight_update", [()] * len(self._engine.servers))

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Receive. A list has an entry for each worker of the whole group."""
        places, size = range(len(self._engine.servers)), self._engine.plan.ranks
        if isinstance(update_info, list):
            given: list[Any] = [update_info[place * size : (place + 1) * size] for place in places]
        else:
            given = [update_info] * len(places)
        self._call("update_weights", [(info,) for info in given])

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """All of it has been sent."""
        self._call("finish_weight_update", [(weight_version,)] * len(self._engine.servers))

    def _call(self, method: str, arguments: Sequence[Sequence[Any]]) -> None:
        self._engine.call(method, arguments, self._deadline)
