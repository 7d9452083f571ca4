"""The weight path `lora`: the base stays in the engine, shared where it can be, and only the adapter moves.

The adapter is never merged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trlx_hybrid.contract.protocols import WeightSync
from trlx_hybrid.contract.types import LoadReport
from trlx_hybrid.errors import SyncError, listed
from trlx_hybrid.memory.ledger import plain_tensors
from trlx_hybrid.policy import quantised
from trlx_hybrid.policy.fingerprint import Frozen
from trlx_hybrid.weights.verify import SAMPLED_TENSORS, Rotation

from .adapter import AdapterSlots
from .loader import counted
from .shared import SharedSync, refuse_other_bits

if TYPE_CHECKING:
    from torch import Tensor
    from trlx_hybrid.session import Session


class LoraSync(WeightSync):
    """Copies the adapter from the trainer's memory into vLLM's LoRA slots.

    The base is frozen: it is shared or copied once, or streamed once where the policy is sharded or held in 4 bits, the
    engine holds slices, or the engine's bits are not the policy's. Each sync moves only the adapter, with one
    exception: the engine's copy of a base in 4 bits, several times as large, is freed in sleep mode and is written
    anew.
    """

    name = "lora"
    keeps_weights = True

    def __init__(self, session: Session) -> None:
        self._session = session
        self._base: WeightSync = StreamedBase(session)
        self._slots: AdapterSlots | None = None

    def refuses(self) -> str | None:
        """Return why this path cannot serve this model and engine, or None."""
        engine: Any = self._session.live_engine
        if not hasattr(engine, "adapters_refused"):
            return "it reaches into vLLM's memory, and another engine is in use"
        if engine.adapters_refused is not None:
            return str(engine.adapters_refused)
        shared = (SharedSync(self._session, alias, adapted=True) for alias in (True, False))
        reason = None
        for base in (*shared, StreamedBase(self._session)):
            self._base, reason = base, base.refuses()
            if reason is None:
                break
        if reason is not None:
            return reason
        self.keeps_weights = not self._session.policy.in_4_bits
        try:
            self._slots = AdapterSlots(engine.llm, self._session.policy)
        except SyncError as error:
            return str(error)
        return None

    def open(self) -> None:
        """Open the path of the base, so that policy and engine share its memory where they can."""
        self._base.open()

    def sync(self) -> LoadReport:
        """Write the adapter into vLLM's LoRA slots; the first time, the base into the engine's weights as well."""
        engine: Any = self._session.live_engine
        assert self._slots is not None, "refuses() comes first"
        base = self._base.sync()
        moved = self._slots.write()
        engine.adapter = self._slots.request(self._session.weight_version)
        return LoadReport(tensors=base.tensors + self._slots.tensors, bytes=base.bytes + moved)

    def put_back(self) -> bool:
        """Restore, after the rollout, base weights that the sync overwrote though other tensors share their memory.

        Returns:
            Whether the engine lost weights by that.
        """
        return self._base.put_back()

    def forget(self) -> None:
        """Let the next sync move frozen weights again, and compare the adapter's layers with those of the slots."""
        self._base.forget()
        if self._slots is not None:
            self._slots.forget()

    def check(self, full: bool) -> int:
        """Compare the engine's base weights and LoRA slots with the policy's.

        The base is compared by the path that brought it (`alias`, `copy` or streaming), the slots bit for bit.

        Args:
            full: compare everything; else a few tensors at each call, in turn.

        Returns:
            How many tensors were compared.

        Raises:
            SyncError: some differ; the message names them.
        """
        assert self._slots is not None
        checked = self._base.check(full) or 0
        refuse_other_bits("vLLM's LoRA slots hold other bits than the adapter", self._slots.differing(full))
        return checked + (self._slots.tensors if full else min(self._slots.tensors, 2 * SAMPLED_TENSORS))

    def release(self) -> None:
        """Copy base weights that lie in the memory of the closed engine to memory of their own."""
        self._base.release()


class StreamedBase(WeightSync):
    """Loads the base model's weights through vLLM's loader once, where policy and engine share no memory.

    Collective: each tensor is gathered in full, one layer at a time. Nothing frozen moves again as long as the engine
    keeps its weights and nobody writes to the base.
    """

    name = "streamed"

    def __init__(self, session: Session) -> None:
        self._session, self._policy = session, session.policy
        self._streamed, self._frozen = False, Frozen()
        self._turns, self._moved = Rotation(), False

    def refuses(self) -> str | None:
        """Return why loading the base just once is not enough or not possible, or None."""
        if self._session.live_engine.quantized:
            return "a quantised engine keeps no copy of the weights"
        for name, p in self._policy.base_parameters().items():
            if p.requires_grad:
                return f"{name} of the base is trained beside the adapter"
        return self._policy.refuses_gather(merge=False)

    def open(self) -> None:
        """Keep bitsandbytes from repacking the policy's base weights, so that they stay equal to what is streamed."""
        quantised.keep_bits(self._policy.modules)

    def sync(self) -> LoadReport:
        """Load the base into the engine at the first sync, and after the engine lost it or somebody wrote to it."""
        engine = self._session.live_engine
        written = self._session.ranks.any(self._frozen.changed(self._held()))
        self._moved = not self._streamed or engine.weights_lost or written
        if not self._moved:
            engine.weights_written()
            return LoadReport(tensors=0, bytes=0)
        report = engine.load_weights(self._policy.full_weights(merge=False))
        self._streamed = True
        return report

    def _held(self) -> dict[str, Tensor]:
        """Return this rank's tensors of the base by name (shards, quantised bits and their scales), to detect writes.

        Raises:
            SyncError: some of the base is trained by now.
        """
        parameters = self._policy.base_parameters()
        trained = [name for name, p in parameters.items() if p.requires_grad]
        if trained:
            raise SyncError(
                f"{listed(trained)} of the base began to be trained beside the adapter, which was streamed into the "
                "engine once. Train it from the start, or use weights='gather'."
            )
        own = {name: [getattr(p, "ds_tensor", p), *quantised.scales(p)] for name, p in parameters.items()}
        return {f"{name} {n}": t for name, held in own.items() for n, t in enumerate(plain_tensors(held))}

    def forget(self) -> None:
        """Let the next sync stream the base again."""
        self._streamed = False

    def check(self, full: bool) -> int:
        """Compare the engine's base weights with the policy's, bit for bit.

        Args:
            full: compare all tensors; else a few at each call, in turn, and none where this sync did not stream them.

        Returns:
            How many tensors were compared.

        Raises:
            SyncError: names each tensor that differs.
        """
        compared: dict[str, int] = {}
        if full or self._moved:
            only = None if full else set(self._turns.take(self._policy.checkpoint_names()))
            weights = counted(self._policy.full_weights(only, merge=False), compared)
            differing = self._session.live_engine.differing(weights)
            refuse_other_bits("the engine holds other bits than the policy", differing)
        return len(compared)
