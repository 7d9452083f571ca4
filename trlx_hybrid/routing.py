"""Router replay: the trainer computes each token with the experts that the engine chose for it.

Engine and trainer round differently, so where two experts are nearly equally probable they choose different ones. The
trainer then learns from log-probs of another function than the one that was sampled from. With router replay, the
trainer uses the engine's choice. The weights of the chosen experts come from the trainer's own router, which therefore
still gets its gradients.

Source: Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers",
arXiv:2510.11370.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from .errors import ComponentError, ConfigError

if TYPE_CHECKING:
    import numpy.typing as npt

EXPERTS = "experts"
"""The key in a batch for the experts that the engine chose for each token: (B, P + C, layers, experts per token) int16,
for P prompt and C completion positions; -1 where unknown."""

DIFFERENCE = "hybrid/router_difference"
"""The metric: share of the experts that the trainer would have chosen but the engine did not choose."""

ROUTERS = (
    "MixtralTopKRouter",
    "OlmoeTopKRouter",
    "Qwen2MoeTopKRouter",
    "Qwen3MoeTopKRouter",
    "Qwen3NextTopKRouter",
    "Qwen3_5MoeTopKRouter",
)
"""Classes of routers in transformers that are supported: they return logits, weights and indices, with weights from a
softmax over all experts."""

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class RouterReplay:
    """A set of hooks on a model's MoE routers that make them use the experts which the engine chose, within
    `replaying`.

    Args:
        model: transformers' model, with its adapters if any.

    Raises:
        ConfigError: the model has no experts, or a router that is not known.
    """

    def __init__(self, model: nn.Module) -> None:
        routers = routers_of(model)
        self._given: Tensor | None = None  # (N, layers, experts per token), for the next passes
        self._trained: Tensor | None = None  # for the last pass with gradients, whose layers may be recomputed
        self._places: Counter[int] = Counter()  # number of tokens that each layer has computed
        self._counts: list[Tensor] = []  # (2,) each: number of differing experts, and of all
        self._hooks = [router.register_forward_hook(self._hook(layer)) for layer, router in routers.items()]

    @contextmanager
    def replaying(self, experts: Tensor) -> Iterator[None]:
        """Return a context in which the model's forward passes use given experts. The passes may have any shape, but
        must compute each token once, in the order of `experts`.

        Args:
            experts: (…, layers, experts per token) int16, -1 where the model chooses.
        """
        self._given = experts.flatten(0, -3)
        self._places.clear()
        if torch.is_grad_enabled():
            self._trained = self._given
        try:
            yield
        finally:
            self._given = None

    def difference(self) -> Tensor:
        """Return two counts since the last call, as (2,) float: how many experts of the trainer's own choice the engine
        had not chosen, and how many experts were compared. The tensor is empty where none were compared."""
        counts, self._counts = self._counts, []
        return torch.stack(counts).sum(0) if counts else torch.zeros(0)

    def close(self) -> None:
        """Remove the hooks from the model, and forget the given experts."""
        for hook in self._hooks:
            hook.remove()
        self._given = self._trained = None

    def _hook(self, layer: int) -> Any:
        def replace(router: Any, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...] | None:
            logits, weights, own = output
            again = torch._C._current_graph_task_id() != -1  # in a backward pass: a checkpointed layer is recomputed
            given = self._again(len(own)) if again else self._next(layer, len(own))
            if given is None:
                return None
            chosen = given[:, layer].to(own.dtype)
            known = (chosen >= 0).all(1, keepdim=True)
            shared = (own[:, :, None] == chosen[:, None, :]).any(2)
            indices = torch.where(known & ~shared.all(1, keepdim=True), chosen, own)  # equal sets: the model's order
            if not again:
                self._counts.append(torch.stack([(known & ~shared).sum(), known.sum() * own.shape[1]]).float())
            taken = torch.softmax(logits, dim=-1, dtype=torch.float).gather(1, indices)
            if getattr(router, "norm_topk_prob", True):
                taken = taken / taken.sum(dim=-1, keepdim=True)
            return logits, taken.to(weights.dtype), indices

        return replace

    def _next(self, layer: int, tokens: int) -> Tensor | None:
        if self._given is None:
            return None
        start = self._places[layer]
        self._places[layer] += tokens
        return self._fitting(self._given[start : start + tokens], tokens)

    def _again(self, tokens: int) -> Tensor | None:
        return None if self._trained is None else self._fitting(self._trained, tokens)

    @staticmethod
    def _fitting(given: Tensor, tokens: int) -> Tensor:
        if len(given) != tokens:
            raise ComponentError(
                f"A forward pass computes {tokens} tokens, and router replay has the experts of {len(given)}. What "
                "scores must compute each token that it was given once. Leave HybridConfig.router_replay out."
            )
        return given


def routers_of(model: nn.Module) -> dict[int, nn.Module]:
    """Return the MoE routers of a model, by layer number.

    Raises:
        ConfigError: the model has none of the router classes in ROUTERS.
    """
    found: dict[int, nn.Module] = {}
    for name, module in model.named_modules():
        layer = LAYER.search(name)
        if layer is not None and any(base.__name__ in ROUTERS for base in type(module).__mro__):
            found[int(layer[1])] = module
    if not found:
        raise ConfigError(
            f"HybridConfig.router_replay: {type(model).__name__} has no router that is known. Known are "
            f"{', '.join(ROUTERS)}. Leave router_replay out."
        )
    return found


def aligned(experts: Sequence[npt.NDArray[np.int16]], prompt_mask: Tensor, width: int) -> Tensor:
    """Return the experts of a rollout's tokens as one tensor, at the positions where TRL puts the tokens in its padded
    batch.

    Args:
        experts: for each row, the experts of its tokens without padding, (tokens, layers, experts per token) int16.
        prompt_mask: (B, P), 0 where padded, which is at the left.
        width: P + C, the length of the padded rows.

    Returns:
        (B, P + C, layers, experts per token) int16 on the mask's device, -1 elsewhere.

    Raises:
        ComponentError: there are experts for another number of rows.
    """
    if len(experts) != len(prompt_mask):
        raise ComponentError(
            f"The rollout brought the experts of {len(experts)} completions for {len(prompt_mask)} rows, so that "
            "router replay cannot tell whose they are. Leave HybridConfig.router_replay out."
        )
    rows = np.full((len(experts), width, *experts[0].shape[1:]), -1, np.int16)
    for row, own, start in zip(rows, experts, (prompt_mask == 0).sum(1).tolist(), strict=True):
        row[start : start + len(own)] = own
    return torch.from_numpy(rows).to(prompt_mask.device)


def experts_of(micro_batch: dict[str, Any]) -> Tensor:
    """Return the experts that the tokens of a micro-batch were routed to when they were sampled, (b, P + C, layers,
    experts per token) int16, for P prompt and C completion positions; -1 where unknown.

    Raises:
        ConfigError: the micro-batch has none.
    """
    experts: Tensor | None = micro_batch.get(EXPERTS)
    if experts is None:
        raise ConfigError(
            "HybridConfig.router_replay: this batch has no experts. It was recorded without router_replay, or a class "
            "of yours has made it anew: leave router_replay out."
        )
    return experts
