"""vLLM's CPU worker, made to behave like the GPU's: weights stay where they were loaded, and sleeping frees memory.

The engine argument `worker_cls` names this worker; that is vLLM's public way to replace a worker. The worker builds its
model with plain PyTorch versions of those layers that would repack their weights or need bf16. These versions keep the
weights as they were loaded and compute in the model's dtype. They are slower than vLLM's: experts are computed one by
one, and linear attention token by token.
"""

from __future__ import annotations

import os
import pkgutil
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, gelu, linear, silu, softplus
from vllm.distributed.parallel_state import get_pp_group
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_worker import CPUWorker

from . import Patch, replaced
from .engine import flat

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm.model_executor.layers.linear import LinearBase

PATCHES = (
    Patch(
        of=("vllm.v1.worker.cpu_worker.init_worker_distributed_environment", "torch.set_num_threads"),
        when="while the CPU's worker starts",
        why="vLLM names the memory that its ranks share alike in every job of a machine, leaves the name behind, and "
        "replaces `torch.set_num_threads` for the whole process.",
        until="each job's shared memory has a name of its own that is unlinked, and torch's function stays",
    ),
    Patch(
        of=("vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm",),
        when="while a model is loaded on a CPU",
        why="Linear layers repack their weights and delete the originals, so no weight sync could write to them.",
        until="a CPU engine can keep its weights as they were loaded",
    ),
    Patch(
        of=("vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method.select_unquantized_moe_backend",),
        when="while a model is loaded on a CPU",
        why="Experts are repacked at an unchanged shape; with LoRA slots vLLM chooses Triton even on a CPU.",
        until="a CPU engine can keep its experts as they were loaded",
    ),
    Patch(
        of=("vllm.model_executor.layers.rotary_embedding.base.RotaryEmbedding.forward_cpu",),
        when="while a model is loaded on a CPU",
        why="The kernel turns queries that have a dimension for heads wrongly.",
        until="the kernel takes (tokens, heads, width)",
    ),
    Patch(
        of=("vllm.model_executor.layers.mamba.ops.cpu.gdn_attention.cpu_gdn_attention_core",),
        when="while a model is loaded on a CPU",
        why="The kernel of linear attention needs bf16.",
        until="the kernel takes float32",
    ),
    Patch(
        of=("vllm.v1.sample.ops.topk_topp_sampler.TopKTopPSampler.forward",),
        when="as long as the engine lives, on CPUs",
        why="It draws from torch's generator even where every request has a seed.",
        until="it draws only for requests without a seed",
    ),
)

IDENTITY = "VLLM_DIST_IDENT"
"""The environment variable whose value vLLM puts in front of the names of its shared memory."""
MAPS = Path("/proc/self/maps")
SEGMENTS = "/dev/shm/"


