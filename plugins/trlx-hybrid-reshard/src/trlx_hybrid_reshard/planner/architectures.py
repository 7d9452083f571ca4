"""The parameters of a model, worked out from its transformers config alone: no weights, no GPU, no torch.

The file also has the configs of some well-known model sizes, by a short name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from trlx_hybrid.errors import ConfigError, did_you_mean

from ..layouts import Model, Parameter, Stage

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Fields: TypeAlias = Mapping[str, Any]
"""The content of a transformers config (a config.json) as a mapping from field names to values."""
LAYER = "model.layers.{}."
"""The name of a layer's module, before the names of its parameters; `{}` stands for the layer's number."""


def describe(config: PretrainedConfig | Fields, *, name: str = "", itemsize: int = 2) -> Model:
    """Return the names and shapes of the parameters of the model that transformers 5 builds from a config, as they lie
    in memory.

    Args:
        config: a transformers config, or the content of a config.json with all its fields.
        name: the model's name for output; by default its `model_type`.
        itemsize: bytes per element as it is sent in a weight sync.

    Raises:
        ConfigError: the architecture is not known here, or a field is missing.
    """
    fields = config
    if not isinstance(config, Mapping):
        fields = config.to_dict() | {alias: getattr(config, alias) for alias in config.attribute_map}
    kind = fields.get("model_type", "")
    if kind not in ARCHITECTURES:
        hint = did_you_mean(str(kind), ARCHITECTURES)
        raise ConfigError(
            f"No parameter classes are known of model_type {kind!r}.{hint} Known: {', '.join(ARCHITECTURES)}."
        )
    try:
        parameters = _causal_lm(fields, **ARCHITECTURES[kind])
    except KeyError as error:
        raise ConfigError(f"The config of {name or kind!r} lacks {error.args[0]!r}, which {kind} needs.") from error
    return Model(name=name or kind, parameters=parameters, itemsize=itemsize)


def _causal_lm(c: Fields, **traits: bool) -> tuple[Parameter, ...]:
    """Return the parameters of a causal language model: embedding, layers, norm and output head.

    Args:
        c: the fields of the config.
        traits: properties of the architecture that its config does not contain, as keyword arguments of `_layers`, such
            as `qkv_bias`.
    """
    tied = bool(c.get("tie_word_embeddings"))
    embedding = Parameter(
        name="model.embed_tokens.weight",
        shape=(c["vocab_size"], c["hidden_size"]),
        stage=Stage.ENDS if tied else Stage.FIRST,
        tp_dim=0,
        vocabulary=True,
        unit="padded vocabulary rows",
    )
    norm = Parameter(name="model.norm.weight", shape=(c["hidden_size"],), stage=Stage.LAST)
    head = [] if tied else [replace(embedding, name="lm_head.weight", stage=Stage.LAST)]
    return (embedding, *_layers(c, **traits), norm, *head)


def _linear(weight: Parameter, bias: bool) -> list[Parameter]:
    """Return a linear layer's weight and, if it has one, its bias. Tensor parallelism slices the bias as it slices the
    weight's rows, or not at all."""
    if not bias:
        return [weight]
    name, shape = weight.name.removesuffix("weight") + "bias", weight.shape[:1]
    if weight.tp_dim == 0:
        return [weight, replace(weight, name=name, shape=shape)]
    return [weight, Parameter(name=name, shape=shape, layers=weight.layers, depth=weight.depth)]


def _attention(c: Fields, *, qkv_bias: bool, o_bias: bool, head_norms: bool) -> list[Parameter]:
    """Return the parameters of the attention of all layers.

    Args:
        c: the fields of the config.
        qkv_bias: whether q_proj, k_proj and v_proj have a bias.
        o_bias: whether o_proj has a bias.
        head_norms: whether queries and keys are normalised per head (q_norm and k_norm).
    """
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    kv_heads = c.get("num_key_value_heads") or heads
    size = c.get("head_dim") or hidden // heads
    layers = range(c["num_hidden_layers"])
    found = []
    for part, units in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        weight = Parameter(
            name=f"{LAYER}self_attn.{part}_proj.weight",
            shape=(units * size, hidden),
            layers=layers,
            tp_dim=0,
            tp_units=units,
            unit="attention heads" if part == "q" else "key-value heads",
            replicable=part != "q",
        )
        found += _linear(weight, qkv_bias)
    output = Parameter(
        name=f"{LAYER}self_attn.o_proj.weight",
        shape=(hidden, heads * size),
        layers=layers,
        tp_dim=1,
        tp_units=heads,
        unit="attention heads",
    )
    found += _linear(output, o_bias)
    norms = [Parameter(name=f"{LAYER}self_attn.{n}_norm.weight", shape=(size,), layers=layers) for n in ("q", "k")]
    return found + norms * head_norms


def _norms(c: Fields) -> list[Parameter]:
    """Return the parameters of the two norms that every layer has."""
    layers = range(c["num_hidden_layers"])
    names = ("input_layernorm", "post_attention_layernorm")
    return [Parameter(name=f"{LAYER}{n}.weight", shape=(c["hidden_size"],), layers=layers) for n in names]


