"""A restart takes the newest whole checkpoint of its own run, and says what it passes over."""

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
import trl
from trlx_hybrid import GRPOTrainer
from trlx_hybrid.config import RESUME_VARIABLE
from trlx_hybrid.errors import ConfigError
from trlx_hybrid.trl.checkpoint.checkpoints import checkpoint_to_resume, newest_checkpoint
from trlx_hybrid.trl.checkpoint.run_identity import IDENTITY_FILE

SCRIPTS = Path(__file__).parent / "scripts"
SAVING = {"save_strategy": "steps", "save_steps": 1}


@pytest.fixture(autouse=True)
def first_start(monkeypatch):
    monkeypatch.delenv(RESUME_VARIABLE, raising=False)


@pytest.fixture
def saved(run, tmp_path):
    """Return the folder of a run of two steps, with a checkpoint of each, and the run."""

    def train(name="run", **settings):
        folder = tmp_path / name
        return folder, run(GRPOTrainer, output_dir=str(folder), **SAVING | {"max_steps": 2} | settings)

    return train


class Dies:
    """A reward function that ends the run in its second batch, as a kill would."""

    __name__ = "dies"

    def __init__(self):
        self.calls = 0

    def __call__(self, completions, **kwargs):
        self.calls += 1
        if self.calls > 1:
            raise KeyboardInterrupt
        return [float(sum(c.isdigit() for c in text)) for text in completions]


def test_a_restart_goes_on_with_its_own_run_and_not_with_an_earlier_one(run, saved, monkeypatch, capsys):
    settings = {"max_steps": 3, "learning_rate": 1e-3}
    folder, _ = saved(max_steps=3, seed=1)
    (folder / "checkpoint-3" / "optimizer.bin").write_bytes(b"of the earlier run")
    own = saved("own", **settings)[1]
    with pytest.raises(KeyboardInterrupt):
        run(GRPOTrainer, output_dir=str(folder), reward_funcs=Dies(), **SAVING | settings)

    monkeypatch.setenv(RESUME_VARIABLE, "1")
    capsys.readouterr()
    again = run(GRPOTrainer, output_dir=str(folder), **SAVING | settings)
    assert again.recorder.completions == own.recorder.completions[8:]  # from its own checkpoint-1
    said = capsys.readouterr().err
    assert "passed over checkpoint-3: another run saved it" in said
    assert f"going on from {folder / 'checkpoint-1'}\n" in said
    assert not (folder / "checkpoint-3" / "optimizer.bin").exists()  # it is no part of what was saved in its place
    assert newest_checkpoint(folder) == folder / "checkpoint-3"


def test_a_run_that_died_before_its_first_checkpoint_starts_over(run, saved, monkeypatch, capsys):
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    folder, earlier = saved(seed=1)
    with pytest.raises(KeyboardInterrupt):
        run(GRPOTrainer, output_dir=str(folder), reward_funcs=Dies(), **settings)
    monkeypatch.setenv(RESUME_VARIABLE, "1")
    capsys.readouterr()
    again = run(GRPOTrainer, output_dir=str(folder), **settings)
    assert len(again.recorder.completions) == 2 * 8
    assert f"no whole checkpoint of this run in {folder}: starting over" in capsys.readouterr().err
    assert not all(torch.equal(value, earlier.weights()[name]) for name, value in again.weights().items())


