"""Engines that are closed, closed half-way, left to the end of the process, or to that of its process groups: what of
each remains."""

import atexit
import gc
import json
import sys
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from trlx_hybrid import HybridEngine
from trlx_hybrid.errors import ComponentError
from trlx_hybrid.testing.models import character_tokenizer, tiny_model
from trlx_hybrid_vllm import engine as module

REPORT, KEPT = {}, []


def start():
    options = {"max_model_len": 64, "max_num_seqs": 4}
    loop = HybridEngine(tiny_model(), character_tokenizer(), max_tokens=4, engine_options=options)
    with loop.rollout_context():
        loop.generate([[5, 6, 7]])
    return loop


def frozen_by(engine_of_a_user_who):
    if engine_of_a_user_who == "freezes":
        gc.freeze()
    traced = compiled()
    loop = start()
    counts = [gc.get_freeze_count()]
    loop.close()
    REPORT.setdefault("weights kept", []).append(len(traced.example_inputs))
    return [*counts, gc.get_freeze_count()]


def compiled():
    """What torch.compile leaves behind of an engine as it starts: on a CPU vLLM compiles nothing."""
    from vllm.compilation.caching import (
        VllmSerializableFunction,
    )  # only now: an engine sets what vLLM reads as it loads

    traced = torch.fx.symbolic_trace(torch.nn.Identity())
    return VllmSerializableFunction(traced, [torch.nn.Parameter(torch.ones(2))], "", torch.nn.Identity())


def last(out):
    for loop in KEPT:
        loop.close()  # as when the interpreter collects a trainer after all that was registered for its exit
    REPORT["default group at exit"] = dist.is_initialized()
    out.write_text(json.dumps(REPORT))


def main(how, out):
    atexit.register(last, Path(out))  # before all others, hence after them
    if how == "left":
        gc.unfreeze()
        REPORT["frozen"] = frozen_by("does not")
        with patch.object(gc, "get_freeze_count", lambda count=gc.get_freeze_count: count() + 375):  # as Python 3.12
            REPORT["frozen by Python"] = frozen_by("does not")
        REPORT["frozen by the user"] = frozen_by("freezes")
        KEPT.append(start())
        REPORT["default group"] = dist.is_initialized()
    elif how == "destroyed":
        KEPT.append(start())
        dist.destroy_process_group()
    else:
        loop = start()
        with patch.object(module, "shut_down", side_effect=ZeroDivisionError):
            try:
                loop.session.release_engine()  # as another trainer's first rollout does
            except ComponentError:
                REPORT["failed"] = True
        torch.cuda.is_available = lambda: True  # what release_at_exit does on a GPU


if __name__ == "__main__":
    main(*sys.argv[1:])
