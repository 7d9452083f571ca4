"""Launched by test_tensor_parallel.py: GRPO with tools, on a replica of all ranks; each writes what it saw as JSON.

torchrun --nproc_per_node N multiturn_distributed.py OUT [STAGES]

Trains a step; then rolls out once more while the last rank's tools want to exit; then once more in peace. Then another
trainer plays a batch of episodes with environments.
"""

import asyncio
import json
import os
import random
import sys
import time
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", TOKENIZERS_PARALLELISM="false")
BATCH, NUMBERS = 8, 6


def main(out: Path, stages: int = 1) -> None:
    import numpy as np
    import torch
    from datasets import Dataset
    from trl import GRPOConfig
    from trlx_hybrid import GRPOTrainer
    from trlx_hybrid.testing.chat import chat_tokenizer, chatty_model

    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    state = {"breaks": False, "calls": 0}
    first = rank == 0 and world > 1

    def think(n: int) -> str:
        """Think.

        Args:
            n: about what.
        """
        state["calls"] += 1
        if state["breaks"]:
            raise asyncio.CancelledError("its loop has gone")  # which ends its trajectory
        if first:  # draws from everybody's generators, and slowly
            torch.rand(n + 1), np.random.rand(n + 1), random.random()
            time.sleep(0.03)
        return f"thought about {n}"

    async def fetch(n: int) -> str:
        """Fetch.

        Args:
            n: what.
        """
        state["calls"] += 1
        if first:
            torch.rand(n + 1), np.random.rand(n + 1), random.random()
        await asyncio.sleep(0.001 * n * (1 + rank))
        return f"fetched {n}"

    class Counter:
        def reset(self, start: int, **row) -> None:
            self.total = start

        def count(self, n: int) -> int:
            """Count on.

            Args:
                n: how far.
            """
            state["calls"] += 1
            self.total += n
            return self.total

    names = ("think", "fetch", "count")
    singles = [
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': {'n': n}})}\n</tool_call>"
        for name in names
        for n in range(NUMBERS)
    ]
    doubles = ["\n".join(singles[i::7][:2]) for i in range(7)]
    turns = [*singles, *doubles, *(f"plain answer {i}" for i in range(10))]
    tokenizer = chat_tokenizer(turns)
    questions = [[{"role": "user", "content": f"question {'?' * i} {i * 7919 % 1000}"}] for i in range(16)]
    report: dict = {"batches": [], "totals": []}

    class Recording(GRPOTrainer):
        def _generate(self, prompts):
            generated = super()._generate(prompts)
            _, ids, mask, messages, logprobs, *_ = generated
            batch = [list(row) for row in zip(ids, mask, messages, logprobs, strict=True)]
            report["batches"].append(json.loads(json.dumps(batch)))
            return generated

    def lengths(completion_ids, environments, **kwargs):
        report["totals"].append([environment.total for environment in environments])
        return [float(len(ids) % 5) for ids in completion_ids]

    trainer = Recording(
        model=chatty_model(tokenizer, turns),
        processing_class=tokenizer,
        reward_funcs=lengths,
        tools=[think, fetch],
        environment_factory=Counter,
        train_dataset=Dataset.from_dict({"prompt": questions, "start": list(range(16))}),
        args=GRPOConfig(
            output_dir=str(out / "run"),
            per_device_train_batch_size=BATCH // world,
            num_generations=4,
            max_completion_length=300,
            max_tool_calling_iterations=3,
            max_steps=1,
            temperature=0.5,
            learning_rate=1e-3,
            optim="sgd",  # Adam divides rounding noise by itself where a gradient is zero
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
            bf16=False,
            disable_tqdm=True,
            use_vllm=True,
            vllm_max_model_length=2048,
            vllm_tensor_parallel_size=world // stages,
        ),
        hybrid={"rollout_options": {"max_failed": 0.0}, "engine_options": {"pipeline_parallel_size": stages}},
    )
    trainer.train()
    report["rollout"] = trainer.session.rollout.name
    report["calls"] = state["calls"]
    share = BATCH // world
    rows = [trainer.train_dataset[i // 4] for i in range(rank * share, (rank + 1) * share)]

    def roll():
        trainer.session.sampler.forget()  # the same draws each time
        trainer._generate_and_score_completions(list(rows))

    state["breaks"] = rank == world - 1
    started = time.monotonic()
    try:
        if world > 1:
            roll()
    except Exception as error:
        report["error"] = [type(error).__name__, str(error)]
    report["seconds"] = time.monotonic() - started
    state["breaks"] = False
    roll()
    core = trainer.session.live_engine.llm.llm_engine
    pool = core.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    report["unfinished"] = core.has_unfinished_requests()
    report["taken"] = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
    trainer.session.close()
    report["episodes"] = play(out, world, rank, stages)
    (out / f"rank{rank}.json").write_text(json.dumps(report))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def play(out: Path, world: int, rank: int, stages: int) -> list:
    """Ids, mask, log-probs, reward and messages of each of this rank's episodes."""
    import torch
    from datasets import Dataset
    from trl import GRPOConfig
    from trlx_hybrid import GRPOTrainer
    from trlx_hybrid.testing.chat import chat_tokenizer, chatty_model
    from trlx_hybrid_multiturn import Step, episode_reward, episodes

    class Maze:
        async def reset(self, row):
            self.door, self.said = row["door"], 0
            return f" door {self.door}"

        async def step(self, completion):
            if rank == 0 and world > 1:  # draws from everybody's generators, and slowly
                torch.rand(3), random.random()
                await asyncio.sleep(0.03)
            self.said += 1
            return Step(observation=f"door {len(completion)}", done=self.said > self.door % 4, reward=len(completion))

    turns = ["left", "right", "forward", "a longer sentence"]
    tokenizer, batches, seen = chat_tokenizer(turns), [], []

    class Recording(GRPOTrainer):
        def _generate(self, prompts):
            batches.append(super()._generate(prompts))
            return batches[-1]

    def told(episode_reward, episode_messages, **columns):
        seen.extend(zip(episode_reward, episode_messages, strict=True))
        return [0.0] * len(episode_reward)

    trainer = Recording(
        model=chatty_model(tokenizer, turns),
        processing_class=tokenizer,
        reward_funcs=[episode_reward, told],
        rollout_func=episodes(Maze),
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": "go"}]] * 8, "door": list(range(8))}),
        args=GRPOConfig(
            output_dir=str(out / "episodes"),
            per_device_train_batch_size=BATCH // world,
            num_generations=4,
            max_completion_length=200,
            max_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
            bf16=False,
            disable_tqdm=True,
            vllm_max_model_length=400,
            vllm_tensor_parallel_size=world // stages,
        ),
        hybrid={"engine": "vllm", "rollout": "multi_turn", "engine_options": {"pipeline_parallel_size": stages}},
    )
    trainer.train()
    (_, ids, masks, _, logprobs, *_), *_ = batches
    trainer.session.close()
    return [list(row) for row in zip(ids, masks, logprobs, *zip(*seen, strict=True), strict=True)]


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
