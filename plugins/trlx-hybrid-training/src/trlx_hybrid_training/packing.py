"""Rows without their padding, one behind the other; and which models can be scored so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.utils.generic import is_flash_attention_requested

from .attention import kernel_on

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from trlx_hybrid.protocols import Run

IGNORED = -100
"""The label of a position that is not scored."""


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """Rows as one sequence of N real tokens.

    Attributes:
        input_ids, position_ids, labels: (1, N) int64; positions begin at 0 in each row, labels are the tokens that
            follow, where they belong to a completion.
        ends: (b + 1,) int32, where each row ends, from 0.
        lengths: of each row.
        mask: (b, P + C) bool, where the tokens stood.
        completion_length: C.
    """

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    ends: Tensor
    lengths: list[int]
    mask: Tensor
    completion_length: int

    @classmethod
    def of(cls, input_ids: Tensor, attention_mask: Tensor, completion_length: int) -> Pack | None:
        """Arguments as in `Rows`. None where a prompt is empty: its completion's first token would follow another
        row's last."""
        mask = attention_mask.bool()
        first = mask.shape[1] - completion_length
        *lengths, prompts = torch.cat([mask.sum(1), mask[:, first - 1].all()[None]]).tolist()
        if not prompts or first == 0:
            return None
        scored = mask.clone()
        scored[:, :first] = False
        following = input_ids.roll(-1, dims=1).masked_fill(~scored.roll(-1, dims=1), IGNORED)
        ends = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=mask.device)
        ends[1:] = mask.sum(1).cumsum(0)
        real = mask.flatten().nonzero()[:, 0]  # once: each waits for the device
        return cls(
            input_ids=input_ids.flatten()[real][None],
            position_ids=(mask.cumsum(1) - 1).flatten()[real][None],
            labels=following.flatten()[real][None],
            ends=ends,
            lengths=[int(length) for length in lengths],
            mask=mask,
            completion_length=completion_length,
        )

    @property
    def inputs(self) -> dict[str, Any]:
        """What the model takes: its own arguments, those of flash attention, and the lengths for ours."""
        longest = max(self.lengths)
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "cu_seq_lens_q": self.ends,
            "cu_seq_lens_k": self.ends,
            "max_length_q": longest,
            "max_length_k": longest,
        }

    def rows(self, scores: Tensor) -> Tensor:
        """Scores of (1, N) as (b, C), 0 where nothing was scored."""
        grid = scores.new_zeros(self.mask.shape).masked_scatter(self.mask, scores)
        return grid[:, -self.completion_length - 1 : -1]


def equal_tokens(tokens: Sequence[int], count: int) -> list[list[int]]:
    """Rows in `count` groups of equally many, the sums of their tokens close together: the longest first, each into the
    group that has the fewest tokens and still has room.

    Args:
        tokens: of each row; as many rows as `count` divides.

    Returns:
        Row numbers, ascending within each group.
    """
    size = len(tokens) // count
    groups: list[list[int]] = [[] for _ in range(count)]
    sums = [0] * count
    for row in sorted(range(len(tokens)), key=lambda row: (-tokens[row], row)):
        group = min((g for g in range(count) if len(groups[g]) < size), key=lambda g: sums[g])
        groups[group].append(row)
        sums[group] += tokens[row]
    return [sorted(group) for group in groups]


def refused(session: Run) -> str | None:
    """Why this run's rows cannot be packed, or None."""
    policy, args = session.policy, session.args
    model: Any = policy.base
    config = model.config
    adapter = getattr(policy.module, "active_peft_config", None) if policy.adapters else None
    for reason, holds in {
        "it takes images": config.get_text_config() is not config,
        "it keeps a state from token to token (state-space or recurrent layers)": getattr(model, "_is_stateful", False),
        "its adapter puts tokens before the prompt": adapter is not None and adapter.is_prompt_learning,
        "torch_compile would compile it anew for every length": getattr(args, "torch_compile", False),
        "continuous batching chooses another attention": getattr(args, "use_transformers_continuous_batching", False),
        "its attention cannot be chosen": not getattr(type(model), "_supports_attention_backend", False),
    }.items():
        if holds:
            return reason
    return _refused_layers(model, config)


def _refused_layers(model: PreTrainedModel, config: Any) -> str | None:
    kinds = set(getattr(config, "layer_types", None) or ())
    windows = not kinds and getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    others = sorted(kinds - {"full_attention"}) or (["sliding_attention"] if windows else [])
    if others:
        return f"its layers are {' and '.join(others)}"
    if any(name.rpartition(".")[2] == "sinks" for name, _ in model.named_parameters()):
        return "its attention has sinks"
    rotary = getattr(config, "rope_parameters", None)
    if not rotary:
        return "its positions are not rotary, so that padding shifts them"
    kind = rotary.get("rope_type", "default")
    if kind in ("dynamic", "longrope"):
        return f"its {kind} positions depend on how long a batch is"
    name = config._attn_implementation
    if name != "sdpa" and not is_flash_attention_requested(config):
        return f"attn_implementation={name!r} takes no packed rows; 'sdpa' and flash attention do"
    return None


def attention_name(session: Run) -> str:
    """What computes the attention of packed rows, for a reader."""
    name: str = session.policy.base.config._attn_implementation
    if name != "sdpa":
        return name
    policy, args = session.policy, session.args
    half = args.bf16 or args.fp16 or policy.dtype in (torch.bfloat16, torch.float16)
    return "torch's kernel for ragged rows" if half and kernel_on(policy.device) else "sdpa, row by row"
