"""The protocols of components: what each must be able to do. Plugins depend on each other only through them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from .errors import ComponentError, EngineError
from .types import Completion, LoadReport, Phase, Request, Sampling

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

    from .config import HybridConfig
    from .kept_tokens import KeptTokens
    from .ranks import Ranks
    from .rollout.conversation import Conversation, Dialogue, Limits, RequestMaker
    from .weights.policy import Policy

NamedTensors = Iterable[tuple[str, "Tensor"]]


class Run(Protocol):
    """The view of a run that hooks and components get: the part of `trlx_hybrid.session.Session` that they may rely
    on."""

    @property
    def args(self) -> Any:
        """The trainer's arguments (TRL's config)."""

    @property
    def config(self) -> HybridConfig:
        """The user's settings."""

    @property
    def policy(self) -> Policy:
        """The model being trained."""

    @property
    def ranks(self) -> Ranks:
        """The ranks that the model is trained on."""

    @property
    def engine(self) -> Engine | None:
        """The engine; None until it is built, and always where TRL generates."""

    @property
    def live_engine(self) -> Engine:
        """The engine, which must have been built (ComponentError otherwise)."""

    @property
    def weights(self) -> WeightSync | None:
        """The weight sync; None until the engine is built, and always where TRL generates."""

    @property
    def rollout(self) -> Rollout | None:
        """The rollout; None until the engine is built, and always where TRL generates."""

    @property
    def sampling(self) -> Sampling:
        """The run's sampling parameters."""

    @property
    def phase(self) -> Phase:
        """The current phase, which says who owns the memory."""

    @property
    def step(self) -> int:
        """The number of optimizer steps done."""

    @property
    def weight_version(self) -> int:
        """The version of the policy's weights: grows with every optimizer step, checkpoint load and adapter load."""

    @property
    def training(self) -> bool:
        """True while the current rollout is for training, False for evaluation."""

    @property
    def over_support(self) -> bool:
        """True where completions must list the ids that their tokens were sampled from, if the sampling leaves some
        out: tokens are then scored over these ids (`Completion.support`)."""

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The dataset's rows of this rank's batch, as TRL gave them, in the order of its prompts."""

    @property
    def on_completion(self) -> Callable[[int, Request, Completion], None] | None:
        """The function to call with each completion of a rollout as it comes, and the number of its prompt among this
        rank's; None where nobody needs it. A rollout that `tells` calls it."""

    @property
    def on_conversation(self) -> Callable[[int, Conversation], None] | None:
        """The function to call with each conversation when it has ended, and the number of its prompt among this
        rank's; None where nobody needs it."""

    @property
    def metrics(self) -> dict[str, float | list[float]]:
        """Numbers of the current rollout, named `hybrid/…`, for the trainer's logs; components add theirs."""

    @property
    def header_lines(self) -> list[str]:
        """The header of the run, as rank 0 printed it; empty before that."""

    @property
    def held_bytes(self) -> Mapping[Phase, Mapping[str, int]]:
        """Bytes on this rank's device per owner, as measured when a phase last began; empty where TRL generates."""

    def free_bytes(self) -> int:
        """Return the bytes of the policy's device that nobody uses now."""

    def weights_changed(self) -> None:
        """Record, on every rank, that weights were changed by hand: the next rollout syncs all."""


class Stream(Protocol):
    """A stream of requests: they can be added and aborted while the engine steps. Used from the trainer's thread only.

    With several ranks per replica each rank adds its own requests and receives its own completions, and every rank must
    step until no rank has `more`, also after its own requests have finished.
    """

    shared: bool
    """True where other ranks step along, so that no rank may wait for long without a step."""

    def add(self, request: Request) -> int:
        """Queue a request, and return the key under which its completion comes back."""

    def abort(self, key: int) -> None:
        """Drop a request and free what it holds; its completion never comes."""

    def step(self, more: bool) -> tuple[list[tuple[int, Completion]], bool]:
        """Let the engine take one step, if it has anything to do.

        Args:
            more: whether this rank still has anything to come, now or later.

        Returns:
            The (key, completion) pairs that finished, and whether any rank has more.

        Raises:
            EngineError: another rank of the replica has failed.
        """

    @property
    def busy(self) -> bool:
        """True where a step now would compute anything."""


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """A box of a checkpoint tensor, and the engine's memory that holds it.

    Attributes:
        box: half-open index ranges in the checkpoint tensor, one per dimension.
        memory: shaped like the box, in the engine's dtype; a view, with any strides.
    """

    box: tuple[tuple[int, int], ...]
    memory: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Regions:
    """The places where an engine keeps a model's weights on this rank. Writing all of them is a complete sync.

    Attributes:
        of: regions by checkpoint name; a box may occur twice, where the engine keeps a tensor twice.
        padding: memory that belongs to no tensor and must be zero, such as the rows that pad a vocabulary.
    """

    of: Mapping[str, Sequence[Region]]
    padding: Sequence[Tensor] = ()


