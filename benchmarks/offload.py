"""Seconds of moving optimizer state to the host and back, against raw copies, and the stall that its return causes.

The state is AdamW's in fp32, for a model of the given shape; it leaves and returns through
`trlx_hybrid.memory.offload`. The raw arm copies one long device buffer of as many bytes to and from pinned memory.
Times are wall times until the device is idle: ours include finding the tensors and, on the way back, asking the driver
for their memory; returning the memory to the driver is case `free`. Every return is compared bit for bit. Case
`compute` is a second of matrix products: alone, during the return, and after it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from trlx_hybrid.memory.arena import Arena
from trlx_hybrid.memory.ledger import optimizer_tensors, storages
from trlx_hybrid.memory.offload import Offload

from .digest import digest
from .harness import Arm, Measurement, Timed, alternate, seconds_of
from .result import Result, accelerator
from .rollout import SCALES

WARMUP = 3
WAYS = ("out", "back")
RAW_CHUNK = 1 << 30
SPARE = 16 << 20  # bytes of the arena for padding
COMPUTE_SECONDS = 1.0
SIDE = {"1.5b": 8192, "tiny": 512}  # of the matrices multiplied


def shapes(config: Any) -> list[tuple[int, ...]]:
    """Return the shapes of a Qwen2 model's parameters, in order; an untied head comes last."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    attention = [(hidden, hidden), (hidden,), (kv, hidden), (kv,), (kv, hidden), (kv,), (hidden, hidden)]
    layer = [*attention, (inner, hidden), (inner, hidden), (hidden, inner), (hidden,), (hidden,)]
    embedding = (config["vocab_size"], hidden)
    head = [] if config["tie_word_embeddings"] else [embedding]
    return [embedding, *layer * config["num_hidden_layers"], (hidden,), *head]


def stepped(sizes: Sequence[tuple[int, ...]], device: torch.device) -> torch.optim.Optimizer:
    """Return an optimizer after one step on random gradients."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(size, device=device)) for size in sizes]
    for p in parameters:
        p.grad = torch.randn_like(p)
    optimizer = torch.optim.AdamW(parameters, fused=True)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


class RawCopies:
    """One long device buffer and pinned memory for it, which always hold the same bytes."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._device = torch.split(torch.ones(nbytes, dtype=torch.uint8, device=device), RAW_CHUNK)
        self._host = [torch.zeros(part.numel(), dtype=torch.uint8, pin_memory=pinned) for part in self._device]

    def leave(self) -> None:
        """Copy from the device to the host."""
        for there, here in zip(self._host, self._device, strict=True):
            there.copy_(here, non_blocking=True)

    def come_back(self) -> None:
        """Copy from the host to the device."""
        for there, here in zip(self._host, self._device, strict=True):
            here.copy_(there, non_blocking=True)


class OptimizerState:
    """An optimizer's state, its offload, and a hash of its bits."""

    def __init__(self, sizes: Sequence[tuple[int, ...]], device: torch.device) -> None:
        self._optimizer = stepped(sizes, device)
        self._tensors: list[Tensor] = list(optimizer_tensors(self._optimizer))
        self.bytes = sum(s.nbytes() for s in storages(self._tensors) if s.device.type == device.type)
        self.arena = Arena(device)
        self.offload = Offload(self.arena, lambda: optimizer_tensors(self._optimizer))
        self.arena.reserve(self.bytes + SPARE)
        self._digest = self._bits()

    def _bits(self) -> int:
        return digest((str(index), tensor) for index, tensor in enumerate(self._tensors))

    def leave(self) -> None:
        """Move the state to the host. Raises RuntimeError unless all of it left."""
        if (left := self.offload.leave()) != self.bytes:
            raise RuntimeError(f"Not all of the {self.bytes} bytes left: {self.bytes - left} stayed.")

    def free(self) -> None:
        """Return the memory to the driver, where an engine can take it."""
        if self.arena.stream is not None:
            torch.cuda.empty_cache()

    def check(self) -> None:
        """Raise RuntimeError unless the state is back, bit for bit."""
        if not self.offload.resident or self._bits() != self._digest:
            raise RuntimeError("The optimizer state came back with other bits.")


