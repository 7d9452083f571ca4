"""Engines that are closed, closed half-way, left to the end of the process, or to that of its process groups: what of
each remains."""

import atexit
import gc
import json
import sys
import weakref
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from trlx_hybrid import HybridEngine
from trlx_hybrid.errors import ComponentError
from trlx_hybrid.testing.models import character_tokenizer, tiny_model
from trlx_hybrid_vllm import engine as module
from trlx_hybrid_vllm.private.engine import model_of

REPORT, KEPT = {}, []


def start(**given):
    options = {"max_model_len": 64, "max_num_seqs": 4} | given
    loop = HybridEngine(tiny_model(), character_tokenizer(), max_tokens=4, engine_options=options)
    with loop.rollout_context():
        loop.generate([[5, 6, 7]])
    return loop


def frozen_by(engine_of_a_user_who):
    if engine_of_a_user_who == "freezes":
        gc.freeze()
    traced, counts = traced_by_torch_2_11(), [gc.get_freeze_count()]
    with compiled_on_a_cpu():
        loop = start(enforce_eager=False)
    counts.append(gc.get_freeze_count())
    weights = [weakref.ref(weight) for weight in model_of(loop.session.engine.llm).parameters()]
    loop.close()
    gc.collect()  # as is done on a GPU
    kept = sum(weight() is not None for weight in weights) + len(traced.example_inputs)
    REPORT.setdefault("weights kept", []).append(kept)
    REPORT.setdefault("compiled", []).append(len(weights))
    return [*counts, gc.get_freeze_count()]


def traced_by_torch_2_11():
    """Return what torch 2.11 keeps as a global of the model's module; later versions do not."""
    from vllm.compilation.caching import VllmSerializableFunction  # only now: see below

    traced = torch.fx.symbolic_trace(torch.nn.Identity())
    return VllmSerializableFunction(traced, [torch.nn.Parameter(torch.ones(2))], "", torch.nn.Identity())


@contextmanager
def compiled_on_a_cpu():
    """Have vLLM compile a model as it does on a GPU, which its platform for CPUs replaces by a mode of fewer parts."""
    from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass  # only now: an engine
    from vllm.config import CompilationMode, CUDAGraphMode, PassConfig  # sets what vLLM reads as it loads
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    check = CpuPlatform.check_and_update_config

    def compiles(platform, config):
        check(config)
        chosen = config.compilation_config
        chosen.mode, chosen.backend, chosen.compile_sizes = CompilationMode.VLLM_COMPILE, "inductor", []
        chosen.cudagraph_mode, chosen.pass_config = CUDAGraphMode.NONE, PassConfig()

    with (
        patch.object(CpuPlatform, "check_and_update_config", classmethod(compiles)),
        patch.object(CPUModelRunner, "warming_up_model", lambda runner: runner._dummy_run(16)),
        patch.object(FixFunctionalizationPass, "__call__", lambda fixes, graph: None),  # names operators of a GPU
    ):
        yield


def last(out):
    for loop in KEPT:
        loop.close()  # as when the interpreter collects a trainer after all that was registered for its exit
    REPORT["default group at exit"] = dist.is_initialized()
    out.write_text(json.dumps(REPORT))


def main(how, out):
    atexit.register(last, Path(out))  # before all others, hence after them
    if how == "left":
        REPORT["frozen with imports"] = frozen_by("does not")
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
