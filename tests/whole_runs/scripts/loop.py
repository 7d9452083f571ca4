"""A training loop without a trainer."""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trlx_hybrid import HybridEngine

path, sleep = sys.argv[1], sys.argv[2] == "sleep"
device = "cuda" if torch.cuda.is_available() else "cpu"
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
options = {"enable_sleep_mode": sleep, "max_model_len": 128, "max_num_seqs": 32}
engine = HybridEngine(model, tokenizer, optimizer, max_tokens=32, engine_options=options)
prompts = [tokenizer(f"count to {n}:")["input_ids"] for n in range(4)]
for step in range(7):
    with engine.rollout_context():
        completions = engine.generate(prompts, num_generations=4)
    with engine.train_context():
        loss = torch.zeros((), device=device)
        for index, completion in enumerate(completions):
            ids = torch.tensor([prompts[index // 4] + completion.token_ids], device=device)
            loss = loss + model(input_ids=ids, labels=ids).loss / len(completions)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print({"loss": f"{loss.item():.4f}", "step": step + 1}, flush=True)