class Compute:
    """Matrix products that take about a second and need none of the state."""

    def __init__(self, side: int, device: torch.device) -> None:
        self._a = torch.randn(side, side, device=device, dtype=torch.bfloat16)
        self._out = torch.empty_like(self._a)
        self._count = 10
        seconds_of(self.run)
        self._count = max(1, int(self._count * COMPUTE_SECONDS / seconds_of(self.run)))

    def run(self) -> None:
        """Queue the matrix products."""
        for _ in range(self._count):
            torch.mm(self._a, self._a, out=self._out)


def copies(state: OptimizerState, raw: RawCopies, repetitions: int) -> list[Measurement]:
    """Measure both directions in each round; the raw arm runs before ours in each direction."""
    names = [("out", "raw"), ("out", "offload"), ("free", "offload"), ("back", "raw"), ("back", "offload")]
    taken: dict[tuple[str, str], list[float]] = {name: [] for name in names}
    for _ in range(WARMUP + repetitions):
        taken["out", "raw"].append(seconds_of(raw.leave))
        taken["out", "offload"].append(seconds_of(state.leave))
        taken["free", "offload"].append(seconds_of(state.free))
        taken["back", "raw"].append(seconds_of(raw.come_back))
        taken["back", "offload"].append(seconds_of(state.offload.return_all))
        state.check()
    return [Measurement(arm, tuple(seconds[WARMUP:]), case) for (case, arm), seconds in taken.items()]


def stalls(state: OptimizerState, compute: Compute, repetitions: int) -> list[Measurement]:
    """Measure the same work alone, during the return, and after it."""

    def under() -> None:
        state.offload.start_return()
        compute.run()
        state.offload.finish_return()

    def behind() -> None:
        state.offload.return_all()
        compute.run()

    def arm(name: str, work: Callable[[], object], away: bool) -> Arm:
        def run(turn: int) -> Timed:
            if away:
                state.leave()
                state.free()
            seconds = seconds_of(work)
            state.check()
            return Timed(seconds)

        return Arm(name, run)

    arms = [arm("alone", compute.run, False), arm("return-under", under, True), arm("return-first", behind, True)]
    return alternate(arms, warmup=1, repetitions=repetitions, case="compute")


def metrics_of(measurements: Sequence[Measurement], nbytes: int) -> dict[str, float]:
    """Return rates in GB/s (1e9), the worse direction's share of the raw rate, and the visible part of the return."""
    medians = {(m.case, m.arm): m.median for m in measurements}
    rates = {f"{arm}_gb_per_second_{way}": nbytes / s / 1e9 for (way, arm), s in medians.items() if way in WAYS}
    shares = {way: medians[way, "raw"] / medians[way, "offload"] for way in WAYS}
    alone = medians["compute", "alone"]
    visible, whole = (medians["compute", arm] - alone for arm in ("return-under", "return-first"))
    return {
        **rates,
        **{f"offload_bandwidth_share_{way}": share for way, share in shares.items()},
        "offload_bandwidth_share": min(shares.values()),
        "offload_free_ms": medians["free", "offload"] * 1e3,
        "offload_stall_ms": visible * 1e3,
        "offload_stall_share": visible / whole,
    }


def run(model: str, repetitions: int) -> Result:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = SCALES[model].config
    state = OptimizerState(shapes(config), device)
    raw = RawCopies(state.bytes, device)
    measured = copies(state, raw, repetitions)
    del raw
    measured += stalls(state, Compute(SIDE[model], device), repetitions)
    state.arena.close()
    return Result(
        benchmark="offload" if model == "1.5b" else f"offload_{model}",
        device=accelerator(),
        peer="raw",
        measurements=measured,
        metrics=metrics_of(measured, state.bytes),
        settings={"model": model, "config": dict(config), "bytes": state.bytes, "compute_seconds": COMPUTE_SECONDS},
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.offload", description=__doc__)
    parser.add_argument("--model", choices=sorted(SCALES), default="1.5b", help="tiny is for a CPU (default: 1.5b)")
    parser.add_argument("--repetitions", type=int, default=10, help="of each arm (default: 10)")
    arguments = parser.parse_args(argv)
    run(arguments.model, arguments.repetitions).publish()


if __name__ == "__main__":
    main()
