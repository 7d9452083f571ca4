import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers.training_args import OptimizerNames
from trlx_hybrid.contract.types import Phase
from trlx_hybrid.errors import MemoryPlanError
from trlx_hybrid.memory.arena import Arena
from trlx_hybrid.memory.estimate import (
    GIB,
    LEAVING,
    OWNERS,
    REMEDIES,
    ParameterSize,
    optimizer_bytes,
    plan_offload,
    predict,
)
from trlx_hybrid.memory.ledger import (
    Ledger,
    disjoint_bytes,
    parameter_sizes,
    table,
    union,
)
from trlx_hybrid.memory.trainer_memory import unused_in_private_pools

intervals = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda t: (t[0], t[0] + t[1])), max_size=8)
amounts = st.integers(0, 100)
ARENA = Arena("cpu")


# --- measured ---------------------------------------------------------------------------------------------------------


@given(st.dictionaries(st.sampled_from(OWNERS), intervals))
def test_every_address_counts_once_for_the_first_owner(owners):
    seen, expected = set(), {}
    for owner, found in owners.items():
        addresses = {a for start, stop in found for a in range(start, stop)}
        expected[owner] = len(addresses - seen)
        seen |= addresses
    assert disjoint_bytes(owners) == expected


@given(intervals)
def test_a_union_is_sorted_and_joined(found):
    joined = union(found)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(joined))
    assert {a for i in joined for a in range(*i)} == {a for i in found for a in range(*i)}


def test_aliases_count_for_the_policy_views_and_ties_once_emptied_storages_not_at_all():
    fused = torch.zeros(4, 1024)
    query = torch.from_dlpack(fused)[1:3]  # another storage over the same bytes
    assert query.untyped_storage()._cdata != fused.untyped_storage()._cdata
    cache, gone = torch.zeros(1024), torch.zeros(1 << 20)
    gone.untyped_storage().resize_(0)
    owners = {
        "policy": lambda: [fused, fused[0], fused.view(-1)],
        "optimizer": lambda: [gone],
        "engine weights": lambda: [query],
        "KV cache": lambda: [cache, torch.zeros(4, device="meta")],
    }
    ledger = Ledger(owners, ARENA)
    assert ledger.measure() == {"policy": 16384, "optimizer": 0, "engine weights": 0, "KV cache": 4096}
    swapped = Ledger({"engine weights": lambda: [query[:1]], "policy": lambda: [fused]}, ARENA).measure()
    assert sum(swapped.values()) == 16384


def test_other_is_what_nobody_claims_and_never_negative():
    tensor = torch.zeros(256)
    assert Ledger({"policy": lambda: [tensor]}, ARENA, lambda: 5000).measure() == {"policy": 1024, "other": 3976}
    assert Ledger({"policy": lambda: [tensor]}, ARENA, lambda: 10).measure()["other"] == 0


def test_metrics_and_report():
    arena = Arena("cpu", 4096)
    arena.reserve(1)
    tensor = torch.zeros(1 << 18)
    awake = [tensor]
    ledger = Ledger({"policy": list, "KV cache": lambda: awake}, arena, lambda: 1 << 20)
    arena_mib = {"hybrid/memory/host_arena_mib": 2**-8}
    assert ledger.metrics(Phase.ROLLOUT) == {"hybrid/memory/rollout_mib": 1.0} | arena_mib
    awake = []
    train = ledger.metrics(Phase.TRAIN)
    assert train == {"hybrid/memory/train_mib": 1.0, "hybrid/memory/moved/kv_cache_mib": -1.0} | arena_mib
    awake = [tensor]
    prediction = predict([], engine_weight_bytes=0, kv_cache_bytes=2 * GIB)
    text = ledger.report(Phase.ROLLOUT, 80 * GIB, prediction)
    assert text.splitlines() == [
        "Memory held on cpu in phase ROLLOUT: 0.00 of 80.00 GiB.",
        "  KV cache           0.00 GiB (predicted 2.00)",
        "  host arena         0.00 GiB, on the host",
        f"The largest is KV cache: {REMEDIES['KV cache']}.",
    ]
    assert "0.00 GiB." in Ledger({}, ARENA).report(Phase.TRAIN)


