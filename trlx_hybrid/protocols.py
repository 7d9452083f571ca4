"""What a component must be able to do. Plugins meet here and nowhere else."""

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
    """What hooks and components are shown of a run: what they may count on of `trlx_hybrid.session.Session`."""

    @property
    def args(self) -> Any:
        """The trainer's arguments (TRL's config)."""

    @property
    def config(self) -> HybridConfig:
        """What the user chose."""

    @property
    def policy(self) -> Policy:
        """The model being trained."""

    @property
    def ranks(self) -> Ranks:
        """The processes it is trained on."""

    @property
    def engine(self) -> Engine | None:
        """None until it is built, and always where TRL generates."""

    @property
    def live_engine(self) -> Engine:
        """The engine, which must have been built (ComponentError otherwise)."""

    @property
    def weights(self) -> WeightSync | None:
        """None as `engine` is."""

    @property
    def rollout(self) -> Rollout | None:
        """None as `engine` is."""

    @property
    def sampling(self) -> Sampling:
        """How the run samples."""

    @property
    def phase(self) -> Phase:
        """Who owns the memory now."""

    @property
    def step(self) -> int:
        """Optimizer steps done."""

    @property
    def weight_version(self) -> int:
        """Of the policy: grows with every optimizer step, checkpoint load and adapter load."""

    @property
    def training(self) -> bool:
        """Whether the current rollout is for training, or for evaluation."""

    @property
    def over_support(self) -> bool:
        """Whether completions are to name the ids that tokens were sampled from, where the sampling leaves some out:
        tokens are scored over these (`Completion.support`)."""

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The dataset's rows of this rank's batch, as TRL gave them, in the order of its prompts."""

    @property
    def on_completion(self) -> Callable[[int, Request, Completion], None] | None:
        """What wants to know each completion of a rollout as it comes, by the number of its prompt among this rank's;
        None where nobody does. A rollout that `tells` calls it."""

    @property
    def on_conversation(self) -> Callable[[int, Conversation], None] | None:
        """The same of each conversation, when it has ended."""

    @property
    def metrics(self) -> dict[str, float | list[float]]:
        """Numbers of the current rollout, named `hybrid/…`, for the trainer's logs; add to it."""

    @property
    def header_lines(self) -> list[str]:
        """The header of the run, as rank 0 printed it; empty before that."""

    @property
    def held_bytes(self) -> Mapping[Phase, Mapping[str, int]]:
        """Bytes on this rank's device per owner, as measured when a phase last began; empty where TRL generates."""

    def free_bytes(self) -> int:
        """Bytes of the policy's device that nobody uses now."""

    def weights_changed(self) -> None:
        """Say, on every rank, that weights were changed by hand: the next rollout syncs all."""


class Stream(Protocol):
    """Requests that come and go while the engine steps. Used from the trainer's thread only.

    With several ranks per replica each rank adds its own requests and receives its own completions, and every rank
    must step until no rank has `more`: who has finished keeps the others company.
    """

    shared: bool
    """Whether other ranks step along, so that no rank may wait for long without a step."""

    def add(self, request: Request) -> int:
        """Queue a request; returns the key that its completion comes back under."""

    def abort(self, key: int) -> None:
        """Forget a request and free what it holds; its completion never comes."""

    def step(self, more: bool) -> tuple[list[tuple[int, Completion]], bool]:
        """Let the engine take one step, if it has anything to do.

        Args:
            more: whether this rank still has anything to come, now or later.

        Returns:
            What finished, and whether any rank has more.

        Raises:
            EngineError: another rank of the replica gave up.
        """

    @property
    def busy(self) -> bool:
        """Whether a step now would compute anything."""


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
    """Where an engine keeps a model's weights on this rank. Writing all of it is a complete sync.

    Attributes:
        of: by checkpoint name; a box may occur twice, where the engine keeps a tensor twice.
        padding: what belongs to no tensor and must be zero, as the rows that fill up a vocabulary.
    """

    of: Mapping[str, Sequence[Region]]
    padding: Sequence[Tensor] = ()


