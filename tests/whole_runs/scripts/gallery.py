"""GRPO in an environment that shows pictures, at first and after each turn."""

from datasets import Dataset
from grpo import Proofs
from trl import GRPOConfig, ModelConfig, TrlParser
from trlx_hybrid import GRPOTrainer, HybridConfig
from trlx_hybrid_multiturn import Step, episode_reward, episodes

from tests.support.vision import picture


class Gallery:
    """Three turns; each is worth a point if it is of an even number of characters."""

    def reset(self, row):
        self.turns, self.squares = 0, row["squares"]
        return self.shown()

    def step(self, completion):
        self.turns += 1
        return Step(observation=self.shown(), reward=float(len(completion) % 2 == 0), done=self.turns == 3)

    def shown(self):
        image = {"type": "image", "image": picture("qwen3_vl", (self.squares + self.turns) % 4, self.turns)}
        return [{"role": "user", "content": [image, {"type": "text", "text": "how many? "}]}]


if __name__ == "__main__":
    config, model, hybrid = TrlParser((GRPOConfig, ModelConfig, HybridConfig)).parse_args_and_config()
    config.model_init_kwargs = {"dtype": model.dtype, "attn_implementation": model.attn_implementation}
    prompt = [{"role": "user", "content": "look: "}]
    rows = Dataset.from_list([{"prompt": prompt, "squares": n % 4} for n in range(64)])
    trainer = GRPOTrainer(
        model=model.model_name_or_path,
        reward_funcs=episode_reward,
        args=config,
        rollout_func=episodes(Gallery, max_turns=3),
        train_dataset=rows,
        eval_dataset=rows.select(range(8)),
        hybrid=hybrid,
        plugins=[Proofs()],
    )
    trainer.train()
