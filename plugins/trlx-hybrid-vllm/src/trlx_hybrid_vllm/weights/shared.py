"""Weight sync on one device, by sharing memory (`weights="alias"`) or by copies (`weights="copy"`).

For a policy that is not sharded, and an engine that runs on one rank.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import dlpack
from trlx_hybrid.contract.protocols import WeightSync
from trlx_hybrid.contract.types import LoadReport
from trlx_hybrid.errors import SyncError, listed
from trlx_hybrid.memory.ledger import torch_optimizer
from trlx_hybrid.policy.fingerprint import Frozen
from trlx_hybrid.policy.sharded import is_sharded
from trlx_hybrid.weights.verify import Rotation

from .loader import differ, flagged
from .weight_map import Places

if TYPE_CHECKING:
    from trlx_hybrid.session import Session

SMALL_RATE = 1e-5  # below, an AdamW step is smaller than half the distance of most bf16 weights to their neighbour


class SharedSync(WeightSync):
    """Weight sync that keeps the engine's weights equal to the policy's base parameters. Parameters share the engine's
    memory where they can, and are copied into it otherwise.

    A shared parameter is a view of the engine's memory. The user's code may rebind or replace it at any time
    (`p.data = averaged`, `load_state_dict(assign=True)`). So each parameter is looked up in its module at each sync,
    and a parameter that is no longer a view is copied into the engine's memory. If no other tensor uses the old or the
    new memory, the parameter then becomes a view again. If another tensor still uses the engine's memory, for instance
    to restore the weights after an evaluation, the former bits are saved before the copy and put back after the
    rollout.

    Args:
        alias: whether parameters may become views of the engine's memory; otherwise all are copied.
        adapted: whether the policy's adapters are brought by other means (LoRA slots, merging), and only the base
            weights by this object.

    Attributes:
        keeps_weights: True where the engine's weights must stay in memory after the rollout, because the policy's
            parameters are views of them.
        aliased: names of the parameters that are views of the engine's memory.
        copied: names of the parameters whose bits are copied at each sync.
    """

    def __init__(self, session: Session, alias: bool, adapted: bool = False) -> None:
        self.name = "alias" if alias else "copy"
        self.keeps_weights = self._alias = alias
        self._session, self._policy, self._adapted = session, session.policy, adapted
        self._places: Places | None = None
        self._slots: dict[str, tuple[dict[str, nn.Parameter | None], str]] = {}
        self._views: dict[str, Tensor] = {}
        self._frozen = Frozen()
        self._copied_once = False
        self._turns = Rotation()
        self._borrowed: dict[str, Tensor] = {}
        self.aliased: list[str] = []
        self.copied: list[str] = []

    @property
    def _engine(self) -> Any:
        return self._session.live_engine

    def refuses(self) -> str | None:
        """Return why the policy's weights cannot be shared with this engine, or copied into it; None if they can.

        Loads the weights once through vLLM's loader, to learn where in the engine's memory they lie.
        """
        reason = self._refuses_at_sight()
        if reason is None:
            self._places = self._engine.places(self._policy)
            reason = next((f"{name}: {why}" for name, why in self._places.refused.items()), None)
            if reason is not None and len(self._places.refused) > 1:
                reason += f" (and {len(self._places.refused) - 1} more)"
        if reason is None and self._alias and not any(self._can_alias(n, p) for n, p in self._used()):
            return f"the policy is in {_name(self._policy.dtype)}, the engine computes in {_name(self._engine.dtype)}"
        return reason

    def _refuses_at_sight(self) -> str | None:
        engine, policy = self._engine, self._policy
        if not hasattr(engine, "places"):
            return "it reaches into vLLM's memory, and another engine is in use"
        if policy.adapters and not self._adapted:
            return "the policy has adapters, which `lora` serves and `merged` and `gather` merge"
        if engine.quantized:
            return "a quantised engine keeps no copy of the weights"
        if engine.ranks_per_replica > 1:
            return f"each of the {engine.ranks_per_replica} ranks of an engine holds a part of the weights"
        for name, p in policy.base_parameters().items():
            if is_sharded(p):
                return f"the policy is sharded ({name} lies on several ranks)"
            if type(p) is not nn.Parameter:
                return f"{name} is a {type(p).__name__}, whose bits are not the weights"
        flat = self._flattened() if self._alias and not self._adapted else None
        if flat is not None:
            return f"the optimizer steps a flat buffer that {flat} is a part of (DeepSpeed); an alias would leave it"
        return policy.refuses_gather()

    def _flattened(self) -> str | None:
        """Return the name of a trained parameter that shares a flat buffer with others, if the optimizer updates the
        buffer and not the parameter; None if there is no such parameter.

        DeepSpeed's ZeRO-1 and 2 have such buffers. An optimizer with a master copy of each parameter is no such case,
        because it writes to the parameter itself.
        """
        optimizer = self._session.optimizer()
        if optimizer is None:
            return None
        stepped = {id(p) for group in torch_optimizer(optimizer).param_groups for p in group["params"]}
        trained = {name: p for name, p in self._policy.base_parameters().items() if p.requires_grad}
        buffers = {name: p.untyped_storage().data_ptr() for name, p in trained.items()}
        parts = Counter(buffers.values())
        return next((name for name, p in trained.items() if id(p) not in stepped and parts[buffers[name]] > 1), None)

    def _used(self) -> list[tuple[str, nn.Parameter]]:
        assert self._places is not None
        return [(n, p) for n, p in self._policy.base_parameters().items() if n in self._places.found]

    def _can_alias(self, name: str, p: nn.Parameter) -> bool:
        assert self._places is not None
        view = self._places.view(name)
        same = p.dtype == view.dtype and self._policy.device.type == view.device.type
        return self._alias and same and view.is_contiguous()

    # --- sharing -----------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Turn each parameter that can be shared into a view of the engine's memory (`aliased`).

        Called right after `refuses`, which has loaded the weights into the engine: so no parameter's bits change.
        """
        assert self._places is not None, "refuses() comes first"
        self._slots = self._policy.base_slots()
        for name, p in self._used():
            view, alias = self._places.view(name), self._can_alias(name, p)
            self._views[name] = own_storage(view) if alias else view.detach()
            (self.aliased if alias else self.copied).append(name)
        for name in self.aliased:
            self._parameter(name).data = self._views[name]

    def note(self) -> str | None:
        """Return a warning, printed when the run starts, that rounding to 16 bits loses most optimizer steps. It is
        given for shared 16-bit weights at a low learning rate; otherwise the result is None.
        """
        rate = getattr(self._session.args, "learning_rate", None)
        if not self._alias or self._policy.dtype.itemsize > 2 or rate is None or rate >= SMALL_RATE:
            return None
        return (
            f"note: the policy is in {_name(self._policy.dtype)}, and steps at learning_rate={rate:g} are mostly lost "
            "in its rounding (at 1e-6 some 2% of the weights change in 20 steps). Load the model in float32 with "
            "bf16=True for an fp32 master, which is cast into the engine (`copy`)."
        )

    def sync(self) -> LoadReport:
        """Copy to the engine all parameters that are not views of its memory. Frozen parameters are copied only once.

        Returns:
            Number and bytes of the tensors copied: none where all are views and nobody rebound a parameter.

        Raises:
            SyncError: a parameter has another shape than when the engine was built.
        """
        lost, self._copied_once = self._engine.weights_lost or not self._copied_once, True
        copied = {name: self._parameter(name) for name in self.copied}
        frozen = {name: p for name, p in copied.items() if not self._changes(name, p)}
        lost |= self._frozen.changed(frozen)
        moved = self._moved()
        kept = {name for name in moved if not _refers_alone(self._views[name])}
        own = {name for name, p in moved.items() if _refers_alone(p) and p.dtype == self._views[name].dtype}
        sources = {name: p.detach() for name, p in (copied | moved).items() if lost or name not in frozen}
        resized = [name for name, source in sources.items() if source.shape != self._views[name].shape]
        if resized:
            raise SyncError(
                f"{listed(resized)} got another shape. Release the engine before the model is resized "
                "(`session.release_engine()`), and drop the optimizer, whose state has the old one "
                "(`trainer.optimizer = None`): both are made anew."
            )
        self._borrowed |= {name: self._views[name].clone() for name in kept - self._borrowed.keys()}
        with torch.no_grad():
            self._write(sources)
        for name in own - self._borrowed.keys():
            moved[name].data = self._views[name]
        self._engine.weights_written()
        return LoadReport(tensors=len(sources), bytes=sum(s.nbytes for s in sources.values()))

    def _changes(self, name: str, p: nn.Parameter) -> bool:
        """Return whether the policy's parameter `p`, called `name`, may change between syncs and so must be written to
        the engine at every sync. True for every trained parameter. A subclass may return True for further parameters,
        such as weights that an adapter is merged into."""
        return p.requires_grad

    def _write(self, sources: dict[str, Tensor]) -> None:
        """Copy tensors into the engine, with a cast to its dtype, in one multi-tensor launch.

        Args:
            sources: the policy's tensors by parameter name.
        """
        if sources:
            torch._foreach_copy_([self._views[name] for name in sources], list(sources.values()))

    def _written(self, name: str) -> Tensor:
        """Return what a sync writes into the engine for the parameter of this name, for the comparison afterwards.

        It is not cast to the engine's dtype yet.
        """
        return self._parameter(name).detach()

    def put_back(self) -> bool:
        """Write back the engine's former bits where a sync overwrote memory that tensors of the user's code still use.

        If the user's code keeps tensors of the policy, they lie in the memory that policy and engine share. Called
        after the rollout.

        Returns:
            Whether anything was restored, so that the engine no longer has the policy's weights.
        """
        borrowed, self._borrowed = self._borrowed, {}
        for name, bits in borrowed.items():
            self._views[name].copy_(bits)
        return bool(borrowed)

    def forget(self) -> None:
        """Look up all parameters again, because modules may have been replaced, and copy them at the next sync."""
        self._slots |= self._policy.base_slots()
        self._copied_once = False

    def _parameter(self, name: str) -> nn.Parameter:
        """Return the policy's parameter of this name, as its module holds it now; it may have been replaced."""
        held, key = self._slots[name]
        p = held[key]
        assert p is not None, name
        return p

    def _moved(self) -> dict[str, nn.Parameter]:
        """Return, by name, the parameters that are views of the engine's memory no longer: somebody rebound them."""
        now = ((name, self._parameter(name)) for name in self.aliased)
        return {name: p for name, p in now if p.data_ptr() != self._views[name].data_ptr()}

    def check(self, full: bool) -> int:
        """Check that shared parameters are still views of the engine's memory, and that copied parameters have the same
        bits as the engine's.

        Args:
            full: compare the bits of all copied parameters; else of a few at each call, in turn.

        Returns:
            How many parameters were checked.

        Raises:
            SyncError: the engine's weights are not the policy's; the message names each parameter.
        """
        moved = self._moved()
        copied = self.copied if full else self._turns.take(self.copied)
        compared = [*copied, *moved]
        wrong = []
        for name in self.aliased:
            p, view = self._parameter(name), self._views[name]
            if name not in moved and (p.shape != view.shape or p.stride() != view.stride()):
                wrong.append(name)
        if full:
            live = self._policy.base_parameters()
            wrong += [name for name in (*self.aliased, *self.copied) if live.get(name) is not self._parameter(name)]
        flags = [differ(self._views[name], self._written(name)) for name in compared]
        wrong += flagged(compared, flags)
        buffers = self._policy.buffers() if full else {}
        wrong += self._engine.differing(buffers.items())
        refuse_other_bits("the engine holds other bits than the policy", wrong)
        return len(self.aliased) + len(copied) + len(buffers)

    def release(self) -> None:
        """Give each parameter that is a view of the engine's memory its own memory again.

        Must be called after the engine is closed. Then each fused tensor of the engine is freed as soon as no parameter
        is a view of it, so that the copies do not need the memory of all weights once more.
        """
        views, self._views, self._places = self._views, {}, None
        aliased, self.aliased, self.copied = self.aliased, [], []
        for name in aliased:
            p, view = self._parameter(name), views.pop(name)
            if p.data_ptr() == view.data_ptr():
                p.data = view.clone()
        self._slots, self._frozen = {}, Frozen()


def refuse_other_bits(what: str, differing: list[str]) -> None:
    """Raise a SyncError that names the differing weights, if there are any.

    Args:
        what: what is wrong with them, for the message ("the engine holds other bits than the policy").
        differing: the names of the weights.
    """
    if differing:
        raise SyncError(
            f"After the weight sync {what} in {listed(differing)}. Report it with `trlx-hybrid env`; weights='gather' "
            "may serve meanwhile."
        )


def own_storage(view: Tensor) -> Tensor:
    """Return a tensor in the same memory as `view`, whose storage begins and ends with the tensor.

    Query, key and value parameters would otherwise be three views of one storage, and whatever looks for shared
    storages (safetensors, `accelerator.save_model`) would drop two of them. The result keeps the memory alive.
    """
    return dlpack.from_dlpack(view.detach())


def _refers_alone(tensor: Tensor) -> bool:
    """Return whether no other tensor uses this tensor's storage.

    The storage's use count is then 2: one for the tensor, and one for the handle by which the count is read.
    """
    storage = tensor.untyped_storage()
    return bool(torch._C._storage_Use_Count(storage._cdata) == 2)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
