"""Two models in one process: a few steps of the first, then of the second, then of the first again."""

import copy

from datasets import Dataset
from trl import GRPOConfig, ModelConfig, TrlParser
from trlx_hybrid import GRPOTrainer, HybridConfig


def reward(completion_ids, **kwargs):
    return [float(sum(ids) % 7) for ids in completion_ids]


if __name__ == "__main__":
    config, model, hybrid = TrlParser((GRPOConfig, ModelConfig, HybridConfig)).parse_args_and_config()
    config.model_init_kwargs = {"dtype": model.dtype, "attn_implementation": model.attn_implementation}
    rows = Dataset.from_dict({"prompt": [f"what follows {n}? " for n in range(64)]})

    def trainer(name, steps):
        args = copy.copy(config)
        args.output_dir, args.max_steps = f"{config.output_dir}/{name}", steps
        return GRPOTrainer(
            model=model.model_name_or_path,
            reward_funcs=reward,
            args=args,
            train_dataset=rows,
            eval_dataset=rows.select(range(8)),
            hybrid=hybrid,
        )

    first, second = trainer("first", 3), trainer("second", 7)
    first.train()
    second.train()
    first.args.max_steps = 6
    first.train(resume_from_checkpoint=True)
