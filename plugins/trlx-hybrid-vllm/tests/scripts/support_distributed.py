"""Started by test_support.py on each of two ranks: one engine over both, or one on each, with truncated sampling.

Each rank writes the lines of its trainer's log as JSON: support_distributed.py FOLDER TENSOR_PARALLEL_SIZE
"""

import json
import os
import sys
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", TOKENIZERS_PARALLELISM="false")

import trlx_hybrid
from datasets import Dataset
from trl import GRPOConfig
from trlx_hybrid.testing.models import character_tokenizer, tiny_model


def main(folder, size):
    given = {"use_vllm": True, "vllm_max_model_length": 64, "vllm_tensor_parallel_size": size, "use_cpu": True}
    given |= {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 12, "bf16": False}
    given |= {"logging_steps": 1, "report_to": [], "save_strategy": "no", "max_steps": 2, "learning_rate": 3e-3}
    trainer = trlx_hybrid.GRPOTrainer(
        model=tiny_model(),
        args=GRPOConfig(output_dir=str(folder / "run"), top_k=20, top_p=0.9, **given),
        train_dataset=Dataset.from_dict({"prompt": [f"sort {i * 7919 % 1000}=" for i in range(16)]}),
        processing_class=character_tokenizer(),
        reward_funcs=lambda completion_ids, **columns: [len(set(ids)) / 10 for ids in completion_ids],
        hybrid={"engine": "vllm"},
    )
    trainer.train()
    path = folder / f"rank{trainer.accelerator.process_index}.json"
    path.write_text(json.dumps(trainer.state.log_history))
    trainer.session.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
