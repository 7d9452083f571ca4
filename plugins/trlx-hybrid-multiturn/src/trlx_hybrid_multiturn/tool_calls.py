"""The tool calls of one turn, as TRL 1.16 runs them: which are run, in which order, and what the model is shown.

Source: trl 1.16, `GRPOTrainer._tool_call_loop`. Synchronous calls run first, one after another in the order in which
the model made them, because they may share an environment. Then all asynchronous calls run at the same time. The model
is shown the results of all synchronous calls before the results of the asynchronous calls. TRL's loop has this order
for no stated reason. It is kept here, because another order would give other tokens.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trlx_hybrid.contract.conversation import Conversation, Dialogue, Message
from trlx_hybrid.episodes.answers import described, readable

from .loop import Outcome, Tool, ToolCoroutine
from .tools.runner import ToolRunner


class LostCallError(Exception):
    """Raised for a call of a tool or environment that could not be made, or whose result did not come back. It ends the
    trajectory, which is not trained on."""


def check_tools(dialogues: Sequence[Dialogue], runner: ToolRunner) -> None:
    """Raise ConfigError for tools of these dialogues that cannot run where they are configured to run."""
    runner.check(
        {name: tool for d in dialogues for name, tool in d.sync_tools.items()},
        {name: tool for d in dialogues for name, tool in d.run_tools.items()},
        {name for d in dialogues for name in d.async_tools},
    )


async def run_calls(
    calls: Sequence[Mapping[str, Any]],
    dialogue: Dialogue,
    conversation: Conversation,
    runner: ToolRunner,
    early: Callable[[list[Message]], None] = lambda messages: None,
) -> list[Message]:
    """Run the tool calls of one turn, and return the chat messages with their results.

    Args:
        calls: the model's tool calls, as the chat template's parser returns them.
        dialogue: holds the tools and the environment of this row.
        conversation: its counters of calls, and of calls with an error, are increased.
        runner: runs the tools.
        early: called with the messages before this function returns them, if the turn has a single call that does not
            run in a process. It is called in the tool's thread, so that it can work on them while the engine takes
            steps. It must not raise.

    Raises:
        LostCallError: a call could not be made, or its result did not come back.
    """
    results: list[tuple[str, object]] = []
    coroutines: list[tuple[str, ToolCoroutine]] = []
    try:
        for call in calls:
            conversation.calls += 1
            if call.get("type") != "function" or "function" not in call:
                error: Exception = ValueError(f"Unsupported tool call type: {call.get('type')}")
                name = call.get("name", "unknown")
                results.append((name, _content(name, Outcome(error=error), conversation)))
                continue
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            if name in dialogue.sync_tools:
                tool = dialogue.sync_tools[name]
                owner = dialogue.environment if _is_of_environment(tool, dialogue) else None
                alone = functools.partial(_early, early, name) if len(calls) == 1 else None
                outcome = await runner.call(name, tool, arguments, alone, owner)
                _part_with_environment(tool, outcome, dialogue)
                results.append((name, _content(name, outcome, conversation)))
                continue
            try:
                if name not in dialogue.async_tools:
                    raise ValueError(f"Tool {name} not found.")
                coroutines.append((name, dialogue.async_tools[name](**arguments)))
            except Exception as error:
                results.append((name, _content(name, Outcome(error=error), conversation)))
        if coroutines:
            started, coroutines = coroutines, []
            outcomes = await runner.together(started, dialogue.event_loop)
            for (name, _), outcome in zip(started, outcomes, strict=True):
                _part_with_environment(dialogue.async_tools[name], outcome, dialogue)
                results.append((name, _content(name, outcome, conversation)))
    finally:
        for _, coroutine in coroutines:  # never started: the trajectory ended before their turn came
            coroutine.close()
    return [_message(name, runner.cut(content)) for name, content in results]  # errors may be long, too


def _message(name: str, content: object) -> Message:
    return {"role": "tool", "name": readable(name), "content": content}


def _early(early: Callable[[list[Message]], None], name: str, value: object) -> None:
    early([_message(name, value)])


def _content(name: str, outcome: Outcome, conversation: Conversation) -> object:
    """Return the content of a tool message: the call's result, or its error.

    Args:
        name: name of the tool.
        outcome: the call's outcome.
        conversation: the conversation of the call. This function increases its count of failed calls, or its count of
            results from which characters that no tokenizer accepts (lone surrogates) had to be removed.

    Raises:
        LostCallError: the call was lost (it has neither result nor error), and the tool did not cause the loss.
    """
    if outcome.lost is not None:
        if not outcome.by_tool:
            raise LostCallError(outcome.lost)
        conversation.failed_calls += 1
        return str({"error": outcome.lost})
    if outcome.error is None:
        shown = readable(outcome.value)
        conversation.mended_answers += shown is not outcome.value
        return shown
    if isinstance(outcome.error, asyncio.CancelledError):  # a subclass says what else was lost
        raise LostCallError(f"tool {name!r} raised {described(outcome.error)}.")
    conversation.failed_calls += 1
    try:
        text = str(outcome.error)
    except (Exception, SystemExit):  # raised by the tool's own __str__, which the model may have written
        return str({"error": described(outcome.error)})
    if not isinstance(outcome.error, Exception):  # `sys.exit()`, whose text is a number or nothing
        text = f"{type(outcome.error).__name__}: {text}"
    return str({"error": text})


def _part_with_environment(tool: Tool, outcome: Outcome, dialogue: Dialogue) -> None:
    """Take the row's environment out of use if a call of one of its methods passed its deadline, since the call may
    still be running.

    Args:
        tool: the tool that was called.
        outcome: the call's outcome.
        dialogue: holds the row's environment.
    """
    if outcome.by_tool and _is_of_environment(tool, dialogue):
        dialogue.discard()


def _is_of_environment(tool: Tool, dialogue: Dialogue) -> bool:
    """Return whether a tool is a method of this row's environment.

    A method of another object, such as a client, is shared by all rows.
    """
    return dialogue.environment is not None and getattr(tool, "__self__", None) is dialogue.environment
