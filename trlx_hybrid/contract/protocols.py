"""The protocols of components: the members that each kind must have. Plugins depend on each other only through them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..errors import ComponentError, EngineError
from .types import Completion, LoadReport, Phase, Request, Sampling

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel, TrainingArguments

    from ..config import HybridConfig
    from ..interprocess.ranks import Ranks
    from ..policy.policy import Policy
    from .conversation import Conversation, ConversationPool, Dialogue, Limits, RequestMaker
    from .support import KeptTokens

NamedTensors = Iterable[tuple[str, "Tensor"]]


class Run(Protocol):
    """The view of a run that hooks and components get: what they may rely on of `trlx_hybrid.session.Session`."""

    @property
    def args(self) -> TrainingArguments:
        """The trainer's arguments (TRL's config)."""

    @property
    def config(self) -> HybridConfig:
        """The user's settings."""

    @property
    def policy(self) -> Policy:
        """The model being trained."""

    @property
    def ranks(self) -> Ranks:
        """The processes that train the model, with the collective operations among them."""

    @property
    def engine(self) -> Engine | None:
        """The inference engine. None before it is built, and for the whole run where TRL itself generates."""

    @property
    def live_engine(self) -> Engine:
        """The engine, which must have been built (ComponentError otherwise)."""

    @property
    def weights(self) -> WeightSync | None:
        """The weight sync, which brings the policy's weights into the engine. None where `engine` is None."""

    @property
    def rollout(self) -> Rollout | None:
        """The rollout component, which turns prompts into completions. None where `engine` is None."""

    @property
    def sampling(self) -> Sampling:
        """The run's sampling parameters."""

    @property
    def phase(self) -> Phase:
        """The current phase, which says who owns the device memory: the engine in ROLLOUT, the trainer in TRAIN."""

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
        """True where the trainer computes log-probs over only those token ids that top-k, top-p and the like have left.
        Completions must then list these ids for each token (`Completion.support`)."""

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The dataset's rows of this rank's batch, as TRL gave them, in the order of its prompts."""

    @property
    def on_completion(self) -> Callable[[int, Request, Completion], None] | None:
        """A function that a rollout with `Rollout.tells` set calls as soon as a completion is finished, as
        `on_completion(index of the prompt among this rank's prompts, request, completion)`. None where nothing in the
        run uses completions before the rollout ends."""

    @property
    def on_conversation(self) -> Callable[[int, Conversation], None] | None:
        """A function that a rollout with `Rollout.tells` set calls as soon as a conversation has ended, as
        `on_conversation(index of the prompt among this rank's prompts, conversation)`. None where nothing in the run
        uses conversations before the rollout ends."""

    @property
    def metrics(self) -> dict[str, float | list[float]]:
        """Numbers of the current rollout, named `hybrid/…`, for the trainer's logs; components add theirs."""

    @property
    def header_lines(self) -> list[str]:
        """The lines that rank 0 printed when the run started: its components, and why; its memory. Empty before."""

    @property
    def held_bytes(self) -> Mapping[Phase, Mapping[str, int]]:
        """The bytes on this rank's device by phase and by use ("policy", "gradients", "optimizer", "engine weights",
        "KV cache", "other"), as measured when the phase last began; empty where TRL itself generates."""

    def free_bytes(self) -> int:
        """Return how many bytes of the policy's device are free now."""

    def weights_changed(self) -> None:
        """Tell the run, on every rank, that other code than the optimizer changed weights: the next sync moves all."""


class Stream(Protocol):
    """An open connection to the engine: requests are added and aborted while it generates, in the trainer's thread.

    Where several ranks hold one replica of the engine, each adds its own requests and receives its own completions.
    Every rank must then call `step` until no rank has more, even after its own requests have finished.
    """

    shared: bool
    """True where other ranks must call `step` together with this one, so that no rank may stay away for long."""

    def add(self, request: Request) -> int:
        """Queue a request, and return the key under which its completion comes back."""

    def abort(self, key: int) -> None:
        """Drop a request and free what it holds; its completion never comes."""

    def sampled(self, key: int) -> Completion:
        """Return the tokens of an unfinished request, and end it. Only engines with `Component.interrupts`."""

    def step(self, more: bool) -> tuple[list[tuple[int, Completion]], bool]:
        """Let the engine take one step, if it has anything to do.

        Args:
            more: whether this rank has unfinished requests, or will add some.

        Returns:
            A (key, completion) pair for each request that finished, and whether any rank passed `more=True` or has
            unfinished requests.

        Raises:
            EngineError: another rank of the replica has failed.
        """

    @property
    def busy(self) -> bool:
        """True where `step` would have requests to compute now."""


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """A part of a checkpoint tensor, given by one index range per dimension, and the engine's memory that holds this
    part.

    Attributes:
        box: the index ranges (start, end), end exclusive, one per dimension of the checkpoint tensor.
        memory: a view of the engine's weights, shaped like the part, in the engine's dtype, with any strides.
    """

    box: tuple[tuple[int, int], ...]
    memory: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Regions:
    """The places where an engine keeps a model's weights on this rank. Writing all of them is a complete sync.

    Attributes:
        of: the regions that together hold a checkpoint tensor, by the tensor's name. A tensor that the engine keeps
            twice has regions for both copies.
        padding: memory that belongs to no tensor and must be zero, such as the rows that pad a vocabulary.
    """

    of: Mapping[str, Sequence[Region]]
    padding: Sequence[Tensor] = ()


