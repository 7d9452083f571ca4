"""Reward functions and reward models that run in Ray actors: the function `remote_reward`."""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from trlx_hybrid.errors import TROUBLESHOOTING, ConfigError, RewardError, listed
from trlx_hybrid.interprocess.copies import copied

from .. import debugging
from ..actors import (
    DEADLINE,
    START_SECONDS,
    Pickled,
    PoolActor,
    UserPool,
    Worker,
    check_settings,
    ensure_connected,
    reply_of,
    result_of,
)
from ..errors import DeadlineError, WorkerDiedError, WorkerError, brief
from ..printer import say
from ..waiting import Reference, replies
from ..worker_group.batch import row_ranges
from .reward_model import RewardModel

E = TypeVar("E", bound=WorkerError)
T = TypeVar("T")
REMEDY = (
    "Give a class instead: each worker makes an instance of it, with whatever cannot travel. Or create that inside the "
    "function."
)
"""The advice for a user whose reward cannot be pickled."""
LOGGERS = ("log_extra", "log_metric")
"""The names of the arguments with which TRL lets a reward function log. They are methods of the trainer, which cannot
be sent to an actor."""


def remote_reward(
    reward: Any,
    *,
    workers: int = 1,
    cpus: float = 1.0,
    gpus: float = 0.0,
    deadline: float = DEADLINE,
    start_deadline: float = START_SECONDS,
    drop: Sequence[str] = (),
    early: bool = False,
    processing_class: Any = None,
    model_kwargs: Mapping[str, object] | None = None,
    chat_template_kwargs: Mapping[str, object] | None = None,
    name: str | None = None,
) -> RemoteReward:
    """Make a reward function for TRL's `reward_funcs` that runs in Ray actors.

    ```python
    trainer = GRPOTrainer(..., reward_funcs=remote_reward(runs_the_tests, workers=8))
    ```

    The rows of a batch are split over the workers, and rewards come back in order. They equal those that `reward` would
    return in this process if it scores each row by itself. A function that compares rows needs `workers=1`. The workers
    start at once, so a reward that cannot be sent, loaded or placed is refused before training begins.

    Args:
        reward: a reward that TRL takes: a function, synchronous or not, or a callable object; or a reward model, as a
            path, a name on the Hub or a `torch.nn.Module` on the CPU. It may also be a class: each worker makes an
            instance and calls it. Use a class for clients, locks and models of your own, which cannot be sent.
        workers: the number of actors.
        cpus, gpus: the resources of each worker. With a fraction of a GPU, workers share a GPU.
        deadline: seconds that a batch may take; `math.inf` waits for ever.
        start_deadline: seconds for all workers to start, imports and models included.
        drop: names of arguments that are not passed to the function, because they cannot be sent or are large.
        early: whether to score each group (the completions of one prompt) as soon as it is sampled, while other groups
            are still sampled. One worker scores the part of the group that is on this rank. The function then sees a
            group at a time, and TRL's `trainer_state` as it was when the rollout began. It needs a trainer of this
            package, no `rollout_func`, and an engine that takes single requests while it generates (a stream); with
            tools or environments also the rollout `multi_turn`.
        processing_class: a reward model's tokenizer; by default the model's own.
        model_kwargs: arguments of a reward model's `from_pretrained`, as in `GRPOConfig.model_init_kwargs`.
        chat_template_kwargs: arguments of the chat template of a reward model, as in `GRPOConfig`.
        name: the name in TRL's metrics; by default the name that TRL would give to `reward`.

    Raises:
        ConfigError: `reward` is no reward, or cannot be pickled; the message names the part that prevents it.
        ClusterError: no cluster answers at `RAY_ADDRESS`, or none can be started here.
        PlacementError: the cluster does not have the resources.
        WorkerError: the reward cannot be loaded on a worker.
    """
    torch = sys.modules.get("torch")
    module = torch is not None and isinstance(reward, torch.nn.Module)
    model = module or isinstance(reward, str)
    given = {
        "processing_class": processing_class,
        "model_kwargs": model_kwargs,
        "chat_template_kwargs": chat_template_kwargs,
    }
    for setting in (setting for setting, value in given.items() if value is not None and not model):
        raise ConfigError(f"remote_reward: {setting}= is of a reward model, and {reward!r:.80} is none. Leave it out.")
    if not model and not callable(reward):
        raise ConfigError(f"remote_reward takes a function, a class or a reward model, and got {reward!r:.80}.")
    check_settings("remote_reward", deadline, workers=workers)
    if module and any(parameter.device.type != "cpu" for parameter in reward.parameters()):
        raise ConfigError("remote_reward sends a model from the CPU: call .to('cpu') on it, or give a path.")
    called = name or _trl_name(reward)
    ensure_connected()
    if model:
        load = functools.partial(
            RewardModel, reward, processing_class, dict(model_kwargs or {}), dict(chat_template_kwargs or {})
        )
        pickled = Pickled.of(load, f"Reward model {called!r}", "Save it, and give its path.")
    else:
        pickled = Pickled.of(reward, f"Reward function {called!r}", REMEDY)
    pool = UserPool(
        RewardActor,
        pickled,
        (called, model or inspect.isclass(reward)),
        name=called,
        role="reward",
        workers=workers,
        cpus=cpus,
        gpus=gpus,
        start_deadline=start_deadline,
    )
    kind = EarlyRemoteReward if early else RemoteReward
    return kind(called, pool, frozenset(drop), debugging.patience(deadline))


