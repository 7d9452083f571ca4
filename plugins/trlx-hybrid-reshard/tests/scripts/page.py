"""Launched by test_looping.py, once per rank: the loop of docs/hybrid-engine.md that takes its layouts from mappings.

    page.py FOLDER

Its code is the page's own, unchanged. What the page leaves to its reader is a model that mostly says one of its turns
and ends it, so that few tokens are sampled.
"""

import json
import os
import re
import sys
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", TOKENIZERS_PARALLELISM="false")

import torch.distributed as dist
from trlx_hybrid.testing.chat import chat_tokenizer, chatty_model

RANK = int(os.environ["RANK"])
PAGE = Path(__file__).parents[4] / "docs/hybrid-engine.md"
TURNS = ["left", "right", "forward"]


def main(folder):
    dist.init_process_group("gloo")
    (code,) = [c for c in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "rollout_config=" in c]
    tokenizer = chat_tokenizer(TURNS)
    texts = ["a b", f"12 {RANK}45"], [f"{RANK}", "cd"]
    batches = [tokenizer(pair, padding=True, return_tensors="pt") for pair in texts]
    report = {"said": [], "gaps": []}

    def loss(model, output_ids):
        asked = batches[len(report["said"])]["input_ids"]
        length = asked.shape[1]
        assert output_ids[:, :length].equal(asked)
        report["said"].append(tokenizer.batch_decode(output_ids[:, length:], skip_special_tokens=True))
        present = output_ids != tokenizer.pad_token_id
        logits = model(input_ids=output_ids, attention_mask=present.long()).logits
        scores = logits.detach()[:, length - 1 : -1]  # each position's are of the next token
        below = scores.amax(-1) - scores.gather(-1, output_ids[:, length:, None])[..., 0]
        report["gaps"].append(float(below[present[:, length:]].max()))
        return logits.pow(2).mean()

    model = chatty_model(tokenizer, TURNS, max_position_embeddings=256)
    names = {"model": model, "tokenizer": tokenizer, "batches": batches, "loss": loss}
    exec(compile(code, str(PAGE), "exec"), names)
    session = names["engine"].session
    report |= {"ranks": session.live_engine.ranks_per_replica, "weights": session.weights.name}
    report |= {"dtype": str(session.live_engine.dtype), "version": session.metrics["hybrid/weight_version"]}
    names["engine"].close()
    (folder / f"rank{RANK}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
