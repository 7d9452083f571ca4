"""A reward function with a mistake that shows late, on one rank of two."""

import os

from datasets import Dataset
from trl import GRPOConfig, ModelConfig, TrlParser
from trlx_hybrid import GRPOTrainer, HybridConfig

calls = 0


def reward(completion_ids, **kwargs):
    global calls
    calls += 1
    if calls == 3 and os.environ.get("RANK", "0") == "0":
        raise KeyError("the third batch has no such column")
    return [float(sum(ids) % 7) for ids in completion_ids]


if __name__ == "__main__":
    config, model, hybrid = TrlParser((GRPOConfig, ModelConfig, HybridConfig)).parse_args_and_config()
    config.model_init_kwargs = {"dtype": model.dtype, "attn_implementation": model.attn_implementation}
    rows = Dataset.from_dict({"prompt": [f"what follows {n}? " for n in range(64)]})
    trainer = GRPOTrainer(
        model=model.model_name_or_path,
        reward_funcs=reward,
        args=config,
        train_dataset=rows,
        eval_dataset=rows.select(range(8)),
        hybrid=hybrid,
    )
    trainer.train()
