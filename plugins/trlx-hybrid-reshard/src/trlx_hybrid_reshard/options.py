"""The options of the weight sync."""

from __future__ import annotations

from dataclasses import dataclass

from trlx_hybrid.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardOptions:
    """`HybridConfig.weights_options` for `weights="reshard"`.

    Attributes:
        deadline: seconds that any wait of a sync may take: for a rank to enter it, and for each bucket to arrive. A
            rank that saves a checkpoint meanwhile must be back within it.
        bucket_bytes: what one rank receives and packs at a time; two such buckets are the most extra memory a sync
            takes, unless a single row is larger.
        record: on a CUDA device, replay a sync as one CUDA graph from the second of its kind on. The buffers that it
            packs into are then kept between syncs.
    """

    deadline: float = 300.0
    bucket_bytes: int = 256 << 20
    record: bool = True

    def __post_init__(self) -> None:
        for name in ("deadline", "bucket_bytes"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}={getattr(self, name)} in the options of reshard: it must be above 0.")
