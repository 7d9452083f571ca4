"""The example of a whole program with one controller, as a user types it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from launching import shells_environment

EXAMPLE = Path(__file__).parents[3] / "examples" / "ray_single_controller.py"
SHORT = "--steps 10 --num_heldout 256 --num_tasks 2048 --output_dir out"


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Where the model that learned from demonstrations is kept between the runs."""
    return tmp_path_factory.mktemp("cache")


def run(cache, folder, placement):
    command = [sys.executable, str(EXAMPLE), *SHORT.split(), "--placement", placement, "--cache_dir", str(cache)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=shells_environment(), timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_it_learns_the_same_colocated_and_split(cache, tmp_path):
    said = {}
    for placement in ("colocated", "split"):
        folder = tmp_path / placement
        folder.mkdir()
        said[placement] = run(cache, folder, placement)
        rewards = [float(reward) for reward in re.findall(r"^step \d+: reward (\S+),", said[placement], re.MULTILINE)]
        assert len(rewards) == 10
        assert sum(rewards[-3:]) / 3 > rewards[0] + 0.2
        before, after = map(
            float, re.search(r"words: (\S+)% right before GRPO, (\S+)% after", said[placement]).groups()
        )
        assert before < 50 < 60 < after
        assert (folder / "out" / "model.safetensors").exists()
    steps = [re.findall(r"^step .*", text, re.MULTILINE) for text in said.values()]
    assert steps[0] == steps[1]
    assert "colocated 0-1 on node" in said["colocated"]
    assert "references 0-1 on node" in said["split"]