class Engine(Protocol):
    """Generates tokens, gives memory back and takes it again. Lives in the trainer's process. Inherit from it to get
    what is optional."""

    max_model_len: int
    """Longest prompt plus completion, in tokens."""

    dtype: torch.dtype
    """What it computes in."""

    quantized: bool
    """Whether it rounds the weights further than its dtype does."""

    untested: str | None = None
    """What a run is told where this release of what samples was never tested: every sync is then proven in full."""

    weights_lost: bool
    """Whether sleeping discarded the weights: a sync must follow the next `wake("weights")`."""

    peers_lost: bool
    """Set by whoever raises `PeerLostError`: `close` must then wait for no other rank."""

    sleeps: bool
    """Whether it gives memory back during TRAIN."""

    asleep_bytes: int
    """What waking will take of the device's memory; 0 while all is awake."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """One completion per request, in the order of the requests. With several ranks per replica, each rank
        passes its own requests and receives its own completions; all ranks of the replica must call."""

    def stream(self, sampling: Sampling) -> AbstractContextManager[Stream]:
        """Requests one at a time, for rollouts in which trajectories go their own pace. Optional: an engine that has it
        says so with `streams=True` where it is offered. On leaving, what is unfinished is aborted."""
        raise EngineError(f"{type(self).__name__} takes no requests one at a time")

    def load_weights(self, weights: NamedTensors) -> LoadReport:
        """Write full tensors, named as in a checkpoint, through the engine's own loader; consumes them lazily.
        Drops every cache that depends on the weights."""

    def differing(self, weights: NamedTensors) -> list[str]:
        """Names of the given tensors whose bits, cast to the engine's dtype, are not those in its memory."""

    def regions(self, policy: Policy) -> Regions:
        """The memory behind the policy's weights, for weight paths that write into it themselves and then call
        `weights_written`. Valid while the engine lives, asleep or not. Collective; may load the weights to find out.
        Optional.

        Raises:
            EngineError: why it must not be written to from outside.
        """
        raise EngineError(f"{type(self).__name__} does not say where its weights lie")

    def weights_written(self) -> None:
        """All of `regions` holds the policy's parameters again: bring its persistent buffers, which every rank has in
        full, and drop every cache that depends on the weights. Optional, as `regions` is."""
        return

    def sleep(self, keep_weights: bool = False) -> None:
        """Give back what need not be resident during TRAIN; never the weights where `keep_weights` says that the
        policy lives in them, or that nothing would bring them back. A second call does nothing."""

    def wake(self, what: str) -> None:
        """Take memory again: "weights" before a sync, "kv_cache" before generating."""

    def resident(self, what: str) -> list[Tensor]:
        """The tensors of "weights" or "kv_cache" that hold memory now, for the ledger."""

    def close(self) -> None:
        """Free everything; leaves process groups and settings it did not make untouched."""

    def leave(self) -> None:
        """The process ends: let go of what would keep it from ending, and wait for no other rank. Optional: an engine
        without it is closed."""
        self.close()


class WeightSync(Protocol):
    """Brings the policy's current weights into the engine. Inherit from it to get what is optional."""

    name: str

    keeps_weights: bool = False
    """Whether the engine's weights must stay resident during TRAIN."""

    def refuses(self) -> str | None:
        """Why this path cannot serve this model and engine, or None. Called once, with the engine built and its weights
        awake; its KV cache may sleep."""

    def open(self) -> None:
        """This path was chosen. Called once, after `refuses`."""
        return

    def note(self) -> str | None:
        """What the run's header says of it, or None. Called on every rank, after `open`."""
        return None

    def sync(self) -> LoadReport:
        """Make the engine's weights the policy's. Called on every rank."""

    def put_back(self) -> bool:
        """The rollout is over: return what was borrowed for it. Returns whether the engine lost weights by that."""
        return False

    def forget(self) -> None:
        """Somebody changed weights by hand: what was taken for unchanged is to move again with the next sync."""
        return

    def check(self, full: bool) -> int | None:
        """Prove that the engine holds the policy's bits, in full or cheaply; returns how many tensors were checked,
        raises SyncError naming those that differ. None leaves it to the session, which compares full tensors."""
        return None

    def release(self) -> None:
        """The engine was closed: take back what the policy shared with it."""
        return


