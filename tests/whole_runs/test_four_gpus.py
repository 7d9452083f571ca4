"""Whole user scripts on four GPUs: FSDP2 over all, engines of two and of four."""

import sys

import pytest
import whole_run
from cases import STEPS, Case, flags
from test_two_gpus import FSDP2
from whole_run import SCRIPTS

GPUS = 4
LIMIT = 480
CASES = [
    Case("bf16", sleep=True, graphs=False, tp=2, sharding="fsdp2"),
    Case("fp32", sleep=True, graphs=False, tp=4, sharding="fsdp2"),
    Case("lora", sleep=True, graphs=False, tp=4, sharding="fsdp2"),
]

pytestmark = pytest.mark.usefixtures("gpus")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_plain_script_trains_to_its_end(case, model, whole, tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command = [*launcher, SCRIPTS / "grpo.py", *flags(case.settings(), model("plain"), tmp_path / "run")]
    ended = whole(command, LIMIT, environment=FSDP2)
    whole_run.check_training(whole_run.history(tmp_path / "run"), STEPS)
    whole_run.check_proofs(ended, case.path)
