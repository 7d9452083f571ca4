"""Rows that stay in flight over several optimizer steps, sampled by the real engine."""

import copy
from collections import Counter, defaultdict
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from datasets import Dataset, IterableDataset
from hypothesis import given as drawn
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from transformers import TrainerCallback
from trl.trainer.utils import RepeatSampler, repeat_iterable_dataset
from trlx_hybrid import GRPOTrainer
from trlx_hybrid.errors import ConfigError
from trlx_hybrid.testing.models import character_tokenizer, tiny_model
from trlx_hybrid.trl.generation.prompt_order import IndexedOrder, StreamedOrder
from trlx_hybrid.trl.scoring.divergence import thirds
from trlx_hybrid_trajectories.record import read

from tests.support.in_flight import Trajectories, Weights

LENGTH = 24
STALENESS = 2
ENDS = character_tokenizer().convert_tokens_to_ids([*"0123456789aeiou"])
IN_FLIGHT = {"engine": "vllm", "rollout_options": {"max_staleness": STALENESS}}
SETTINGS = {
    "max_completion_length": LENGTH,
    "max_steps": 6,
    "generation_kwargs": {"stop_token_ids": ENDS},
    "loss_type": "grpo",
}


class Unpicklable:
    """A connection."""

    def __deepcopy__(self, memo):
        raise TypeError("it is open")


class GeneratorKept(TrainerCallback):
    """Restores torch's generator after an evaluation, whose data loader draws from it; TRL shuffles batches by it."""

    def on_step_end(self, *args, **kwargs):
        self.state = torch.get_rng_state()

    def on_evaluate(self, *args, **kwargs):
        torch.set_rng_state(self.state)


def in_flight(run, tmp_path, name="run", **given):
    kept, weights = Trajectories(), Weights()
    settings = SETTINGS | {"hybrid": IN_FLIGHT, "output_dir": str(tmp_path / name)} | given
    done = run(GRPOTrainer, plugins=[kept], callbacks=[weights], **settings)
    return done, kept.batches, weights.of_version


def test_each_token_has_the_log_prob_of_the_version_that_sampled_it(run, tmp_path):
    done, batches, of_version = in_flight(run, tmp_path)
    ages = [
        step - version
        for step, batch in enumerate(batches)
        for trajectory in batch
        for version in trajectory.weight_versions
    ]
    assert max(ages) == STALENESS  # rows were in flight, and none for longer
    model = tiny_model().eval()
    for step, batch in enumerate(batches):
        for trajectory in batch:
            versions = trajectory.weight_versions
            assert versions == sorted(versions)
            assert versions[-1] <= step
            assert len(trajectory.completion_ids) <= LENGTH
            ids = torch.tensor([trajectory.prompt_ids + trajectory.completion_ids])
            for version in set(versions):
                model.load_state_dict(of_version[version])
                with torch.no_grad():
                    scored = model(ids).logits[0, len(trajectory.prompt_ids) - 1 : -1].float().log_softmax(-1)
                for token, of_token in enumerate(versions):
                    if of_token == version:
                        wanted = scored[token, trajectory.completion_ids[token]].item()
                        assert trajectory.logprobs[token] == pytest.approx(wanted, abs=1e-5)
    assert all(entry["hybrid/staleness/max"] <= STALENESS for entry in done.trainer.state.log_history[:-1])


