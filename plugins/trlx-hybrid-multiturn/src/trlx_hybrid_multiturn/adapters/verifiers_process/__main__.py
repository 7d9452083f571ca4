"""The process behind `from_verifiers`, run by the path of its folder with an interpreter that has verifiers.

It imports nothing of this package except the files in this folder.

    to the process, one line:    {"taskset": …, "env": {…}, "secret": …}; it ends when its standard input does
    from the process, one line:  {"port": …}, or {"error": …, "missing": …}
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
