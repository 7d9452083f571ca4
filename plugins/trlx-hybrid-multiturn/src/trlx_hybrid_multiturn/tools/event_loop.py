"""The execution of asynchronous tools on an asyncio event loop, which runs in another thread than the trainer."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Sequence

from ..loop import Outcome, ToolCoroutine
from .threads import taking_this_device


class DaemonLoop:
    """An asyncio event loop that runs in a daemon thread, for trainers that have no event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="tools-event-loop", daemon=True)
        self._thread.start()
        self.loop.call_soon_threadsafe(taking_this_device())

    def close(self) -> None:
        """Stop the loop. A coroutine that blocks the loop keeps the thread until the interpreter ends."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(1.0)
        if not self._thread.is_alive():
            self.loop.close()


def gathered(
    coroutines: Sequence[tuple[str, ToolCoroutine]],
    timeout: float,
    shown: Callable[[object], object],
    done: Callable[[Outcome], None],
    loop: asyncio.AbstractEventLoop,
    slots: asyncio.Semaphore,
) -> Callable[[str], None]:
    """Start coroutines together on a running event loop, and return at once.

    Args:
        coroutines: names of tools, and the coroutines of their calls.
        timeout: seconds that each may take, from its start.
        shown: converts the result of a call into the value of the call's outcome, for example into the text that the
            model is shown; called on the loop.
        done: called when all coroutines are over, with an outcome whose value is the list of their outcomes, in order.
        loop: the event loop, which runs in another thread.
        slots: a semaphore that limits how many coroutines run on the loop at once; each holds it while it runs.

    Returns:
        A function that cancels the coroutines; it takes a reason, which is not used.
    """

    async def everyone() -> None:
        results = await asyncio.gather(
            *(_one(slots, name, coroutine, timeout, shown) for name, coroutine in coroutines)
        )
        done(Outcome(value=results, seconds=max(result.seconds for result in results)))

    future = asyncio.run_coroutine_threadsafe(everyone(), loop)

    def abandon(reason: str) -> None:
        future.cancel()
        loop.call_soon_threadsafe(_close_unstarted, coroutines)

    return abandon


def _close_unstarted(coroutines: Sequence[tuple[str, ToolCoroutine]]) -> None:
    for _, coroutine in coroutines:
        if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
            coroutine.close()


async def _one(
    slots: asyncio.Semaphore,
    name: str,
    coroutine: ToolCoroutine,
    timeout: float,
    shown: Callable[[object], object],
) -> Outcome:
    async with slots:  # at once where one is free, so that nothing changes the order of starts
        started = time.perf_counter()
        task = asyncio.ensure_future(_ended(coroutine))
        try:
            finished, _ = await asyncio.wait({task}, timeout=timeout)
        except asyncio.CancelledError:  # its trajectory is over: no one needs the outcome
            task.cancel()
            raise
        seconds = time.perf_counter() - started
        if not finished:
            task.cancel()
            reason = f"tool {name!r} did not return within {timeout:g} s; it was cancelled."
            return Outcome(lost=reason, by_tool=True, seconds=seconds)
        if task.cancelled():
            return Outcome(lost=f"tool {name!r} was cancelled, by itself or by something else.", seconds=seconds)
        value, error = task.result()
        if error is None and isinstance(value, Exception):
            error = value  # TRL cannot tell a returned exception from a raised one
        if error is not None:
            return Outcome(error=error, seconds=seconds)
        try:
            return Outcome(value=shown(value), seconds=seconds)
        except Exception as unshowable:
            return Outcome(error=unshowable, seconds=seconds)


async def _ended(coroutine: ToolCoroutine) -> tuple[object, BaseException | None]:
    """Await a coroutine, and return its result and the exception that it raised, None if it raised none.

    SystemExit and KeyboardInterrupt are returned, too: a task that raised them would end the event loop, with all tools
    on it.

    Raises:
        CancelledError: the coroutine was cancelled.
    """
    try:
        return await coroutine, None
    except asyncio.CancelledError as error:
        if type(error) is asyncio.CancelledError:
            raise
        return None, error  # a subclass says why, such as a lost environment: raised, not cancelled
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        return None, error
