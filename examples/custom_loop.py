"""A training loop of your own: plain PyTorch, and a vLLM that shares the model's memory.

    python examples/custom_loop.py --model_name_or_path Qwen/Qwen3-0.6B
    torchrun --nproc_per_node 4 examples/custom_loop.py --model_name_or_path Qwen/Qwen3-0.6B
    accelerate launch examples/custom_loop.py --model_name_or_path Qwen/Qwen3-0.6B

REINFORCE with the mean of each group as baseline, for answers that count from one. Every process samples for its own
prompts; nothing below but `prepare` and the choice of prompts knows how many there are.
"""

import argparse
import re

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer
from trlx_hybrid import HybridEngine


def count(text: str) -> float:
    """How far the numbers of a text count upward from one."""
    numbers = [int(digits) for digits in re.findall(r"\d+", text)]
    return float(sum(number == place for place, number in enumerate(numbers, start=1)))


def log_prob(model: torch.nn.Module, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """Log-probability of a completion."""
    ids = torch.tensor([prompt + completion], device=next(model.parameters()).device)
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None]).sum()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_name_or_path", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--max_tokens", type=int, default=64)
    parser.add_argument("--learning_rate", type=float, default=1e-5)
    args = parser.parse_args()

    accelerator = Accelerator()
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path, dtype=torch.float32)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=args.learning_rate))
    tasks = [f"Count to {n}:" for n in range(5, 13)][accelerator.process_index :: accelerator.num_processes]
    prompts = [tokenizer(task)["input_ids"] for task in tasks]

    options = {"enable_sleep_mode": True, "max_model_len": 256, "max_num_seqs": len(prompts) * args.group}
    with HybridEngine(
        model, tokenizer, optimizer, max_tokens=args.max_tokens, engine_options=options, accelerator=accelerator
    ) as engine:
        for step in range(args.steps):
            with engine.rollout_context():
                completions = engine.generate(prompts, num_generations=args.group)
            with engine.train_context():
                rewards = torch.tensor([count(tokenizer.decode(c.token_ids)) for c in completions])
                advantages = rewards - rewards.view(-1, args.group).mean(1).repeat_interleave(args.group)
                for i, (completion, advantage) in enumerate(zip(completions, advantages.tolist(), strict=True)):
                    score = log_prob(model, prompts[i // args.group], completion.token_ids)
                    accelerator.backward(-advantage * score / len(completions))
                optimizer.step()
                optimizer.zero_grad()
            accelerator.print(f"step {step}: reward {accelerator.gather(rewards.mean()).mean():.3f}")
    accelerator.unwrap_model(model).save_pretrained("runs/custom_loop") if accelerator.is_main_process else None