class Rollout(Protocol):
    """Turns prompts into completions. Inherit from it to get what is optional."""

    name: str

    converses: bool = False
    """Whether it runs conversations with tools itself (`converse`); otherwise TRL does, turn by turn, through `run`."""

    tells: bool = False
    """Whether it calls the run's `on_completion` in `run`, and `on_conversation` in `converse`, as each is there.
    Rewards that begin early need it."""

    def run(self, session: Run, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """One completion per request, in order: TRL's batch contract is rigid."""

    def converse(
        self, session: Run, dialogues: Sequence[Dialogue], limits: Limits, request: RequestMaker
    ) -> list[Conversation]:
        """Every dialogue to its end, in order; called instead of `run` where the trainer has tools."""
        raise ComponentError(f"rollout {self.name!r} runs no conversations")

    def close(self) -> None:
        """The session is closing, or its engine is: let go of threads and processes."""
        return


class Scores(NamedTuple):
    """What the trainer learns from: log-probs of tokens, and what else was asked for.

    Attributes:
        log_probs: (B, C) float, of the completions' tokens at the run's temperature, 0 where a token is masked.
        entropies: (B, C) float, of the distributions they come from; None where not asked for. TRL asks for them
            in every loss, not for old and reference log-probs.
        router_loss: scalar, the load-balancing loss of a model with experts; None where not asked for.
    """

    log_probs: Tensor
    entropies: Tensor | None
    router_loss: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """What is to be scored in one call, under `torch.no_grad` or not: a micro-batch for its loss, or all rows of a
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
        experts: (B, P + C, layers, experts per token) int16, those that each token is to be computed with, -1 where the
            model chooses; None where it chooses all.
        support: of shape (B, P + C), the ids that the token behind each position was sampled from, which its
            log-prob and the entropy are over; None where they are over all.
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
    """Computes per-token log-probs for the trainer. Inherit from it to get what is optional."""

    name: str

    deferred: bool = False
    """Whether the log-probs from before the update are taken from the first loss forward, where that has the weights
    that they are of, instead of a pass of their own."""

    balanced: bool = False
    """Whether `micro_batches` is to be asked which rows to train together."""

    joins: bool = False
    """Whether `joined` is to be asked how many micro-batches share a pass."""

    def score(self, rows: Rows) -> Scores:
        """Score the rows, in their order. Collective: every rank scores rows of its own."""

    def micro_batches(self, prompts: Tensor, tokens: Sequence[int], count: int) -> Sequence[Sequence[int]]:
        """Which rows to train together: `count` lists of equally many row numbers. Asked where `balanced`, and where
        the gradient is the same whichever rows share a micro-batch.

        Args:
            prompts: (B, P) int64, token ids of each row of a rollout on this rank; -1 where there is no token.
            tokens: how many each row has, prompt and completion.
        """
        raise ComponentError(f"scoring {self.name!r} chooses no micro-batches")

    def joined(self, tokens: Sequence[int]) -> int:
        """How many of the micro-batches that come next in an optimizer step are to share one forward and one backward
        pass: 1 or more, on every rank the same. Asked where it `joins`. Collective.

        Args:
            tokens: of each of them on this rank, at least one; prompts and completions.
        """
        raise ComponentError(f"scoring {self.name!r} joins no micro-batches")

    def note(self) -> str | None:
        """What the run's header says of it, or None. Called on every rank, when the model is prepared."""
        return None

    def close(self) -> None:
        """The session is closing: leave the model as it was."""
        return


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Completions of training prompts that were sampled and scored: those of one prompt are a group. Of all ranks, and
    the same on each; on the CPU.

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
        """(groups, num_generations) float32, weighted sums over the functions; NaN where none returned a number."""
        sums = (self.rewards * self.weights).nansum(dim=-1)
        return sums.masked_fill(self.rewards.isnan().all(dim=-1), float("nan"))


class Algorithm(Protocol):
    """What is trained on of what was sampled, and how much it counts. A run may have several. They act in training
    only, and are asked on every rank, with the same data, for the same answer. Inherit from it: all but the name is
    optional."""

    name: str

    rounds: int = 1
    """How often at most prompts are sampled for one batch, until enough groups are kept."""

    oversampling: float = 1.0
    """How many times a batch's prompts the first round has, 1.0 or more."""

    def draw(self, count: int, size: int) -> Sequence[int] | None:
        """Which prompts are sampled next: `count` row numbers of the training dataset, below `size`. None leaves it to
        the run: TRL's data loader at first, random rows in further rounds."""
        return None

    def keep(self, groups: Groups) -> Sequence[bool]:
        """Which groups of a round may be trained on. What the batch lacks after the last round is filled up with groups
        that count for nothing."""
        return [True] * len(groups)

    def observe(self, groups: Groups) -> None:
        """A round was sampled and scored, and nothing of it is left out yet: what `draw` may learn from."""
        return

    def rewards(self, groups: Groups) -> Tensor:
        """In place of `groups.rewards`, of the batch that is trained on; in the same shape."""
        return groups.rewards

    def advantages(self, groups: Groups) -> Tensor | None:
        """(groups, num_generations), in place of TRL's; None keeps those. Rows without any reward get 0 anyway."""
        return None

    def loss(self, scores: Scores, batch: Mapping[str, Tensor]) -> Tensor | None:
        """A scalar to be added to the loss of a micro-batch, of this rank's rows; None adds nothing. The loss of an
        optimizer step is the mean over its micro-batches.

        Args:
            scores: with gradients.
            batch: what TRL computes its loss from: among others `advantages` (B,), `completion_mask` (B, C) and, where
                somebody else than the policy wrote some of the tokens, `tool_mask` (B, C).
        """
        return None

    def note(self) -> str | None:
        """What the run's header says of it, or None."""
        return None

    def state(self) -> Mapping[str, Any]:
        """What a checkpoint must hold of it, as JSON has it."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned when the checkpoint was written."""
        return


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EnvironmentArguments:
    """An environment, as the arguments of TRL's trainer that a script would pass for it. Has one of the first two.

    Attributes:
        rollout_func: plays episodes, as `trlx_hybrid_multiturn.episodes(Game)` does. Where it has an attribute
            `rollout`, that is the name of the rollout it plays on, taken where the user chose none. Where it has
            `factory`, that makes its environments, objects with `reset(row)` and `step(completion)`, and `max_turns`
            limits their episodes: `trlx-hybrid environments try` reads both.
        environment_factory: makes one of TRL's environments, whose public methods are the model's tools.
        reward_funcs: as TRL takes them; not needed where the environments of a factory have `get_reward`.
        train_dataset, eval_dataset: functions that make a `datasets.Dataset`. Called where the user gave none.

    Raises:
        ComponentError: it has none of the first two, or both.
    """

    rollout_func: Callable[..., Any] | None = None
    environment_factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None = None
    reward_funcs: Any = None
    train_dataset: Callable[[], Any] | None = None
    eval_dataset: Callable[[], Any] | None = None

    def __post_init__(self) -> None:
        if (self.rollout_func is None) == (self.environment_factory is None):
            raise ComponentError("EnvironmentArguments takes either rollout_func or environment_factory.")
