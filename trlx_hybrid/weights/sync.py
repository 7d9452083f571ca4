"""Which weights the engine holds: versions, the sync that brings them up to date, and the proof of it."""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING

import torch

from ..errors import ComponentError, SyncError
from ..rollout.seeding import preserved_generators
from ..types import SyncPlan, SyncReport
from . import verify as proof

if TYPE_CHECKING:
    from torch import Tensor

    from ..protocols import Engine, WeightSync
    from ..session import Session

logger = logging.getLogger(__name__)

ENGINE = (
    "Training on it would be off policy, so the run stops. The engine holds other weights than the trainer, or "
    "computes something else with them. Report it with `trlx-hybrid env`; weights='gather' may serve meanwhile."
)
OWN_SAMPLER = (
    "The log-probs are those that rollout_func returned. If it samples from this run's engine, the engine holds other "
    "weights than the trainer; else they are not those of its completion_ids at the trainer's temperature, without "
    "truncation, under the trainer's current weights. TRL corrects for the difference, as far as it is asked to."
)


class Freshness:
    """Keeps engine and policy at one weight version.

    A counter alone is not enough: adapters and checkpoints can be loaded by hand without an optimizer step, and
    `Tensor._version` does not see fused optimizers. So a fingerprint of the policy's bits is compared as well.

    Attributes:
        version: of the policy; grows with every optimizer step, checkpoint load and adapter load.
        engine_version: of what the engine holds, None when it holds nothing to be sampled from.
    """

    def __init__(self, session: Session) -> None:
        self.version = 0
        self.engine_version: int | None = None
        self._session = session
        self._fingerprint: int | None = None
        self._syncs = 0
        self._names: list[str] = []
        self._told = False  # that batches are not compared

    def changed(self) -> None:
        """The policy's weights are no longer what they were."""
        self.version += 1

    def forget(self) -> None:
        """The engine's weights are gone: it was put to sleep, closed, or a sync failed half-way."""
        self.engine_version = None

    def sync(self, engine: Engine, weights: WeightSync) -> SyncReport | None:
        """Bring the policy's weights into the engine and prove it; None when it holds them already. Collective.

        Raises:
            SyncError: the engine does not hold, or does not compute with, the policy's weights.
        """
        session, policy = self._session, self._session.policy
        policy.reshard()
        self._notice_silent_changes()
        if self.engine_version == self.version:
            return None
        every = session.config.verify_every
        full = self._syncs == 0 or (every > 0 and self._syncs % every == 0)
        plan = SyncPlan(weights=weights.name, version=self.version, verify="full" if full else "sampled")
        session.host.call("trlx_sync_start", session=session, plan=plan)
        self.forget()
        with preserved_generators():
            started = time.perf_counter()
            loaded = weights.sync()
            seconds = time.perf_counter() - started
            verified = self._check_bits(engine, weights, full)
            self._fingerprint = policy.fingerprint()
            gap = self._check_log_probs(engine) if full else None
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
        session.host.call("trlx_sync_end", session=session, report=report)
        return report

    def check_batch(
        self, sampled: Tensor, scored: Tensor, mask: Tensor, ids: Tensor, temperature: float, own_sampler: bool
    ) -> None:
        """Hold what the trainer scored against what the engine sampled with. Collective; computes nothing anew.

        Args:
            sampled, scored, mask, ids: as in `proof.disagreement`.
            temperature: that the trainer scored at.
            own_sampler: whether a user's `rollout_func` named the log-probs: such a run is warned, once, and goes on.

        Raises:
            SyncError: they differ by more than rounding explains, on some rank.
        """
        session = self._session
        ranks, config = session.ranks, session.config
        if config.max_logprob_gap == math.inf:
            return
        reason = session.sampler.sampling.reshaped_by(temperature) or proof.noise(session.policy.module)
        if reason is not None:
            if not self._told and ranks.rank == 0:
                logger.warning("Engine and trainer are not compared token by token: %s makes them differ.", reason)
            self._told = True
            return
        allowed = self._allowed(config.max_logprob_gap)
        if own_sampler:
            mask = mask * ~sampled.isnan()  # it need not know all
        found = proof.disagreement(sampled, scored, mask, ids, allowed)
        if ranks.any(found is not None):
            rank, what = next((r, w) for r, w in enumerate(ranks.gather(found)) if w is not None)
            text = f"At step {session.step}, engine and trainer disagree on what was sampled: on rank {rank}, {what}. "
            if not own_sampler:
                raise SyncError(f"{text}{ENGINE} If it is rounding, raise HybridConfig.max_logprob_gap.")
            if not self._told and ranks.rank == 0:
                logger.warning("%s%s", text, OWN_SAMPLER)
            self._told = True

    def _notice_silent_changes(self) -> None:
        if self.engine_version == self.version:
            policy, ranks = self._session.policy, self._session.ranks
            if ranks.any(self._fingerprint != policy.fingerprint()):
                self.changed()

    def _check_bits(self, engine: Engine, weights: WeightSync, full: bool) -> int:
        checked = weights.check(full)
        if checked is not None:
            return checked
        policy = self._session.policy
        if not self._names:
            self._names = policy.checkpoint_names()
        return proof.check_bits(engine, policy, None if full else proof.sampled_names(self._names, self.version))

    def _check_log_probs(self, engine: Engine) -> float:
        """Engine and policy in turn where memory does not hold both: the probe samples first and is scored after."""
        memory = self._session.memory
        away = memory.make_room(["policy"])
        engine.wake("kv_cache")
        assert self._session.selection.engine is not None
        component = self._session.selection.engine.component
        prompt, completion = proof.sample_probe(engine, self._session.policy, component)
        if away:
            engine.sleep(keep_weights=True)
            memory.come_back(["policy"])
        return proof.check_log_probs(engine, self._session.policy, prompt, completion, self._allowed().nats)

    def _allowed(self, nats: float | None = None) -> proof.Allowed:
        session = self._session
        autocast = torch.bfloat16 if session.args.bf16 else torch.float16 if session.args.fp16 else torch.float32
        return proof.Allowed.of(session.live_engine, session.policy, autocast, nats)


def choose(session: Session) -> tuple[WeightSync, str]:
    """The chosen weight sync, or the first in order that does not refuse; and why.

    Raises:
        ComponentError: the chosen one refuses, or all do. Says why.
    """
    chosen = session.selection.weights
    if chosen is not None:
        sync: WeightSync = chosen.component.build(session, chosen.options)
        reason = sync.refuses()
        if reason is not None:
            raise ComponentError(f"weights={sync.name!r} cannot serve this run: {reason} Or let weights='auto' choose.")
        return sync, chosen.why
    refusals: list[str] = []
    for path in session.selection.paths:
        component = path.component
        reason = component.unavailable()
        if reason is None:
            sync = component.build(session, path.options)
            reason = sync.refuses()
            if reason is None:
                return sync, "; ".join(["auto", *refusals])
        refusals.append(f"not {component.name}: {reason}")
    raise ComponentError("No weight sync can serve this run. " + " ".join(refusals))
