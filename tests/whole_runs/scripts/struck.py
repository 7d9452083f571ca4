"""GRPO with a tool, FSDP2 and a tensor-parallel vLLM on two ranks, saving after each step; one fault strikes it.

    launcher struck.py OUT [fault=kill phase=save rank=1 visit=2 delay=0.05 seed=0]

The fault strikes `delay` seconds after `rank` enters `phase` for the `visit`-th time, once in all starts of the run.
Rank 0 writes a digest of the last weights into OUT/end.json.
"""

import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig
from trlx_hybrid import GRPOTrainer, HybridConfig, hookimpl
from trlx_hybrid.testing.chat import chat_tokenizer, chatty_model
from trlx_hybrid.testing.models import tiny_grpo

from tests.support.fsdp import use_fsdp_on_cpu

OUT = Path(sys.argv[1])
FAULT = dict(option.split("=") for option in sys.argv[2:])
RUN, STRUCK = OUT / "disk" / "run", OUT / "struck.json"
RANK = int(os.environ["RANK"])
STEPS = 4
TURNS = ["four", '<tool_call>\n{"name": "double", "arguments": {"text": "2"}}\n</tool_call>']


class Fault(TrainerCallback):
    """Counts how often this rank enters each phase, and strikes at the one that was drawn."""

    def __init__(self):
        self.visits = {}
        self.began = 0

    def enter(self, phase):
        self.visits[phase] = self.visits.get(phase, 0) + 1
        mine = phase == FAULT.get("phase") and int(FAULT["rank"]) == RANK
        if mine and self.visits[phase] == int(FAULT["visit"]) and not STRUCK.exists():
            threading.Thread(target=strike, args=(float(FAULT["delay"]),), daemon=True).start()

    @hookimpl
    def trlx_enter_phase(self, session, phase, step):
        if phase.name == "ROLLOUT":
            self.enter("rollout")

    @hookimpl
    def trlx_sync_start(self, session, plan):
        self.enter("sync")

    def on_train_begin(self, args, state, *rest, **kwargs):
        self.began = state.global_step

    def on_log(self, args, state, control, **kwargs):
        if control.should_save:  # what is logged is logged just before
            self.enter("save")


def strike(delay):
    """Do to this rank, to the newest checkpoint or to the disk what was drawn."""
    time.sleep(delay)
    said = FAULT | {"at": time.time()}
    if FAULT["fault"] == "torn":
        said["file"] = tear(random.Random(int(FAULT["seed"])))
    STRUCK.write_text(json.dumps(said))
    if FAULT["fault"] == "disk":
        fill(OUT / "disk" / "filler")
    else:
        os.kill(os.getpid(), signal.SIGSTOP if FAULT["fault"] == "stop" else signal.SIGKILL)


def tear(draw):
    """Cut, empty, overwrite or remove a file of the newest checkpoint; what was done, in words."""
    found = sorted(RUN.glob("checkpoint-*"), key=lambda folder: int(folder.name.partition("-")[2]))
    files = sorted(p for p in found[-1].rglob("*") if p.is_file() and p.stat().st_size) if found else []
    if not files:
        return "none was there"
    file, how = draw.choice(files), draw.choice(["cut", "emptied", "zeroed", "removed"])
    size = file.stat().st_size
    if how == "removed":
        file.unlink()
    elif how == "zeroed":
        with file.open("r+b") as out:
            out.seek(size // 2)
            out.write(bytes(min(10_000, size - size // 2)))
    else:
        os.truncate(file, size // 2 if how == "cut" else 0)
    return f"{file.relative_to(RUN)} {how}"


def fill(file):
    """Write until the disk has no byte left."""
    with file.open("wb", buffering=0) as out:
        for size in (1 << 16, 1):
            try:
                while out.write(bytes(size)):
                    pass
            except OSError:
                continue


def double(text: str) -> str:
    """Say a text twice.

    Args:
        text: what is said.
    """
    FAULTS.enter("tool")
    return text * 2


def digits(completions, **_):
    return [float(sum(len(m["content"] or "") for m in messages) % 7) for messages in completions]


class Trainer(GRPOTrainer):
    """A user's subclass, which says when the backward pass begins."""

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        FAULTS.enter("backward")
        return loss


FAULTS = Fault()


def main():
    use_fsdp_on_cpu()
    tokenizer = chat_tokenizer(TURNS)
    settings = tiny_grpo(
        RUN,
        per_device_train_batch_size=4,
        max_steps=STEPS,
        max_completion_length=60,
        vllm_max_model_length=800,
        vllm_tensor_parallel_size=2,
        # Which rows an engine decodes together depends on when a tool answers, and so do the last bits of log-probs:
        # the tokens are the same in each start, the ratios are not.
        vllm_importance_sampling_correction=False,
        learning_rate=1e-3,
        optim="adamw_torch",
        save_strategy="steps",
        save_steps=1,
        ddp_timeout=300,
    )
    trainer = Trainer(
        model=chatty_model(tokenizer, TURNS),
        reward_funcs=digits,
        args=GRPOConfig(**settings),
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": f"{n}+2"}]} for n in range(32)]),
        processing_class=tokenizer,
        tools=[double],
        hybrid=HybridConfig(),
        callbacks=[FAULTS],
        plugins=[FAULTS],
    )
    trainer.train()
    weights = trainer.accelerator.get_state_dict(trainer.model)
    if RANK == 0:
        digest = hashlib.sha256()
        for name in sorted(weights):
            digest.update(name.encode() + weights[name].cpu().contiguous().numpy().tobytes())
        calls = [log["tools/call_frequency"] for log in trainer.state.log_history if "tools/call_frequency" in log]
        end = {"weights": digest.hexdigest(), "steps": trainer.state.global_step, "began": FAULTS.began, "calls": calls}
        (OUT / "end.json").write_text(json.dumps(end))


if __name__ == "__main__":
    main()
