"""The command `trlx-hybrid environments`: lists the environments that plugins offer, and plays a few episodes of one,
with answers from the terminal or from a model."""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, islice
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

from ..config import HybridConfig
from ..contract.conversation import Message, opening
from ..errors import ConfigError, HybridError

if TYPE_CHECKING:
    from ..contract.protocols import EnvironmentArguments
    from ..plugins.registry import Component

TURNS = 20  # limit of an episode without an option
TOKENS = 512  # limit of a model's turn

EMPTY = {"prompt": [{"role": "user", "content": ""}]}
"""The dataset row that an episode is played with where there is no dataset: an empty prompt, as in TRL."""

Answer = Callable[[Sequence[Message], Mapping[str, Callable[..., Any]]], Message]
"""A function that takes the messages of a conversation and the tools by name, and returns the next assistant message.
It raises EOFError where there are no more answers."""


class MistakeError(HybridError):
    """An error for a fault of an environment that training would refuse. The message names the fault, and says how to
    fix it."""


def wrong_observation(observation: Any) -> str | None:
    """Check an environment's observation: a text, a list of chat messages, or None. Return what is wrong with it and
    how to fix it, or None where it is valid."""
    messages = isinstance(observation, list) and all(isinstance(m, Mapping) and "role" in m for m in observation)
    if observation is None or isinstance(observation, str) or (observation and messages):
        return None
    return f"showed {observation!r:.80}. Show a text, or chat messages with role and content."


def wrong_reward(reward: Any) -> str | None:
    """Check an environment's reward: a finite number, or None. Return what is wrong with it and how to fix it, or None
    where it is valid."""
    if reward is None or _finite(reward):
        return None
    return f"gave the reward {reward!r:.200}. Give a finite number, or None for no statement."


def _finite(reward: Any) -> bool:
    try:
        return hasattr(reward, "__float__") and math.isfinite(float(reward))
    except (TypeError, ValueError, ArithmeticError, RuntimeError):  # an array or a tensor of several elements
        return False


def wrong_step(step: Any) -> str | None:
    """Check the result of an environment's `step`. Return what is wrong with it and how to fix it, or None where it is
    valid."""
    missing = [field for field in ("observation", "done", "reward") if not hasattr(step, field)]
    if missing:
        found = f"returned a {type(step).__name__} without {', '.join(missing)}."
        return f"{found} Return a trlx_hybrid_multiturn.Step."
    if wrong_reward(step.reward):
        return wrong_reward(step.reward)
    if not step.done and step.observation is None:
        return "is not done, and has nothing to show. Give an observation, or set done=True."
    return wrong_observation(step.observation)


def add_command(commands: Any) -> None:
    """Add the command `environments` to the command line. Parsing it sets the option `run` to a function that takes the
    parsed options and returns the exit status.

    Args:
        commands: what `argparse`'s `add_subparsers` returned.
    """
    listing = commands.add_parser(
        "environments",
        help="list the environments that plugins offer, or try one",
        description="List the environments that plugins offer, for `--environment NAME` of a training, or try one.",
    )
    listing.set_defaults(run=_list)
    trying = listing.add_subparsers(title="commands", metavar="COMMAND", dest="action").add_parser(
        "try",
        help="play a few episodes",
        description="Play a few episodes and say what goes wrong. Answers are lines of the terminal or of stdin, one "
        'for each turn, or a model\'s. A line that is {"name": TOOL, "arguments": {...}} calls a tool.',
    )
    add = trying.add_argument
    add("name", metavar="NAME", help="as `trlx-hybrid environments` lists it")
    add("--model", metavar="PATH", help="a model that answers, through transformers (default: you do)")
    add("--options", metavar="JSON", help="options of the environment")
    add("--row", metavar="JSON", help="play this row (default: those of its train_dataset, or an empty prompt)")
    add("--episodes", metavar="N", type=_positive, default=1, help="how many (default: 1)")
    add("--turns", metavar="N", type=_positive, help=f"of one episode (default: its max_turns, or {TURNS})")
    trying.set_defaults(run=_try)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return int(text)


def _list(options: argparse.Namespace) -> int:
    from ..plugins.host import Host

    found = Host.load().registry.components("environment")
    for component in found:
        reason = component.out_of_place()
        print(f"{component.name:14} {component.summary} (plugin {component.plugin}, {component.distribution})")
        if reason is not None:
            print(f"{'':14} not available: {reason}")
    if not found:
        print("no plugin offers an environment")
    return 0


