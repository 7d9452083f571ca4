"""A record of frozen weights, to detect whether something other than the optimizer wrote to them."""

from __future__ import annotations

from collections.abc import Mapping, Set

import torch
from torch import Tensor

SAMPLED = 64  # sampled elements of each tensor


class Frozen:
    """Tracks frozen weights between two syncs, so that the engine gets them again only when they may have changed.

    Each call of `changed` compares tensors, storages, torch's version counters and a sample of the bits: a merge by
    PEFT writes through `.data`, which no counter sees. A weight that was trainable at the last call counts as changed,
    too.
    """

    def __init__(self) -> None:
        self._states: dict[str, tuple[int, int, int]] = {}
        self._samples: list[Tensor] = []
        self._bits: Tensor | None = None

    @property
    def names(self) -> Set[str]:
        """The names of the weights that were frozen at the last call of `changed`."""
        return self._states.keys()

    def changed(self, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether some of the frozen weights may hold other bits than at the last call, or were not
        frozen then.

        Args:
            tensors: the weights that are frozen now, by name.
        """
        states = {name: (id(t), t.untyped_storage()._cdata, t._version) for name, t in tensors.items()}
        news = any(self._states.get(name) != state for name, state in states.items())
        before, bits = self._bits, self._sampled()
        if before is not None and bits is not None:
            news = news or not torch.equal(before, bits)
        if states != self._states:
            flat = (t.detach().view(-1) for t in tensors.values() if t.is_contiguous() and t.numel())
            self._samples = [t[:: max(1, t.numel() // SAMPLED)] for t in flat]
            bits = self._sampled()
        self._states, self._bits = states, bits
        return news

    def _sampled(self) -> Tensor | None:
        return torch.cat([t.float() for t in self._samples]).view(torch.int32) if self._samples else None