class Engine(Protocol):
    """The inference engine. Generates tokens, gives memory back and takes it again, in the trainer's process. Inherit
    from it to get the optional members."""

    max_model_len: int
    """The longest prompt plus completion, in tokens."""

    dtype: torch.dtype
    """The dtype that the engine computes in."""

    quantized: bool
    """True where the engine rounds the weights further than its dtype does."""

    untested: str | None = None
    """A warning for the run where this release of the inference library was never tested, else None. With a warning,
    every sync is verified in full."""

    weights_lost: bool
    """True where sleeping discarded the weights: a sync must follow the next `wake("weights")`."""

    peers_lost: bool
    """True once something has raised `PeerLostError`, which sets it: `close` must then wait for no other rank."""

    sleeps: bool
    """True where the engine gives memory back during TRAIN."""

    asleep_bytes: int
    """Bytes of device memory that waking will take; 0 while all is awake."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Return one completion per request, in the order of the requests. With several ranks per replica, each rank
        passes its own requests and receives its own completions; all ranks of the replica must call."""

    def stream(self, sampling: Sampling) -> AbstractContextManager[Stream]:
        """Open a stream that takes requests one at a time, for rollouts whose trajectories run at their own pace.
        Optional: an engine that has it declares `streams=True` where it is offered. Leaving the context aborts
        unfinished requests."""
        raise EngineError(f"{type(self).__name__} takes no requests one at a time")

    def load_weights(self, weights: NamedTensors) -> LoadReport:
        """Write full tensors, named as in a checkpoint, through the engine's own loader, which consumes them lazily.
        Drops every cache that depends on the weights."""

    def differing(self, weights: NamedTensors) -> list[str]:
        """Return the names of the given tensors whose bits, cast to the engine's dtype, are not those in its memory."""

    def regions(self, policy: Policy) -> Regions:
        """Return the memory that holds the policy's weights, for weight syncs that write into it themselves and then
        call `weights_written`. Valid while the engine lives, asleep or not. Collective; may load the weights to find
        out. Optional.

        Raises:
            EngineError: the memory must not be written to from outside; says why.
        """
        raise EngineError(f"{type(self).__name__} does not say where its weights lie")

    def weights_written(self) -> None:
        """Finish a write to `regions`, which hold all of the policy's parameters again: copy its persistent buffers,
        which every rank has in full, and drop every cache that depends on the weights. Optional, as `regions` is."""
        return

    def sleep(self, keep_weights: bool = False) -> None:
        """Give back the memory that the engine does not need during TRAIN. Keeps the weights where `keep_weights` says
        that the policy uses the same memory, or that nothing would bring them back. A second call does nothing."""

    def wake(self, what: str) -> None:
        """Take memory again: "weights" before a sync, "kv_cache" before generating."""

    def resident(self, what: str) -> list[Tensor]:
        """Return the tensors of "weights" or "kv_cache" that hold memory now, for the memory ledger."""

    def close(self) -> None:
        """Free everything; leave process groups and settings that the engine did not make untouched."""

    def leave(self) -> None:
        """Release what would keep the process from ending, and wait for no other rank. Called when the process ends.
        Optional: an engine without it is closed."""
        self.close()


class WeightSync(Protocol):
    """A weight sync: brings the policy's current weights into the engine. Inherit from it to get the optional
    members."""

    name: str

    keeps_weights: bool = False
    """True where the engine's weights must stay resident during TRAIN."""

    def refuses(self) -> str | None:
        """Return why this weight sync cannot serve this model and engine, or None. Called once, with the engine built
        and its weights awake; its KV cache may be asleep."""

    def open(self) -> None:
        """Prepare for the run: this weight sync was chosen. Called once, after `refuses`."""
        return

    def note(self) -> str | None:
        """Return what the run's header says of this weight sync, or None. Called on every rank, after `open`."""
        return None

    def sync(self) -> LoadReport:
        """Make the engine's weights the policy's. Called on every rank."""

    def put_back(self) -> bool:
        """Give back what was borrowed for the rollout, which is over. Returns whether the engine lost weights by
        that."""
        return False

    def forget(self) -> None:
        """Treat no weights as unchanged at the next sync, but move all: weights were changed by hand."""
        return

    def check(self, full: bool) -> int | None:
        """Verify that the engine holds the policy's bits, in full or cheaply. Returns the number of tensors checked;
        raises SyncError with the names of those that differ. None leaves the check to the session, which compares full
        tensors."""
        return None

    def release(self) -> None:
        """Take back what the policy shared with the engine, which was closed."""
        return


