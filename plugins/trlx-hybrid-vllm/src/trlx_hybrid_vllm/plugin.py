"""The entry point by which this package offers its components to the plugin manager.

The module does not import vLLM: all installed plugins are loaded at each start, which must stay cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trlx_hybrid.plugins.hookspecs import hookimpl

from .options import MergedOptions, TransferOptions, VLLMOptions
from .versions import unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from trlx_hybrid.contract.protocols import WeightSync
    from trlx_hybrid.plugins.registry import Registry
    from trlx_hybrid.session import Session


def _refuses(session: Session, options: VLLMOptions) -> str | None:
    from .arguments import refuses, refuses_routing

    reason = refuses(session.policy, session.ranks.world, options)
    reason = reason or (refuses_routing(options) if session.config.router_replay else None)
    return reason or _refuses_support(session, options)


def _refuses_support(session: Session, options: VLLMOptions) -> str | None:
    from .arguments import refuses_support

    setting = session.sampling.truncated_by() if session.over_support else None
    return refuses_support(options, setting) if setting is not None else None


def _shared(alias: bool) -> Callable[[Session, Any], WeightSync]:
    def factory(session: Session, options: Any) -> WeightSync:
        from .weights.shared import SharedSync

        return SharedSync(session, alias)

    return factory


def _lora(session: Session, options: Any) -> WeightSync:
    from .weights.lora import LoraSync

    return LoraSync(session)


def _server_refuses(session: Session, options: VLLMOptions) -> str | None:
    from .arguments import refuses

    if options.enable_sleep_mode:
        return "remote engines have memory of their own and do not sleep. Leave enable_sleep_mode out."
    if options.pipeline_parallel_size > 1:
        return "remote engines have no pipeline stages. Leave pipeline_parallel_size out."
    reason = refuses(session.policy, options.tensor_parallel_size, options, slots=False)
    return reason or _refuses_support(session, options)


@hookimpl
def trlx_register(registry: Registry) -> None:
    """Register vLLM as an engine and as a remote server, and the ways to bring the policy's weights into it.

    The ways (`alias`, `lora`, `copy`, `transfer`, `merged`) are numbered by `order`, the cheapest first. Automatic
    selection takes the first that can serve the run; `merged` must be asked for by name.
    """
    registry.offer(
        "weights",
        "alias",
        _shared(True),
        order=10,
        shares_memory=True,
        summary="the engine uses the policy's own parameter memory; no transfer",
    )
    registry.offer(
        "weights",
        "lora",
        _lora,
        order=20,
        needs={"lora_slots"},
        shares_memory=True,
        summary="PEFT LoRA adapters copied into vLLM's LoRA buffers, not merged",
    )
    registry.offer("weights", "copy", _shared(False), order=30, summary="copy and cast on the device, for fp32 masters")
    registry.offer(
        "weights",
        "merged",
        "trlx_hybrid_vllm.weights.merged:MergedSync",
        options=MergedOptions,
        order=110,
        by_name=True,
        summary="PEFT adapters added to the engine's own weights, and rounded with them",
    )
    registry.offer(
        "engine",
        "vllm",
        "trlx_hybrid_vllm.engine:VLLMEngine",
        options=VLLMOptions,
        unavailable=unavailable,
        refuses=_refuses,
        streams=True,
        interrupts=True,
        routes=True,
        keeps=True,
        summary="vLLM inside the trainer's process, on the trainer's device",
    )
    registry.offer(
        "weights",
        "transfer",
        "trlx_hybrid_vllm.remote.transfer:TransferSync",
        order=60,
        options=TransferOptions,
        summary="full tensors to engines in other processes, through vLLM's weight-transfer engines",
    )
    registry.offer(
        "server",
        "vllm",
        "trlx_hybrid_vllm.remote.server:server_plan",
        options=VLLMOptions,
        unavailable=unavailable,
        refuses=_server_refuses,
        interrupts=True,
        keeps=True,
        summary="separate vLLM processes, for engine=remote",
    )
