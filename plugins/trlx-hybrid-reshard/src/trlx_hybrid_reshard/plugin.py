"""The entry point by which this package offers the weight path `reshard` (a way to bring the policy's weights into the
engines) and the command `trlx-hybrid reshard-plan`. It imports no torch, no vLLM and no numpy, because every installed
plugin is loaded at start-up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trlx_hybrid.plugins.hookspecs import hookimpl

from .options import ReshardOptions

if TYPE_CHECKING:
    from argparse import ArgumentParser, _SubParsersAction

    from trlx_hybrid.plugins.registry import Registry


@hookimpl
def trlx_register(registry: Registry) -> None:
    """Offer `weights="reshard"`, which brings the weights of a sharded policy (FSDP2, HSDP, DDP) into tensor-parallel
    engines."""
    registry.offer(
        "weights",
        "reshard",
        "trlx_hybrid_reshard.sync:ReshardSync",
        order=40,
        reshards=True,
        options=ReshardOptions,
        summary="FSDP2 or DDP policy to tensor-parallel shards; sends each rank only the bytes it lacks",
    )


@hookimpl
def trlx_command(commands: _SubParsersAction[ArgumentParser]) -> None:
    """Add the command `trlx-hybrid reshard-plan` to the sub-parsers of `trlx-hybrid`."""
    from .planner.cli import add_command

    add_command(commands)
