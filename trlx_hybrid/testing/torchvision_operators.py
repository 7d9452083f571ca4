"""Lets torchvision be imported beside a torch that its compiled part does not fit, as a torch for CPUs, since published
builds are for CUDA: importing this before it declares its operators, which compute nothing. Processors of images need
none of them.

`make test-vision` imports it as Python starts.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from typing import Any

BACKWARD = ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")
OPERATORS = ("nms", "qnms", "qroi_align", *BACKWARD, *(f"_{name}_backward" for name in BACKWARD))
"""Those for which torchvision 0.28 registers shapes."""


class Declaring(MetaPathFinder):
    """Declares the operators when torchvision is about to be imported, and finds nothing."""

    library: Any = None

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        """Called by Python for each import."""
        if fullname == "torchvision" and self.library is None:
            import torch

            self.library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
            for name in OPERATORS:
                self.library.define(f"{name}(Tensor x) -> Tensor")


sys.meta_path.insert(0, Declaring())
