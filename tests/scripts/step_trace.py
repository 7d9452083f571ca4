"""Launched by tests/step_trace.py on two ranks: the calls of one optimizer step with packed rows and a tool.

    python step_trace.py OUT

Each rank writes the calls of functions of `trlx_hybrid` and its plugins in the second step as JSON, with the number of
the call that each stands in and the function of TRL or transformers between the two.
"""

import json
import os
import sys
from pathlib import Path

from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig
from trlx_hybrid import GRPOTrainer, HybridConfig
from trlx_hybrid.testing.chat import chat_tokenizer, chatty_model
from trlx_hybrid.testing.models import tiny_grpo

RANK = int(os.environ["RANK"])
ROOT = str(Path(__file__).parents[2])
SOURCES = (f"{ROOT}/trlx_hybrid/", f"{ROOT}/plugins/")
TURNS = ["four", '<tool_call>\n{"name": "double", "arguments": {"text": "2"}}\n</tool_call>']


class Tracer(TrainerCallback):
    """Notes each call in the second step."""

    def __init__(self):
        self.calls, self.frames = [], {}

    def __call__(self, frame, event, argument):
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(SOURCES) or "/tests/" in code.co_filename:
            return
        known = self.frames.get(id(frame))
        if known is not None and self._within(known[0]):  # a generator goes on, and nothing came between
            return
        above, stock = frame.f_back, None
        while above is not None and id(above) not in self.frames:
            if stock is None and "/site-packages/tr" in above.f_code.co_filename:
                stock = above.f_code.co_qualname
            above = above.f_back
        self.frames[id(frame)] = (len(self.calls), frame)  # kept, so that no other frame gets its number
        inside = None if above is None else self.frames[id(above)][0]
        file = Path(code.co_filename).relative_to(ROOT).as_posix()
        called = {"name": code.co_qualname, "file": file, "inside": inside, "stock": stock}
        called["goes_on"] = known is not None
        if code.co_qualname == "Host.call":
            called["hook"] = frame.f_locals["hook"]
        self.calls.append(called)

    def _within(self, number):
        """Return whether the last call stands in that one, or is it."""
        last = len(self.calls) - 1
        while last is not None and last > number:
            last = self.calls[last]["inside"]
        return last == number

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1:
            sys.setprofile(self)

    def on_step_end(self, *args, **kwargs):
        sys.setprofile(None)


def overrides(trainer):
    """Return the names of methods of ours that a class of TRL's or transformers' has, too."""
    stock = {
        name
        for owner in type(trainer).__mro__
        for name in vars(owner)
        if owner.__module__.startswith("tr") and not owner.__module__.startswith("trlx")
    }
    ours = [owner for owner in type(trainer).__mro__ if owner.__module__.startswith("trlx_hybrid")]
    return sorted({f"{owner.__name__}.{name}" for owner in ours for name in vars(owner) if name in stock})


def double(text: str) -> str:
    """Say a text twice.

    Args:
        text: what is said.
    """
    return text * 2


def digits(completions, **_):
    return [float(sum(len(m["content"] or "") for m in messages) % 7) for messages in completions]


def main(out):
    tokenizer = chat_tokenizer(TURNS)
    tracer = Tracer()
    trainer = GRPOTrainer(
        model=chatty_model(tokenizer, TURNS),
        reward_funcs=digits,
        args=GRPOConfig(
            **tiny_grpo(
                out / "run",
                max_steps=2,
                per_device_train_batch_size=4,
                gradient_accumulation_steps=2,
                max_completion_length=60,
                vllm_max_model_length=800,
            )
        ),
        train_dataset=Dataset.from_dict(
            {"prompt": [[{"role": "user", "content": f"what is twice {n}?"}] for n in range(16)]}
        ),
        processing_class=tokenizer,
        tools=[double],
        hybrid=HybridConfig(scoring="packed", scoring_options={"adaptive_checkpointing": True, "joined": True}),
        callbacks=[tracer],
    )
    trainer.train()
    (out / f"rank{RANK}.json").write_text(json.dumps({"calls": tracer.calls, "overrides": overrides(trainer)}))
    trainer.session.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
