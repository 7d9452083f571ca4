"""One set of weights, two owners: the policy's base parameters and the regions of vLLM's memory that belong to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import dlpack
from trlx_hybrid.errors import SyncError, listed
from trlx_hybrid.policy import is_sharded

from ..loading import differ
from ..parameters import Places

if TYPE_CHECKING:
    from trlx_hybrid.policy import Policy

    from ..engine import VLLMEngine


class SharedWeights:
    """Keeps the engine's memory equal to the policy's base parameters, by being the same memory where that can be.

    Args:
        alias: whether parameters may become views of the engine's memory; otherwise all are copied.

    Attributes:
        aliased: parameters that are views; copied: parameters whose bits are copied at each refresh.
    """

    def __init__(self, engine: VLLMEngine, policy: Policy, alias: bool) -> None:
        self._engine, self._policy, self._alias = engine, policy, alias
        self._places: Places | None = None
        self._parameters: dict[str, nn.Parameter] = {}
        self._views: dict[str, Tensor] = {}
        self._copied_once = False
        self._addresses: dict[str, int] = {}
        self.aliased: list[str] = []
        self.copied: list[str] = []

    def refuses(self) -> str | None:
        """Why the weights cannot be shared this way, or None. Loads them once through vLLM's loader, to learn where
        they lie."""
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
        if self._engine.quantized:
            return "a quantised engine keeps no copy of the weights"
        if self._engine.tensor_parallel_size > 1:
            return f"the engine holds slices (tensor_parallel_size={self._engine.tensor_parallel_size})"
        for name, p in self._policy.base_parameters().items():
            if is_sharded(p):
                return f"the policy is sharded ({name} lies on several ranks)"
            if type(p) is not nn.Parameter:
                return f"{name} is a {type(p).__name__}, whose bits are not the weights"
        return self._policy.refuses_gather()

    def _used(self) -> list[tuple[str, nn.Parameter]]:
        assert self._places is not None
        return [(n, p) for n, p in self._policy.base_parameters().items() if n in self._places.found]

    def _can_alias(self, name: str, p: nn.Parameter) -> bool:
        assert self._places is not None
        view = self._places.view(name)
        same = p.dtype == view.dtype and self._policy.device.type == view.device.type
        return self._alias and same and view.is_contiguous()

    # --- sharing ----------------------------------------------------------------------------------------------------

    def refresh(self) -> tuple[int, int]:
        """Make the engine's memory the policy's weights. A frozen base that is copied is copied once.

        Returns:
            (tensors, bytes) that were copied: both zero where everything is aliased and nobody rebound a parameter.
        """
        lost, self._copied_once = self._engine.weights_lost or not self._copied_once, True
        moved = self._moved()
        names = [*(n for n in self.copied if lost or self._parameters[n].requires_grad), *moved]
        with torch.no_grad():
            sources = [self._parameters[name].detach() for name in names]
            if names:  # one multi-tensor launch, cast on the way
                torch._foreach_copy_([self._views[name] for name in names], sources)
            for name in moved:
                self._parameters[name].data = self._views[name]
        self._engine.weights_written()
        return len(names), sum(s.numel() * s.element_size() for s in sources)

    def bind(self) -> None:
        """Rebind what can be aliased, right after the load that `refuses` made: the bits are the same."""
        assert self._places is not None, "refuses() comes first"
        for name, p in self._used():
            view, alias = self._places.view(name), self._can_alias(name, p)
            self._parameters[name] = p
            self._views[name] = own_storage(view) if alias else view.detach()
            (self.aliased if alias else self.copied).append(name)
        for name in self.aliased:
            self._parameters[name].data = self._views[name]
        self._addresses = {name: self._views[name].data_ptr() for name in self.aliased}

    def _moved(self) -> list[str]:
        """Aliased parameters that are no longer the engine's memory, because somebody rebound them."""
        parameters = self._parameters
        return [name for name, address in self._addresses.items() if parameters[name].data_ptr() != address]

    def check(self, full: bool) -> int:
        """Prove it: pointers, shapes and strides of the aliased, bits of the copied (of all when `full`).

        Returns:
            How many parameters were checked.

        Raises:
            SyncError: names each parameter that is not the engine's.
        """
        wrong = self._moved()
        for name in self.aliased:
            p, view = self._parameters[name], self._views[name]
            if p.shape != view.shape or p.stride() != view.stride():
                wrong.append(name)
        compared = self.copied if full else []
        flags = [differ(self._views[name], self._parameters[name].detach()) for name in compared]
        if flags:
            wrong += [n for n, differs in zip(compared, torch.stack(flags).tolist(), strict=True) if differs]
        buffers = self._policy.buffers() if full else {}
        wrong += self._engine.differing(buffers.items())
        if wrong:
            raise SyncError(
                f"After the weight sync the engine holds other bits than the policy in {listed(wrong)}. "
                "Report it with `trlx-hybrid env`; weights='gather' may serve meanwhile."
            )
        return len(self.aliased) + len(compared) + len(buffers)

    def release(self) -> None:
        """Give each aliased parameter memory of its own again. After the engine is closed: what it held is freed one
        fused tensor after the other as the last view of it goes."""
        views, self._views = self._views, {}
        aliased, self.aliased, self.copied, self._addresses = self.aliased, [], [], {}
        for name in aliased:
            p, view = self._parameters.pop(name), views.pop(name)
            if p.data_ptr() == view.data_ptr():
                p.data = view.clone()
        self._parameters = {}


def own_storage(view: Tensor) -> Tensor:
    """The same memory as a tensor with a storage of its own, which begins and ends with it.

    Query, key and value parameters would otherwise be three views of one storage, and whatever looks for shared
    storages (safetensors, `accelerator.save_model`) would drop two of them. Keeps the memory alive.
    """
    return dlpack.from_dlpack(view.detach())  # type: ignore[no-any-return]


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