def _mlp(c: Fields, layers: Sequence[int], *, bias: bool) -> list[Parameter]:
    """Return the parameters of the dense MLPs of some layers.

    Args:
        c: the fields of the config.
        layers: the numbers of the layers that have a dense MLP.
        bias: whether the MLP's linear layers have a bias.
    """
    hidden, inner = c["hidden_size"], c["intermediate_size"]
    gate = Parameter(
        name=f"{LAYER}mlp.gate_proj.weight",
        shape=(inner, hidden),
        layers=layers,
        depth=c["num_hidden_layers"],
        tp_dim=0,
        unit="intermediate rows",
    )
    up = replace(gate, name=f"{LAYER}mlp.up_proj.weight")
    down = replace(
        gate, name=f"{LAYER}mlp.down_proj.weight", shape=(hidden, inner), tp_dim=1, unit="intermediate columns"
    )
    return [p for weight in (gate, up, down) for p in _linear(weight, bias)]


def _experts(c: Fields, layers: Sequence[int]) -> list[Parameter]:
    """Return the parameters of the mixture of experts of some layers: the router and the fused experts.

    Args:
        c: the fields of the config.
        layers: the numbers of the layers that have experts.
    """
    hidden, inner, experts = c["hidden_size"], c["moe_intermediate_size"], c["num_experts"]
    of = {"layers": layers, "depth": c["num_hidden_layers"]}
    expert = of | {"expert_dim": 0, "unit": "intermediate rows of each expert"}
    return [
        Parameter(name=f"{LAYER}mlp.gate.weight", shape=(experts, hidden), **of),
        Parameter(
            name=f"{LAYER}mlp.experts.gate_up_proj", shape=(experts, 2 * inner, hidden), tp_dim=1, segments=2, **expert
        ),
        Parameter(name=f"{LAYER}mlp.experts.down_proj", shape=(experts, hidden, inner), tp_dim=2, **expert),
    ]


def _layers(c: Fields, *, qkv_bias: bool = False, head_norms: bool = False, experts: bool = False) -> list[Parameter]:
    """Return the parameters of all layers.

    Args:
        c: the fields of the config.
        qkv_bias: whether q_proj, k_proj and v_proj have a bias, even if the config's `attention_bias` is not set.
        head_norms: whether queries and keys are normalised per head (q_norm and k_norm).
        experts: whether the architecture has mixture-of-experts layers.
    """
    numbers, bias = range(c["num_hidden_layers"]), bool(c.get("attention_bias"))
    dense_only, step = c.get("mlp_only_layers") or [], c.get("decoder_sparse_step", 1)
    sparse = tuple(i for i in numbers if experts and i not in dense_only and (i + 1) % step == 0)
    dense = tuple(i for i in numbers if i not in sparse)
    found = _attention(c, qkv_bias=qkv_bias or bias, o_bias=bias, head_norms=head_norms)
    found += _mlp(c, dense, bias=bool(c.get("mlp_bias"))) if dense else []
    return found + (_experts(c, sparse) if sparse else []) + _norms(c)


ARCHITECTURES: Mapping[str, Mapping[str, bool]] = {
    "qwen2": {"qkv_bias": True},
    "qwen3": {"head_norms": True},
    "llama": {},
    "gemma": {},
    "qwen3_moe": {"head_norms": True, "experts": True},
}
"""The known values of transformers' `model_type`, each with the keyword arguments of `_layers` that the config does not
say. Gemma is built like Llama, with a head size of its own and tied embeddings."""


def _shape(kind: str, hidden: int, inner: int, layers: int, heads: int, kv: int, vocab: int, **more: object) -> Fields:
    """Return the fields of a transformers config, for a built-in model size (`SHAPES`).

    Args:
        kind: the `model_type`, such as "qwen2".
        hidden, inner: the hidden size, and the intermediate size of the MLPs.
        layers: the number of layers.
        heads, kv: the numbers of attention heads and of key-value heads.
        vocab: the size of the vocabulary.
        more: further fields, by their names in the config.
    """
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
    } | more


SHAPES: Mapping[str, Fields] = {
    "0.5b": _shape("qwen2", 896, 4864, 24, 14, 2, 151936, tie_word_embeddings=True),
    "0.6b": _shape("qwen3", 1024, 3072, 28, 16, 8, 151936, head_dim=128, tie_word_embeddings=True),
    "1.5b": _shape("qwen2", 1536, 8960, 28, 12, 2, 151936, tie_word_embeddings=True),
    "7b": _shape("qwen2", 3584, 18944, 28, 28, 4, 152064),
    "8b": _shape("llama", 4096, 14336, 32, 32, 8, 128256),
    "30b-a3b": _shape(
        "qwen3_moe", 2048, 6144, 48, 32, 4, 151936, head_dim=128, num_experts=128, moe_intermediate_size=768
    ),
    "70b": _shape("llama", 8192, 28672, 80, 64, 8, 128256),
    "1t-moe": _shape(
        "qwen3_moe", 7168, 18432, 61, 64, 8, 163840, head_dim=128, num_experts=384, moe_intermediate_size=2048
    ),
}
"""The configs of the built-in model sizes: Qwen2.5 0.5B, 1.5B and 7B; Qwen3 0.6B and 30B-A3B; Llama 8B and 70B; a
Qwen3-MoE of a trillion parameters, in Kimi K2's sizes."""
