"""A server that plays verifiers' episodes for a trainer (module `server`), and the harness that verifiers loads by
the name of this package.

A harness is what verifiers runs for each agent, to call the model. This one only holds a conversation; verifiers' own
harnesses are programs that it installs in a runtime.
"""

from __future__ import annotations

from typing import Any

from aiohttp import ClientSession, ClientTimeout
from verifiers.v1 import Harness, HarnessConfig, ProgramResult  # type: ignore[import-not-found]
from verifiers.v1.dialects.chat import message_to_wire  # type: ignore[import-not-found]

__all__ = ["ChatHarness"]


class ChatHarness(Harness[HarnessConfig]):  # type: ignore[misc]
    """A harness for the library `verifiers`: the part that calls the model for an agent. Each launch asks the model for
    one reply, without starting a program of its own; verifiers launches the harness again for each further reply in the
    conversation."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: object,
        runtime: object,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        **given: object,
    ) -> ProgramResult:
        """Ask the model for a reply to the conversation so far. verifiers calls this once for each reply.

        Args:
            ctx: verifiers' model context, of which the model's name is used.
            trace, runtime, mcp_urls, given: not used.
            endpoint: base URL of the chat API that answers for the model.
            secret: the key of that API.
            data: the task's data, with its system prompt and prompt.

        Returns:
            The API's answer as a program's output, with exit code 0 if the API answered with status 200.
        """
        system, prompt = self.resolve_prompt(data)
        body = {"model": ctx.model, "messages": as_messages(system, prompt)}
        headers = {"Authorization": f"Bearer {secret}"}
        headers["x-stainless-retry-count"] = "0"  # an equal request is another one, as an official client says it
        async with (
            ClientSession(timeout=ClientTimeout(total=None)) as client,  # the trainer has deadlines of its own
            client.post(f"{endpoint}/chat/completions", json=body, headers=headers) as reply,
        ):
            text = await reply.text()
        return ProgramResult(exit_code=int(reply.status != 200), stdout=text, stderr=text)


def as_messages(system: str | None, prompt: Any) -> list[dict[str, Any]]:
    """Return a task's prompt as chat messages.

    Args:
        system: the task's system prompt, if it has one.
        prompt: the task's prompt: a text, verifiers' messages, or None.
    """
    messages = [{"role": "system", "content": system}] if system else []
    if isinstance(prompt, str):
        return [*messages, {"role": "user", "content": prompt}]
    return [*messages, *(message_to_wire(message) for message in prompt or [])]