def _try(options: argparse.Namespace) -> int:
    """Play episodes of an environment as the command's options say; return the exit status, 1 where a problem was
    found."""
    from ..plugins.host import Host
    from ..plugins.selection import choose_environment

    config = HybridConfig(environment=options.name, environment_options=options.options)
    choice = choose_environment(config, Host.load().registry)
    assert choice is not None
    component = choice.component
    arguments: EnvironmentArguments = _brought(f"the factory of {component}", component.build, None, choice.options)
    rows = [EMPTY] if options.row is None else [_row(options.row)]
    if options.row is None and arguments.train_dataset is not None:
        rows = list(islice(_brought(f"train_dataset of {component}", arguments.train_dataset), options.episodes))
        if not rows:
            raise MistakeError(f"The train_dataset of {component} has no rows. Return some, or leave it out.")
    player = Player(arguments, component, _model(options.model) if options.model else _typed, options.turns)
    print(f"{component.name}: {component.summary} ({component.distribution})")
    with asyncio.Runner() as loop:
        for number, row in enumerate(islice(cycle(rows), options.episodes), start=1):
            print(f"\nepisode    {number} of {options.episodes}")
            try:
                loop.run(player.play(dict(row)))
            except MistakeError as mistake:
                player.problems += 1
                _show("problem", str(mistake))
            except (EOFError, KeyboardInterrupt):
                print("\nnote       there are no more answers")
                break
    print(
        "\nresult     "
        + (f"{_counted(player.problems, 'problem')}, see above" if player.problems else "no problems found")
    )
    return 1 if player.problems else 0


def _brought(what: str, function: Callable[..., Any], *given: Any) -> Any:
    """Call a function that comes with the environment's plugin, such as its factory, and return the result. Any
    exception but this package's own becomes a MistakeError, which tells the plugin's author what to mend.

    Args:
        what: what the function is, for the message.
        given: the function's arguments.

    Raises:
        MistakeError: the function raised an exception that is not this package's.
    """
    try:
        return function(*given)
    except HybridError:
        raise
    except Exception as error:
        raise MistakeError(f"{what} raised {type(error).__name__}: {error}{_place(error)}.") from error


