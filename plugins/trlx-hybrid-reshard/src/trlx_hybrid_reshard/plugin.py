"""What this distribution offers. Imports no torch, no vLLM and no numpy: loading every plugin must stay cheap."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trlx_hybrid.plugins.hookspecs import hookimpl

from .options import ReshardOptions

if TYPE_CHECKING:
    from trlx_hybrid.plugins.registry import Registry
    from trlx_hybrid.protocols import WeightSync
    from trlx_hybrid.session import Session


def _reshard(session: Session, options: ReshardOptions) -> WeightSync:
    from .sync import ReshardSync

    return ReshardSync(session, options)


@hookimpl
def trlx_register(registry: Registry) -> None:
    """Offer the weight path for sharded policies and tensor-parallel engines."""
    registry.offer(
        "weights",
        "reshard",
        _reshard,
        order=40,
        options=ReshardOptions,
        summary="FSDP2 or DDP into tensor-parallel slices; moves the bytes each rank lacks",
    )


@hookimpl
def trlx_report_header(session: Session) -> str | None:
    """What a sync will move."""
    if session.weights is None or session.weights.name != "reshard":
        return None
    return f"[Reshard] a sync on rank {session.ranks.rank}: {getattr(session.weights, 'summary', '')}"


@hookimpl
def trlx_command(commands: Any) -> None:
    """Add `trlx-hybrid reshard-plan`."""
    from .tool import add_command

    add_command(commands)
