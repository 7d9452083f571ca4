"""An episode that the library verifiers plays, in which each call of the model waits for a completion from the
trainer."""

from __future__ import annotations

import asyncio
from typing import Any

JsonObject = dict[str, Any]
Message = JsonObject


class NotPlayableError(Exception):
    """Raised where an episode failed, or does something that cannot be trained on."""


class ServedEpisode:
    """An episode that verifiers plays in an asyncio task, where each call of the model waits for a completion.

    Args:
        env: verifiers' environment.
        context: verifiers' serving context, which `env` plays in.
        episodes: the running episodes by the id of their traces (verifiers' records of what one agent does), to which
            this one adds itself.
    """

    def __init__(self, env: Any, context: Any, episodes: dict[str, ServedEpisode]) -> None:
        self._env, self._context, self._episodes = env, context, episodes
        self._playing: asyncio.Task[Any] | None = None
        self._traces: dict[str, Any] = {}
        self._policy: str | None = None  # the trace that the model speaks in
        self._said: list[Message] = []  # the conversation, its replies included
        self._shown: asyncio.Queue[list[Message]] = asyncio.Queue()
        self._reply: asyncio.Future[str] | None = None
        self._refusal: NotPlayableError | None = None

    # --- the trainer's side -----------------------------------------------------------------------------------------

    async def play(self, task: JsonObject, context: Any) -> JsonObject:
        """Play the whole episode with a model elsewhere.

        Args:
            task: the data of the task.
            context: verifiers' model context, which says where the model is.

        Returns:
            "done" True, and "reward", the sum of the rewards of all agents.

        Raises:
            NotPlayableError: the episode failed; the text says why.
        """
        self._context = context
        self._playing = asyncio.create_task(self._play(task))
        return self._ended(await self._playing, [*self._traces.values()])

    async def go_on(self, kind: str, data: JsonObject) -> JsonObject:
        """Begin the episode, or pass on the model's reply to it; then wait for new messages for the model, or for the
        episode's end.

        Args:
            kind: "reset" to begin; anything else passes on a reply.
            data: the "task" to begin with, or the model's "completion".

        Returns:
            "done" False and the new "messages" for the model; or, at the end, "done" True and the "reward".

        Raises:
            NotPlayableError: the episode failed or cannot be trained on; the text says why.
        """
        if kind == "reset":
            self._playing = asyncio.create_task(self._play(data["task"]))
        elif self._reply is None or self._reply.done():
            raise NotPlayableError("nobody waits for the model's reply.")
        else:
            self._reply.set_result(data["completion"])
        assert self._playing is not None
        shown = asyncio.create_task(self._shown.get())
        try:
            await asyncio.wait({shown, self._playing}, return_when=asyncio.FIRST_COMPLETED)
            if shown.done():
                return {"messages": shown.result(), "done": False}
        finally:
            shown.cancel()
        return self._ended(self._playing.result(), [self._traces[self._policy]] if self._policy else [])

    async def end(self) -> None:
        """Cancel the episode if it still runs, and remove it from the running episodes, because the trainer has closed
        the connection."""
        if self._reply is not None:
            self._reply.cancel()
        if self._playing is not None:
            self._playing.cancel()
            await asyncio.gather(self._playing, return_exceptions=True)
        for trace in self._traces:
            self._episodes.pop(trace, None)

    async def _play(self, data: JsonObject) -> Any:
        env = self._env
        task = type(env.taskset).task_type()
        (slot,) = env.slots(task(task.data_type().model_validate(data), env.config.taskset.task))
        return await env.run_slot(slot, self._context, on_trace=self._minted)

    def _minted(self, trace: Any) -> None:
        self._traces[trace.id] = trace
        self._episodes[trace.id] = self

    def _ended(self, episode: Any, traces: list[Any]) -> JsonObject:
        """Return what the trainer is told at the end of an episode.

        Args:
            episode: verifiers' episode.
            traces: the traces whose rewards count.

        Raises:
            NotPlayableError: the episode failed or cannot be trained on; the text says why.
        """
        if self._refusal is not None:
            raise self._refusal
        errors = [*episode.errors, *(error for trace in traces for error in trace.errors)]
        if not episode.ok or not traces:
            told = f"{errors[-1].type}: {errors[-1].message}" if errors else "it never asked the model"
            raise NotPlayableError(f"the episode failed: {told}")
        rewards = [reward.value for trace in traces for reward in trace.rewards.values() if reward is not None]
        return {"done": True, "reward": sum(rewards) if rewards else None}

    # --- verifiers' side --------------------------------------------------------------------------------------------

    async def reply(self, trace: str, body: JsonObject) -> str:
        """Return the text of the model's reply to a chat request of verifiers, once the trainer has sent the reply.

        Args:
            trace: id of verifiers' trace (its record of what one agent does) that the request belongs to.
            body: the request, in the form of OpenAI's chat completions.

        Raises:
            NotPlayableError: the trainer cannot answer the request, for instance because it offers tools. This ends the
                episode.
        """
        try:
            new = self._new(trace, body)
        except NotPlayableError as refusal:
            self._refusal = self._refusal or refusal
            raise
        self._reply = asyncio.get_running_loop().create_future()
        self._shown.put_nowait(new)
        text = await self._reply
        self._said += [*new, {"role": "assistant", "content": text}]
        return text

    def _new(self, trace: str, body: JsonObject) -> list[Message]:
        """Return the messages of a request that the model has not been shown yet.

        Args:
            trace: id of verifiers' trace (its record of what one agent does) that the request belongs to.
            body: the request, in the form of OpenAI's chat completions. It repeats the whole conversation.

        Raises:
            NotPlayableError: the request does not continue the conversation, is of a second agent, or offers tools.
        """
        name = self._traces[trace].agent.name
        if self._policy not in (None, trace):
            first = self._traces[self._policy].agent.name
            raise NotPlayableError(
                f"the agents {first!r} and {name!r} both speak with the trained model, and a trajectory is one "
                f"conversation. Give one a model of its own: from_verifiers(env={{{name!r}: {{'model': …, "
                "'client': {'base_url': …}}})."
            )
        self._policy = trace
        if body.get("tools"):
            raise NotPlayableError(
                f"agent {name!r} is offered tools, and only conversations are played. Take a harness without tools."
            )
        messages = [{"role": m["role"], "content": _text(m.get("content"))} for m in body["messages"]]
        seen, new = messages[: len(self._said)], messages[len(self._said) :]
        if not new or [_compared(m) for m in seen] != [_compared(m) for m in self._said]:
            raise NotPlayableError(
                f"agent {name!r} was asked with another conversation than before (shortened, repeated or rewritten); "
                "what is trained on must be what the model saw."
            )
        return new


def _text(content: Any) -> str:
    if not isinstance(content, list):
        return content or ""
    if any(part.get("type") != "text" for part in content):
        raise NotPlayableError("the model is shown images, and only texts are played.")
    return "\n".join(part["text"] for part in content)


def _compared(message: Message) -> tuple[str, str]:
    return message["role"], message["content"].strip()  # harnesses trim replies
