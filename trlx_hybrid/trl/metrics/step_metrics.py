"""Metrics that an optimizer step adds to the trainer's logs: its time and computation, which the progress bar shows,
too; and the numbers that components and plugins put into `session.metrics`.

A step begins and ends with the callbacks of transformers' Trainer. In between, each `training_step` prepares a
micro-batch, including a rollout and its scoring where one is due, and computes its loss. A step that was not observed
completely, because of an error or in a loop of another package, is not logged.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Number
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers import ProgressCallback, TrainerCallback

from ...errors import PluginError
from .flops import ModelFlops, counted, model_flops, peak

if TYPE_CHECKING:
    from ...plugins.host import Host
    from ...session import Session
    from ..stock import StockTrainer

PARTS = ("rollout", "scoring", "loss", "optimizer")


class Clock:
    """A clock for a device's work that does not wait for the device: it uses CUDA events on the current stream. A CPU
    has finished its work when it returns, so there the wall clock is used."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def now(self) -> Any:
        """Return a marker of this point in the device's work, to be passed to `reached` and `seconds`."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def reached(self, moment: Any, wait: bool = False) -> bool:
        """Return whether the device has done all work up to a marker from `now`. With `wait`, wait until it has, and
        return True."""
        if self._cuda and wait:
            moment.synchronize()
        return not self._cuda or moment.query()

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds between two markers from `now`, both of which the device has reached."""
        return float(begin.elapsed_time(end) / 1000 if self._cuda else end - begin)


@dataclass(slots=True, eq=False)
class MeasuredStep:
    """The measurements of one optimizer step, which has four parts: rollout, scoring, loss, optimizer.

    Attributes:
        began: the parts that run now, each with a marker of its start, which `Clock.now` returns.
        parts: for each part, a pair of markers, start and end, for each time that it ran.
        sync: seconds of the weight syncs in the step's rollouts.
        rollout: the metrics of the step's last rollout, by name.
        counts: for each micro-batch on this rank, (3,) int64: all tokens, completion tokens, and pairs of a token and a
            token that it attends to. Once the step is over, a single (4,) int64: the sums of these over all ranks, and
            the number of tokens that the model was given, padding included.
        end: the marker of the step's end.
    """

    began: dict[str, Any] = field(default_factory=dict)
    parts: defaultdict[str, list[tuple[Any, Any]]] = field(default_factory=lambda: defaultdict(list))
    sync: float = 0.0
    rollout: Mapping[str, Any] = field(default_factory=dict)
    counts: list[Tensor] = field(default_factory=list)
    end: Any = None


