"""GRPO with every flag of TRL and of HybridConfig, and a plugin that prints what each weight sync proved."""

import random

from datasets import Dataset
from trl import GRPOConfig, ModelConfig, TrlParser, get_peft_config
from trlx_hybrid import GRPOTrainer, HybridConfig, hookimpl


class Proofs:
    @hookimpl
    def trlx_sync_end(self, session, report):
        if session.ranks.rank == 0:
            print(f"PROOF path={report.weights} verified={report.verified} gap={report.logprob_gap}", flush=True)


def reward(completion_ids, **kwargs):
    return [float(sum(ids) % 7) for ids in completion_ids]


if __name__ == "__main__":
    config, model, hybrid = TrlParser((GRPOConfig, ModelConfig, HybridConfig)).parse_args_and_config()
    config.model_init_kwargs = {"dtype": model.dtype, "attn_implementation": model.attn_implementation}
    draw = random.Random(0)
    rows = Dataset.from_dict({"prompt": [f"what follows {draw.randrange(10**6)}? " for _ in range(64)]})
    trainer = GRPOTrainer(
        model=model.model_name_or_path,
        reward_funcs=reward,
        args=config,
        train_dataset=rows,
        eval_dataset=rows.select(range(8)),
        peft_config=get_peft_config(model),
        hybrid=hybrid,
        plugins=[Proofs()],
    )
    trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
