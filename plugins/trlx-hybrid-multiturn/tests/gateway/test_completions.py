"""Requests of OpenAI's completions: each parameter is honoured, overridden, without effect, or refused by name."""

import pytest
from openai.types import Completion
from openai.types.completion_create_params import CompletionCreateParamsBase
from trlx_hybrid_multiturn.gateway import completions
from trlx_hybrid_multiturn.gateway.asked import Said
from trlx_hybrid_multiturn.gateway.errors import RefusedError

ASKED = {"model": "any", "prompt": "hello"}
SAID = Said(
    message={"role": "assistant", "content": " world"},
    length=True,
    prompt_ids=[1, 2, 3],
    token_ids=[4, 5],
    logprobs=[(" wor", -1.0), ("ld", -2.0)],
)


def test_no_parameter_of_the_official_client_is_ignored():
    known = {*completions.HONOURED, *completions.OVERRIDDEN, *completions.WITHOUT_EFFECT}
    for name in CompletionCreateParamsBase.__annotations__:
        assert completions.read({name: None} | ASKED).raw == "hello"
        if name not in known:
            with pytest.raises(RefusedError, match=name) as caught:
                completions.read(ASKED | {name: "something"})
            assert caught.value.parameter == name


@pytest.mark.parametrize("name", completions.NEUTRAL)
def test_values_that_change_nothing_are_served(name):
    for value in completions.NEUTRAL[name]:
        assert completions.read(ASKED | {name: value}).raw == "hello"


@pytest.mark.parametrize(
    ("prompt", "read"),
    [("hello", "hello"), (["hello"], "hello"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2])],
)
def test_a_prompt_is_a_text_or_token_ids(prompt, read):
    asked = completions.read(ASKED | {"prompt": prompt})
    assert (asked.raw, asked.max_tokens) == (read, 16)


@pytest.mark.parametrize("prompt", [None, "", [], ["a", "b"], [[1], [2]], [-1], [True], [1.0], {"a": 1}, "\ud800"])
def test_other_prompts_are_refused(prompt):
    with pytest.raises(RefusedError) as caught:
        completions.read({"model": "any"} | ({} if prompt is None else {"prompt": prompt}))
    assert caught.value.parameter == "prompt"


def test_answers_are_those_of_the_official_client():
    answer = Completion.model_validate(completions.written(ASKED, [SAID, SAID], "7"), strict=True)
    assert [choice.text for choice in answer.choices] == [" world"] * 2
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs.text_offset == [0, 4]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 4)
    assert "token_ids" not in completions.written(ASKED, [SAID], "7")["choices"][0]
    given = ASKED | {"stream_options": {"include_usage": True}, "return_token_ids": True}
    *parts, last = completions.streamed(given, [SAID], "7")
    assert [part["choices"][0]["token_ids"] for part in parts] == [[4, 5]]
    assert last["usage"]["total_tokens"] == 5