class PlainWeightsCPUWorker(CPUWorker):  # type: ignore[misc]
    """A CPU worker whose layers compute with the weights as loaded, so that a weight sync can write to them.

    Its sleep frees the memory of weights and KV cache. It samples with the requests' seeds only, and draws nothing from
    torch's default generator.
    """

    def init_device(self) -> None:
        """Initialize as vLLM does, but keep `torch.set_num_threads`, and give each job its own shared-memory names.

        vLLM would replace `torch.set_num_threads` for the whole process. It names the memory that its ranks share after
        their rendezvous address, which is "env://" in every job of a machine. A second job would fail with errno 17.
        All later jobs would fail, too, where a killed job left the name behind. The names made here contain the host's
        name: ranks on several hosts share no memory, and where their names differ, vLLM communicates through gloo.
        """
        set_num_threads, connect = torch.set_num_threads, cpu_worker.init_worker_distributed_environment

        def connect_this_job(*args: Any, **kwargs: Any) -> None:
            if self.distributed_init_method == "env://":
                master = [os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT")]
                os.environ[IDENTITY] = "-".join([*master, socket.gethostname(), _shared_memory()])
            connect(*args, **kwargs)
            unlink_segments(os.environ[IDENTITY])

        try:
            with replaced(cpu_worker, "init_worker_distributed_environment", connect_this_job):
                super().init_device()
        finally:
            torch.set_num_threads = set_num_threads

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, with the functions of `PLAIN_LAYERS` in place of vLLM's for CPUs.

        Its layers then compute with the weights as they are loaded, instead of a repacked copy, so that a weight sync
        can write to them.
        """
        with ExitStack() as patches:
            for name, plain in PLAIN_LAYERS.items():
                owner, _, attribute = f"vllm.model_executor.layers.{name}".rpartition(".")
                patches.enter_context(replaced(pkgutil.resolve_name(owner), attribute, plain))
            super().load_model(*args, **kwargs)
        # vLLM's sampler for CPUs draws from torch's generator even where every request has a seed. Tools in threads may
        # draw from it at the same time, so restoring the generator's state would undo their draws, too.
        sampler = self.model_runner.sampler.topk_topp_sampler
        sampler.forward = sampler.forward_native
        runner = self.model_runner
        if not get_pp_group().is_first_rank:  # where the GPU's runner receives what the stage before has computed
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )

    def sleep(self, level: int = 2) -> None:
        """Free the memory of weights and KV cache: the tensor objects stay, their contents are lost.

        `level` is not used.
        """
        self.discard(("weights", "kv_cache"))

    def discard(self, tags: tuple[str, ...]) -> None:
        """Free the memory of the parts that `tags` names ("weights", "kv_cache"), unless it is free already."""
        owners = {"weights": list(self.model_runner.model.parameters()), "kv_cache": flat(self.model_runner.kv_caches)}
        freed = getattr(self, "_freed", {})
        self._freed = {tag: _free(owners[tag]) for tag in tags if tag not in freed} | freed

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Allocate the freed memory of "weights" or "kv_cache" again.

        Floating-point weights are NaN until a sync writes them; the KV cache is zeros.

        Args:
            tags: the parts to allocate; None for both.
        """
        for tag in tags or ["weights", "kv_cache"]:
            for storage, size in self._freed.pop(tag, []):
                storage.resize_(size)
                raw = torch.empty(0, dtype=torch.uint8).set_(storage)
                raw.fill_(255 if tag == "weights" else 0)


def unlink_segments(identity: str) -> None:
    """Unlink the shared-memory files that this process has mapped, so that none is left when the processes end.

    The memory stays mapped. All ranks must have mapped it before, because it can no longer be found by name.

    Args:
        identity: the prefix of the files' names, which this job has for itself.
    """
    for line in MAPS.read_text().splitlines() if MAPS.exists() else ():
        _, _, name = line.partition(SEGMENTS)
        if name.startswith(f"{identity}-") and not name.endswith(" (deleted)"):
            with suppress(FileNotFoundError):  # a peer was faster
                os.unlink(SEGMENTS + name)


def _shared_memory() -> str:
    """Return the device number of the file system `/dev/shm` that this process sees, or "" if there is none.

    Containers of one host may each have their own `/dev/shm`; the number tells them apart.
    """
    return str(os.stat(SEGMENTS).st_dev) if os.path.isdir(SEGMENTS) else ""


def _free(tensors: list[torch.Tensor]) -> list[tuple[torch.UntypedStorage, int]]:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
    freed = [(storage, storage.nbytes()) for storage in storages.values()]
    for storage, _ in freed:
        storage.resize_(0)
    return freed


# --- linear layers ----------------------------------------------------------------------------------------------------


def plain_linear(layer: LinearBase, remove_weight: bool) -> None:
    """Let a linear layer compute with its weight as loaded; replaces vLLM's `dispatch_cpu_unquantized_gemm`.

    vLLM's function would repack the weight for oneDNN, AMX or ZenDNN, and delete the original if `remove_weight`.
    """
    layer.cpu_linear = linear


# --- rotary embeddings ------------------------------------------------------------------------------------------------

_forward_of_rows: Callable[..., tuple[Tensor, Tensor | None]] = RotaryEmbedding.forward_cpu


def rotated(
    layer: RotaryEmbedding, positions: Tensor, query: Tensor, key: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Apply rotary position embeddings to queries and keys; replaces vLLM's `RotaryEmbedding.forward_cpu`.

    vLLM's kernel is right for (tokens, width) only. Queries with a dimension for heads, as latent attention has them,
    are rotated in PyTorch.
    """
    forward: Callable[..., tuple[Tensor, Tensor | None]] = RotaryEmbedding.forward_native
    return (_forward_of_rows if query.dim() == 2 else forward)(layer, positions, query, key)


# --- experts ----------------------------------------------------------------------------------------------------------


class PlainExperts(CPUUnquantizedExperts):  # type: ignore[misc]
    """Experts that compute with their weights as loaded, one expert after the other.

    vLLM's own kernel repacks the weights at an unchanged shape, so it would misread what a sync writes.
    """

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Do nothing: the weights are not repacked."""

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: Tensor | None,
        *_: Any,
        apply_router_weight_on_input: bool,
        **__: Any,
    ) -> None:
        """Write the weighted sum of each token's experts into `output`, (tokens, hidden) like `hidden_states`."""
        total = torch.zeros_like(output)
        chosen = topk_ids if expert_map is None else expert_map[topk_ids]  # -1 for those of other ranks
        for expert in sorted(set(chosen.flatten().tolist())):
            tokens, places = (chosen == expert).nonzero(as_tuple=True)
            if expert < 0:
                continue
            first, second = (None if bias is None else bias[expert] for bias in (self.w1_bias, self.w2_bias))
            inner = gated(activation, linear(hidden_states[tokens], w1[expert], first))
            outer = linear(inner, w2[expert], second)
            scale = 1 if apply_router_weight_on_input else topk_weights[tokens, places, None].to(outer.dtype)
            total.index_add_(0, tokens, outer * scale)
        output.copy_(total)


def gated(activation: MoEActivation, hidden: Tensor) -> Tensor:
    """Apply the gated activation between the two matrix products of an expert.

    Args:
        activation: the activation's kind.
        hidden: the result of the first product, (tokens, 2 * width).

    Returns:
        The input of the second product, (tokens, width).

    Raises:
        NotImplementedError: the activation is another one, which vLLM's own CPU kernel does not have either.
    """
    if activation == MoEActivation.SWIGLUOAI:  # gpt-oss: columns of gate and up alternate
        gate, up = hidden[..., ::2].clamp(max=7.0), hidden[..., 1::2].clamp(-7.0, 7.0)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)
    gate, up = hidden.chunk(2, -1)
    if activation == MoEActivation.SILU:
        return silu(gate) * up
    if activation in (MoEActivation.GELU, MoEActivation.GELU_TANH):
        return gelu(gate, approximate="tanh" if activation == MoEActivation.GELU_TANH else "none") * up
    raise NotImplementedError(f"experts with the activation {activation.value!r} on a CPU")


