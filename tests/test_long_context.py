"""A model learns from the first thousandth of a long context, and cannot where the trainer's attention loses half."""

import os
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from trlx_hybrid.testing.processes import Script

ROOT = Path(__file__).parent.parent
MEAN = re.compile(r"8192 tokens: mean reward (\d\.\d{3}) before GRPO, (\d\.\d{3}) after")
TILES = "2 of 2 layers are recomputed, 2 of their inputs are kept in host memory, and norms and MLPs are computed in"


def trained(folder, attention, *flags):
    """Rewards of held-out rows before and after, and the log."""
    command = [ROOT / "tests/scripts/long_context.py", ROOT / "examples", attention, "--use_cpu", "--seed", "1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = Script(*command, "--output_dir", folder, *flags, environment=environment).wait(600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "engine=vllm (use_vllm=True)" in done.stderr
    ((before, after),) = MEAN.findall(done.stdout)
    print(f"{attention} attention: mean reward {before} before GRPO, {after} after")
    return float(before), float(after), done.stderr


def test_the_broken_attention_loses_the_first_half_and_nothing_else():
    """Three rows, of which two have a prompt of nine tokens in common."""
    forgetful = runpy.run_path(str(ROOT / "tests/scripts/long_context.py"))["forgetful"]
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 21, 32)
    given = {"segments": (10, 3, 8), "prefixes": ((0, 0), (0, 9), (2, 0))}
    found, _ = forgetful(SimpleNamespace(is_causal=True), query, key, value, None, scaling=0.2, **given)
    seen = torch.zeros(21, 21, dtype=torch.bool)
    for begin, end in ((0, 5), (5, 10), (10, 13), (13, 17), (17, 21)):  # halves of rows, and the second completion
        seen[begin:end, begin:end] = True
    seen = seen.tril()
    seen[10:13, 5:9] = True  # the second half of its prompt
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=0.2)
    torch.testing.assert_close(found, wanted.transpose(1, 2))


@pytest.mark.slow
def test_a_model_learns_from_the_first_thousandth_of_its_context(tmp_path):
    """In tiles, with inputs in host memory."""
    before, after, log = trained(tmp_path, "right")
    assert TILES in log
    assert "stay padded" not in log
    assert before < 0.25
    assert after > 0.75


@pytest.mark.slow
def test_it_learns_nothing_where_attention_loses_half_of_the_context(tmp_path):
    """Nothing but the reward shows it here: rows are not compared with padded ones, nor log-probs with the engine's."""
    before, after, log = trained(tmp_path, "broken", "--max_logprob_gap", "inf")
    assert TILES in log
    assert "stay padded" not in log
    assert before < 0.25
    assert after < 0.25
