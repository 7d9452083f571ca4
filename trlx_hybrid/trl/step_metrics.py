"""Where the time of an optimizer step goes and how much it computes, for the trainer's logs and its progress bar.

A step begins and ends where transformers' Trainer says so. In between, each `training_step` prepares a micro-batch,
which is a rollout and its scoring where it is time for one, and computes its loss. A step that was not seen whole,
because of an error or in a loop of somebody else's, is not logged.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers import ProgressCallback, TrainerCallback

from .flops import ModelFlops, counted, model_flops, peak

if TYPE_CHECKING:
    from ..session import Session

PARTS = ("rollout", "scoring", "loss", "optimizer")


class Clock:
    """Moments in a device's work, taken without waiting for it: CUDA events on the current stream. A CPU has done what
    it was asked, so there it is the time."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def now(self) -> Any:
        """This moment."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def reached(self, moment: Any, wait: bool = False) -> bool:
        """Whether the device has come to it; True once it has, where it is to `wait`."""
        if self._cuda and wait:
            moment.synchronize()
        return not self._cuda or moment.query()

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two moments that are reached."""
        return float(begin.elapsed_time(end) / 1000 if self._cuda else end - begin)


@dataclass(slots=True, eq=False)
class MeasuredStep:
    """One optimizer step.

    Attributes:
        began: the parts that run now, and since when.
        parts: begin and end of each stretch of a part.
        sync: seconds of the weight syncs in its rollouts.
        counts: of each micro-batch on this rank, as `counted`; when it is over (4,) int64 of all ranks, with the tokens
            that the model was given.
        end: by when the device is done with it.
    """

    began: dict[str, Any] = field(default_factory=dict)
    parts: defaultdict[str, list[tuple[Any, Any]]] = field(default_factory=lambda: defaultdict(list))
    sync: float = 0.0
    counts: list[Tensor] = field(default_factory=list)
    end: Any = None


class StepMetrics(TrainerCallback):  # type: ignore[misc]
    """Follows the steps of one trainer. Nothing in it waits for the device but `settle`, where it is told to.

    Args:
        trainer: returns it.
        flops: whether a loss is one forward and one backward pass of the policy, so that their FLOPs are known.
    """

    def __init__(self, session: Session, trainer: Callable[[], Any], flops: bool) -> None:
        self._session, self._trainer, self._knows_loss = session, trainer, flops
        self._clock = Clock(session.policy.device)
        self._step: MeasuredStep | None = None
        self._preparing = False  # whether a micro-batch of the step is, now
        self._over: deque[MeasuredStep] = deque()  # those the device may not be done with
        self._flops: ModelFlops | None = None
        self._peak: float | None = None

    def on_train_begin(self, args: Any, *others: Any, **kwargs: Any) -> None:
        """The model is what will be trained; steps of an earlier run are not this one's."""
        self._step = None
        self._over.clear()
        self._peak = peak(self._session.policy, args) if self._knows_loss else None
        self._flops = model_flops(self._session.policy) if self._peak is not None else None

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Whatever the one before was interrupted by."""
        self._step = MeasuredStep()
        self._trainer()._loss_tokens = 0

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Around `training_step`."""
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
    def part(self, name: str) -> Iterator[None]:
        """Around a part of the preparation of a micro-batch; in an evaluation, a loss or another part it is none."""
        step = self._step
        if not self._preparing or step is None or step.began:
            yield
            return
        self._begin(name)
        yield
        self._end(name)
        if name == "rollout":
            step.sync += cast(float, self._session.metrics.get("hybrid/sync_seconds", 0.0))

    def prepared(self, inputs: Any) -> None:
        """A micro-batch is, and its loss begins."""
        if not self._preparing or self._step is None:
            return
        self._preparing = False
        if {"prompt_mask", "completion_mask"} <= inputs.keys():
            self._step.counts.append(counted(inputs["prompt_mask"], inputs["completion_mask"]))
        self._begin("loss")

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Gradients are clipped."""
        self._begin("optimizer")

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """The step is over, for the host. Collective."""
        self._end("optimizer")
        step, self._step = self._step, None
        if step is None:
            return
        if step.counts:
            counts = torch.stack(step.counts).sum(0)
            counts = torch.cat([counts, counts.new_full((1,), self._trainer()._loss_tokens)])
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
        """Give the trainer's log the numbers of the steps that the device is done with, of all where it is to `wait`,
        and the progress bar those of the last."""
        while self._over and self._clock.reached(self._over[0].end, wait):
            step = self._over.popleft()
            found = self._numbers(step)
            for name, value in found.items():
                self._trainer()._metrics["train"][f"hybrid/step/{name}"].append(value)
            for callback in self._trainer().callback_handler.callbacks:
                bar = callback.training_bar if type(callback) is ProgressCallback else None  # not a user's own
                if bar is not None:  # that of rank 0, which is drawn next when the step ends
                    bar.set_postfix_str(line(found, step.sync), refresh=False)

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


def line(found: dict[str, float], sync: float) -> str:
    """A step's numbers for the end of a progress bar.

    Args:
        found: the metrics, without `hybrid/step/`.
        sync: seconds of weight syncs.
    """
    seconds = {part: found[f"{part}_seconds"] for part in PARTS}
    parts = {part: f"{part} {took:.2f}s" for part, took in seconds.items() if took >= 0.005}
    if sync >= 0.005 and "rollout" in parts:
        parts["rollout"] += f" (sync {sync:.2f}s)"
    if "tokens" in found:
        parts["tokens"] = f"{found['tokens']:.0f} tokens"
        if found.get("padded_tokens", 0.0) > found["tokens"]:
            parts["tokens"] += f" padded to {found['padded_tokens']:.0f}"
    if "mfu" in found:
        parts["mfu"] = f"MFU {found['mfu']:.0%}"
    return ", ".join(parts.values())


class Metered:
    """Stands between `HybridTrainer` and `Scored`; does nothing where `_steps` is None."""

    session: Session
    _steps: StepMetrics | None = None

    def _part(self, name: str) -> AbstractContextManager[None]:
        return nullcontext() if self._steps is None else self._steps.part(name)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """As in TRL."""
        with nullcontext() if self._steps is None else self._steps.micro_batch():
            return super().training_step(*args, **kwargs)  # type: ignore[misc]

    def _prepare_inputs(self, *args: Any) -> Any:
        inputs = super()._prepare_inputs(*args)  # type: ignore[misc]
        if self._steps is not None:
            self._steps.prepared(inputs)
        return inputs

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        with self._part("scoring"):
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)  # type: ignore[misc]

    def log(self, *args: Any, **kwargs: Any) -> None:
        """As in TRL, which takes the mean of what the steps since the last line gave."""
        if self._steps is not None:
            self._steps.settle(wait=True)
        super().log(*args, **kwargs)  # type: ignore[misc]