def test_what_is_logged_recorded_and_replayed_knows_the_weights_of_each_token(run, tmp_path):
    seen, highest = tmp_path / "seen.jsonl", 1.01
    recorded = {"trajectories": {"record": str(seen), "record_limit": 8}}
    given = {"vllm_importance_sampling_clip_max": highest}
    hybrid = IN_FLIGHT | {"record": str(tmp_path / "batches"), "plugin_options": recorded}
    done, batches, of_version = in_flight(run, tmp_path, hybrid=hybrid, **given)
    wanted = [[t.weight_versions for t in batch] for batch in batches]
    found = [one.weight_versions for one in read(seen)]
    assert found == list(chain(*wanted))

    model = tiny_model().eval()
    for step, (batch, log) in enumerate(zip(batches, done.trainer.state.log_history[:-1], strict=True)):
        model.load_state_dict(of_version[step])
        tokens = defaultdict(list)
        lengths = sorted(range(8), key=lambda row: len(batch[row].completion_ids))
        for row, t in enumerate(batch):
            with torch.no_grad():
                scores = model(torch.tensor([t.prompt_ids + t.completion_ids])).logits[0, len(t.prompt_ids) - 1 : -1]
            now = scores.log_softmax(-1).gather(1, torch.tensor(t.completion_ids)[:, None])[:, 0]
            ratios = (now - torch.tensor(t.logprobs)).exp().tolist()
            third = ("short", "medium", "long")[lengths.index(row) * 3 // 8]
            for ratio, version in zip(ratios, t.weight_versions, strict=True):
                tokens[("staleness_0", "staleness_1", "staleness_2_up")[step - version]].append(ratio)
                tokens[third].append(ratio)
        logged = {name for name in log if name.startswith(("sampling/ratio/", "sampling/cut/"))}
        assert logged == {f"sampling/{what}/{part}" for what in ("ratio", "cut") for part in tokens}
        for part, ratios in tokens.items():
            cut = [min(ratio, highest) for ratio in ratios]
            assert log[f"sampling/ratio/{part}"] == pytest.approx(sum(cut) / len(cut), abs=1e-4)
            assert log[f"sampling/cut/{part}"] == pytest.approx(sum(r > highest for r in ratios) / len(ratios))
        assert not log.get("sampling/cut/staleness_0")  # rounding is not cut
    assert any(log.get("sampling/cut/staleness_1") for log in done.trainer.state.log_history)

    weights = done.weights()
    done.close()
    again = run(GRPOTrainer, **SETTINGS | given, hybrid=IN_FLIGHT | {"replay": str(tmp_path / "batches")})
    for replayed, log in zip(again.logs[:-1], done.logs[:-1], strict=True):
        assert replayed == log
    assert all(torch.equal(value, weights[name]) for name, value in again.weights().items())


def test_rows_are_short_medium_or_long_among_those_of_all_ranks():
    assert thirds(torch.tensor([5, 0, 1, 9, 9, 2, 0])).tolist() == [1, 0, 0, 1, 2, 0, 0]
    assert thirds(torch.tensor([3, 3, 3, 3, 3, 3])).tolist() == [0, 0, 1, 1, 2, 2]
    assert thirds(torch.tensor([0, 0])).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("rows", "given"),
    [
        (16, {}),
        (5, {}),
        (5, {"dataloader_drop_last": True, "max_steps": -1, "num_train_epochs": 3}),
        (5, {"streams": True}),
    ],
    ids=["within an epoch", "over three epochs", "three epochs without a last batch that is not full", "a stream"],
)
def test_every_row_is_trained_once(run, tmp_path, prompts, rows, given):
    chosen = prompts.select(range(rows))
    given = dict(given)
    dataset = {"train_dataset": chosen.to_iterable_dataset() if given.pop("streams", False) else chosen, **given}
    done, batches, _ = in_flight(run, tmp_path, **dataset)
    usual = run(GRPOTrainer, hybrid={"engine": "vllm"}, **SETTINGS | dataset)
    assert sorted(done.recorder.prompts) == sorted(usual.recorder.prompts)
    assert done.recorder.prompts != usual.recorder.prompts  # they come in another order
    assert all(len(batch) == 8 for batch in batches)


