"""The hooks of this distribution. The module imports little, because loading every plugin must stay cheap."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trlx_hybrid.plugins.hookspecs import hookimpl

from .options import PackedOptions, TrainingOptions

if TYPE_CHECKING:
    from trlx_hybrid.plugins.registry import Registry
    from trlx_hybrid.protocols import Run, Scoring


def _packed(session: Run, options: PackedOptions) -> Scoring:
    from .scoring import Packed

    return Packed(session, options)


@hookimpl
def trlx_register(registry: Registry) -> None:
    """Offer `scoring="packed"`."""
    registry.offer(
        "scoring",
        "packed",
        _packed,
        options=PackedOptions,
        summary="padding-free forward; old log-probs taken from the first training forward",
    )


@hookimpl
def trlx_configure(session: Run) -> None:
    """Let LoRA layers compute in fewer passes, where the options say so."""
    if session.config.options_of("training", TrainingOptions).lora_layers:
        from .lora import apply

        apply(session.policy.module)


@hookimpl
def trlx_report_header(session: Run) -> str | None:
    """Return how many LoRA layers compute in fewer passes, and why the first other one does not."""
    if not session.config.options_of("training", TrainingOptions).lora_layers:
        return None
    from .lora import served

    return served(session.policy.module)
