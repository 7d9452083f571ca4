"""GRPO with two tools, as in TRL's documentation."""

from datasets import Dataset
from trl import GRPOConfig, ModelConfig, TrlParser
from trlx_hybrid import GRPOTrainer, HybridConfig


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


async def fetch(key: str) -> str:
    """Look a word up.

    Args:
        key: the word.
    """
    return key[::-1]


def called(completions, **kwargs):
    return [float(sum(message["role"] == "tool" for message in messages)) for messages in completions]


if __name__ == "__main__":
    config, model, hybrid = TrlParser((GRPOConfig, ModelConfig, HybridConfig)).parse_args_and_config()
    config.model_init_kwargs = {"dtype": model.dtype, "attn_implementation": model.attn_implementation}
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": f"add {n} and {n + 1}"}]} for n in range(64)])
    trainer = GRPOTrainer(
        model=model.model_name_or_path,
        reward_funcs=called,
        args=config,
        train_dataset=rows,
        eval_dataset=rows.select(range(8)),
        tools=[add, fetch],
        hybrid=hybrid,
    )
    trainer.train()
