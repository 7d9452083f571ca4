"""What it takes to give the KV cache back and to take it again: ours, and vLLM's sleep levels, on one engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from .contestants import Hybrid
from .harness import seconds_of, synchronise
from .scale import Scale

WAYS = ("trl", "level-1", "hybrid")
"""`trl` is vLLM's level 2, which TRL's colocate path uses: all is discarded. Level 1 saves the weights on the host.
Ours gives back the KV cache alone."""


class KVMemory(Hybrid):
    """One engine with weights of its own: what vLLM discards is not the policy's."""

    def build(self, model: Any, tokenizer: Any, scale: Scale) -> None:
        """The engine, and everything in it awake."""
        super().build(model, tokenizer, scale)
        engine = self._engine
        engine.wake("weights")
        engine.wake("kv_cache")
        self._reload()
        self.bytes: int = sum(storage.nbytes() for storage in self._storages())
        self._expected = self.greedy_awake()

    @property
    def _engine(self) -> Any:
        return self._trainer.session.live_engine

    def cycle(self, way: str, idle_seconds: float) -> tuple[float, float]:
        """Seconds to give the cache back, and to take it again after `idle_seconds`.

        Raises:
            RuntimeError: the device has not got all of it back.
        """
        release, restore = self._ways()[way]
        before = self._free_bytes()
        given = seconds_of(release)
        freed = self._free_bytes() - before
        if freed < 0.99 * self.bytes:
            raise RuntimeError(f"{way} freed {freed} bytes, the KV cache holds {self.bytes}.")
        time.sleep(idle_seconds)
        return given, seconds_of(restore)

    def _ways(self) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
        engine, llm = self._engine, self._engine.llm

        def wake_as_trl() -> None:
            llm.wake_up(tags=["weights"])
            llm.wake_up(tags=["kv_cache"])

        return {
            "trl": (lambda: llm.sleep(level=2), wake_as_trl),
            "level-1": (lambda: llm.sleep(level=1), lambda: llm.wake_up()),
            "hybrid": (lambda: engine.sleep(keep_weights=True), lambda: engine.wake("kv_cache")),
        }

    def check(self) -> int:
        """Bytes of the cache, after a proof that the engine still works: with its weights back it samples as before.

        Raises:
            RuntimeError: it does not.
        """
        self._reload()
        found = self.greedy_awake()
        if found != self._expected:
            raise RuntimeError(f"After the cycles the engine samples {found}, before {self._expected}.")
        return self.bytes

    def greedy_awake(self) -> list[list[int]]:
        """Completions that depend on nothing but the model, from the engine as it is."""
        from trlx_hybrid.types import Request, Sampling
        from trlx_hybrid_vllm.internals import drain

        requests = [Request(prompt_ids=prompt, seed=0) for prompt in self._prompts("greedy", 8)]
        sampling = Sampling(max_tokens=8, top_k=1, extra={"ignore_eos": True})
        completions = self._engine.generate(requests, sampling)
        drain(self._engine.llm)  # vLLM's own sleep does not expect the step that may still be in flight
        return [completion.token_ids for completion in completions]

    def _reload(self) -> None:
        engine, policy = self._engine, self._trainer.session.policy
        engine.load_weights(policy.full_weights())
        if engine.differing(policy.full_weights()):
            raise RuntimeError("The engine's weights are not the policy's.")

    def _storages(self) -> list[Any]:
        from trlx_hybrid.memory.ledger import storages
        from trlx_hybrid_vllm.internals import kv_caches

        return storages(kv_caches(self._engine.llm))

    def _free_bytes(self) -> int:
        """Of the device; on a CPU, whose free memory is everybody's, less is the cache's own."""
        import torch

        if torch.cuda.is_available():
            synchronise()
            return int(torch.cuda.mem_get_info()[0])
        held: int = sum(storage.nbytes() for storage in self._storages())
        return -held
