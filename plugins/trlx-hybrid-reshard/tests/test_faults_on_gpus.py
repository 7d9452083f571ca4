"""As test_faults.py, over NCCL: its kernels wait on the device, and no deadline of its own ends them in time."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from trlx_hybrid.testing.processes import Script

sys.path.insert(0, str(Path(__file__).parent / "scripts"))
from failing_on_gpus import DEADLINE, FAULTS

SCRIPT = Path(__file__).parent / "scripts" / "failing_on_gpus.py"

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("failing")
    ended = Script(SCRIPT, folder).wait(1200)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("fault", FAULTS)
def test_the_other_rank_says_who_is_missing_and_can_leave(seen, fault):
    report = seen[fault]
    assert report["error"] is not None, report
    assert re.search(r"rank 1", report["error"])
    assert report["seconds"] < DEADLINE + 5
    assert report["exit_seconds"] < 30
