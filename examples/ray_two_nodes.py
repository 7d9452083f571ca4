"""GRPO on two nodes of a Ray cluster, simulated on this machine; the same file runs on real ones, and without Ray.

    python examples/ray_two_nodes.py
    trlx-hybrid launch --nodes 2 --cpu --processes-per-node 1 --address auto examples/ray_two_nodes.py
    accelerate launch examples/ray_two_nodes.py

The first command starts a cluster of two nodes here, and runs the second. A tiny model with random weights learns to
answer in digits: the last line printed has the first and the last mean reward.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path


def digits(completions: list[str], **_: object) -> list[float]:
    """Return the share of the characters that are digits."""
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def launch_on_two_simulated_nodes() -> int:
    """Start two raylets on loopback, with a token of their own and a temporary folder for all files, and launch."""
    from ray.cluster_utils import Cluster
    from trlx_hybrid_ray import token

    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        os.environ["RAY_TMPDIR"] = folder
        with token.presented(token.make(Path(folder)), everywhere=False):
            nodes = Cluster()
            try:
                for _ in range(2):
                    nodes.add_node(num_cpus=1, object_store_memory=80 << 20, node_ip_address="127.0.0.1")
                command = [sys.executable, "-m", "trlx_hybrid", "launch", "--nodes", "2", "--cpu"]
                command += ["--processes-per-node", "1", "--address", nodes.address, __file__]
                return subprocess.call(command)
            finally:
                nodes.shutdown()


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    if "ACCELERATE_MIXED_PRECISION" in os.environ:  # set by either launcher
        from ray_toy import train

        train("ray_two_nodes", digits, use_vllm=True, vllm_mode="colocate", vllm_max_model_length=32)
    else:
        sys.exit(launch_on_two_simulated_nodes())
