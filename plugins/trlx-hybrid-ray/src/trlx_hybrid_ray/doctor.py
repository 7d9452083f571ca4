"""The options of `trlx-hybrid doctor` that ask for Ray, and what they lead to."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trlx_hybrid.errors import ConfigError

if TYPE_CHECKING:
    from trlx_hybrid.doctor import Finding


def add_options(doctor: argparse.ArgumentParser) -> None:
    """Add them to the parser of `doctor`."""
    group = doctor.add_argument_group("Ray")
    group.add_argument(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="check a Ray cluster as well: host:port, 'auto' for the one on this machine, 'local' for a new one "
        "(default: RAY_ADDRESS, or else 'local')",
    )
    group.add_argument("--tp", type=int, metavar="N", help="with --ray: raise tensor parallelism step by step up to N")
    group.add_argument("--token-file", metavar="FILE", help="with --ray: the cluster's token")


def findings(options: Any) -> Iterator[Finding] | None:
    """What the options ask for; None where that is nothing.

    Raises:
        ConfigError: --tp or --token-file without --ray.
        ClusterError: the cluster cannot be joined or started.
    """
    if options.ray is None:
        for flag in ("tp", "token_file"):
            if getattr(options, flag) is not None:
                raise ConfigError(f"--{flag.replace('_', '-')} goes with --ray.")
        return None
    return _findings(options)


def _findings(options: Any) -> Iterator[Finding]:
    from .checkup import examine
    from .climb import climb, steps
    from .cluster import LOCAL, connect

    if options.tp is not None:
        steps(options.tp)  # refused before a cluster is started for it
    with connect(options.ray or os.environ.get("RAY_ADDRESS") or LOCAL, token_file=options.token_file) as cluster:
        yield from examine(cluster)
        if options.tp is not None:
            yield from climb(options.tp)
