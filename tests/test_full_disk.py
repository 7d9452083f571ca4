"""A disk that is full while a checkpoint is saved: the error names the way out, and the checkpoint before is whole.

The kernel's limit on the size of files stands for the disk: writes end half-way, in whichever library.
"""

import json
import pkgutil
import resource
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from trl import GRPOConfig
from trlx_hybrid import GRPOTrainer, HybridConfig, hookimpl
from trlx_hybrid.config import RESUME_VARIABLE
from trlx_hybrid.contract.protocols import Algorithm
from trlx_hybrid.errors import HybridError
from trlx_hybrid.own_loop.hybrid_engine import HybridEngine
from trlx_hybrid.testing.models import character_tokenizer, sorting_prompts, tiny_grpo, tiny_model
from trlx_hybrid.trl.checkpoint.checkpoints import newest_checkpoint

SCRIPTS = Path(__file__).parent / "scripts"

WRITERS = {
    "the first manifest": "trlx_hybrid.trl.checkpoint.manifest.begin",
    "the session's state": "trlx_hybrid.session.Session.save_state",
    "the place in the data": "trlx_hybrid.trl.checkpoint.data_order.DataOrder.save",
    "the weights": "transformers.Trainer._save",
    "the optimizer": "transformers.Trainer._save_optimizer_and_scheduler",
    "the generators": "transformers.Trainer._save_rng_state",
    "the state of the trainer": "transformers.TrainerState.save_to_json",
    "the last manifest": "trlx_hybrid.trl.checkpoint.manifest.end",
}
"""Who writes each part of a checkpoint."""


@contextmanager
def no_room(size=16):
    """Inside, no file of this process grows beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def fill(patch, writer, when=lambda: True, size=16):
    """Have this one write to a full disk, whenever `when` says so.

    Args:
        patch: pytest's `monkeypatch`.
        size: bytes that a file may have.
    """
    within, _, name = WRITERS[writer].rpartition(".")
    owner = pkgutil.resolve_name(within)
    written = getattr(owner, name)

    def with_no_room(*given, **named):
        with no_room(size) if when() else nullcontext():
            return written(*given, **named)

    patch.setattr(owner, name, with_no_room)


def digits(completions, **_):
    return [float(sum(c.isdigit() for c in text)) for text in completions]


def trainer_of(folder, steps):
    """A trainer with an algorithm, for a state of its session."""
    counts = type("Counts", (Algorithm,), {"name": "counts", "observe": lambda self, groups: None})

    def trlx_register(registry):
        registry.offer("algorithm", "counts", lambda session, options: counts())

    settings = {"save_strategy": "steps", "save_steps": 1, "use_vllm": False, "optim": "adamw_torch"}
    return GRPOTrainer(
        model=tiny_model(),
        reward_funcs=digits,
        args=GRPOConfig(**tiny_grpo(folder, per_device_train_batch_size=4, max_steps=steps, **settings)),
        train_dataset=sorting_prompts(),
        processing_class=character_tokenizer(),
        hybrid=HybridConfig(algorithm=["counts"]),
        plugins=[SimpleNamespace(trlx_register=hookimpl(trlx_register))],
    )


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory):
    """A trainer that has saved `checkpoint-1`, and its folder."""
    folder = tmp_path_factory.mktemp("full")
    trainer = trainer_of(folder, steps=1)
    trainer.train()
    yield trainer, folder
    trainer.session.close()


@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_is_named_with_the_way_out_and_the_checkpoint_before_stays(writer, saved_once, monkeypatch):
    trainer, folder = saved_once
    fill(monkeypatch, writer)
    monkeypatch.setattr(trainer.state, "global_step", 2)
    monkeypatch.setattr(trainer.args, "save_total_limit", 1)
    with pytest.raises(Exception) as caught:  # noqa: PT011 - what it says is the matter
        trainer._save_checkpoint(trainer.model, trial=None)
    for words in (
        f"{folder / 'checkpoint-2'} could not be saved: ",
        f" bytes are free on the disk of {folder}. Make room there, let save_total_limit keep fewer checkpoints, or ",
        f"with resume_from_checkpoint=True or {RESUME_VARIABLE}=1, the run goes on from checkpoint-1, which is whole.",
        "checkpoint-2 holds a part, is passed over",
    ):
        assert words in str(caught.value)
    assert isinstance(caught.value, HybridError)
    assert newest_checkpoint(folder) == folder / "checkpoint-1"


def test_a_full_disk_is_named_before_the_checkpoint_is_pushed(saved_once, monkeypatch):
    """Its text has safetensors' words for an error of the system, and is no such error itself."""
    trainer, _ = saved_once
    fill(monkeypatch, "the weights", size=8192)  # room for the model's configuration, and not for its weights
    monkeypatch.setattr(trainer.state, "global_step", 2)
    monkeypatch.setattr(trainer.args, "push_to_hub", True)
    with pytest.raises(HybridError, match=r"checkpoint-2 could not be saved: .*\(os error \d+\)"):
        trainer._save_checkpoint(trainer.model, trial=None)


