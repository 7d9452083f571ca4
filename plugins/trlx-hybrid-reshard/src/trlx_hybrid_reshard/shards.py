"""The shards of this rank's trainer: the local tensor of each parameter, by name, with adapters merged.

LoRA adapters are merged into copies of this rank's shards, and the base weights stay as they are. The merge is PEFT's
own merge of sharded tensors. The weight path `gather`, which sends whole tensors to the engine, merges in the same way,
so both paths give the same bits.

To merge a shard of rows, a rank needs only the same rows of B, and all of A, which is small. PEFT multiplies B and A as
DTensors, which mostly moves more bytes between ranks than this minimum. The bytes that PEFT moves are not counted in
the bytes that a sync reports, nor in their lower bound.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from operator import is_
from typing import TYPE_CHECKING, Any

from trlx_hybrid.errors import SyncError, listed
from trlx_hybrid.policy.adapters import adapted_modules, beyond_lora
from trlx_hybrid.policy.fingerprint import Frozen

from .layouts import LiveSharding, Parameter, read_trainer

if TYPE_CHECKING:
    from torch import Tensor
    from trlx_hybrid.policy.adapters import AdaptedModule
    from trlx_hybrid.policy.policy import Policy


class Shards:
    """The local tensors of the policy's parameters on this rank. Between two syncs, the parameters may move in memory,
    be frozen, or be replaced.

    Args:
        policy: the trainer's model, of which the base weights and the adapters are read.

    Attributes:
        shapes: the shapes of the whole parameters, by name. Tied parameters have a single entry.
        local: this rank's tensor of each parameter: a view, the parameter itself, or its merged copy. A merged copy
            takes as much memory as the shard that it was made from.
        moved: the number of times that local tensors were replaced or moved. Views of these tensors, and plans with
            such views, may be out of date if they were made when `moved` was lower.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        policy.reshard()
        parameters = policy.base_parameters()
        self.shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        self._owners = policy.base_slots()
        names = {id(p): name for name, p in parameters.items()}
        self._adapted = [
            (module, {key: names[id(p)] for key, p in module.base.named_parameters()}) for module in self._merged()
        ]
        merged = {name for _, keys in self._adapted for name in keys.values()}
        self._names = [name for name in self.shapes if name not in merged]
        self._slots = [self._owners[name] for name in self._names]
        self._tensors: list[Tensor] = []
        self._addresses: list[int] = []
        self._frozen = Frozen()
        self.local: dict[str, Tensor] = {}
        self.moved = 0
        self.refresh()

    def _merged(self) -> list[AdaptedModule]:
        """Return the modules whose adapters must be merged into the weights to be sent: those with an active adapter.
        All adapters are plain LoRA, since `ReshardSync` refuses a policy that has others."""
        adapted = (module for _, module in adapted_modules(self._policy.base))
        return [m for m in adapted if any(a in layer.r for layer in m.layers for a in layer.active_adapters)]

    def refuse_other_modules(self) -> None:
        """Raise an error if modules or adapters were replaced since the engine was built, because the sync's transfers
        were planned for the modules and adapters of that time.

        Raises:
            SyncError: modules or adapters differ; names them.
        """
        beyond = beyond_lora(self._policy.base)
        if beyond is not None:
            raise SyncError(f"{beyond}, and was not there when the engine was built. Set weights='gather'.")
        now = self._policy.base_slots()
        other = [name for name, (held, _) in self._owners.items() if name not in now or now[name][0] is not held]
        other += sorted(now.keys() - self._owners.keys())
        if not other and self._merged() != [module for module, _ in self._adapted]:
            other = ["layers of the adapter"]
        if other:
            raise SyncError(
                f"{listed(other)}: other modules have taken their place since the engine was built. Release the engine "
                "when modules are replaced (`session.release_engine()`): the next rollout builds another."
            )

    def refresh(self) -> bool:
        """Look up the local tensors again, at the start of each sync. Returns whether a parameter that is frozen now
        may hold other values than at the last call.

        Every sync calls this, so it works on whole lists for speed. If the storage of a tensor was emptied and filled
        again (see `trlx_hybrid.memory.offload`), the tensor remains the same object, but its data lie at another
        address. Its views remain valid, while a CUDA graph that was recorded with it does not.
        """
        self._policy.reshard()
        parameters: list[Any] = [held[key] for held, key in self._slots]
        tensors: list[Tensor] = [getattr(p, "_local_tensor", p) for p in parameters]
        addresses = [t.data_ptr() for t in tensors]
        named = zip(self._names, parameters, tensors, strict=True)
        changed = self._frozen.changed({name: t for name, p, t in named if not p.requires_grad})
        if addresses != self._addresses or not all(map(is_, tensors, self._tensors)):
            self.local.update((name, t.detach()) for name, t in zip(self._names, tensors, strict=True))
            self._tensors, self._addresses = tensors, addresses
            self.moved += 1
        return changed

    def merge(self) -> None:
        """Merge the adapters' current weights into the copies of the adapted shards (in `local`). If the policy is
        sharded, this is collective and has no deadline, so all ranks must be there."""
        moved = False
        for module, keys in self._adapted:
            for key, merged in module.merged().items():
                name, local = keys[key], getattr(merged, "_local_tensor", merged)
                kept = self.local.get(name)
                if kept is None or (kept.shape, kept.dtype, kept.device) != (local.shape, local.dtype, local.device):
                    self.local[name], moved = local.clone(), True
                else:
                    kept.copy_(local)
        self.moved += moved

    @property
    def frozen(self) -> Set[str]:
        """The names of the parameters that did not require a gradient at the last call of `refresh`, without those that
        have an adapter."""
        return self._frozen.names

    def parameters(self, names: Sequence[str]) -> list[Parameter]:
        """Return the names and shapes of some tensors as `Parameter` objects, from which transfers are planned. Each
        tensor gets an object of its own, also where every layer has a tensor of that kind."""
        return [Parameter(name=name, shape=self.shapes[name]) for name in names]

    def layout(self, world: int) -> LiveSharding:
        """Return which rank holds which part of each parameter in the trainer.

        Args:
            world: the number of ranks.

        Raises:
            ConfigError: a placement is neither a shard nor a replica, or a device mesh lists its ranks out of order.
        """
        live: dict[str, Any] = {name: held[key] for name, (held, key) in self._owners.items()}
        return read_trainer(live, world)