def test_what_a_private_pool_keeps_is_free_for_nobody():
    """As torch's snapshots tell it: a CUDA graph's pool, a common segment, and another device's."""
    keys = "device", "segment_pool_id", "total_size", "allocated_size"
    rows = [(1, (0, 3), 100, 30), (1, (2, 0), 10, 10), (1, (0, 0), 1000, 1), (0, (0, 3), 5000, 0)]
    segments = [dict(zip(keys, row, strict=True)) for row in rows]
    assert unused_in_private_pools(segments, torch.device("cuda", 1)) == 70


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pools are of a GPU's memory")
def test_torch_tells_what_a_private_pool_keeps():
    device = torch.device("cuda", torch.cuda.current_device())
    before, pool = unused_in_private_pools(torch.cuda.memory_snapshot(), device), torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        torch.empty(64 << 20, dtype=torch.uint8, device=device)  # freed at once, and kept for the pool
    assert unused_in_private_pools(torch.cuda.memory_snapshot(), device) - before == 64 << 20


# --- predicted --------------------------------------------------------------------------------------------------------

BIG = ParameterSize(shape=(1024, 1024), itemsize=4)
FROZEN = ParameterSize(shape=(1024,), itemsize=2, trainable=False)


def test_a_prediction_per_phase_and_owner():
    predicted = predict([BIG, FROZEN], engine_weight_bytes=3, kv_cache_bytes=9, offloaded=["optimizer"])
    mib = 1 << 20
    policy = 4 * mib + 2048
    assert predicted.phases == {
        "edge": dict(zip(OWNERS, (policy, 0, 8 * mib, 3, 0, 0), strict=True)),
        "rollout": dict(zip(OWNERS, (policy, 0, 0, 3, 9, 0), strict=True)),
        "train": dict(zip(OWNERS, (policy, 4 * mib, 8 * mib, 0, 0, 0), strict=True)),
    }
    assert predicted.away == {
        "edge": ("gradients", "KV cache"),
        "rollout": ("gradients", "optimizer"),
        "train": ("engine weights", "KV cache"),
    }
    assert predicted.peak == ("train", policy + 12 * mib)
    assert predicted.notes == ()


def test_shared_weights_cost_nothing():
    predicted = predict([BIG], engine_weight_bytes=3, kv_cache_bytes=0, shared=True)
    assert all(held["engine weights"] == 0 for held in predicted.phases.values())
    assert [held["gradients"] for held in predicted.phases.values()] == [0, 0, 4 << 20]


def test_an_engine_that_does_not_sleep_keeps_its_weights_and_its_kv_cache():
    predicted = predict([BIG], engine_weight_bytes=3, kv_cache_bytes=5, asleep=())
    assert [held["engine weights"] for held in predicted.phases.values()] == [3, 3, 3]
    assert [held["KV cache"] for held in predicted.phases.values()] == [5, 5, 5]
    assert predicted.away == {"edge": ("gradients",), "rollout": ("gradients",), "train": ()}
    predicted = predict([BIG], engine_weight_bytes=3, kv_cache_bytes=5, asleep=["KV cache"])
    assert predicted.away == {"edge": ("gradients", "KV cache"), "rollout": ("gradients",), "train": ("KV cache",)}


