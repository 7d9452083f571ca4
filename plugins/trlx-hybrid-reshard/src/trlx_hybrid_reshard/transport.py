"""The execution of a weight sync's copies and messages on one rank, bucket by bucket. A bucket is a limited number of
bytes that move at a time: it is packed and sent, and what came in is unpacked while the next bucket is packed.

On a CUDA device, packing, unpacking and the local copies (from this rank's shards into its own engine) have a stream
each and NCCL has its own, so the host enqueues everything and waits once. From the second sync on, the copies of each
step are one CUDA graph. The local copies are most of the bytes and nothing waits for them, so they have the lowest
priority. With gloo the host waits for each bucket after it has packed the next one.
"""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Work
from trlx_hybrid.errors import PeerLostError

from .agreement import POLL, completed
from .program import BucketViews, Program, new_stream


class Transport:
    """A runner of the copies and messages of a weight sync on this rank, which can run them any number of times.

    Args:
        program: the copies and messages.
        group: the process group of all ranks, over NCCL for CUDA tensors and gloo for others; None for a single rank.
        device: the device of the engine's memory.
        stall: a number of seconds. If no bucket arrives for so long, the sync is given up.
        record: whether a CUDA device replays the copies as CUDA graphs, for which the staging buffers are kept between
            syncs.
    """

    def __init__(
        self,
        program: Program,
        group: dist.ProcessGroup | None,
        device: torch.device,
        stall: float,
        *,
        record: bool = True,
    ) -> None:
        self._program, self._group, self._stall = program, group, stall
        self._device = device
        self._peers = [
            [f"from rank {t.peer}" for t in b.receives] + [f"to rank {t.peer}" for t in b.sends]
            for b in program.buckets
        ]
        self._operations = [self._operations_of(bucket) for bucket in program.buckets]
        self._streams: list[torch.cuda.Stream] = []
        self._to_record, self._ran = record and program.on(device), False
        if device.type == "cuda":
            self._streams = [new_stream(device, priority=p) for p in (-1, -1, 0)]
            self._numbers = torch.arange(len(program.buckets) + 1, dtype=torch.int32, device=device)
            self._done = torch.zeros((), dtype=torch.int32, pin_memory=True)

    def _operations_of(self, bucket: BucketViews) -> list[dist.P2POp]:
        """Return the receives and sends of one bucket (the messages that move at one time) as torch's point-to-point
        operations."""
        receives = [dist.P2POp(dist.irecv, t.tensor, t.peer, self._group, t.tag) for t in bucket.receives]
        return receives + [dist.P2POp(dist.isend, t.tensor, t.peer, self._group, t.tag) for t in bucket.sends]

    @torch.no_grad()
    def run(self) -> None:
        """Move all bytes of the sync. When it returns, the engine's memory is written.

        Raises:
            PeerLostError: nothing arrives any more, or a rank is gone; names this rank, the bucket and the other rank.
        """
        with self._program.staging.held():
            if not self._streams:
                self._run_on_host()
            else:
                self._run_on_streams()

    def _run_on_host(self) -> None:
        """Run the copies and messages bucket by bucket, and wait on the host for the messages of each bucket, as gloo
        needs."""
        buckets = self._program.buckets
        under_way = self._launch(0) if buckets else []
        self._program.local.run()
        for number, bucket in enumerate(buckets):
            following = self._launch(number + 1) if number + 1 < len(buckets) else []
            self._wait(number, under_way)
            bucket.unpack.run()
            under_way = following
        self._program.duplicates.run()

    def _launch(self, number: int) -> list[Work]:
        """Pack a bucket, given by its number, and start to send and receive its messages. Returns the work handles to
        wait for.

        Raises:
            PeerLostError: a message could not be started, because a rank is gone.
        """
        self._program.buckets[number].pack.run()
        operations = self._operations[number]
        if not operations:
            return []
        try:
            return dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            raise self._failed(number, "exchange with", None, error) from error

    def _wait(self, number: int, under_way: list[Work]) -> None:
        """Wait for all messages of a bucket (the messages that move at one time).

        Args:
            number: the number of the bucket.
            under_way: the work handles that `_launch` returned.

        Raises:
            PeerLostError: a message does not arrive within `stall` seconds.
        """
        ends = time.monotonic() + self._stall
        for work, peer in zip(under_way, self._peers[number], strict=False):
            try:
                work.wait(timedelta(seconds=max(0.001, ends - time.monotonic())))
            except RuntimeError as error:
                raise self._failed(number, "message", peer, error) from error

    def _run_on_streams(self) -> None:
        """Run the copies and messages on CUDA streams. Before the second run, the copies are recorded as CUDA
        graphs."""
        if self._to_record and self._ran:
            self._program.record(self._device)
            self._to_record = False
        self._done.zero_()
        self._enqueue()
        self._wait_for(torch.cuda.current_stream(self._device).record_event())
        self._ran = True

    def _enqueue(self) -> None:
        """Launch all work of the sync on the device, without waiting for it. Work that is later launched on the current
        stream waits until the sync has ended."""
        packing, writing, beside = self._streams
        caller = torch.cuda.current_stream(self._device)
        for stream in self._streams:
            stream.wait_stream(caller)
        written: list[torch.cuda.Event] = []
        with torch.cuda.stream(beside):
            self._program.local.run()
        for number, bucket in enumerate(self._program.buckets):
            with torch.cuda.stream(packing):
                if number >= 2:  # this bucket takes that one's buffer
                    packing.wait_event(written[number - 2])
                under_way = self._launch(number)
            with torch.cuda.stream(writing):
                for work in under_way:
                    work.wait()  # the stream waits, not the host
                bucket.unpack.run()
                self._done.copy_(self._numbers[number + 1], non_blocking=True)
                written.append(writing.record_event())
        for stream in self._streams:
            caller.wait_stream(stream)
        self._program.duplicates.run()

    def _wait_for(self, end: torch.cuda.Event) -> None:
        """Wait for a CUDA event that marks the end of the sync.

        Raises:
            PeerLostError: no bucket completes for `stall` seconds.
        """
        done, ends = int(self._done), time.monotonic() + self._stall
        while not completed(end):
            if (now := int(self._done)) != done:
                done, ends = now, time.monotonic() + self._stall
            if time.monotonic() > ends:
                raise self._failed(min(done, len(self._peers) - 1), "exchange", None, None)
            time.sleep(POLL)

    def _failed(self, number: int, what: str, peer: str | None, error: Exception | None) -> PeerLostError:
        """Return the error for a bucket (the messages that move at one time) that did not complete.

        Args:
            number: the number of the bucket.
            what: the operation that failed, for the message.
            peer: the other rank, as text; None for all ranks with which the bucket exchanges data.
            error: the cause, if there is one.
        """
        peers = peer or ", ".join(sorted(set(self._peers[number])))
        reason = f" ({str(error).splitlines()[0][:200]})" if error is not None else ""
        return PeerLostError(
            f"Rank {dist.get_rank()} did not complete bucket {number + 1} of {len(self._peers)} (deadline "
            f"{self._stall:g} s): the {what} {peers} is missing{reason}. If the network is only slow, raise `stall` "
            "in HybridConfig.weights_options."
        )