@pytest.mark.parametrize(
    ("step", "rows", "streams"), [(1, 16, False), (3, 16, False), (5, 16, False), (3, 5, False), (3, 5, True)]
)
def test_a_resumed_run_goes_on_to_the_token(run, tmp_path, prompts, step, rows, streams):
    dataset = prompts.select(range(rows))
    dataset = dataset.to_iterable_dataset(num_shards=2) if streams else dataset
    saving = {"save_strategy": "steps", "save_steps": 1, "train_dataset": dataset}
    whole, batches, _ = in_flight(run, tmp_path, "whole", **saving)
    weights = whole.weights()
    whole.close()
    checkpoint = tmp_path / "whole" / f"checkpoint-{step}"
    again, resumed, _ = in_flight(run, tmp_path, "again", resume=str(checkpoint), **saving)
    assert resumed == batches[step:]  # tokens, log-probs, versions and rewards
    assert again.logs[:-1] == whole.logs[:-1]  # the last is the mean loss of the steps that this process took
    assert all(torch.equal(value, weights[name]) for name, value in again.weights().items())


LOADERS = st.fixed_dictionaries(
    {name: st.integers(1, 3) for name in ("groups", "completions", "world", "repeats")}
    | {"rows": st.integers(9, 20), "drop_last": st.booleans(), "rank": st.integers(0, 2)}
)


def prepared(plan, dataset, **given):
    """The loader of one rank, as transformers and accelerate make it."""
    whole = DataLoader(
        dataset, plan["groups"] * plan["completions"], drop_last=plan["drop_last"], collate_fn=list, **given
    )
    rank = plan["rank"] % plan["world"]
    return prepare_data_loader(
        whole, num_processes=plan["world"], process_index=rank, put_on_device=False, dispatch_batches=False
    )


@examples(max_examples=50)
@drawn(LOADERS)
def test_prompts_are_read_ahead_in_the_loaders_order(plan):
    """On each rank, over epochs whose last batch would not be full."""
    groups, completions, repeats = plan["groups"] * plan["world"], plan["completions"], plan["repeats"]

    def loader():
        dataset = range(plan["rows"])
        return prepared(plan, dataset, sampler=RepeatSampler(dataset, completions, groups, repeats, seed=1))

    usual = loader()
    wanted = [row for _ in range(3) for batch in [*usual][::repeats] for row in batch[::completions]]
    order = IndexedOrder(range(plan["rows"]), loader(), completions, repeats)
    assert [next(order) for _ in wanted] == wanted
    assert len(wanted) == 3 * (plan["rows"] // groups) * plan["groups"]


@examples(max_examples=50)
@drawn(LOADERS, st.data())
def test_a_stream_is_read_ahead_in_the_loaders_order(plan, draw):
    """While the loader reads it, on each rank, shuffled anew in each epoch; and on from any place that was saved."""
    groups, completions, repeats = plan["groups"] * plan["world"], plan["completions"], plan["repeats"]
    rows = Dataset.from_dict({"at": range(plan["rows"])}).to_iterable_dataset(num_shards=3 if plan["world"] == 1 else 1)
    rows = rows.shuffle(1, buffer_size=4)
    loader = prepared(plan, repeat_iterable_dataset(rows, completions, groups, repeats))
    of_rank = plan["groups"] * completions

    def new(epoch):
        return StreamedOrder(loader, of_rank, completions, repeats, epoch)

    order, wanted, found, saved = new(0), [], [], []
    pending = draw.draw(st.sets(st.integers(0, 20)))
    for epoch in range(3):
        loader.set_epoch(epoch)
        for at, batch in enumerate(loader):
            if at % repeats == 0:
                wanted += [row["at"] for row in batch[::completions]]
                for _ in range(plan["groups"]):
                    found.append(order.row(next(order))["at"])
                    saved.append(copy.deepcopy(order.state()))
    assert found == wanted
    assert len(wanted) == 3 * (plan["rows"] // groups) * plan["groups"]

    at = draw.draw(st.integers(0, len(saved) - 1))
    again = new(saved[at]["first"] + len(saved[at]["ends"]))
    again.load_state(saved[at], pending)
    assert [again.row(next(again))["at"] for _ in wanted[at + 1 :]] == wanted[at + 1 :]
    for number in pending & {*range(at + 1)}:
        assert again.row(number)["at"] == wanted[number]


def test_a_stream_that_cannot_be_read_ahead_is_refused_by_name():
    def unlike(plan, dataset):
        return StreamedOrder(prepared(plan, dataset), 2, 1, 1, 0)

    plan = {"groups": 2, "completions": 1, "world": 1, "drop_last": False, "rank": 0}
    held = IterableDataset.from_generator(lambda opened: iter(()), gen_kwargs={"opened": Unpicklable()})
    with pytest.raises(ConfigError, match=r"cannot be copied to read them.*Open files and connections inside"):
        unlike(plan, held)
    with pytest.raises(ConfigError, match="Epoch 0 of the iterable training dataset has no whole batch of prompts"):
        next(unlike(plan, IterableDataset.from_generator(lambda: iter(()))))


def test_a_stream_whose_readers_share_an_iterator_is_refused_at_the_first_batch(run, tmp_path, prompts):
    """Each reader would get a part of the rows, and the loader's would not be trained."""
    shared = iter([*prompts] * 9)
    stream = IterableDataset.from_generator(lambda: shared)
    with pytest.raises(ConfigError, match="yields other rows to a second reader"):
        in_flight(run, tmp_path, train_dataset=stream, shuffle_dataset=False)


def test_a_stream_that_has_changed_is_not_paired_with_what_was_sampled(run, tmp_path, prompts):
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    whole, *_ = in_flight(run, tmp_path, "whole", train_dataset=prompts.to_iterable_dataset(), **saving)
    whole.close()
    changed = Dataset.from_list([*prompts][1:]).to_iterable_dataset()
    other, *_ = in_flight(run, tmp_path, "other", train=False, train_dataset=changed, **saving)
    with pytest.raises(ConfigError, match="yields other rows than in the run that wrote the checkpoint"):
        other.trainer.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))


