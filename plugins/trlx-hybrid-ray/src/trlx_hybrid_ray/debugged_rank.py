"""The program that each rank of `trlx-hybrid launch --debug` runs in place of the user's script, which it then runs:
`python -m trlx_hybrid_ray.debugged_rank SCRIPT ARGUMENTS`."""

from __future__ import annotations

import os
import runpy
import sys

from .cluster import ADDRESS, NAMESPACE, connect
from .internals import stop_where_raised


def main(script: str, *arguments: str) -> None:
    """Run the script as `__main__`, with `breakpoint()` opening Ray's debugger, and stop in it where an uncaught
    exception was raised."""
    with connect(os.environ[ADDRESS], namespace=os.environ.get(NAMESPACE)):
        os.environ["PYTHONBREAKPOINT"] = "ray.util.rpdb.set_trace"
        sys.argv, sys.path[0] = [script, *arguments], os.path.dirname(os.path.realpath(script))
        try:
            runpy.run_path(script, run_name="__main__")
        except Exception:
            stop_where_raised()
            raise


if __name__ == "__main__":
    main(*sys.argv[1:])
