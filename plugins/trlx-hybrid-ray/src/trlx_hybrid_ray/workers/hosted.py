"""A worker class as an actor has it: knows its place, says where it runs, and sends back what somebody collects."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from .failure import Home
from .member import Member, become, this_worker
from .register import Rule, rules


def hosted(worker: Any) -> type:
    """A subclass of `worker` with its name, and with the methods that a group calls: each rule's `entry`."""

    def start(self: Any, member: Member, *args: Any, **kwargs: Any) -> None:
        become(member, whole_process=True)
        self.__trlx_failure__ = None
        try:
            worker.__init__(self, *args, **kwargs)
        except Exception as error:  # kept for `__trlx_built__`: Ray would tell it as text only
            self.__trlx_failure__ = error

    names: dict[str, Any] = {"__init__": start, "__module__": worker.__module__}
    names |= {"__trlx_home__": _home, "__trlx_built__": _built}
    names |= {rule.entry: answering(rule, getattr(worker, name)) for name, rule in rules(worker).items()}
    return type(worker.__name__, (worker,), names)


def answering(rule: Rule, method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, returning None on workers whose result nobody collects: it would travel for nothing."""
    if rule.entry == rule.name:
        return method

    @functools.wraps(method)
    def answer(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        member = this_worker()
        return result if rule.keeps(member.rank, member.tensor_rank) else None

    return answer


def _home(self: Any) -> Home:
    import ray

    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return Home(ray.get_runtime_context().get_node_id(), address, os.getpid())


def _built(self: Any) -> None:
    if self.__trlx_failure__ is not None:
        raise self.__trlx_failure__
