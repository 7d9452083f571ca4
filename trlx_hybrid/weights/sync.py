"""The weight versions of policy and engine: the sync that brings the engine up to date, and the checks of that sync."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..blame import asked, asked_text, fault
from ..contract.types import LoadReport, SyncPlan, SyncReport
from ..errors import ComponentError, PolicyError, SyncError
from ..rollout.seeding import preserved_generators
from . import verify

if TYPE_CHECKING:
    from torch import Tensor

    from ..config import HybridConfig
    from ..contract.protocols import Engine, WeightSync
    from ..contract.types import Sampling
    from ..interprocess.ranks import Ranks
    from ..memory.trainer_memory import TrainerMemory
    from ..plugins.registry import Component
    from ..plugins.selection import Choice, Selection
    from ..policy.policy import Policy

logger = logging.getLogger(__name__)

ENGINE = (
    "Training on it would be off policy, so the run stops. The engine holds other weights than the trainer, or "
    "computes something else with them. Report it with `trlx-hybrid env`; weights='gather' may serve meanwhile."
)
ROLLOUT = (
    "The log-probs are those that the {rollout} returned, and engine and trainer agreed on a probe after the first "
    "weight sync. So look there first: completions belong in the order of their requests, and `logprobs[i]` to "
    "`token_ids[i]`; `trlx_hybrid.testing.conformance.check_rollout` shows its author more. {way_out}"
)
BY_SHAPE = (
    "the trainer's log-probs depend on the micro-batch that a row is scored in: {found}. The engine agrees with the "
    "row alone, so it is the trainer's forward pass: a model whose rows or padding see each other, or kernels that "
    "are chosen by the number of tokens. Try another attn_implementation, or another HybridConfig.scoring. If it is "
    "rounding, raise HybridConfig.max_logprob_gap."
)
OWN_SAMPLER = (
    "The log-probs are those that rollout_func returned. If it samples from this run's engine, the engine holds other "
    "weights than the trainer; else they are not those of its completion_ids at the trainer's temperature, without "
    "truncation, under the trainer's current weights. TRL corrects for the difference, as far as it is asked to."
)


class WeightVersions:
    """Keeps engine and policy at the same weight version.

    A counter alone is not enough: adapters and checkpoints can be loaded by hand without an optimizer step, and
    `Tensor._version` does not see fused optimizers. So this class also compares a fingerprint (hash) of the bits of the
    policy's weights, the policy's modules, and which adapters are active with which scaling.

    Args:
        memory: the trainer's memory, offloaded where the device cannot hold policy and KV cache at once.
        engine: the component that built the engine; None where TRL generates.
        sampling: returns the run's current sampling parameters.
        autocast: dtype of the trainer's matrix products.
        call: calls a hook of all plugins, by its name and its keyword arguments.

    Attributes:
        version: weight version of the policy; grows with every optimizer step, checkpoint load and adapter load.
        engine_version: version of the weights in the engine; None while it holds no complete weights.
        source: the component of the weight sync in use, which errors name; None while it is not chosen.
        fingerprint_seconds: seconds that the last `sync` spent on detecting changes of the weights.
    """

    def __init__(
        self,
        policy: Policy,
        ranks: Ranks,
        memory: TrainerMemory,
        config: HybridConfig,
        *,
        engine: Component | None,
        sampling: Callable[[], Sampling],
        autocast: torch.dtype,
        call: Callable[..., Any],
    ) -> None:
        self.version = 0
        self.engine_version: int | None = None
        self._policy, self._ranks, self._memory, self._config = policy, ranks, memory, config
        self._component, self._sampling, self._autocast, self._call = engine, sampling, autocast, call
        self._fingerprint: int | None = None
        self._adapters: tuple[object, ...] = ()
        self.fingerprint_seconds = 0.0
        self._syncs = 0
        self._names: list[str] = []
        self.source: Component | None = None
        self._told = False  # whether the log says that batches are not compared

    def changed(self) -> None:
        """Increase the version by 1, because the policy's weights have changed."""
        self.version += 1

    def forget(self) -> None:
        """Record that the engine has no current weights: it was put to sleep or closed, or a sync failed half-way."""
        self.engine_version = None

    def sync(self, engine: Engine, weights: WeightSync) -> SyncReport | None:
        """Bring the policy's weights into the engine and verify them; return None when it already holds them.
        Collective.

        Raises:
            SyncError: the engine does not hold, or does not compute with, the policy's weights.
        """
        policy = self._policy
        self.fingerprint_seconds = 0.0
        other = policy.other_modules()
        policy.reshard()
        before, self._adapters = self._adapters, policy.adapter_states()
        other |= before != self._adapters
        if other:
            asked(self.source, weights, "forget")
        if self.engine_version == self.version:
            other = other or self._fingerprint != self._taken()
            if self._ranks.any(other):
                self.changed()  # changed without a call of `changed`
        if self.engine_version == self.version:
            return None
        every, untested = self._config.verify_every, getattr(engine, "untested", None)
        if untested is not None and self._syncs == 0 and self._ranks.rank == 0:
            logger.warning("%s", untested)
        full = self._syncs == 0 or (every > 0 and self._syncs % every == 0) or untested is not None
        plan = SyncPlan(weights=weights.name, version=self.version, verify="full" if full else "sampled")
        self._call("trlx_sync_start", plan=plan)
        self.forget()
        with preserved_generators():
            started = time.perf_counter()
            loaded = self._brought(engine, weights)
            seconds = time.perf_counter() - started
            verified = self._check_bits(engine, weights, full)
            self._fingerprint = self._taken()
            gap = self._check_log_probs(engine) if full and not policy.in_zero3 else None
        self._syncs += 1
        self.engine_version = self.version
        report = SyncReport(
            weights=weights.name,
            version=self.version,
            tensors=loaded.tensors,
            bytes=loaded.bytes,
            seconds=seconds,
            verified=verified,
            logprob_gap=gap,
        )
        self._call("trlx_sync_end", report=report)
        return report

    def _brought(self, engine: Engine, weights: WeightSync) -> LoadReport:
        """Run the weight sync and return its report, after checking that the report is a LoadReport and that the engine
        has weights."""
        source = self.source or f"weights {weights.name!r}"
        loaded = asked(self.source, weights, "sync")
        if not isinstance(loaded, LoadReport):
            raise ComponentError(
                f"The {source} returned a {type(loaded).__name__} from `sync`, where a LoadReport was expected: return "
                "what `engine.load_weights` returns, or one of your own."
            )
        if engine.weights_lost:
            raise SyncError(
                f"The {source} has brought no weights: after its `sync` the engine has none to sample with. Have it "
                "call `engine.load_weights(policy.full_weights())`, or write all of `engine.regions(policy)` and call "
                "`engine.weights_written()`."
            )
        return loaded

    def _taken(self) -> int:
        """Compute and return the fingerprint (hash) of the policy's weights, and add the time it takes to
        `fingerprint_seconds`."""
        device = self._policy.device
        if device.type == "cuda":
            # do not count earlier kernels as the fingerprint's time; they are waited for in any case
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        found = self._policy.fingerprint()
        self.fingerprint_seconds += time.perf_counter() - started
        return found

    def check_batch(
        self,
        engine: Engine,
        sampled: Tensor,
        scored: Tensor,
        mask: Tensor,
        ids: Tensor,
        *,
        temperature: float,
        step: int,
        own_sampler: bool,
        over_support: bool = False,
        rollout: Component | None = None,
        again: Callable[[tuple[float, float]], str | None] | None = None,
    ) -> None:
        """Compare, for a batch's sampled tokens, the trainer's log-probs with the engine's. Collective; computes
        nothing again unless they differ.

        Args:
            sampled: log-probs that the engine sampled with, (B, T) float.
            scored: the trainer's log-probs of these tokens, (B, T) float.
            mask: (B, T), not 0 where the engine sampled the token.
            ids: token ids, (B, T).
            temperature: temperature that the trainer scored at.
            step: optimizer steps done.
            own_sampler: whether a user's `rollout_func` returned the log-probs: such a run is warned once, and goes on.
            over_support: whether the trainer's log-probs are over only those ids that top-k, top-p and the like left.
            rollout: the component that returned the log-probs, if it is a plugin's rollout; None otherwise.
            again: a function that is called where the log-probs differ, with the result of `verify.allowed_gap`. It
                scores the row that is furthest from the engine once more, alone, and returns how the result differs
                from the trainer's first one, or None where it does not. Collective.

        Raises:
            PolicyError: the trainer's log-probs are NaN on some rank, or depend on the shape of a micro-batch.
            SyncError: the log-probs differ by more than rounding explains, on some rank.
        """
        ranks, config = self._ranks, self._config
        broken = _on_some_rank(ranks, verify.no_numbers(self._policy, scored, mask))
        if broken is not None:
            raise PolicyError(f"At step {step}, the trainer's own log-probs are no numbers: {broken}")
        if config.max_logprob_gap == math.inf:
            return
        reason = self.incomparable(temperature, over_support)
        if reason is not None:
            if not self._told and ranks.rank == 0:
                logger.warning("Engine and trainer are not compared token by token: %s makes them differ.", reason)
            self._told = True
            return
        allowed = verify.allowed_gap(engine, self._policy, self._autocast, config.max_logprob_gap)
        if own_sampler:
            mask = mask * ~sampled.isnan()  # it may not return all log-probs
        found = _on_some_rank(ranks, verify.disagreement(sampled, scored, mask, ids, allowed))
        if found is not None:
            text = f"At step {step}, engine and trainer disagree on what was sampled: {found}. "
            if not own_sampler:
                by_shape = None if again is None else _on_some_rank(ranks, again(allowed))
                if by_shape is not None:
                    raise PolicyError(f"At step {step}, {BY_SHAPE.format(found=by_shape)}")
                told = ENGINE if rollout is None else ROLLOUT.format(rollout=rollout, way_out=rollout.way_out)
                raise SyncError(f"{text}{told} If it is rounding, raise HybridConfig.max_logprob_gap.")
            if not self._told and ranks.rank == 0:
                logger.warning("%s%s", text, OWN_SAMPLER)
            self._told = True

    def incomparable(self, temperature: float, over_support: bool) -> str | None:
        """Return the setting that makes the engine's and the trainer's log-probs of sampled tokens differ by design,
        such as "top_k=20" or a dropout, or None.

        Args:
            temperature: temperature that the trainer scores at.
            over_support: whether the trainer's log-probs are over only those ids that top-k, top-p and the like left.
        """
        reason = self._sampling().reshaped_by(temperature, over_support)
        return reason or verify.noise(self._policy.module, self._policy.modules)

    def _check_bits(self, engine: Engine, weights: WeightSync, full: bool) -> int:
        checked = asked(self.source, weights, "check", full)
        if checked is not None:
            if not isinstance(checked, int) or isinstance(checked, bool):  # False would count as a number
                wanted = "None or the number of tensors that were compared"
                raise fault(self.source, "check", f"{checked!r:.80}", wanted)
            return checked
        policy = self._policy
        if not self._names:
            self._names = policy.checkpoint_names()
        names = None if full else verify.sampled_names(self._names, self.version)
        by = f"the sync of the {self.source or weights.name}"
        return verify.check_bits(engine, policy, names, by, self._component)

    def _check_log_probs(self, engine: Engine) -> float:
        """Let the engine sample a short probe sequence, score it with the policy, and return the largest difference of
        a token's log-probs in nats. Where the device cannot hold both, the policy is offloaded while the engine
        samples, and the engine sleeps while the policy scores."""
        away = self._memory.make_room(["policy"])
        assert self._component is not None
        asked(self._component, engine, "wake", "kv_cache")
        prompt, completion = verify.sample_probe(engine, self._policy, self._component)
        if away:
            asked(self._component, engine, "sleep", keep_weights=True)
            self._memory.come_back(["policy"])
        allowed, _ = verify.allowed_gap(engine, self._policy, self._autocast)
        return verify.check_log_probs(engine, self._policy, prompt, completion, allowed)


