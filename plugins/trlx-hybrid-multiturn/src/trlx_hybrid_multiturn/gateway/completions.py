"""OpenAI's completions, of texts or token ids without a chat template: requests checked and read, answers written.

A parameter is honoured, overridden by the run (`OVERRIDDEN`), without effect on what is sampled (`WITHOUT_EFFECT`), or
refused with its name. None is ignored.

Source: OpenAI's API reference, "Create completion"; openai-python 3.52, `types/completion_create_params.py`. Its
defaults hold, also that of 16 tokens. `return_token_ids` is vLLM's (`vllm/entrypoints/openai/completion/protocol.py`).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from . import chat
from .asked import Asked, Raw, Said
from .errors import RefusedError
from .reading import checked, limit_of, overridden_of, stops_of, switch_of, text_of

HONOURED = (
    "prompt",
    "max_tokens",
    "stop",
    "stream",
    "stream_options",
    "model",
    "n",
    "return_token_ids",
)
OVERRIDDEN = ("temperature", "top_p", "top_k", "min_p", "seed")
"""Parameters that change the distribution. The run's settings hold, with which log-probs are computed."""
WITHOUT_EFFECT = ("user",)
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "suffix": ("",),
    "echo": (False,),
    "logprobs": (0,),
}
"""Values of parameters that change nothing. None is one of them everywhere. With `logprobs`, the answer lists those of
the sampled tokens."""
MOST = 16
"""The largest number of tokens where a request does not say it."""


def read(body: Any) -> Asked:
    """Return what a request asks for.

    Args:
        body: the request's JSON.

    Raises:
        RefusedError: the request is not one that is served; names the parameter.
    """
    given = checked(body, (*HONOURED, *OVERRIDDEN, *WITHOUT_EFFECT), NEUTRAL)
    switch_of("return_token_ids", given.get("return_token_ids", False))
    return Asked(
        raw=_raw(given.get("prompt")),
        max_tokens=limit_of("max_tokens", given.get("max_tokens", MOST)),
        stop=stops_of("stop", given.get("stop", [])),
        choices=limit_of("n", given.get("n", 1)),
        logprobs="logprobs" in given,
        overridden=overridden_of(given, OVERRIDDEN, NEUTRAL),
    )


def _raw(prompt: Any) -> Raw:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        (prompt,) = prompt
    if isinstance(prompt, str) and prompt:
        return text_of("prompt", prompt, parameter="prompt")
    if isinstance(prompt, list) and prompt and all(type(token) is int and token >= 0 for token in prompt):
        return prompt
    raise RefusedError("prompt: one text or one list of token ids is needed, not empty.", parameter="prompt")


# --- answers ----------------------------------------------------------------------------------------------------------


def written(body: Mapping[str, Any], choices: Sequence[Said], number: str) -> dict[str, Any]:
    """Return the answer to a request, as one JSON object.

    Args:
        body: the request's JSON.
        choices: the model's texts, as many as were asked for.
        number: the answer's id.
    """
    told = [_choice(body, index, said) for index, said in enumerate(choices)]
    return {**_head(body, number), "choices": told, "usage": chat.usage_of(choices)}


def streamed(body: Mapping[str, Any], choices: Sequence[Said], number: str) -> Iterator[dict[str, Any]]:
    """Yield the answer to a request as the chunks of a stream.

    Args:
        body: the request's JSON.
        choices: the model's texts, as many as were asked for.
        number: the answer's id.
    """
    usage = (body.get("stream_options") or {}).get("include_usage")
    for index, said in enumerate(choices):
        yield {**_head(body, number), "choices": [_choice(body, index, said)]} | ({"usage": None} if usage else {})
    if usage:
        yield {**_head(body, number), "choices": [], "usage": chat.usage_of(choices)}


def refused(error: RefusedError) -> dict[str, Any]:
    """Return the answer to a request that is refused."""
    return chat.refused(error)


def _head(body: Mapping[str, Any], number: str) -> dict[str, Any]:
    model = body.get("model") or "policy"
    return {"id": f"cmpl-{number}", "object": "text_completion", "created": int(time.time()), "model": model}


def _choice(body: Mapping[str, Any], index: int, said: Said) -> dict[str, Any]:
    reason = "length" if said.length else "stop"
    told = {"index": index, "text": said.message["content"], "logprobs": _logprobs(said), "finish_reason": reason}
    if body.get("return_token_ids"):
        told |= {"prompt_token_ids": [*said.prompt_ids], "token_ids": [*said.token_ids]}
    return told


def _logprobs(said: Said) -> dict[str, Any] | None:
    if said.logprobs is None:
        return None
    texts = [text for text, _ in said.logprobs]
    return {
        "tokens": texts,
        "token_logprobs": [logprob for _, logprob in said.logprobs],
        "top_logprobs": None,
        "text_offset": [*itertools.accumulate(map(len, texts[:-1]), initial=0)] if texts else [],
    }
