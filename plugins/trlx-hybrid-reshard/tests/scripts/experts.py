"""Launched by test_experts.py: Qwen3-MoE under FSDP2 into the slices of vLLM's own model. Its loader runs; what a CPU
would repack afterwards is left as it was loaded.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from trlx_hybrid.policy.policy import Policy
from trlx_hybrid.testing.models import character_tokenizer, tiny_model
from trlx_hybrid_reshard.layouts import MeshLayout
from trlx_hybrid_reshard.options import ReshardOptions
from trlx_hybrid_reshard.plan import plan
from trlx_hybrid_reshard.planner.architectures import describe
from trlx_hybrid_reshard.sync import ReshardSync
from trlx_hybrid_vllm.arguments import write_without_weights
from trlx_hybrid_vllm.private.cpu import unlink_segments
from trlx_hybrid_vllm.private.models import refuses_writes
from trlx_hybrid_vllm.weights.loader import WeightLoader
from trlx_hybrid_vllm.weights.weight_map import WeightMap, regions

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
# What vLLM's worker sets before it makes process groups: on some CPUs its ranks share memory under this name.
os.environ.setdefault("VLLM_DIST_IDENT", f"experts-{os.environ['MASTER_PORT']}")
EXPERTS = {"num_experts": 6, "moe_intermediate_size": 64, "num_experts_per_tok": 2}


class Loaded:
    """An engine that is vLLM's model and its loader, and nothing that computes."""

    dtype, weights_lost, quantized = torch.bfloat16, True, False

    def __init__(self, policy, tp):
        from vllm.config import set_current_vllm_config
        from vllm.distributed import parallel_state
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.model_loader.utils import initialize_model
        from vllm.utils.torch_utils import set_default_torch_dtype

        with tempfile.TemporaryDirectory() as folder:
            write_without_weights(policy, Path(folder))
            config = EngineArgs(
                model=folder,
                dtype="bfloat16",
                enforce_eager=True,
                tensor_parallel_size=tp,
                distributed_executor_backend="external_launcher",
            ).create_engine_config()
            with set_current_vllm_config(config), set_default_torch_dtype(self.dtype):
                parallel_state.init_distributed_environment(WORLD, RANK, "env://", RANK, "gloo")
                parallel_state.ensure_model_parallel_initialized(tp, 1)
                unlink_segments(os.environ["VLLM_DIST_IDENT"])  # as it does then
                self.model = initialize_model(config)
        self.loader = WeightLoader(self.model)

    def regions(self, policy):
        assert self.loader.load(policy.full_weights()).unwritten == []
        return regions(self.model, WeightMap(policy, self.loader))

    def weights_written(self):
        self.weights_lost = False

    def poison(self):
        for p in self.model.parameters():
            p.data.fill_(torch.nan)

    def wrong(self, policy):
        """Tensors that are not where vLLM's loader would put them, and parameters with elements nobody wrote."""
        unwritten = [name for name, p in self.model.named_parameters() if p.isnan().any()]
        return self.loader.differing(policy.full_weights()) + unwritten


def boxes(found, name):
    return sorted([list(map(list, r.box)) for r in found.of[name]])


def refused(engine):
    """What is said against the model as it is, with the backend of a GPU in place, and with experts dealt out whole."""
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend as Backend

    experts = [m for m in engine.model.modules() if type(m).__name__ == "RoutedExperts"]
    seen = {"cpu": refuses_writes(engine.model)}
    for name in ("FLASHINFER_CUTLASS", "TRITON"):
        for module in experts:
            module.quant_method.unquantized_backend = Backend[name]
        seen[name] = refuses_writes(engine.model)
    parallel = experts[-1].moe_config.moe_parallel_config
    parallel.use_ep = True
    seen["dealt out"] = refuses_writes(engine.model)
    parallel.use_ep = False
    return seen


def main(folder):
    dist.init_process_group("gloo")
    model = tiny_model("qwen3_moe", **EXPERTS)
    described = describe(model.config)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    policy = Policy(lambda: model, character_tokenizer(), torch.device("cpu"), fsdp_version=2)
    engine = Loaded(policy, WORLD)
    session = SimpleNamespace(
        policy=policy,
        ranks=SimpleNamespace(rank=RANK, world=WORLD),
        live_engine=engine,
        weight_version=0,
    )
    sync = ReshardSync(session, ReshardOptions(deadline=20.0, bucket_bytes=20_000))
    seen = {"refuses": sync.refuses(), "refused": refused(engine)}
    sync.open()
    seen["sharded"] = all(isinstance(p, DTensor) for p in model.parameters())
    name = "model.layers.1.mlp.experts."
    seen["gate_up"] = boxes(sync._sides.regions, f"{name}gate_up_proj")
    seen["down"] = boxes(sync._sides.regions, f"{name}down_proj")
    seen["wrong"] = []
    for version in range(2):
        session.weight_version = version
        for p in model.parameters():
            p.data._local_tensor.add_(version * torch.rand(p.data._local_tensor.shape))
        engine.poison()
        report = sync.sync()
        seen["wrong"].append(engine.wrong(policy))
        seen["bytes"] = report.bytes
    seen["planned"] = plan(described, MeshLayout(fsdp=WORLD), MeshLayout(tp=WORLD).served(), RANK).floor_bytes
    (folder / f"rank{RANK}.json").write_text(json.dumps(seen))
    sync.release()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