def test_without_staleness_each_batch_is_sampled_to_its_end(run):
    usual = run(GRPOTrainer, hybrid={"engine": "vllm"}, **SETTINGS)
    usual_weights = usual.weights()
    usual.close()
    zero = run(GRPOTrainer, hybrid={"engine": "vllm", "rollout_options": {"max_staleness": 0}}, **SETTINGS)
    assert zero.recorder.completions == usual.recorder.completions
    assert zero.logs == usual.logs
    assert all(torch.equal(value, usual_weights[name]) for name, value in zero.weights().items())


def test_an_evaluation_beside_rows_in_flight_changes_nothing(run, tmp_path, prompts):
    usual, batches, _ = in_flight(run, tmp_path)
    usual.close()
    evaluating = {"eval_dataset": prompts.select(range(2)), "eval_strategy": "steps", "eval_steps": 1}
    evaluated, others, _ = in_flight(run, tmp_path, "evaluated", **evaluating)
    for one, other in zip(chain(*batches), chain(*others), strict=True):
        assert (one.completion_ids, one.weight_versions) == (other.completion_ids, other.weight_versions)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert sum("eval_loss" in entry for entry in evaluated.trainer.state.log_history) == SETTINGS["max_steps"]
    evaluated.close()
    again, *_ = in_flight(run, tmp_path, "again", train=False, **evaluating)
    again.trainer.add_callback(GeneratorKept())
    again.trainer.train()
    weights = usual.weights()
    assert all(torch.equal(value, weights[name]) for name, value in again.weights().items())


def test_batches_of_several_steps_count_them(run, tmp_path):
    """Each batch is trained for two optimizer steps, so a row that waits for one batch is used three steps later."""
    given = {
        "num_iterations": 2,
        "hybrid": {"engine": "vllm", "rollout_options": {"max_staleness": 3, "in_flight": 16}},
    }
    _, batches, _ = in_flight(run, tmp_path, **given)
    ages = {2 * at - min(t.weight_versions) for at, batch in enumerate(batches) for t in batch}
    assert len(batches) == 3
    assert ages == {0, 2}
    with pytest.raises(ConfigError, match=r"max_staleness=2.*used up to 3 steps after it began"):
        in_flight(
            run, tmp_path, "few", **given | {"hybrid": {"engine": "vllm", "rollout_options": {"max_staleness": 2}}}
        )


