"""The same scripts without GPUs, so that every change runs some of them to their end."""

import sys

import pytest
import whole_run
from cases import PACKED, STEPS, Case, flags

LIMIT = 500
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
def test_a_plain_script_trains_to_its_end(launcher, case, path, model, whole, seen, tmp_path):
    whole_run.check_case(
        case, launcher, model("plain"), tmp_path, whole, seen, LIMIT, changes=ON_CPU, path=path, gather=False
    )


def test_packed_rows(model, whole, tmp_path):
    settings = Case("lora", sleep=True, graphs=False, ragged=True).settings() | ON_CPU | PACKED
    ended = whole([sys.executable, whole_run.SCRIPTS / "grpo.py", *flags(settings, model("plain"), tmp_path)], LIMIT)
    whole_run.check_training(whole_run.history(tmp_path), STEPS)
    whole_run.check_proofs(ended, "lora")
    whole_run.check_packed(ended)
    assert "LoRA layers: 14 of 14 compute in fewer passes" in ended.output
