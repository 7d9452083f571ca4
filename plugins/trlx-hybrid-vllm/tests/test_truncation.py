"""Truncated completions, against the same run in which the tokens that end rows are the model's own end tokens."""

import pytest
from datasets import Dataset
from peft import LoraConfig
from trl import RLOOConfig
from trlx_hybrid import GRPOTrainer, RLOOTrainer
from trlx_hybrid.testing.chat import chat_tokenizer, chatty_model
from trlx_hybrid.testing.models import tiny_model

ENDS = list(range(70, 86))
SPOKEN = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"double {i}"}] for i in range(16)]})
TURNS = ['<tool_call>\n{"name": "double", "arguments": {"number": 3}}\n</tool_call>', "six", "sixty-six"]
CASES = {
    "padded": {},
    "packed": {"hybrid": {"engine": "vllm", "scoring": "packed"}},
    "in rounds": {"hybrid": {"engine": "vllm", "algorithm": ["dynamic_sampling"]}},
    "RLOO": {"trainer_class": RLOOTrainer, "config_class": RLOOConfig, "beta": 0.0},
    "with a reference": {"beta": 0.1, "peft_config": LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")},
}


def double(number: int) -> int:
    """
    Double a number.

    Args:
        number: The number.
    """
    return 2 * number


def longest(completion_ids, **columns):
    return [len(ids) + len(set(ids)) / 10 for ids in completion_ids]


def trained(run, model, source, trainer_class=GRPOTrainer, ends=ENDS, **given):
    """A run whose rows end at these tokens: the model's own, or `stop_token_ids`, which TRL does not know."""
    own = model.generation_config.eos_token_id
    own = own if isinstance(own, list) else [own]
    if source == "of the model":
        model.generation_config.eos_token_id = [*own, *ends]
    else:
        given["generation_kwargs"] = {"stop_token_ids": ends}
    given = {"hybrid": {"engine": "vllm"}, "reward_funcs": longest, "mask_truncated_completions": True} | given
    finished = run(trainer_class, model=model, max_steps=2, **given)
    finished.close()
    return finished


def assert_same(finished, expected):
    assert 0.0 < expected.logs[0]["completions/clipped_ratio"] < 1.0
    assert finished.logs == expected.logs
    ours, theirs = finished.weights(), expected.weights()
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) == 0.0
    assert max(log.get("grad_norm", 0.0) for log in finished.logs) > 0


@pytest.mark.parametrize("case", CASES)
def test_rows_that_stop_are_trained_as_those_that_end(run, case):
    given = {"max_completion_length": 8, "beta": 0.0} | CASES[case]
    expected = trained(run, tiny_model(), "of the model", **given)
    assert_same(trained(run, tiny_model(), "of the request", **given), expected)


@pytest.mark.parametrize("rollout", ["single_turn", "multi_turn"])
def test_the_last_turn_of_a_conversation_says_how_it_ended(run, rollout):
    tokenizer = chat_tokenizer(TURNS)
    given = {
        "hybrid": {"engine": "vllm", "rollout": rollout},
        "processing_class": tokenizer,
        "train_dataset": SPOKEN,
        "tools": [double],
        "ends": [tokenizer.convert_tokens_to_ids("x")],
        "vllm_max_model_length": 2048,
        "max_completion_length": 220,
    }
    expected = trained(run, chatty_model(tokenizer, TURNS), "of the model", **given)
    finished = trained(run, chatty_model(tokenizer, TURNS), "of the request", **given)
    assert expected.logs[0]["tools/call_frequency"] > 0
    assert any(log.get("completions/clipped_ratio", 1.0) < 1.0 for log in expected.logs)
    assert finished.logs[0]["completions/clipped_ratio"] == expected.logs[0]["completions/clipped_ratio"]
    for mine, theirs in zip(finished.logs, expected.logs, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)  # turns of another company round otherwise