def _trl_name(reward: Any) -> str:
    """Return the name that TRL gives to a reward: the last part of a model's name or path, or a function's name."""
    while isinstance(reward, functools.partial):
        reward = reward.func
    if isinstance(reward, str):
        return Path(reward).name
    path = getattr(getattr(reward, "config", None), "_name_or_path", "")
    return Path(path).name or str(getattr(reward, "__name__", type(reward).__name__))


# --- in the trainer -------------------------------------------------------------------------------------------------


class RemoteReward:
    """The reward function that `remote_reward` returns: TRL calls it, and its workers (Ray actors) score the rows.

    Every training process that makes a remote reward has workers of its own, and holds their handles; no actor has a
    name. The workers end with the process, or when `close` is called or a `with` block is left.

    Args:
        name: the reward's name in metrics and messages.
        pool: the pool of actors.
        drop: names of arguments that are not passed to the function.
        deadline: seconds that a batch may take.
    """

    def __init__(self, name: str, pool: UserPool, drop: frozenset[str], deadline: float) -> None:
        self.__name__ = name
        self._pool, self._drop, self._deadline = pool, drop, deadline

    def __call__(self, **arguments: object) -> list[float | None]:
        """Score a batch. The arguments are those that TRL passes to a reward function, by name.

        If a worker dies, another one replaces it, and the rows that have no score are scored once more. If a worker
        dies over these rows again, the function is taken for the cause, and the call fails.

        Returns:
            One reward per row; None if the function returned None for it.

        Raises:
            WorkerError: the function raised; the message names the worker, with its traceback. `__cause__` is the
                exception.
            WorkerDiedError: workers died twice over the same rows.
            DeadlineError: no answer came in time. The workers are ended, and the next call starts new ones.
            ConfigError: an argument cannot be sent; the message names it.
        """
        batch = Batch(arguments, self._drop)
        sent = self._begun_of(batch)
        died: WorkerDiedError | None = None
        while batch.missing:
            again, died = died, self._scored(batch, sent or self._dealt_out(batch))
            sent = {}
            if died is not None and again is not None:
                raise self._error(
                    WorkerDiedError,
                    died.rank,
                    died.node,
                    f"lost workers twice over the same {len(batch.missing)} rows, the first of which is row "
                    f"{batch.missing[0]} of the batch: scoring ends the process. {died}",
                ) from died
            if died is not None:
                say(f"{died} Starting another in its place.")
        batch.log()
        return batch.rewards

    def _begun_of(self, batch: Batch) -> dict[Share, Reference]:
        """Return references to the answers of workers that have begun to score rows of this batch before TRL asked for
        the scores, by worker and rows. Empty in this class; `EarlyRemoteReward` overrides it."""
        return {}

    def _dealt_out(self, batch: Batch) -> dict[Share, Reference]:
        """Send the rows that have no score to the workers, a block of consecutive rows to each. Returns Ray's
        references to the answers, by worker and rows."""
        self._pool.restore()
        workers = list(self._pool.workers.values())
        blocks = row_ranges(len(batch.missing), len(workers))
        rows = [tuple(batch.missing[block.start : block.stop]) for block in blocks]
        return self._sent(batch, [Share(worker, part) for worker, part in zip(workers, rows) if part])

    def _scored(self, batch: Batch, sent: Mapping[Share, Reference]) -> WorkerDiedError | None:
        """Wait for the workers' answers and add them to the batch.

        Args:
            batch: the batch that is scored.
            sent: Ray's references to the answers, by worker and rows.

        Returns:
            The error of the first worker that died, or None. The rows of dead workers still have no score.

        Raises:
            WorkerError: the function raised.
            DeadlineError: an answer did not come in time.
        """
        from ray.exceptions import GetTimeoutError, RayActorError, RayError

        died: WorkerDiedError | None = None
        late = []
        for (worker, rows), found in replies(sent, self._deadline):
            failed: BaseException | None = found if isinstance(found, RayError) else None
            try:
                if failed is None:
                    batch.add(rows, *result_of(found, str(worker)))
            except (Exception, SystemExit) as met:  # whatever the function raised
                failed = met
            if isinstance(found, GetTimeoutError):
                late.append(worker)
            elif isinstance(found, RayActorError):
                worker.dead = True
                lost = f"lost a worker: {worker} died: {brief(found).rstrip('.')}."
                died = died or self._error(WorkerDiedError, worker.index, worker.where, lost)
            elif failed is not None:
                trace = "\n".join(note for note in getattr(failed, "__notes__", []) if TROUBLESHOOTING not in note)
                told = f"failed on {worker}: {type(failed).__name__}: {failed}\n{trace}"
                raise self._error(WorkerError, worker.index, worker.where, told, trace) from failed
        if late:
            self.close()
            raise self._error(
                DeadlineError,
                late[0].index,
                late[0].where,
                f"got no answer within {self._deadline:g} s from {listed([str(worker) for worker in late], 3)}. Its "
                "workers were ended. Raise deadline= if a batch takes that long.",
            )
        return died

    def _sent(self, batch: Batch, shares: Sequence[Share]) -> dict[Share, Reference]:
        """Send rows to workers for scoring, and return the references to their answers.

        Args:
            batch: the batch with the rows.
            shares: which worker scores which rows.

        Raises:
            ConfigError: an argument cannot be sent; the message names it.
        """
        try:
            shared = self._shared(batch)
            return {
                share: share.worker.handle.score.remote(len(share.rows), batch.columns_of(share.rows), shared)
                for share in shares
            }
        except TypeError:  # Ray raises it where it cannot pickle
            for name, value in {**batch.columns, **batch.others}.items():
                what = f"Reward function {self.__name__!r}: the argument {name!r}"
                Pickled.of(value, what, f"If the function does not use it: remote_reward(…, drop=[{name!r}]).")
            raise

    def _shared(self, batch: Batch) -> Reference:
        """Put the arguments that belong to no single row, such as `trainer_state`, into Ray's object store once for all
        workers, and return a reference to them."""
        import ray

        return ray.put((batch.others, tuple(batch.loggers)))

    def _error(self, kind: type[E], rank: int, node: str, what: str, traceback: str = "") -> E:
        """Make an error of the class `kind` about one worker. Its message begins with the reward function's name."""
        text = f"Reward function {self.__name__!r} {what}"
        return kind(text, rank=rank, method="score", node=node, traceback=traceback)

    def close(self) -> None:
        """End the workers and give their resources back. Another call starts new ones."""
        self._pool.close()

    def __enter__(self) -> RemoteReward:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class EarlyRemoteReward(RemoteReward):
    """The reward function that `remote_reward(early=True)` returns: it scores a group (the completions of one prompt)
    while others are still sampled.

    Attributes:
        begins_early: always True. If a reward function has this attribute, a trainer of this package calls its method
            `prepare` before a rollout, and its method `begin` for each group that is sampled. Where rows stay in
            flight, it also calls `placed`, before TRL calls the function itself.
    """

    begins_early = True

    def __init__(self, name: str, pool: UserPool, drop: frozenset[str], deadline: float) -> None:
        super().__init__(name, pool, drop, deadline)
        self._begun: dict[Share, tuple[Columns, Reference]] = {}
        self._later: dict[Share, tuple[Columns, Reference]] = {}  # begun for rows of later batches
        self._kept: tuple[Mapping[str, object], Reference] | None = None  # arguments shared by a rollout, and reference

    def prepare(self) -> None:
        """Start the missing workers before a rollout, so that none has to start while an engine waits.

        Raises:
            HybridError: a worker does not start, see `UserPool.restore`.
        """
        self._kept = None
        self._pool.restore()

    def placed(self, places: Mapping[int, int]) -> None:
        """Note which rows TRL is going to pass, where rows stay in flight. What was begun for the others is kept for
        later batches.

        Args:
            places: the rows' places in the batch that TRL will pass, by the numbers that `begin` got.
        """
        begun, self._begun = self._begun | self._later, {}
        self._later = {share: found for share, found in begun.items() if not all(row in places for row in share.rows)}
        for share in begun.keys() - self._later.keys():
            self._begun[Share(share.worker, tuple(places[row] for row in share.rows))] = begun[share]

    def begin(self, rows: Sequence[int], **arguments: object) -> None:
        """Begin to score rows of a batch before TRL asks for the scores, in the worker with the fewest waiting rows.
        Returns at once; TRL's later call of the reward function collects the scores.

        Args:
            rows: the rows' numbers in the batch that TRL will pass, or, where rows stay in flight, in the run.
            arguments: the arguments that TRL will pass, for these rows.

        Raises:
            ConfigError: an argument cannot be sent; the message names it.
        """
        import ray

        batch, waiting = Batch(arguments, self._drop), Counter[int]()
        references = [reference for _, reference in self._begun.values()]
        ready = set(ray.wait(references, num_returns=len(references), timeout=0)[0] if references else ())
        for share, (_, reference) in self._begun.items():
            waiting[share.worker.number] += len(share.rows) * (reference not in ready)
        worker = min(self._pool.workers.values(), key=lambda worker: waiting[worker.number])
        (reference,) = self._sent(batch, [Share(worker, tuple(range(len(rows))))]).values()
        # A copy, since the caller may change its lists before they are compared.
        self._begun[Share(worker, tuple(rows))] = copied(batch.columns), reference

    def _shared(self, batch: Batch) -> Reference:
        """Put the arguments that belong to no single row into Ray's object store, and return a reference to them. All
        groups of a rollout share one copy, because `trainer_state`, which TRL passes, grows with the log, to
        megabytes."""
        kept = self._kept
        same = kept is not None and kept[0].keys() == batch.others.keys()
        if kept is None or not same or any(value is not kept[0][name] for name, value in batch.others.items()):
            self._kept = kept = batch.others, super()._shared(batch)
        return kept[1]

    def _begun_of(self, batch: Batch) -> dict[Share, Reference]:
        """Return references to the results of calls that `begin` made for rows of this batch, by worker and rows.

        A call counts only if its arguments equal the values that TRL passes for the same rows now. Other calls, such as
        the calls of a rollout that was interrupted, are forgotten, and their rows are scored anew. They are not
        cancelled: with Ray 2.60, an actor whose queue has lost a call holds back the later ones for 30 s.
        """
        begun, self._begun, self._later, self._kept = self._begun, self._later, {}, None
        found = {share: reference for share, (columns, reference) in begun.items() if batch.has(share.rows, columns)}
        if len(found) < len(begun):
            told = f"{len(begun) - len(found)} of {len(begun)} groups that it had begun with have changed since"
            say(f"Reward function {self.__name__!r}: {told}, and are scored again.")
        return found

    def close(self) -> None:
        """End the workers, give their resources back, and forget all calls that `begin` made. Another call of the
        reward function starts new workers."""
        self._begun, self._later, self._kept = {}, {}, None
        super().close()


