"""A forecast of the memory that a pass of the loss takes: planned as the run plans it, and counted on the meta
device."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from trlx_hybrid.contract.activations import Activations, PlannedLoss
from trlx_hybrid.memory.arena import CHUNK_BYTES
from trlx_hybrid.policy.precision import autocast_dtype

from . import attention, tiles
from .layer_memory import UNDER_WAY, KnownBytes, LayerPlan, Memory
from .meta_pass import MetaPass
from .micro_batches import WORTH, RowLengths
from .packing import refused
from .prefixes import of_prompts
from .recomputation import beside_activations, estimated, layers_of, no_modules
from .tiles import tileable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .options import PackedOptions
    from .prefixes import Prefixes

logger = logging.getLogger(__name__)

DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
"""The names under which configs have the probability of dropout in attention."""


def activations(loss: PlannedLoss, options: PackedOptions) -> Activations | None:
    """Return the memory that a pass of the loss takes with `scoring="packed"`; None where it is not known, because
    the model's rows stay padded, or its layers cannot be computed on the meta device.

    The first pass of a run knows what a layer keeps from the widths of its linear modules, and later passes from the
    layer that the first one counted. The result is for the later ones, and has the larger host memory of both.

    Args:
        loss: the pass.
        options: the user's options.
    """
    policy, base = loss.policy, loss.policy.base
    drops = max(float(getattr(base.config.get_text_config(), name, 0) or 0) for name in DROPOUTS)
    if not layers_of(base) or drops or (options.packing and refused(policy, loss.args) is not None):
        return None  # dropout in attention has no kernel for ragged rows
    shares = options.packing and options.balanced and options.shared_prompts and attention.loaded_with(base) == "sdpa"
    segments, prefixes = rows_of(loss, shares)
    if options.lora_layers and policy.adapters and not loss.quantised:
        from .lora import apply

        apply(policy.module)
    autocast = autocast_dtype(loss.args) if autocast_dtype(loss.args).itemsize < 4 else None
    try:
        counted = MetaPass(base, segments, prefixes, loss.rows * loss.completion, loss.tile, autocast, policy.dtype)
        return _planned(loss, options, sum(segments), counted)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        logger.info("Activations are not forecast: %s", error)
        return None


def rows_of(loss: PlannedLoss, shares: bool) -> tuple[list[int], Prefixes]:
    """Return segments and prefixes (see `attention.attention`) of rows that are as long as they may be.

    Args:
        shares: whether a prompt is computed once for all rows that have it, where this saves enough tokens.
    """
    rows, prompt = range(loss.rows), loss.length - loss.completion
    lengths = RowLengths([loss.length for _ in rows], [row % loss.prompts for row in rows], [prompt - 1 for _ in rows])
    prefixes = of_prompts(lengths, WORTH if shares else 0.0)
    return [loss.length - tokens for _, tokens in prefixes], prefixes


def _planned(loss: PlannedLoss, options: PackedOptions, tokens: int, counted: MetaPass) -> Activations:
    """Return the memory that the pass takes.

    Args:
        tokens: the number of tokens that the pass computes.
        counted: counts passes of some of the layers.
    """
    policy, layers = loss.policy, layers_of(loss.policy.base)
    beside = beside_activations(policy, loss.args, lambda p: loss.sharded)
    width = int(policy.base.config.get_text_config().hidden_size) * policy.dtype.itemsize
    rows = 1 if options.packing else loss.rows
    counting = estimated(tokens, loss.rows * loss.length - tokens)
    recomputes = loss.args.gradient_checkpointing or loss.recomputed
    if loss.args.gradient_checkpointing and options.adaptive_checkpointing:
        known = KnownBytes()
        known.read(layers[-1], policy.dtype.itemsize, tileable if options.tiles else no_modules)
        memory = Memory(free=loss.free, others=beside + _gradients(loss))

        def planned() -> LayerPlan:
            sizes = known.layers(len(layers), width * tokens, counting, rows * tiles.TILE)
            return known.plan(memory, sizes, counting > rows * tiles.TILE, options.activation_offloading)

        plans = [planned()]
        if plans[0].kept:
            record = known.tiled if plans[0].tiled else known.whole
            record.add(tokens, counted.kept(plans[0].tiled))
            plans.append(planned())
    else:
        plans = [LayerPlan(kept=0 if recomputes else len(layers))]
    host = max(plan.offloaded for plan in plans) * width * tokens
    device = _peak(plans[-1], len(layers), width * tokens, counted) + beside
    told = _told(plans[-1], len(layers))
    adaptive = loss.args.gradient_checkpointing and options.adaptive_checkpointing and options.packing
    if adaptive and plans[-1].kept == len(layers) and options.joined is not False and loss.accumulates:
        told = f"{told}, and micro-batches share a pass as far as memory allows"
    if loss.sharded and loss.accumulates:
        device += _gradients(loss)
    if loss.sharded:  # a layer's parameters and gradients are gathered, and the next layer's parameters
        largest = max(sum(p.numel() for p in layer.parameters()) for layer in layers)
        device += 3 * largest * autocast_dtype(loss.args).itemsize
    if loss.quantised:  # a layer's weights are made 16-bit numbers, one after the other
        device += max(p.numel() for layer in layers for p in layer.parameters()) * 2
    return Activations(
        tokens=tokens,
        device=device,
        host=-(-host // CHUNK_BYTES) * CHUNK_BYTES,
        layers=told,
    )


def _peak(plan: LayerPlan, count: int, inputs: int, counted: MetaPass) -> int:
    """Return the most bytes that the layers' activations take at one time.

    Passes of one or two layers are counted. Each further layer adds what it keeps.

    Args:
        count: the number of layers.
        inputs: bytes of a layer's input.
    """
    recomputed = count - plan.kept
    held = recomputed - plan.offloaded  # inputs on the device
    peaks = []
    if plan.kept:
        further = (plan.kept - 1) * counted.kept(plan.tiled) if plan.kept > 1 else 0
        peaks.append(counted.peak(1, recomputed=False, in_tiles=plan.tiled) + further + held * inputs)
    if recomputed:
        held = min(recomputed, held + UNDER_WAY) if plan.offloaded else held
        layers = min(count, 2)
        peaks.append(counted.peak(layers, recomputed=True, in_tiles=plan.tiled) + (held - layers) * inputs)
    return max(peaks)


def _gradients(loss: PlannedLoss) -> int:
    """Return the bytes of the gradients that a backward pass allocates. FSDP2 holds whole ones while micro-batches
    accumulate, in the dtype of the products."""
    args: Any = loss.args
    itemsize = autocast_dtype(args).itemsize if loss.sharded else None
    every = sum(p.numel() * (itemsize or p.itemsize) for p in loss.policy.parameters if p.requires_grad)
    return every // args.world_size if loss.sharded and not loss.accumulates else every


def _told(plan: LayerPlan, count: int) -> str:
    """Return how layers are computed, as a text that is printed."""
    recomputed = count - plan.kept
    told: Sequence[str] = [
        f"{recomputed} of {count} are recomputed" if recomputed else f"all {count} keep their activations",
        *(["norms and MLPs in tiles"] if plan.tiled else []),
        *([f"{plan.offloaded} inputs in host memory"] if plan.offloaded else []),
    ]
    return ", ".join(told)
