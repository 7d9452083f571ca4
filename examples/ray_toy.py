"""The training run that the Ray examples share: GRPO teaches a tiny random model to please any reward, on a CPU."""

from typing import Any

from datasets import Dataset
from trl import GRPOConfig
from trlx_hybrid import GRPOTrainer
from trlx_hybrid.testing.models import character_tokenizer, tiny_model


def train(name: str, reward: Any, **settings: Any) -> None:
    """Train against a reward, and print the first and the last mean reward."""
    arguments = {
        "output_dir": f"runs/{name}",
        "max_steps": 30,
        "per_device_train_batch_size": 32,
        "num_generations": 8,
        "max_completion_length": 8,
        "learning_rate": 2e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
    }
    trainer = GRPOTrainer(
        model=tiny_model(),
        processing_class=character_tokenizer(),
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": [f"{i} + {i + 1} =" for i in range(64)]}),
        args=GRPOConfig(**arguments | settings),
    )
    trainer.train()
    rewards = [log["reward"] for log in trainer.state.log_history if "reward" in log]
    if trainer.accelerator.is_main_process:
        print(f"reward {rewards[0]:.2f} -> {rewards[-1]:.2f} on {trainer.accelerator.num_processes} ranks")
