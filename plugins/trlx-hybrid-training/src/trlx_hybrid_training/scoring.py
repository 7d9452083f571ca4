"""The component `scoring="packed"`: computes log-probs of rows without padding.

The first rows are also scored with padding, and the log-probs are compared; if they differ by more than rounding
explains, all rows stay padded.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from trlx_hybrid.contract.protocols import Rows, Scores, Scoring
from trlx_hybrid.policy.policy import evaluating
from trlx_hybrid.rollout.seeding import preserved_generators
from trlx_hybrid.versions import release_of
from trlx_hybrid.weights.verify import beyond_rounding

from . import attention
from .layer_graphs import LayerGraphs
from .layer_memory import LayerBytes
from .micro_batches import WORTH, RowLengths, equal_tokens, fewest_tokens
from .options import TrainingOptions
from .packing import IGNORED, Pack, attention_name, refused, takes_prefixes, windows_of
from .recomputation import Recomputation

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from trlx_hybrid.contract.protocols import Run

    from .options import PackedOptions

logger = logging.getLogger(__name__)

BEYOND = 16
"""The number of tokens by which a row exceeds the model's sliding windows where these are compared."""
LONGEST = 8192
"""The largest number of tokens of a row that are compared."""
WORTH_GRAPHS = 0.5
"""The limit for sharing parts of prompts where CUDA graphs compute the layers, which they do not of rows that share
so."""