class StepMetrics(TrainerCallback):  # type: ignore[misc]
    """A callback that measures the time and tokens of each optimizer step, and adds them to the trainer's log as
    `hybrid/step/…`. It never waits for the device, except in `settle` with `wait`.

    Args:
        trainer: a function that returns the trainer.
        flops: whether a loss is one forward and one backward pass of the policy, so that the FLOPs of both are known.

    Attributes:
        loss_tokens: tokens of the step that the model was given to compute losses, padding included.
    """

    def __init__(self, session: Session, trainer: Callable[[], StockTrainer], flops: bool) -> None:
        self._session, self._trainer, self._knows_loss = session, trainer, flops
        self._clock = Clock(session.policy.device)
        self._step: MeasuredStep | None = None
        self._preparing = False  # whether a micro-batch is being prepared
        self.loss_tokens = 0
        self._over: deque[MeasuredStep] = deque()  # steps that the device may not have finished
        self._flops: ModelFlops | None = None
        self._peak: float | None = None

    def on_train_begin(self, args: Any, *others: Any, **kwargs: Any) -> None:
        """Compute the model's FLOPs per token and the device's maximum FLOP/s, and drop steps of an earlier run."""
        self._step = None
        self._over.clear()
        self._peak = peak(self._session.policy, args) if self._knows_loss else None
        self._flops = model_flops(self._session.policy) if self._peak is not None else None

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start measuring a new step, even if an error has interrupted the step before it."""
        self._step = MeasuredStep()
        self.loss_tokens = 0

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Return a context for one `training_step`. The time before the call of `prepared` counts as the preparation of
        the micro-batch, and the time after it as its loss. An error inside discards the step's measurement."""
        self._preparing = self._step is not None
        try:
            yield
        except BaseException:
            self._step = None
            raise
        finally:
            self._preparing = False
        self._end("loss")

    @contextmanager
    def further_loss(self) -> Iterator[None]:
        """Return a context for work of the loss that runs after the context `micro_batch` has ended: its time is added
        to the loss's. An error inside discards the step's measurement."""
        self._begin("loss")
        try:
            yield
        except BaseException:
            self._step = None
            raise
        self._end("loss")

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Return a context that measures its time as a part of a micro-batch's preparation. In an evaluation, in a loss
        or within another part, it measures nothing.

        Args:
            name: "rollout" or "scoring".
        """
        step = self._step
        if not self._preparing or step is None or step.began:
            yield
            return
        self._begin(name)
        yield
        self._end(name)
        # Rows in flight are sampled in one part, and handed to TRL in another, which belongs to the same rollout.
        if name == "rollout" and step.rollout is not self._session.metrics:
            step.rollout = self._session.metrics
            step.sync += cast(float, step.rollout.get("hybrid/sync_seconds", 0.0))

    def prepared(self, inputs: Any) -> None:
        """Start the time of the loss, and count the tokens of the micro-batch. Called when a micro-batch is prepared.

        Args:
            inputs: the micro-batch.
        """
        if not self._preparing or self._step is None:
            return
        self._preparing = False
        if {"prompt_mask", "completion_mask"} <= inputs.keys():
            self._step.counts.append(counted(inputs["prompt_mask"], inputs["completion_mask"]))
        self._begin("loss")

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Begin to measure the optimizer's time: gradients are computed and clipped by now."""
        self._begin("optimizer")

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """End the step's measurement on the host, and queue it until the device has finished the step. Collective."""
        self._end("optimizer")
        step, self._step = self._step, None
        if step is None:
            return
        if step.counts:
            counts = torch.stack(step.counts).sum(0)
            counts = torch.cat([counts, counts.new_full((1,), self.loss_tokens)])
            step.counts = [self._session.ranks.total(counts).to("cpu", non_blocking=True)]
        step.end = self._clock.now()
        self._over.append(step)
        self.settle()

    def _begin(self, name: str) -> None:
        if self._step is not None:
            self._step.began[name] = self._clock.now()

    def _end(self, name: str) -> None:
        if self._step is not None and name in self._step.began:
            self._step.parts[name].append((self._step.began.pop(name), self._clock.now()))

    def settle(self, wait: bool = False) -> None:
        """Add the metrics of the queued steps that the device has finished to the trainer's log, and show the last
        step's on the progress bar. With `wait`, wait for the device and add all queued steps."""
        while self._over and self._clock.reached(self._over[0].end, wait):
            step = self._over.popleft()
            found = self._numbers(step)
            for name, value in found.items():
                self._trainer()._metrics["train"][f"hybrid/step/{name}"].append(value)
            for callback in self._trainer().callback_handler.callbacks:
                bar = callback.training_bar if type(callback) is ProgressCallback else None  # not a user's own
                if bar is not None:  # on rank 0; drawn again when the step ends
                    bar.set_postfix_str(line(found, step.sync, step.rollout), refresh=False)

    def _numbers(self, step: MeasuredStep) -> dict[str, float]:
        found = {
            f"{part}_seconds": sum(self._clock.seconds(*stretch) for stretch in step.parts[part]) for part in PARTS
        }
        if not step.counts:
            return found
        *real, padded = step.counts[0].tolist()
        found["tokens"] = float(real[0])
        if padded:
            found["padded_tokens"] = float(padded)
        if self._flops is not None and self._peak is not None:
            seconds = self._session.ranks.world * (found["loss_seconds"] + found["scoring_seconds"])
            found["mfu"] = self._flops.of(*real) / (seconds * self._peak)
        return found


