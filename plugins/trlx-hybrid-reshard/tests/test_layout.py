"""Which slice lies where, and what cannot be laid out."""

import subprocess
import sys
from pathlib import Path

import pytest
from trlx_hybrid.errors import ConfigError
from trlx_hybrid_reshard.layouts import VLLM_VOCAB_MULTIPLE, MeshLayout, Parameter, expert_shares, stage_layers

sys.path.insert(0, str(Path(__file__).parent))
from worlds import boxes

KV = Parameter(name="k", shape=(8, 3), tp_dim=0, tp_units=2, unit="key-value heads", replicable=True)
GATE_UP = Parameter(name="w13", shape=(4, 12, 5), tp_dim=1, segments=2, expert_dim=0)


def rows(layout, parameter, dim=1):
    """For each rank the ranges of one dimension of its boxes."""
    sharding = layout.sharding(parameter)
    return [[box[dim] for box in boxes(sharding, r)] for r in range(layout.world)]


def test_key_value_heads_are_shared_by_neighbouring_ranks():
    assert rows(MeshLayout(tp=4), KV) == [[(0, 4)], [(0, 4)], [(4, 8)], [(4, 8)]]


def test_gate_and_up_are_sliced_each_by_itself():
    assert rows(MeshLayout(tp=2), GATE_UP, dim=2) == [[(0, 3), (6, 9)], [(3, 6), (9, 12)]]


def test_fsdp_cuts_experts_where_tensor_parallelism_does_not():
    assert rows(MeshLayout(fsdp=2), GATE_UP) == [[(0, 2)], [(2, 4)]]
    assert rows(MeshLayout(fsdp=2), GATE_UP, dim=2) == [[(0, 12)], [(0, 12)]]


def test_uneven_shards_are_those_of_torch_chunk():
    ten = Parameter(name="weight", shape=(10, 2))
    assert rows(MeshLayout(fsdp=4), ten) == [[(0, 3)], [(3, 6)], [(6, 9)], [(9, 10)]]
    assert rows(MeshLayout(fsdp=8), Parameter(name="weight", shape=(5,)))[4:] == [[(4, 5)], [], [], []]


@pytest.mark.parametrize(
    ("layout", "parameter", "message"),
    [
        (MeshLayout(tp=3), KV, r"tp=3 neither divides nor is a multiple of the 2 key-value heads of k"),
        (MeshLayout(tp=4), GATE_UP, r"tp=4 does not divide the 6 rows of w13\. Choose a tp that fits: 1, 2, 3, 6"),
        (MeshLayout(fsdp=2, shard_dims=(("k", 1),)), KV, r"dimension 1 of k only evenly, and fsdp=2 does not divide 3"),
        (MeshLayout(fsdp=2, shard_dims=(("k", 2),)), KV, r"k of shape \(8, 3\) has no dimension 2"),
    ],
)
def test_a_size_that_does_not_divide_is_named(layout, parameter, message):
    with pytest.raises(ConfigError, match=message):
        layout.sharding(parameter)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 0}, r"tp=0 in a layout"),
        ({"tp": 2, "ep": 3}, r"ep=3 with tp=2"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(sizes, message):
    with pytest.raises(ConfigError, match=message):
        MeshLayout(**sizes)


def test_vllm_cuts_stages_experts_and_vocabularies_like_this():
    pytest.importorskip("vllm")
    from vllm.distributed.utils import get_pp_indices
    from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map
    from vllm.model_executor.layers.vocab_parallel_embedding import pad_vocab_size

    for depth in (4, 7, 28, 61):
        for stages in (1, 2, 3, 4):
            ours = stage_layers(Parameter(name="layer", shape=(1,), layers=range(depth)), stages)[:, 0].tolist()
            assert ours == [list(get_pp_indices(depth, i, stages)) for i in range(stages)]
    for experts in (8, 10):
        for ranks in (2, 4):
            ours = expert_shares(Parameter(name="experts", shape=(experts, 1, 1), expert_dim=0), ranks)[:, 0]
            for rank, (start, stop) in enumerate(ours.tolist()):
                local = determine_expert_map(ranks, rank, experts)[1]
                assert [i for i, at in enumerate(local.tolist()) if at >= 0] == list(range(start, stop))
    assert pad_vocab_size(1001) == -(-1001 // VLLM_VOCAB_MULTIPLE) * VLLM_VOCAB_MULTIPLE


def test_the_plugin_and_the_planner_import_no_backend():
    code = (
        "import sys, trlx_hybrid_reshard.plugin, trlx_hybrid_reshard.planner.cli, trlx_hybrid_reshard.descriptors,"
        " trlx_hybrid_reshard.layouts; print([m for m in ('vllm', 'ray', 'trl', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_loading_the_plugin_imports_not_even_numpy():
    code = (
        "import sys; from trlx_hybrid.plugins.host import Host; host = Host.load();"
        "print('reshard' in [p.name for p in host.plugins],"
        " [m for m in ('vllm', 'ray', 'torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True []"
