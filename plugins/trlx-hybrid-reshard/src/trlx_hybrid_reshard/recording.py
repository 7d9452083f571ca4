"""Copies as one CUDA graph: a replay costs the host one launch, however many tensors are copied."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Recording:
    """The hundreds of copies of a sync cost the host about 5 ms for a model of 7B; recorded, a few launches.

    Only copies are recorded, no messages. NCCL registers the buffers of point-to-point operations that it finds in a
    graph, and an engine that sleeps unmaps those and maps other memory at the same addresses: the next replay would
    write to pages that are gone, for ever (NVIDIA/nccl, `NCCL_GRAPH_REGISTER`). A graph with messages in it would also
    keep their communicator from ever being destroyed. Copies name addresses and nothing else.

    The memory must stay at its addresses.

    Args:
        enqueue: launches the copies from the current stream. Ran once before, so that nothing is set up meanwhile.
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
