"""How vLLM 0.31 cuts one parameter: pipeline stages, tensor-parallel slices, expert-parallel shares."""

from __future__ import annotations

import numpy as np
from trlx_hybrid.errors import ConfigError

from .intervals import Ints, segmented, whole
from .parameter import Parameter


def stage_layers(parameter: Parameter, stages: int) -> Ints:
    """(stages, 1, 2): which of the parameter's layers each stage holds, as positions in `parameter.layers`.

    Source: vLLM `distributed/utils.py::get_pp_indices`: what does not divide goes to the last stages but the very last.

    Raises:
        ConfigError: more stages than layers.
    """
    depth = parameter.depth or len(parameter.layers)
    if stages > depth:
        raise ConfigError(f"pp={stages} is more than the {depth} layers of the model. Choose pp of at most {depth}.")
    sizes = [depth // stages] * stages
    for i in range(2, depth % stages + 2):
        sizes[-i] += 1
    numbers = np.concatenate([[0], np.cumsum(sizes)])
    edges = np.searchsorted(np.asarray(parameter.layers), numbers)
    return np.stack([edges[:-1], edges[1:]], axis=-1)[:, None]


def dealt_experts(parameter: Parameter, ranks: int) -> Ints:
    """(ranks, 1, 2): whole experts, consecutive ones, the first ranks one more where they do not divide.

    Source: vLLM `layers/fused_moe/expert_map_manager.py::determine_expert_map`, strategy "linear".
    """
    assert parameter.expert_dim is not None
    experts = parameter.shape[parameter.expert_dim]
    rank = np.arange(ranks + 1, dtype=np.int64)
    edges = rank * (experts // ranks) + np.minimum(rank, experts % ranks)
    return np.stack([edges[:-1], edges[1:]], axis=-1)[:, None]


def tensor_slices(parameter: Parameter, ways: int, vocab_multiple: int) -> Ints:
    """(slices, segments, 2) of `parameter.tp_dim`: `ways` slices, fewer where ranks share KV heads.

    A vocabulary's slices reach beyond its size, into the padding.

    Source: vLLM `layers/linear.py::QKVParallelLinear`, `layers/vocab_parallel_embedding.py::pad_vocab_size`.

    Raises:
        ConfigError: `ways` does not divide the units.
    """
    assert parameter.tp_dim is not None
    size = parameter.shape[parameter.tp_dim]
    if parameter.vocabulary:
        size = -(-size // vocab_multiple) * vocab_multiple
    units = parameter.tp_units or size // parameter.segments
    if parameter.replicable and ways > units:
        if ways % units:
            raise ConfigError(_indivisible(parameter, ways, units, "neither divides nor is a multiple of"))
        ways = units
    if units % ways:
        raise ConfigError(_indivisible(parameter, ways, units, "does not divide"))
    return whole(size) if ways == 1 else segmented(size, ways, parameter.segments)


def _indivisible(parameter: Parameter, ways: int, units: int, relation: str) -> str:
    fitting = [str(d) for d in range(1, min(units, 64) + 1) if units % d == 0]
    return (
        f"tp={ways} {relation} the {units} {parameter.unit} of {parameter.name}. Choose a tp that fits: "
        f"{', '.join(fitting)}."
    )
