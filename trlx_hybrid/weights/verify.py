"""Checks that the engine samples from the policy: its memory holds the policy's bits, and it computes the same numbers.

Both checks are needed. Comparing log-probs does not detect a corrupted row of a large embedding. Comparing bits does
not detect that an engine repacked weights, or derived matrices from them, and did not update these: with equal
parameters, a stale tied head changed log-probs by 0.24 nats.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from ..blame import asked, fault
from ..contract.types import Completion, Request, Sampling
from ..errors import PolicyError, SyncError, listed
from ..policy.policy import modules_of
from ..policy.precision import PROBE_TOKENS, TOLERANCE, autocast_dtype, coarsest

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from ..contract.protocols import Engine
    from ..plugins.registry import Component
    from ..policy.policy import Policy

SAMPLED_TENSORS = 8
GOLDEN = (math.sqrt(5) - 1) / 2
QUANTIZED_TOLERANCE = 2.0
"""The largest allowed log-prob difference of one token for an engine that quantises, in nats: its log-probs differ by
design (fp8: 0.53 on random weights of 1.5B)."""

SHARE, EXPERTS_SHARE, FEW = 0.01, 0.1, 3
"""Limits of how many of a batch's tokens may exceed the tolerance: the share SHARE where arithmetic rounds to 16 bits;
EXPERTS_SHARE where tokens are routed to experts (in any dtype: a tie that rounds the other way takes another expert);
and in both cases at least FEW tokens. A batch has tens of thousands of tokens, while the tolerance is meant for the
probe's eight: healthy bf16 runs differ by 0.01 to 0.02 nats on average, and single improbable tokens by more than 0.5.
Wrong weights show at most tokens."""


def check_bits(
    engine: Engine,
    policy: Policy,
    only: Set[str] | None = None,
    by: str = "the weight sync",
    component: Component | None = None,
) -> int:
    """Compare the engine's memory with the policy's weights, bit for bit in the engine's dtype.

    Args:
        only: checkpoint names to compare; None compares all.
        by: what wrote the weights into the engine, for the message.
        component: the component that offers the engine, where that is known.

    Returns:
        The number of checkpoint tensors that were compared.

    Raises:
        SyncError: some tensors differ; the message names them.
        ComponentError: the engine did not return a list of names, or failed.
    """
    compared = 0

    def counted() -> Iterator[tuple[str, Tensor]]:
        nonlocal compared
        for name, tensor in policy.full_weights(only):
            compared += 1
            yield name, tensor

    differing = asked(component, engine, "differing", counted())
    if not isinstance(differing, list):  # None would count as no difference
        raise fault(component, "differing", f"a {type(differing).__name__}", "a list of names")
    if differing:
        raise SyncError(
            f"After {by} the engine holds other bits than the policy in {listed(differing)}. Sampling would "
            "be off policy without a trace, so the run stops. Report it with `trlx-hybrid env`; another path may serve "
            "meanwhile (HybridConfig.weights)."
        )
    return compared


def sample_probe(engine: Engine, policy: Policy, component: Component) -> tuple[list[int], Completion]:
    """Let the engine sample a completion for a short prompt, with log-probs, which can then be compared with the
    policy's. Collective.

    Args:
        policy: gives the size of the vocabulary, from which the prompt's ids are made.
        component: the component that offers the engine; errors name it.

    Returns:
        The prompt's ids, and the completion.

    Raises:
        ComponentError: the engine failed, or returned something unusable.
    """
    vocabulary = policy.base.config.get_text_config().vocab_size
    length = max(1, min(PROBE_TOKENS, engine.max_model_len // 2))  # a short context still leaves room to sample
    prompt = [(7919 * i + 11) % vocabulary for i in range(1, length + 1)]
    sampling = Sampling(max_tokens=PROBE_TOKENS, logprobs=0, extra={"ignore_eos": True})
    requests = [Request(prompt_ids=prompt, seed=0)]
    sampled = asked(component, engine, "generate", requests, sampling)
    return prompt, component.completions(sampled, requests, sampling)[0]


def check_log_probs(engine: Engine, policy: Policy, prompt: list[int], completion: Completion, allowed: float) -> float:
    """Score the engine's completion with the policy and compare the log-probs. Collective.

    Args:
        allowed: the largest difference that rounding explains, in nats.

    Returns:
        The largest absolute difference, in nats.

    Raises:
        PolicyError: the policy's log-probs are NaN.
        SyncError: the difference exceeds what rounding explains.
    """
    ours = torch.tensor([float("nan") if p[0] is None else p[0] for p in completion.logprobs or []])
    theirs = policy.log_probs(prompt, completion.token_ids)
    if bool(theirs.isnan().any()):
        raise PolicyError(f"The policy's log-probs of a probe sequence are no numbers. {broken(policy)}")
    gap = float((ours - theirs).abs().max())
    if not gap <= allowed:  # a NaN must not pass
        shifts = [(ours[1:], theirs[:-1]), (ours[:-1], theirs[1:])] if len(ours) > 1 else []
        moved = any(float((a - b).abs().max()) <= allowed for a, b in shifts)
        raise SyncError(
            f"Engine and policy disagree by {gap:.3g} nats on a probe sequence after the weight sync "
            f"(allowed: {allowed:g}). {MOVED if moved else _cause(policy)}"
        )
    return gap


MOVED = (
    "They agree when moved by one token: the engine returns with token i the log-prob of another one. "
    "`trlx_hybrid.testing.conformance.check_engine` shows its author more."
)


def _cause(policy: Policy) -> str:
    config = policy.base.config.get_text_config()
    if getattr(config, "attn_logit_softcapping", None) and config._attn_implementation == "sdpa":
        return (
            "The trainer's attention leaves out the soft-capping that the model's config asks for: load the model with "
            "attn_implementation='eager' or 'flash_attention_2' instead of 'sdpa'."
        )
    return (
        "The weights are in place, so the engine computes something else with them: a layer it repacks or derives from "
        "its weights, or another model definition. Report it with `trlx-hybrid env`; the author of another engine "
        "than ours sees more by `trlx_hybrid.testing.conformance.check_engine`."
    )


def allowed_gap(
    engine: Engine, policy: Policy, autocast: torch.dtype, nats: float | None = None
) -> tuple[float, float]:
    """Return how far apart the log-probs of engine and trainer may be. The limit follows from the least precise dtype
    that either of them computes in.

    Args:
        autocast: dtype of the trainer's matrix products.
        nats: the largest difference that the user allows for one token, in nats; None or 0 takes the dtype's default.

    Returns:
        The largest difference of one token's log-probs, in nats, and the share of a batch's tokens that may differ by
        more. If the share is 0, no token may differ by more; otherwise a few tokens may, however small the batch is.
    """
    dtype = coarsest(engine.dtype, *policy.dtypes, autocast)
    default = QUANTIZED_TOLERANCE if engine.quantized else TOLERANCE.get(dtype, max(TOLERANCE.values()))
    exact = dtype is torch.float32 and not engine.quantized
    return nats or default, allowed_share(policy, exact)


def allowed_share(policy: Policy, exact: bool) -> float:
    """Return the share of a batch's tokens whose log-probs may differ by more than the tolerance.

    Args:
        exact: whether neither engine nor trainer rounds to less than float32.
    """
    return EXPERTS_SHARE if policy.has_experts else 0.0 if exact else SHARE


ALIKE = 1e-5
"""The largest difference, in nats, that a token's log-prob may have between two ways of one model to compute it in
fp32."""


def beyond_rounding(policy: Policy, args: TrainingArguments, gap: Tensor) -> str | None:
    """Return a text about two ways of the trainer's model to compute the same log-probs, if they differ by more than
    rounding; None if they agree.

    Args:
        policy: the model.
        args: the trainer's arguments, which say in which dtype it computes.
        gap: (tokens,), absolute differences of the log-probs, in nats.
    """
    dtype = coarsest(policy.dtype, autocast_dtype(args))
    exact = dtype is torch.float32
    allowed, share = ALIKE if exact else TOLERANCE[dtype], allowed_share(policy, exact)
    beyond = int((~(gap <= allowed)).sum())  # a NaN must not pass
    if beyond <= share * gap.numel():
        return None
    return f"differ by up to {float(gap.max()):.3g} nats, {beyond} of {gap.numel()} tokens by more than {allowed:g}"


DRAWING_ADAPTERS = ("peft.tuners.pvera.layer", "peft.tuners.lora.monteclora")
"""Modules of PEFT adapters that draw random numbers in training, whatever their attributes say."""


def noise(module: nn.Module, modules: Iterable[nn.Module] | None = None) -> str | None:
    """Return what makes a module's next forward pass random (dropout, a router's jitter, NEFTune's noise, an adapter
    that draws random numbers), such as "layers.0.dropout.p=0.1"; None where it is deterministic.

    Args:
        modules: the modules in `module.modules()`, where the caller has listed them already.
    """
    for child in modules_of(module) if modules is None else modules:
        if not child.training:
            continue
        held = vars(child)
        names, draws = _noisy(type(child), tuple(held))  # type: ignore[arg-type]
        for key in names:
            value = held[key]
            for each in value.values() if isinstance(value, dict) else (value,):  # one value per adapter
                if isinstance(each, int | float) and each is not True and each > 0:
                    return f"{_name_of(child, module)}.{key}={each}"
        if draws:
            return f"{_name_of(child, module)} ({type(child).__module__}.{type(child).__name__})"
    return None


def _name_of(child: nn.Module, module: nn.Module) -> str:
    name: str = next(name for name, found in module.named_modules() if found is child)
    return name


@functools.lru_cache(1024)
def _noisy(kind: type[nn.Module], names: tuple[str, ...]) -> tuple[list[str], bool]:
    """Return which attributes of a module set amounts of noise, such as a dropout's `p`, and whether its class draws
    random numbers whatever its attributes say. Cached: thousands of modules have a few dozen classes and sets of
    attributes.

    Args:
        kind: the module's class.
        names: names of the module's attributes.
    """
    drops = issubclass(kind, nn.modules.dropout._DropoutNd) or "Dropout" in kind.__name__
    words = ("drop", "jitter", "noise")
    found = [name for name in names if (name == "p" if drops else any(word in name for word in words))]
    return found, kind.__module__.startswith(DRAWING_ADAPTERS)


def disagreement(
    sampled: Tensor, scored: Tensor, mask: Tensor, ids: Tensor, allowed: tuple[float, float]
) -> str | None:
    """Return how the trainer's log-probs of a batch differ from the engine's by more than is allowed, or None. The text
    names the first token whose log-probs differ too much, and the number of such tokens.

    Args:
        sampled: log-probs that the engine sampled with, (B, T) float.
        scored: the trainer's log-probs of the same tokens, (B, T) float.
        mask: (B, T), not 0 where the engine sampled the token.
        ids: token ids, (B, T).
        allowed: (nats, share of tokens), from `allowed_gap`.
    """
    mask, (nats, share) = mask.bool(), allowed
    beyond = mask & ~((sampled - scored).abs() <= nats)  # a NaN must not pass
    number, tokens = int(beyond.sum()), int(mask.sum())
    if number <= (max(FEW, share * tokens) if share else 0):
        return None
    row, token = beyond.nonzero()[0].tolist()
    return (
        f"token {token} of completion {row} (id {int(ids[row, token])}) was sampled at a log-prob of "
        f"{float(sampled[row, token]):.6g}, and the trainer says {float(scored[row, token]):.6g}; {number} of {tokens} "
        f"tokens are more than {nats:g} nats apart, and at most {share:.0%} may be"
    )


def no_numbers(policy: Policy, scored: Tensor, mask: Tensor) -> str | None:
    """Return which of the trainer's log-probs for one batch are NaN and why, or None where none is.

    Args:
        scored: the trainer's log-probs, (B, T) float.
        mask: (B, T), not 0 where the engine sampled the token.
    """
    found = mask.bool() & scored.isnan()
    if not found.any():
        return None
    row, token = found.nonzero()[0].tolist()
    tokens = f"{int(found.sum())} of {int(mask.sum())} tokens, from token {token} of completion {row} on"
    return f"{tokens}. {broken(policy)}"


def broken(policy: Policy) -> str:
    """Return sentences for an error message: why a policy computes NaN (it has NaN or infinite weights, or the forward
    pass overflows), and what to do."""
    names = policy.not_finite()
    if not names:
        return (
            "The weights that this rank holds are finite, so the forward pass overflows, as float16 does soon: train "
            "in bfloat16 or float32."
        )
    return (
        f"There are NaN or infinite weights in {listed(names)}. An optimizer step wrote them: look for the first "
        "`grad_norm` that is nan. Resume from a checkpoint before it, with a smaller learning rate, and in bfloat16 "
        "or float32 rather than float16."
    )


Item = TypeVar("Item")


class Rotation:
    """A cursor that takes the next `count` items of a list at each call, and goes on from the list's start after its
    end, so that all items are checked in turn.

    Ranks that call it the same number of times take the same items.
    """

    def __init__(self, count: int = SAMPLED_TENSORS) -> None:
        self._count, self._next = count, 0

    def take(self, items: Sequence[Item]) -> list[Item]:
        """Return the next items in turn: as many as the constructor's `count`, or all if there are fewer. Each call
        goes on after the last item of the previous call, and from the end to the start."""
        if not items:
            return []
        start = self._next % len(items)
        self._next = start + self._count
        return [items[(start + i) % len(items)] for i in range(min(self._count, len(items)))]


def sampled_names(names: list[str], version: int, count: int = SAMPLED_TENSORS) -> set[str]:
    """Choose the tensors to check after a sync: `count` neighbours in the list of names, or all if it is shorter.

    They begin at the fraction (version * golden ratio) modulo 1 of the list. These fractions spread evenly, however
    many weight versions lie between two syncs, so that after enough syncs every tensor has been checked.
    """
    start = int(len(names) * (version * GOLDEN % 1))
    return {names[(start + i) % len(names)] for i in range(min(count, len(names)))}
