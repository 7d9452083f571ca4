"""Packing of rows: concatenation without padding into one sequence, and the check of which models allow it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.utils.generic import is_flash_attention_requested
from trlx_hybrid.policy.policy import layer_kinds
from trlx_hybrid.policy.positions import takes_positions

from .attention import kernel_on, kernel_takes, loaded_with
from .micro_batches import PADDING, RowLengths
from .prefixes import of_prompts, of_trie

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel
    from trlx_hybrid.contract.protocols import Run
    from trlx_hybrid.policy.policy import Policy

IGNORED = -100
"""The label of a position that is not scored."""


WINDOW = "sliding_attention"
"""The kind of layers whose tokens see a number of tokens only."""

KERNEL = "torch's kernel for ragged rows"
"""The name of `varlen_attn`, in lines that are printed."""

FILLERS = 16
"""The number of rows that fill a pack up: none of them may be longer than the longest row that its sizes allow."""

ROOM = 1.25
"""Factor by which the sizes of `Sizes.with_room` exceed those of a pack."""

STEP = 64
"""Sizes with room are multiples of this number of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of a pack, of which its shapes follow.

    Attributes:
        tokens: the number of tokens of the sequence.
        rows: the number of rows.
        longest: the number of tokens of the longest row, with its prompt.
        copied: the number of tokens by which whole rows are more than the sequence: the copies of shared prompts.
        shared: the number of the sequence's tokens that are copied.
        copies: how often the most shared prompt is copied.
    """

    tokens: int
    rows: int
    longest: int
    copied: int
    shared: int
    copies: int

    def with_room(self) -> Sizes:
        """Return larger sizes, which a pack of the next rollout is likely to fit into, too."""

        def larger(size: int) -> int:
            return -(-int(size * ROOM) // STEP) * STEP

        more = {name: larger(getattr(self, name)) for name in ("tokens", "longest", "copied", "shared")}
        return replace(self, **more)

    def holds(self, pack: Sizes) -> bool:
        """Return whether a pack of other sizes can be filled up to these."""
        fits = all(getattr(pack, name) <= getattr(self, name) for name in Sizes.__slots__)
        return fits and self.tokens - pack.tokens <= FILLERS * self.longest


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """A sequence of N tokens that contains b rows (prompt and completion) without their padding, one after the other.

    A prompt that several rows have stands in the sequence once, except for its last token. The first row with such a
    prompt is whole. The other rows begin at the prompt's last token: each row needs its own copy of this token, because
    the token's label is the first token of the row's completion. In a trie, rows also share parts of prompts, and a
    prompt that begins with another row's completion shares this, too (`prefixes.of_trie`).

    Attributes:
        input_ids: (1, N) int64.
        position_ids: (1, N) int64, from 0 in each row.
        labels: (1, N) int64, the token that follows, if it belongs to a completion; else `IGNORED`.
        lengths: the number of tokens of each row.
        segments: for each row, how many of its tokens stand in the sequence; N in all.
        prefixes: for each row, the number of the row that begins with its other tokens, and the number of these tokens.
            For a whole row, its own number and 0.
        ends: (b + 1,) int32, the cumulative sum of `segments`, from 0.
        whole_ends: (b + 1,) int32, the cumulative sum of `lengths`, from 0.
        places: (N,) int64, for each token of the sequence its index in the padded rows, (b, width), flattened.
        width: P + C, the padded length of a row: P columns for the prompt and C for the completion.
        completion_length: C.
        fillers: the number of rows at the end that only fill the sequence up. Their tokens have no places.
        trie: whether rows share more than whole prompts.
    """

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    lengths: list[int]
    segments: tuple[int, ...]
    prefixes: tuple[tuple[int, int], ...]
    ends: Tensor
    whole_ends: Tensor
    places: Tensor
    width: int
    completion_length: int
    fillers: int = 0
    trie: bool = False

    @classmethod
    def of(
        cls,
        input_ids: Tensor,
        attention_mask: Tensor,
        completion_length: int,
        shared_below: float = 0.0,
        trie_below: Callable[[int], float] | None = None,
    ) -> Pack | None:
        """Pack rows of prompt and completion into one sequence.

        Args:
            input_ids: (b, P + C) int64, with padding: P columns of prompt and C of completion.
            attention_mask: (b, P + C), 0 at padding.
            completion_length: C.
            shared_below: a fraction. A prompt that several rows have is computed once, if that brings the token count
                below this fraction of the count without sharing. 0: never.
            trie_below: returns a fraction, from the token count with whole prompts shared. Rows share whatever their
                prompts begin with, if that brings the token count below this fraction of it. None: never.

        Returns:
            The pack; None where a prompt is empty, because its completion's first token would follow another row's
                last.
        """
        whole = attention_mask.bool()
        first = whole.shape[1] - completion_length
        ids = input_ids.masked_fill(~whole, PADDING)
        read = ids if trie_below is not None else torch.cat([ids[:, :first], whole.sum(1, keepdim=True)], dim=1)
        read = read.cpu()  # the only wait for the device
        prompts = read[:, :first]
        lengths = (read != PADDING).sum(1).tolist() if trie_below is not None else read[:, -1].tolist()
        if first == 0 or bool((prompts[:, -1] == PADDING).any()):
            return None
        prefixes = of_prompts(RowLengths.of(prompts, lengths), shared_below)
        trie = False
        tokens = sum(lengths) - sum(shared for _, shared in prefixes)
        limit = 0.0 if trie_below is None else trie_below(tokens) * tokens
        in_prompts = (prompts != PADDING).sum(1).tolist()
        if sum(lengths) - sum(in_prompts) + len(lengths) < limit:  # else no trie can save as much
            rows = [row[row != PADDING] for row in read.to(torch.int32).numpy()]
            found = of_trie(rows, in_prompts)
            trie = sum(lengths) - sum(shared for _, shared in found) < limit
            prefixes = found if trie else prefixes
        mask, positions = whole, whole.cumsum(1) - 1
        if any(tokens for _, tokens in prefixes):
            elsewhere = torch.tensor([tokens for _, tokens in prefixes]).to(whole.device, non_blocking=True)
            mask = whole & (positions >= elsewhere[:, None])
        scored = whole.clone()
        scored[:, :first] = False
        following = input_ids.roll(-1, dims=1).masked_fill(~scored.roll(-1, dims=1), IGNORED)
        segments = tuple(n - tokens for n, (_, tokens) in zip(lengths, prefixes, strict=True))
        places = torch.nonzero_static(mask.flatten(), size=sum(segments))[:, 0]
        return cls(
            input_ids=input_ids.flatten()[places][None],
            position_ids=positions.flatten()[places][None],
            labels=following.flatten()[places][None],
            lengths=lengths,
            segments=segments,
            prefixes=prefixes,
            ends=_ends(mask),
            whole_ends=_ends(whole),
            places=places,
            width=whole.shape[1],
            completion_length=completion_length,
            trie=trie,
        )

    @property
    def inputs(self) -> dict[str, Any]:
        """The keyword arguments for the model's forward: the packed tokens, their positions, and where rows begin and
        end, in the form that flash attention takes."""
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "cu_seq_lens_q": self.ends,
            "cu_seq_lens_k": self.whole_ends,
            "max_length_q": max(self.segments),
            "max_length_k": max(self.lengths),
        }

    @property
    def sizes(self) -> Sizes:
        """The sizes of the pack."""
        copies = Counter(prefix for prefix in self.prefixes if prefix[1])
        return Sizes(
            tokens=sum(self.segments),
            rows=len(self.segments),
            longest=max(self.lengths),
            copied=sum(self.lengths) - sum(self.segments),
            shared=sum(tokens for _, tokens in copies),
            copies=max(copies.values(), default=0),
        )

    def filled(self, sizes: Sizes) -> Pack:
        """Return the pack with more rows behind its own, of which no label is scored, so that it has `sizes`. It has
        `FILLERS` more rows than `sizes` say.

        Args:
            sizes: sizes that hold this pack's.
        """
        tokens, device = sizes.tokens - sum(self.segments), self.ends.device
        added = [
            *[0] * (sizes.rows - len(self.segments)),
            *(len(range(part, tokens, FILLERS)) for part in range(FILLERS)),
        ]
        first, positions = len(self.segments), [place for length in added for place in range(length)]
        ends = torch.tensor(list(accumulate(added)), dtype=torch.int32).to(device, non_blocking=True)
        return replace(
            self,
            input_ids=nn.functional.pad(self.input_ids, (0, tokens)),
            position_ids=torch.cat([self.position_ids, torch.tensor([positions]).to(device, non_blocking=True)], dim=1),
            labels=nn.functional.pad(self.labels, (0, tokens), value=IGNORED),
            lengths=[*self.lengths, *added],
            segments=(*self.segments, *added),
            prefixes=(*self.prefixes, *((row, 0) for row in range(first, first + len(added)))),
            ends=torch.cat([self.ends, self.ends[-1:] + ends]),
            whole_ends=torch.cat([self.whole_ends, self.whole_ends[-1:] + ends]),
            fillers=len(added),
        )

    def rows(self, scores: Tensor) -> Tensor:
        """Return scores of the sequence's tokens as one line per row: (b, C), for b rows and one score per completion
        token, 0 where a row has no token. Rows that only fill the sequence up are left out.

        Args:
            scores: (1, N), one score (such as a log-prob) per position of the sequence, for the token that follows it.
        """
        rows, placed = len(self.lengths) - self.fillers, scores[0, : len(self.places)]
        grid = scores.new_zeros(rows * self.width).index_copy(0, self.places, placed)
        return grid.view(-1, self.width)[:, -self.completion_length - 1 : -1]


def _ends(mask: Tensor) -> Tensor:
    ends = torch.zeros(len(mask) + 1, dtype=torch.int32, device=mask.device)
    ends[1:] = mask.sum(1).cumsum(0)
    return ends


def refused(policy: Policy, args: Any) -> str | None:
    """Return why the rows of a run cannot be packed into one sequence without padding, or None if they can.

    Args:
        args: TRL's config.
    """
    model: Any = policy.base
    config = model.config
    adapter = getattr(policy.module, "active_peft_config", None) if policy.adapters else None
    for reason, holds in {
        "it takes images": config.get_text_config() is not config,
        "it keeps a state from token to token (state-space or recurrent layers)": getattr(model, "_is_stateful", False),
        "its adapter puts tokens before the prompt": adapter is not None and adapter.is_prompt_learning,
        "its adapter begins at tokens of each row (aLoRA)": bool(getattr(adapter, "alora_invocation_tokens", None)),
        "torch_compile would compile it anew for every length": getattr(args, "torch_compile", False),
        "NEFTune's noise depends on how long a batch is": getattr(args, "neftune_noise_alpha", None) is not None,
        "continuous batching chooses another attention": getattr(args, "use_transformers_continuous_batching", False),
        "its attention cannot be chosen": not getattr(type(model), "_supports_attention_backend", False),
    }.items():
        if holds:
            return reason
    return _refused_layers(model, config)


def _refused_layers(model: PreTrainedModel, config: PretrainedConfig) -> str | None:
    others = sorted(layer_kinds(config) - {"full_attention", WINDOW})
    if others:
        return f"its layers are {' and '.join(others)}"
    if any(name.rpartition(".")[2] == "sinks" for name, _ in model.named_parameters()):
        return "its attention has sinks"
    if not takes_positions(model):
        return "it takes no positions, which begin anew in each row"
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind in ("dynamic", "longrope"):
        return f"its {kind} positions depend on how long a batch is"
    name = loaded_with(model)
    if name != "sdpa" and not is_flash_attention_requested(config):
        return f"attn_implementation={name!r} takes no packed rows; 'sdpa' and flash attention do"
    return None


def windows_of(config: PretrainedConfig) -> list[int | None] | None:
    """Return the sliding window of each layer's attention, in tokens, None where it has none; None as a whole where no
    layer has one.

    Args:
        config: the config of a language model.
    """
    kinds = layer_kinds(config)
    if WINDOW not in kinds:
        return None
    of_layers = getattr(config, "layer_types", None) or [WINDOW] * config.num_hidden_layers
    return [config.sliding_window if kind == WINDOW else None for kind in of_layers]


def attention_name(session: Run) -> str:
    """Return a name of the implementation that computes the attention of packed rows. The name is for a line that is
    printed when the run starts."""
    name = loaded_with(session.policy.base)
    if name != "sdpa":
        return name
    policy, args = session.policy, session.args
    half = args.bf16 or args.fp16 or policy.dtype in (torch.bfloat16, torch.float16)
    fits = kernel_takes(*head_sizes(policy.base.config.get_text_config()))
    return KERNEL if half and fits and kernel_on(policy.device) else "sdpa, row by row"


def head_sizes(config: PretrainedConfig) -> tuple[int, int]:
    """Return the size of a query head and of a value head, read from the config of a language model."""
    known = getattr(config, "qk_head_dim", None) or getattr(config, "head_dim", None)
    size = known or config.hidden_size // config.num_attention_heads
    return size, getattr(config, "v_head_dim", None) or size


def takes_prefixes(session: Run) -> bool:
    """Return whether packed rows may share a prompt. Only this plugin's attention can do that, which models loaded with
    "sdpa" use; transformers' flash attention needs whole rows."""
    return loaded_with(session.policy.base) == "sdpa"