class Share(NamedTuple):
    """A worker, and the numbers of the rows of a batch that it scores in one call."""

    worker: Worker
    rows: tuple[int, ...]


Columns = dict[str, list[object]]
"""Values for each row of a batch, by name."""
Scores = tuple[list[float | None], Columns, list[tuple[str, float]]]
"""A worker's answer: a reward for each of its rows, the values for TRL's `log_extra` by column, and the names and
values for TRL's `log_metric`."""


class Batch:
    """The arguments that TRL passes to a reward function for one batch, with the scores that workers have returned so
    far.

    Args:
        arguments: the arguments, by name.
        drop: names of arguments to leave out.

    Attributes:
        columns: the arguments with an entry for each row.
        others: the arguments without an entry for each row.
        loggers: TRL's `log_extra` and `log_metric`, if it passed them.
        rewards: the rewards, by row; None if no reward has come in or the function returned None.
        missing: the numbers of the rows that no worker has scored, in order.
    """

    def __init__(self, arguments: Mapping[str, Any], drop: frozenset[str]) -> None:
        count = len(arguments["prompts"])
        self.loggers = {name: arguments[name] for name in LOGGERS if name in arguments}
        kept = {name: value for name, value in arguments.items() if name not in drop and name not in self.loggers}
        self.columns = {n: value for n, value in kept.items() if isinstance(value, list) and len(value) == count}
        self.others = {name: value for name, value in kept.items() if name not in self.columns}
        self.rewards: list[float | None] = [None] * count
        self.missing = list(range(count))
        self._extra: Columns = {}
        self._metrics: dict[str, list[tuple[int, float]]] = {}

    def columns_of(self, rows: Sequence[int]) -> Columns:
        """Return the arguments that have an entry for each row, with the entries of these rows only.

        Args:
            rows: the rows' numbers.
        """
        return {name: [values[row] for row in rows] for name, values in self.columns.items()}

    def has(self, rows: Sequence[int], columns: Columns) -> bool:
        """Return whether the batch's own values for some rows equal given ones. Values that cannot be compared, such as
        arrays, count as different.

        Args:
            rows: the rows' numbers.
            columns: the given values: for each argument, a list with an entry for each of these rows.
        """
        try:
            return max(rows) < len(self.rewards) and bool(self.columns_of(rows) == dict(columns))
        except Exception:  # values that cannot be compared, such as arrays, count as different
            return False

    def add(
        self,
        rows: Sequence[int],
        rewards: Sequence[float | None],
        extra: Mapping[str, Sequence[object]],
        metrics: Sequence[tuple[str, float]],
    ) -> None:
        """Add a worker's scores to the batch.

        Args:
            rows: the numbers of the rows that the worker scored.
            rewards: their rewards.
            extra: the values that the function logged with `log_extra`, one per row, by column.
            metrics: the names and values that the function logged with `log_metric`.
        """
        for row, reward in zip(rows, rewards, strict=True):
            self.rewards[row] = reward
        for column, values in extra.items():
            every = self._extra.setdefault(column, [None] * len(self.rewards))
            for row, value in zip(rows, values, strict=True):
                every[row] = value
        for name, value in metrics:
            self._metrics.setdefault(name, []).append((len(rows), value))
        scored = set(rows)
        self.missing = [row for row in self.missing if row not in scored]

    def log(self) -> None:
        """Pass the values that the function logged in the workers to TRL: columns in the order of rows, metrics as the
        mean over rows."""
        for column, values in self._extra.items():
            self.loggers["log_extra"](column, values)
        for name, found in self._metrics.items():
            self.loggers["log_metric"](name, sum(n * value for n, value in found) / sum(n for n, _ in found))


