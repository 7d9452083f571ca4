"""An environment's place in a worker, and what a call of it comes to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import brief
from ..worker_group.group import timeout
from .lost import EnvironmentLostError
from .reply import Reply


@dataclass(frozen=True, slots=True)
class Seat:
    """An environment's place. Can be sent to other processes, which may call the environment too.

    Attributes:
        handle: the actor.
        key: its number there.
        where: for messages.
        deadline: seconds that a call may take.
    """

    handle: Any
    key: int
    where: str
    deadline: float


def answered(name: str, method: str, seat: Seat, reference: Any) -> Any:
    """What a call returned.

    Raises:
        EnvironmentLostError: the worker died, or did not answer in time.
        what the method raised.
    """
    import ray

    try:
        reply = ray.get(reference, timeout=timeout(seat.deadline))
    except (ray.exceptions.RayError, TimeoutError) as error:
        raise lost_error(name, method, seat, error) from error
    return result_of(name, method, reply)


def result_of(name: str, method: str, reply: Reply) -> Any:
    """The same of a reply that is here."""
    if reply.unsendable:
        raise EnvironmentLostError(f"environment '{name}.{method}' returned {reply.unsendable}. Return plain data.")
    return reply.result()


def lost_error(name: str, method: str, seat: Seat, error: BaseException) -> EnvironmentLostError:
    """Why there is no answer."""
    if isinstance(error, TimeoutError):
        return EnvironmentLostError(
            f"environment '{name}.{method}' did not return within {seat.deadline:g} s, in {seat.where}; the call may "
            "still run. Give it a timeout of its own, or raise deadline=."
        )
    return EnvironmentLostError(
        f"environment '{name}.{method}': {seat.where} died: {brief(error).rstrip('.')}. Its log and the node's say "
        "why; out of memory is the usual cause"
    )
