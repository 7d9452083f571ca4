"""GRPO in an environment of several turns."""

from datasets import Dataset
from trl import GRPOConfig, ModelConfig, TrlParser
from trlx_hybrid import GRPOTrainer, HybridConfig
from trlx_hybrid_multiturn import Step, episode_reward, episodes


class Echo:
    """Three turns; each is worth a point for a word that ends in an even number of letters."""

    async def reset(self, row):
        self.turns = 0
        return row["opening"]

    async def step(self, completion):
        self.turns += 1
        return Step(observation=f"turn {self.turns}", reward=float(len(completion) % 2 == 0), done=self.turns == 3)


if __name__ == "__main__":
    config, model, hybrid = TrlParser((GRPOConfig, ModelConfig, HybridConfig)).parse_args_and_config()
    config.model_init_kwargs = {"dtype": model.dtype, "attn_implementation": model.attn_implementation}
    prompt = [{"role": "user", "content": ""}]
    rows = Dataset.from_list([{"prompt": prompt, "opening": f"begin with {n}"} for n in range(64)])
    trainer = GRPOTrainer(
        model=model.model_name_or_path,
        reward_funcs=episode_reward,
        args=config,
        rollout_func=episodes(Echo, max_turns=3),
        train_dataset=rows,
        eval_dataset=rows.select(range(8)),
        hybrid=hybrid,
    )
    trainer.train()