def choose(selection: Selection, build: Callable[[Choice], WeightSync]) -> tuple[WeightSync, str]:
    """Return the run's weight sync and the reason for the choice. A weight sync that the user named is taken. Otherwise
    "auto" tries all weight syncs in order, and the first that can serve this run is taken.

    Args:
        selection: the components that were chosen for the run, with the weight syncs to try.
        build: makes the weight sync of a choice.

    Raises:
        ComponentError: the weight sync that the user named refuses, or all do. The message says why.
    """
    chosen = selection.weights
    if chosen is not None:
        sync = build(chosen)
        reason = _refused(sync, chosen)
        if reason is not None:
            told = f"weights={sync.name!r} cannot serve this run: {reason.rstrip('.')}."
            raise ComponentError(f"{told} Or let weights='auto' choose.")
        return sync, chosen.why
    refusals: list[str] = []
    for path in selection.paths:
        reason = path.component.out_of_place()
        if reason is None:
            sync = build(path)
            reason = _refused(sync, path)
            if reason is None:
                return sync, "; ".join(["auto", *refusals])
        refusals.append(f"not {path.component.name}: {reason}")
    raise ComponentError("No weight sync can serve this run. " + " ".join(refusals))


def _refused(sync: WeightSync, choice: Choice) -> str | None:
    """Return why a weight sync cannot serve the run, as its method `refuses` says, or None."""
    return asked_text(choice.component, sync, "refuses")


def _on_some_rank(ranks: Ranks, found: str | None) -> str | None:
    """Return the fault that the first rank with a fault has found, with the rank's number before it; None where no rank
    has found any. Collective.

    Args:
        found: a text on the fault that this rank has found, or None.
    """
    if not ranks.any(found is not None):
        return None
    return next(f"on rank {rank}, {what}" for rank, what in enumerate(ranks.gather(found)) if what is not None)
