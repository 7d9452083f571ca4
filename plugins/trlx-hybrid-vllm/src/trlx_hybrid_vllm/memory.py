"""What the engine holds of the device's memory, and how it gives it back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from trlx_hybrid.memory.ledger import storages

from . import internals

WEIGHTS, KV_CACHE = "weights", "kv_cache"


class EngineMemory:
    """vLLM's weights and KV cache, each resident or asleep. The weights are to be woken first."""

    def __init__(self, llm: Any, enabled: bool) -> None:
        self._llm = llm
        self._enabled = enabled
        self._sizes: dict[str, int] = {}

    @property
    def asleep(self) -> set[str]:
        """ "weights", "kv_cache", both or neither."""
        return set(self._sizes)

    @property
    def asleep_bytes(self) -> int:
        """What waking all of it will allocate."""
        return sum(self._sizes.values())

    def sleep(self, keep_weights: bool) -> None:
        """Give the KV cache back, and the weights unless they are the policy's as well: what of it is awake.

        Only the KV cache: its pages are unmapped, nothing is copied or saved. The weights too: vLLM's level 2, which
        also saves the few buffers that no sync would bring back, and passes over what is asleep.
        """
        awake = ({KV_CACHE} if keep_weights else {WEIGHTS, KV_CACHE}) - self.asleep
        if not self._enabled or not awake:
            return
        internals.drain(self._llm)
        self.forget_computed()
        sizes = {what: self._bytes(what) for what in awake}
        if WEIGHTS in awake:
            self._llm.collective_rpc("sleep", args=(2,))
        else:
            self._llm.collective_rpc("discard", args=((KV_CACHE,),))
        self._sizes |= sizes
        self._sizes |= {what: size - self._bytes(what) for what, size in sizes.items()}  # a CPU's worker keeps buffers

    def forget_computed(self) -> None:
        """Drop what was computed with the weights: the prefix cache, if there is anything in it (vLLM walks all blocks
        for that, 2 ms for 27 GiB), and the embeddings of images."""
        if internals.prefixes(self._llm):
            self._llm.reset_prefix_cache()
        if self._llm.llm_engine.model_config.is_multimodal_model:
            self._llm.llm_engine.reset_encoder_cache()

    def wake(self, what: str) -> None:
        """Allocate "weights" or "kv_cache" again; nothing to do for what is awake."""
        if what not in self.asleep:
            return
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # what the trainer's allocator cached would not be there to map
        self._llm.collective_rpc("wake_up", args=([what],))
        del self._sizes[what]

    def _bytes(self, what: str) -> int:
        return sum(storage.nbytes() for storage in storages(self.resident(what)))

    def resident(self, what: str) -> list[Tensor]:
        """The tensors of "weights" (with their buffers and adapter slots) or "kv_cache" that hold memory now; on a CPU
        those that were emptied in place as well."""
        if what in self.asleep and torch.cuda.is_available():  # unmapped, though torch still counts it
            return []
        if what == KV_CACHE:
            return internals.kv_caches(self._llm)
        model = internals.model_of(self._llm)
        slots = [t for m in model.modules() for t in internals.adapter_slots_of(m)]
        return [*model.parameters(), *model.buffers(), *slots]
