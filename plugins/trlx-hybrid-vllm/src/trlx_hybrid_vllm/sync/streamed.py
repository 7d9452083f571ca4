"""A base that the engine holds in slices, or the ranks in shards: streamed through vLLM's loader, once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trlx_hybrid.errors import SyncError, listed

from ..loading import counted

if TYPE_CHECKING:
    from trlx_hybrid.weights.policy import Policy

    from ..engine import VLLMEngine


class StreamedBase:
    """What `SharedWeights` is where ranks share nothing. Collective: each tensor is gathered in full, one layer a time.

    Nothing frozen moves again as long as the engine keeps its weights.
    """

    def __init__(self, engine: VLLMEngine, policy: Policy) -> None:
        self._engine, self._policy = engine, policy
        self._streamed = False

    def refuses(self) -> str | None:
        """Why the base cannot be streamed once and for all, or None."""
        if self._engine.quantized:
            return "a quantised engine keeps no copy of the weights"
        for name, p in self._policy.base_parameters().items():
            if p.requires_grad:
                return f"{name} of the base is trained beside the adapter"
        return self._policy.refuses_gather()

    def bind(self) -> None:
        """Nothing is shared."""

    def refresh(self) -> tuple[int, int]:
        """Bring the base into the engine where it is not there.

        Returns:
            (tensors, bytes) that were moved.
        """
        if self._streamed and not self._engine.weights_lost:
            self._engine.weights_written()
            return 0, 0
        report = self._engine.load_weights(self._policy.full_weights(merge=False))
        self._streamed = True
        return report.tensors, report.bytes

    def put_back(self) -> bool:
        """Nothing was borrowed."""
        return False

    def forget(self) -> None:
        """The base is streamed again."""
        self._streamed = False

    def check(self, full: bool) -> int:
        """Compare every bit when `full`; what is frozen and was compared is not compared again otherwise.

        Returns:
            How many tensors were compared.

        Raises:
            SyncError: names each tensor that differs.
        """
        if not full:
            return 0
        compared: dict[str, int] = {}
        differing = self._engine.differing(counted(self._policy.full_weights(merge=False), compared))
        if differing:
            raise SyncError(
                f"After the weight sync the engine holds other bits than the policy in {listed(differing)}. "
                "Report it with `trlx-hybrid env`; weights='gather' may serve meanwhile."
            )
        return len(compared)

    def release(self) -> None:
        """The engine was closed."""
        self.forget()
