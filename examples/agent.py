"""GRPO for an agent that speaks to an API, on a CPU in minutes: the task of calculator.py, with a loop of its own.

    pip install 'trlx-hybrid-multiturn[gateway]' openai
    accelerate launch examples/agent.py

Add `--use_peft --lora_target_modules all-linear` for LoRA. On a CPU, `OMP_NUM_THREADS=1 torchrun --standalone
--nproc_per_node 2 examples/agent.py --use_cpu` trains with two processes.

`solve` is an agent as it is written for any server with OpenAI's API: its client asks, its loop runs the calculator,
and its last message is the answer. `agents` gives it the address of the engine in this process. The model is trained on
what it answered, token for token. All else is as in calculator.py.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from calculator import GYM, UNREADABLE, ScriptArguments, calculate, dataset, learn_to_calculate
from openai import AsyncOpenAI, BadRequestError
from quickstart import quiet
from toy_chat import ToyConfig, train_and_report
from transformers.utils import get_json_schema
from trl import ModelConfig, TrlParser, get_peft_config
from trlx_hybrid import GRPOTrainer, HybridConfig
from trlx_hybrid_multiturn.gateway import agents, episode_reward

CLIENT = AsyncOpenAI(base_url="http://localhost", api_key="none")  # of all episodes; each has an address of its own
TOOLS = [get_json_schema(calculate)]


@dataclass
class AgentConfig(ToyConfig):
    """The toy's defaults, with the folder of this run."""

    output_dir: str = field(default="runs/agent", metadata={"help": "The run folder."})


def result_of(call: Any) -> str:
    """Return what the model is told of a call of the calculator."""
    try:
        return str(calculate(**json.loads(call.function.arguments)))
    except (TypeError, ValueError):
        return str({"error": UNREADABLE})


async def solve(base_url: str, row: dict[str, Any]) -> float:
    """Let the model calculate until it answers. Returns 1 for an answer that reasoning-gym finds right, else 0."""
    client, messages = CLIENT.with_options(base_url=base_url), list(row["prompt"])
    while True:
        try:
            answer = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        except BadRequestError as error:
            if error.code != "context_length_exceeded":
                raise
            return 0.0
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return float(GYM.score_answer((message.content or "").strip(), row["task"]) == 1.0)
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result_of(call)})


def main() -> None:
    """Learn from demonstrations, then train the agent with GRPO."""
    script, config, of_model = TrlParser((ScriptArguments, AgentConfig, ModelConfig)).parse_args_and_config()
    quiet()
    tokenizer, model, training, heldout = learn_to_calculate(script, config)
    trainer = GRPOTrainer(
        model=model,
        args=config,
        rollout_func=agents(solve),
        reward_funcs=episode_reward,
        train_dataset=dataset(training),
        eval_dataset=dataset(heldout),
        processing_class=tokenizer,
        peft_config=get_peft_config(of_model),
        hybrid=HybridConfig(engine="vllm", rollout_options={"progress": False}),  # training has its own progress bars
    )
    train_and_report(trainer, f"{len(heldout)} held-out multiplications")


if __name__ == "__main__":
    main()
