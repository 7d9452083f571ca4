"""Data types that components exchange: plain frozen dataclasses, token ids as lists of int, no tensors."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from .support import Support


class Phase(enum.Enum):
    """The phase of a run, which says who owns the device memory: the engine in ROLLOUT, the trainer in TRAIN. The
    memory changes owner only between phases."""

    ROLLOUT = "rollout"
    TRAIN = "train"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The layout of a model on ranks, as a product of parallelisms.

    `Layout(fsdp=8)` is FSDP, `Layout(dp=2, fsdp=4)` HSDP, `Layout(dp=8)` DDP, `Layout(tp=4)` an engine.

    Attributes:
        dp: replicas.
        pp: pipeline stages.
        fsdp: ranks that a replica's parameters are sharded over.
        tp: tensor-parallel ranks.
    """

    dp: int = 1
    pp: int = 1
    fsdp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for name in ("dp", "pp", "fsdp", "tp"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} in a layout: it must be 1 or more.")

    @property
    def world(self) -> int:
        """The number of ranks that the layout spans."""
        return self.dp * self.pp * self.fsdp * self.tp

    def __str__(self) -> str:
        sizes = [f"{k}={getattr(self, k)}" for k in ("dp", "pp", "fsdp", "tp") if getattr(self, k) > 1]
        return f"Layout({', '.join(sizes)})"


SHAPELESS = {"seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "logprobs", "detokenize", "n"} | {
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
}
"""Names of engine-specific sampling arguments that do not change the probabilities of tokens."""

PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Sampling settings that change the logits of tokens that occurred before, each with its neutral value."""

KEEPING_ALL: dict[str, tuple[Any, ...]] = {
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "regex": (None,),
    "min_tokens": (0,),
    "bad_words": ([],),
}
"""Sampling settings that can exclude tokens, each with the values at which it excludes none."""

LEFT_OUT = -100.0
"""The logit bias at or below which engines treat a token as forbidden; vLLM accepts no smaller one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The sampling parameters of a run, in TRL's terms; the same for every request.

    Attributes:
        max_tokens: the largest number of tokens of one turn's completion.
        temperature, top_p, top_k, min_p, repetition_penalty: as in TRL; `top_k` of 0 or -1 keeps every token.
        logprobs: None requests no log-probs. 0 requests the log-prob of each sampled token. N requests, in addition,
            the log-probs of the N most probable tokens at each position.
        extra: further engine-specific sampling arguments (TRL's `generation_kwargs`); these take precedence over the
            fields above.
        regex: completions must match this regular expression.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    regex: str | None = None

    def reshaped_by(self, temperature: float, over_support: bool = False) -> str | None:
        """Return the setting, as "name=value", that makes the engine sample tokens with other probabilities than the
        trainer computes, namely a softmax of the logits at `temperature`; None where there is no such setting.

        Args:
            temperature: the temperature of the trainer's softmax.
            over_support: whether the trainer's softmax is only over the ids that top-k, top-p and the like left, or
                over all.
        """
        if self.temperature_of_all != (temperature or None):
            return f"temperature={self.temperature_of_all!r}"
        return (None if over_support else self.truncated_by()) or self.reweighted_by()

    @property
    def temperature_of_all(self) -> float:
        """The temperature that applies to all requests: that in `extra`, if set there, else the field `temperature`."""
        return float(self.extra.get("temperature", self.temperature))

    def truncated_by(self) -> str | None:
        """Return the setting, as "name=value", that keeps some tokens from being sampled, such as `top_k=20`; None
        where all tokens can be sampled.

        An unknown setting in `extra` is returned as well, since it may exclude tokens.
        """
        values = {name: getattr(self, name) for name in ("top_p", "top_k", "min_p", "regex")} | dict(self.extra)
        for name, value in values.items():
            if name in SHAPELESS or name in PENALTIES or name == "temperature":
                continue
            if name == "logit_bias":
                if any(bias <= LEFT_OUT for bias in (value or {}).values()):
                    return f"{name}={value!r}"
            elif value not in KEEPING_ALL.get(name, ()):
                return f"{name}={value!r}"
        return None

    def reweighted_by(self) -> str | None:
        """Return the setting, as "name=value", that changes the ratios of the probabilities of tokens that can be
        sampled, or None.

        Truncation, a grammar or a bias of -100 only leaves tokens out, and the others keep their ratios, so these are
        not returned. A penalty or another bias gives a distribution that the trainer's model does not compute.
        """
        values = {"repetition_penalty": self.repetition_penalty} | dict(self.extra)
        for name, neutral in PENALTIES.items():
            if values.get(name, neutral) != neutral:
                return f"{name}={values[name]!r}"
        bias = values.get("logit_bias") or {}
        if any(value != 0 and value > LEFT_OUT for value in bias.values()):
            return f"logit_bias={bias!r}"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request for one completion.

    Attributes:
        prompt_ids: token ids of everything before the completion, earlier turns included.
        seed: the seed from which all randomness of this request comes; `trlx_hybrid.rollout.seeding.request_seed` makes
            it.
        row: index of the request in the batch of all ranks, the same on any number of processes.
        turn: number of the turn in its trajectory, from 0.
        images: PIL images of the prompt, if any.
        max_tokens: the largest number of tokens to sample, where that is less than `Sampling.max_tokens`.
    """

    prompt_ids: list[int]
    seed: int
    row: int = 0
    turn: int = 0
    images: list[Any] | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The tokens that the engine sampled for one request.

    Attributes:
        token_ids: sampled ids, the stop token included when one was sampled.
        logprobs: log-probs per token, as many as asked for, most probable first, None where the engine had no number;
            None as a whole when none were asked for. Natural logarithm, after temperature and truncation.
        logprob_token_ids: the ids that `logprobs` belongs to, same shape.
        finish_reason: why sampling ended: "stop" (end token or stop string), "length" or "abort".
        experts: (tokens, layers, experts per token) int16, the experts that each token of prompt and completion was
            routed to, except for the last token, which was not computed; -1 where they are not known, and in layers
            without experts. None where `HybridConfig.router_replay` does not ask for them.
        support: for each token, the ids that it could be sampled from (what top-k, top-p and the like left), where the
            run computes log-probs over only these (`Run.over_support`); None if they are not known.
        row: `Request.row` of its request, to detect a rollout that returns completions in a wrong order; None where the
            engine does not set it.
        weight_versions: for each token, the version of the weights that sampled it, where it was sampled in several
            rollouts; None where one version sampled all.
    """

    token_ids: list[int]
    logprobs: list[list[float | None]] | None = None
    logprob_token_ids: list[list[int]] | None = None
    finish_reason: str | None = None
    experts: npt.NDArray[np.int16] | None = field(default=None, repr=False, compare=False)
    support: Support | None = field(default=None, repr=False, compare=False)
    row: int | None = field(default=None, repr=False, compare=False)
    weight_versions: list[int] | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """A trajectory: the tokens and the reward of one episode, as plugins' hooks receive it.

    Attributes:
        prompt_ids: token ids of the prompt.
        completion_ids: every token after the prompt, sampled or observed.
        loss_mask: 1 for tokens that were sampled, 0 for tokens that a tool or environment inserted.
        logprobs: log-prob of each token of `completion_ids` under the sampling policy, or None where not asked for.
        completion: the decoded completion: text, or chat messages for conversational prompts; None where the
            trainer does not decode.
        reward: weighted sum of the reward functions; None where nothing scored it.
        weight_version: version of the batch's weights, which have sampled it unless `weight_versions` says otherwise.
        weight_versions: the version for each token of `completion_ids`; None where the batch's weights sampled all.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    loss_mask: list[int]
    weight_version: int
    logprobs: list[float | None] | None = None
    completion: Any = None
    reward: float | None = None
    weight_versions: list[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncPlan:
    """The plan of a weight sync, which hooks receive before it starts.

    Attributes:
        weights: name of the weight sync.
        version: the weight version that the engine will hold afterwards.
        verify: "full" compares every parameter afterwards, "sampled" a few.
    """

    weights: str
    version: int
    verify: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """The report of a weight sync, which hooks receive after it.

    Attributes:
        weights: name of the weight sync.
        version: the weight version that the engine holds now.
        tensors: number of checkpoint tensors written.
        bytes: bytes handed to the engine on this rank.
        seconds: wall time of the transfer, checks excluded.
        verified: number of checkpoint tensors compared with the engine's memory afterwards.
        logprob_gap: largest absolute difference between the engine's and the policy's log-probs of a short test
            completion, in nats; None where it was not sampled.
    """

    weights: str
    version: int
    tensors: int
    bytes: int
    seconds: float
    verified: int = 0
    logprob_gap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """The report of what was written into the engine by one weight sync.

    Attributes:
        tensors, bytes: number of tensors and of bytes that were written.
        unwritten: names of the engine's parameters that no tensor was written to.
    """

    tensors: int
    bytes: int
    unwritten: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check of the machine: one line that `trlx-hybrid doctor` prints.

    Attributes:
        topic: the subject in one word.
        text: what was found; for a problem, also what to do.
        problem: whether it needs attention.
    """

    topic: str
    text: str
    problem: bool = False
