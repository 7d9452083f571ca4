"""The program of a process in which agents run, with a gateway of its own.

The trainer starts this file by its path. On the socket, each message follows the number of its episode and its length
(`tools.worker_process`). Messages to the process are pickles, of which the first is the agent. Messages from the
process are plain data, so that the trainer never loads a pickle from a process that runs code which a model wrote:

    to the process:   ("begin", row, prompt, branching), ("answer", request's number, Said), ("refuse", request's
                      number, error), ("end", error), ("close",) and ("counted", question, tokens or error), where an
                      error is the attributes of a RefusedError
    from the process: {"kind": …, …}; kinds are "loaded", "refused" (why the agent cannot be loaded), "asked" (a
                      request), "ended" (the end of an agent) and "count" (how many tokens has a request?)
"""

from __future__ import annotations

import contextlib
import json
import sys


def main(descriptor: int, parent: int, path: list[str]) -> None:
    """Run agents until the trainer closes the connection.

    Args:
        descriptor: file descriptor of this side's end of the socket.
        parent: process id of the trainer.
        path: the trainer's `sys.path`.
    """
    sys.path[:] = path
    from trlx_hybrid_multiturn.tools.worker_process import connected  # here: where it lies is known from this path

    channel = connected(descriptor, parent)
    from trlx_hybrid_multiturn.gateway.agent_worker import Worker  # after the fork, since it may start threads

    with contextlib.suppress(EOFError, ConnectionError):
        Worker(channel).serve()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
