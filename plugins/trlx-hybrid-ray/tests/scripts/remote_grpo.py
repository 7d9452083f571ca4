"""GRPO with engines in Ray actors; prints rewards, and seconds and bytes of each weight sync.

    python remote_grpo.py OUT [engine=remote] [replicas=1] [tp=1] [model=tiny|1.5b] [steps=4] [backend=auto] [fsdp=1]
        [lose=N] [judge=N] [staleness=0]
    trlx-hybrid launch --gpus-per-node 1 remote_grpo.py OUT [...]

Without GPUs everything on the CPU. Under `trlx-hybrid launch` every rank trains, and all sample from the same engines,
on the GPUs that are left, with weights by `nccl`. Engines start without CUDA graphs, which would take minutes. With
`lose` the engines' processes are killed LOSE_SECONDS after sync N began. With `judge` the reward is computed in N Ray
actors of each rank, while others are sampled. With `staleness` rows stay in flight, and engines sample while the ranks
train.
"""

import json
import os
import sys
import threading
from pathlib import Path

import psutil
import torch
from trl import GRPOConfig
from trlx_hybrid import GRPOTrainer, HybridConfig, hookimpl
from trlx_hybrid.testing.models import character_tokenizer, sorting_prompts, tiny_model
from trlx_hybrid_ray.remote import remote_reward

from tests.support.fsdp import use_fsdp_on_cpu

SHAPES = {
    "tiny": {},
    "1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 4096,
        "initializer_range": 0.02,
    },
}


LOSE_SECONDS = 0.03


def kill_engines(session):
    """All processes of all engines, at once."""
    for member in list(session.live_engine.pool.replicas.values()):
        actor = psutil.Process(int(member.where.rpartition("pid ")[2]))
        for process in [*actor.children(recursive=True), actor]:
            process.kill()


class Syncs:
    """Says what each weight sync took, and keeps the prompt and the staleness of each row."""

    def __init__(self, lose):
        self.reports, self.rows, self._lose = [], [], lose

    @hookimpl
    def trlx_sync_start(self, session, plan):
        if plan.version == self._lose and session.ranks.rank == 0:
            threading.Timer(LOSE_SECONDS, kill_engines, (session,)).start()

    @hookimpl
    def trlx_sync_end(self, session, report):
        self.reports.append(report)
        if session.ranks.rank == 0:
            gap = "" if report.logprob_gap is None else f", log-prob gap {report.logprob_gap:.2g}"
            seconds, size = report.seconds, report.bytes / 1e9
            print(f"sync {report.version}: {seconds:.3f} s, {size:.3f} GB, {report.verified} checked{gap}", flush=True)

    @hookimpl
    def trlx_rollout_end(self, session, trajectories):
        now = session.weight_version
        self.rows.append([(t.prompt_ids, [now - v for v in t.weight_versions or ()]) for t in trajectories])


def main():
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    options = {"engine": "remote", "replicas": "1", "tp": "1", "model": "tiny", "steps": "4"}
    options |= {"backend": "auto", "lose": "-1", "judge": "0", "staleness": "0"}
    options |= dict(option.split("=") for option in sys.argv[2:])
    cuda, rank = torch.cuda.is_available(), int(os.environ.get("RANK", "0"))
    if options.get("fsdp") and not cuda:
        use_fsdp_on_cpu()
    rewards, syncs = [], Syncs(int(options["lose"]))

    def digits(completions, **_):
        return [float(sum(c.isdigit() for c in text)) + len(text) / 100 for text in completions]

    def recorded(**given):
        rewards.append(digits(**given))
        return rewards[-1]

    judges = int(options["judge"])
    reward = remote_reward(digits, workers=judges, cpus=0.5, early=True) if judges else recorded

    if options["engine"] == "remote":
        given = {
            "replicas": int(options["replicas"]),
            "tensor_parallel_size": int(options["tp"]),
            "server_options": {"enforce_eager": True} | ({"kv_cache_memory_bytes": 1 << 30} if cuda else {}),
        }
        hybrid = HybridConfig(
            engine="remote",
            engine_options=given,
            weights="transfer",
            weights_options={"backend": options["backend"]},
            verify_every=1,
            rollout_options={"max_staleness": int(options["staleness"])},
        )
    else:
        hybrid = HybridConfig(engine="vllm", verify_every=1)
    trainer = GRPOTrainer(
        model=tiny_model(dtype=torch.bfloat16 if cuda else torch.float32, **SHAPES[options["model"]]),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=str(out / "run"),
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=16,
            max_steps=int(options["steps"]),
            learning_rate=1e-2,
            optim="sgd",
            logging_steps=1,
            report_to=[],
            use_cpu=not cuda,
            bf16=cuda,
            disable_tqdm=True,
            vllm_max_model_length=64,
            save_strategy="no",
        ),
        train_dataset=sorting_prompts(64),
        processing_class=character_tokenizer(),
        hybrid=hybrid,
        plugins=[syncs],
    )
    trainer.train()
    if judges:
        rewards += [[log["reward"]] for log in trainer.state.log_history if "reward" in log]
    report = {
        "weights": trainer.session.weights.name,
        "sharded": all(hasattr(p, "full_tensor") for p in trainer.model.parameters()),
        "rewards": rewards,
        "rows": syncs.rows,
        "losses": [log["loss"] for log in trainer.state.log_history if "loss" in log],
        "sync_seconds": [r.seconds for r in syncs.reports],
        "sync_bytes": [r.bytes for r in syncs.reports],
    }
    trainer.session.close()
    (out / f"report.{rank}").write_text(json.dumps(report))
    print(f"rank {rank}: rewards {[round(sum(batch) / len(batch), 3) for batch in rewards]}", flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
