"""Two ends of one transfer, worked at once from one process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any


def together(*works: Callable[[], Any]) -> list[Any]:
    """Do all at once, each in a thread; returns their results in order.

    The first error is raised without waiting for the others, which may be waiting for what has just failed; their
    threads end with their own deadlines, or with the process.
    """
    done: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()

    def run(index: int, work: Callable[[], Any]) -> None:
        try:
            done.put((index, work(), None))
        except BaseException as error:  # handed to the thread that waits
            done.put((index, None, error))

    for index, work in enumerate(works):
        threading.Thread(target=run, args=(index, work), name=f"together {index}", daemon=True).start()
    results: dict[int, Any] = {}
    while len(results) < len(works):
        index, result, error = done.get()
        if error is not None:
            raise error
        results[index] = result
    return [results[index] for index in range(len(works))]