@pytest.mark.parametrize("name", [name.value for name in OptimizerNames])
def test_every_optimizer_of_transformers_has_an_estimate_or_says_that_it_is_assumed(name):
    size, notes = optimizer_bytes(name, [BIG])
    assert 0 <= size <= 12 * BIG.elements
    known = not name.startswith(("galore", "apollo"))
    assert known == (not any("not known" in note for note in notes))
    assert name.startswith("paged") == any("pages" in note for note in notes)


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop])
def test_estimates_are_what_torch_allocates(make):
    module = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 16)).to(torch.bfloat16)
    optimizer = make(module.parameters())
    module(torch.ones(2, 64, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    made = sum(t.nbytes for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t) and t.dim())
    name = {"AdamW": "adamw_torch"}.get(make.__name__, make.__name__.lower())
    assert optimizer_bytes(name, parameter_sizes(module)) == (made, ())


def test_adafactor_is_estimated_as_transformers_makes_it():
    from transformers.optimization import Adafactor

    module = nn.Sequential(nn.Linear(64, 32), nn.Conv2d(3, 4, 5))
    optimizer = Adafactor(module.parameters(), lr=1e-3, relative_step=False, scale_parameter=False)
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    made = sum(t.nbytes for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t) and t.dim())
    assert optimizer_bytes("adafactor", parameter_sizes(module)) == (made, ())


def test_a_paged_optimizer_is_not_counted_as_away():
    predicted = predict(
        [BIG], optimizer="paged_adamw_8bit", engine_weight_bytes=0, kv_cache_bytes=0, offloaded=["optimizer"]
    )
    assert predicted.phases["rollout"]["optimizer"] > 0
    assert predicted.away["rollout"] == ("gradients",)


def test_sizes_count_tied_parameters_once():
    module = nn.ModuleList([nn.Linear(4, 8, bias=False), nn.Linear(4, 8, bias=False)])
    module[1].weight = module[0].weight.requires_grad_(False)
    assert parameter_sizes(module) == [ParameterSize(shape=(8, 4), itemsize=4, trainable=False)]


def test_a_run_that_cannot_fit_is_refused_before_it_starts():
    predicted = predict([BIG], engine_weight_bytes=2 << 20, kv_cache_bytes=3 * GIB, offloaded=["optimizer"])
    predicted.check(4 * GIB)
    with pytest.raises(
        MemoryPlanError, match=r"ROLLOUT needs 3.01 GiB even with gradients, optimizer away, and 2.00 GiB"
    ) as e:
        predicted.check(2 * GIB)
    assert e.value.owner == "KV cache"
    assert "vllm_gpu_memory_utilization" in str(e.value)
    tight = predict([BIG], engine_weight_bytes=10 << 20, kv_cache_bytes=0)
    with pytest.raises(MemoryPlanError, match="The weight sync needs"):
        tight.check(17 << 20)


def test_the_table_of_a_small_model_is_in_mib():
    lines = table(predict([BIG], engine_weight_bytes=0, kv_cache_bytes=1 << 18, shared=True))
    assert lines[0].startswith("memory, MiB")
    assert lines[-1] == "peak 16.00 MiB in train"


def test_the_table():
    predicted = predict(
        [ParameterSize(shape=(GIB,), itemsize=2)],
        optimizer="mystery",
        engine_weight_bytes=0,
        kv_cache_bytes=20 * GIB,
        offloaded=["optimizer"],
        shared=True,
    )
    assert table(predicted) == [
        "memory, GiB         edge  rollout    train",
        "policy              2.00     2.00     2.00",
        "gradients           away     away     2.00",
        "optimizer           4.00     away     4.00",
        "KV cache            away    20.00     away",
        "total               6.00    22.00     8.00",
        "peak 22.00 GiB in rollout",
        "note: the state of mystery is not known: taken for AdamW's, two tensors per parameter",
    ]


# --- planned ----------------------------------------------------------------------------------------------------------


@given(st.dictionaries(st.sampled_from(OWNERS), amounts), st.integers(-100, 400))
def test_a_plan_frees_what_is_missing_and_moves_no_more_than_it_must(held, missing):
    movable = [o for o in LEAVING if held.get(o)]
    plan = plan_offload(held, missing)
    assert plan == movable[: len(plan)]
    if sum(held[o] for o in movable) < missing:
        assert plan == movable
    else:
        assert sum(held[o] for o in plan) >= missing
    if plan:
        assert sum(held[o] for o in plan[:-1]) < missing
