"""Requests of OpenAI's responses: each parameter is honoured, overridden, without effect, or refused by name."""

import json

import pytest
from openai import BadRequestError, OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from pydantic import TypeAdapter
from trlx_hybrid_multiturn.gateway import chat, responses
from trlx_hybrid_multiturn.gateway.asked import Said, compared
from trlx_hybrid_multiturn.gateway.errors import RefusedError
from trlx_hybrid_multiturn.gateway.seat import CUT, Seat
from trlx_hybrid_multiturn.gateway.server import gateway
from trlx_hybrid_multiturn.gateway.tree import Tree

from tests.support.agents import PARAMETERS, TOOLS

ASKED = {"model": "any", "input": "hello"}
FLAT = [{"type": "function", **TOOLS[0]["function"], "strict": True}]
CALLS = [{"type": "function", "function": {"name": "add", "arguments": {"a": a, "b": 2}}} for a in (1, 3)]
SAID = {
    "text": {"content": "hi"},
    "text with a call": {"content": "\n\nhi", "tool_calls": CALLS[:1]},
    "calls": {"content": "", "tool_calls": CALLS},
    "reasoning": {"content": "hi", "reasoning_content": "hm"},
    "reasoning alone": {"content": "", "reasoning_content": "hm"},
    "nothing": {"content": ""},
}


def said(name, length=False):
    message = {"role": "assistant", **SAID[name]}
    return Said(message=message, length=length, prompt_ids=[1, 2, 3], token_ids=[4, 5])


def test_no_parameter_of_the_official_client_is_ignored():
    known = {*responses.HONOURED, *responses.OVERRIDDEN, *responses.WITHOUT_EFFECT}
    for name in ResponseCreateParamsBase.__annotations__:
        assert responses.read(ASKED | {name: None} | ASKED).messages
        if name not in known:
            with pytest.raises(RefusedError, match=name) as caught:
                responses.read(ASKED | {name: "something"})
            assert caught.value.parameter == name


@pytest.mark.parametrize("name", responses.OBJECTS)
def test_an_object_is_checked_by_its_members(name):
    with pytest.raises(RefusedError, match=f"'{name}.other' is not served") as caught:
        responses.read(ASKED | {name: {"other": 1}})
    assert caught.value.parameter == f"{name}.other"


@pytest.mark.parametrize("name", [*responses.NEUTRAL, "include", "reasoning.summary", "store", "truncation"])
def test_values_that_change_nothing_are_served(name):
    outer, _, inner = name.partition(".")
    for value in responses.NEUTRAL.get(name, ([*responses.INCLUDE],)):
        asked = responses.read(ASKED | {outer: {inner: value} if inner else value})
        assert asked.messages == [{"role": "user", "content": "hello"}]


def item(**given):
    return {"input": [{"role": "user", "content": "hello"}, given]}


