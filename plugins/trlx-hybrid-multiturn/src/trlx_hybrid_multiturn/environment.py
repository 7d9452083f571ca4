"""Environments that answer the model without tool calls: a game, a simulated user, a grader that gives feedback."""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from trlx_hybrid.contract.conversation import Message
from trlx_hybrid.episodes.answers import described, readable
from trlx_hybrid.errors import ConfigError

from .loop import Tool
from .tool_calls import LostCallError
from .tools.runner import ToolRunner

Row = Mapping[str, Any]
"""A row of the dataset: its values, by the names of the columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An environment's response to one completion.

    Attributes:
        observation: what the model is shown next: the text of a user's message, or chat messages, whose content may be
            blocks of text and images (`{"type": "image", "image": …}`) if the model takes images. None where the
            episode is over and there is nothing more to show.
        done: whether the episode is over. The observation of a last step is not shown.
        reward: the reward of this step; None for a step without one. An episode's reward is the sum over its steps.
    """

    observation: str | list[Message] | None = None
    done: bool = False
    reward: float | None = None


class Environment(Protocol):
    """An environment of one episode. A new one is made for each trajectory, so its state belongs to that episode.

    Methods may be coroutine functions or plain functions. Coroutine functions run on an event loop in another thread,
    and plain functions run in threads of a pool. Many episodes run at once, so whatever the environments share must be
    thread-safe. Plain functions run in the trainer's thread in two cases: with the option `tools="main"`, and once a
    plain function has raised an error which says that it cannot work in another thread. A method that raises, takes
    longer than `tool_timeout` or returns something invalid ends its trajectory. Such a trajectory is counted, and not
    trained on.

    An optional method `close()` is called when the episode or the run is over, unless a call of the environment
    hangs.
    """

    async def reset(self, row: Row) -> str | list[Message] | None:
        """Begin the episode.

        Args:
            row: the dataset's row, with all its columns.

        Returns:
            The first observation. A string is appended to the prompt's last message, as TRL does with the result of its
            environments' `reset`; messages follow the prompt. None adds nothing.
        """

    async def step(self, completion: str) -> Step:
        """Respond to a completion.

        Args:
            completion: the model's last turn, decoded without special tokens.
        """


