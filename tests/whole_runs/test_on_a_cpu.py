"""The same scripts without GPUs, so that every change runs some of them to their end."""

import sys

import pytest
import whole_run
from cases import STEPS, Case, flags
from whole_run import SCRIPTS

LIMIT = 300
ON_CPU = {"use_cpu": True, "bf16": False, "dtype": "float32", "lora_target_modules": "all-linear"}
CASES = [
    ([], Case("fp32", sleep=True, graphs=False, ragged=True), "alias"),
    (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
        Case("fp32", True, False, tp=2),
        "reshard",
    ),
]


@pytest.mark.parametrize(("launcher", "case", "path"), CASES, ids=["python", "torchrun"])
def test_a_plain_script_trains_to_its_end(launcher, case, path, model, whole, tmp_path):
    settings = case.settings() | ON_CPU
    command = [sys.executable, *launcher, SCRIPTS / "grpo.py", *flags(settings, model("plain"), tmp_path / "run")]
    ended = whole(command, LIMIT)
    whole_run.check_training(whole_run.history(tmp_path / "run"), STEPS)
    whole_run.check_proofs(ended, path)