def plain_backend(moe_config: FusedMoEConfig) -> tuple[UnquantizedMoeBackend, type[PlainExperts]]:
    """Return the backend and class with which experts are computed on a CPU; replaces vLLM's function for the choice.

    For an engine with LoRA, vLLM would choose Triton, even on a CPU.
    """
    return UnquantizedMoeBackend.CPU, PlainExperts


# --- linear attention -------------------------------------------------------------------------------------------------


def gated_delta_rule(mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor, layer_name: LayerNameType) -> None:
    """Compute the attention of Qwen3-Next's and Qwen3.5's linear layers for all sequences of a step.

    It takes the place of vLLM's own function, which needs bf16.

    Args:
        mixed_qkv: queries, keys and values beside each other, (tokens, width) before the convolution.
        b, a: the inputs of the update strength and of the decay, (tokens, value heads).
        core_attn_out: the output, written in place, (tokens, value heads, head size).
        layer_name: vLLM's name of the layer, by which its weights and states are found.
    """
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    context = get_forward_context()
    layer: Any = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if context.attn_metadata is None:  # a dry run
        return
    metadata: Any = context.attn_metadata[layer.prefix]
    if metadata.spec_sequence_masks is not None:
        raise NotImplementedError("linear attention with speculative decoding on a CPU")
    weight = layer.conv1d.weight
    convolved, states = gdn_attention._conv_buffer_view(layer), gdn_attention._ssm_state_view(layer)
    decay = -layer.A_log.float().exp() * softplus(a.float() + layer.dt_bias.float())
    starts, slots = metadata.non_spec_query_start_loc.tolist(), metadata.non_spec_state_indices_tensor.tolist()
    for number in range(metadata.num_decodes + metadata.num_prefills):
        slot, tokens = slots[number], slice(starts[number], starts[number + 1])
        if number >= metadata.num_decodes and not metadata.has_initial_state[number]:
            convolved[slot], states[slot] = 0, 0
        window = torch.cat([convolved[slot], mixed_qkv[tokens].T], dim=-1)
        convolved[slot] = window[:, -convolved.shape[-1] :]
        mixed = silu(conv1d(window[None], weight, layer.conv1d.bias, groups=len(weight)))[0].T
        query, key, value = layer.rearrange_mixed_qkv(mixed)
        shared = value.shape[2] // key.shape[2]
        found, last = torch_recurrent_gated_delta_rule(
            query.repeat_interleave(shared, dim=2),
            key.repeat_interleave(shared, dim=2),
            value,
            g=decay[None, tokens],
            beta=b[None, tokens].sigmoid(),
            initial_state=states[slot][None],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        core_attn_out[tokens], states[slot] = found[0], last[0]


PLAIN_LAYERS = {
    "utils.dispatch_cpu_unquantized_gemm": plain_linear,
    "fused_moe.unquantized_fused_moe_method.select_unquantized_moe_backend": plain_backend,
    "rotary_embedding.base.RotaryEmbedding.forward_cpu": rotated,
    "mamba.ops.cpu.gdn_attention.cpu_gdn_attention_core": gated_delta_rule,
}
"""Names in vLLM's `model_executor.layers`, with what replaces each of them while a model is built."""