class CheckedEnvironment:
    """A wrapper of a user's environment that calls its methods in the right thread or event loop, and checks what they
    return.

    Args:
        factory: makes the environment. It is called in the thread in which the environment's plain methods run.
        runner: runs the methods, in threads or on an event loop.
        event_loop: the event loop for methods that are coroutine functions; None for a loop that `runner` starts.
        sees_images: whether the model takes images, so that observations may contain them.
    """

    def __init__(
        self,
        factory: Callable[[], Environment],
        runner: ToolRunner,
        event_loop: AbstractEventLoop | None,
        *,
        sees_images: bool = False,
    ) -> None:
        self._factory, self._runner, self._event_loop = factory, runner, event_loop
        self._sees_images = sees_images
        self._name = str(getattr(factory, "__name__", type(factory).__name__))
        self._environment: Any = None
        self._away = False  # whether a call has not come back: it may still be using the environment

    async def reset(self, row: Row) -> str | list[Message] | None:
        """Make the environment, begin its episode, and return the first observation, a text or chat messages or None.

        Args:
            row: the row of the dataset.

        Raises:
            LostCallError: the environment failed, or returned something invalid.
        """
        self._environment = await self._ask(self._name, self._factory)
        observation = await self._ask(f"{self._name}.reset", self._environment.reset, row)
        self._check(observation, "reset")
        return self._cut(readable(observation))

    async def step(self, completion: str) -> Step:
        """Pass a completion's text to the environment, and return its step after checking it.

        Raises:
            LostCallError: the environment failed, or returned something invalid.
        """
        step = await self._ask(f"{self._name}.step", self._environment.step, completion)
        if not isinstance(step, Step):
            raise LostCallError(f"environment '{self._name}.step' returned a {type(step).__qualname__}, no Step.")
        self._check(step.observation, "step")
        if step.reward is not None:
            try:
                float(step.reward)
            except (TypeError, ValueError, OverflowError):
                raise LostCallError(f"environment '{self._name}.step' gave {step.reward!r:.80} for a reward.") from None
        if step.observation is None and not step.done:
            raise LostCallError(f"environment '{self._name}.step' is not done, but has nothing to show.")
        shown = self._cut(readable(step.observation))
        return step if shown is step.observation else replace(step, observation=shown)

    async def close(self) -> None:
        """Call the environment's `close`, if it has this method and none of its calls hangs.

        Raises:
            LostCallError: the environment failed.
        """
        close = getattr(self._environment, "close", None)
        if close is not None and not self._away:
            await self._ask(f"{self._name}.close", close)

    def leave(self) -> None:
        """Begin what `close` does. The runner waits for it when it is closed itself."""
        self._runner.leave(self._name, self.close())

    async def _ask(self, name: str, method: Tool, *arguments: object) -> Any:
        self._away = True
        outcome = await self._runner.ask(self._name, name, method, arguments, self._event_loop)
        self._away = outcome.lost is not None
        if outcome.lost is not None:
            raise LostCallError(f"environment {outcome.lost.removeprefix('tool ')}")
        if outcome.error is not None:
            raise LostCallError(f"environment {name!r} raised {described(outcome.error)}")
        return outcome.value

    def _cut(self, observation: str | list[Message] | None) -> str | list[Message] | None:
        """Shorten each text in an observation that is longer than the option `max_answer`, and return the
        observation."""
        if isinstance(observation, list):
            contents = [self._runner.cut(message["content"]) for message in observation]
            same = all(content is message["content"] for content, message in zip(contents, observation, strict=True))
            if same:
                return observation
            return [{**m, "content": content} for content, m in zip(contents, observation, strict=True)]
        return self._runner.cut(observation)

    def _check(self, observation: object, method: str) -> None:
        if observation is None or isinstance(observation, str):
            return
        if isinstance(observation, list) and observation:
            what = next((wrong for m in observation if (wrong := self._wrong(m))), None)
            if what is None:
                return
        else:
            what = "an empty list" if observation == [] else f"a {type(observation).__qualname__}"
        raise LostCallError(f"environment '{self._name}.{method}' showed {what}; give a text, or chat messages.")

    def _wrong(self, message: object) -> str | None:
        """Return what is wrong with a message that the environment wants to show the model, or None if it is valid."""
        if not isinstance(message, Mapping) or message.get("content") is None or "role" not in message:
            return "a list that holds something else than messages with a role and content"
        content = message["content"]
        if isinstance(content, str):
            return None
        if not self._sees_images or not isinstance(content, list):
            blocks = "content blocks to a model that sees no images" if isinstance(content, list) else repr(content)
            return f"a message whose content is no text but {blocks:.60}"
        whole = (isinstance(b, Mapping) and b.get("type") in ("text", "image") and b["type"] in b for b in content)
        return None if all(whole) else 'a block that is neither {"type": "text", "text": …} nor of an image'


def refuse_prompts(prompts: list[Any], *, sees_images: bool = False) -> None:
    """Raise ConfigError for prompts that no conversation with an environment can begin with.

    Args:
        prompts: the batch's prompts, as the dataset has them.
        sees_images: whether the model takes images.

    Raises:
        ConfigError: a prompt is plain text, holds no message, or holds content that the model is not shown.
    """
    served = ("text", "image") if sees_images else ("text",)
    for prompt in prompts:
        if not isinstance(prompt, list) or not prompt:
            raise ConfigError(
                "episodes(...) needs prompts that are lists of messages, for observations take a place in a "
                f'conversation; the dataset holds {prompt!r:.60}. Make each prompt [{{"role": "user", "content": '
                "…}]; the content may be empty where `reset` says it all."
            )
        blocks = [block for m in prompt if isinstance(m.get("content"), list) for block in m["content"]]
        for block in blocks:
            kind = block.get("type")
            if kind not in served:
                raise ConfigError(
                    f"episodes(...) shows this model {' and '.join(served)}, and a prompt holds content of type "
                    f"{kind!r}. Leave that out of the dataset, or give the trainer a model with a processor that takes "
                    "it."
                )
            if kind == "image" and kind not in block:
                raise ConfigError(
                    f"A prompt has a place for an image and none in it ({block!r:.60}): give the dataset a column "
                    'image or images, or the block its image, {"type": "image", "image": …}.'
                )
