"""`@register`: how a worker's method is called when a whole group is.

At run time the method stays what it is, and bears a `Rule`. For a type checker it becomes a descriptor that reads
differently on an instance, where it is the method, and on the class, where it is the group's: see `signatures`.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from trlx_hybrid.errors import ConfigError

if TYPE_CHECKING:
    from .signatures import register as register

Dispatch = Literal["broadcast", "one_to_all", "all_to_all", "scatter", "replicate", "rank_zero", "reduce"]
Execute = Literal["blocking", "future", "stream"]
Reduction = Literal["sum", "mean", "min", "max"]

RULE = "__trlx_rule__"
SEVERAL: tuple[Dispatch, ...] = ("one_to_all", "all_to_all", "scatter", "replicate")
"""Whose results come from several workers, so that some can be had before others."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What was registered.

    Attributes:
        deals: whether the first argument is dealt out; else all arguments go to everyone as they are.
        signature: of the method, without `self`.
        others as `register` takes them.
    """

    name: str
    dispatch: Dispatch
    execute: Execute
    pad: str | None
    reduction: Reduction | Callable[[list[Any]], Any]
    deadline: float | None
    deals: bool
    signature: inspect.Signature

    @property
    def entry(self) -> str:
        """The actor's method that the group calls; the registered one stays as it is, for the worker's own use."""
        return self.name if self.dispatch in ("one_to_all", "all_to_all", "rank_zero") else f"{self.name}__answer"

    def keeps(self, rank: int, tensor_rank: int) -> bool:
        """Whether the caller gets this worker's result. The others' stay where they are."""
        if self.dispatch == "broadcast":
            return rank == 0
        return self.dispatch in ("one_to_all", "all_to_all", "rank_zero") or tensor_rank == 0


def _register(
    dispatch: Dispatch,
    execute: Execute = "blocking",
    *,
    pad: str | None = None,
    reduction: Reduction | Callable[[list[Any]], Any] = "mean",
    deadline: float | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    _one_of("dispatch", dispatch, get_args(Dispatch))
    _one_of("execute", execute, get_args(Execute))
    if not callable(reduction):
        _one_of("reduction", reduction, get_args(Reduction))
    if execute == "stream" and dispatch not in SEVERAL:
        raise ConfigError(f"dispatch={dispatch!r} has one result and nothing to stream. Use execute='future'.")
    if pad is not None and dispatch not in ("scatter", "reduce"):
        raise ConfigError(f"pad={pad!r} is for batches that are split: dispatch='scatter' or 'reduce'.")
    if deadline is not None and not deadline > 0:
        raise ConfigError(f"deadline={deadline}: seconds above 0, or math.inf to wait for ever.")

    def mark(method: Callable[..., Any]) -> Callable[..., Any]:
        rule = _rule(method, dispatch, execute, pad, reduction, deadline)
        setattr(method, RULE, rule)
        return method

    return mark


if not TYPE_CHECKING:
    register = _register


def _rule(method: Any, dispatch: Dispatch, execute: Execute, pad: str | None, reduction: Any, deadline: Any) -> Rule:
    name = getattr(method, "__name__", repr(method))
    if not inspect.isfunction(method):
        raise ConfigError(f"@register is for methods, and {name} is a {type(method).__name__}. Put it right above def.")
    for kind, holds in (
        ("a coroutine", inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)),
        ("a generator", inspect.isgeneratorfunction(method)),
    ):
        if holds:
            raise ConfigError(f"{name} is {kind}; a registered method returns its result. Wrap it in a plain method.")
    signature = inspect.signature(method)
    parameters = list(signature.parameters.values())[1:]
    first = parameters[0].kind if parameters else None
    deals = dispatch in ("scatter", "replicate", "all_to_all") or (dispatch == "reduce" and first is not None)
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if deals and first not in positional:
        raise ConfigError(f"{name} has no first argument, and dispatch={dispatch!r} deals that one out.")
    if pad is not None and (
        pad not in signature.parameters or signature.parameters[pad].default is inspect.Parameter.empty
    ):
        raise ConfigError(f"{name} has no parameter {pad!r} to take the mask of padding. Add `{pad}=None`.")
    return Rule(name, dispatch, execute, pad, reduction, deadline, deals, signature.replace(parameters=parameters))


def rules(worker: type) -> dict[str, Rule]:
    """By name, of a class and its bases.

    Raises:
        ConfigError: there is none.
    """
    found = {name: getattr(value, RULE) for name, value in inspect.getmembers(worker) if hasattr(value, RULE)}
    if not found:
        raise ConfigError(
            f"{worker.__name__} has no registered method, so a group of it could do nothing. Put "
            "@register(dispatch=...) above those that the group is to have."
        )
    return found


def _one_of(what: str, given: str, known: Sequence[str]) -> None:
    if given not in known:
        close = difflib.get_close_matches(str(given), known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"{what}={given!r} is not one of {', '.join(map(repr, known))}.{hint}")


def seconds(rule: Rule, group: float) -> float:
    """The deadline of a call: the method's own, or the group's."""
    return group if rule.deadline is None else rule.deadline


def timeout(deadline: float) -> float | None:
    """As most waits take it."""
    return None if deadline == math.inf else deadline
