"""What this distribution offers. Imports little: loading every plugin must stay cheap."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trlx_hybrid.plugins.hookspecs import hookimpl

from .options import PackedOptions

if TYPE_CHECKING:
    from trlx_hybrid.plugins.registry import Registry
    from trlx_hybrid.protocols import Run, Scoring


def _packed(session: Run, options: PackedOptions) -> Scoring:
    from .scoring import Packed

    return Packed(session, options)


@hookimpl
def trlx_register(registry: Registry) -> None:
    """Offer the scoring."""
    registry.offer(
        "scoring",
        "packed",
        _packed,
        options=PackedOptions,
        summary="old log-probs from the first loss forward, no padding",
    )
