"""What this rank's trainer holds of each parameter: the live local tensors, by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .live import LiveLayout, read
from .merged import MergedShards
from .parameter import Parameter

if TYPE_CHECKING:
    from torch import Tensor, nn
    from trlx_hybrid.policy import Policy


class Shards:
    """Follows the policy's parameters, which may move in memory, be frozen, or be replaced between two syncs.

    Attributes:
        shapes: of the whole parameters, by their names; tied ones once.
        local: what this rank holds of each; a view or the parameter itself.
        frozen: names of parameters that no optimizer changes.
        moved: how often some local tensor has become another one.
    """

    def __init__(self, policy: Policy) -> None:
        self._sharded_modules = [m for m in policy.module.modules() if hasattr(m, "reshard")]
        self._gather_up()
        names = policy.base_parameters()
        self.shapes = {name: tuple(p.shape) for name, p in names.items()}
        owners: dict[int, tuple[nn.Module, str]] = {}
        for module in policy.base.modules():
            for key, parameter in module._parameters.items():
                owners.setdefault(id(parameter), (module, key))
        self._owners = {name: owners[id(p)] for name, p in names.items()}
        self._merged = MergedShards(policy)
        self._seen: dict[str, tuple[int, ...]] = {}
        self._versions: dict[str, tuple[int, ...]] = {}
        self.local: dict[str, Tensor] = {}
        self.frozen: set[str] = set()
        self.moved = 0
        self.refresh()

    def _gather_up(self) -> None:
        """FSDP2 leaves some modules unsharded after a forward pass; their shards are the weights."""
        for module in self._sharded_modules:
            module.reshard()  # type: ignore[operator]

    def refresh(self) -> bool:
        """Look again; returns whether a parameter that is frozen now may hold other bits than at the last look."""
        self._gather_up()
        before, self.frozen, changed = self.frozen, set(), False
        moved = self._merged.refresh()
        self.local.update((name, self._merged[name]) for name in self._merged.names)
        for name, (module, key) in self._owners.items():
            if name in self._merged.names:
                continue
            parameter: Any = module._parameters[key]
            tensor: Tensor = getattr(parameter, "_local_tensor", parameter)
            place = (tensor.untyped_storage()._cdata, tensor.storage_offset(), *tensor.stride())
            if self._seen.get(name) != place or self.local[name].dtype != tensor.dtype:
                self._seen[name], self.local[name], moved = place, tensor.detach(), True
            if not parameter.requires_grad:
                self.frozen.add(name)
                version = (*place, tensor._version)
                changed |= name not in before or self._versions.get(name) != version
                self._versions[name] = version
        self.moved += moved
        return changed

    def parameters(self, names: Sequence[str]) -> list[Parameter]:
        """For a plan: each parameter a class of its own."""
        return [Parameter(name=name, shape=self.shapes[name]) for name in names]

    def layout(self, world: int) -> LiveLayout:
        """Where all parameters lie, on all ranks.

        Raises:
            ConfigError: a placement that is neither a shard nor a replica.
        """
        live = {name: module._parameters[key] for name, (module, key) in self._owners.items()}
        return read(self.parameters(list(self.shapes)), live, world)  # type: ignore[arg-type]
