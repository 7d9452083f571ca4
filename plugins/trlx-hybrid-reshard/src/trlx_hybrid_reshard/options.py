"""The options of `weights="reshard"`, which copies weights from the trainer's shards into tensor-parallel engines."""

from __future__ import annotations

from dataclasses import dataclass

from trlx_hybrid.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardOptions:
    """Options of the weight path `reshard`: `HybridConfig.weights_options` for `weights="reshard"`.

    Attributes:
        deadline: seconds to wait for a rank that is alive and has not come to the sync. Such a rank may be saving a
            checkpoint. The default equals transformers' own limit for that, `ddp_timeout`. A dead rank is not waited
            for.
        stall: a number of seconds. If no data arrives for so long, after all ranks have come to the sync, the sync
            counts as failed.
        bucket_bytes: the bytes that one rank receives and packs at a time, which make one bucket. A sync takes at most
            two buckets of extra memory, unless a single row of a tensor is larger.
        record: whether, on a CUDA device, the copies of a sync are replayed as CUDA graphs from the second sync of the
            same parameters on. The buffers that the sync packs into are then kept between syncs.
    """

    deadline: float = 1800.0
    stall: float = 30.0
    bucket_bytes: int = 256 << 20
    record: bool = True

    def __post_init__(self) -> None:
        for name in ("deadline", "stall", "bucket_bytes"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}={getattr(self, name)} in the options of reshard: it must be above 0.")
