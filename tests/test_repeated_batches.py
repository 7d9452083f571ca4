"""A generation batch is read once, and equal prompts are tokenised once: the run is the same, and its reader is asked
less often."""

import math
from types import SimpleNamespace

import pytest
import torch
import trl
import trlx_hybrid
from accelerate.data_loader import prepare_data_loader
from datasets import Dataset
from torch.utils.data import DataLoader
from trl.trainer.utils import repeat_iterable_dataset
from trlx_hybrid.testing.models import tiny_model
from trlx_hybrid.trl.generation.prompts import plain, tokenised
from trlx_hybrid.trl.generation.repeated_batches import (
    CollatedOnce,
    ReadOnce,
    Repeated,
    begin_epoch,
    warn_of_shards,
    whole,
)

GRPO = trlx_hybrid.GRPOTrainer
FOUR = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}


class Looks(GRPO):
    """A user's class that looks at the batches, so that each is read as TRL reads it."""

    def get_batch_samples(self, *args, **kwargs):
        batches, count = super().get_batch_samples(*args, **kwargs)
        assert all(isinstance(batch, list) for batch in batches)
        return batches, count


@pytest.fixture
def reads(monkeypatch):
    found, stock = [], Dataset.__getitems__

    def counted(self, numbers):
        found.append(list(numbers))
        return stock(self, numbers)

    monkeypatch.setattr(Dataset, "__getitems__", counted)
    return found


def test_each_batch_is_read_once_and_the_run_is_the_same(run, reads):
    ended, counts = [], []
    for kind in (GRPO, Looks):
        reads.clear()
        ended.append(run(kind, use_vllm=True, seed=3, **FOUR))
        counts.append(len(reads))
    assert counts == [4, 13]  # accelerate reads one batch ahead
    ours, theirs = ended
    assert ours.logs == theirs.logs
    assert ours.recorder.prompts == theirs.recorder.prompts
    assert ours.recorder.kwargs == theirs.recorder.kwargs
    for name, weight in theirs.weights().items():
        assert torch.equal(ours.weights()[name], weight), name


@pytest.mark.parametrize(
    ("class_", "count"),
    [(trlx_hybrid.RLOOTrainer, 3), (trlx_hybrid.DistillationTrainer, 2)],  # the second's epoch ends with step 2
)
def test_other_trainers_read_each_batch_once(run, reads, class_, count):
    config = getattr(trl, class_.__name__.replace("Trainer", "Config"))
    given = {"teacher_model": tiny_model()} if class_ is trlx_hybrid.DistillationTrainer else {"beta": 0.0}
    run(class_, config_class=config, use_vllm=True, max_steps=2, **FOUR, **given)
    assert len(reads) == count


def test_stock_runs_and_readers_in_other_processes_stay_as_they_are(run, reads):
    run(GRPO, max_steps=1, **FOUR)
    assert len(reads) == 5
    reads.clear()
    finished = run(GRPO, use_vllm=True, train=False, dataloader_num_workers=1)
    assert isinstance(finished.trainer.get_train_dataloader().dataset, Dataset)
    assert not isinstance(finished.trainer.data_collator, CollatedOnce)


