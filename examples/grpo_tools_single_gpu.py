"""GRPO with tools and LoRA on one GPU: conversations advance independently, and tools run beside the engine.

    python examples/grpo_tools_single_gpu.py --model_name_or_path Qwen/Qwen3-4B \
        --dataset_name trl-lib/DeepMath-103K --output_dir runs/grpo-tools

The header says `rollout=multi_turn (tools)`: while one conversation waits for its tool, the engine samples the others.
The tool computes, so it runs in processes of its own, where it takes no time from the engine's thread and can be killed
when it hangs. The model must have a chat template that TRL can train tool calls with, as Qwen3's.

The defaults below are this script's; each is a flag as well, as are all others of TRL's GRPOConfig and ModelConfig and
of HybridConfig. The dataset's prompts must be lists of messages.
"""

import ast
import operator

from datasets import load_dataset
from trl import GRPOConfig, ModelConfig, ScriptArguments, TrlParser, get_peft_config
from trl.rewards import accuracy_reward
from trlx_hybrid import GRPOTrainer, HybridConfig

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
}


def calculate(expression: str) -> str:
    """Work out an arithmetic expression.

    Args:
        expression: numbers, parentheses and the operators + - * / // % **
    """

    def value(node: ast.expr) -> int | float:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.operand))
        raise ValueError(f"cannot work out {ast.unparse(node)!r}")  # the model is shown this text

    return str(value(ast.parse(expression, mode="eval").body))


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig, HybridConfig))
    parser.set_defaults(
        engine="vllm",
        # A model may ask for 9**9**9: such a call is ended after ten seconds, and the model is shown an error.
        rollout_options={"tools": "process", "tool_timeout": 10},
        plugin_options={"trajectories": {"record": "trajectories.jsonl"}},
        vllm_enable_sleep_mode=True,  # the KV cache and the trainer take turns
        vllm_max_model_length=4096,
        max_completion_length=2048,  # of all turns and answers together
        max_tool_calling_iterations=5,
        use_peft=True,
        lora_target_modules=["all-linear"],
        dtype="bfloat16",  # of the frozen base; the adapter is kept in float32
        learning_rate=1e-5,  # ten times that of full fine-tuning
        gradient_accumulation_steps=8,  # 64 conversations per step: 8 prompts with 8 generations
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
        tools=[calculate],
        hybrid=hybrid,
    )
    trainer.train()
    trainer.save_model(config.output_dir)
