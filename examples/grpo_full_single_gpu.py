"""Full fine-tuning with GRPO on one GPU: training state leaves the device while vLLM samples.

    python examples/grpo_full_single_gpu.py --model_name_or_path Qwen/Qwen3-1.7B --dataset_name trl-lib/DeepMath-103K \
        --output_dir runs/grpo-full

There are two ways to store the weights. `weights=auto` takes the one that the dtypes allow, and the header names it:

- `--dtype float32`, the default: a float32 master that is trained under bf16 autocast, and cast into vLLM's bf16
  weights before each rollout (`copy`). It takes 16 bytes per parameter in training.
- `--dtype bfloat16`: trainer and vLLM share one set of weights, and a sync moves nothing (`alias`). It takes 8 bytes
  per parameter. But a bf16 number has 8 significant bits: at the learning rates of RL an AdamW step is mostly smaller
  than half of the last bit and is rounded away. Choose it with a larger learning rate, or an optimizer that rounds
  stochastically.

In both, optimizer state and gradients leave the device if the KV cache needs their memory.
"""

from datasets import load_dataset
from trl import GRPOConfig, ModelConfig, ScriptArguments, TrlParser
from trl.rewards import accuracy_reward
from trlx_hybrid import GRPOTrainer, HybridConfig

if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig, HybridConfig))
    parser.set_defaults(
        engine="vllm",
        vllm_enable_sleep_mode=True,  # the KV cache and the trainer take turns
        vllm_max_model_length=2048,
        max_completion_length=1024,
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
        hybrid=hybrid,
    )
    trainer.train()
    trainer.save_model(config.output_dir)
