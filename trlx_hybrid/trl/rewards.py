"""Checks of reward functions' arguments and results, and of advantages that a plugin returns. A NaN that a function
returns is refused, while None ("does not apply"), which TRL turns into NaN, is not."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import ConfigError, RewardError
from .generation.resampling import sampled_groups

if TYPE_CHECKING:
    from ..session import Session
    from .state import RunState
    from .stock import StockTrainer


def refuse_missing_package(functions: Any) -> None:
    """Refuse TRL's accuracy rewards if math-verify is not installed, when the trainer is made. By themselves, they fail
    only at their first batch.

    Args:
        functions: what the trainer was given as `reward_funcs`.

    Raises:
        ConfigError: names the function and what to install.
    """
    for function in functions if isinstance(functions, (list, tuple)) else [functions]:
        of_trl = getattr(function, "__module__", None) == "trl.rewards.accuracy_rewards"
        if of_trl and importlib.util.find_spec("math_verify") is None:
            raise ConfigError(
                f"Reward function {function.__name__!r} needs the package math-verify, which is not installed: "
                "pip install 'trl[math-verify]'"
            )


GIVEN = ("prompts", "completions", "completion_ids")
"""Arguments that TRL passes to every reward function, in addition to the dataset's columns."""

GIVEN_BY_SOME = ("trainer_state", "log_extra", "log_metric", "environments")
"""Further arguments, which not every trainer passes to reward functions."""


def refuse_other_arguments(functions: Any, dataset: Any, adds: bool) -> None:
    """Refuse a reward function that cannot take TRL's arguments. It would fail only after the engine has sampled.

    Args:
        functions: what the trainer was given as `reward_funcs`.
        dataset: the trainer's `train_dataset`.
        adds: whether a `rollout_func` may add further arguments.

    Raises:
        RewardError: names the function, and the arguments.
    """
    columns = getattr(dataset, "column_names", None)
    if not isinstance(columns, list):  # a stream may not know its columns
        return
    given = [*GIVEN, *(name for name in columns if name not in ("prompt", "completion"))]
    for function in functions if isinstance(functions, list | tuple) else [functions]:
        if hasattr(function, "parameters") or not callable(function):  # a reward model, or nothing
            continue
        problem = _other_arguments(function, given, adds)
        if problem is not None:
            raise RewardError(
                f"Reward function {_name_of(function)!r} {problem}. It is called with {', '.join(given)}, each by its "
                "name."
            )


def _other_arguments(function: Any, given: Sequence[str], adds: bool) -> str | None:
    """Return a text on the arguments that a reward function does not take, or needs but does not get; None where it can
    be called.

    Args:
        given: names of the arguments that TRL passes.
        adds: whether a `rollout_func` may add further arguments.
    """
    try:
        takes = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    named = {p.name: p for p in takes if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    unknown = [name for name in given if name not in named]
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in takes):
        return f"does not take {', '.join(unknown)}: add **kwargs to its arguments"
    lacking = [n for n, p in named.items() if p.default is p.empty and n not in (*given, *GIVEN_BY_SOME)]
    return f"takes {', '.join(lacking)}, and the dataset has no such column" if lacking and not adds else None


@contextmanager
def checking(trainer: StockTrainer) -> Iterator[None]:
    """Return a context in which the trainer's reward functions are wrapped, so that what they return is checked;
    afterwards, the trainer has the user's own functions again."""
    functions = trainer.reward_funcs
    trainer.reward_funcs = [checked_reward(function) for function in functions]
    try:
        yield
    finally:
        trainer.reward_funcs = functions


def checked_reward(function: Any) -> Any:
    """Return `function` with a check that refuses NaN and infinity. Reward models are returned unchanged.

    TRL turns None ("not applicable to this sample") into NaN and skips it, so it would also silently skip a NaN that a
    function computed by mistake.
    """
    if hasattr(function, "parameters") or not callable(function):  # a reward model
        return function
    name = _name_of(function)
    called = function
    while isinstance(called, functools.partial):
        called = called.func
    if inspect.iscoroutinefunction(called) or inspect.iscoroutinefunction(called.__call__):

        @functools.wraps(function)
        async def reward_async(*args: Any, **kwargs: Any) -> Any:
            with _naming(name, kwargs):
                returned = await function(*args, **kwargs)
            return _checked(returned, name)

        return reward_async

    @functools.wraps(function)
    def reward(*args: Any, **kwargs: Any) -> Any:
        with _naming(name, kwargs):
            returned = function(*args, **kwargs)
        return _checked(returned, name)

    return reward


