"""Rewards that workers compute, held against the same functions called here, and against TRL's own scoring."""

import os
import signal
import sys
import threading
import time
from collections import defaultdict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trlx_hybrid.errors import ConfigError, HybridError
from trlx_hybrid_ray.actors import Pickled, UserPool
from trlx_hybrid_ray.errors import PlacementError
from trlx_hybrid_ray.remote import remote_reward
from trlx_hybrid_ray.remote.reward import RewardActor
from trlx_hybrid_ray.worker_group import DeadlineError, WorkerDiedError, WorkerError


@pytest.fixture(scope="module", autouse=True)
def nodes(session_cluster):
    """Actors do not find test modules, so they get functions by value."""
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield session_cluster
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def judged(prompts, completions, bonus, **columns):
    """Tells rows apart by all they come with; None where it does not apply."""
    return [None if c.isspace() else len(p) + 3 * len(c) + b for p, c, b in zip(prompts, completions, bonus)]


async def judged_later(**columns):
    return judged(**columns)


class Judge:
    """Holds what cannot be sent."""

    def __init__(self):
        self.lock = threading.Lock()

    def __call__(self, **columns):
        with self.lock:
            return judged(**columns)


def logging(prompts, completions, log_extra, log_metric, trainer_state, **columns):
    assert not columns
    log_extra("length", [len(c) for c in completions])
    log_metric("mean_length", sum(len(c) for c in completions) / len(completions))
    return [float(trainer_state)] * len(prompts)