@pytest.mark.parametrize(
    ("changed", "parameter", "reason"),
    [
        ({"input": []}, "input", "at least one message"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input", "at least one message"),
        ({"input": None}, "input", "a text or a list"),
        (item(role="robot", content=""), "input", r"input\[1\]: its role is none of"),
        (item(role="tool", content=""), "input", r"input\[1\]: its role is none of"),
        (item(role="user", content=[{"type": "input_image", "file_id": "x"}]), "input", "taken as base64 only"),
        (item(role="user", content=[{"type": "input_file"}]), "input", "content of type 'input_file'"),
        (item(role="user", content=["hello"]), "input", "content of type None"),
        (item(role="assistant", content=[{"type": "refusal", "refusal": "no"}]), "input", "content of type 'refusal'"),
        (item(type="function_call_output", output=[{"type": "input_file"}]), "input", "content of type 'input_file'"),
        (item(type="item_reference", id="msg_1"), "input", 'item of type "item_reference"'),
        (item(type="function_call", name="add", arguments="{"), "input", "arguments are no JSON"),
        (item(type="function_call", arguments="{}"), "input", "the function's name"),
        ({"instructions": "\ud800"}, "instructions", "lone surrogate"),
        ({"tools": [{"type": "web_search"}]}, "tools", '"web_search"'),
        ({"tools": TOOLS}, "tools", "only functions"),
        ({"tools": [FLAT[0] | {"defer_loading": True}]}, "tools", "defer_loading=true is not served"),
        ({"max_output_tokens": 0}, "max_output_tokens", "1 or more"),
        ({"background": True}, "background", "background=true is not served here, only false"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "Leave it out"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format", "text.format="),
        ({"include": ["message.output_text.logprobs"]}, "include", '"message.output_text.logprobs" is not served'),
        ({"truncation": "auto"}, "truncation", 'only "disabled"'),
        ({"stop": ["."]}, "stop", "not served here"),
    ],
)
def test_what_cannot_be_served_is_named(changed, parameter, reason):
    with pytest.raises(RefusedError, match=reason) as caught:
        responses.read(ASKED | changed)
    assert caught.value.parameter == parameter


def test_what_the_run_overrides_is_kept_for_the_log():
    choice = {"type": "function", "name": "add"}
    given = {"temperature": 0.3, "max_output_tokens": 5, "tool_choice": choice, "reasoning": {"effort": "high"}}
    asked = responses.read(ASKED | given)
    assert asked.overridden == {"temperature": 0.3, "tool_choice": choice, "reasoning.effort": "high"}
    assert asked.max_tokens == 5
    assert responses.read(ASKED | {"tools": FLAT, "tool_choice": "auto"}).tools
    assert not responses.read(ASKED | {"tools": FLAT, "tool_choice": "none"}).tools


def test_a_conversation_is_that_of_chat_completions():
    def call(number):
        arguments = json.dumps(CALLS[number]["function"]["arguments"])
        return {"type": "function_call", "call_id": f"call_{number}", "name": "add", "arguments": arguments}

    def result(number, output):
        return {"type": "function_call_output", "call_id": f"call_{number}", "output": output}

    text = {"type": "output_text", "text": "so", "annotations": []}
    items = [
        {"role": "developer", "content": "briefly"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": t} for t in ("1", "+2")]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [text]},
        call(0),
        {"type": "reasoning", "id": "rs_2", "summary": []},
        call(1),
        result(0, "3"),
        result(1, [{"type": "input_text", "text": "5"}]),
        call(0),
        result(0, "3"),
        {"role": "assistant", "content": "done"},
        {"role": "user", "content": "thanks"},
    ]
    calls = [{"type": "function", "id": f"call_{i}", "function": call(i)} for i in range(2)]
    messages = [
        {"role": "system", "content": "Add."},
        {"role": "developer", "content": "briefly"},
        {"role": "user", "content": "1+2"},
        {"role": "assistant", "content": "so", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_0", "content": "3"},
        {"role": "tool", "tool_call_id": "call_1", "content": "5"},
        {"role": "assistant", "tool_calls": calls[:1]},
        {"role": "tool", "tool_call_id": "call_0", "content": "3"},
        {"role": "assistant", "content": "done"},
        {"role": "user", "content": "thanks"},
    ]
    asked = responses.read(ASKED | {"instructions": "Add.", "input": items, "tools": FLAT})
    other = chat.read({"messages": messages, "tools": TOOLS})
    assert asked.messages == other.messages
    assert json.dumps(asked.tools) == json.dumps(other.tools)


def test_a_tool_is_shown_in_the_order_of_the_client():
    flat = {"type": "function", "strict": None, "parameters": PARAMETERS, "name": "add", "description": None}
    (tool,) = responses.read(ASKED | {"tools": [flat]}).tools
    assert json.dumps(tool["function"]) == json.dumps({"parameters": PARAMETERS, "name": "add"})


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAID)
def test_an_answer_that_comes_back_is_the_same_message(name):
    answer = Response.model_validate(responses.written(ASKED | {"tools": FLAT}, [said(name)], "7"), strict=True)
    back = [{"role": "user", "content": "hello"}, *(each.model_dump(mode="json") for each in answer.output)]
    _, *read = responses.read(ASKED | {"input": back}).messages
    assert [compared(message) for message in read] == [compared(said(name).message)]
    assert answer.output_text == SAID[name]["content"]
    assert (answer.status, answer.usage.total_tokens) == ("completed", 5)


@pytest.mark.parametrize("name", SAID)
@pytest.mark.parametrize("length", [False, True], ids=["whole", "cut"])
def test_the_events_of_a_stream_add_up_to_the_answer(name, length):
    given = ASKED | {"instructions": "Add.", "tools": FLAT}
    events = [*responses.streamed(given, [said(name, length)], "7")]
    kinds = [type(TypeAdapter(ResponseStreamEvent).validate_python(event, strict=True)) for event in events]
    assert all(kind.model_fields["type"].annotation.__args__ == (e["type"],) for kind, e in zip(kinds, events))
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    items = {}
    for event in events[2:-1]:
        at, (*_, what, step) = event["output_index"], event["type"].split(".")
        if what == "output_item" and step == "added":
            items[at] = event["item"]
        elif what == "content_part" and step == "added":
            items[at]["content"].append(event["part"])
        elif step == "delta":
            into, key = (items[at]["content"][-1], "text") if "content_index" in event else (items[at], "arguments")
            into[key] += event["delta"]
            assert event["item_id"] == items[at]["id"]
        elif what == "output_item":
            assert items[at] | {"status": None} == event["item"] | {"status": None}
            items[at] = event["item"]
    answer = responses.written(given, [said(name, length)], "7")
    assert events[-1]["type"] == ("response.incomplete" if length else "response.completed")
    assert events[-1]["response"] | {"created_at": 0} == answer | {"created_at": 0}
    assert [*items.values()] == answer["output"]


def test_an_answer_that_was_cut_is_incomplete():
    answer = Response.model_validate(responses.written(ASKED, [said("text", length=True)], "7"), strict=True)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[0].status == "incomplete"


def test_a_refusal_is_an_error_that_the_official_client_knows():
    here = gateway()
    seat = Seat(here.loop, lambda asked: 0, Tree())
    seat.end(RefusedError("The episode has no further turns.", code=CUT))
    secret, url = here.open(seat)
    client = OpenAI(base_url=url, api_key="none")
    with pytest.raises(BadRequestError, match="no further turns") as full:
        client.responses.create(**ASKED)
    with pytest.raises(BadRequestError) as unknown:
        client.responses.create(**ASKED, conversation="conv_1")
    here.close(secret)
    assert (full.value.code, unknown.value.param) == ("context_length_exceeded", "conversation")
