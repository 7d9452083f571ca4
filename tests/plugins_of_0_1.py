"""A plugin as one was written for trlx-hybrid 0.1, version 1 of the plugin API: every hook, every slot of a trainer.

It is not edited: what makes it fail would make plugins of others fail. See docs/compatibility.md.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from trlx_hybrid import hookimpl, protocols
from trlx_hybrid.doctor import Finding
from trlx_hybrid.errors import EngineError
from trlx_hybrid.protocols import NamedTensors, Rollout, Rows, Run, Scores, Scoring, WeightSync
from trlx_hybrid.types import Completion, LoadReport, Phase, Request, Sampling, SyncPlan, SyncReport, Trajectory
from trlx_hybrid.weights.policy import Policy


@dataclass(frozen=True, kw_only=True)
class Options:
    max_model_len: int = 1024
    enable_sleep_mode: bool = False


class Engine(protocols.Engine):
    """Lives in the trainer's process, on its device.

    Args:
        policy: the model being trained, of which it makes a copy.
    """

    quantized = False
    peers_lost = False

    def __init__(self, policy: Policy, options: Options) -> None:
        model: Any = copy.deepcopy(policy.base)
        vars(model).pop("forward", None)
        self._model = model.eval().requires_grad_(False)
        self.dtype = policy.dtype
        self.max_model_len, self.sleeps = options.max_model_len, options.enable_sleep_mode
        self.weights_lost = False

    @property
    def asleep_bytes(self) -> int:  # type: ignore[override]
        """What waking will take of the device's memory."""
        return sum(p.nbytes for p in self._model.parameters()) if self.weights_lost else 0

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """One completion per request, in their order."""
        return [self._sample(request, sampling) for request in requests]

    def _sample(self, request: Request, sampling: Sampling) -> Completion:
        refused = sampling.reshaped_by(sampling.temperature)
        if refused is not None:
            raise EngineError(f"This engine samples from the whole distribution only: leave out {refused}.")
        device = next(self._model.parameters()).device
        generator = torch.Generator(device).manual_seed(request.seed % 2**63)  # the request's whole randomness
        ends = self._model.generation_config.eos_token_id
        ends = set() if sampling.extra.get("ignore_eos") else set(ends if isinstance(ends, list) else [ends])
        limit = sampling.max_tokens if request.max_tokens is None else min(request.max_tokens, sampling.max_tokens)
        ids, tokens = list(request.prompt_ids), list[int]()
        values, candidates = list[list[float | None]](), list[list[int]]()
        limit = min(limit, self.max_model_len - len(ids))
        while len(tokens) < limit and not (tokens and tokens[-1] in ends):
            logits = self._model(torch.tensor([ids + tokens], device=device)).logits[0, -1].float()
            log_probs = (logits / sampling.temperature).log_softmax(-1)
            token = int(torch.multinomial(log_probs.exp(), 1, generator=generator))
            tokens.append(token)
            if sampling.logprobs is not None:
                best = log_probs.topk(sampling.logprobs).indices.tolist()
                chosen = sorted({token, *best}, key=lambda i: -float(log_probs[i]))
                candidates.append(chosen)
                values.append([float(log_probs[i]) for i in chosen])
        return Completion(
            token_ids=tokens,
            logprobs=values if sampling.logprobs is not None else None,
            logprob_token_ids=candidates if sampling.logprobs is not None else None,
            finish_reason="stop" if tokens and tokens[-1] in ends else "length",
        )

    @torch.no_grad()
    def load_weights(self, weights: NamedTensors) -> LoadReport:
        """Write full tensors; those that are tied come once."""
        mine, written, moved = self._model.state_dict(), set[int](), 0
        count = 0
        for name, tensor in weights:
            mine[name].copy_(tensor)
            written.add(mine[name].data_ptr())
            count, moved = count + 1, moved + tensor.nbytes
        self.weights_lost = False
        unwritten = [name for name, tensor in mine.items() if tensor.data_ptr() not in written]
        return LoadReport(tensors=count, bytes=moved, unwritten=unwritten)

    def differing(self, weights: NamedTensors) -> list[str]:
        """Names of the tensors whose bits are not those in memory."""
        mine = self._model.state_dict()
        return [name for name, tensor in weights if not torch.equal(mine[name], tensor.to(mine[name]))]

    def sleep(self, keep_weights: bool = False) -> None:
        """Give the weights' memory back, unless they must stay."""
        if self.sleeps and not keep_weights and not self.weights_lost:
            for parameter in self._model.parameters():
                parameter.untyped_storage().resize_(0)
            self.weights_lost = True

    def wake(self, what: str) -> None:
        """Take it again; a sync follows, for it holds anything."""
        if what == "weights" and self.weights_lost:
            for parameter in self._model.parameters():
                parameter.untyped_storage().resize_(parameter.numel() * parameter.itemsize)

    def resident(self, what: str) -> list[Tensor]:
        """The tensors that hold memory now; there is no KV cache."""
        held = [p for p in self._model.parameters() if p.untyped_storage().size()]
        return held if what == "weights" else []

    def close(self) -> None:
        """Free everything."""
        self._model = None


