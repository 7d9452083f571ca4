"""A reward function, or a reward model, that runs in Ray actors: `remote_reward`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from trlx_hybrid.errors import ConfigError

from .. import debugging
from ..worker_group import DeadlineError, WorkerDiedError, WorkerGroup
from ..worker_group.group import DEADLINE, START_SECONDS
from .connection import connected
from .quarters import Quarters
from .reward_model import RewardModelSource
from .reward_worker import LOGGERS, RewardWorker
from .shipment import Shipment, obstacle, packed
from .tally import Tally

REMEDY = (
    "Give a class instead: each worker makes an instance of it, with whatever cannot travel. Or create that inside the "
    "function."
)


def remote_reward(
    reward: Any,
    *,
    workers: int = 1,
    cpus: float = 1.0,
    gpus: float = 0.0,
    deadline: float = DEADLINE,
    start_deadline: float = START_SECONDS,
    drop: Sequence[str] = (),
    processing_class: Any = None,
    model_kwargs: Mapping[str, Any] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> RemoteReward:
    """Make a reward function for TRL's `reward_funcs` that runs in Ray actors.

    ```python
    trainer = GRPOTrainer(..., reward_funcs=remote_reward(runs_the_tests, workers=8))
    ```

    Rows are dealt out to the workers and rewards come back in order, equal to what `reward` returns here, for a
    function that scores each row by itself. One that compares rows needs `workers=1`. The workers start at once: what
    cannot be sent, loaded or placed is refused here, before anything trains.

    Args:
        reward: what TRL takes: a function, synchronous or not, or an object that is called like one; or a reward model,
            as a path, a name on the Hub or a `torch.nn.Module` on the CPU. Also a class, of which each worker makes an
            instance and calls that: for clients, locks and models of one's own, which cannot be sent.
        workers: how many actors.
        cpus, gpus: of each. A fraction of a GPU shares it.
        deadline: seconds that a batch may take; `math.inf` waits for ever.
        start_deadline: seconds for all workers to start, imports and models included.
        drop: arguments that the function is not to be given, because they cannot be sent or are large.
        processing_class: a reward model's tokenizer; by default the one that belongs to it.
        model_kwargs: for a reward model's `from_pretrained`, as `GRPOConfig.model_init_kwargs`.
        chat_template_kwargs: as in `GRPOConfig`, for a reward model.
        name: in TRL's metrics; by default what TRL would call `reward`.

    Raises:
        ConfigError: it is no reward, or cannot be pickled; names the part that is in the way.
        ClusterError: no cluster answers at `RAY_ADDRESS`, or none can be started here.
        PlacementError: the cluster has no such room.
        WorkerError: it cannot be loaded on a worker.
    """
    model = isinstance(reward, str) or _is_module(reward)
    given = {
        "processing_class": processing_class,
        "model_kwargs": model_kwargs,
        "chat_template_kwargs": chat_template_kwargs,
    }
    for setting in (setting for setting, value in given.items() if value is not None and not model):
        raise ConfigError(f"remote_reward: {setting}= is of a reward model, and {reward!r:.80} is none. Leave it out.")
    if not model and not callable(reward):
        raise ConfigError(f"remote_reward takes a function, a class or a reward model, and got {reward!r:.80}.")
    if not deadline > 0:
        raise ConfigError(f"remote_reward: deadline={deadline}: seconds above 0, or math.inf to wait for ever.")
    called = name or (_model_name(reward) if model else _function_name(reward))
    connected()
    if model:
        _refuse_device(reward)
        source = RewardModelSource(
            model=reward,
            processing_class=processing_class,
            model_kwargs=dict(model_kwargs or {}),
            chat_template_kwargs=dict(chat_template_kwargs or {}),
        )
        shipment = packed(source, f"Reward model {called!r}", "Save it, and give its path.")
    else:
        shipment = packed(reward, f"Reward function {called!r}", REMEDY)
    start = functools.partial(_Staff, shipment, called, workers, cpus, gpus, deadline, start_deadline)
    return RemoteReward(called, start, frozenset(drop))


class _Staff:
    """The workers, and the places that they are in."""

    def __init__(
        self, shipment: Shipment, name: str, workers: int, cpus: float, gpus: float, deadline: float, starting: float
    ) -> None:
        self._quarters = Quarters(f"reward {name}", workers, cpus, gpus)
        kind = type(name, (RewardWorker,), {"__module__": RewardWorker.__module__})  # messages speak of it by this name
        try:
            self._group: WorkerGroup[RewardWorker] = WorkerGroup(
                kind,
                self._quarters,
                (shipment, name),
                deadline=debugging.patience(deadline),
                start_deadline=debugging.patience(starting),
            )
        except BaseException:
            self._quarters.close()
            raise
        self.score = self._group.workers.score

    def close(self) -> None:
        self._group.close()
        self._quarters.close()


class RemoteReward:
    """What `remote_reward` returns: TRL calls it, and its workers score.

    Every training process that makes one has workers of its own, and holds their handles; nobody looks them up by name.
    They end with the process, or when `close` is called or a `with` block is left.
    """

    def __init__(self, name: str, start: Callable[[], _Staff], drop: frozenset[str]) -> None:
        self.__name__ = name
        self._start, self._drop = start, drop
        self._staff: _Staff | None = start()

    def __call__(self, **arguments: Any) -> list[float | None]:
        """Score a batch: what TRL passes to a reward function, by name.

        Of a worker that dies, the rows are scored once more, by workers started anew. Once: what dies again at the same
        rows is the function's doing.

        Raises:
            WorkerError: the function raised; names the worker, with its traceback. `__cause__` is the exception.
            WorkerDiedError: workers died twice.
            DeadlineError: no answer in time. The workers are ended; the next call starts others.
            ConfigError: an argument cannot be sent; names it.
        """
        count = len(arguments["prompts"])
        loggers = {name: arguments[name] for name in LOGGERS if name in arguments}
        kept = {name: value for name, value in arguments.items() if name not in self._drop and name not in loggers}
        rows = {name: value for name, value in kept.items() if isinstance(value, list) and len(value) == count}
        others = {name: value for name, value in kept.items() if name not in rows}
        tally = Tally(count)
        while missing := tally.missing():
            batch = {name: [value[row] for row in missing] for name, value in rows.items()}
            try:
                for numbers, scored in self._scored(batch, others, tuple(loggers)):
                    tally.add([missing[number] for number in numbers], scored)
            except DeadlineError:
                self.close()
                raise
            except WorkerDiedError as died:
                self.close()
                if tally.deaths:
                    raise self._hopeless(died, missing) from died
                tally.deaths += 1
                print(f"{self._first_line(died)} Starting its workers anew.", file=sys.stderr, flush=True)
        tally.report(loggers.get("log_extra"), loggers.get("log_metric"))
        return tally.rewards

    def _scored(self, batch: Mapping[str, list[Any]], others: Mapping[str, Any], loggers: Sequence[str]) -> Any:
        if self._staff is None:
            self._staff = self._start()
        try:
            arrivals = self._staff.score(dict(batch), others, loggers)
        except TypeError as error:  # what Ray raises where it cannot pickle
            raise self._unsendable({**batch, **others}, error) from error
        return ((arrival.rows, arrival.value) for arrival in arrivals)

    def _unsendable(self, arguments: Mapping[str, Any], error: TypeError) -> Exception:
        from ray import cloudpickle

        for name, value in arguments.items():
            try:
                cloudpickle.dumps(value)  # type: ignore[no-untyped-call]
            except Exception as reason:
                return ConfigError(
                    f"Reward function {self.__name__!r}: the argument {name!r} cannot be sent to its workers: "
                    f"{obstacle(value, reason)}. If the function does not use it: remote_reward(…, drop=[{name!r}])."
                )
        return error

    def _first_line(self, died: WorkerDiedError) -> str:
        return f"Reward function {self.__name__!r} lost a worker: {str(died).splitlines()[0]}"

    def _hopeless(self, died: WorkerDiedError, rows: Sequence[int]) -> WorkerDiedError:
        return WorkerDiedError(
            f"{self._first_line(died)} Others had been started before, and one of them died as well: scoring ends the "
            f"process. {len(rows)} rows were under way, the first is row {rows[0]} of the batch.",
            rank=died.rank,
            method=died.method,
            node=died.node,
        )

    def close(self) -> None:
        """End the workers and give their places back. Another call starts others."""
        staff, self._staff = self._staff, None
        if staff is not None:
            staff.close()

    def __enter__(self) -> RemoteReward:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<remote reward {self.__name__!r}>"


def _is_module(reward: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(reward, torch.nn.Module)


def _refuse_device(reward: Any) -> None:
    if not isinstance(reward, str) and any(parameter.device.type != "cpu" for parameter in reward.parameters()):
        raise ConfigError("remote_reward sends a model from the CPU: call .to('cpu') on it, or give a path.")


def _model_name(reward: Any) -> str:
    """As TRL: the last part of the model's name or path."""
    found = reward if isinstance(reward, str) else getattr(getattr(reward, "config", None), "_name_or_path", "")
    return Path(found).name or type(reward).__name__


def _function_name(reward: Any) -> str:
    """As TRL."""
    while isinstance(reward, functools.partial):
        reward = reward.func
    return str(getattr(reward, "__name__", type(reward).__name__))
