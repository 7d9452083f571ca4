"""The contestants of the weight-sync benchmark, which bring fresh weights into the engine, TRL's way and ours."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from .contestants import Contestant, Hybrid, StockTRL
from .digest import digest
from .harness import Timed, synchronise
from .scale import Scale

NOISE = 1e-3  # standard deviation of a perturbation
ANSWER = 8  # tokens of a tool's answer


class Syncing(Contestant):
    """A contestant that changes the trainer's weights and times their sync. Subclasses implement the sync.

    Attributes:
        model: the trainer's model.
    """

    model: Any

    def build(self, model: Any, tokenizer: Any, scale: Scale) -> None:
        """Store the model, and build the engine."""
        self.model = model
        super().build(model, tokenizer, scale)  # type: ignore[safe-super]

    def perturb(self, turn: int) -> None:
        """Add noise to all trainable weights in place, bit for bit the same in every process."""
        import torch

        draw = torch.Generator(next(self.model.parameters()).device).manual_seed(turn)
        with torch.no_grad():
            for p in self.model.parameters():
                if p.requires_grad:
                    p.add_(torch.randn(p.shape, generator=draw, device=p.device, dtype=p.dtype), alpha=NOISE)

    def perturbed(self, turn: int, sync: Callable[[], object]) -> Timed:
        """Time `sync` with fresh weights; the result is the engine's digest."""
        self.perturb(turn)
        synchronise()
        started = time.perf_counter()
        sync()
        synchronise()
        return Timed(time.perf_counter() - started, self.engine_digest())

    def engine_digest(self) -> int | None:
        """Return a hash of all parameters in the engine, under vLLM's names."""
        return digest(self.engine_parameters())

    def engine_parameters(self) -> Iterator[tuple[str, Any]]:
        """Yield the engine's parameters with vLLM's names."""
        from trlx_hybrid_vllm.private.engine import model_of

        yield from model_of(self.generation.llm).named_parameters()

    def second_turn(self, sequences: int, turn: int) -> Timed:
        """Time one more generate call within a batch, of one token.

        As in a tool loop, each prompt is what was sampled before, followed by a tool's answer.
        """
        self.set_sampling(1, top_k=0)
        with self.phase():
            prompts = self._prompts(f"tool-{turn}", sequences)
            sampled = self._generate(prompts)
            again = [[*p, *c, *range(1, 1 + ANSWER)] for p, c in zip(prompts, sampled, strict=True)]
            synchronise()
            started = time.perf_counter()
            completions = self._generate(again)
            synchronise()
            seconds = time.perf_counter() - started
        return Timed(seconds, [len(completion) for completion in completions])


class SyncingTRL(Syncing, StockTRL):
    """A contestant that syncs with TRL's `VLLMGeneration.sync_weights`.

    With an adapter TRL merges into the base weights and subtracts afterwards, which leaves rounding errors: its base
    weights drift away from the other contestants'. They are restored before each sync, so that the engines can be
    compared bit for bit.

    Attributes:
        drift: share of the adapted base weights that the last sync but one changed; 0 without an adapter.
    """

    drift = 0.0

    def build(self, model: Any, tokenizer: Any, scale: Scale) -> None:
        """Copy the base weights under the adapter before the first sync, and build the engine."""
        self._base = {name: p.detach().clone() for name, p in model.named_parameters() if ".base_layer." in name}
        super().build(model, tokenizer, scale)

    def perturb(self, turn: int) -> None:
        """Restore the base weights, and add the same noise as all contestants."""
        parameters = dict(self.model.named_parameters())
        if self._base:
            changed = sum(int((parameters[name] != kept).sum()) for name, kept in self._base.items())
            self.drift = changed / sum(kept.numel() for kept in self._base.values())
        for name, kept in self._base.items():
            parameters[name].data.copy_(kept)
        super().perturb(turn)

    def sync(self, turn: int) -> Timed:
        """Time all that GRPOTrainer does with fresh weights."""
        return self.perturbed(turn, self.generation.sync_weights)

    def phase_sync(self, turn: int) -> Timed:
        """Time the same as `sync`: TRL proves nothing and keeps no versions."""
        return self.sync(turn)

    def findings(self) -> dict[str, float]:
        """Return the findings for the result's settings."""
        return {"drift": self.drift}


class SyncingHybrid(Syncing, Hybrid):
    """A contestant that syncs by one of our weight paths, as a rollout phase does."""

    _bytes = 0

    def perturb(self, turn: int) -> None:
        """Add the same noise as all contestants, and announce the change, as the trainer's callback does."""
        super().perturb(turn)
        self._trainer.session.versions.changed()

    def sync(self, turn: int) -> Timed:
        """Time the path's own sync and its cheap proof; `gather` has no proof of its own."""
        weights = self._trainer.session.weights

        def sync() -> None:
            self._bytes = weights.sync().bytes
            weights.check(False)

        return self.perturbed(turn, sync)

    def phase_sync(self, turn: int) -> Timed:
        """Time all of it: version, fingerprint, hooks, and for `gather` the comparison of a sample of tensors."""
        session = self._trainer.session
        return self.perturbed(turn, lambda: session.versions.sync(session.live_engine, session.weights))

    def engine_digest(self) -> int | None:
        """Return the engine's hash; None for `lora`, whose engine holds base and adapter apart.

        For `lora` the path's full proof compares all bits.
        """
        weights = self._trainer.session.weights
        if weights.name != "lora":
            return super().engine_digest()
        weights.check(True)
        return None

    def findings(self) -> dict[str, float]:
        """Return the bytes that the last sync moved."""
        return {"bytes": float(self._bytes)}
