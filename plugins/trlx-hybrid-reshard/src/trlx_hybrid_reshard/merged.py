"""LoRA adapters merged into this rank's shards, in memory beside the base weights, which stay as they are.

PEFT's own merge of sharded tensors does it, out of place, as it does for the path that gathers: so both bring the same
bits. A shard of rows of the merged weight needs only the same rows of B and all of A, which is small; PEFT's product of
two DTensors mostly moves more than that, which neither the plan's bytes nor its floor count.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trlx_hybrid.weights.merging import AdaptedModule, adapted, parted_head

if TYPE_CHECKING:
    from torch import Tensor
    from trlx_hybrid.weights.policy import Policy


def unmergeable(policy: Policy) -> str | None:
    """Why the adapters of this policy cannot be merged shard by shard, or None."""
    if not policy.adapters:
        return None
    if parted_head(policy.base) is not None:
        return "adapters part the output head from the embeddings that it is tied to"
    from peft.tuners.lora.layer import Embedding, Linear

    for name, module in _adapted_modules(policy):
        for layer in module.layers:
            if type(layer) not in (Linear, Embedding):
                return f"{name} is adapted by PEFT's {type(layer).__name__} layer, which is merged as a whole"
            variants = [v for a, v in layer.lora_variant.items() if a in layer.active_adapters]
            if variants:
                return f"{name} computes a variant of LoRA ({type(variants[0]).__name__}), which is merged as a whole"
    return None


class MergedShards:
    """What this rank holds of the merged weights. They take the memory of the adapted shards once more.

    Attributes:
        names: of the parameters that adapters change.
    """

    def __init__(self, policy: Policy) -> None:
        names = {id(p): name for name, p in policy.base_parameters().items()}
        self._modules = [
            (module, {key: names[id(p)] for key, p in module.base.named_parameters()})
            for _, module in _adapted_modules(policy)
            if module.layers
        ]
        self.names = frozenset(name for _, keys in self._modules for name in keys.values())
        self._kept: dict[str, Tensor] = {}

    def refresh(self) -> bool:
        """Merge anew; returns whether some tensor is another one than before. Collective."""
        moved = False
        for module, keys in self._modules:
            for key, merged in module.merged().items():
                local: Tensor = getattr(merged, "_local_tensor", merged)
                kept = self._kept.get(keys[key])
                if kept is None or (kept.shape, kept.dtype, kept.device) != (local.shape, local.dtype, local.device):
                    self._kept[keys[key]], moved = local.clone(), True
                else:
                    kept.copy_(local)
        return moved

    def __getitem__(self, name: str) -> Tensor:
        return self._kept[name]


def _adapted_modules(policy: Policy) -> Iterator[tuple[str, AdaptedModule]]:
    """Each with its name; where several layers adapt one module, the outermost has them all."""
    seen: set[int] = set()
    for name, module in policy.base.named_modules():
        found = None if id(module) in seen else adapted(module)
        if found is not None:
            seen.update(id(layer) for layer in found.layers)
            yield name, found
