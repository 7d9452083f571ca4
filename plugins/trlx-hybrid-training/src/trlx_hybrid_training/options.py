"""Settings of `scoring="packed"`, which scores rows without padding, and of this plugin's faster LoRA layers."""

from __future__ import annotations

from dataclasses import dataclass

from trlx_hybrid.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """Settings of the plugin: `HybridConfig.plugin_options["training"]`.

    Attributes:
        lora_layers: let plain LoRA layers read and write their input and output fewer times, which is faster, see
            `trlx_hybrid_training.lora`. True: in any run. False: in no run. None: in runs with `scoring="packed"`
            whose option `lora_layers` is on.
    """

    lora_layers: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedOptions:
    """Settings of `scoring="packed"`: `HybridConfig.scoring_options`.

    Attributes:
        packing: score the rows of a micro-batch as one sequence of real tokens, where the model can be packed.
        deferred: take TRL's old log-probs from the first forward pass of the loss, where this pass still runs with the
            weights that sampled the rollout. Elsewhere, the old log-probs get a forward pass of their own.
        balanced: choose which rows share a micro-batch of an optimizer step: so that micro-batches have nearly equal
            numbers of tokens, or so that rows with the same prompt are together. Done where rows are packed and the
            gradient does not depend on this choice.
        shared_prompts: compute a prompt once for all rows of a micro-batch that have it, where rows are packed and this
            brings their token count below nine tenths; likewise parts of prompts that rows have in common.
        adaptive_checkpointing: where the trainer's `gradient_checkpointing` is on, recompute only as many layers as
            memory requires, see `trlx_hybrid_training.recomputation`.
        tiles: with `adaptive_checkpointing`, and where memory does not hold one layer's activations beside all layers'
            inputs: compute norms and MLPs in tiles of the sequence, see `trlx_hybrid_training.tiles`.
        activation_offloading: with `adaptive_checkpointing`, and where memory does not hold the inputs of all layers:
            keep inputs in host memory, see `trlx_hybrid_training.host_inputs`.
        joined: with `adaptive_checkpointing`, and where rows are packed: compute several micro-batches of an optimizer
            step in one forward and one backward pass, as many as memory holds without recomputing a layer. TRL's losses
            and metrics stay those of single micro-batches. None: where `adaptive_checkpointing`
            is on and rows are packed.
        lora_layers: let plain LoRA layers read and write their input and output fewer times, see
            `trlx_hybrid_training.lora`. Each layer's first call is compared with PEFT's, and the layer stays PEFT's
            where they differ.
        cuda_graphs: on one GPU, and where rows are packed: launch a small model's layers as CUDA graphs, whose results
            are compared with the layers', see `trlx_hybrid_training.layer_graphs`.
    """

    packing: bool = True
    deferred: bool = True
    balanced: bool = True
    shared_prompts: bool = True
    adaptive_checkpointing: bool = True
    tiles: bool = True
    activation_offloading: bool = True
    joined: bool | None = None
    lora_layers: bool = True
    cuda_graphs: bool = True

    def __post_init__(self) -> None:
        if self.joined and not (self.adaptive_checkpointing and self.packing):
            raise ConfigError(
                "scoring_options: joined needs packing and adaptive_checkpointing, which counts what a token keeps in "
                "memory. Set both to True, or leave joined out."
            )


BEFORE = dict.fromkeys(
    ("adaptive_checkpointing", "tiles", "activation_offloading", "joined", "lora_layers", "cuda_graphs"), False
)
"""Options of `scoring="packed"` that were off unless asked for, or not there, before they became the default."""