class Rollout(Protocol):
    """A rollout: turns prompts into completions. Inherit from it to get the optional members."""

    name: str

    converses: bool = False
    """True where the rollout runs conversations with tools itself (`converse`); otherwise TRL runs them, turn by turn,
    through `run`."""

    tells: bool = False
    """True where the rollout calls the run's `on_completion` in `run`, and `on_conversation` in `converse`, as soon as
    each one is there. Rewards that begin early need it."""

    def run(self, session: Run, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Return one completion per request, in the order of the requests: TRL relies on that order."""

    def converse(
        self, session: Run, dialogues: Sequence[Dialogue], limits: Limits, request: RequestMaker
    ) -> list[Conversation]:
        """Run every dialogue to its end and return the conversations in order; called instead of `run` where the
        trainer has tools."""
        raise ComponentError(f"rollout {self.name!r} runs no conversations")

    def close(self) -> None:
        """Stop threads and processes: the session or its engine is closing."""
        return


class Scores(NamedTuple):
    """The scores of rows: log-probs of their tokens, and what else was asked for.

    Attributes:
        log_probs: (B, C) float, log-probs of the completions' tokens at the run's temperature, 0 where a token is
            masked.
        entropies: (B, C) float, entropies of the tokens' distributions; None where not asked for. TRL asks for them in
            every loss, not for old and reference log-probs.
        router_loss: scalar, the load-balancing loss of a model with experts; None where not asked for.
    """

    log_probs: Tensor
    entropies: Tensor | None
    router_loss: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The rows to score in one call, with or without `torch.no_grad`: a micro-batch for its loss, or all rows of a
    rollout for the old log-probs or for those of the reference model.

    Attributes:
        model: the transformers model that scores, without what wraps it: the policy's, or the reference.
        input_ids: (B, P + C) int64; prompts end at column P, completions begin there.
        attention_mask: (B, P + C) int64, 0 at padding and in completions that are masked whole.
        completion_length: C.
        at_once: how many rows one forward pass may have.
        router_loss: whether the load balance of experts is asked for, a mean over all tokens of a forward pass.
        padded: scores the rows as TRL does.
        forward: one forward pass through the model and whatever wraps it. Takes `labels`, (b, t) int64, the token that
            follows each position or -100 where nothing is to be scored, and the model's own arguments; returns scores
            of shape (b, t), 0 where nothing was scored. Where the rows have experts, it takes these as well, `experts`
            (b, t, layers, experts per token), of the same tokens; and where they have a support, `support`, of the same
            positions.
        experts: (B, P + C, layers, experts per token) int16, the experts that compute each token, -1 where the model
            chooses; None where it chooses all.
        support: of shape (B, P + C), the ids that the token behind each position was sampled from, which its log-prob
            and the entropy are over; None where they are over all.
    """

    model: PreTrainedModel
    input_ids: Tensor
    attention_mask: Tensor
    completion_length: int
    at_once: int
    router_loss: bool
    padded: Callable[[], Scores]
    forward: Callable[..., Scores]
    experts: Tensor | None = None
    support: KeptTokens | None = None


class Scoring(Protocol):
    """A scoring: computes per-token log-probs for the trainer. Inherit from it to get the optional members."""

    name: str

    deferred: bool = False
    """True where the first loss forward supplies the log-probs from before the update, if its weights are still those
    that the log-probs are of; otherwise a separate pass computes them."""

    balanced: bool = False
    """True where `micro_batches` is to be asked which rows to train together."""

    joins: bool = False
    """True where `joined` is to be asked how many micro-batches share a pass."""

    def score(self, rows: Rows) -> Scores:
        """Return the scores of the rows, in their order. Collective: every rank scores its own rows."""

    def micro_batches(self, prompts: Tensor, tokens: Sequence[int], count: int) -> Sequence[Sequence[int]]:
        """Choose which rows to train together: return `count` lists of equally many row numbers. Called where
        `balanced`, and where the gradient is the same whichever rows share a micro-batch.

        Args:
            prompts: (B, P) int64, token ids of each row of a rollout on this rank; -1 where there is no token.
            tokens: number of tokens of each row, prompt and completion.
        """
        raise ComponentError(f"scoring {self.name!r} chooses no micro-batches")

    def joined(self, tokens: Sequence[int]) -> int:
        """Return how many of the next micro-batches of an optimizer step share one forward and one backward pass: 1 or
        more, the same on every rank. Called where `joins`. Collective.

        Args:
            tokens: number of tokens of each of these micro-batches on this rank, prompts and completions; it has at
                least one entry.
        """
        raise ComponentError(f"scoring {self.name!r} joins no micro-batches")

    def note(self) -> str | None:
        """Return what the run's header says of this scoring, or None. Called on every rank, when the model is
        prepared."""
        return None

    def close(self) -> None:
        """Restore the model as it was: the session is closing."""
        return


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Groups of sampled and scored completions: those of one training prompt are a group. They are those of all ranks,
    the same on each rank, and on the CPU.

    Attributes:
        rewards: (groups, num_generations, functions) float32, what the reward functions returned; NaN for None, and for
            rows of which nothing can be trained.
        weights: (functions,) float32, TRL's `reward_weights`.
        lengths: (groups, num_generations) int64, tokens that the model has sampled.
        truncated: (groups, num_generations) bool, whether a completion was cut off before its end token.
        rows: number of each group's prompt in the training dataset; None where TRL's data loader brought it.
    """

    rewards: Tensor
    weights: Tensor
    lengths: Tensor
    truncated: Tensor
    rows: Sequence[int | None]

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def totals(self) -> Tensor:
        """The weighted sums of the rewards over the functions, (groups, num_generations) float32; NaN where none
        returned a number."""
        sums = (self.rewards * self.weights).nansum(dim=-1)
        return sums.masked_fill(self.rewards.isnan().all(dim=-1), float("nan"))


class Algorithm(Protocol):
    """An algorithm: chooses which samples are trained on and how much each counts. A run may have several. They act in
    training only. Every rank calls them with the same data and must get the same answer. Inherit from it: all members
    but the name are optional."""

    name: str

    rounds: int = 1
    """The largest number of times that prompts are sampled for one batch, until enough groups are kept."""

    oversampling: float = 1.0
    """The size of the first round, in batches of prompts; 1.0 or more."""

    def draw(self, count: int, size: int) -> Sequence[int] | None:
        """Choose the prompts that are sampled next: return `count` row numbers of the training dataset, below `size`.
        None leaves the choice to the run: TRL's data loader at first, random rows in further rounds."""
        return None

    def keep(self, groups: Groups) -> Sequence[bool]:
        """Return which groups of a round may be trained on. Where too few are kept after the last round, the batch is
        filled up with groups that count for nothing."""
        return [True] * len(groups)

    def observe(self, groups: Groups) -> None:
        """Learn from a round that was sampled and scored, before any group is left out, for instance for `draw`."""
        return

    def rewards(self, groups: Groups) -> Tensor:
        """Return rewards that replace `groups.rewards` for the batch that is trained on, in the same shape."""
        return groups.rewards

    def advantages(self, groups: Groups) -> Tensor | None:
        """Return advantages (groups, num_generations) that replace TRL's; None keeps TRL's. Rows without any reward get
        0 anyway."""
        return None

    def loss(self, scores: Scores, batch: Mapping[str, Tensor]) -> Tensor | None:
        """Return a scalar to add to the loss of a micro-batch of this rank's rows; None adds nothing. The loss of an
        optimizer step is the mean over its micro-batches.

        Args:
            scores: scores of the rows, with gradients.
            batch: what TRL computes its loss from: among others `advantages` (B,), `completion_mask` (B, C) and, where
                somebody else than the policy wrote some of the tokens, `tool_mask` (B, C).
        """
        return None

    def note(self) -> str | None:
        """Return what the run's header says of this algorithm, or None."""
        return None

    def state(self) -> Mapping[str, Any]:
        """Return what a checkpoint must hold of this algorithm, as JSON data."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned when the checkpoint was written."""
        return


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EnvironmentArguments:
    """The parts of an environment, as the arguments of TRL's trainer that a script would pass for it. Has exactly one
    of the first two.

    Attributes:
        rollout_func: plays episodes, as `trlx_hybrid_multiturn.episodes(Game)` does. Where it has an attribute
            `rollout`, that is the name of the rollout it plays on, taken where the user chose none. Where it has
            `factory`, that makes its environments, objects with `reset(row)` and `step(completion)`, and `max_turns`
            limits their episodes: `trlx-hybrid environments try` reads both.
        environment_factory: makes one of TRL's environments, whose public methods are the model's tools.
        reward_funcs: as TRL takes them; not needed where the environments of a factory have `get_reward`.
        train_dataset, eval_dataset: functions that make a `datasets.Dataset`, called where the user gave none.

    Raises:
        ComponentError: neither `rollout_func` nor `environment_factory` is given, or both are.
    """

    rollout_func: Callable[..., Any] | None = None
    environment_factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None = None
    reward_funcs: Any = None
    train_dataset: Callable[[], Any] | None = None
    eval_dataset: Callable[[], Any] | None = None

    def __post_init__(self) -> None:
        if (self.rollout_func is None) == (self.environment_factory is None):
            raise ComponentError("EnvironmentArguments takes either rollout_func or environment_factory.")
