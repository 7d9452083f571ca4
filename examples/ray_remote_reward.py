"""GRPO with a reward model in Ray actors, on a CPU in a minute. The trainer's process never loads the reward model.

    python examples/ray_remote_reward.py
    trlx-hybrid launch --cpu --processes-per-node 2 examples/ray_remote_reward.py

Started as a plain script, a Ray cluster comes up on this machine and ends with it. The judge is a small classifier with
random weights: what it prefers means nothing, but GRPO finds it out, and the mean reward rises.
"""

import tempfile
from pathlib import Path

from datasets import Dataset
from trl import GRPOConfig
from trlx_hybrid import GRPOTrainer
from trlx_hybrid.testing.models import character_tokenizer, tiny_model
from trlx_hybrid_ray.remote import remote_reward

STEPS = 30


def save_judge(folder: Path) -> str:
    """Stands for a reward model that you have: a path, or a name on the Hub."""
    import torch
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    torch.manual_seed(0)
    tokenizer = character_tokenizer()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen3Config(vocab_size=len(tokenizer), num_labels=1, pad_token_id=tokenizer.pad_token_id, **sizes, **heads)
    judge = Qwen3ForSequenceClassification(config)
    judge.score.weight.data.mul_(50)  # opinions strong enough to see
    judge.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def main() -> None:
    """Train against the judge."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=tiny_model(),
            processing_class=character_tokenizer(),
            reward_funcs=remote_reward(save_judge(Path(folder) / "judge"), workers=1),
            train_dataset=Dataset.from_dict({"prompt": [f"{i} + {i + 1} =" for i in range(64)]}),
            args=GRPOConfig(
                output_dir="runs/ray_remote_reward",
                max_steps=STEPS,
                per_device_train_batch_size=32,
                num_generations=8,
                max_completion_length=8,
                learning_rate=2e-3,
                use_cpu=True,
                bf16=False,
                logging_steps=5,
                save_strategy="no",
                disable_tqdm=True,
                report_to="none",
            ),
        )
        trainer.train()
    rewards = [log["reward"] for log in trainer.state.log_history if "reward" in log]
    if trainer.accelerator.is_main_process:
        print(f"reward {rewards[0]:.2f} -> {rewards[-1]:.2f}")


if __name__ == "__main__":
    main()
