"""Which of vLLM's weight-transfer engines carries the weights, and what its trainer's end is opened with."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trlx_hybrid.errors import ConfigError

if TYPE_CHECKING:
    from trlx_hybrid.session import Session

REMEDY = "Let VLLM_NCCL_SO_PATH name a libnccl.so.2 that fits vLLM"


def backend_of(session: Session) -> str:
    """The backend that was chosen, or the usual one of what the engines compute on.

    Raises:
        ConfigError: `nccl` was chosen, and vLLM cannot use it here.
    """
    chosen = session.selection.weights
    wanted = chosen.options.backend if chosen is not None and chosen.component.name == "transfer" else "auto"
    if wanted == "nccl" and (why := nccl_missing()):
        raise ConfigError(
            f"HybridConfig.weights_options: backend='nccl': {why} {REMEDY}, or take backend='gloo', which goes through "
            "host memory."
        )
    if wanted != "auto":
        return str(wanted)
    from vllm.platforms import current_platform

    return "gloo" if current_platform.is_cpu() or nccl_missing() else "nccl"


def note(session: Session) -> str | None:
    """For the run's header, where `auto` could not take the fast backend."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu() or backend_of(session) != "gloo" or not (why := nccl_missing()):
        return None
    return f"note: weights go to the remote engines through host memory (gloo). {why} {REMEDY}."


@functools.cache
def nccl_missing() -> str | None:
    """Why vLLM cannot use NCCL in this process, or None.

    It goes on without where its library is too old (vllm/distributed/device_communicators/pynccl.py, `disabled`): its
    `nccl` transfer then sends nothing, and reports no error.
    """
    from vllm import envs
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    if envs.VLLM_DISABLE_PYNCCL:
        return "VLLM_DISABLE_PYNCCL is set."
    try:
        NCCLLibrary()
    except Exception as error:  # of the loader, of ctypes, or vLLM's own
        return f"vLLM cannot use the NCCL it finds ({error})."
    return None


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