def _name_of(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


@contextmanager
def _naming(name: str, given: Mapping[str, Any]) -> Iterator[None]:
    """Return a context that adds a note to an error raised inside: the reward function's name, the number of
    completions, and the names of the arguments. The exception itself stays the same, for scripts that catch it.

    Args:
        name: the reward function's name.
        given: the arguments that the function is called with, by name.
    """
    try:
        yield
    except Exception as error:
        rows = len(given.get("completions") or ())
        error.add_note(f"Raised by reward function {name!r} for {rows} completions, with {', '.join(given)}.")
        raise


def _checked(returned: Any, name: str) -> list[Any]:
    """Check that a reward function returned finite numbers or None, and return them as a list: TRL takes any iterable,
    and an iterator can be read only once.

    Args:
        name: the function's name.

    Raises:
        RewardError: it returned something else.
    """
    try:
        rewards = None if isinstance(returned, str | Mapping) else list(returned)
    except TypeError:  # no iterable
        rewards = None
    if rewards is None:
        raise RewardError(
            f"Reward function {name!r} returned {_shown(returned)}. Return a list with one finite number for each "
            "completion, or None where the reward does not apply."
        )
    for index, value in enumerate(rewards):
        if value is not None and not _is_finite(value):
            raise RewardError(
                f"Reward function {name!r} returned {_shown(value)} for completion {index} of its batch. Return a "
                "finite number, or None where the reward does not apply."
            )
    return rewards


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except (TypeError, ValueError, RuntimeError):  # a text, a list, a tensor of several numbers
        return False


def _shown(value: Any) -> str:
    """Return a value as text for an error message: a float as it is, anything else with its type."""
    return str(value) if isinstance(value, float) else f"{value!r:.60} ({type(value).__name__})"


HOOK = "trlx_advantages"


def without_masked(rewards: Tensor, loss_mask: Sequence[Sequence[int]] | None, session: Session) -> Tensor:
    """Return the rewards of a batch, NaN in rows without a trained token, such as conversations that broke off.
    Collective.

    TRL treats a row without any reward as not scorable: it excludes the row from its group's mean and deviation, and
    gives it no advantage. Otherwise, the accidental score of a broken conversation would change its neighbours'
    advantages.

    Args:
        rewards: (world * B, functions), of all ranks.
        loss_mask: mask of this rank's B rows; None where every token is trained.
    """
    if loss_mask is None:
        return rewards
    masked = [row for rows in session.ranks.gather([not any(mask) for mask in loss_mask]) for row in rows]
    return rewards.masked_fill(torch.tensor(masked, device=rewards.device)[:, None], torch.nan)


def judged(trainer: StockTrainer, run: RunState, rewards: Tensor, observed: bool) -> Tensor:
    """Return the rewards that are trained on, (world * B, functions): those of the reward functions, or what the run's
    algorithms make of them. Collective.

    Args:
        rewards: the rewards of the reward functions, of all ranks.
        observed: whether the algorithms' `observe` has already been called with these rewards.
    """
    batch, algorithms = run.batch, run.session.algorithms
    if not (batch.to_be_scored and trainer.model.training and algorithms.judges) or batch.in_rounds:
        return rewards
    groups = sampled_groups(trainer, run, rewards, batch.row_numbers)
    if not observed:
        algorithms.observe(groups)
    batch.groups = algorithms.rewards(groups)
    return batch.groups.rewards.flatten(0, 1).to(rewards)


def advise(trainer: StockTrainer, run: RunState, values: dict[str, Any]) -> None:
    """Replace the advantages of this rank's rows by those that the run's algorithms or the hook `trlx_advantages`
    compute; where neither computes any, TRL's stay. Collective.

    Args:
        values: the batch as TRL trains on it; changed in place.
    """
    session, batch = run.session, run.batch
    stock: Tensor | None = values.get("advantages")
    if stock is None:
        return
    given = session.algorithms.advantages(batch.groups) if batch.groups is not None else None
    if given is not None:
        first = session.ranks.rank * len(stock)
        values["advantages"] = given.flatten()[first : first + len(stock)].to(stock)
    values["advantages"] = replaced(session, values, batch.rewards)
    if batch.groups is not None or session.advantages_plugin is not None:
        tabulate(trainer, values["advantages"])


def replaced(session: Session, batch: Mapping[str, Any], rewards: Tensor | None) -> Tensor:
    """Call the hook `trlx_advantages`, and return the advantages of the plugin that implements it; TRL's if no plugin
    returns any.

    Args:
        batch: the batch that TRL trains on, this rank's rows.
        rewards: (world * B, functions), of all ranks.

    Raises:
        PluginError: the plugin returned something else than finite numbers in the shape of TRL's advantages.
    """
    stock: Tensor = batch["advantages"]
    advantages = session.host.call(HOOK, session=session, batch={**batch, "rewards_per_func": rewards})
    if advantages is None:
        return stock
    if isinstance(advantages, Tensor) and advantages.shape == stock.shape and rewards is not None:
        mine = rewards[session.ranks.rank * len(stock) :][: len(stock)].isnan().all(dim=1)  # no reward, no advantage
        advantages = advantages.masked_fill(mine.view(-1, *[1] * (stock.ndim - 1)), 0.0)
    problem = None
    if not isinstance(advantages, Tensor):
        problem = f"a {type(advantages).__name__} where a tensor was expected"
    elif advantages.shape != stock.shape:
        problem = f"a tensor of shape {tuple(advantages.shape)} where {tuple(stock.shape)} was expected"
    elif not advantages.isfinite().all():
        row = int((~advantages.isfinite()).nonzero()[0, 0])
        problem = f"{advantages[row].item()} for row {row}"
    if problem is not None:
        plugin = session.host.only(HOOK)
        assert plugin is not None
        raise session.host.fault(plugin, HOOK, TypeError(f"it returned {problem}"))
    replacement: Tensor = advantages.to(stock)
    return replacement


def tabulate(trainer: StockTrainer, advantages: Tensor) -> None:
    """Replace the advantages in TRL's logged table of completions with those that are trained with. Collective.

    Args:
        advantages: (B,), of this rank's rows.
    """
    every, shown = trainer.accelerator.gather(advantages).tolist(), trainer._logs["advantages"]
    for place in range(1, min(len(every), len(shown)) + 1):  # the table keeps the last rows only
        shown[-place] = every[-place]
