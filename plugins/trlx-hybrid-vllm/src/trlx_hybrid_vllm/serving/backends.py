"""Which of vLLM's weight-transfer engines carries the weights, and what its trainer's end is opened with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trlx_hybrid.errors import ConfigError

if TYPE_CHECKING:
    from trlx_hybrid.session import Session


def backend_of(session: Session) -> str:
    """The backend that was chosen, or the usual one of what the engines compute on."""
    chosen = session.selection.weights
    wanted = chosen.options.backend if chosen is not None and chosen.component.name == "transfer" else "auto"
    if wanted != "auto":
        return str(wanted)
    from vllm.platforms import current_platform

    return "gloo" if current_platform.is_cpu() else "nccl"


def init_info(backend: str, fields: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """A backend's trainer-side init info, from those of `fields` that it has and the user's `options`.

    Raises:
        ConfigError: vLLM knows no such backend, or it wants fields that nobody gave.
    """
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

    known = WeightTransferTrainerFactory._registry
    if backend not in known:
        raise ConfigError(f"vLLM has no weight-transfer backend {backend!r}. It has {', '.join(known)}.")
    kind = known[backend]().init_info_cls
    has = {f.name for f in dataclasses.fields(kind)}
    try:
        return kind(**{name: value for name, value in fields.items() if name in has} | dict(options))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"Weight-transfer backend {backend!r}: {error}. Give what it needs in HybridConfig.weights_options: "
            "{'backend_options': {...}}."
        ) from error
