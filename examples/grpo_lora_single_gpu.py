"""GRPO with LoRA on one GPU: the base model is in memory once, and a weight sync moves the adapter alone.

    python examples/grpo_lora_single_gpu.py --model_name_or_path Qwen/Qwen3-4B --dataset_name trl-lib/DeepMath-103K \
        --output_dir runs/grpo-lora

The header says `weights=lora`: vLLM lives in this process, its base weights are the trainer's own memory, and the
adapter is written into vLLM's slots without being merged. While it samples, the KV cache takes what training left free;
while it trains, that memory is the trainer's.

The defaults below are this script's; each is a flag as well, as are all others of TRL's GRPOConfig and ModelConfig and
of HybridConfig.
"""

from datasets import load_dataset
from trl import GRPOConfig, ModelConfig, ScriptArguments, TrlParser, get_peft_config
from trl.rewards import accuracy_reward
from trlx_hybrid import GRPOTrainer, HybridConfig

if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig, HybridConfig))
    parser.set_defaults(
        engine="vllm",
        vllm_enable_sleep_mode=True,  # the KV cache and the trainer take turns
        vllm_max_model_length=2048,
        max_completion_length=1024,
        use_peft=True,
        lora_target_modules=["all-linear"],
        dtype="bfloat16",  # of the frozen base; the adapter is kept in float32
        learning_rate=1e-5,  # ten times that of full fine-tuning
        gradient_accumulation_steps=8,  # 64 completions per step: 8 prompts with 8 generations
        logging_steps=1,
    )
    script, config, model, hybrid = parser.parse_args_and_config()
    config.model_init_kwargs = {"dtype": model.dtype, "attn_implementation": model.attn_implementation}
    dataset = load_dataset(script.dataset_name, name=script.dataset_config)
    trainer = GRPOTrainer(
        model=model.model_name_or_path,
        reward_funcs=accuracy_reward,
        args=config,
        train_dataset=dataset[script.dataset_train_split],
        peft_config=get_peft_config(model),
        hybrid=hybrid,
    )
    trainer.train()
    trainer.save_model(config.output_dir)
