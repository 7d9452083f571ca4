"""Runs a file as `python file` would, inside a process that has long been running something else."""

from __future__ import annotations

import builtins
import json
import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader
from typing import Any

Failed = Callable[[BaseException], None]


def run_as_main(script: str, arguments: Sequence[str], failed: Failed) -> int:
    """Run a file as `__main__`; returns the exit code that Python would end with.

    `sys.argv`, `sys.path`, signal handlers and the module `__main__` are what the file would find in a process of its
    own, and they stay: exit handlers run later. `breakpoint()` is Ray's.

    Args:
        script: path as typed, relative to the working folder.
        arguments: what follows it in `sys.argv`.
        failed: called with an exception that nobody caught, before it is printed; not with `SystemExit`.
    """
    path = os.path.abspath(script)
    sys.argv = [script, *arguments]
    sys.path[:] = _module_search_path(os.path.dirname(os.path.realpath(path)))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a raylet's children inherit that it blocks SIGINT
    main = types.ModuleType("__main__")
    loader = SourceFileLoader("__main__", path)
    vars(main).update(__file__=path, __builtins__=builtins, __loader__=loader, __package__=None, __cached__=None)
    main.__annotations__ = {}
    _kept.append(sys.modules["__main__"])
    sys.modules["__main__"] = main
    try:
        exec(loader.source_to_code(loader.get_data(path), path), vars(main))  # type: ignore[call-arg]
    except SystemExit as stop:
        return _exit_code(stop.code)
    except BaseException as error:
        # The first frames are ours, and a traceback that starts elsewhere than in the script would surprise.
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != path:
            trace = trace.tb_next
        error = error.with_traceback(trace)
        failed(error)
        sys.excepthook(type(error), error, trace)
        return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    finally:
        _flush()
    return 0


_kept: list[types.ModuleType] = []  # the worker's own __main__: its functions need its globals


def _exit_code(given: Any) -> int:
    if given is None:
        return 0
    if isinstance(given, int):
        return given & 0xFF
    print(given, file=sys.stderr)
    return 1


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _module_search_path(folder: str) -> list[str]:
    """What Python would start with for a script in `folder`, then what Ray has added to it."""
    show = "import json, sys; print(json.dumps(sys.path))"
    shown = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True).stdout
    usual = [entry for entry in json.loads(shown) if entry]
    return [folder, *usual, *(entry for entry in sys.path if entry and entry not in {folder, *usual})]
