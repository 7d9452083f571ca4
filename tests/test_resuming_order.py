"""A run that is resumed ends with the bits of the run that was never stopped, wherever in its data it was stopped."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import trl
from datasets import Dataset
from trlx_hybrid import GRPOTrainer
from trlx_hybrid.errors import ConfigError
from trlx_hybrid.testing.chat import chat_tokenizer, chatty_model
from trlx_hybrid.trl.checkpoint.data_order import read_place

SCRIPTS = Path(__file__).parent / "scripts"
SHAPES = {
    "epochs": {"max_steps": 6},
    "a rollout for four steps": {"max_steps": 10, "steps_per_generation": 2, "num_iterations": 2},
    "a rollout for one step and a half": {
        "max_steps": 8,
        "per_device_train_batch_size": 4,
        "steps_per_generation": 3,
        "gradient_accumulation_steps": 2,
        "count": 7,
    },
    "a stream": {"max_steps": 6, "stream": True},
    "a stream, and a rollout for two steps": {"max_steps": 9, "steps_per_generation": 2, "stream": True},
}


@pytest.fixture
def stopped_at(run, prompts, tmp_path):
    """Train a run to its end, then train it from each of these steps; compare prompts, weights and logs."""

    def compare(places, max_steps, stream=False, count=4, **given):
        data = prompts.select(range(count))
        settings = {"max_steps": max_steps, "save_strategy": "steps", "save_steps": 1, "contrast": 0.3}
        settings |= {"per_device_train_batch_size": 8 // given.get("steps_per_generation", 1)} | given
        settings["train_dataset"] = data.to_iterable_dataset() if stream else data
        whole = run(GRPOTrainer, output_dir=str(tmp_path / "whole"), **settings)
        end = whole.weights()
        wrong = {}
        for place in places or range(1, max_steps):
            checkpoint = tmp_path / "whole" / f"checkpoint-{place}"
            again = run(GRPOTrainer, output_dir=str(tmp_path / f"from{place}"), resume=str(checkpoint), **settings)
            distance = max(float((value - end[name]).abs().max()) for name, value in again.weights().items())
            seen = again.recorder.completions
            apart = whole.recorder.completions[len(whole.recorder.completions) - len(seen) :] != seen
            if distance or apart or again.logs[:-1] != whole.logs[:-1]:
                wrong[place] = f"weights {distance:.0e} apart, {'other' if apart else 'the same'} completions"
            shutil.rmtree(tmp_path / f"from{place}")
        assert wrong == {}

    return compare


@pytest.mark.parametrize(
    ("shape", "places"),
    [
        ("epochs", (3, 4)),
        ("a rollout for four steps", (2, 7)),
        ("a stream", (1, 3)),
        ("a stream, and a rollout for two steps", (5,)),
    ],
)
def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(stopped_at, shape, places):
    stopped_at(places, **SHAPES[shape])


def calculate(expression: str) -> str:
    """Evaluate.

    Args:
        expression: what.
    """
    return "4"


def test_a_rollout_with_tools_resumes_in_its_middle(run, tmp_path):
    turns = ["four", '<tool_call>\n{"name": "calculate", "arguments": {"expression": "2+2"}}\n</tool_call>']
    tokenizer = chat_tokenizer(turns)
    settings = {
        "processing_class": tokenizer,
        "tools": [calculate],
        # In threads, the order of answers would decide which rows the engine computes together, and so how it rounds.
        "hybrid": {"engine": "vllm", "rollout_options": {"tools": "main"}},
        "max_completion_length": 60,
        "vllm_max_model_length": 800,
        "contrast": 0.3,
        "num_iterations": 2,
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 1,
        "train_dataset": Dataset.from_list([{"prompt": [{"role": "user", "content": f"{i}+2"}]} for i in range(8)]),
    }
    whole = run(GRPOTrainer, model=chatty_model(tokenizer, turns), output_dir=str(tmp_path / "whole"), **settings)
    assert whole.logs[0]["tools/call_frequency"] > 0
    checkpoint = str(tmp_path / "whole" / "checkpoint-1")
    again = run(GRPOTrainer, model=chatty_model(tokenizer, turns), resume=checkpoint, **settings)
    assert again.recorder.completions == whole.recorder.completions[8:]
    assert again.logs[:-1] == whole.logs[:-1]
    assert all(torch.equal(value, whole.weights()[name]) for name, value in again.weights().items())


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_every_step_resumes_bit_for_bit(stopped_at, shape):
    stopped_at(None, **SHAPES[shape])


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_every_step_resumes_bit_for_bit_on_two_ranks(two_processes, shape):
    settings = SHAPES[shape]
    for report in two_processes(SCRIPTS / "resuming_distributed.py", json.dumps(settings)):
        assert report["rollouts"]
        assert report["resumed"] == list(range(1, settings["max_steps"]))
        assert report["wrong"] == {}


def test_settings_that_changed_the_order_are_named(run, prompts, tmp_path, caplog):
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, "train_dataset": prompts.select(range(16))}
    whole = run(GRPOTrainer, output_dir=str(tmp_path / "whole"), **settings)
    checkpoint = str(tmp_path / "whole" / "checkpoint-1")
    settings |= {"output_dir": str(tmp_path / "again"), "resume": checkpoint}

    caplog.clear()
    run(GRPOTrainer, **settings)
    assert "other settings" not in caplog.text

    seeded = run(GRPOTrainer, data_seed=7, **settings)
    assert "(data_seed is 7, and was None), and goes on in the checkpoint's order of prompts" in caplog.text
    assert seeded.recorder.prompts == whole.recorder.prompts[8:]

    caplog.clear()
    run(GRPOTrainer, **settings | {"train_dataset": prompts.select(range(3, 23)), "num_generations": 8})
    assert "num_generations is 8, and was 4" in caplog.text
    assert "rows of train_dataset is 20, and was 16" in caplog.text
    assert "some may come twice" in caplog.text


def test_a_checkpoint_of_stock_trl_goes_on_in_the_order_of_its_epoch(run, prompts, tmp_path, caplog):
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 1, "train_dataset": prompts.select(range(4))}
    stock = run(trl.GRPOTrainer, output_dir=str(tmp_path / "stock"), **settings)
    again = run(GRPOTrainer, resume=str(tmp_path / "stock" / "checkpoint-3"), **settings)
    assert again.recorder.completions == stock.recorder.completions[3 * 8 :]
    assert all(torch.equal(value, stock.weights()[name]) for name, value in again.weights().items())

    settings |= {"steps_per_generation": 2, "num_iterations": 2, "per_device_train_batch_size": 4}
    whole = run(trl.GRPOTrainer, output_dir=str(tmp_path / "middle"), **settings)
    caplog.clear()
    again = run(GRPOTrainer, resume=str(tmp_path / "middle" / "checkpoint-2"), **settings)
    assert "lies in the middle of a rollout that it does not hold, as one that was written without" in caplog.text
    assert again.recorder.prompts == whole.recorder.prompts  # of both rollouts, each at its step


class Unsavable(GRPOTrainer):
    """Puts values into the rollout that no checkpoint can keep."""

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        return batch | {"notes": [object() for _ in inputs]}


def test_a_rollout_that_cannot_be_saved_is_not_taken_for_one_that_was(run, prompts, tmp_path, caplog):
    """Also not where the folder holds the rollout of an earlier run, which stopped at the same step."""
    shape = SHAPES["a rollout for four steps"] | {"max_steps": 2}
    settings = shape | {"per_device_train_batch_size": 4, "train_dataset": prompts, "output_dir": str(tmp_path)}
    settings |= {"save_strategy": "steps", "save_steps": 1}
    run(GRPOTrainer, **settings)
    checkpoint = tmp_path / "checkpoint-1"
    assert read_place(checkpoint).kept
    assert (checkpoint / "trlx_hybrid_rollout_0.pt").exists()
    run(Unsavable, **settings)
    assert not read_place(checkpoint).kept
    assert not (checkpoint / "trlx_hybrid_rollout_0.pt").exists()
    assert "its rollout holds 'notes', a object, which a checkpoint cannot keep" in caplog.text
    run(Unsavable, resume=str(checkpoint), **settings)
    assert "lies in the middle of a rollout that it does not hold" in caplog.text


def test_a_rollout_that_is_torn_ends_the_resume_with_the_name_of_its_file(run, tmp_path):
    settings = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "num_iterations": 2}
    run(GRPOTrainer, output_dir=str(tmp_path / "whole"), **settings)
    file = tmp_path / "whole" / "checkpoint-1" / "trlx_hybrid_rollout_0.pt"
    file.write_bytes(file.read_bytes()[:100])
    (file.parent / "trlx_hybrid_manifest.json").unlink()  # which would tell before the model is loaded
    with pytest.raises(ConfigError, match=r"trlx_hybrid_rollout_0\.pt cannot be read"):
        run(GRPOTrainer, resume=str(file.parent), **settings)