def refused_before_the_engine(run, tmp_path, checkpoint, message, **given):
    other, *_ = in_flight(run, tmp_path, "other", train=False, **given)
    with pytest.raises(ConfigError, match=message):
        other.trainer.train(resume_from_checkpoint=str(checkpoint))
    assert other.trainer.session.engine is None
    return other


def test_a_checkpoint_of_other_settings_is_refused_and_one_without_in_flight_rows_warns(run, tmp_path, caplog):
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    whole, *_ = in_flight(run, tmp_path, "whole", **saving)
    whole.close()
    checkpoint = str(tmp_path / "whole" / "checkpoint-2")
    for steps in (1, 3):
        other = {"hybrid": {"engine": "vllm", "rollout_options": {"max_staleness": steps}}}
        message = rf"max_staleness=2, and this run has {steps}\. Resume with max_staleness=2, or leave max_staleness"
        refused_before_the_engine(run, tmp_path, checkpoint, message, **saving | other)
    pool = copy.copy(whole.trainer._run.in_flight)
    for world, message in ((2, "ranks=1, and this run has 2"), (1, r"trlx_hybrid_in_flight_1\.pt is missing")):
        pool._session = SimpleNamespace(ranks=SimpleNamespace(rank=1, world=world))  # a rank that saved nothing
        pool._settings = pool._settings | {"ranks": world}
        with pytest.raises(ConfigError, match=message):
            pool.start(checkpoint)
    in_flight(run, tmp_path, "none", resume=checkpoint, **saving | {"hybrid": {"engine": "vllm"}})
    assert "has rows in flight, and this run keeps none" in caplog.text


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"generation_kwargs": {"stop": ["x"]}}, "its sampling has stop"),
        ({"top_k": 5}, "its sampling has top_k=5"),
        ({"vllm_importance_sampling_correction": False}, "nothing would correct for weights that have changed"),
        ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "num_generations": 3}, None),
        ({"per_device_train_batch_size": 6, "num_generations": 4, "gradient_accumulation_steps": 2}, None),
        ({"rollout_func": lambda prompts, trainer: {}}, "a rollout_func samples its rows"),
    ],
)
def test_what_it_cannot_serve_is_refused_before_an_engine_is_built(run, tmp_path, given, reason):
    if reason is None:
        in_flight(run, tmp_path, train=False, **given)  # groups are whole on this rank
        return
    with pytest.raises(ConfigError, match=reason):
        in_flight(run, tmp_path, train=False, **given)


@pytest.mark.parametrize(
    ("size", "dataset"),
    [(1, "indexed"), pytest.param(1, "streamed", marks=pytest.mark.slow), (2, "indexed")],
    ids=["an engine on each", "an engine on each, a stream", "one engine over both"],
)
def test_two_ranks(run, tmp_path, two_processes, size, dataset):
    ranks = two_processes(Path(__file__).parent / "scripts" / "in_flight_distributed.py", size, dataset)
    for rank in ranks:
        assert [len(batch) for batch in rank["whole"]] == [8] * 6
        ages = [
            step - version
            for step, batch in enumerate(rank["whole"])
            for t in batch
            for version in t["weight_versions"]
        ]
        assert max(ages) == STALENESS
        assert rank["resumed"] == rank["whole"][3:]
    seen = Counter(tuple(t["prompt_ids"]) for rank in ranks for batch in rank["whole"] for t in batch)
    assert len(seen) == sum(seen.values()) // 4  # no prompt twice: the dataset has more than the run trains
    assert set(seen) <= {tuple(prompt) for prompt in ranks[0]["prompts"]}
    checkpoint = tmp_path / "whole" / "checkpoint-3"
    refused_before_the_engine(run, tmp_path, checkpoint, "with ranks=2, and this run has 1. Resume with ranks=2")
