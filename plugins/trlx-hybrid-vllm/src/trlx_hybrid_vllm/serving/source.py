"""The policy's weights as vLLM's weight transfer wants them: described first, then as a stream, again and again."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from trlx_hybrid.weights.policy import Policy
from vllm.distributed.weight_transfer import ParamMeta, WeightSource


class PolicySource(WeightSource):  # type: ignore[misc]
    """Full tensors under checkpoint names, adapters merged. Reading is collective: every rank reads all of it.

    Attributes:
        described: name, dtype and shape of each tensor as the policy has it, in order; read by one pass.
        wire: dtypes to cast tensors to before they are sent; those that are not named keep theirs.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._pass: Iterator[tuple[str, Tensor]] = iter(())
        self._reading = threading.Lock()
        self.described = [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in policy.full_weights()]
        self.wire: Mapping[str, torch.dtype] = {}

    @property
    def bytes(self) -> int:
        """Of one pass, as sent."""
        return sum(torch.Size(m.shape).numel() * m.dtype.itemsize for m in self.metadata())

    def metadata(self) -> list[ParamMeta]:
        """What a pass yields."""
        return [ParamMeta(m.name, self.wire.get(m.name, m.dtype), m.shape) for m in self.described]

    def begin(self) -> None:
        """A pass is due on every rank: `finish` reads what of it nobody has read."""
        self._pass = self._policy.full_weights()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        while (weight := self._next()) is not None:
            name, tensor = weight
            yield name, tensor.to(self.wire.get(name, tensor.dtype))

    def finish(self) -> None:
        """The other ranks read on where this one failed, and wait for it at each tensor: read the rest with them."""
        while self._next() is not None:
            pass

    def _next(self) -> tuple[str, Tensor] | None:
        """Of the pass; a sender that was given up may still be reading."""
        with self._reading:
            return next(self._pass, None)
