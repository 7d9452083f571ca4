"""Started by test_in_flight.py on each of two ranks: rows in flight with one engine over both, or one on each.

Each rank writes its trajectories of a whole run, and of one that resumes in its middle, as JSON:
in_flight_distributed.py FOLDER TENSOR_PARALLEL_SIZE DATASET, which is "indexed" or "streamed"
"""

import dataclasses
import json
import os
import sys
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", TOKENIZERS_PARALLELISM="false")

import trlx_hybrid
from trl import GRPOConfig
from trlx_hybrid.testing.models import character_tokenizer, sorting_prompts, tiny_grpo, tiny_model

from tests.support.in_flight import Trajectories

RANK = int(os.environ["RANK"])


def trained(folder, name, size, streamed, resume=None):
    tokenizer, kept = character_tokenizer(), Trajectories()
    settings = tiny_grpo(
        folder / name,
        per_device_train_batch_size=8,
        max_completion_length=24,
        max_steps=6,
        vllm_tensor_parallel_size=size,
        generation_kwargs={"stop_token_ids": tokenizer.convert_tokens_to_ids([*"0123456789aeiou"])},
        save_strategy="steps",
        save_steps=3,
    )
    dataset = sorting_prompts()
    trainer = trlx_hybrid.GRPOTrainer(
        model=tiny_model(),
        args=GRPOConfig(**settings),
        train_dataset=dataset.to_iterable_dataset() if streamed else dataset,
        processing_class=tokenizer,
        reward_funcs=lambda completion_ids, **columns: [len(set(ids)) / 10 for ids in completion_ids],
        hybrid={"engine": "vllm", "rollout_options": {"max_staleness": 2}},
        plugins=[kept],
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.session.close()
    return [[dataclasses.asdict(one) for one in batch] for batch in kept.batches], [
        tokenizer(prompt)["input_ids"] for prompt in dataset["prompt"]
    ]


def main(folder, size, streamed):
    whole, prompts = trained(folder, "whole", size, streamed)
    resumed, _ = trained(folder, "resumed", size, streamed, str(folder / "whole" / "checkpoint-3"))
    (folder / f"rank{RANK}.json").write_text(json.dumps({"whole": whole, "resumed": resumed, "prompts": prompts}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "streamed")
