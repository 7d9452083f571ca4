"""Options of the weight transfer. Imports no vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trlx_hybrid.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOptions:
    """`HybridConfig.weights_options` for `weights="transfer"`.

    Attributes:
        backend: one of vLLM's weight-transfer engines by name: "nccl", or any other that is registered with vLLM where
            trainer and engines run. "auto" takes `nccl` on GPUs, and this plugin's `gloo`, through host memory, on CPUs
            and where vLLM cannot use NCCL.
        backend_options: further fields of that backend's trainer-side init info.
        deadline: seconds that joining the engines may take, and each sync.
    """

    backend: str = "auto"
    backend_options: Mapping[str, Any] = field(default_factory=dict)
    deadline: float = 600.0

    def __post_init__(self) -> None:
        if not self.deadline > 0:
            raise ConfigError(f"HybridConfig.weights_options: deadline={self.deadline}: seconds above 0.")
