"""A check of the first optimizer steps: how far they move the weights, against what the learning rate allows."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from .policy import local

STEPS = 4
"""Number of optimizer steps that are checked; more than one, since fused AdamW computes its first step in float32
whatever dtype it stores."""

ELEMENTS = 4096
"""Number of elements of each tensor that are checked, spread evenly over it."""

FACTOR = 100.0
"""The largest accepted move of a weight, in units of the learning rate (times the largest gradient, if that is above
1). Adam's first steps move a weight by its learning rate, RMSprop's by 10 times that, SGD's by the gradient times the
learning rate."""

SHARE = 1e-3
"""The share of the checked elements that may move further than FACTOR allows. Optimizers that bound the mean square of
a step by the learning rate (Adafactor, Muon) move at most a ten-thousandth of the elements by more than 100 times as
much."""


class StepSizes:
    """A check that compares a sample of the weights before and after each of the first optimizer steps."""

    def __init__(self) -> None:
        self._left = STEPS
        self._before: dict[str, Tensor] = {}
        self._rate, self._gradient = 0.0, 1.0

    @property
    def over(self) -> bool:
        """True once all steps that are to be checked were checked."""
        return self._left == 0

    def begins(self, trained: Mapping[str, nn.Parameter], rate: float) -> None:
        """Keep a sample of the weights from before a step.

        Args:
            trained: the parameters that the optimizer updates, by name.
            rate: the largest learning rate of the step.
        """
        self._before, self._rate = {}, rate
        if not self.over:
            self._before = {name: _sampled(local(p)).clone() for name, p in trained.items() if p.is_floating_point()}

    @torch.no_grad()
    def ended(self, trained: Mapping[str, nn.Parameter]) -> str | None:
        """Return how far the step that has ended moved the weights where that is too far, as the end of an error
        message; else None. Arguments as for `begins`."""
        before, self._before = self._before, {}
        if not before:
            return None
        self._left -= 1
        grads = [_sampled(g.detach()).abs().max().float() for g in map(_gradient, trained.values()) if g is not None]
        self._gradient = max([self._gradient, *(float(g) for g in grads)])
        if any(not bool(g.isfinite()) for g in grads):
            return None  # then the weights are not finite either, which another check reports
        limit, beyond, furthest = FACTOR * self._rate * self._gradient, 0, (0.0, "")
        for name, old in before.items():
            info = torch.finfo(old.dtype)
            moved = (_sampled(local(trained[name])).float() - old.float()).abs()
            far = ~(moved <= limit + 2 * info.eps * (old.float().abs() + info.tiny))  # a NaN must not pass
            if bool(far.any()):
                beyond += int(far.sum())
                furthest = max(furthest, (float(moved.nan_to_num(torch.inf).max()), name))
        share = beyond / sum(map(Tensor.numel, before.values()))
        if share <= SHARE:
            return None
        largest, name = furthest
        return (
            f"{share:.1%} of those that were looked at by more than {FACTOR:g} times its {self._rate:g}, up to "
            f"{largest:.3g} in {name}"
        )


def _sampled(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1)
    return flat[:: max(1, flat.numel() // ELEMENTS)]


def _gradient(p: nn.Parameter) -> Tensor | None:
    gradient: Tensor | None = getattr(p.grad, "_local_tensor", p.grad)
    return gradient if gradient is not None and gradient.numel() else None
