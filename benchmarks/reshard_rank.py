"""One process of the reshard benchmark: a policy under FSDP2, an engine, and the arms that sync the policy into it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from trlx_hybrid import HybridConfig, HybridEngine
from trlx_hybrid.plugins.builtin import GatherSync
from trlx_hybrid_reshard.options import ReshardOptions
from trlx_hybrid_reshard.planner.architectures import SHAPES
from trlx_hybrid_reshard.sync import ReshardSync

from .digest import digest
from .harness import Arm, Timed, alternate, synchronise
from .rollout import SCALES, tokenizer

NOISE = 1e-2
BUCKET = 256 << 20
CEILING_BYTES = 256 << 20
CEILING_ROUNDS = 5
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def shape_of(case: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model's shape, as fields of its config."""
    if case["model"] == "tiny":
        return {"model_type": "qwen2", **SCALES["tiny"].config}
    shape = dict(SHAPES[case["model"]])
    return shape | ({"num_hidden_layers": case["layers"]} if case["layers"] else {})


def build(case: Mapping[str, Any], device: torch.device) -> Any:
    """Build the policy under FSDP2."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = shape_of(case)
    torch.manual_seed(0)
    with torch.device(device):
        config = AutoConfig.for_model(fields.pop("model_type"), **fields, eos_token_id=0, pad_token_id=0)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, case["dtype"]))
    mesh = DeviceMesh(device.type, range(WORLD))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # frees the unsharded model's memory for the engine
    return model


class Gathering:
    """The arm that reshards as verl does, by gathering full tensors on every rank.

    It all-gathers a bucket at a time in the engine's dtype, with one collective and a copy per bucket. It assumes
    FSDP2's default sharding: chunks of rows, the last ones shorter.
    """

    def __init__(self, session: Any) -> None:
        self._session, self._world = session, dist.get_world_size()
        self._dtype = session.live_engine.dtype
        self._converts = session.policy.converts

    def sync(self) -> None:
        """Stream the policy through the engine's loader."""
        self._session.live_engine.load_weights(self._weights())

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        bucket: list[tuple[str, Any, int]] = []
        used = 0
        for name, p in shards_of(self._session.policy).items():
            rows = -(-p.shape[0] // self._world)
            elements = rows * (p.numel() // p.shape[0])
            if used and (used + elements) * self._world * self._dtype.itemsize > BUCKET:
                yield from self._gathered(bucket, used)
                bucket, used = [], 0
            bucket.append((name, p, elements))
            used += elements
        yield from self._gathered(bucket, used)

    def _gathered(self, bucket: list[tuple[str, Any, int]], used: int) -> Iterator[tuple[str, Tensor]]:
        device = bucket[0][1].device
        mine = torch.empty(used, dtype=self._dtype, device=device)
        parts = mine.split([elements for _, _, elements in bucket])  # type: ignore[no-untyped-call]
        local = [p.detach()._local_tensor.reshape(-1) for _, p, _ in bucket]
        torch._foreach_copy_([part[: t.numel()] for part, t in zip(parts, local)], local)
        everyone = torch.empty(self._world, used, dtype=self._dtype, device=device)
        dist.all_gather_into_tensor(everyone.view(-1), mine)
        start, full = 0, {}
        for name, p, elements in bucket:
            full[name] = everyone[:, start : start + elements].reshape(-1)[: p.numel()].view(p.shape)
            start += elements
        yield from (self._as_in_checkpoint(full) if self._converts else full).items()

    def _as_in_checkpoint(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors as in a checkpoint, with experts apart, as vLLM's loader wants them."""
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(self._session.policy.base, tensors)  # type: ignore[no-any-return]


def shards_of(policy: Any) -> dict[str, Any]:
    """Return the DTensors by name.

    It reshards first: FSDP2 leaves the root unsharded after a forward pass without a backward one.
    """
    for module in filter(lambda m: hasattr(m, "reshard"), policy.module.modules()):
        module.reshard()
    return dict(policy.base_parameters())


def another(session: Any) -> ReshardSync:
    """Return a second ReshardSync beside the session's own, which launches every copy by itself."""
    sync = ReshardSync(session, ReshardOptions(record=False))
    reason = sync.refuses()
    assert reason is None, reason
    sync.open()
    return sync


def arms_of(session: Any, peaks: dict[str, int], unrecorded: bool) -> list[Arm]:
    """Return the arms. Each syncs the same weights into the same engine, which slept before; each round changes them
    first.
    """
    from trlx_hybrid_vllm.private.engine import model_of

    engine, weights = session.live_engine, session.weights
    parameters = dict(model_of(engine.llm).named_parameters())
    at = -1

    def run(name: str, sync: Callable[[], object], turn: int) -> Timed:
        nonlocal at
        if turn != at:
            at = turn
            perturb(session.policy, turn)
            session.weights_changed()
        engine.wake("kv_cache")
        engine.sleep()
        engine.wake("weights")
        with torch.no_grad():
            for p in parameters.values():
                p.fill_(torch.nan)
        before = _allocated(reset=True)
        _barrier()
        started = time.perf_counter()
        sync()
        _barrier()
        seconds = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
        peaks[name] = max(peaks.get(name, 0), _allocated() - before)
        dist.all_reduce(seconds, dist.ReduceOp.MAX, group=_cpu_group())
        return Timed(float(seconds), digest(parameters.items()))

    gather = GatherSync(session.policy, session.live_engine).sync
    syncs = {"gather": gather, "gather-bucketed": Gathering(session).sync, "reshard": weights.sync}
    if unrecorded:
        syncs["reshard-unrecorded"] = another(session).sync
    return [Arm(name, partial(run, name, sync)) for name, sync in syncs.items()]


def perturb(policy: Any, turn: int) -> None:
    """Add noise to this rank's shards."""
    for number, p in enumerate(shards_of(policy).values()):
        local = p.detach()._local_tensor
        draw = torch.Generator(local.device).manual_seed((turn * 10_000 + number) * WORLD + RANK)
        local.add_(torch.randn(local.shape, generator=draw, device=local.device, dtype=local.dtype), alpha=NOISE)


def ceilings(device: torch.device) -> dict[str, float]:
    """Return the bytes per second and rank that point-to-point, an all-gather and a copy on the device reach here."""
    size = CEILING_BYTES if device.type == "cuda" else 1 << 20
    out = torch.ones(WORLD, size, dtype=torch.uint8, device=device)
    into = torch.empty_like(out)
    others = [rank for rank in range(WORLD) if rank != RANK]

    def exchange() -> None:
        operations = [dist.P2POp(dist.irecv, into[r], r) for r in others]
        for work in dist.batch_isend_irecv(operations + [dist.P2POp(dist.isend, out[r], r) for r in others]):
            work.wait()

    def gather() -> None:
        dist.all_gather_into_tensor(into.view(-1), out[0])

    return {
        "point_to_point_bytes_per_second": len(others) * size / _seconds(exchange),
        "all_gather_bytes_per_second": len(others) * size / _seconds(gather),
        "copy_bytes_per_second": WORLD * size / _seconds(lambda: into.copy_(out)),
    }


def _seconds(work: Callable[[], object]) -> float:
    """Return the shortest of several times, after a warm-up."""
    taken = []
    for _ in range(CEILING_ROUNDS + 1):
        _barrier()
        started = time.perf_counter()
        work()
        synchronise()
        taken.append(time.perf_counter() - started)
    return min(taken[1:])


_CPU: list[Any] = []


def _cpu_group() -> Any:
    if not _CPU:
        _CPU.append(dist.new_group(backend="gloo"))
    return _CPU[0]


def _barrier() -> None:
    """Wait for every rank and for idle devices, over NVLink if there is one: gloo's barrier takes a millisecond."""
    synchronise()
    dist.all_reduce(torch.zeros(1, device="cuda" if torch.cuda.is_available() else "cpu"))
    synchronise()


def _allocated(reset: bool = False) -> int:
    if not torch.cuda.is_available():
        return 0
    if reset:
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    return torch.cuda.max_memory_allocated()


def main(order: Mapping[str, Any]) -> None:
    case, cuda = order["case"], torch.cuda.is_available()
    device = torch.device("cuda", RANK) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cuda:nccl,cpu:gloo" if cuda else "gloo", device_id=device if cuda else None)
    _cpu_group()
    model = build(case, device)
    options = {"tensor_parallel_size": case["tp"], "dtype": "bfloat16", "enforce_eager": True}
    options |= {"enable_sleep_mode": True}
    options |= {"max_model_len": 256, "max_num_seqs": 8, "kv_cache_memory_bytes": 1 << 30 if cuda else 16 << 20}
    if hasattr(model.config, "num_experts"):
        options["engine_args"] = {"moe_backend": "triton"}  # on some GPUs vLLM's own choice lays experts out anew
    config = HybridConfig(engine="vllm", engine_options=options, weights="reshard")
    engine = HybridEngine(model, tokenizer(model.config.vocab_size), config=config, max_tokens=8)
    session: Any = engine.session
    started = time.perf_counter()
    with engine.rollout_context():  # builds the engine, and proves a first sync: bits and log-probs
        pass
    built = time.perf_counter() - started
    peaks: dict[str, int] = {}
    measured = alternate(
        arms_of(session, peaks, order["unrecorded"]), warmup=order["warmup"], repetitions=order["repetitions"]
    )
    moved: list[Any] = [None] * WORLD
    mine = (session.weights.prepared.received_bytes, session.weights.prepared.sent_bytes)
    dist.all_gather_object(moved, mine, group=_cpu_group())
    found = {
        "seconds": {m.arm: m.seconds for m in measured},
        "peak_bytes": peaks,
        "moved_bytes": moved,
        "floor_bytes": session.weights.prepared.floor_bytes,
        "summary": session.weights.summary,
        "built_seconds": built,
        **ceilings(device),
    }
    if RANK == 0:
        (Path(order["folder"]) / "found.json").write_text(json.dumps(found))
    engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
