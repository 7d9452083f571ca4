"""Started by test_in_flight.py on each of two ranks: conversations in flight with one engine over both, or one on each.

Each rank writes its trajectories of a whole run, and of one that resumes in its middle, as JSON:
in_flight_distributed.py FOLDER TENSOR_PARALLEL_SIZE KIND, which is "tools" or "episodes"
"""

import dataclasses
import json
import os
import sys
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", TOKENIZERS_PARALLELISM="false")

import trlx_hybrid
from datasets import Dataset
from trl import GRPOConfig
from trlx_hybrid.testing.chat import chat_tokenizer, chatty_model
from trlx_hybrid.testing.models import tiny_grpo
from trlx_hybrid_multiturn import Step, episodes

from tests.support.in_flight import Trajectories

RANK = int(os.environ["RANK"])
CALLS = [f'<tool_call>\n{{"name": "look", "arguments": {{"at": {at}}}}}\n</tool_call>' for at in range(4)]
TURNS = [*CALLS, "a plain answer", "no"]


def look(at: int) -> int:
    """Look.

    Args:
        at: what.
    """
    return at + RANK


class Looks:
    """An environment that shows what the tool returns, twice."""

    def reset(self, row):
        self.shown = 0

    def step(self, completion):
        self.shown += 1
        return Step(observation=f"{look(self.shown)}", done=self.shown > 2, reward=1.0)


def trained(folder, name, size, kind, resume=None):
    tokenizer, kept = chat_tokenizer(TURNS), Trajectories()
    questions = [[{"role": "user", "content": f"{'?' * i} {i * 7919 % 1000}"}] for i in range(16)]
    settings = tiny_grpo(
        folder / name,
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=70,
        max_steps=4,
        vllm_tensor_parallel_size=size,
        vllm_max_model_length=1024,
        max_tool_calling_iterations=3,
        save_strategy="steps",
        save_steps=2,
    )
    options = {"max_staleness": 2, "tools": "main", "progress": False}
    trainer = trlx_hybrid.GRPOTrainer(
        model=chatty_model(tokenizer, TURNS),
        args=GRPOConfig(**settings),
        train_dataset=Dataset.from_dict({"prompt": questions}),
        processing_class=tokenizer,
        reward_funcs=lambda completion_ids, **columns: [len(set(ids)) / 10 for ids in completion_ids],
        **({"tools": [look]} if kind == "tools" else {"rollout_func": episodes(Looks)}),
        hybrid={"engine": "vllm", "rollout": "multi_turn", "rollout_options": options},
        plugins=[kept],
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.session.close()
    return [[dataclasses.asdict(one) for one in batch] for batch in kept.batches]


def main(folder, size, kind):
    whole = trained(folder, "whole", size, kind)
    resumed = trained(folder, "resumed", size, kind, str(folder / "whole" / "checkpoint-2"))
    (folder / f"rank{RANK}.json").write_text(json.dumps({"whole": whole, "resumed": resumed}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
