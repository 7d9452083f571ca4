"""A restarted run goes on from the newest checkpoint that was written to its end."""

import json

import pytest
import torch
from trlx_hybrid_ray.launch.resume import RESUME_VARIABLE, checkpoint_to_resume, newest_checkpoint


@pytest.fixture
def save(tmp_path):
    def make(step, ranks=1, *, state=True, generators=True):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        for rank in range(ranks if generators else 0):
            name = "rng_state.pth" if ranks == 1 else f"rng_state_{rank}.pth"
            torch.save({"cpu": torch.random.get_rng_state()}, folder / name)
        if state:
            (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        return folder

    return make


def test_the_newest_is_taken_by_number(tmp_path, save):
    save(9)
    newest = save(10)
    (tmp_path / "checkpoint-best").mkdir()
    assert newest_checkpoint(tmp_path) == newest


def test_one_that_was_cut_short_is_passed_over(tmp_path, save):
    whole = save(2, ranks=2)
    save(4, ranks=2, state=False)
    truncated = save(6, ranks=2) / "rng_state_1.pth"
    truncated.write_bytes(truncated.read_bytes()[:100])
    (save(8, ranks=2) / "rng_state_0.pth").unlink()
    (save(10, ranks=2) / "trainer_state.json").write_text('{"global_st')
    assert newest_checkpoint(tmp_path, ranks=2) == whole


def test_one_without_training_state_counts(tmp_path, save):
    assert newest_checkpoint(tmp_path) is None
    assert newest_checkpoint(tmp_path / "nowhere") is None
    assert newest_checkpoint(tmp_path) is None
    weights_only = save(3, generators=False)
    assert newest_checkpoint(tmp_path, ranks=4) == weights_only


def test_a_first_start_resumes_nothing(tmp_path, save, monkeypatch):
    newest = save(5)
    monkeypatch.delenv(RESUME_VARIABLE, raising=False)
    assert checkpoint_to_resume(tmp_path) is None
    monkeypatch.setenv(RESUME_VARIABLE, "1")
    assert checkpoint_to_resume(tmp_path) == str(newest)
