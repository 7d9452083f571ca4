"""The conformance check of weight syncs: it changes a model's weights, syncs, and checks what the engine samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...contract.protocols import WeightSync
from ...contract.types import Sampling
from ...errors import SyncError
from ...weights.verify import allowed_gap
from .findings import ConformanceError, require, require_completions, require_log_probs
from .runs import TOKENS, as_it_is, change, requests, run_with

if TYPE_CHECKING:
    from ...own_loop.hybrid_engine import HybridEngine
    from ...session import Session


def check_weights(
    name: str,
    options: Mapping[str, Any] | None = None,
    *,
    engine: str = "vllm",
    engine_options: Mapping[str, Any] | None = None,
    plugins: Sequence[object] = (),
    model: Any = None,
    tokenizer: Any = None,
) -> None:
    """Change a model's weights in each way that occurs in training, sync after each, and check that the engine samples
    from the changed weights.

    Args:
        name: name of the weight sync, as in `HybridConfig.weights`.
        options: its options, as in `HybridConfig.weights_options`.
        engine, engine_options: the engine that gets the weights, and its options. Its context must hold 64 tokens.
        plugins: objects with hook implementations that offer the weight sync, if it is not installed.
        model, tokenizer: the model whose weights are synced, and its tokenizer; by default a tiny Qwen3 and a tokenizer
            of characters. Pass a PEFT model for a weight sync that serves adapters.

    Raises:
        ConformanceError: the weight sync does something else than `trlx_hybrid.contract.protocols.WeightSync` says.
    """
    config: dict[str, Any] = {"engine": engine, "engine_options": dict(engine_options or {}), "verify_every": 1}
    config |= {"weights": name, "weights_options": dict(options or {}) or None}
    with run_with(plugins=plugins, model=model, tokenizer=tokenizer, **config) as run:
        _Rounds(name, run).all()


class _Rounds:
    """The rollouts of `check_weights`. Before each, the weights are changed in another way: all are trained, none is,
    they are changed by hand, or all but one are frozen. After each, it is checked that the engine samples from the
    changed weights.

    Args:
        name: the weight sync's name, for messages.
        run: a run with the weight sync.
    """

    def __init__(self, name: str, run: HybridEngine) -> None:
        self._name, self._run, self._session = f"weights {name!r}", run, run.session

    def all(self) -> None:
        policy = self._session.policy
        self._round("the first sync", lambda: None)
        self._round("all weights were trained", lambda: self._train(lambda: change(policy, seed=1)))
        self._round("nothing was changed", lambda: None)
        self._round("weights were changed by hand, and session.weights_changed() called", self._by_hand)
        self._round("all weights were trained, and frozen but for one", self._then_frozen)
        self._round("one weight was trained", lambda: self._train(lambda: change(policy, seed=4)))

    def _train(self, work: Callable[[], None]) -> None:
        with self._run.train_context():
            work()

    def _by_hand(self) -> None:
        change(self._session.policy, seed=2)
        self._session.weights_changed()

    def _then_frozen(self) -> None:
        """Train all weights and then freeze all but one, as gradual freezing does. The next sync must still bring the
        last change of the weights that are frozen now."""
        self._train(lambda: change(self._session.policy, seed=3))
        for parameter in [p for p in self._session.policy.module.parameters() if p.requires_grad][:-1]:
            parameter.requires_grad_(False)

    def _round(self, after: str, what: Callable[[], None]) -> None:
        session = self._session
        before = as_it_is(session.policy)
        what()
        theirs = {name: tensor.clone() for name, tensor in session.policy.module.state_dict().items()}
        given = requests()
        try:
            with session.rollout_phase(True):
                self._bits(session, after)
                sampled = session.live_engine.generate(given, Sampling(max_tokens=TOKENS, logprobs=0))
        except SyncError as error:
            raise ConformanceError(f"{self._name}, after {after}: {error}") from error
        of = f"{self._name}, after {after}: the engine"
        allowed = allowed_gap(session.live_engine, session.policy, torch.float32)[0]
        require_log_probs(session.policy, given, require_completions(sampled, given, of), allowed, of=of, before=before)
        now = session.policy.module.state_dict()
        changed = [name for name, tensor in theirs.items() if not torch.equal(tensor, now[name])]
        require(
            not changed,
            f"{self._name}, after {after}: the rollout changed the policy's own {changed[:3]}.",
            "Give back in `put_back` what was borrowed, bit for bit: the optimizer goes on from these weights.",
        )

    def _bits(self, session: Session, after: str) -> None:
        """Check that the engine's weights equal the policy's bit for bit, unless the weight sync has a check of its own
        (such as one for adapters).

        Args:
            session: the run.
            after: what has changed the weights, for messages.
        """
        assert session.weights is not None
        if type(session.weights).check is not WeightSync.check:
            return
        differing = session.live_engine.differing(session.policy.full_weights())
        require(
            not differing,
            f"{self._name}, after {after}: the engine holds other bits than the policy in {differing[:3]}.",
            "Bring every weight that has changed; what was frozen a moment ago may have been trained before that.",
        )