def test_a_launch_whose_first_start_died_before_training_starts_over(run, saved, monkeypatch, capsys):
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    monkeypatch.setenv("TRLX_HYBRID_LAUNCH", "earlier")
    folder, _ = saved(seed=1)
    for name, value in {"TRLX_HYBRID_LAUNCH": "later", "TRLX_HYBRID_RESTART_COUNT": "1", RESUME_VARIABLE: "1"}.items():
        monkeypatch.setenv(name, value)
    capsys.readouterr()
    assert checkpoint_to_resume(folder) is None  # as for the trainer that looks by itself
    asked = capsys.readouterr().err
    again = run(GRPOTrainer, output_dir=str(folder), **settings)
    said = capsys.readouterr().err
    assert [line for line in said.splitlines() if line.startswith("trlx_hybrid: ")] == asked.splitlines()
    assert f"no whole checkpoint of this run in {folder}: starting over" in said
    assert "passed over checkpoint-2: it is of an earlier run: no start of this launch came to train() before" in said
    assert len(again.recorder.completions) == 2 * 8

    assert checkpoint_to_resume(folder) == str(folder / "checkpoint-2")
    capsys.readouterr()
    third = run(GRPOTrainer, output_dir=str(folder), **settings)  # which the same launch starts after that one
    assert f"going on from {folder / 'checkpoint-2'}" in capsys.readouterr().err
    assert not third.recorder.completions


def test_a_requeued_launch_goes_on_with_the_run_of_the_one_before(run, saved, monkeypatch, capsys):
    monkeypatch.setenv("TRLX_HYBRID_LAUNCH", "earlier")
    folder, _ = saved(seed=1)
    monkeypatch.delenv("TRLX_HYBRID_LAUNCH")  # which a launcher that was told to resume does not set
    monkeypatch.setenv(RESUME_VARIABLE, "1")
    for count in ("0", "1"):  # the first start of it may die before training, too
        monkeypatch.setenv("TRLX_HYBRID_RESTART_COUNT", count)
        capsys.readouterr()
        run(GRPOTrainer, output_dir=str(folder), save_strategy="steps", save_steps=2, max_steps=2)
        assert f"going on from {folder / 'checkpoint-2'}" in capsys.readouterr().err


def test_a_checkpoint_that_was_there_before_the_run_is_not_its_own(run, tmp_path, monkeypatch):
    """It has no manifest, as one of stock TRL."""
    folder = tmp_path / "run"
    run(trl.GRPOTrainer, output_dir=str(folder), max_steps=2, **SAVING)
    with pytest.raises(KeyboardInterrupt):
        run(GRPOTrainer, output_dir=str(folder), max_steps=2, reward_funcs=Dies(), save_strategy="steps", save_steps=2)
    assert newest_checkpoint(folder) is None


def test_a_checkpoint_without_a_manifest_is_taken_with_a_warning(run, tmp_path, monkeypatch, caplog):
    folder = tmp_path / "stock"
    stock = run(trl.GRPOTrainer, output_dir=str(folder), max_steps=3, **SAVING)
    shutil.rmtree(folder / "checkpoint-3")
    monkeypatch.setenv(RESUME_VARIABLE, "1")
    again = run(GRPOTrainer, output_dir=str(folder), max_steps=3, **SAVING)
    assert again.recorder.completions == stock.recorder.completions[2 * 8 :]
    assert f"{folder / 'checkpoint-2'} has no manifest" in caplog.text


def cut(name):
    def spoil(checkpoint):
        file = checkpoint / name
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

    return spoil


def zeros(name):
    def spoil(checkpoint):
        content = bytearray((checkpoint / name).read_bytes())
        content[-20_000:-10_000] = bytes(10_000)
        (checkpoint / name).write_bytes(content)

    return spoil


def removed(name):
    return lambda checkpoint: (checkpoint / name).unlink()


TORN = {
    "weights that are cut": (cut("model.safetensors"), "model.safetensors"),
    "an optimizer that is cut": (cut("optimizer.pt"), "optimizer.pt"),
    "a session's state that is cut": (cut("hybrid_state.json"), "hybrid_state.json"),
    "a place in the data that is cut": (cut("trlx_hybrid_data.pt"), "trlx_hybrid_data.pt"),
    "ten kB of zeros in the weights": (zeros("model.safetensors"), "model.safetensors"),
    "ten kB of zeros in the optimizer": (zeros("optimizer.pt"), "optimizer.pt"),
    "no optimizer": (removed("optimizer.pt"), "optimizer.pt"),
    "no schedule": (removed("scheduler.pt"), "scheduler.pt"),
    "no generators": (removed("rng_state.pth"), "rng_state.pth"),
    "a state of the trainer that is cut": (cut("trainer_state.json"), "trainer_state.json"),
}