class Player:
    """Plays an environment as training does, one episode after another, and prints what happens in each.

    Args:
        arguments: the environment, as its plugin describes it.
        component: the component that offers the environment, for messages.
        answer: returns the assistant's message for each turn: typed by the user, or sampled from a model.
        turns: the largest number of turns of an episode; None for the environment's own limit.

    Attributes:
        problems: number of faults of the environment that were found.
    """

    def __init__(
        self, arguments: EnvironmentArguments, component: Component, answer: Answer, turns: int | None
    ) -> None:
        played = arguments.rollout_func
        self._factory, self._answer, self._turns = arguments.environment_factory, answer, turns
        self._limit = turns or getattr(played, "max_turns", None) or TURNS
        self._has_reward_funcs, self._has_dataset = arguments.reward_funcs is not None, arguments.train_dataset
        self._with_tools, self._pool = played is None, dict[Any, Any]()
        self.problems = 0
        if played is not None:
            self._factory = getattr(played, "factory", None)
        if self._factory is None:
            raise ConfigError(
                f"The {component} has a rollout_func without an attribute `factory`, so nobody but the trainer can "
                "play it. Make it with trlx_hybrid_multiturn.episodes."
            )

    async def play(self, row: Mapping[str, Any]) -> None:
        """Play one episode for a row of the dataset.

        Raises:
            MistakeError: the environment does something for which training would mask the episode, or stop.
            EOFError: `answer` has no more answers.
        """
        factory, name = self._factory, None
        if isinstance(factory, Mapping):
            name = str(row.get("environment"))
            if name not in factory:
                raise MistakeError(f"the row has environment={name!r}. Name one of {', '.join(factory)} there.")
            factory, row = factory[name], {column: row[column] for column in row if column != "environment"}
        if self._with_tools:  # TRL makes environments once, and resets them for each batch
            if name not in self._pool:
                self._pool[name] = await self._call("the environment's class", factory)
            await self._with_calls(self._pool[name], factory, row)
            return
        environment = await self._call("the environment's class", factory)
        try:
            await self._in_steps(environment, factory, row)
        finally:
            await self._close(environment)

    async def _in_steps(self, environment: Any, factory: Any, row: Mapping[str, Any]) -> None:
        """Play an episode of an environment that has `reset(row)` and `step(completion)`, and print it.

        Args:
            environment: the environment, which `factory` made.
            factory: makes a second environment, whose first observation must be the same.
            row: a row of the dataset.

        Raises:
            MistakeError: a method is missing or raises, returns something unusable, or no reward can come of the
                episode.
        """
        self._require_methods(environment, "reset", "step")
        shown = await self._reset(environment, factory, (dict(row),), {})
        self._require(wrong_observation(shown), "reset")
        messages = opening(list(row.get("prompt", EMPTY["prompt"])), shown)
        _show_messages(messages)
        total = None
        for turn in range(self._limit):
            message = self._answer(messages, {})
            step = await self._call("step", environment.step, message["content"])
            self._require(wrong_step(step), "step")
            if step.reward is not None:
                total = (total or 0.0) + float(step.reward)
                _show("reward", f"{float(step.reward):g}")
            if step.done:
                _show("over", f"after {_counted(turn + 1, 'turn')}, reward {'none' if total is None else f'{total:g}'}")
                break
            observed = step.observation
            observed = [{"role": "user", "content": observed}] if isinstance(observed, str) else list(observed)
            _show_messages(observed)
            messages = [*messages, message, *observed]
        else:
            _show("over", f"after {_counted(self._limit, 'turn')}, and it was not done: the limit ended it")
        if total is None and not self._has_reward_funcs:
            raise MistakeError("no step gave a reward, and there are no reward_funcs. Give one, or the other.")

    async def _with_calls(self, environment: Any, factory: Any, row: Mapping[str, Any]) -> None:
        """Play one episode of a TRL environment, an object whose public methods are tools, and print the messages, the
        tools' results and the reward.

        Args:
            environment: the object.
            factory: makes a second environment, to check that both show the same after `reset`.
            row: the dataset row that the episode is for; its prompt begins the conversation.
        """
        self._require_methods(environment, "reset")
        public = [name for name, _ in inspect.getmembers(type(environment), inspect.isfunction) if name[0] != "_"]
        tools = {name: getattr(environment, name) for name in public if name not in ("reset", "get_reward")}
        self._require_schemas(tools)
        shown = await self._reset(environment, factory, (), row)
        if not (shown is None or isinstance(shown, str | list)):
            raise MistakeError(f"`reset` returned {shown!r:.80}. Return a text, content blocks, or None.")
        prompt = list(row.get("prompt", EMPTY["prompt"]))
        if isinstance(shown, list):
            text = prompt[-1]["content"]
            blocks = [{"type": "text", "text": text}] if isinstance(text, str) else text
            messages = [*prompt[:-1], {**prompt[-1], "content": [*blocks, *shown]}]
        else:
            messages = opening(prompt, shown)
        _show("tools", ", ".join(f"{name}{inspect.signature(tool)}" for name, tool in tools.items()) or "none")
        _show_messages(messages)
        for turn in range(self._limit):
            message = self._answer(messages, tools)
            messages = [*messages, message]
            calls = [call["function"] for call in message.get("tool_calls") or ()]
            if not calls:
                _show("over", f"after {_counted(turn + 1, 'turn')}")
                break
            for called in calls:
                content = await self._result(tools, called)
                _show("tool", content)
                messages = [*messages, {"role": "tool", "name": called["name"], "content": content}]
        else:
            _show("over", f"after {_counted(self._limit, 'turn')}: the limit ended it")
        if hasattr(environment, "get_reward"):
            reward = await self._call("get_reward", environment.get_reward)
            self._require(wrong_reward(reward), "get_reward")
            _show("reward", "none" if reward is None else f"{float(reward):g}")
        elif not self._has_reward_funcs:
            raise MistakeError("there is no reward. Give the class a method `get_reward`, or bring reward_funcs.")

    async def _result(self, tools: Mapping[str, Callable[..., Any]], called: Mapping[str, Any]) -> str:
        """Run a tool call and return the text that the model is shown: the result, or the exception that the tool
        raised.

        Args:
            called: `name` and `arguments` of the call.
        """
        try:
            if called["name"] not in tools:
                raise ValueError(f"Tool {called['name']} not found.")
            value = tools[called["name"]](**called["arguments"])
            return str(await value if inspect.isawaitable(value) else value)
        except Exception as error:
            _show("note", f"raised {type(error).__name__}{_place(error)}, which the model is shown")
            return str({"error": str(error)})

    async def _reset(self, environment: Any, factory: Any, given: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Reset an environment and return its first observation, after checking that a second environment from the
        factory shows the same one for the same row.

        Args:
            given, named: the arguments of `reset`.
        """
        row = given[0] if given else named
        hint = f"The row has the columns {', '.join(row)}: read those"
        hint += "." if self._has_dataset else ", or give one with --row or with a train_dataset."
        shown = await self._call("reset", environment.reset, *given, mend=hint, **named)
        other = await self._call("the environment's class", factory)
        try:
            again = await self._call("reset", other.reset, *given, mend=hint, **named)
        finally:
            await self._close(other)
        if shown != again:
            raise MistakeError(
                f"`reset` showed {shown!r:.80} and then {again!r:.80} for the same row. Draw from the row, or from "
                "random.Random(row[...]): a group's completions must meet the same task."
            )
        return shown

    async def _call(self, what: str, method: Any, *given: Any, mend: str = "", **named: Any) -> Any:
        try:
            found = method(*given, **named)
            return await found if inspect.isawaitable(found) else found
        except Exception as error:
            mend = mend or "In training such an episode is masked, and trains nothing."
            raise MistakeError(f"`{what}` raised {type(error).__name__}: {error}{_place(error)}. {mend}") from error

    async def _close(self, environment: Any) -> None:
        close = getattr(environment, "close", None)
        if close is not None and not self._with_tools:
            await self._call("close", close)

    def _require_methods(self, environment: Any, *names: str) -> None:
        for name in names:
            if not callable(getattr(environment, name, None)):
                raise MistakeError(f"{type(environment).__name__} has no method `{name}`. Give it one.")

    def _require(self, wrong: str | None, method: str) -> None:
        if wrong is not None:
            raise MistakeError(f"`{method}` {wrong}")

    def _require_schemas(self, tools: Mapping[str, Callable[..., Any]]) -> None:
        from transformers.utils import get_json_schema  # here, since the import takes a second

        for name, tool in tools.items():
            try:
                get_json_schema(tool)
            except Exception as error:
                raise MistakeError(
                    f"the tool `{name}` cannot be described to a model: {error} Give its arguments type hints, and say "
                    "what each is below `Args:` in its docstring; or let its name begin with _ if it is no tool."
                ) from error


def _row(text: str) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--row is not valid JSON: {error}.") from error
    if not isinstance(row, dict):
        raise ConfigError(f"--row takes an object with the columns of a row, got {text:.60}.")
    return EMPTY | row


def _typed(messages: Sequence[Message], tools: Mapping[str, Callable[..., Any]]) -> Message:
    """Read a line from the terminal or from stdin, and return it as an assistant message. A line from stdin is printed.
    A JSON object with a `name` is a tool call.

    Args:
        messages: the conversation so far; not used.
        tools: the environment's tools; without any, all lines are text.
    """
    line = input("assistant  " if sys.stdin.isatty() else "")
    if not sys.stdin.isatty():
        _show("assistant", line)
    try:
        call = json.loads(line) if tools else None
    except json.JSONDecodeError:
        call = None
    if isinstance(call, dict) and isinstance(call.get("name"), str):
        function = {"name": call["name"], "arguments": call.get("arguments") or {}}
        return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    return {"role": "assistant", "content": line}


def _model(path: str) -> Answer:
    """Load a transformers model, and return a function that answers with it, sampling as training does by default. The
    sampling is seeded, so that a second run of the command gives the same answers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")

    def answer(messages: Sequence[Message], tools: Mapping[str, Callable[..., Any]]) -> Message:
        given = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        prompt = tokenizer.apply_chat_template(list(messages), tools=list(tools.values()) or None, **given)
        ids = prompt["input_ids"].to(model.device)
        mask = prompt["attention_mask"].to(model.device)
        sampling = {"do_sample": True, "top_k": 0, "max_new_tokens": TOKENS, "pad_token_id": tokenizer.pad_token_id}
        said = model.generate(input_ids=ids, attention_mask=mask, **sampling)[0, ids.shape[1] :].tolist()
        _show("assistant", tokenizer.decode(said, skip_special_tokens=True))
        if not tools:
            return {"role": "assistant", "content": tokenizer.decode(said, skip_special_tokens=True)}
        from ..trl.borrowed import assistant_message  # here, since it imports trl

        return assistant_message(tokenizer, said, ids[0].tolist(), list(tools.values()))

    return answer


def _show_messages(messages: Sequence[Message]) -> None:
    for message in messages:
        content = message["content"]
        _show(message["role"], content if isinstance(content, str) else json.dumps(content, default=str))


def _show(topic: str, text: str) -> None:
    print(f"{topic:10} " + text.replace("\n", "\n" + " " * 11), flush=True)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)


def _place(error: Exception) -> str:
    """Return the file and line at which the environment raised an error, as " (file:line)". Return "" where the error
    was raised by the call in this file, because the arguments do not fit the environment's function."""
    frames = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    file, line = frames[-1]
    return "" if file == __file__ else f" ({file}:{line})"
