"""Two training actors on two nodes, with FSDP2 and a vLLM over both: bit for bit what two processes train that
accelerate configures. Both launchers set the same variables: test_launch_environment.py.
"""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from launching import SCRIPTS, Segments, launch, nothing_left, reports, without_ray

from tests.support.fsdp import FSDP2_FILE

GRPO = SCRIPTS / "launched_grpo.py"


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "accelerate.yaml"
    path.write_text(json.dumps(FSDP2_FILE))
    return str(path)


def test_rewards_are_those_of_accelerate_launch(two_nodes, capfd, tmp_path, config, monkeypatch):
    segments = Segments()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folders = {name: tmp_path / name for name in ("accelerate", "ray")}
    for folder in folders.values():
        folder.mkdir()
    accelerate = without_ray(GRPO, folders["accelerate"])
    launched = launch(capfd, tmp_path, GRPO, folders["ray"], nodes=2, config_file=config)
    assert launched.code == 0, launched.err[-4000:]
    ray = reports(folders["ray"])
    assert ray == accelerate
    for report in ray:
        assert report["distributed_type"] == "DistributedType.FSDP"
        assert report["sharded"]
        assert report["weights"] == "reshard"
        assert len(report["rewards"]) == 3
        assert len({reward for batch in report["rewards"] for reward in batch}) >= 3
    assert nothing_left(str(tmp_path), segments) == []
