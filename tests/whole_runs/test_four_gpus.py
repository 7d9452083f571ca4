"""Whole user scripts on four GPUs: FSDP2 over all, engines of two and of four."""

import pytest
import whole_run
from cases import Case
from test_two_gpus import FSDP2

GPUS = 4
LIMIT = 480
CASES = [
    Case("bf16", sleep=True, graphs=False, tp=2, sharding="fsdp2"),
    Case("fp32", sleep=True, graphs=False, tp=4, sharding="fsdp2"),
    Case("lora", sleep=True, graphs=False, tp=4, sharding="fsdp2"),
    Case("bf16", sleep=True, graphs=False, tp=2, pp=2, sharding="fsdp2"),
]

pytestmark = pytest.mark.usefixtures("gpus")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_plain_script_trains_to_its_end(case, model, whole, seen, tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    whole_run.check_case(case, launcher, model("plain"), tmp_path, whole, seen, LIMIT, environment=FSDP2, gather=False)
