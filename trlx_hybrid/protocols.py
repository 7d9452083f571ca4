"""What a component must be able to do. Plugins meet here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from .types import Completion, LoadReport, Request, Sampling

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .session import Session

NamedTensors = Iterable[tuple[str, "Tensor"]]


class Engine(Protocol):
    """Generates tokens, gives memory back and takes it again. Lives in the trainer's process."""

    max_model_len: int
    """Longest prompt plus completion, in tokens."""

    dtype: torch.dtype
    """What it computes in."""

    quantized: bool
    """Whether it rounds the weights further than its dtype does."""

    weights_lost: bool
    """Whether sleeping discarded the weights: a sync must follow the next `wake("weights")`."""

    sleeps: bool
    """Whether it gives memory back during TRAIN."""

    asleep_bytes: int
    """What waking will take of the device's memory; 0 while all is awake."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """One completion per request, in the order of the requests. With several ranks per replica, each rank
        passes its own requests and receives its own completions; all ranks of the replica must call."""

    def load_weights(self, weights: NamedTensors) -> LoadReport:
        """Write full tensors, named as in a checkpoint, through the engine's own loader; consumes them lazily.
        Drops every cache that depends on the weights."""

    def differing(self, weights: NamedTensors) -> list[str]:
        """Names of the given tensors whose bits, cast to the engine's dtype, are not those in its memory."""

    def sleep(self, keep_weights: bool = False) -> None:
        """Give back what need not be resident during TRAIN; never the weights where `keep_weights` says that the
        policy lives in them, or that nothing would bring them back. A second call does nothing."""

    def wake(self, what: str) -> None:
        """Take memory again: "weights" before a sync, "kv_cache" before generating."""

    def resident(self, what: str) -> list[Tensor]:
        """The tensors of "weights" or "kv_cache" that hold memory now, for the ledger."""

    def close(self) -> None:
        """Free everything; leaves process groups and settings it did not make untouched."""


class WeightSync(Protocol):
    """Brings the policy's current weights into the engine. Inherit from it to get what is optional."""

    name: str

    keeps_weights: bool = False
    """Whether the engine's weights must stay resident during TRAIN."""

    def refuses(self) -> str | None:
        """Why this path cannot serve this model and engine, or None. Called once, with the engine built and awake."""

    def open(self) -> None:
        """This path was chosen. Called once, after `refuses`."""
        return

    def sync(self) -> LoadReport:
        """Make the engine's weights the policy's. Called on every rank."""

    def check(self, full: bool) -> int | None:
        """Prove that the engine holds the policy's bits, in full or cheaply; returns how many tensors were checked,
        raises SyncError naming those that differ. None leaves it to the session, which compares full tensors."""
        return None

    def release(self) -> None:
        """The engine was closed: take back what the policy shared with it."""
        return


class Rollout(Protocol):
    """Turns prompts into completions."""

    def run(self, session: Session, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """One completion per request, in order: TRL's batch contract is rigid."""
