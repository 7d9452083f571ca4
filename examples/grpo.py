"""GRPO on any Hugging Face causal language model, sampling with the vLLM inside this process.

    accelerate launch examples/grpo.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/DeepMath-103K \
        --output_dir runs/grpo --use_vllm --vllm_mode colocate

Add `--use_peft --lora_r 16` for LoRA, and every other flag of TRL's GRPOConfig, ModelConfig and ScriptArguments.
`examples/grpo_trl.py` is the same script on TRL alone.
"""

from datasets import load_dataset
from trl import GRPOConfig, ModelConfig, ScriptArguments, TrlParser, get_peft_config
from trl.rewards import accuracy_reward
from trlx_hybrid import GRPOTrainer

if __name__ == "__main__":
    script, config, model = TrlParser((ScriptArguments, GRPOConfig, ModelConfig)).parse_args_and_config()
    dataset = load_dataset(script.dataset_name, name=script.dataset_config)
    config.model_init_kwargs = {"dtype": model.dtype, "attn_implementation": model.attn_implementation}
    trainer = GRPOTrainer(
        model=model.model_name_or_path,
        reward_funcs=accuracy_reward,
        args=config,
        train_dataset=dataset[script.dataset_train_split],
        eval_dataset=dataset[script.dataset_test_split] if config.eval_strategy != "no" else None,
        peft_config=get_peft_config(model),
    )
    trainer.train()
    trainer.save_model(config.output_dir)
