"""Weight sync by merging (`weights="merged"`): the engine's own weights become base plus LoRA adapter.

The engine then decodes as fast as without an adapter. The trainer's base and adapter are not changed. The disadvantage
is rounding: in the engine's dtype, the parts of an adapter that are small compared with the weights are rounded away.
Early in training that is most of the adapter. So `weights="auto"` never chooses this weight sync.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from trlx_hybrid.errors import SyncError
from trlx_hybrid.policy.adapters import AdaptedModule, adapted_modules, beyond_lora
from trlx_hybrid.rollout.seeding import request_seed
from trlx_hybrid.weights.verify import sampled_names

from .lora import weights_of
from .shared import SharedSync

if TYPE_CHECKING:
    from peft.tuners.lora.layer import LoraLayer
    from trlx_hybrid.contract.types import LoadReport
    from trlx_hybrid.session import Session

    from ..options import MergedOptions

logger = logging.getLogger(__name__)

SHARE = "hybrid/merged/surviving_share"
LITTLE = 0.5  # share of an adapter: below it, the engine samples from the base rather than from the policy
SAMPLED = 4  # weights that each sync merges once more to compute their share
COUNTED = 1 << 24  # elements of a weight (its first rows) that the share is computed from: an embedding has a billion


class MergedSync(SharedSync):
    """Weight sync that writes W + s * B @ A over the engine's copy of W, for every adapted layer at each sync.

    W is the base weight, and s the adapter's scaling. Weights without an adapter are copied and cast, as `SharedSync`
    copies them.

    Product and sum are computed in float32, and rounded once. The merge of PEFT, which `weights="gather"` uses, also
    rounds the scaled product before the sum. Both give the same bits for one adapter in float32 whose scaling is a
    power of two.

    Rounding may remove small adapters, so each sync logs the share of the adapter that survives. The share is computed
    from a few weights, which change from sync to sync. With D = s * B @ A, the engine's merged weight E, and R = W
    rounded to the engine's dtype, the share is <E - R, D> / <D, D>. It is 1 where all of the adapter survives, and 0
    where nothing does. Rounding noise that averages out does not lower the share. Nothing is logged while D is zero.
    """

    def __init__(self, session: Session, options: MergedOptions) -> None:
        super().__init__(session, alias=False, adapted=True)
        self.name = "merged"
        self._stochastic = options.rounding == "stochastic"
        self._layers: dict[str, AdaptedModule] = {}
        self._warned = False

    def _refuses_at_sight(self) -> str | None:
        reason = super()._refuses_at_sight()
        if reason is not None:
            return reason
        if self._stochastic and self._engine.dtype is not torch.bfloat16:
            return f"rounding='stochastic' is for engines in bfloat16, and this one computes in {self._dtype}"
        try:
            self._layers = self._find()
            for name in self._layers:
                self._factors(name)
        except SyncError as error:
            return str(error)
        return None if self._layers else "the policy has no adapter that changes a weight"

    def _find(self) -> dict[str, AdaptedModule]:
        """Return the adapted layers by the names of the weights that they change.

        Raises:
            SyncError: some adapter is not plain LoRA, and so cannot be merged here.
        """
        reason = beyond_lora(self._policy.base)
        if reason is not None:
            raise SyncError(reason)
        names = {id(p): name for name, p in self._policy.base_parameters().items()}
        modules = adapted_modules(self._policy.base)
        return {names[id(module.base.weight)]: module for _, module in modules if module.layers}

    def note(self) -> str:
        """Return a note that is printed when the run starts. It says that the merged weights are rounded, and names the
        metric for the share of the adapter that survives."""
        how = "stochastically" if self._stochastic else "to the nearest"
        return (
            f"merged: the sum of base and adapter is rounded to {self._dtype} ({how}) at each sync. {SHARE} says how "
            "much of the adapter survives; weights='lora' keeps it apart from the weights."
        )

    @property
    def _dtype(self) -> str:
        return str(self._engine.dtype).removeprefix("torch.")

    # --- syncing -----------------------------------------------------------------------------------------------------

    def sync(self) -> LoadReport:
        """Copy the policy's weights into the engine, and for each adapted layer the sum of base and adapter.

        The adapted layers are looked up at each sync: a layer may have got its first adapter, or lost its last.

        Returns:
            Number and bytes of the base weights that were read.
        """
        self._layers = self._find()
        return super().sync()

    def _changes(self, name: str, p: nn.Parameter) -> bool:
        return name in self._layers or super()._changes(name, p)

    def _write(self, sources: dict[str, Tensor]) -> None:
        factors = {name: self._factors(name) for name in sources}
        super()._write({name: source for name, source in sources.items() if not factors[name]})
        for name, source in sources.items():
            if factors[name]:
                merge(source, factors[name], self._views[name], self._generator(name))

    def _written(self, name: str) -> Tensor:
        weight, factors = super()._written(name), self._factors(name)
        if not factors:
            return weight
        merged = torch.empty_like(self._views[name])
        merge(weight, factors, merged, self._generator(name))
        return merged

    def _factors(self, name: str) -> list[Factors]:
        """Return A, B and scaling of each adapter that is active on a weight and not already merged into it."""
        module = self._layers.get(name)
        layers = module.pending if module is not None else []
        return [factors_of(name, layer, a) for layer in layers for a in layer.active_adapters if a in layer.r]

    def _generator(self, name: str) -> torch.Generator | None:
        """Return the random generator for rounding a weight; None to round to nearest.

        The generator of a weight has the same seed on all ranks and in the check after the sync, so that all round
        alike.
        """
        if not self._stochastic or self._views[name].dtype is not torch.bfloat16:
            return None
        session = self._session
        seed = request_seed(session.args.seed, f"merge {name}", session.weight_version, 0, 0, 0)
        return torch.Generator(self._policy.device).manual_seed(seed)

    # --- what became of it -------------------------------------------------------------------------------------------

    def check(self, full: bool) -> int:
        """Merge base and adapter again, and compare the sums with the engine's weights bit for bit.

        Also record the metric for the share of the adapter that survives rounding, from a few adapted weights, others
        at each sync.

        Args:
            full: compare all weights; else a few at each call, in turn.

        Returns:
            How many weights were compared.

        Raises:
            SyncError: names each parameter that differs.
        """
        checked = super().check(full)
        there = [name for name in self._layers if name in self._views]  # an engine may have left a part out
        self._note_share(sorted(sampled_names(there, self._session.weight_version, SAMPLED)))
        return checked

    @torch.no_grad()
    def _note_share(self, names: Sequence[str]) -> None:
        sums = [torch.zeros(2, device=self._policy.device)]
        for name in names:
            factors, held = self._factors(name), self._views[name]
            if factors:
                rows = slice(max(1, COUNTED * len(held) // held.numel()))
                held, weight = held[rows], self._parameter(name)[rows]
                delta = torch.zeros(held.shape, device=held.device)
                for each in factors:
                    delta.add_(each.product(rows), alpha=each.scaling)
                change, delta = (held.float() - weight.to(held.dtype)).flatten(), delta.flatten()
                sums.append(torch.stack([change.dot(delta), delta.dot(delta)]))
        kept, whole = torch.stack(sums).sum(0).tolist()
        if not whole > 0:
            return
        share = self._session.metrics[SHARE] = kept / whole
        if share < LITTLE and not self._warned and self._session.ranks.rank == 0:
            self._warned = True
            logger.warning(
                "weights='merged': %.0f%% of the adapter survives rounding to %s (%s), so the engine samples from a "
                "policy nearer to the base than the one that is trained. weights='lora' keeps the adapter apart; "
                "weights_options={'rounding': 'stochastic'} keeps it on average, with noise.",
                100 * share,
                self._dtype,
                SHARE,
            )


# --- one weight -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Factors:
    """The matrices of one adapter of one layer.

    Attributes:
        a: A, (r, in).
        b: B, (out, r).
        scaling: the factor of B @ A, PEFT's `alpha / r`.
        transposed: whether the layer's weight is (in, out), as in embeddings and what PEFT calls `fan_in_fan_out`.
    """

    a: Tensor
    b: Tensor
    scaling: float
    transposed: bool

    def product(self, rows: slice = slice(None)) -> Tensor:
        """Return B @ A, without the scaling, in the shape of the layer's weight, in float32, also under autocast.

        Args:
            rows: the rows of the weight's shape to compute; by default all.
        """
        b, a = (self.b, self.a[:, rows]) if self.transposed else (self.b[rows], self.a)
        with torch.autocast(b.device.type, enabled=False):
            product = b.float() @ a.float()
        return product.T if self.transposed else product


def factors_of(name: str, layer: LoraLayer, adapter: str) -> Factors:
    """Return the current A, B and scaling of an adapter of a PEFT layer.

    Args:
        name: the weight's name, for the error.
        layer: PEFT's layer.
        adapter: the adapter's name.

    Raises:
        SyncError: the adapter is not plain LoRA (it has a bias, or is a variant such as DoRA).
    """
    if adapter in layer.lora_variant or layer.lora_bias.get(adapter):
        more = "a bias (lora_bias)" if layer.lora_bias.get(adapter) else type(layer.lora_variant[adapter]).__name__
        raise SyncError(f"adapter {adapter!r} of {name} has {more}, which is merged as a whole (`gather`)")
    scaling = float(layer.scaling[adapter])
    if adapter in layer.lora_embedding_A:
        return Factors(layer.lora_embedding_A[adapter].data, layer.lora_embedding_B[adapter].data, scaling, True)
    return Factors(*weights_of(layer, adapter), scaling, layer.fan_in_fan_out)


@torch.no_grad()
def merge(weight: Tensor, factors: Sequence[Factors], out: Tensor, generator: torch.Generator | None = None) -> None:
    """Write `weight` plus scaling * B @ A of all adapters to `out`, rounded once to the dtype of `out`.

    With one adapter this takes two kernels. It needs the extra memory of one weight in float32, or of three weights
    with random rounding. `torch.addmm` would need no extra memory, but its factors must have the weight's dtype, and so
    would be rounded to bf16 before they are multiplied.

    Args:
        weight: of any floating dtype, shaped like `out`.
        factors: the adapters, at least one.
        generator: rounds to bfloat16 at random; None to round to nearest.
    """
    *others, last = factors
    for each in others:
        weight = torch.add(weight, each.product(), alpha=each.scaling)
    product = last.product()
    if generator is None:
        torch.add(weight, product, alpha=last.scaling, out=out)
    else:
        out.copy_(rounded_at_random(torch.add(weight, product, alpha=last.scaling, out=product), generator))


def rounded_at_random(values: Tensor, generator: torch.Generator) -> Tensor:
    """Round each of these float32 values to one of the two bfloat16 numbers next to it, at random; return float32.

    A bfloat16 number is the upper 16 bits of a float32 number. The lower 16 bits, divided by 2^16, are the probability
    of rounding away from zero, so that the mean is the value. Values that are bfloat16 numbers already stay, as do
    infinities and NaN.
    """
    noise = torch.randint(1 << 16, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    rounded = noise.add_(values.view(torch.int32)).bitwise_and_(-1 << 16).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values)