def test_what_is_no_checkpoint_keeps_its_own_error(saved_once, monkeypatch, tmp_path):
    trainer, _ = saved_once
    fill(monkeypatch, "the weights")
    with pytest.raises(Exception, match="File too large") as caught:
        trainer.save_model(str(tmp_path))
    assert not isinstance(caught.value, HybridError)


def test_a_run_that_met_a_full_disk_goes_on_from_the_checkpoint_before(tmp_path, monkeypatch):
    whole = trainer_of(tmp_path / "whole", steps=3)
    whole.train()
    whole.session.close()
    cut = trainer_of(tmp_path / "cut", steps=3)  # which seeds the random generators
    fill(monkeypatch, "the optimizer", when=lambda: cut.state.global_step == 2)
    with pytest.raises(HybridError, match=r"checkpoint-2 could not be saved: .* goes on from checkpoint-1"):
        cut.train()
    cut.session.close()
    monkeypatch.undo()
    monkeypatch.setenv(RESUME_VARIABLE, "1")
    again = trainer_of(tmp_path / "cut", steps=3)
    again.train()
    again.session.close()
    for mine, theirs in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_state_of_a_loop_of_ones_own_names_its_folder(tmp_path):
    run = HybridEngine(tiny_model(), character_tokenizer(), max_tokens=4)
    told = rf"HybridEngine.save_state cannot write to {tmp_path}: .* bytes are free"
    with pytest.raises(HybridError, match=told), no_room():
        run.save_state(tmp_path)
    run.close()


def test_the_state_of_a_loop_of_ones_own_is_missed_by_all_ranks(two_processes, tmp_path):
    folder = tmp_path / "state"
    for report in two_processes(SCRIPTS / "full_disk_loop.py", folder, timeout=120.0):
        assert report["error"].startswith(f"HybridError: HybridEngine.save_state cannot write to {folder}: ")
        assert report["seen"] == {
            "weight_version": 0,
            "step": 0,
            "algorithms": {},
        }  # whose file is there when a rank goes on


@pytest.mark.parametrize("writer", ["the weights", "the generators"])
def test_no_rank_waits_for_one_whose_disk_is_full(writer, two_processes, tmp_path):
    rank = 1 if writer == "the generators" else 0  # which each rank writes its own of
    for report in two_processes(SCRIPTS / "full_disk_distributed.py", tmp_path / "run", writer, rank, timeout=120.0):
        assert report["kind"] == "HybridError"
        assert report["error"].startswith(f"On rank {rank}: {tmp_path / 'run' / 'checkpoint-2'} could not be saved: ")
        assert "goes on from checkpoint-1, which is whole" in report["error"]
    assert not json.loads((tmp_path / "run" / "checkpoint-2" / "trlx_hybrid_manifest.json").read_text())["ended"]