def test_epochs_of_one_batch_are_sampled_anew(run, prompts):
    """Without shuffling, an epoch begins with the rows with which the last one ended."""
    few = prompts.select(range(4))
    given = {"shuffle_dataset": False, "max_steps": -1, "num_train_epochs": 3}
    finished = run(GRPO, use_vllm=True, train_dataset=few, **given, **FOUR)
    assert finished.trainer.state.global_step == 3
    assert finished.recorder.prompts == [few[i // 4 % 4]["prompt"] for i in range(48)]


def test_a_run_that_resumes_within_a_rollout_goes_on_as_it_would_have(run, tmp_path):
    given = {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
    given |= {"use_vllm": True, "save_strategy": "steps", "save_steps": 1, "max_steps": 4}
    through = run(GRPO, **given)
    folder = f"{through.trainer.args.output_dir}/checkpoint-1"
    resumed = run(GRPO, resume=folder, **given)
    for name, weight in through.weights().items():
        assert torch.equal(resumed.weights()[name], weight), name


def test_a_repeated_batch_is_its_rows():
    rows = [{"prompt": "a", "image": torch.ones(2)}, {"prompt": "b", "image": torch.zeros(2)}]
    data = ReadOnce(Dataset.from_list([{"prompt": row["prompt"]} for row in rows]))
    assert len(data) == 2
    assert data[1] == {"prompt": "b"}
    assert data.column_names == ["prompt"]
    assert data.__getitems__([0, 1]) is data.__getitems__([0, 1])
    assert data.__getitems__([1]) == [{"prompt": "b"}]
    collate = CollatedOnce(list)
    first, again = collate(rows), collate(rows)
    assert first == rows
    assert isinstance(again, Repeated)
    assert list(again) == [again[0], again[1]] == first
    assert "labels" not in again
    assert whole(again, "cpu")[0]["image"].tolist() == [1, 1]
    assert whole(first, "cpu") is first
    before = data.__getitems__([1])
    begin_epoch(type("Loader", (), {"dataset": data}))
    assert data.__getitems__([1]) is not before


def test_equal_prompts_that_follow_each_other_are_tokenised_once():
    asked = []

    def tokenise(prompts):
        asked.append(list(prompts))
        return [[len(p), ord(p[0])] for p in prompts], None, {}

    ids, images, fields = tokenised(tokenise, ["ab", "ab", "c", "ab", "ab", "ab"])
    assert asked == [["ab", "c", "ab"]]
    assert ids == [[2, 97], [2, 97], [1, 99], [2, 97], [2, 97], [2, 97]]
    assert len({id(row) for row in ids}) == 6  # a list that one row changes is no other row's
    assert (images, fields) == (None, {})
    assert tokenised(tokenise, ["a", "b"])[0] == [[1, 97], [1, 98]]
    more = tokenised(lambda prompts: ([[1]] * len(prompts), None, {"kinds": [[0]] * len(prompts)}), ["a", "a"])
    assert more == ([[1], [1]], None, {"kinds": [[0], [0]]})


def test_only_texts_are_compared():
    assert plain(["a", [{"role": "user", "content": "b"}, {"role": "assistant", "content": None}]])
    assert plain([[{"role": "assistant", "tool_calls": []}]])
    assert not plain([[{"role": "user", "content": [{"type": "image", "image": object()}]}]])


@pytest.mark.parametrize(("world", "repeats"), [(1, 4), (2, 1), (2, 3), (2, 4), (3, 2), (4, 6)])
@pytest.mark.parametrize("shards", [1, 4])
def test_prompts_that_ranks_never_read_from_their_shards_are_told(world, repeats, shards):
    """One prompt of each rank in a batch, read as accelerate lets the ranks read it."""
    dataset = Dataset.from_dict({"at": range(48)}).to_iterable_dataset(num_shards=shards)
    stream = repeat_iterable_dataset(dataset, 1, world, repeats)
    read = [
        row["at"]
        for rank in range(world)
        for batch in [
            *prepare_data_loader(
                DataLoader(stream, 1, collate_fn=list),
                num_processes=world,
                process_index=rank,
                put_on_device=False,
                dispatch_batches=False,
            )
        ][::repeats]
        for row in batch
    ]
    said = []
    run = SimpleNamespace(say_once=lambda key, text, *values: said.append(text % values))
    accelerator = SimpleNamespace(num_processes=world, split_batches=False)
    args = SimpleNamespace(steps_per_generation=repeats, gradient_accumulation_steps=repeats)
    warn_of_shards(SimpleNamespace(accelerator=accelerator, args=args), run, dataset)
    lost = math.gcd(world, repeats) if shards >= world else 1
    assert len({*read}) == 48 // lost
    assert len(read) == 48
    beginning = f"One in {lost} prompts of train_dataset is trained, and each of these {lost} times."
    assert [text[: len(beginning)] for text in said] == [beginning] * (lost > 1)
