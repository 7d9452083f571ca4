"""What vLLM's own workers are given on top: they know where weights lie, and can tell what they hold.

vLLM mixes this class into its worker (`worker_extension_cls`), on CPUs and GPUs alike. Its methods are called by name,
in every worker, and their arguments and results travel as plain data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import dummy_loader  # noqa: F401  (registers itself)
from . import gloo
from .digest import digest

gloo.register()  # vLLM imports this module before it loads the model and makes the worker's transfer engine

PlainRoute = list[Any]
"""Of one copy of the loader: dtype of the engine's parameter; shape, stride and offset of the slice that is read."""


class ServedWorker:
    """Mixed into vLLM's worker."""

    def served_learn(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
    ) -> list[list[Any]]:
        """Find out where each checkpoint tensor goes, from what the loader does with tensors of these shapes.

        Overwrites the weights, so the next update must bring them. Costs no memory: what is loaded was never written
        to, and the system maps pages of zeros for it.

        Returns:
            Two lists: by tensor its routes (`PlainRoute`), and engine parameters that nothing was written to.
        """
        from ..loading import WeightLoader

        loader = WeightLoader(self.model_runner.model)  # type: ignore[attr-defined]
        described = zip(names, dtypes, shapes, strict=True)
        report = loader.load(
            (name, torch.empty(shape, dtype=getattr(torch, dtype))) for name, dtype, shape in described
        )
        self._served_loader = loader
        tensors = loader.tensors
        routes = [
            [
                [_name(tensors[r.parameter].dtype), list(r.source.shape), list(r.source.stride), r.source.offset]
                for r in loader.routes.get(name, ())
            ]
            for name in names
        ]
        return [routes, list(report.unwritten)]

    def served_digests(self, names: Sequence[str]) -> list[list[int]]:
        """By tensor, the digest of what lies at the end of each of its routes."""
        loader = self._served_loader
        found = [
            [digest(r.destination.of(loader.tensors[r.parameter].data)) for r in loader.routes.get(name, ())]
            for name in names
        ]
        return [[int(d) for d in tensor] for tensor in found]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
