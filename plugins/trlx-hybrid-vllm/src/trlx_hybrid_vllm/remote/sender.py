"""The trainer's side of a weight transfer by vLLM: the choice of a backend, the tensors sent, the calls to servers."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from trlx_hybrid.contract.serving import ServedEngine
from trlx_hybrid.errors import ConfigError
from trlx_hybrid.policy.policy import Policy
from vllm.distributed.weight_transfer import ParamMeta, WeightSource

from ..arguments import on_cpu
from ..options import TransferOptions
from ..private.distributed import nccl_missing, transfer_backends

if TYPE_CHECKING:
    from trlx_hybrid.session import Session
    from vllm.distributed.weight_transfer.base import TrainerInitInfo

METADATA_IS_READ = isinstance(WeightSource.metadata, property)
"""True from vLLM 0.33 on, where `WeightSource.metadata` is a property; before, it was a method."""
REMEDY = "Let VLLM_NCCL_SO_PATH name a libnccl.so.2 that fits vLLM"


def backend_of(session: Session) -> str:
    """Return the name of the weight-transfer backend to use: the option `backend` of the weight sync `transfer`, unless
    it is "auto". "auto" means `nccl` on GPUs where vLLM can use NCCL, else `gloo`.

    Raises:
        ConfigError: `nccl` was chosen, and vLLM cannot use it here.
    """
    options = [path.options for path in session.selection.weight_paths]
    wanted = next((o.backend for o in options if isinstance(o, TransferOptions)), "auto")
    if wanted == "nccl" and (why := nccl_missing()):
        raise ConfigError(
            f"HybridConfig.weights_options: backend='nccl': {why} {REMEDY}, or take backend='gloo', which goes through "
            "host memory."
        )
    if wanted != "auto":
        return wanted
    return "gloo" if on_cpu() or nccl_missing() else "nccl"


def init_info(backend: str, fields: Mapping[str, Any], options: Mapping[str, Any]) -> TrainerInitInfo:
    """Return the object with which vLLM opens the trainer's end of a weight transfer (the backend's init info).

    Args:
        backend: the backend's name.
        fields: values that a backend may need, by field name; fields that this backend's init info lacks are left out.
        options: the user's values (`TransferOptions.backend_options`), which take precedence over `fields`.

    Raises:
        ConfigError: vLLM knows no such backend, or the backend needs fields that nobody gave.
    """
    known = transfer_backends()
    if backend not in known:
        raise ConfigError(f"vLLM has no weight-transfer backend {backend!r}. It has {', '.join(known)}.")
    kind = known[backend]().init_info_cls
    has = {f.name for f in dataclasses.fields(kind)}
    try:
        return kind(**{name: value for name, value in fields.items() if name in has} | dict(options))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"Weight-transfer backend {backend!r}: {error}. Give what it needs in HybridConfig.weights_options: "
            "{'backend_options': {...}}."
        ) from error


class GroupClient:
    """A `VLLMWeightSyncClient` for several servers: each call goes to all at once, and returns when all have answered.

    Every server is an engine of its own and numbers its workers from 0. The process group of the weight transfer has
    the workers of all servers, so arguments that go by ranks of this group are split between the servers.

    Args:
        engine: the remote engine, which has the connections to the servers.
        deadline: how many seconds each call may take.
    """

    def __init__(self, engine: ServedEngine, deadline: float) -> None:
        self._engine, self._deadline = engine, deadline

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let all workers join the process group that the trainer opens.

        Args:
            init_info: the backend's init info; `rank_offset` is the rank of the first server's first worker.
        """
        offset, size = init_info.get("rank_offset"), self._engine.plan.ranks
        places = range(len(self._engine.servers))
        infos = [init_info if offset is None else init_info | {"rank_offset": offset + p * size} for p in places]
        self._call("init_weight_transfer_engine", [(info,) for info in infos])

    def start_weight_update(self) -> None:
        """Let all servers begin a weight update."""
        self._call("start_weight_update", [()] * len(self._engine.servers))

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Let all workers receive weights.

        Args:
            update_info: the backend's description of the tensors, for all workers or as a list with one for each.
        """
        servers, size = len(self._engine.servers), self._engine.plan.ranks
        infos: list[Any] = [update_info] * servers
        if isinstance(update_info, list):
            infos = [update_info[place * size : (place + 1) * size] for place in range(servers)]
        self._call("update_weights", [(info,) for info in infos])

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Let all servers finish a weight update, after all weights have been sent."""
        self._call("finish_weight_update", [(weight_version,)] * len(self._engine.servers))

    def _call(self, method: str, arguments: Sequence[Sequence[Any]]) -> None:
        self._engine.call(method, arguments, self._deadline)


class PolicySource(WeightSource):  # type: ignore[misc]
    """The policy's full tensors under checkpoint names, with adapters merged, for vLLM's weight transfer.

    For each sync, all tensors are read once, one by one, between `begin` and `finish`. Reading is collective: every
    rank must read all tensors.

    Attributes:
        described: name, dtype and shape of each tensor as the policy has it, in order. To learn them, the constructor
            reads all tensors once.
        wire: by name, the dtypes to which tensors are cast before they are sent; tensors without an entry keep their
            dtype.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._pass: Iterator[tuple[str, Tensor]] = iter(())
        self._reading = threading.Lock()
        self.described = [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in policy.full_weights()]
        self.wire: Mapping[str, torch.dtype] = {}

    @property
    def bytes(self) -> int:
        """The bytes of all tensors that one sync sends."""
        return sum(torch.Size(m.shape).numel() * m.dtype.itemsize for m in self.as_sent())

    def as_sent(self) -> list[ParamMeta]:
        """Return the name, dtype and shape of each tensor that one sync sends, in the order in which they are read."""
        return [ParamMeta(m.name, self.wire.get(m.name, m.dtype), m.shape) for m in self.described]

    metadata = functools.cached_property(as_sent) if METADATA_IS_READ else as_sent

    def send_as(self, wire: Mapping[str, torch.dtype]) -> None:
        """Set the dtypes, by name, to which tensors are cast before they are sent, and drop the cached metadata."""
        self.wire = wire
        self.__dict__.pop("metadata", None)

    def begin(self) -> None:
        """Begin a pass over all of the policy's tensors, at the first one. Call it on every rank: each rank then takes
        part in gathering every tensor, by iterating over this object or with `finish`, which must end the pass."""
        self._pass = self._policy.full_weights()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        while (weight := self._next()) is not None:
            name, tensor = weight
            yield name, tensor.to(self.wire.get(name, tensor.dtype))

    iter_full = __iter__  # as vLLM calls it from 0.33 on

    def finish(self) -> None:
        """Read the tensors that have not been read since `begin`.

        There are such tensors if sending has failed on this rank. The other ranks go on to read, and wait for this rank
        at each tensor, so it must read all of them, too.
        """
        while self._next() is not None:
            pass

    def _next(self) -> tuple[str, Tensor] | None:
        """Return the name and the tensor that are next to read since `begin`; None after the last.

        Takes a lock: a thread that was sending when the deadline passed may still be reading.
        """
        with self._reading:
            return next(self._pass, None)
