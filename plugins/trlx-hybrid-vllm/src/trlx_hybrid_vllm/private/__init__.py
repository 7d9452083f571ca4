"""All code of this plugin that uses undocumented names of vLLM, or replaces parts of vLLM.

The rest of the plugin uses only the names in `DOCUMENTED`, as `tests/test_vllm_names.py` checks. Each module here
declares in `PATCHES` what it replaces, and `docs/vllm.md` is the table of these declarations.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

logger = logging.getLogger(__name__)

DOCUMENTED: dict[str, str] = {
    "vllm.LLM": "collective_rpc enqueue generate reset_prefix_cache",
    "vllm.SamplingParams": "",
    "vllm.sampling_params.RequestOutputKind": "FINAL_ONLY",
    "vllm.sampling_params.StructuredOutputsParams": "",
    "vllm.outputs.RequestOutput": "outputs prompt_token_ids",
    "vllm.outputs.CompletionOutput": "finish_reason logprobs token_ids",
    "vllm.EngineArgs": "",
    "vllm.ModelRegistry": "get_supported_archs",
    "vllm.config.VllmConfig": "model_config speculative_config",
    "vllm.logprobs.Logprob": "logprob rank",
    "vllm.config.ModelConfig": "get_vocab_size hf_config is_multimodal_model return_sampling_mask",
    "vllm.config.ParallelConfig": "data_parallel_index rank world_size",
    "vllm.platforms.current_platform": "is_cpu is_device_capability_family",
    "vllm.lora.request.LoRARequest": "",
    # remote engines
    "vllm.engine.arg_utils.AsyncEngineArgs": "",
    "vllm.v1.engine.async_llm.AsyncLLM": (
        "abort check_health collective_rpc errored finish_weight_update from_engine_args generate "
        "init_weight_transfer_engine model_config reset_encoder_cache reset_prefix_cache shutdown start_weight_update "
        "update_weights vllm_config"
    ),
    "vllm.v1.engine.exceptions.EngineDeadError": "",
    # the transfer of weights to them, https://docs.vllm.ai/en/latest/training/weight_transfer/
    "vllm.distributed.weight_transfer.ParamMeta": "",
    "vllm.distributed.weight_transfer.TrainerWeightTransferEngine": "client is_sender send_weights shutdown source",
    "vllm.distributed.weight_transfer.VLLMWeightSyncClient": (
        "finish_weight_update init_weight_transfer_engine start_weight_update update_weights"
    ),
    "vllm.distributed.weight_transfer.WeightSource": "metadata",
    "vllm.distributed.weight_transfer.WeightTransferEngineFactory": "register_engine",
    "vllm.distributed.weight_transfer.WeightTransferTrainerFactory": "register_engine trainer_init",
    "vllm.distributed.weight_transfer.base.TrainerInitInfo": "",
    "vllm.distributed.weight_transfer.base.WeightTransferInitRequest": "",
    "vllm.distributed.weight_transfer.base.WeightTransferUpdateRequest": "",
    "vllm.distributed.weight_transfer.nccl_engine.NCCLWeightTransferEngine": (
        "device model model_update_group parallel_config parse_update_info"
    ),
    "vllm.distributed.weight_transfer.nccl_engine.NCCLWeightTransferUpdateInfo": "dtype_names names shapes",
}
"""vLLM's documented names that this plugin uses, each with those members of it that may be used outside this package.

They are entry points, config classes, `SamplingParams`, outputs, and the interface for weight transfer.
"""


@dataclass(frozen=True, slots=True)
class Patch:
    """A declaration of one thing that this package replaces in vLLM, or in torch or Python for vLLM's sake.

    Attributes:
        of: the full names of what is replaced.
        when: since when it is replaced, and until when.
        why: what would go wrong otherwise.
        until: the change of vLLM after which it is no longer needed.
    """

    of: tuple[str, ...]
    when: str
    why: str
    until: str


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Set an attribute for the time of a `with` block, and restore it afterwards.

    A class or an instance that only inherits the attribute loses it again.
    """
    own = vars(owner)
    there, before = name in own, own.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if there:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def may_replace(subject: str, apart: Callable[[], float], bound: float) -> bool:
    """Run one of this plugin's kernels once, and return whether it may replace vLLM's kernel on this machine.

    It may if it runs and its result is close enough. Otherwise a warning is logged.

    Args:
        subject: what the kernel computes, with its verb ("log-probs are"), for the log message.
        apart: a function that runs the kernel, and returns by how much its result differs from vLLM's.
        bound: the largest difference that is allowed.
    """
    try:
        found = apart()
    except Exception as error:  # whatever a compiler on another machine says
        logger.warning("%s computed by vLLM's own kernels; ours does not run here: %r", subject, error)
        return False
    if not found <= bound:
        logger.warning("%s computed by vLLM's own kernels; ours differs by %g here.", subject, found)
    return found <= bound
