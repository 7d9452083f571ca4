"""Settings of Ray's two debuggers, and functions that say whether the user wants one of them.

Ray's distributed debugger speaks debugpy's protocol (`RAY_DEBUG=1`, Ray's default). The other one is pdb behind a port,
to which the command `ray debug` attaches (`RAY_DEBUG=legacy`). Only one of the two can be active. Where `RAY_DEBUG` is
set, the user wants to debug.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Mapping
from pathlib import Path

from trlx_hybrid.errors import ConfigError

from .internals import LOOPBACK_VARIABLE
from .token import MODE, PATH

CHOICE, POST_MORTEM = "RAY_DEBUG", "RAY_DEBUG_POST_MORTEM"
DISTRIBUTED, LEGACY = "1", "legacy"


def wanted() -> bool:
    """Return whether the user asks for one of Ray's debuggers, by setting `RAY_DEBUG` to 1 or legacy."""
    return os.environ.get(CHOICE) in (DISTRIBUTED, LEGACY)


def legacy() -> bool:
    """Return whether the user asks for the debugger in the terminal (`RAY_DEBUG=legacy`)."""
    return os.environ.get(CHOICE) == LEGACY


def patience(seconds: float) -> float:
    """Return a deadline in seconds unchanged, or infinity if the user asks for a debugger, because a person at a
    breakpoint takes longer than any program."""
    return math.inf if wanted() else seconds


def variables() -> Mapping[str, str]:
    """Return the environment variables that choose Ray's debugger, as far as they are set in this process, by name. An
    actor that gets them stops in the same debugger. The actors of a joined cluster do not inherit them, because the
    cluster was started without them."""
    return {name: os.environ[name] for name in (CHOICE, POST_MORTEM) if name in os.environ}


def check() -> None:
    """Check that the debugger that `RAY_DEBUG` asks for is installed: without it, Ray would skip breakpoints, with only
    a line in a log.

    Raises:
        ConfigError: `RAY_DEBUG` has an unknown value, or debugpy is missing.
    """
    choice = os.environ.get(CHOICE)
    if choice not in (None, "", "0", DISTRIBUTED, LEGACY):
        raise ConfigError(f"{CHOICE}={choice}: choose 1 (debugpy, as VS Code speaks it) or legacy (`ray debug`).")
    if choice == DISTRIBUTED and importlib.util.find_spec("debugpy") is None:
        raise ConfigError(
            f"{CHOICE}=1 needs debugpy, here and on all nodes: pip install debugpy. Or use the debugger in the "
            f"terminal: {CHOICE}=legacy, and `ray debug` beside it."
        )


def attaching(address: str, token: Path | None) -> str:
    """Return a line that tells the user which command attaches the debugger from another terminal.

    Args:
        address: host:port of the cluster.
        token: the file with the cluster's token, or None.
    """
    told = {LOOPBACK_VARIABLE: "0"} if address.startswith("127.") else {}
    told |= {MODE: "token", PATH: str(token)} if token else {}
    told[CHOICE] = LEGACY
    return " ".join(
        ["debugger:", *(f"{name}={value}" for name, value in told.items()), f"ray debug --address {address}"]
    )


def post_mortem() -> bool:
    """Return whether the user asks that the debugger stops where an uncaught exception was raised
    (`RAY_DEBUG_POST_MORTEM=1`)."""
    return os.environ.get(POST_MORTEM) == "1"
