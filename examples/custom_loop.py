"""A training loop of your own: plain PyTorch, and a vLLM in the same process that shares the model's memory.

    python examples/custom_loop.py --model_name_or_path Qwen/Qwen3-0.6B
    torchrun --nproc_per_node 4 examples/custom_loop.py --model_name_or_path Qwen/Qwen3-0.6B
    accelerate launch --mixed_precision bf16 examples/custom_loop.py --model_name_or_path Qwen/Qwen3-0.6B

It is REINFORCE on answers that count upward from one, with the mean of each prompt's answers as baseline. Every process
samples for four prompts of its own; gradients are averaged, so all have the same weights.
"""

import re
from dataclasses import dataclass, field

import torch
from accelerate import Accelerator
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser
from trlx_hybrid import HybridEngine


@dataclass
class Arguments:
    """The arguments of this script."""

    model_name_or_path: str = field(default="Qwen/Qwen3-0.6B", metadata={"help": "Model to train."})
    output_dir: str = field(default="runs/custom_loop", metadata={"help": "Where the trained model is saved."})
    steps: int = field(default=20, metadata={"help": "Optimizer steps."})
    num_generations: int = field(default=8, metadata={"help": "Answers per prompt."})
    max_tokens: int = field(default=64, metadata={"help": "Longest answer, in tokens."})
    learning_rate: float = field(default=1e-5, metadata={"help": "Learning rate of AdamW."})


def reward(text: str) -> float:
    """Return how many numbers of a text are at the place where they would be if it counted from one."""
    return float(sum(int(n) == place for place, n in enumerate(re.findall(r"\d{1,9}", text), start=1)))


def log_probs(model: torch.nn.Module, prompt: list[int], answers: list[list[int]]) -> torch.Tensor:
    """Return the log-probability of each answer to a prompt, (answers,)."""
    ids = pad_sequence([torch.tensor(prompt + answer) for answer in answers], batch_first=True)
    ids = ids.to(next(model.parameters()).device)
    scores = model(input_ids=ids).logits[:, len(prompt) - 1 : -1].float().log_softmax(-1)
    scores = scores.gather(-1, ids[:, len(prompt) :, None])[..., 0]
    return torch.stack([row[: len(answer)].sum() for row, answer in zip(scores, answers, strict=True)])


if __name__ == "__main__":
    (args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    accelerator = Accelerator()
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path, dtype=torch.float32)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=args.learning_rate))
    first = 5 + 4 * accelerator.process_index
    prompts = [tokenizer(f"Count to {n}:")["input_ids"] for n in range(first, first + 4)]

    options = {"enable_sleep_mode": True, "max_model_len": 128, "max_num_seqs": len(prompts) * args.num_generations}
    engine = HybridEngine(
        model, tokenizer, optimizer, max_tokens=args.max_tokens, engine_options=options, accelerator=accelerator
    )
    with engine:
        for step in range(args.steps):
            with engine.rollout_context():
                answers = [c.token_ids for c in engine.generate(prompts, args.num_generations)]
            groups = [answers[i : i + args.num_generations] for i in range(0, len(answers), args.num_generations)]
            rewards = torch.tensor([[reward(tokenizer.decode(ids)) for ids in group] for group in groups])
            advantages = (rewards - rewards.mean(1, keepdim=True)).to(accelerator.device)
            with engine.train_context():
                for prompt, group, advantage in zip(prompts, groups, advantages, strict=True):
                    accelerator.backward(-(advantage * log_probs(model, prompt, group)).mean() / len(prompts))
                optimizer.step()
                optimizer.zero_grad()
            everyone = accelerator.gather(rewards.mean().to(accelerator.device))
            accelerator.print(f"step {step}: reward {everyone.mean():.3f}")

    weights = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(
        args.output_dir, state_dict=weights, is_main_process=accelerator.is_main_process
    )
    accelerator.end_training()
