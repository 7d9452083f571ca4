"""GRPO on two nodes of a Ray cluster, simulated on this machine; the same file runs on real ones, and without Ray.

    python examples/ray_two_nodes.py
    trlx-hybrid launch --nodes 2 --cpu --processes-per-node 1 --address auto examples/ray_two_nodes.py
    accelerate launch examples/ray_two_nodes.py

The first line starts a cluster of two nodes here, and types the second. A tiny model with random weights learns to
answer in digits: the last line says from which mean reward to which.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS = 20


def digits(completions: list[str], **_: object) -> list[float]:
    """Share of the characters that are digits."""
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def train() -> None:
    """What every rank runs: plain TRL, with vLLM inside the process."""
    from datasets import Dataset
    from trl import GRPOConfig
    from trlx_hybrid import GRPOTrainer
    from trlx_hybrid.testing.models import character_tokenizer, tiny_model

    trainer = GRPOTrainer(
        model=tiny_model(),
        processing_class=character_tokenizer(),
        reward_funcs=digits,
        train_dataset=Dataset.from_dict({"prompt": [f"{i} + {i + 1} =" for i in range(64)]}),
        args=GRPOConfig(
            output_dir="runs/ray_two_nodes",
            max_steps=STEPS,
            per_device_train_batch_size=32,
            num_generations=8,
            max_completion_length=8,
            learning_rate=2e-3,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_max_model_length=32,
            use_cpu=True,
            bf16=False,
            logging_steps=2,
            save_strategy="no",
            disable_tqdm=True,
            report_to="none",
        ),
    )
    trainer.train()
    rewards = [log["reward"] for log in trainer.state.log_history if "reward" in log]
    if trainer.accelerator.is_main_process:
        print(f"reward {rewards[0]:.2f} -> {rewards[-1]:.2f} on {trainer.accelerator.num_processes} ranks")


def launch_on_two_simulated_nodes() -> int:
    """Two raylets on loopback, with a token of their own and nothing outside of a temporary folder."""
    from ray.cluster_utils import Cluster
    from trlx_hybrid_ray import token
    from trlx_hybrid_ray.internals import reachable

    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        os.environ["RAY_TMPDIR"] = folder
        with reachable(everywhere=False), token.presented(token.make(Path(folder))):
            nodes = Cluster()
            try:
                for _ in range(2):
                    nodes.add_node(num_cpus=1, object_store_memory=80 << 20, node_ip_address="127.0.0.1")
                command = [sys.executable, "-m", "trlx_hybrid.cli", "launch", "--nodes", "2", "--cpu"]
                command += ["--processes-per-node", "1", "--address", nodes.address, __file__]
                return subprocess.call(command)
            finally:
                nodes.shutdown()


if __name__ == "__main__":
    if "ACCELERATE_MIXED_PRECISION" in os.environ:  # set by either launcher
        train()
    else:
        sys.exit(launch_on_two_simulated_nodes())
