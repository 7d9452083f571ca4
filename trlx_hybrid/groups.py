"""Process groups that lost a rank."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch.distributed as dist


def abort(groups: Iterable[Any], seconds: float = 0.0) -> None:
    """End what NCCL's groups do on the device, where their kernels wait for a peer, and forget the groups.

    To destroy one is to wait for all its ranks: on two GPUs, with a rank that was alive and elsewhere, the other one
    could not end until that rank's process had. To abort one may wait as well, for kernels, for other groups, for
    recordings of its operations (destroy those first: vLLM's pynccl.py says the same). Hence a thread of its own.

    Args:
        seconds: to wait for it.
    """

    def run() -> None:
        for group in groups:
            with suppress(Exception):  # of a group that is gone already; there is nobody to tell
                dist.distributed_c10d._abort_process_group(group)  # type: ignore[attr-defined]

    thread = threading.Thread(target=run, name="abort-groups", daemon=True)
    thread.start()
    thread.join(seconds)
