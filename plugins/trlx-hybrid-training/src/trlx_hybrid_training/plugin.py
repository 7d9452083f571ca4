"""The entry point by which this package offers its components to the plugin manager.

The module imports little: all installed plugins are loaded at each start, which must stay cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trlx_hybrid.plugins.hookspecs import hookimpl

from .options import BEFORE, PackedOptions, TrainingOptions

if TYPE_CHECKING:
    from trlx_hybrid.contract.activations import Activations, PlannedLoss
    from trlx_hybrid.contract.protocols import Run
    from trlx_hybrid.plugins.registry import Registry


def _activations(loss: PlannedLoss, options: PackedOptions) -> Activations | None:
    from .forecast import activations

    return activations(loss, options)


@hookimpl
def trlx_register(registry: Registry) -> None:
    """Offer `scoring="packed"`, which computes log-probs of rows without padding."""
    registry.offer(
        "scoring",
        "packed",
        "trlx_hybrid_training.scoring:Packed",
        options=PackedOptions,
        proves=True,
        activations=_activations,
        options_before=BEFORE,
        summary="padding-free forward; old log-probs taken from the first training forward",
    )


@hookimpl
def trlx_configure(session: Run) -> None:
    """Give the policy's LoRA layers the faster forward of `trlx_hybrid_training.lora`, if the options ask for it."""
    if session.config.options_of("training", TrainingOptions).lora_layers:
        from .lora import apply

        apply(session.policy.module)


@hookimpl
def trlx_report_header(session: Run) -> str | None:
    """Return the line about LoRA layers that is printed when a run starts. It has the number of layers with the faster
    forward of `trlx_hybrid_training.lora`. If some layers keep PEFT's forward, it also has the reason for the first.

    None where the options do not ask for it.
    """
    if not session.config.options_of("training", TrainingOptions).lora_layers:
        return None
    from .lora import served

    return served(session.policy.module)
