"""GRPO with a reward model in Ray actors, on a CPU in a minute. The trainer's process never loads the reward model.

    python examples/ray_remote_reward.py
    trlx-hybrid launch --cpu --processes-per-node 2 examples/ray_remote_reward.py

Run as a plain script, it starts a Ray cluster on this machine, which ends with it. The judge is a small classifier with
random weights: what it prefers means nothing, but GRPO finds it out, and the mean reward rises.
"""

import argparse
import tempfile
from pathlib import Path

from ray_toy import train
from trlx_hybrid.testing.models import character_tokenizer
from trlx_hybrid_ray.remote import remote_reward


def save_judge(folder: Path) -> str:
    """Save a reward model and return its path; it stands for one that you have, on disk or on the Hub."""
    import torch
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    torch.manual_seed(0)
    tokenizer = character_tokenizer()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen3Config(vocab_size=len(tokenizer), num_labels=1, pad_token_id=tokenizer.pad_token_id, **sizes, **heads)
    judge = Qwen3ForSequenceClassification(config)
    judge.score.weight.data.mul_(50)  # larger differences between its scores
    judge.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    with tempfile.TemporaryDirectory() as folder, remote_reward(save_judge(Path(folder) / "judge")) as judge:
        train("ray_remote_reward", judge)
