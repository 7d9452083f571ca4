"""The program that each rank of `trlx-hybrid launch --debug` starts instead of the user's script, as `python -m
trlx_hybrid_ray.debugged_rank`. It connects to the Ray cluster and its debugger, and then runs the script in the same
process."""

from __future__ import annotations

import os
import runpy
import sys

from .cluster import ADDRESS, NAMESPACE, connect
from .internals import stop_where_raised


def main(script: str, *arguments: str) -> None:
    """Run the script as `__main__`. `breakpoint()` in the script opens Ray's debugger, and an uncaught exception opens
    the debugger at the place where it was raised."""
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