def test_a_checkpoint_that_is_torn_is_passed_over_by_name(run, saved, tmp_path, monkeypatch, capsys):
    folder, whole = saved(hybrid={"engine": "vllm"})
    assert newest_checkpoint(folder) == folder / "checkpoint-2"
    monkeypatch.setenv(RESUME_VARIABLE, "1")
    taken = {}
    for which, (spoil, file) in TORN.items():
        shutil.copytree(folder, tmp_path / which)
        if (tmp_path / which / "checkpoint-2" / file).exists():
            spoil(tmp_path / which / "checkpoint-2")
        newest = checkpoint_to_resume(tmp_path / which)
        said = capsys.readouterr().err
        if newest != str(tmp_path / which / "checkpoint-1") or f"passed over checkpoint-2: {file}" not in said:
            taken[which] = newest, said
    assert taken == {}
    torn = tmp_path / "no optimizer"
    again = run(GRPOTrainer, output_dir=str(torn), max_steps=2, hybrid={"engine": "vllm"}, **SAVING)
    assert all(torch.equal(value, whole.weights()[name]) for name, value in again.weights().items())
    assert newest_checkpoint(torn) == torn / "checkpoint-2"


def test_a_torn_checkpoint_of_stock_trl_is_passed_over(run, tmp_path):
    folder = tmp_path / "stock"
    run(trl.GRPOTrainer, output_dir=str(folder), max_steps=2, **SAVING)
    taken = {}
    for which, (spoil, file) in TORN.items():
        if file in ("model.safetensors", "optimizer.pt", "trainer_state.json") and "zeros" not in which:
            shutil.copytree(folder, tmp_path / which)
            spoil(tmp_path / which / "checkpoint-2")
            taken[which] = newest_checkpoint(tmp_path / which).name
    assert len(taken) == 4
    assert set(taken.values()) == {"checkpoint-1"}


