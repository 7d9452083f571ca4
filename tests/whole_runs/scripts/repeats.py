"""The same prompts, seeds and weights, sampled again and again: each rollout is the first one, bit for bit.

repeats.py MODEL sleep|awake graphs|eager COUNT
"""

import hashlib
import json
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trlx_hybrid import HybridEngine
from trlx_hybrid.contract.types import Request, Sampling

path, sleep, graphs, count = sys.argv[1], sys.argv[2] == "sleep", sys.argv[3] == "graphs", int(sys.argv[4])
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
model.to("cuda" if torch.cuda.is_available() else "cpu")
ragged = Sampling(max_tokens=48, logprobs=0, extra={"stop_token_ids": list(range(10, 16))})
options = {"enable_sleep_mode": sleep, "enforce_eager": not graphs, "max_model_len": 128, "max_num_seqs": 32}
options["engine_args"] = {"enable_prefix_caching": False}  # or the first rollout computes prompts that others find
engine = HybridEngine(model, tokenizer, sampling=ragged, engine_options=options)
prompts = [tokenizer(f"what follows {n * 7919}? ")["input_ids"] for n in range(2)]
requests = [Request(prompt_ids=prompts[row // 4], seed=row) for row in range(8)]
rollouts = []
for _ in range(count):
    with engine.rollout_context():
        completions = engine.session.live_engine.generate(requests, ragged)
    rollouts.append([(c.token_ids, [values[0] for values in c.logprobs]) for c in completions])
first, apart = rollouts[0], 0
for number, rollout in enumerate(rollouts):
    for row, ((ids, logprobs), (known_ids, known)) in enumerate(zip(rollout, first, strict=True)):
        if (ids, logprobs) != (known_ids, known):
            at = [n for n, (one, other) in enumerate(zip(logprobs, known, strict=False)) if one != other]
            values = [(n, logprobs[n], known[n]) for n in at[:3]]
            print(
                f"APART rollout {number} row {row}: {len(at)} of {len(known)} log-probs, {values}, {ids == known_ids}"
            )
            apart += 1
print(f"FIRST {hashlib.sha256(json.dumps(first).encode()).hexdigest()[:12]}")
print(f"REPEATED {count} rollouts of {sorted(len(ids) for ids, _ in first)} tokens, {apart} rows apart")
