"""The example, as a user types it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from launching import Segments, nothing_left

EXAMPLE = Path(__file__).parents[3] / "examples" / "ray_two_nodes.py"


@pytest.mark.slow
def test_two_simulated_nodes_train_one_model(tmp_path):
    segments = Segments()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "ACCELERATE_"))}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, last = map(float, re.search(r"reward (\S+) -> (\S+) on 2 ranks", done.stdout).groups())
    assert first < 0.5 < 0.8 < last
    assert nothing_left(str(tmp_path), segments) == []
