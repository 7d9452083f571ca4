"""An extension of the workers of remote vLLM engines, with which the trainer checks the weights that they hold.

vLLM mixes `ServedWorker` into its worker (`worker_extension_cls`), on CPUs and GPUs alike. The trainer calls its
methods by name, in every worker, and their arguments and results travel as plain data. A worker tells which slices of
the checkpoint tensors it keeps, and digests (hashes) of their bits. The trainer's `Routes` compute the digests of the
policy's slices, to compare.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from trlx_hybrid.errors import SyncError, listed

from ..generate.support import CapturedIds
from ..private.engine import model_in, outside
from ..private.models import causal_pictures, dummy_load_format
from ..weights.loader import BITS, Route, Slice, WeightLoader
from . import gloo

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# vLLM imports this module before it loads the model and makes the worker's transfer engine.
dummy_load_format()
gloo.register()

PlainRoute = list[Any]
"""A slice of a checkpoint tensor that a worker keeps, as plain data: [dtype in the engine, shape, stride, offset].

The dtype is by torch's name; stride and offset are in elements of the checkpoint tensor.
"""


class ServedWorker:
    """Methods for the workers of remote engines, which the trainer calls by name; vLLM mixes them into its own worker.

    They tell which slices of the weights a worker keeps and digests of their bits, and record the ids that each token
    is sampled from (what top-k, top-p and min-p leave).

    Attributes:
        vllm_config: the engine's configuration, as vLLM's worker has it.
        model_runner: vLLM's model runner, as vLLM's worker has it.
    """

    vllm_config: VllmConfig
    model_runner: Any

    def served_learn(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
    ) -> list[list[Any]]:
        """Find out where vLLM's loader writes each checkpoint tensor, by loading empty tensors of these shapes.

        This overwrites the weights, so the next update must bring them. It costs no memory: the tensors that are loaded
        were never written to, and the system maps pages of zeros for them.

        Args:
            names, dtypes, shapes: name, dtype and shape of each checkpoint tensor; dtypes as torch names them, such as
                "bfloat16".

        Returns:
            Two lists: for each tensor a list of the slices of it that this worker keeps (`PlainRoute`), and the names
            of engine parameters that nothing was written to.
        """
        loader = WeightLoader(model_in(self))
        described = zip(names, dtypes, shapes, strict=True)
        report = loader.load(
            (name, torch.empty(shape, dtype=getattr(torch, dtype))) for name, dtype, shape in described
        )
        self._served_loader = loader

        def plain(route: Route) -> PlainRoute:
            dtype, read = loader.tensors[route.parameter].dtype, route.source
            return [str(dtype).removeprefix("torch."), list(read.shape), list(read.stride), read.offset]

        return [[[plain(r) for r in loader.routes.get(name, ())] for name in names], list(report.unwritten)]

    def served_causal_pictures(self) -> str | None:
        """Return why vLLM cannot serve prompts with images correctly on this worker's device, or None.

        That is so where the model's image tokens attend to each other in both directions, and vLLM's attention cannot.
        """
        return causal_pictures(self.vllm_config)

    def served_keep(self, forbidden: Sequence[int]) -> None:
        """Start to record the ids that each token is sampled from.

        Args:
            forbidden: ids that a logit bias forbids in all requests, which are left out.
        """
        if not hasattr(self, "_served_ids"):
            vocabulary = self.vllm_config.model_config.get_vocab_size()
            self._served_ids = CapturedIds(self.model_runner, vocabulary, outside)
        self._served_ids.open(forbidden)

    def served_kept(self, request_id: str, prompt_tokens: int, tokens: int, live: Sequence[str]) -> list[bytes]:
        """Return the token ids that each token of a finished request was sampled from, and drop the record.

        Args:
            request_id: the request's id, as vLLM was given it.
            prompt_tokens: how many tokens the prompt has.
            tokens: how many tokens were sampled.
            live: ids of the requests that are not finished; the records of all others are dropped.

        Returns:
            The bytes of the arrays `words` and `bounds` of a `Support`, which holds the token ids in packed form.
        """
        support = self._served_ids.take(request_id, prompt_tokens, tokens)
        self._served_ids.forget_but(live)
        return [support.words.tobytes(), support.bounds.tobytes()]

    def served_digests(self, names: Sequence[str]) -> list[list[int]]:
        """Return for each checkpoint tensor in `names` the digests (hashes of the bits) of the slices of it that this
        worker's part of the model holds.

        Call `served_learn` first, which finds out what these slices are.
        """
        loader = self._served_loader
        found = [
            [digest(r.destination.of(loader.tensors[r.parameter].data)) for r in loader.routes.get(name, ())]
            for name in names
        ]
        return [[int(d) for d in tensor] for tensor in found]


# --- the trainer's end of the check -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Routes:
    """The slices that the workers of one server keep of each checkpoint tensor. The slices are the same on all servers
    of a run.

    With these, the trainer computes the digests that the workers must have after a sync.

    Attributes:
        of: for each checkpoint name a list with an entry for each worker: pairs of the dtype in which the worker keeps
            a slice of the tensor, and the slice.
    """

    of: dict[str, list[list[tuple[torch.dtype, Slice]]]]

    @classmethod
    def learned(cls, names: Sequence[str], servers: Sequence[Sequence[Any]]) -> Routes:
        """Make the `Routes` (which slices of each checkpoint tensor each worker of a server keeps) from the results of
        `served_learn`, in which each worker says what its weight loader keeps.

        Args:
            names: the checkpoint tensors' names, in the order given to `served_learn`.
            servers: one list per server, with the result of `served_learn` of each worker.

        Raises:
            SyncError: an engine has parameters that no tensor is written to, or the servers differ.
        """
        unwritten = [name for _, missing in servers[0] for name in missing]
        if unwritten:
            raise SyncError(
                f"The weight sync would leave engine parameters unwritten: {listed(unwritten)}. The model and vLLM's "
                "definition of it disagree; use engine='transformers' and report it."
            )
        if any(server != servers[0] for server in servers):
            raise SyncError(
                "The remote engines keep the weights in different layouts. Run them on machines of one kind, with one "
                "version of vLLM."
            )
        found: dict[str, list[list[tuple[torch.dtype, Slice]]]] = {name: [] for name in names}
        for routes, _ in servers[0]:
            for name, kept in zip(names, routes, strict=True):
                slices = [(getattr(torch, d), Slice(tuple(shape), tuple(stride), at)) for d, shape, stride, at in kept]
                found[name].append(slices)
        return cls(found)

    def wire(self, dtypes: dict[str, torch.dtype]) -> dict[str, torch.dtype]:
        """Return, by name, the dtypes to cast tensors to before they are sent, to send fewer bytes.

        The result has only the tensors that all workers keep in one dtype that is narrower than the policy's.

        Args:
            dtypes: the policy's dtype of each tensor, by name.
        """
        found = {}
        for name, workers in self.of.items():
            kept = {dtype for worker in workers for dtype, _ in worker}
            if len(kept) == 1 and (dtype := next(iter(kept))).itemsize < dtypes[name].itemsize:
                found[name] = dtype
        return found

    def digests(self, weights: Iterable[tuple[str, Tensor]]) -> dict[str, list[list[int]]]:
        """Return the digests (hashes of the bits) that the workers must report if they hold these weights.

        Args:
            weights: (name, full tensor) pairs of the policy.

        Returns:
            For each name, a list per worker with the digest of each slice that the worker keeps.
        """
        found = {
            name: [[digest(part.of(tensor).to(dtype)) for dtype, part in worker] for worker in self.of[name]]
            for name, tensor in weights
        }
        return {name: [[int(d) for d in worker] for worker in workers] for name, workers in found.items()}


def differing(expected: dict[str, list[list[int]]], servers: Sequence[Sequence[Any]]) -> list[str]:
    """Return the names of the tensors of which some worker reported other digests than expected.

    Args:
        expected: the digests of the policy's tensors, by name: a list per worker with the digest of each slice.
        servers: for each server what each of its workers returned from `served_digests` for the names in `expected`.
    """
    return [
        name
        for i, (name, workers) in enumerate(expected.items())
        if any(answer[rank][i] != digests for answer in servers for rank, digests in enumerate(workers))
    ]


# --- digests ----------------------------------------------------------------------------------------------------------

PIECE = 1 << 22  # elements at a time: the computation takes 24 bytes for each
MULTIPLIERS = (-7046029254386353131, -4658895280553007687)  # of splitmix64, as signed integers


def digest(tensor: Tensor) -> Tensor:
    """Return a digest of a tensor's bits, to compare it with a copy elsewhere: one int64, on the tensor's device.

    It is the sum over the elements of their bits times a scrambled odd function of their position, modulo 2^64. One
    changed element always changes it, since odd factors are invertible. Several changes, or elements that changed
    places, cancel out with a probability of about 2^-60. Shape and dtype do not count.
    """
    bits = tensor.contiguous().reshape(-1).view(BITS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), PIECE):
        piece = bits[start : start + PIECE].to(torch.int64)
        total += (piece * _factors(start, piece)).sum()
    return total


def _factors(start: int, piece: Tensor) -> Tensor:
    mixed = torch.arange(start + 1, start + 1 + piece.numel(), device=piece.device)
    for multiplier in MULTIPLIERS:
        mixed = mixed * multiplier
        mixed = mixed ^ (mixed >> 29)
    return mixed | 1