def dying(prompts, completions, marker, **columns):
    """Ends its process at the row "die", unless it did so before."""
    if "die" in completions and not os.path.exists(marker):
        open(marker, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return [float(len(c)) for c in completions]


def always_dying(prompts, **columns):
    os.kill(os.getpid(), signal.SIGKILL)


def process(prompts, **columns):
    return [float(os.getpid())] * len(prompts)


@pytest.fixture(scope="module")
def workers(nodes):
    with remote_reward(judged, workers=3) as found:
        yield found


rows = st.lists(st.tuples(st.text(max_size=5), st.text(max_size=5), st.floats(-9, 9)), min_size=1, max_size=12)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(rows)
def test_equal_to_the_function_called_here(workers, batch):
    prompts, completions, bonus = (list(column) for column in zip(*batch))
    arguments = {"prompts": prompts, "completions": completions, "completion_ids": [[1]] * len(batch), "bonus": bonus}
    assert workers(**arguments) == judged(**arguments)


@pytest.mark.parametrize("reward", [judged_later, Judge], ids=["asynchronous", "class"])
def test_other_forms_of_a_reward(reward):
    arguments = {"prompts": ["a", "b"], "completions": ["xy", " "], "bonus": [1.0, 2.0]}
    with remote_reward(reward, workers=1) as found:
        assert found(**arguments) == judged(**arguments) == [8.0, None]
        assert found.__name__ == reward.__name__


def test_work_is_shared_out_to_processes_of_their_own():
    with remote_reward(process, workers=2) as found:
        pids = found(prompts=["a", "b", "c"], completions=["", "", ""])
    assert pids[0] == pids[1] != pids[2]
    assert os.getpid() not in pids


def test_what_a_function_logs_arrives_in_the_order_of_rows():
    extra, metrics = defaultdict(list), defaultdict(list)
    with remote_reward(logging, workers=3, drop=["completion_ids", "environments"]) as found:
        rewards = found(
            prompts=["p"] * 5,
            completions=["", "x", "xx", "xxx", "xxxx"],
            completion_ids=[[0]] * 5,
            environments=[threading.Lock()] * 5,
            trainer_state=4,
            log_extra=lambda column, values: extra[column].extend(values),
            log_metric=lambda name, value: metrics[name].append(value),
        )
    assert rewards == [4.0] * 5
    assert extra == {"length": [0, 1, 2, 3, 4]}
    assert metrics == {"mean_length": [2.0]}


def test_any_argument_can_be_left_out():
    with remote_reward(lambda completions, **_: [float(len(c)) for c in completions], drop=["prompts"]) as found:
        assert found(prompts=["long"] * 2, completions=["a", "bb"]) == [1.0, 2.0]


def test_an_error_of_the_function_names_worker_row_code_and_cause(workers):
    with pytest.raises(WorkerError, match=r"'judged' failed on worker 0 \(node .* pid \d+\): TypeError") as caught:
        workers(prompts=["a"], completions=["b"], bonus=["none"])
    assert isinstance(caught.value.__cause__, TypeError)
    assert "in judged" in caught.value.traceback
    assert workers(prompts=["a"], completions=["b"], bonus=[0]) == [4.0]  # it goes on


def test_too_few_rewards_are_refused():
    with (
        remote_reward(lambda prompts, **_: [1.0], workers=1, name="short") as found,
        pytest.raises(WorkerError, match=r"Reward function 'short' returned 1 rewards for 2 rows"),
    ):
        found(prompts=["a", "b"], completions=["a", "b"])


@pytest.mark.slow
def test_a_dead_workers_rows_are_scored_again(tmp_path, capfd):
    marker = str(tmp_path / "died")
    completions = ["a", "die", "ccc", "dddd", "eeeee"]
    with remote_reward(dying, workers=3) as found:
        assert found(prompts=["p"] * 5, completions=completions, marker=marker) == [1.0, 3.0, 3.0, 4.0, 5.0]
        assert os.path.exists(marker)
        assert "Reward function 'dying' lost a worker: worker 0 (node" in capfd.readouterr().err
        assert found(prompts=["p"], completions=["die"], marker=marker) == [3.0]


def test_a_function_that_kills_its_process_is_named_after_the_second_time():
    with (
        remote_reward(always_dying, workers=1) as found,
        pytest.raises(WorkerDiedError, match=r"'always_dying' lost workers twice.*: scoring ends the process"),
    ):
        found(prompts=["a"], completions=["a"])


@pytest.mark.slow
def test_a_deadline_names_who_is_late():
    slow = remote_reward(lambda prompts, **_: time.sleep(60), name="slow", deadline=1)
    with slow, pytest.raises(DeadlineError, match=r"'slow' got no answer within 1 s from worker 0 \(node"):
        slow(prompts=["a"], completions=["a"])


# --- refused before anything trains ---------------------------------------------------------------------------------


def test_what_cannot_be_sent_is_named_with_the_way_out():
    lock = threading.Lock()

    def locked(prompts, **columns):
        with lock:
            return [1.0] * len(prompts)

    with pytest.raises(ConfigError, match=r"'locked' cannot be sent to its workers: .*'lock', a lock.*Give a class"):
        remote_reward(locked)


def test_an_argument_that_cannot_be_sent_is_named(workers):
    with pytest.raises(ConfigError, match=r"'judged': the argument 'held' cannot be sent.*drop=\['held'\]"):
        workers(prompts=["a"], completions=["b"], bonus=[1], held=[threading.Lock()])


def test_what_cannot_be_placed_is_refused_with_the_table():
    with pytest.raises(PlacementError, match=r"1000 CPUs are asked for") as caught:
        remote_reward(judged, workers=1, cpus=1000, name="greedy")
    assert "reward greedy" in str(caught.value)


def test_a_constructor_that_exits_is_named_and_does_not_end_the_script():
    class Leaving:
        def __init__(self):
            sys.exit("no key for the judge")

    with pytest.raises(WorkerError, match=r"'Leaving': worker 0 .* did not start: SystemExit: no key for the judge"):
        remote_reward(Leaving)


class WithoutReaper(RewardActor):
    """An actor on a node that starts no further process of this Python."""

    python = "/nowhere/python"

    def _start(self, *given):
        sys.executable = self.python
        super()._start(*given)


@pytest.mark.parametrize(("python", "why"), [("/nowhere/python", "No such file"), ("/bin/false", "exit code 1")])
def test_a_reaper_that_cannot_start_is_no_error_of_the_function(python, why):
    kind = type("Starved", (WithoutReaper,), {"python": python, "__module__": __name__})
    with pytest.raises(WorkerError, match=f"'judged': worker 0 .* did not start: .*{why}") as caught:
        UserPool(
            kind,
            Pickled.of(judged, "Reward function 'judged'", ""),
            ("judged", False),
            name="judged",
            role="reward",
            workers=1,
            cpus=0.1,
            gpus=0,
            start_deadline=100,
        )
    assert isinstance(caught.value.__cause__, HybridError)
    assert "the process that ends what an actor has started cannot start" in str(caught.value)
    assert "Let the node have room for more processes" in str(caught.value)


def test_a_module_that_workers_do_not_have_is_named(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("def score(prompts, **columns):\n    return [2.0] * len(prompts)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    from only_here import score

    with remote_reward(score) as found:  # the module lies beside the script: its folder is sent along
        assert found(prompts=["a"], completions=["b"]) == [2.0]
    (tmp_path / "only_here.py").unlink()
    with pytest.raises(WorkerError, match=r"'score' cannot be loaded on node .*No module named 'only_here'"):
        remote_reward(score)


@pytest.mark.parametrize(
    ("reward", "settings", "message"),
    [
        (3, {}, "takes a function, a class or a reward model, and got 3"),
        (judged, {"processing_class": object()}, "processing_class= is of a reward model"),
        (judged, {"deadline": 0}, "deadline=0"),
        (judged, {"workers": 0}, "workers=0"),
    ],
)
def test_wrong_settings_are_refused(reward, settings, message):
    with pytest.raises(ConfigError, match=message):
        remote_reward(reward, **settings)


# --- reward models --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory):
    """A small reward model with its tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForSequenceClassification
    from trlx_hybrid.testing.models import character_tokenizer

    torch.manual_seed(1)
    tokenizer = character_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
    )
    folder = tmp_path_factory.mktemp("model") / "tiny-judge"
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def trl_scores(tmp_path):
    """What TRL's own trainer makes of a reward model and a batch."""

    def scores(model, batch):
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer
        from trlx_hybrid.testing.models import character_tokenizer, tiny_model

        settings = {"use_cpu": True, "bf16": False, "report_to": "none", "per_device_train_batch_size": 2}
        trainer = GRPOTrainer(
            model=tiny_model(),
            args=GRPOConfig(output_dir=str(tmp_path), num_generations=2, **settings),
            reward_funcs=model,
            train_dataset=Dataset.from_dict({"prompt": ["a"]}),
            processing_class=character_tokenizer(),
        )
        rows = [{"prompt": prompt} for prompt in batch["prompts"]]
        found = trainer._calculate_rewards(rows, batch["prompts"], batch["completions"], batch["completion_ids"])
        return trainer.reward_func_names[0], found[:, 0].tolist()

    return scores


@pytest.mark.slow
def test_reward_model_scores_as_trl_does_bit_for_bit(saved_model, trl_scores):
    prompts = ["sort 1=", "sort 29141=", "1+1="]
    batch = {"prompts": prompts, "completions": ["1", "1149 2", ""], "completion_ids": [[1], [2], []]}
    name, expected = trl_scores(str(saved_model), batch)
    with remote_reward(str(saved_model), workers=1) as found:
        assert found(**batch) == expected
        assert found.__name__ == name == "tiny-judge"
    with remote_reward(str(saved_model), workers=2) as found:  # other batches, other rounding
        assert found(**batch) == pytest.approx(expected, abs=1e-6)


@pytest.mark.slow
def test_a_model_object_with_its_tokenizer(saved_model, trl_scores):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    batch = {"prompts": ["1+1=", "2="], "completions": ["2", "22"], "completion_ids": [[1], [2]]}
    _, expected = trl_scores(str(saved_model), batch)
    model = AutoModelForSequenceClassification.from_pretrained(saved_model, num_labels=1)
    tokenizer = AutoTokenizer.from_pretrained(saved_model)
    with remote_reward(model, processing_class=tokenizer) as found:
        assert found(**batch) == expected
