"""The `trlx-hybrid doctor` check of this package. It imports little, because every process loads every plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trlx_hybrid.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    from trlx_hybrid.contract.types import Finding


@hookimpl
def trlx_doctor(options: Any) -> list[Finding]:
    """Report for `trlx-hybrid doctor` in which kind of isolation programs that a model wrote would run on this machine,
    or why none of them works here.

    Args:
        options: the command's options, not used.
    """
    from trlx_hybrid.contract.types import Finding

    from .sandbox import Sandbox, SandboxError

    try:
        return [Finding("sandbox", f"programs of CURE run behind {Sandbox().using}")]
    except SandboxError as error:
        return [Finding("sandbox", str(error))]