class Streamed(WeightSync):
    name = "old"

    def __init__(self, session: Run) -> None:
        self._session = session

    def refuses(self) -> str | None:
        return self._session.policy.refuses_gather()

    def sync(self) -> LoadReport:
        return self._session.live_engine.load_weights(self._session.policy.full_weights())


class Plain(Rollout):
    name = "old"

    def run(self, session: Run, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        session.metrics["hybrid/old_requests"] = float(len(requests))
        return session.live_engine.generate(requests, sampling)


class Stock(Scoring):
    name = "old"

    def score(self, rows: Rows) -> Scores:
        return rows.padded()


class Old:
    """Every hook; `called` names those that were."""

    def __init__(self) -> None:
        self.called: list[str] = []

    @hookimpl
    def trlx_register(self, registry: Any) -> None:
        self.called.append("trlx_register")
        registry.offer(
            "engine",
            "old",
            lambda session, options: Engine(session.policy, options),
            options=Options,
            summary="a copy of the policy",
            unavailable=lambda: None,
            refuses=lambda session, options: None,
            streams=False,
            routes=False,
        )
        registry.offer("weights", "old", lambda session, options: Streamed(session), order=50, needs=(), by_name=True)
        registry.offer("rollout", "old", lambda session, options: Plain(), needs=(), converses=False)
        registry.offer("scoring", "old", lambda session, options: Stock())

    @hookimpl
    def trlx_configure(self, session: Run) -> None:
        self.called.append("trlx_configure")

    @hookimpl
    def trlx_unconfigure(self, session: Run) -> None:
        self.called.append("trlx_unconfigure")

    @hookimpl
    def trlx_leave_phase(self, session: Run, phase: Phase, step: int) -> None:
        self.called.append("trlx_leave_phase")

    @hookimpl
    def trlx_enter_phase(self, session: Run, phase: Phase, step: int) -> None:
        self.called.append("trlx_enter_phase")

    @hookimpl
    def trlx_sync_start(self, session: Run, plan: SyncPlan) -> None:
        assert plan.verify in ("full", "sampled")
        self.called.append("trlx_sync_start")

    @hookimpl
    def trlx_sync_end(self, session: Run, report: SyncReport) -> None:
        assert report.tensors
        assert report.bytes
        assert report.seconds >= 0
        self.called.append("trlx_sync_end")

    @hookimpl
    def trlx_rollout_end(self, session: Run, trajectories: Sequence[Trajectory]) -> None:
        for trajectory in trajectories:
            assert len(trajectory.loss_mask) == len(trajectory.completion_ids)
            assert trajectory.prompt_ids
            assert trajectory.weight_version == session.weight_version
        self.called.append("trlx_rollout_end")

    @hookimpl
    def trlx_log(self, session: Run, metrics: Any) -> None:
        assert metrics
        self.called.append("trlx_log")

    @hookimpl
    def trlx_advantages(self, session: Run, batch: dict[str, Any]) -> Tensor | None:
        assert len(batch["rewards_per_func"]) == session.ranks.world * len(batch["prompt_ids"])
        self.called.append("trlx_advantages")
        return batch["advantages"] * 0.5

    @hookimpl
    def trlx_report_header(self, session: Run) -> str | list[str] | None:
        self.called.append("trlx_report_header")
        return ["an old plugin"]

    @hookimpl
    def trlx_command(self, commands: Any) -> None:
        self.called.append("trlx_command")
        commands.add_parser("old", help="of an old plugin").set_defaults(run=lambda options: 0)

    @hookimpl
    def trlx_doctor(self, options: Any) -> Iterable[Finding] | None:
        self.called.append("trlx_doctor")
        return [Finding(topic="old", text="fine", problem=False)]
