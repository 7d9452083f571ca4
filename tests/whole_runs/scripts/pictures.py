"""GRPO on pictures, as in TRL's documentation of vision-language models."""

from grpo import Proofs, reward
from transformers import AutoConfig
from trl import GRPOConfig, ModelConfig, TrlParser, get_peft_config
from trlx_hybrid import GRPOTrainer, HybridConfig

from tests.support.vision import counted_squares

if __name__ == "__main__":
    config, model, hybrid = TrlParser((GRPOConfig, ModelConfig, HybridConfig)).parse_args_and_config()
    config.model_init_kwargs = {"dtype": model.dtype, "attn_implementation": model.attn_implementation}
    rows = counted_squares(AutoConfig.from_pretrained(model.model_name_or_path).model_type, 64)
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
    trainer.train()
