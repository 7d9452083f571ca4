"""`lora`: the base stays in the engine, shared where it can be; only the adapter moves, never merged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trlx_hybrid.errors import SyncError, listed
from trlx_hybrid.protocols import WeightSync
from trlx_hybrid.types import LoadReport
from trlx_hybrid.weights.policy import is_sharded

from ..adapters import AdapterSlots
from .base import SharedWeights
from .streamed import StreamedBase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trlx_hybrid.session import Session
    from trlx_hybrid.weights.policy import Policy

    from ..engine import VLLMEngine


class LoraSync(WeightSync):
    """The adapter goes from the trainer's memory into vLLM's LoRA slots.

    The base is frozen: it is shared or copied once, or streamed once where the policy is sharded, the engine holds
    slices, or the engine's bits are not the policy's. `keeps_weights` holds for all: what moves at each sync is the
    adapter and nothing else.
    """

    name = "lora"
    keeps_weights = True

    def __init__(self, session: Session) -> None:
        self._session = session
        self._base: SharedWeights | StreamedBase | None = None
        self._slots: AdapterSlots | None = None

    def refuses(self) -> str | None:
        """Why this path cannot serve this model and engine, or None."""
        from ..engine import VLLMEngine

        engine = self._session.live_engine
        if not isinstance(engine, VLLMEngine):
            return "it reaches into vLLM's memory, and another engine is in use"
        if engine.adapters_refused is not None:
            return engine.adapters_refused
        policy = self._session.policy
        for base in self._bases(engine, policy):
            self._base, reason = base, base.refuses()
            if reason is None:
                break
        else:
            return reason
        try:
            self._slots = AdapterSlots(engine.llm, policy)
        except SyncError as error:
            return str(error)
        return None

    def _bases(self, engine: VLLMEngine, policy: Policy) -> Iterator[SharedWeights | StreamedBase]:
        if engine.tensor_parallel_size == 1 and not any(is_sharded(p) for p in policy.module.parameters()):
            yield SharedWeights(engine, policy, alias=True)
            yield SharedWeights(engine, policy, alias=False)
        yield StreamedBase(engine, policy)

    def open(self) -> None:
        """Make the base one memory."""
        assert self._base is not None, "refuses() comes first"
        self._base.bind()

    def sync(self) -> LoadReport:
        """Write the adapter into its slots; the first time the base as well."""
        from ..engine import VLLMEngine

        engine = self._session.live_engine
        assert isinstance(engine, VLLMEngine)
        assert self._base is not None
        assert self._slots is not None
        tensors, moved = self._base.refresh()
        moved += self._slots.write()
        engine.adapter = self._slots.request(self._session.freshness.version)
        return LoadReport(tensors=tensors + self._slots.tensors, bytes=moved)

    def put_back(self) -> bool:
        """See `SharedWeights.put_back`."""
        return self._base is not None and self._base.put_back()

    def forget(self) -> None:
        """Frozen weights move again, too."""
        if self._base is not None:
            self._base.forget()

    def check(self, full: bool) -> int:
        """Prove it: the base as in `SharedWeights.check`, the slots bit for bit when `full`.

        Raises:
            SyncError: names what differs.
        """
        assert self._base is not None
        assert self._slots is not None
        checked = self._base.check(full)
        if not full:
            return checked
        differing = self._slots.differing()
        if differing:
            raise SyncError(
                f"After the weight sync vLLM's LoRA slots hold other bits than the adapter in {listed(differing)}. "
                "Report it with `trlx-hybrid env`; weights='gather' may serve meanwhile."
            )
        return checked + self._slots.tensors

    def release(self) -> None:
        """The engine is closed: the policy takes its base weights with it."""
        if self._base is not None:
            self._base.release()
