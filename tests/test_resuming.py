"""A run that its launcher started again goes on from the newest checkpoint that was written to its end."""

import json
import shutil

import pytest
import torch
from accelerate import Accelerator
from trlx_hybrid import GRPOTrainer
from trlx_hybrid.config import RESUME_VARIABLE
from trlx_hybrid.trl.checkpoint.checkpoints import checkpoint_to_resume, newest_checkpoint


@pytest.fixture(autouse=True)
def first_start(monkeypatch):
    monkeypatch.delenv(RESUME_VARIABLE, raising=False)


@pytest.fixture
def save(tmp_path):
    def make(step, ranks=1, *, state=True, generators=True):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        for rank in range(ranks if generators else 0):
            name = "rng_state.pth" if ranks == 1 else f"rng_state_{rank}.pth"
            torch.save({"cpu": torch.random.get_rng_state()}, folder / name)
            torch.save({}, folder / "optimizer.pt")
            torch.save({}, folder / "pytorch_model.bin")
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
    assert newest_checkpoint(tmp_path) == whole


def test_one_without_training_state_counts(tmp_path, save):
    assert newest_checkpoint(tmp_path) is None
    assert newest_checkpoint(tmp_path / "nowhere") is None
    assert newest_checkpoint(tmp_path) is None
    weights_only = save(3, generators=False)
    assert newest_checkpoint(tmp_path) == weights_only


def test_a_first_start_resumes_nothing(tmp_path, save, monkeypatch):
    newest = save(5)
    assert checkpoint_to_resume(tmp_path) is None
    monkeypatch.setenv(RESUME_VARIABLE, "1")
    assert checkpoint_to_resume(tmp_path) == str(newest)


def test_a_run_that_is_started_again_ends_like_one_that_nothing_happened_to(run, tmp_path, monkeypatch, capsys):
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1}
    whole = run(GRPOTrainer, output_dir=str(tmp_path / "whole"), **settings)
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    shutil.rmtree(tmp_path / "killed" / "checkpoint-4")
    (tmp_path / "killed" / "checkpoint-3" / "trainer_state.json").unlink()  # it died while it saved this one
    monkeypatch.setenv(RESUME_VARIABLE, "1")
    capsys.readouterr()
    again = run(GRPOTrainer, output_dir=str(tmp_path / "killed"), **settings)
    assert f"started again, going on from {tmp_path / 'killed' / 'checkpoint-2'}\n" in capsys.readouterr().err
    assert again.recorder.completions == whole.recorder.completions[2 * 8 :]
    assert again.logs[:-1] == whole.logs[:-1]  # the last is the mean loss of the steps that this process took
    assert all(torch.equal(value, whole.weights()[name]) for name, value in again.weights().items())


@pytest.mark.parametrize(("count", "length"), [(32, {"max_steps": 2}), (4, {"max_steps": -1, "num_train_epochs": 1})])
def test_a_run_that_had_ended_takes_no_further_step(run, prompts, tmp_path, monkeypatch, count, length):
    settings = {"output_dir": str(tmp_path / "ended"), "save_strategy": "steps", "save_steps": 1} | length
    settings["train_dataset"] = prompts.select(range(count))
    ended = run(GRPOTrainer, **settings)
    assert ended.trainer.state.global_step == 2
    monkeypatch.setenv(RESUME_VARIABLE, "1")
    again = run(GRPOTrainer, **settings)
    assert again.trainer.state.global_step == 2
    assert again.recorder.completions == []
    assert again.logs[:2] == ended.logs[:2]
    assert all(torch.equal(value, ended.weights()[name]) for name, value in again.weights().items())
    assert sorted(path.name for path in (tmp_path / "ended").glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]


def test_a_run_without_a_checkpoint_starts_over_and_says_so(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(RESUME_VARIABLE, "1")
    started = run(GRPOTrainer, max_steps=1)
    assert f"no whole checkpoint in {started.trainer.args.output_dir}: starting over" in capsys.readouterr().err
    assert started.trainer.state.global_step == 1


def test_what_the_script_says_itself_counts(run, tmp_path, monkeypatch, capsys):
    settings = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1, "output_dir": str(tmp_path / "same")}
    first = run(GRPOTrainer, **settings)
    monkeypatch.setenv(RESUME_VARIABLE, "1")
    capsys.readouterr()
    again = run(GRPOTrainer, resume=False, **settings)
    assert "started again" not in capsys.readouterr().err
    assert again.recorder.completions == first.recorder.completions


@pytest.mark.parametrize("rows", [4, 1])
def test_a_loss_without_memory_names_the_rows_what_fits_and_the_checkpoint(run, tmp_path, monkeypatch, rows):
    whole = {"save_strategy": "steps", "save_steps": 1, "output_dir": str(tmp_path / "ended"), "max_steps": 3}
    whole |= {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 4 // rows, "num_generations": 4}
    done, backward = [], Accelerator.backward

    def exhausting(self, *args, **kwargs):
        done.append(1)
        if len(done) > 8 // rows:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return backward(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Accelerator, "backward", exhausting)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            run(GRPOTrainer, **whole)
    note = next(note for note in caught.value.__notes__ if note.startswith("It was the loss of"))
    assert ("of 4 rows with " if rows == 4 else "of 1 row with ") in note
    assert "in step 3." in note
    few = "per_device_train_batch_size=1, gradient_accumulation_steps=4." if rows > 1 else "max_completion_length below"
    assert few in note
    assert f"The last checkpoint is {tmp_path / 'ended' / 'checkpoint-2'}: train(resume" in note
    resumed = run(GRPOTrainer, **whole, train=False)
    resumed.trainer.train(resume_from_checkpoint=True)
    uninterrupted = run(GRPOTrainer, **whole | {"output_dir": str(tmp_path / "at once")}).weights()
    assert all(torch.equal(weight, uninterrupted[name]) for name, weight in resumed.weights().items())


def test_a_rollout_without_memory_names_no_rows_of_a_loss(run):
    def exhausting(completions, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError) as caught:
        run(GRPOTrainer, reward_funcs=exhausting)
    assert not any("the loss of" in note for note in caught.value.__notes__)
