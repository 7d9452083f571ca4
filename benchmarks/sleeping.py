"""Seconds of releasing and restoring the KV cache: ours, and vLLM's sleep levels as TRL uses them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from .contestants import Contestant, Hybrid, StockTRL
from .harness import seconds_of, synchronise
from .scale import Scale

Way = tuple[Callable[[], object], Callable[[], object]]
WAYS = {"trl": "trl", "level-1": "trl", "hybrid": "hybrid"}
"""The ways to release the KV cache, with the engine that each belongs to.

`trl` is vLLM's level 2, which TRL's colocate path uses: it discards everything. Level 1 saves the weights on the host.
Ours releases only the KV cache.
"""


class KVMemory(Contestant):
    """A contestant whose engine has weights of its own, all of it awake. Subclasses implement the wake-up.

    Attributes:
        bytes: bytes of the KV cache.
    """

    def build(self, model: Any, tokenizer: Any, scale: Scale) -> None:
        """Build the engine, wake it, and store what it samples then."""
        super().build(model, tokenizer, scale)  # type: ignore[safe-super]
        self.wake_up()
        self.bytes: int = sum(storage.nbytes() for storage in self._storages())
        self._expected = self.greedy_awake()

    def wake_up(self) -> None:
        """Wake the whole engine, with the policy's weights in it."""
        raise NotImplementedError

    def greedy_awake(self) -> list[list[int]]:
        """Return completions that depend only on the model; the engine is awake before and afterwards."""
        raise NotImplementedError

    def ways(self) -> Mapping[str, Way]:
        """Return the ways to release and restore memory, by name."""
        raise NotImplementedError

    @property
    def llm(self) -> Any:
        """The vLLM `LLM`."""
        raise NotImplementedError

    def cycle(self, way: str, idle_seconds: float) -> tuple[float, float]:
        """Return the seconds to release the cache, and the seconds to restore it after `idle_seconds`.

        Raises:
            RuntimeError: the device did not get all of the cache's memory back.
        """
        release, restore = self.ways()[way]
        before = self._free_bytes()
        given = seconds_of(release)
        freed = self._free_bytes() - before
        if freed < 0.99 * self.bytes:
            raise RuntimeError(f"{way} freed {freed} bytes, the KV cache holds {self.bytes}.")
        time.sleep(idle_seconds)
        return given, seconds_of(restore)

    def check(self) -> int:
        """Check that the engine with its weights restored samples as before, and return the bytes of the cache.

        Raises:
            RuntimeError: it samples something else.
        """
        self.wake_up()
        found = self.greedy_awake()
        if found != self._expected:
            raise RuntimeError(f"After the cycles the engine samples {found}, before {self._expected}.")
        return self.bytes

    def _storages(self) -> list[Any]:
        from trlx_hybrid.memory.ledger import storages
        from trlx_hybrid_vllm.private.engine import kv_caches

        return storages(kv_caches(self.llm))

    def _free_bytes(self) -> int:
        """Return the free bytes of the device; on a CPU, whose free memory others use too, minus the cache's bytes."""
        import torch

        if torch.cuda.is_available():
            synchronise()
            return int(torch.cuda.mem_get_info()[0])
        held: int = sum(storage.nbytes() for storage in self._storages())
        return -held


class StockKVMemory(KVMemory, StockTRL):
    """A contestant with TRL's engine, in a process in which nothing of ours runs."""

    @property
    def llm(self) -> Any:
        """The `LLM` of TRL's engine."""
        return self.generation.llm

    def wake_up(self) -> None:
        """Wake the engine as TRL does, with a weight sync in between."""
        self._wake_as_trl(self.generation.sync_weights)

    def _wake_as_trl(self, between: Callable[[], object] = lambda: None) -> None:
        self.llm.wake_up(tags=["weights"])
        between()
        self.llm.wake_up(tags=["kv_cache"])

    def greedy_awake(self) -> list[list[int]]:
        """Sample greedily, then wake the engine again, which TRL's `generate` puts to sleep."""
        completions = self.greedy()
        self.wake_up()
        return completions

    def ways(self) -> Mapping[str, Way]:
        """Return vLLM's sleep levels."""
        return {
            "trl": (lambda: self.llm.sleep(level=2), self._wake_as_trl),
            "level-1": (lambda: self.llm.sleep(level=1), lambda: self.llm.wake_up()),
        }


class HybridKVMemory(KVMemory, Hybrid):
    """A contestant with our engine."""

    @property
    def _engine(self) -> Any:
        return self._trainer.session.live_engine

    @property
    def llm(self) -> Any:
        """The `LLM` of our engine."""
        return self._engine.llm

    def wake_up(self) -> None:
        """Wake the engine as a rollout phase does, with weights that are proven."""
        engine, policy = self._engine, self._trainer.session.policy
        engine.wake("weights")
        engine.wake("kv_cache")
        engine.load_weights(policy.full_weights())
        if engine.differing(policy.full_weights()):
            raise RuntimeError("The engine's weights are not the policy's.")

    def greedy_awake(self) -> list[list[int]]:
        """Sample greedily from the engine as it is."""
        from trlx_hybrid.contract.types import Request, Sampling
        from trlx_hybrid_vllm.private.engine import drain

        requests = [Request(prompt_ids=prompt, seed=0) for prompt in self._prompts("greedy", 8)]
        sampling = Sampling(max_tokens=8, top_k=1, extra={"ignore_eos": True})
        completions = self._engine.generate(requests, sampling)
        drain(self.llm)  # a step may still be in flight
        return [completion.token_ids for completion in completions]

    def ways(self) -> Mapping[str, Way]:
        """Return our way: the KV cache alone."""
        return {"hybrid": (lambda: self._engine.sleep(keep_weights=True), lambda: self._engine.wake("kv_cache"))}