class Engine(Protocol):
    """The inference engine, which generates tokens in the trainer's process, frees its device memory for training, and
    takes it again. A component that inherits from this class gets the optional members."""

    max_model_len: int
    """The longest prompt plus completion, in tokens."""

    dtype: torch.dtype
    """The dtype that the engine computes in."""

    quantized: bool
    """True where the engine quantises the weights, so that they are rounded further than its dtype does."""

    untested: str | None = None
    """A warning to log where this release of the inference library was never tested, else None. With a warning, every
    weight sync is verified in full."""

    weights_lost: bool
    """True where sleeping discarded the weights: a sync must follow the next `wake("weights")`."""

    peers_lost: bool
    """True once a component, such as a weight sync, has raised `PeerLostError`: another rank has died or does something
    else. The component that raises it sets this flag; `close` must then wait for no other rank."""

    sleeps: bool
    """True where the engine frees device memory during the phase TRAIN."""

    asleep_bytes: int
    """Bytes of device memory that waking the engine will take; 0 while its weights and KV cache are both awake."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Return one completion per request, in the order of the requests. With several ranks per replica, each rank
        passes its own requests and receives its own completions; all ranks of the replica must call."""

    def stream(self, sampling: Sampling) -> AbstractContextManager[Stream]:
        """Open a stream that takes requests one at a time, for rollouts whose trajectories run at their own pace.
        Leaving the context aborts unfinished requests. Optional: a plugin whose engine has this method sets
        `streams=True` on the component that it registers."""
        raise EngineError(f"{type(self).__name__} takes no requests one at a time")

    def load_weights(self, weights: NamedTensors) -> LoadReport:
        """Write full tensors into the engine's weights, through its own loader, which consumes the iterable lazily.
        Drops every cache that depends on the weights.

        Args:
            weights: (name as in a checkpoint, tensor) pairs.
        """

    def differing(self, weights: NamedTensors) -> list[str]:
        """Compare tensors with the engine's own weights, and return the names of those whose bits, after a cast to the
        engine's dtype, differ."""

    def regions(self, policy: Policy) -> Regions:
        """Return the memory that holds the policy's weights, for weight syncs that write into it themselves and then
        call `weights_written`. The result stays valid while the engine lives, asleep or not. Collective; may load the
        weights to find out where they are written. Optional.

        Raises:
            EngineError: the memory must not be written to from outside; says why.
        """
        raise EngineError(f"{type(self).__name__} does not say where its weights lie")

    def weights_written(self) -> None:
        """Finish a weight sync that has written all of the policy's parameters into `regions`: copy the policy's
        persistent buffers, which every rank has in full, and drop every cache that depends on the weights. Optional, as
        `regions` is."""
        return

    def sleep(self, keep_weights: bool = False) -> None:
        """Free the device memory that the engine does not need during TRAIN. A second call does nothing.

        Args:
            keep_weights: whether the weights must stay: the policy uses the same memory, or nothing would restore them.
        """

    def wake(self, what: str) -> None:
        """Take device memory again after `sleep`: the memory of the weights if `what` is "weights", before a weight
        sync; the memory of the KV cache if `what` is "kv_cache", before generating."""

    def resident(self, what: str) -> list[Tensor]:
        """Return the tensors of the "weights" or of the "kv_cache", as `what` says, that occupy device memory now. The
        run measures with them how much memory the engine holds."""

    def close(self) -> None:
        """Free everything that the engine made. Process groups and settings that others made stay untouched."""

    def leave(self) -> None:
        """Release what would keep the process from ending, and wait for no other rank. Called instead of `close` when
        the process ends. Optional: `close` is called where the engine does not have it."""
        self.close()


