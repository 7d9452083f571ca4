"""What this distribution offers. Imports no Ray and no torch: loading every plugin must stay cheap."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trlx_hybrid.hookspecs import hookimpl

if TYPE_CHECKING:
    from trlx_hybrid.environment import Finding


@hookimpl
def trlx_command(commands: Any) -> None:
    """Add `trlx-hybrid launch`, and `--ray` to `trlx-hybrid doctor`."""
    from .doctor import add_options
    from .launch.command import add_command

    add_command(commands)
    add_options(commands.choices["doctor"])


@hookimpl
def trlx_doctor(options: Any) -> Iterator[Finding] | None:
    """Check a Ray cluster, where `--ray` asks for it."""
    from .doctor import findings

    return findings(options)
