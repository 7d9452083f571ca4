"""The conformance check of plugins that compute advantages, with batches as they occur in training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ...errors import PluginError
from ...trl.rewards import replaced
from .findings import ConformanceError, require

if TYPE_CHECKING:
    from torch import Tensor

    from ...interprocess.ranks import Ranks

GROUPS = 2


def check_advantages(trainer: Any) -> None:
    """Call the hook `trlx_advantages` of a trainer's plugins with batches as they occur in training, and check the
    advantages.

    The rewards differ, or are all equal; in some batches a row has no reward, or a part of the rows belongs to another
    rank.

    Args:
        trainer: a GRPO or RLOO trainer of `trlx_hybrid` with the plugin. It need not have trained.

    Raises:
        ConformanceError: the advantages are unusable for training or belong to other rows than this rank's, or the
            plugin wrote into the batch.
    """
    plugin = trainer.session.advantages_plugin
    require(
        plugin is not None,
        "No plugin of this trainer has the hook trlx_advantages.",
        "Install it, or hand it over: GRPOTrainer(..., plugins=[...]).",
    )
    size = trainer.num_generations
    rows, functions = GROUPS * size, max(1, len(trainer.reward_funcs))
    spread = torch.linspace(0.0, 1.0, rows)[:, None].expand(rows, functions).clone()
    require(
        _given(trainer, spread, "rewards that differ") is not None,
        "trlx_advantages kept TRL's advantages in training, with rewards that differ.",
        "Return a tensor where session.training; None keeps TRL's.",
    )
    _given(trainer, torch.ones(rows, functions), "rewards that are all alike")
    torn = spread.clone()
    torn[1] = float("nan")
    _given(trainer, torn, "a row without any reward")
    others = torch.full((rows, functions), 0.5)
    with _second_of_two(trainer.session.ranks):
        half = torch.cat([others[: size // 2], spread[: size - size // 2]])
        _given(trainer, half, "a group that lies on two ranks", rows=size - size // 2)
        ours = [torch.cat([others, rewards]) for rewards in (spread, spread.flip(0))]
        one, other = (_given(trainer, rewards, "rewards of two ranks, seen from the second") for rewards in ours)
    if one is not None and other is not None:
        require(
            not torch.equal(one, other),
            "trlx_advantages: on the second of two ranks, other rewards of its own rows changed none of them.",
            "batch['rewards_per_func'] has the rows of all ranks: this rank's B begin at session.ranks.rank * B.",
        )


@contextmanager
def _second_of_two(ranks: Ranks) -> Iterator[None]:
    """A context in which `ranks` says that this process is the second of two."""
    before = ranks.rank, ranks.world
    ranks.rank, ranks.world = 1, 2
    try:
        yield
    finally:
        ranks.rank, ranks.world = before


def _given(trainer: Any, rewards: Tensor, what: str, rows: int | None = None) -> Tensor | None:
    """Call the hook `trlx_advantages` of the trainer's plugins with some rewards and a batch made up for them. Returns
    its advantages, of shape (B,); None if the plugin left TRL's advantages as they are.

    Args:
        trainer: the checked trainer.
        rewards: rewards of shape (ranks * B, functions), those of this rank last.
        what: what is special about the rewards, for messages.
        rows: B, the number of this rank's rows; by default 2 * `num_generations`, the rows of two prompts.

    Raises:
        ConformanceError: the advantages are unusable, or the plugin wrote into the batch.
    """
    rows, tokens = rows or GROUPS * trainer.num_generations, 4
    stock = rewards[-rows:].nan_to_num().sum(dim=1)
    batch = {
        "prompt_ids": torch.ones(rows, 3, dtype=torch.long),
        "prompt_mask": torch.ones(rows, 3, dtype=torch.long),
        "completion_ids": torch.ones(rows, tokens, dtype=torch.long),
        "completion_mask": torch.ones(rows, tokens, dtype=torch.long),
        "advantages": stock - stock.mean(),
    }
    kept = {name: tensor.clone() for name, tensor in batch.items()}
    given = rewards.clone()
    try:
        advantages = replaced(trainer.session, batch, given)
    except PluginError as error:
        raise ConformanceError(f"With {what}: {error}") from error
    touched = [name for name, tensor in kept.items() if not torch.equal(tensor, batch[name])]
    touched += [] if torch.equal(given.nan_to_num(), rewards.nan_to_num()) else ["rewards_per_func"]
    require(
        not touched,
        f"trlx_advantages, with {what}: it wrote into the batch's {', '.join(touched)}.",
        "Return a new tensor: what it was given is TRL's, and is trained on.",
    )
    return None if advantages is batch["advantages"] else advantages
