"""Seconds of sampling a rollout and of its loss's forward pass: one after the other, and the pass within the tail.

The longest tenth of the rows takes a third of the time to sample, and the device is not full then. The weights do not
change, so rows that are complete could be scored for the loss meanwhile. Arm `apart` scores them once all rows are
sampled; arm `together` scores them on a stream of its own as soon as all but the last eighth are. Both keep what a
backward pass needs. Each is scored once more after the time was taken, and must have the same log-probs.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

from .contestants import Hybrid
from .harness import Arm, Measurement, Timed, alternate, synchronise
from .lengths import Lengths
from .result import Result, accelerator
from .rollout import SCALES, write_model
from .scale import Scale, Variant
from .step import HYBRID, LENGTHS
from .worker import Worker, wait_until_built

BUILD_SECONDS, REPEAT_SECONDS = 420.0, 120.0
WARMUP = 2
LAST = 8  # one row in this many is still being sampled when the pass begins


class Tail(Hybrid):
    """A trainer's engine and its scoring, which share the device.

    Args:
        multiprocessors: number of the device's multiprocessors that the pass may use while rows are sampled; 0 for all.
    """

    def __init__(self, folder: str, scale: Scale, variant: Variant, multiprocessors: int) -> None:
        super().__init__(folder, scale, variant)
        self._trainer.model.train()
        self._stream = _stream(multiprocessors)

    def repeat_scored(self, lengths: Lengths, turn: int, together: bool) -> tuple[Timed, dict[str, float]]:
        """Time one repetition; its result is the length of each completion.

        Returns:
            The time; and as spans the seconds until all rows were sampled, from then until the pass was done, and for
            launching the pass, and the bytes that the pass holds.
        """
        import torch

        session = self._trainer.session
        scored: list[Any] = []
        spans: dict[str, float] = {}
        rows: list[tuple[list[int], list[int]]] = []
        wanted = lengths.sequences - lengths.sequences // LAST

        def score(at_once: bool) -> None:
            started, before = time.perf_counter(), _allocated()
            with self._aside() if at_once else nullcontext():
                scored.append(self._scores(rows[:wanted]))
            spans["launching"] = time.perf_counter() - started
            spans["bytes_held"] = float(_allocated() - before)

        def sampled(row: int, request: Any, completion: Any) -> None:
            rows.append((request.prompt_ids, completion.token_ids))
            if together and len(rows) == wanted:
                score(True)

        prompts = self._prompts(f"{lengths.name}-{turn}-{together}", lengths.sequences)
        self._lengths = lengths.draw(turn)
        self.set_sampling(lengths.longest, top_k=0)
        with self.phase():
            synchronise()
            session.on_completion, started = sampled, time.perf_counter()
            try:
                completions = self._generate(prompts)
            finally:
                session.on_completion = None
            spans["sampling"] = time.perf_counter() - started
            if not together:
                score(False)
            synchronise()
            seconds = time.perf_counter() - started
            spans["scoring"] = seconds - spans["sampling"]
            log_probs = scored.pop().detach()  # frees what it held, for the second pass
            if not torch.equal(self._scores(rows[:wanted]), log_probs):
                raise RuntimeError("The same rows, scored once more, have other log-probs.")
        return Timed(seconds, [len(tokens) for tokens in completions]), spans

    def _aside(self) -> Any:
        """Return a context on the separate stream, which first waits for the work of the current stream."""
        import torch

        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def _scores(self, rows: Sequence[tuple[list[int], list[int]]]) -> Any:
        """Return log-probs with their graph, (rows, tokens), as TRL's loss asks for them."""
        import torch

        prompts, completions = ([torch.tensor(ids) for ids in column] for column in zip(*rows, strict=True))
        padded = torch.nn.utils.rnn.pad_sequence
        left = padded(prompts, batch_first=True, padding_value=-1, padding_side="left")
        ids = torch.cat([left, padded(completions, batch_first=True, padding_value=-1)], dim=1)
        model, device = self._trainer.model, self._trainer.accelerator.device
        mask = (ids >= 0).long().to(device, non_blocking=True)
        ids = ids.clamp_min(0).to(device, non_blocking=True)
        keep = ids.shape[1] - left.shape[1]
        with torch.enable_grad():
            return self._trainer._get_per_token_logps_and_entropies(model, ids, mask, keep, compute_entropy=True)[0]


def _stream(multiprocessors: int) -> Any:
    import torch

    if not torch.cuda.is_available():
        return None
    if not multiprocessors:
        return torch.cuda.Stream()  # type: ignore[no-untyped-call]
    from torch.cuda import green_contexts

    part: Any = green_contexts.GreenContext.create(num_sms=multiprocessors, device_id=torch.cuda.current_device())
    return part.Stream()


def _allocated() -> int:
    import torch

    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def measure(worker: Worker, lengths: Lengths, repetitions: int) -> tuple[list[Measurement], dict[str, float]]:
    """Measure both arms; return the measurements, and the medians of each arm's spans."""
    noted: defaultdict[str, list[float]] = defaultdict(list)

    def arm(name: str) -> Arm:
        def run(turn: int) -> Timed:
            timed: Timed
            timed, spans = worker.call("repeat_scored", lengths, turn, name == "together", seconds=REPEAT_SECONDS)
            for span, value in spans.items():
                noted[f"{span}_{name}"].append(value)
            return timed

        return Arm(name, run)

    arms = [arm("apart"), arm("together")]
    measured = alternate(arms, warmup=WARMUP, repetitions=repetitions, case=lengths.name)
    return measured, {span: statistics.median(values[WARMUP:]) for span, values in noted.items()}


def run(model: str, repetitions: int, multiprocessors: int = 0, hybrid: Mapping[str, Any] = HYBRID) -> Result:
    """Measure rows of drawn lengths, with a model that is trained in full."""
    lengths = LENGTHS[model]["lognormal"]
    scale = dataclasses.replace(SCALES[model], cases=(lengths,))
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmark-tail-", ignore_cleanup_errors=True))
        write_model(Path(folder), scale)
        variant = Variant(hybrid=hybrid)
        worker = stack.enter_context(Worker("tail", Tail, folder, scale, variant, multiprocessors))
        wait_until_built([worker], BUILD_SECONDS)
        measured, noted = measure(worker, lengths, repetitions)
    apart, together = (m.median for m in measured)
    return Result(
        benchmark="tail" if model == "1.5b" else f"tail_{model}",
        device=accelerator(),
        peer="apart",
        measurements=measured,
        metrics={"hidden_share": (apart - together) / noted["scoring_apart"], "speedup": apart / together} | noted,
        settings={
            "model": model,
            "config": dict(scale.config),
            "lengths": dataclasses.asdict(lengths),
            "rows_scored": lengths.sequences - lengths.sequences // LAST,
            "multiprocessors": multiprocessors,
            "hybrid": dict(hybrid),
        },
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tail", description=__doc__)
    parser.add_argument("--model", choices=("1.5b", "tiny"), default="1.5b", help="tiny is for trying it on a CPU")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument(
        "--multiprocessors", type=int, default=0, help="that the pass may use while rows are sampled (default: all)"
    )
    arguments = parser.parse_args(argv)
    run(arguments.model, arguments.repetitions, arguments.multiprocessors).publish()


if __name__ == "__main__":
    main()
