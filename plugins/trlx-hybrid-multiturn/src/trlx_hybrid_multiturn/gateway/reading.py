"""Checks that the requests of all APIs share."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from .errors import RefusedError

PIXELS = 1 << 26
"""Pixels of the largest image."""


def checked(body: Any, known: Collection[str], neutral: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Return a request's parameters without those that are null.

    Args:
        body: the request's JSON.
        known: parameters that are served.
        neutral: values of parameters that change nothing. A parameter that is not known is served with these only.

    Raises:
        RefusedError: a parameter is not served, or its value is not.
    """
    if not isinstance(body, dict):
        raise RefusedError("The body is no JSON object.")
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        if name in known:
            continue
        if name in neutral and value not in neutral[name]:
            served = " or ".join(json.dumps(each) for each in neutral[name])
            raise RefusedError(f"{name}={json.dumps(value)} is not served here, only {served}.", parameter=name)
        if name not in neutral:
            raise RefusedError(f"The parameter {name!r} is not served here. Leave it out.", parameter=name)
    return given


def by_members(body: Any, objects: Collection[str]) -> Any:
    """Return a request in which the members of some parameters are parameters of their own.

    Args:
        body: the request's JSON.
        objects: the names of these parameters.

    Raises:
        RefusedError: one of them is no object.
    """
    if not isinstance(body, dict):
        return body
    members: dict[str, Any] = {}
    for name in objects:
        if body.get(name) is None:
            continue
        if not isinstance(body[name], dict):
            raise RefusedError(f"{name}={json.dumps(body[name])}: it is an object.", parameter=name)
        members |= {f"{name}.{member}": value for member, value in body[name].items()}
    return {name: value for name, value in body.items() if name not in objects} | members


def messages_of(given: Mapping[str, Any]) -> list[Any]:
    """Return a request's messages as they were sent.

    Args:
        given: its parameters.

    Raises:
        RefusedError: they are no list, or there are none.
    """
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RefusedError("messages: a list with at least one message is needed.", parameter="messages")
    return messages


def overridden_of(
    given: Mapping[str, Any],
    names: Collection[str],
    neutral: Mapping[str, tuple[Any, ...]],
    strict: Iterable[Any] = (),
) -> dict[str, Any]:
    """Return the parameters of a request whose place the run's own settings take.

    Args:
        given: the request's parameters.
        names: those that the run overrides.
        neutral: values of parameters that change nothing.
        strict: the request's functions; their member `strict` asks for calls by a grammar.
    """
    found = {name: given[name] for name in names if name in given and given[name] not in neutral.get(name, ())}
    return found | ({"strict": True} if any(function.get("strict") for function in strict) else {})


def limit_of(name: str, value: Any) -> int:
    """Return a limit of tokens, or a number of messages.

    Raises:
        RefusedError: it is no whole number above 0.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise RefusedError(f"{name}={value!r}: it is a whole number, 1 or more.", parameter=name)
    return value


def switch_of(name: str, value: Any) -> bool:
    """Return a parameter that is true or false.

    Raises:
        RefusedError: it is neither.
    """
    if not isinstance(value, bool):
        raise RefusedError(f"{name}={json.dumps(value)}: it is true or false.", parameter=name)
    return value


def stops_of(name: str, value: Any) -> list[str]:
    """Return the texts at which a message is to end.

    Raises:
        RefusedError: they are neither a text nor a list of texts, or one is empty.
    """
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise RefusedError(f"{name}={json.dumps(value)}: it is a text, or a list of texts.", parameter=name)
    return texts


Pictures = Mapping[str, Callable[[Mapping[str, Any]], Any]]
"""The types of blocks that hold an image, each with a function that returns the image of such a block, as base64."""


def content_of(
    name: str, content: Any, pictures: Pictures, *, parameter: str = "messages", served: Collection[str] = ("text",)
) -> str | list[dict[str, Any]]:
    """Return a content as chat templates take it: a text, or, where it has images, a list of blocks.

    Args:
        name: the content's place in the request, for messages.
        content: the content.
        pictures: types of blocks of images.
        parameter: the parameter of the request that holds it.
        served: types of blocks of text.

    Raises:
        RefusedError: it holds something else than texts and images, a lone surrogate, or an image that cannot be read.
    """
    parts = content if isinstance(content, list) else []
    kinds = [part.get("type") if isinstance(part, dict) else None for part in parts]
    if not any(kind in pictures for kind in kinds):
        return text_of(name, content, parameter=parameter, served=served)
    blocks: list[dict[str, Any]] = []
    for kind, part in zip(kinds, parts, strict=True):
        if kind is None or kind not in pictures:
            text = text_of(name, [part], parameter=parameter, served=served)
            blocks.append({"type": "text", "text": text})
            continue
        try:
            data = pictures[kind](part)
        except (KeyError, TypeError):
            data = None
        blocks.append({"type": "image", "image": _image(name, data, parameter)})
    return blocks


def _image(name: str, data: Any, parameter: str) -> Any:
    """Return an image in RGB.

    Args:
        name: the place of its content in the request, for messages.
        data: the image's file in base64, or as a data URL.
        parameter: the parameter of the request that holds it.

    Raises:
        RefusedError: it is at another address, has too many pixels, or cannot be read.
    """
    from PIL import Image

    if not isinstance(data, str) or data.startswith(("http:", "https:", "file:")):
        raise RefusedError(f"{name}: an image is taken as base64 only, and none is fetched.", parameter=parameter)
    try:
        image = Image.open(io.BytesIO(base64.b64decode(data.partition(",")[2] if data.startswith("data:") else data)))
        if image.width * image.height > PIXELS:
            raise RefusedError(f"{name}: an image has more than {PIXELS:,} pixels.", parameter=parameter)
        return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise RefusedError(f"{name}: an image cannot be read: {error}.", parameter=parameter) from None


def text_of(name: str, content: Any, *, parameter: str = "messages", served: Collection[str] = ("text",)) -> str:
    """Return a content as text: a text, a list of blocks of text, or None.

    Args:
        name: the content's place in the request, for messages.
        content: the content.
        parameter: the parameter of the request that holds it.
        served: types of blocks of text.

    Raises:
        RefusedError: it holds something else than text, or a lone surrogate.
    """
    if content is None:
        return ""
    if isinstance(content, list):
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind not in served:
                raise RefusedError(f"{name}: content of type {kind!r} is not served here.", parameter=parameter)
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise RefusedError(f"{name}: its content is no text.", parameter=parameter)
    try:
        content.encode()
    except UnicodeEncodeError:
        raise RefusedError(
            f"{name}: its content has a lone surrogate, which no text has.", parameter=parameter
        ) from None
    return content
