"""A stand-in for torchvision's compiled operators: import it before torchvision where they do not fit the installed
torch, as with a torch for CPUs, since published builds are for CUDA. It declares the operators, which then compute
nothing; image processors need none of them.

`make test-vision` imports it as Python starts.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from typing import Any

BACKWARD = ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")
OPERATORS = ("nms", "qnms", "qroi_align", *BACKWARD, *(f"_{name}_backward" for name in BACKWARD))
"""The operators for which torchvision 0.28 registers shapes."""


class Declaring(MetaPathFinder):
    """An import hook that declares the operators when torchvision is about to be imported; it never finds a module."""

    library: Any = None

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        """Declare the operators if torchvision is being imported. Python calls it for each import."""
        if fullname == "torchvision" and self.library is None:
            import torch

            self.library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
            for name in OPERATORS:
                self.library.define(f"{name}(Tensor x) -> Tensor")


sys.meta_path.insert(0, Declaring())