def line(found: dict[str, float], sync: float, rollout: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Return a step's metrics as one line of text, which is shown at the end of the progress bar.

    Args:
        found: the metrics by name, without the prefix `hybrid/step/`.
        sync: seconds of weight syncs.
        rollout: the metrics of the rollout. Those of rows in flight are shown: the staleness of the batch's tokens, in
            optimizer steps, and the number of rows that go on.
    """
    seconds = {part: found[f"{part}_seconds"] for part in PARTS}
    parts = {part: f"{part} {took:.2f}s" for part, took in seconds.items() if took >= 0.005}
    if sync >= 0.005 and "rollout" in parts:
        parts["rollout"] += f" (sync {sync:.2f}s)"
    if "hybrid/staleness/mean" in rollout:
        parts["in flight"] = (
            f"staleness {rollout['hybrid/staleness/mean']:.1f} (max {rollout['hybrid/staleness/max']:.0f}), "
            f"{rollout['hybrid/in_flight/rows']:.0f} rows in flight"
        )
    if "tokens" in found:
        parts["tokens"] = f"{found['tokens']:.0f} tokens"
        if found.get("padded_tokens", 0.0) > found["tokens"]:
            parts["tokens"] += f" padded to {found['padded_tokens']:.0f}"
    if "mfu" in found:
        parts["mfu"] = f"MFU {found['mfu']:.0%}"
    return ", ".join(parts.values())


@contextmanager
def in_step_time(trainer: StockTrainer) -> Iterator[None]:
    """Return a context that adds the time spent inside to TRL's `step_time`, whose clock has stopped by then."""
    started = time.perf_counter()
    yield
    seconds = time.perf_counter() - started
    if trainer._step % trainer.current_gradient_accumulation_steps:
        trainer._current_train_step_time += seconds
    else:
        trainer._metrics["train"]["step_time"][-1] += seconds


class SessionMetrics:
    """The numbers that components and plugins have put into `session.metrics`, each logged once.

    Args:
        session: the live objects of the run.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.begin()

    def begin(self) -> None:
        """Keep the present `session.metrics`, the metrics of the trainer's last rollout, for `log`. A later rollout of
        a script or a callback has another dict as `session.metrics`, which is not logged."""
        self._logged: dict[str, Any] = {}
        self._to_log = self._session.metrics

    def log(self, metrics: MutableMapping[str, list[float]]) -> None:
        """Add to TRL's metrics the numbers that were put into the last rollout's metrics since the last call.

        Components may put numbers there after the rollout: a scoring, or an algorithm that adds to the loss.

        Args:
            metrics: TRL's metrics of training or of evaluation, by name.

        Raises:
            PluginError: a value is not a number.
        """
        for name, value in self._to_log.items():
            if self._logged.get(name) is not value:
                self._logged[name] = value
                values = value if isinstance(value, list) else [value]
                _refuse_other_than_numbers(name, values, self._session.host)
                if values:  # TRL cannot take the mean of nothing
                    metrics[name] += values


def _refuse_other_than_numbers(name: str, values: Sequence[object], host: Host) -> None:
    """Raise a PluginError if a metric of a plugin is not a number: TRL would fail on its mean without naming a plugin.

    Args:
        name: name of the metric.
        values: its values.
    """
    for value in values:
        if not isinstance(value, Number) and getattr(value, "shape", None) != ():
            plugins = ", ".join(str(plugin) for plugin in host.plugins)
            raise PluginError(
                f"session.metrics[{name!r}] is {value!r:.80}, and a metric is a number, or a list of them. A plugin "
                f"has set it: one of {plugins}."
            )
