"""A tiny model that calls a tool, questions for agents that speak to it by an API, and such agents."""

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI, OpenAI

CALLS = [f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": 2}}}}\n</tool_call>' for a in (1, 3, 5)]
TURNS = [*CALLS, "a plain answer", "no"]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": PARAMETERS}}]
CLIENT = AsyncOpenAI(base_url="http://localhost", api_key="none")  # slow to make
MESSAGES = AsyncAnthropic(base_url="http://localhost", api_key="none")
QUESTIONS = [[{"role": "user", "content": f"{'?' * i} {i * 7919 % 1000}"}] for i in range(8)]


async def streamed(client, **request):
    """A message that arrives in chunks."""
    text, calls = "", []
    async for chunk in await client.chat.completions.create(**request, stream=True):
        delta = chunk.choices[0].delta
        text += delta.content or ""
        calls += [call.model_dump(exclude={"index"}) for call in delta.tool_calls or ()]
    return {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})


async def adds(base_url, row):
    """Lets the model call a tool, in up to three turns; the second is streamed."""
    client, messages = CLIENT.with_options(base_url=base_url), list(row["prompt"])
    for turn in range(3):
        request = {"model": "any", "messages": messages, "tools": TOOLS}
        if turn == 1:
            message = await streamed(client, **request)
        else:
            done = await client.chat.completions.create(**request)
            message = done.choices[0].message.model_dump(exclude_none=True)
        messages.append(message)
        for call in message.get("tool_calls", ()):
            given = json.loads(call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(given["a"] + given["b"])})
        if messages[-1]["role"] == "assistant":
            break
    return float(len(messages))


async def rewrites(base_url, row):
    """Asks a helper with a history of its own, shortens its own history, and then goes on with the first."""
    client, first = CLIENT.with_options(base_url=base_url), list(row["prompt"])
    said = []

    async def ask(messages, **more):
        done = await client.chat.completions.create(model="any", messages=messages, **more)
        said.append(done.choices[0].message.content or "")
        return done.choices[0].message.model_dump(exclude_none=True)

    first.append(await ask(first))
    await ask([{"role": "system", "content": "help"}, {"role": "user", "content": "do it"}], tools=TOOLS)
    await ask([{"role": "user", "content": "in short: " + said[0]}])
    await ask([*first, {"role": "user", "content": "more"}])
    return float(sum(map(len, said)))


async def doubts(base_url, row):
    """Asks again, up to twice, according to the question."""
    client, said = CLIENT.with_options(base_url=base_url), list(row["prompt"])
    turns, turn = len(row["prompt"][0]["content"]) % 3 + 1, 0
    while turn < turns:
        done = await client.chat.completions.create(model="any", messages=said)
        text = done.choices[0].message.content or ""
        said += [{"role": "assistant", "content": text}, {"role": "user", "content": f"sure? {len(text)}"}]
        turn += 1
    return float(turns)


async def counts(base_url, row):
    """Asks how many tokens its messages have, and then for the next one."""
    client = MESSAGES.with_options(base_url=base_url.removesuffix("/v1"))
    messages = [{"role": "user", "content": "one word please"}]
    counted = await client.messages.count_tokens(model="any", messages=messages)
    done = await client.messages.create(model="any", max_tokens=20, messages=messages)
    assert counted.input_tokens == done.usage.input_tokens
    return float(counted.input_tokens + done.usage.output_tokens)


def asks(base_url, row):
    """Asks once, as a function."""
    with OpenAI(base_url=base_url, api_key="none") as client:
        done = client.chat.completions.create(model="any", messages=row["prompt"])
    return 1.0 + len(done.choices[0].message.content or "")


async def is_numbered(base_url, row):
    """Asks once; its reward is the id of its process."""
    await CLIENT.with_options(base_url=base_url).chat.completions.create(model="any", messages=row["prompt"])
    return float(os.getpid())


async def dies_once(base_url, row, folder):
    """Asks once; the process of the first episode is killed in between."""
    with contextlib.suppress(FileExistsError):
        (Path(folder) / "died").mkdir()
        os.kill(os.getpid(), signal.SIGKILL)
    return await is_numbered(base_url, row)


async def never_ends(base_url, row, folder):
    """Asks once, waits for ever, and leaves a file where it is cancelled."""
    await is_numbered(base_url, row)
    try:
        await asyncio.sleep(1000)
    finally:
        (Path(folder) / base_url.split("/")[-2]).touch()