class Packed(Scoring):
    """A scoring (a component that computes per-token log-probs and entropies for the trainer) of rows without their
    padding.

    Args:
        session: the run.
        options: the user's options.

    Attributes:
        deferred: whether TRL's old log-probs may be taken from the first forward pass of the loss.
        padded_because: why rows are scored with padding, as TRL does; None where they are packed.
        balanced: whether `micro_batches` chooses which rows are trained together. It does so only where rows are
            packed, because padded rows take the same memory in any micro-batch.
        joins: up to how many micro-batches a shared forward and backward pass was found to compute alike; 0 where none
            is to be shared. At least 1 once the policy's first rows have shown that packed rows are scored like padded
            ones.
        recomputation: decides which layers are recomputed in the backward pass; None without `adaptive_checkpointing`.
    """

    name = "packed"

    def __init__(self, session: Run, options: PackedOptions) -> None:
        self._session = session
        self.deferred = options.deferred
        self.padded_because: str | None = refused(session.policy, session.args) if options.packing else "packing=False"
        self.balanced = options.balanced and self.padded_because is None
        self._attention = "" if self.padded_because else attention_name(session)
        self._shares = options.shared_prompts and self.padded_because is None and takes_prefixes(session)
        self._compared: set[int] = set()
        self._trusted = False  # whether the run that this one resumes has compared the policy's rows
        self._chosen: dict[int, tuple[PretrainedConfig, str]] = {}  # by model: its config, and the attention it named
        if self.padded_because is None:
            attention.register()
        compiled = getattr(session.args, "torch_compile", False)  # it would recompile each layer that changes
        chooses = options.adaptive_checkpointing and not compiled
        self.recomputation = Recomputation(session, options) if chooses else None
        packed = self.padded_because is None
        self._graphs = LayerGraphs(session) if options.cuda_graphs and packed else None
        self._joins = options.joined is not False and packed and self.recomputation is not None
        of_plugin = session.config.options_of("training", TrainingOptions).lora_layers
        self._adapters: str | None = None  # what is said of LoRA layers, where this scoring makes them faster
        if options.lora_layers and of_plugin is None and session.policy.adapters and not compiled:
            from .lora import served

            self._adapters = served(session.policy.module, compare=True)

    def note(self) -> str:
        """Return the line about this scoring that is printed when a run starts: whether rows are packed or padded, and
        why."""
        if self.padded_because is not None:
            said = f"scoring: rows stay padded: {self.padded_because}"
        else:
            prompts = ", shared prompts once" if self._shares else ""
            said = f"scoring: rows are packed{prompts}, attention by {self._attention}"
            if self._graphs is not None and self._graphs.refused is None:
                said = f"{said}, small models' layers as CUDA graphs"
        if self._adapters is not None:
            said = f"{said}; {self._adapters}"
        if self.recomputation is None:
            return said
        idle = self.recomputation.idle()
        said = f"{said}; {idle or self.recomputation.note()}"
        joins = self._joins and idle is None and self.padded_because is None
        return f"{said}; micro-batches share a pass as far as memory allows" if joins else said

    def _choosing(self, tokens: int, copied: int = 0, rows: int = 1) -> AbstractContextManager[None]:
        return nullcontext() if self.recomputation is None else self.recomputation.chosen(tokens, copied, rows)

    def micro_batches(self, prompts: Tensor, tokens: Sequence[int], count: int) -> list[list[int]]:
        """Split the rows of an optimizer step into `count` micro-batches of equally many rows. Returns the row numbers
        of each micro-batch.

        Where packed rows may share prompts, rows with the same prompt are put together, so that fewer tokens must be
        computed. Otherwise the micro-batches have nearly equal numbers of tokens.

        Args:
            prompts: (B, P) token ids of each row's prompt, -1 where there is no token.
            tokens: for each row, the number of tokens of prompt and completion.
            count: the number of micro-batches; it must divide the number of rows.
        """
        if not self._shares:
            return equal_tokens(tokens, count)
        return fewest_tokens(RowLengths.of(prompts.cpu(), tokens), count)

    def joined(self, tokens: Sequence[int]) -> int:
        """Return how many of the next micro-batches one forward and backward pass can compute without recomputing a
        layer; at least 1. Collective.

        Args:
            tokens: the number of tokens of each of these micro-batches.
        """
        assert self.recomputation is not None
        return self.recomputation.joined(tokens)

    def state(self) -> Mapping[str, Any]:
        """Return the state for a checkpoint, with which a resumed run computes the passes that it would have computed
        without the interruption: how many micro-batches may share passes (`joins`), the measured bytes that a layer
        keeps for the backward pass, by the number of tokens, the sizes of CUDA graphs, and what comparisons have found
        of packed rows, LoRA layers and shared passes: against them (`padded_because`, `as_in_peft`, `apart`), and for
        them (`alike`)."""
        bytes_ = {name: record.seen for name, record in self._records().items()}
        graphs = [] if self._graphs is None else self._graphs.state()
        compared = self._trusted or id(self._session.policy.base) in self._compared
        as_in_peft, layers = self._layers()
        apart = compared and self._joins and not self.joins
        against = {"padded_because": self.padded_because, "as_in_peft": as_in_peft, "apart": apart}
        alike = {"on": self._platform(), "rows": compared, "layers": layers}
        return {"joins": self.joins, **bytes_, "graphs": graphs, **against, "alike": alike}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the data that `state` returned. Nothing is compared again that the run had found alike, since
        rounding might decide otherwise on other rows, and make another run of it; except with other versions, or on
        another device."""
        if self.padded_because is None and state.get("padded_because") is not None:
            self._pad(state["padded_because"])
        alike: Mapping[str, Any] = state.get("alike", {})
        if alike.get("on") != self._platform():
            alike = {}
        self._trusted = alike.get("rows", False)
        if self._adapters is not None:
            from .lora import refute, served, trust

            refute(self._session.policy.module, state.get("as_in_peft", {}))
            self._adapters = served(self._session.policy.module, compare=True)
            trust(self._session.policy.module, alike.get("layers", ()))
        self._joins = self._joins and not state.get("apart") and self.padded_because is None
        joins = int(state.get("joins", 0))
        self.joins = (max(joins, 1) if self._trusted else min(joins, 1)) if self._joins else 0
        for name, record in self._records().items():
            for tokens, bytes_ in state.get(name, {}).items():
                record.add(int(tokens), bytes_)
        if self._graphs is not None:
            self._graphs.load_state(state.get("graphs", ()))

    def _records(self) -> dict[str, LayerBytes]:
        """Return the records of what layers keep, by their name in a checkpoint."""
        chooses = self.recomputation
        return {} if chooses is None else {"layer_bytes": chooses.whole_bytes, "tiled_bytes": chooses.tiled_bytes}

    def _platform(self) -> dict[str, str | None]:
        """Return the versions, the device and the attention with which comparisons were made."""
        device = self._session.policy.device
        versions = {name: release_of(name) for name in ("torch", "transformers", "peft", "trlx-hybrid-training")}
        of_device = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        return {**versions, "device": of_device, "attention": self._attention}

    def _layers(self) -> tuple[dict[str, str], list[str]]:
        """Return the LoRA layers that comparisons have left to PEFT, with the reason, and those that they have not."""
        if self._adapters is None:
            return {}, []
        from .lora import proven, refuted

        return refuted(self._session.policy.module), proven(self._session.policy.module)

    def _pad(self, reason: str) -> None:
        """Let all rows be scored with padding from now on."""
        self.padded_because, self.balanced, self.joins = reason, False, 0
        self.close()

    def score(self, rows: Rows) -> Scores:
        """Compute the rows' per-token log-probs and entropies as TRL does; without padding, where rows are packed.

        Before the first packed pass of a model, its rows are also scored with padding and compared.

        Args:
            rows: the rows to score in one call.
        """
        if self.padded_because is None:
            before = attention.choose(rows.model)  # again, where another trainer on the model has ended
            if before is not None:
                self._chosen[id(rows.model)] = rows.model.config, before
            if self._trusted and rows.model is self._session.policy.base:
                self._compared.add(id(rows.model))
            if id(rows.model) not in self._compared:
                self._prepare(rows)
        known = self.padded_because is None and id(rows.model) in self._compared
        packs = self._packs(rows, WORTH, self._worth(rows)) if known else None
        if packs is not None:
            return self._score_packs(rows, packs)
        with self._choosing(rows.input_ids.numel(), rows=len(rows.input_ids)):
            return rows.padded()

    def _packs(self, rows: Rows, shared_below: float, trie_below: Callable[[int], float] | None) -> list[Pack] | None:
        """Pack rows, and return one pack (rows without padding, as one sequence) for each forward pass; None if a row
        cannot be packed.

        All packs are made before the first forward pass, because ranks that share a model must run equally many passes.

        Args:
            rows: the rows to score.
            shared_below: a fraction. Prompts are computed once for several rows if this brings the token count below
                this fraction of the count without sharing; 0: never.
            trie_below: returns such a fraction, from the token count with whole prompts shared: parts of prompts are
                computed once if this brings the token count below this fraction of it; None: never.
        """
        ours = rows.model.config._attn_implementation == attention.NAME
        if not self._shares or not ours or rows.router_loss:  # the router loss is a mean over all tokens
            shared_below, trie_below = 0.0, None
        packs = []
        for start in range(0, len(rows.input_ids), rows.at_once):
            some = slice(start, start + rows.at_once)
            pack = Pack.of(
                rows.input_ids[some], rows.attention_mask[some], rows.completion_length, shared_below, trie_below
            )
            if pack is None:
                return None
            packs.append(pack)
        return packs

    def _score_packs(self, rows: Rows, packs: Sequence[Pack], windows: bool = False) -> Scores:
        """Score packed rows.

        Args:
            rows: the rows.
            packs: the same rows without padding, a pack for each forward pass.
            windows: whether the layers' sliding windows are compared with the model's config.

        Raises:
            NotImplementedError: a layer does not name its window to the attention, which sees no mask.
        """
        ours = rows.model.config._attn_implementation == attention.NAME
        scores: list[Scores] = []
        graphs = self._graphs if self._graphed(rows) else None
        for number, pack in enumerate(packs):
            sizes = None if graphs is None else graphs.sizes(pack)
            if sizes is not None:
                pack = pack.filled(sizes)
            some = slice(number * rows.at_once, (number + 1) * rows.at_once)
            inputs = pack.inputs | _beside(rows, some, pack)
            if ours:
                inputs |= {"segments": pack.segments, "prefixes": pack.prefixes}
            if graphs is not None and sizes is not None:
                inputs |= graphs.inputs(pack, sizes)
            running = nullcontext() if graphs is None else graphs.running(sizes)
            computed = sum(pack.segments)
            with attention.packing() as named, running, self._choosing(computed, sum(pack.lengths) - computed):
                log_probs, entropies, router_loss = rows.forward(pack.labels, **inputs)
            wanted = windows_of(rows.model.config.get_text_config()) if windows and ours else None
            if wanted is not None and Counter(wanted) != Counter(named):
                raise NotImplementedError("its layers do not name their sliding windows to the attention")
            entropies = None if entropies is None else pack.rows(entropies)
            scores.append(Scores(pack.rows(log_probs), entropies, router_loss))
        entropies_of = [part.entropies for part in scores if part.entropies is not None]
        losses_of = [part.router_loss for part in scores if part.router_loss is not None]
        return Scores(
            torch.cat([part.log_probs for part in scores]),
            torch.cat(entropies_of) if entropies_of else None,
            torch.stack(losses_of).mean() if losses_of else None,
        )

    def _graphed(self, rows: Rows) -> bool:
        """Return whether CUDA graphs may compute a loss's forward pass of these rows."""
        ours = rows.model.config._attn_implementation == attention.NAME
        plain = rows.experts is None and rows.support is None and not rows.router_loss
        at_once = len(rows.input_ids) <= rows.at_once
        return ours and plain and at_once and torch.is_grad_enabled() and rows.model is self._session.policy.base

    def _worth(self, rows: Rows) -> Callable[[int], float]:
        """Return a function of the number of tokens that returns the limit for sharing parts of prompts."""
        graphs = self._graphs if self._graphed(rows) else None
        return lambda tokens: WORTH_GRAPHS if graphs is not None and graphs.may_serve(tokens) else WORTH

    @torch.no_grad()
    def _prepare(self, rows: Rows) -> None:
        """Score the first rows of a model packed and padded, without dropout, and compare the log-probs. Collective.

        If they differ too much, `padded_because` is set, and all rows stay padded. If no token is scored, or a rank
        cannot pack its rows, these rows stay padded, and the next rows are compared.

        Each row is packed twice, so that it has a neighbour, and so that a shared prompt is compared, too, where
        prompts may be shared. Of long rows, the tokens around the beginning of the completion are compared: whole rows,
        padded, would take more memory than the run itself.

        Args:
            rows: the first rows that are scored with the model.
        """
        session, reason, gap = self._session, None, torch.zeros(0)
        long = session.ranks.any(rows.input_ids.shape[1] > LONGEST)
        rows = cut(rows, LONGEST) if long else rows
        ids, mask = (t.repeat_interleave(2, dim=0) for t in (rows.input_ids, rows.attention_mask))
        given = replace(rows, input_ids=ids, attention_mask=mask, at_once=2 * rows.at_once, router_loss=False)
        if rows.experts is not None:
            given = replace(given, experts=rows.experts.repeat_interleave(2, dim=0))
        if rows.support is not None:
            given = replace(given, support=rows.support.repeated(2))
        packs = self._packs(given, shared_below=1.0, trie_below=lambda tokens: 1.0)
        if session.ranks.any(packs is None):
            return
        assert packs is not None
        with evaluating(rows.model), preserved_generators():
            padded = _alone(rows) if long else rows.padded().log_probs
            try:
                packed = self._score_packs(given, packs, windows=True)
            except (NotImplementedError, TypeError, ValueError) as error:
                reason = str(error)
            else:
                differences = (packed.log_probs - padded.repeat_interleave(2, dim=0)).abs()
                gap = differences[mask[:, -rows.completion_length :].bool()]
                if gap.numel():
                    gap = torch.cat([gap, self._beyond_window(rows)])
                found = beyond_rounding(session.policy, session.args, gap)
                reason = found and f"packed and padded log-probs {found}"
        session.policy.reshard()  # without a backward pass the parameters would stay gathered
        if session.ranks.any(reason is not None):
            self._pad(next(r for r in session.ranks.gather(reason) if r is not None))
            if session.ranks.rank == 0:
                logger.warning("Rows stay padded: %s.", self.padded_because)
        elif session.ranks.sum(gap.numel()):
            self._compared.add(id(rows.model))
            if rows.model is session.policy.base:
                self.joins = int(self._joins)
            if session.ranks.rank == 0 and gap.numel():
                told = f" on up to {LONGEST} tokens of each" if long else ""
                logger.info("Packed rows differ from padded ones by %.3g nats at most%s.", float(gap.max()), told)

    def _beyond_window(self, rows: Rows) -> Tensor:
        """Return how far log-probs of a packed row that is longer than the model's sliding windows are from those of
        the row alone, (n,); none where it has no windows, or no row of the run can be longer. The first rows of a run
        may be shorter than the windows, so their tokens are repeated.

        Args:
            rows: the first rows that are scored with the model.
        """
        config = rows.model.config.get_text_config()
        window = max((window or 0 for window in windows_of(config) or ()), default=0)
        longest = getattr(self._session.engine, "max_model_len", config.max_position_embeddings)
        if not window or longest <= window or rows.experts is not None or rows.support is not None:
            return rows.input_ids.new_zeros(0, dtype=torch.float32)
        real = rows.input_ids[0][rows.attention_mask[0].bool()]
        ids = real.repeat(-(-(window + BEYOND) // len(real)))[: window + BEYOND]
        labels = ids.roll(-1).masked_fill(torch.arange(len(ids), device=ids.device) < window - 1, IGNORED)
        labels[-1] = IGNORED
        places = torch.arange(len(ids), device=ids.device)[None]
        alone = rows.forward(labels[None], input_ids=ids[None], position_ids=places).log_probs
        twice, mask = ids.repeat(2, 1), torch.ones_like(ids).repeat(2, 1)
        pack = Pack.of(twice, mask, BEYOND, shared_below=1.0)
        assert pack is not None
        given = replace(rows, input_ids=twice, attention_mask=mask, completion_length=BEYOND, at_once=2)
        packed = self._score_packs(replace(given, router_loss=False), [pack]).log_probs
        return (packed - alone[:, -BEYOND - 1 : -1]).abs().flatten().float()

    def close(self) -> None:
        """Restore the attention implementation that each model's config named before."""
        for config, before in self._chosen.values():
            config._attn_implementation = before
        self._chosen.clear()
        if self._graphs is not None:
            self._graphs.close()
        if self.recomputation is not None:
            self.recomputation.close()


def cut(rows: Rows, columns: int) -> Rows:
    """Return rows of at most so many tokens, those around the beginning of the completion, without `padded`, which
    would score the whole rows.

    Args:
        columns: the largest width of the result.
    """
    width = rows.input_ids.shape[1]
    first = width - rows.completion_length
    completion = min(rows.completion_length, columns // 2)
    some = slice(max(0, first + completion - columns), first + completion)
    return replace(
        rows,
        input_ids=rows.input_ids[:, some],
        attention_mask=rows.attention_mask[:, some],
        completion_length=completion,
        padded=_not_whole,
        experts=None if rows.experts is None else rows.experts[:, some],
        support=None if rows.support is None else replace(rows.support, bounds=rows.support.bounds[:, some]),
    )


def _not_whole() -> Scores:
    raise AssertionError("rows that were cut are scored by `forward`")


def _alone(rows: Rows) -> Tensor:
    """Return the log-probs of rows that are computed one by one, without padding and as the model computes any text:
    (B, C)."""
    found = []
    for number in range(len(rows.input_ids)):
        one = slice(number, number + 1)
        pack = Pack.of(rows.input_ids[one], rows.attention_mask[one], rows.completion_length)
        assert pack is not None
        inputs = {"input_ids": pack.input_ids, "position_ids": pack.position_ids} | _beside(rows, one, pack)
        found.append(pack.rows(rows.forward(pack.labels, **inputs).log_probs))
    return torch.cat(found)


def _beside(rows: Rows, some: slice, pack: Pack) -> dict[str, Any]:
    """Return what `Rows.forward` takes beside the model's own arguments: experts and support of a pack's tokens.

    Args:
        some: which of the rows the pack holds.
    """
    beside: dict[str, Any] = {}
    if rows.experts is not None:
        beside["experts"] = rows.experts[some].flatten(0, 1)[pack.places][None]
    if rows.support is not None:
        beside["support"] = rows.support[some].at(pack.places)
    return beside