# --- in the actor ---------------------------------------------------------------------------------------------------


class RewardActor(PoolActor):
    """An actor that holds a reward function, and scores the rows of a batch that the trainer sends to it."""

    def load(self, loaded: Callable[..., Any], name: str, makes: bool) -> None:
        """Store the reward function.

        Args:
            loaded: the reward function; or, with `makes`, a class or function that is called without arguments and
                returns the reward function.
            name: the reward's name, for messages.
            makes: whether to call `loaded` to get the reward function.
        """
        self._name, self._function = name, loaded() if makes else loaded
        self._runner: asyncio.Runner | None = None

    def score(self, count: int, columns: Columns, shared: tuple[Mapping[str, object], Sequence[str]]) -> bytes:
        """Score some rows. Returns bytes that `result_of` decodes: the rewards and what the function logged, or the
        exception that it raised.

        Args:
            count: the number of rows.
            columns: the arguments with an entry for each row, by name.
            shared: the arguments that belong to no single row, by name; and the names of the logging functions
                (`log_extra`, `log_metric`) that the function gets.
        """
        return reply_of(lambda: self._scored(count, columns, *shared))

    def _scored(self, count: int, columns: Columns, others: Mapping[str, object], loggers: Sequence[str]) -> Scores:
        """Call the reward function on some rows. Returns the rewards, and the values that the function passed to
        `log_extra` and `log_metric`.

        Args:
            count: the number of rows.
            columns: the arguments with an entry for each row, by name.
            others: the arguments that belong to no single row, by name.
            loggers: which of the arguments `log_extra` and `log_metric` the function gets.
        """
        extra: Columns = {}
        metrics: list[tuple[str, float]] = []

        def log_extra(column: str, values: Sequence[object]) -> None:
            if len(values) != count or column in extra:
                raise RewardError(
                    f"Reward function {self._name!r} gave log_extra {len(values)} values for {column!r}. Give it "
                    f"one for each of the {count} rows, and each column once."
                )
            extra[column] = list(values)

        def log_metric(name: str, value: float) -> None:
            metrics.append((name, float(value)))

        given = {"log_extra": log_extra, "log_metric": log_metric}
        answer = self._function(**columns, **others, **{name: given[name] for name in loggers})
        if inspect.isawaitable(answer):  # on one event loop for all batches, so that a client can keep its connections
            self._runner = self._runner or asyncio.Runner()
            answer = self._runner.run(_awaited(answer))
        return self._checked(answer, count), extra, metrics

    def _checked(self, answer: Any, count: int) -> list[float | None]:
        """Check what the reward function returned, and return it as a list of floats and None, one for each row.

        Args:
            answer: what the function returned.
            count: the number of rows.

        Raises:
            RewardError: the function returned something else.
        """
        try:
            found = [None if value is None else float(value) for value in answer]
        except (TypeError, ValueError) as error:
            raise RewardError(
                f"Reward function {self._name!r} returned {answer!r:.100}: {error}. Return a list of numbers, "
                "with None where the reward does not apply."
            ) from error
        if len(found) != count:
            raise RewardError(
                f"Reward function {self._name!r} returned {len(found)} rewards for {count} rows. Return one for each; "
                "a function that looks at a whole batch needs workers=1."
            )
        return found


async def _awaited(answer: Awaitable[T]) -> T:
    """Await `answer` and return its result. This function makes a coroutine of any awaitable, because
    `asyncio.Runner.run` takes coroutines only."""
    return await answer
