"""The launches of a sync as one CUDA graph: a replay costs the host one launch, however many tensors move."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Recording:
    """Hundreds of copies and messages cost the host about 5 ms for a model of 7B; recorded, they cost it one launch. A
    sync gets no shorter by that alone, as long as the device is as busy as the host was. NCCL's point-to-point
    operations can be recorded as they are.

    Memory that the launches name must stay where it is. Close the recording before the process group is destroyed,
    which waits for it.

    Args:
        enqueue: launches everything from the current stream, and makes that stream wait for the end. Ran once before,
            so that nothing is set up while it is recorded.
    """

    def __init__(self, enqueue: Callable[[], None], device: torch.device) -> None:
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # Other threads of this process (NCCL's watchdog) go on calling CUDA meanwhile.
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            enqueue()

    def replay(self) -> None:
        """Launch it on the current stream."""
        self._graph.replay()

    def close(self) -> None:
        """Forget it."""
        self._graph.reset()
