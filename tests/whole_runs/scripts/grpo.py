"""GRPO with every flag of TRL and of HybridConfig, and a plugin that prints what each weight sync proved, and digests
of what engine and trainer computed: where two runs that should be the same part, they say whose arithmetic it is."""

import hashlib
import json
import random
import sys

from datasets import Dataset
from torch._inductor.codecache import PyCodeCache
from trl import GRPOConfig, ModelConfig, TrlParser, get_peft_config, get_quantization_config
from trlx_hybrid import GRPOTrainer, HybridConfig, hookimpl


def say(line):
    """With its end in one piece: ranks share the output, and `print` writes both apart where nothing is buffered."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def digest(values):
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:12]


def compiled_kernels():
    """What torch compiled for this process or loaded from what another one compiled, and with which settings."""
    loaded = (value for module in PyCodeCache.modules for value in vars(module).values())
    kernels = (value for value in loaded if type(value).__name__ == "CachingAutotuner")
    found = sorted({f"{k.fn.__name__} {[str(launcher.config) for launcher in k.launchers]}" for k in kernels})
    for kernel in found:
        say(f"KERNEL {kernel}")
    return found


class Proofs:
    def __init__(self):
        self.number = 0

    def trace(self, session, at, **found):
        self.number += 1
        say(f"TRACE {json.dumps({'number': self.number, 'rank': session.ranks.rank, 'at': at} | found)}")

    @hookimpl
    def trlx_report_header(self, session):
        llm = getattr(session.engine, "llm", None)  # none in a replay, and here none of an engine of other processes
        config = llm and llm.llm_engine.vllm_config
        found = config and {
            "kv_blocks": config.cache_config.num_gpu_blocks,
            "graphs": str(config.compilation_config.cudagraph_mode),
            "fused_all_reduce": bool(config.compilation_config.pass_config.fuse_allreduce_rms),
            "schedules_ahead": bool(config.scheduler_config.async_scheduling),
            "kernels": digest(compiled_kernels()),
        }
        self.trace(session, "the engine", **(found or {}))

    @hookimpl
    def trlx_sync_end(self, session, report):
        if session.ranks.rank == 0:
            say(f"PROOF path={report.weights} verified={report.verified} gap={report.logprob_gap}")
        self.trace(session, f"the sync of version {report.version}", weights=session.policy.digest())

    @hookimpl
    def trlx_rollout_end(self, session, trajectories):
        at = f"a rollout of version {session.weight_version} for {'training' if session.training else 'evaluation'}"
        tokens, logprobs = [t.completion_ids for t in trajectories], [t.logprobs for t in trajectories]
        rows = [digest(row)[:6] for row in logprobs]
        self.trace(session, at, tokens=digest(tokens), logprobs=digest(logprobs), rows=" ".join(rows))


def reward(completion_ids, **kwargs):
    return [float(sum(ids) % 7) for ids in completion_ids]


if __name__ == "__main__":
    config, model, hybrid = TrlParser((GRPOConfig, ModelConfig, HybridConfig)).parse_args_and_config()
    config.model_init_kwargs = {"dtype": model.dtype, "attn_implementation": model.attn_implementation}
    draw = random.Random(0)
    rows = Dataset.from_dict({"prompt": [f"what follows {draw.randrange(10**6)}? " for _ in range(64)]})
    trainer = GRPOTrainer(
        model=model.model_name_or_path,
        reward_funcs=reward,
        args=config,
        train_dataset=rows,
        eval_dataset=rows.select(range(8)),
        peft_config=get_peft_config(model),
        quantization_config=get_quantization_config(model),
        hybrid=hybrid,
        plugins=[Proofs()],
    )
    trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
