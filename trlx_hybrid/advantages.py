"""What decides the advantages of a batch, beside TRL: rows that count for nothing, and a plugin's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .session import Session

HOOK = "trlx_advantages"


def without_masked(rewards: Tensor, loss_mask: Sequence[Sequence[int]] | None, session: Session) -> Tensor:
    """The rewards of a batch, NaN in rows of which no token is trained, as those of conversations that broke off.

    TRL takes a row without any reward for unscorable: it leaves it out of its group's mean and deviation, and gives it
    no advantage. What a broken conversation happens to score would else move its neighbours' advantages. Collective.

    Args:
        rewards: (world * B, functions), of all ranks.
        loss_mask: of this rank's B rows; None where every token is trained.
    """
    if loss_mask is None:
        return rewards
    masked = [row for rows in session.ranks.gather([not any(mask) for mask in loss_mask]) for row in rows]
    return rewards.masked_fill(torch.tensor(masked, device=rewards.device)[:, None], torch.nan)


def replaced(session: Session, batch: Mapping[str, Any], rewards: Tensor | None) -> Tensor:
    """The plugin's advantages where there is one and it answers, else TRL's.

    Args:
        batch: what TRL trains on, this rank's rows.
        rewards: (world * B, functions), of all ranks.

    Raises:
        PluginError: the plugin returned something else than finite numbers in the shape of TRL's advantages.
    """
    stock: Tensor = batch["advantages"]
    advantages = session.host.call(HOOK, session=session, batch={**batch, "rewards_per_func": rewards})
    if advantages is None:
        return stock
    problem = None
    if not isinstance(advantages, Tensor):
        problem = f"a {type(advantages).__name__} where a tensor was expected"
    elif advantages.shape != stock.shape:
        problem = f"a tensor of shape {tuple(advantages.shape)} where {tuple(stock.shape)} was expected"
    elif not advantages.isfinite().all():
        row = int((~advantages.isfinite()).nonzero()[0, 0])
        problem = f"{advantages[row].item()} for row {row}"
    if problem is not None:
        plugin = session.host.only(HOOK)
        assert plugin is not None
        raise session.host.fault(plugin, HOOK, TypeError(f"it returned {problem}"))
    replacement: Tensor = advantages.to(stock)
    return replacement