def test_more_ranks_than_a_checkpoint_was_saved_with_go_on_from_it(saved, monkeypatch):
    folder, _ = saved()
    monkeypatch.setenv(RESUME_VARIABLE, "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert checkpoint_to_resume(folder) == str(folder / "checkpoint-2")


@pytest.mark.slow
def test_two_ranks_go_on_from_what_one_saved_and_are_told_what_differs(two_processes, saved, tmp_path):
    folder, _ = saved(max_steps=1, optim="sgd")
    for report in two_processes(SCRIPTS / "restart_distributed.py", folder):
        assert (report["steps"], report["rollouts"]) == (3, 2)
        assert report["manifest"]["ranks"] == 2
        assert {"rng_state_0.pth", "rng_state_1.pth"} <= report["manifest"]["files"].keys()
        if report["rank"] == 0:
            assert "was saved by 1 rank, and goes on with 2 ranks" in report["said"]


@pytest.mark.slow
def test_a_shard_that_is_cut_sends_two_ranks_back_to_the_checkpoint_before(two_processes, tmp_path):
    folder = tmp_path / "run"
    shards = [f"pytorch_model_fsdp_0/__{rank}_0.distcp" for rank in range(2)]
    for report in two_processes(SCRIPTS / "restart_distributed.py", folder, "sharded"):
        assert report["rollouts"] == 3
        assert {*shards, "pytorch_model_fsdp_0/.metadata"} <= report["manifest"]["files"].keys()
    cut(shards[1])(folder / "checkpoint-3")
    for report in two_processes(SCRIPTS / "restart_distributed.py", folder, "sharded"):
        assert (report["steps"], report["rollouts"]) == (3, 1)
        if report["rank"] == 0:
            assert f"passed over checkpoint-3: {shards[1]} has" in report["said"]


def test_a_checkpoint_that_a_script_names_has_to_be_what_was_saved(run, saved):
    folder, _ = saved()
    zeros("model.safetensors")(folder / "checkpoint-2")
    with pytest.raises(ConfigError, match=r"checkpoint-2 is not whole: model\.safetensors holds other bytes"):
        run(GRPOTrainer, resume=str(folder / "checkpoint-2"), max_steps=3)


def test_the_last_one_is_the_last_whole_one(run, saved):
    folder, whole = saved(max_steps=3)
    removed("optimizer.pt")(folder / "checkpoint-3")
    again = run(GRPOTrainer, output_dir=str(folder), max_steps=3, resume=True)
    assert again.recorder.completions == whole.recorder.completions[2 * 8 :]


def test_a_save_that_was_killed_at_its_end_leaves_the_older_checkpoint(run, tmp_path, monkeypatch, capsys):
    """All but the manifest is written; with `save_total_limit=1` the older one would have gone by then."""
    from trlx_hybrid.trl.checkpoint import manifest

    ended, written = [], manifest.end

    def end(checkpoint, *rest):
        if ended:
            raise KeyboardInterrupt
        ended.append(checkpoint)
        written(checkpoint, *rest)

    folder = tmp_path / "run"
    monkeypatch.setattr(manifest, "end", end)
    with pytest.raises(KeyboardInterrupt):
        run(GRPOTrainer, output_dir=str(folder), save_total_limit=1, **SAVING)
    monkeypatch.undo()
    assert (folder / "checkpoint-2" / "trainer_state.json").exists()
    assert newest_checkpoint(folder) == folder / "checkpoint-1"
    again = run(GRPOTrainer, output_dir=str(folder), save_total_limit=1, resume=True, **SAVING)
    assert "passed over checkpoint-2: its save did not come to its end" in capsys.readouterr().err
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-3"]
    arguments = torch.load(folder / "checkpoint-3" / "training_args.bin", weights_only=False)
    assert arguments.save_total_limit == again.trainer.args.save_total_limit == 1


def test_weights_alone_are_whole(run, saved):
    folder, _ = saved(save_only_model=True)
    assert newest_checkpoint(folder) == folder / "checkpoint-2"
    cut("model.safetensors")(folder / "checkpoint-2")
    assert newest_checkpoint(folder) == folder / "checkpoint-1"


def test_a_second_process_in_the_folder_is_warned_of(run, saved, caplog):
    """Two starts at one time: as of a queue that takes a node for dead."""
    folder, first = saved(max_steps=1)
    run(GRPOTrainer, output_dir=str(folder), max_steps=1, resume=True, **SAVING)
    assert "Another process" not in caplog.text
    first.trainer._save_checkpoint(first.trainer.model, trial=None)
    assert "Another process has started this run again in" in caplog.text


def test_a_large_file_is_read_at_both_ends_and_between_them(tmp_path):
    from trlx_hybrid.trl.checkpoint.manifest import STRIDE, WHOLE, digest, parts

    file = tmp_path / "large"
    size = WHOLE + 3 * STRIDE
    with file.open("wb") as opened:
        opened.truncate(size)
    whole = digest(file)
    assert whole[0] == size
    for place in (0, STRIDE, size // STRIDE * STRIDE - STRIDE, size - 1):
        with file.open("r+b") as opened:
            opened.seek(place)
            opened.write(b"1")
        assert digest(file) != whole
        with file.open("r+b") as opened:
            opened.seek(place)
            opened.write(b"\0")
    assert sum(length for _, length in parts(10 << 30)) < (10 << 30) / 200


def test_ranks_that_see_different_checkpoints_are_refused(saved):
    from trlx_hybrid.trl.checkpoint.restart import newest_start, started

    folder, _ = saved(max_steps=1)
    apart = SimpleNamespace(rank=0, by_first=lambda work: work(), gather=lambda own: [own, (None, None)])
    with pytest.raises(ConfigError, match=r"\(rank 0: checkpoint-1, rank 1: none\).*folder that all nodes share"):
        started(apart, folder, lambda: newest_start(folder), saves=True, writes=True)


OPENED: list[list[str]] = []  # of the test that counts at the moment; a hook stays as long as its process


def note(event, arguments):
    if event == "open" and OPENED and str(arguments[0]).endswith(".pth"):
        OPENED[-1].append(Path(str(arguments[0])).name)


sys.addaudithook(note)


def of_1000_ranks(checkpoint):
    """Make it one that 1,000 ranks saved, with a file of generators each."""
    for rank in range(1000):
        shutil.copy(checkpoint / "rng_state.pth", checkpoint / f"rng_state_{rank}.pth")
    (checkpoint / "rng_state.pth").unlink()
    if (checkpoint / "trlx_hybrid_manifest.json").exists():
        from trlx_hybrid.trl.checkpoint import manifest

        manifest.end(checkpoint, manifest.read(checkpoint).run, 1000)


def test_at_a_restart_a_rank_opens_its_own_generators_only(run, saved, monkeypatch):
    """Rank 0 opens the files of all 1,000 ranks, and tells the others which checkpoint is whole."""
    folder, _ = saved(max_steps=1)
    of_1000_ranks(folder / "checkpoint-1")
    trainer = run(GRPOTrainer, output_dir=str(folder), train=False).trainer
    monkeypatch.setenv(RESUME_VARIABLE, "1")
    monkeypatch.setattr(transformers.Trainer, "train", lambda self, resume, *rest: self._load_rng_state(resume))
    monkeypatch.setattr(transformers.TrainingArguments, "world_size", 1000)
    sent, opened = [], {}

    def by_first(work):
        if trainer.session.ranks.rank == 0:
            sent.append(work())
        return sent[0]

    for rank in (0, 7):
        monkeypatch.setattr(transformers.TrainingArguments, "process_index", rank)
        trainer.session.ranks = SimpleNamespace(
            rank=rank,
            world=1000,
            by_first=by_first,
            gather=lambda own: [own] * 1000,
        )
        OPENED.append([])
        trainer.train()
        opened[rank] = set(OPENED.pop())
    assert len(opened[0]) == 1000
    assert len(opened[7]) == 1
    assert opened[7] == {"rng_state_7.pth"}


def test_in_a_script_with_a_process_group_one_rank_looks_at_checkpoints(saved, monkeypatch, capsys):
    folder, _ = saved(max_steps=1)
    of_1000_ranks(folder / "checkpoint-1")
    monkeypatch.setenv(RESUME_VARIABLE, "1")
    monkeypatch.setenv("WORLD_SIZE", "1000")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    sent, opened = [], {}

    def broadcast_object_list(held, src=0):
        sent.extend(held)
        held[:] = sent[: len(held)]

    monkeypatch.setattr(torch.distributed, "broadcast_object_list", broadcast_object_list)
    for rank in (0, 7):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        OPENED.append([])
        assert checkpoint_to_resume(folder) == str(folder / "checkpoint-1")
        opened[rank] = OPENED.pop()
    assert len(opened[7]) == 0
    assert len(opened[0]) == 1000
    assert "going on from" in capsys.readouterr().err
    found = list(sent)
    (folder / IDENTITY_FILE).write_text("{")
    sent.clear()
    for rank in (0, 7):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        with pytest.raises(ConfigError, match=f"{IDENTITY_FILE} cannot be read"):
            checkpoint_to_resume(folder)
    sent[:] = found
    shutil.rmtree(folder)
    with pytest.raises(ConfigError, match=r"rank 7 does not see .*checkpoint-1, from which rank 0 goes on"):
        checkpoint_to_resume(folder)
