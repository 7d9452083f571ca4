"""The program of the child process in which `from_verifiers` runs the library verifiers, started as
`<python> <this folder>`. It serves the episodes of one taskset (tasks with their environment) to the trainer.

Verifiers may be installed for another interpreter than the trainer's, so the program imports nothing of this package
except the files in this folder. It reads one line of JSON from standard input, and ends when standard input is closed:

    taskset    verifiers' id of the taskset
    env        settings of verifiers' environment, as in its `[env]` block
    secret     the first part of every path that the server answers

It writes one line to standard output: {"port": …}, the port of the server; or {"error": …, "missing": …}, the text of
an exception and the name of the module that could not be imported, if that was the cause.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from typing import Any


def main() -> None:
    """Read the settings from standard input, and serve verifiers' environment until the trainer ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a taskset prints goes to standard error
    sys.path.append(os.getcwd())  # a taskset may lie beside the script
    settings = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_input, daemon=True).start()

    def answer(content: dict[str, Any]) -> None:
        print(json.dumps(content), file=answers, flush=True)

    try:
        from trlx_hybrid_verifiers.server import Server  # type: ignore[import-not-found]

        server = Server(**settings)
    except Exception as error:  # the trainer shows whatever a taskset's code raises
        answer({"error": f"{type(error).__name__}: {error}", "missing": getattr(error, "name", None)})
    else:
        asyncio.run(server.serve(lambda port: answer({"port": port})))


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