class WeightSync(Protocol):
    """A weight sync, which brings the policy's current weights into the engine. A component that inherits from this
    class gets the optional members."""

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
        """Return a text on this weight sync that is printed when the run starts, or None. Called on every rank."""
        return None

    def sync(self) -> LoadReport:
        """Write the policy's current weights into the engine, and return what was loaded. Called on every rank."""

    def put_back(self) -> bool:
        """Undo, at the end of each rollout, what the sync did to the policy for this rollout, such as lending its
        memory to the engine. Returns whether the engine lost weights by that, so that the next rollout must sync."""
        return False

    def forget(self) -> None:
        """Make the next sync move all weights, even those that this weight sync takes for unchanged: code outside of
        the optimizer has changed some."""
        return

    def check(self, full: bool) -> int | None:
        """Verify after a sync that the engine holds the policy's bits.

        Args:
            full: whether to compare all tensors; else a few.

        Returns:
            The number of tensors that were compared. None leaves the check to the session, which compares full tensors.

        Raises:
            SyncError: some tensors differ; the message names them.
        """
        return None

    def release(self) -> None:
        """Free what the weight sync holds, after the engine was closed: give parameters that shared the engine's memory
        memory of their own again, and leave process groups."""
        return


class Rollout(Protocol):
    """A rollout, which turns prompts into completions. Components that inherit from it get the optional members."""

    name: str

    converses: bool = False
    """True where this component runs conversations with tools, in `converse`; else TRL calls `run` for each turn."""

    tells: bool = False
    """True where `run` and `converse` call the run's `on_completion` and `on_conversation` at once."""

    def run(self, session: Run, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Sample one completion per request and return them in the order of the requests, on which TRL relies."""

    def converse(
        self, session: Run, dialogues: Sequence[Dialogue], limits: Limits, request: RequestMaker
    ) -> list[Conversation]:
        """Run every dialogue to its end, with its tool calls, and return the conversations in the dialogues' order.
        Called instead of `run` where the trainer has tools.

        Args:
            limits: limits of each conversation.
            request: makes the engine's request for a turn of a dialogue.
        """
        raise ComponentError(f"rollout {self.name!r} runs no conversations")

    def play(self, session: Run, pool: ConversationPool) -> None:
        """Play a pool's conversations until `pool.batch()` is complete, and interrupt the others: their tokens are
        kept, and the next call goes on from them. Tool calls go on meanwhile. Only with `Component.interrupts`."""
        raise ComponentError(f"rollout {self.name!r} keeps no conversations in flight")

    def interrupt(self) -> None:
        """Interrupt the requests that `play` has left to the engine (`pool.goes_on`). The pool gets their tokens."""
        return

    def close(self) -> None:
        """Stop the rollout's threads and processes. Called when the session or its engine closes."""
        return


class Scores(NamedTuple):
    """The scores of rows: the log-probs of their completions' tokens, and what else was asked for.

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
        model: the transformers model that scores, without wrappers such as DDP: the policy's or the reference model.
        input_ids: (B, P + C) int64; prompts end at column P, completions begin there.
        attention_mask: (B, P + C) int64, 0 at padding and in completions that are masked whole.
        completion_length: C, the padded length of the completions.
        at_once: the largest number of rows in one forward pass.
        router_loss: whether `Scores.router_loss` is asked for, a mean over all tokens of a forward pass.
        padded: a function that scores all these rows as TRL does, with padding, and returns their scores.
        forward: a function that runs one forward pass through the model and its wrappers. It takes `labels`, (b, t)
            int64, the token that follows each position or -100 where nothing is to be scored, and the model's own
            arguments. It returns scores of shape (b, t), 0 where nothing was scored. Where `experts` below is set, it
            also takes `experts` (b, t, layers, experts per token) of the tokens that it is given; where `support` below
            is set, `support` of its positions.
        experts: (B, P + C, layers, experts per token) int16, the experts of each token; -1 or None: the model chooses.
        support: of shape (B, P + C), the ids from which the token after each position was sampled; its log-prob and the
            entropy are computed over these ids. None: over the whole vocabulary.
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
    """A scoring, which computes per-token log-probs for the trainer. A component that inherits from this class gets the
    optional members."""

    name: str

    deferred: bool = False
    """True where the forward pass of a batch's first loss also supplies TRL's old log-probs, as long as no optimizer
    step came between the rollout and this loss; otherwise a forward pass of its own computes them."""

    balanced: bool = False
    """True where the trainer is to call `micro_batches`, to choose which rows are trained together."""

    joins: int = 0
    """0 where the trainer is not to call `joined`, else 1 or True. The trainer writes here up to how many micro-batches
    it has found that a shared pass computes alike, and 0 where it computes otherwise."""

    def score(self, rows: Rows) -> Scores:
        """Return the scores of the rows, in their order. Collective: every rank scores its own rows."""

    def micro_batches(self, prompts: Tensor, tokens: Sequence[int], count: int) -> Sequence[Sequence[int]]:
        """Choose which rows to train together: return `count` lists of equally many row numbers. Called where
        `balanced` is True and the gradient does not depend on which rows share a micro-batch.

        Args:
            prompts: (B, P) int64, token ids of the prompts of this rank's rows of a rollout; -1 where there is none.
            tokens: number of tokens of each row, prompt and completion.
            count: number of micro-batches.
        """
        raise ComponentError(f"scoring {self.name!r} chooses no micro-batches")

    def joined(self, tokens: Sequence[int]) -> int:
        """Return how many of the next micro-batches of an optimizer step share one forward and one backward pass: 1 or
        more, the same on every rank. Called where `joins` is True. Collective.

        Args:
            tokens: number of tokens of each of these micro-batches on this rank, one or more of them.
        """
        raise ComponentError(f"scoring {self.name!r} joins no micro-batches")

    def note(self) -> str | None:
        """Return a text on this scoring that is printed when the run starts, or None. Called on every rank."""
        return None

    def state(self) -> Mapping[str, Any]:
        """Return data of this scoring that a checkpoint keeps, as JSON can hold them. Called on rank 0."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the data that `state` returned when the checkpoint was written. Called before the first `score`."""
        return

    def close(self) -> None:
        """Restore the model as it was before this scoring changed it. Called when the session closes."""
        return


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Groups of sampled and scored completions, a group being the completions of one training prompt. Every rank has
    the groups of all ranks, on the CPU.

    Attributes:
        rewards: (groups, num_generations, functions) float32, what the reward functions returned; NaN for None, and for
            rows of which nothing can be trained.
        weights: (functions,) float32, TRL's `reward_weights`.
        lengths: (groups, num_generations) int64, tokens that the model has sampled.
        truncated: (groups, num_generations) bool, whether a completion was cut off before its end token.
        rows: the row number of each group's prompt in the training dataset; None where TRL's data loader drew it.
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
        """The weighted sums of the rewards over the functions, (groups, num_generations) float32; NaN where no
        reward function returned a number."""
        sums = (self.rewards * self.weights).nansum(dim=-1)
        return sums.masked_fill(self.rewards.isnan().all(dim=-1), float("nan"))


class Algorithm(Protocol):
    """An algorithm, which chooses which samples are trained on and how much each counts. A run may have several. They
    act in training only, not in evaluation. Every rank calls them with the same data and must get the same result.
    Inherit from this class: all members but the name are optional."""

    name: str

    rounds: int = 1
    """The largest number of rounds of sampling for one batch; further rounds follow while `keep` kept too few
    groups."""

    oversampling: float = 1.0
    """The number of prompts in the first round of sampling, as a multiple of the batch's; 1.0 or more."""

    def draw(self, count: int, size: int) -> Sequence[int] | None:
        """Choose the prompts that are sampled next: return `count` row numbers of the training dataset, below `size`.
        None leaves the choice to the run: TRL's data loader at first, random rows in further rounds."""
        return None

    def keep(self, groups: Groups) -> Sequence[bool]:
        """Return for each group (the completions of one prompt) of a round of sampling whether it may be trained on. If
        too few are kept after the last round, groups that do not count in the loss fill the batch up."""
        return [True] * len(groups)

    def observe(self, groups: Groups) -> None:
        """Look at all groups of a scored round, before `keep` leaves any out, for instance to choose prompts later."""
        return

    def rewards(self, groups: Groups) -> Tensor:
        """Return rewards that replace `groups.rewards` for the batch that is trained on, in the same shape."""
        return groups.rewards

    def advantages(self, groups: Groups) -> Tensor | None:
        """Return advantages (groups, num_generations) in place of TRL's, or None. Rows without any reward get 0."""
        return None

    def loss(self, scores: Scores, batch: Mapping[str, Tensor]) -> Tensor | None:
        """Return a scalar to add to the loss of a micro-batch of this rank's rows; None adds nothing. The loss of an
        optimizer step is the mean over its micro-batches.

        Args:
            scores: scores of the rows, with gradients.
            batch: the tensors that TRL computes its loss from: among others `advantages` (B,), `completion_mask`
                (B, C) and, where tools or environments wrote some of the tokens, `tool_mask` (B, C).
        """
        return None

    def note(self) -> str | None:
        """Return a text on this algorithm that is printed with the run's settings when it starts, or None."""
        return None

    def state(self) -> Mapping[str, Any]:
        """Return this algorithm's state for a checkpoint, as data that JSON can hold."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state` returned when the checkpoint was written."""
        return


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EnvironmentArguments:
    """The parts of an environment, as the arguments of TRL's trainer that a script would pass for it. Exactly one of
    `rollout_func` and `environment_factory` is set.

    Attributes:
        rollout_func: plays episodes, such as the function that `trlx_hybrid_multiturn.episodes(Game)` returns. Three
            of its attributes are read where it has them. `rollout` names the rollout component that it needs, used
            where the user chose none. `factory` makes its environments, objects with `reset(row)` and
            `step(completion)`, and `max_turns` limits their episodes; `trlx-hybrid environments try` uses both.
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
