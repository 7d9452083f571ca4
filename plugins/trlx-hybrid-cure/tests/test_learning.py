"""Whether both speakers learn."""

import os
import re
from pathlib import Path

import pytest
from trlx_hybrid.testing.processes import Script


@pytest.mark.slow
def test_right_programs_and_tests_that_hold_become_more(tmp_path):
    """The example, as a user starts it."""
    script = Path(__file__).parents[3] / "examples" / "coder_and_tester.py"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = Script(script, "--use_cpu", "--output_dir", tmp_path, environment=environment).wait(900)
    assert done.returncode == 0, done.stderr[-4000:]
    scores = {
        name: (float(a), float(b)) for name, a, b in re.findall(r"^  (\w+) .*? ([\d.]+)% +([\d.]+)%", done.stdout, re.M)
    }
    assert scores["right"][1] > scores["right"][0] + 20
    assert scores["tests"][1] > scores["tests"][0] + 10
    assert (tmp_path / "reward.png").exists()
