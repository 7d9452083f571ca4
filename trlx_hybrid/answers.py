"""A tool's answer as text: this module alone decides how the model is shown what a tool returns.

TRL puts a list into the message as it is, since it may hold content blocks, and `str` of all else. Three things can go
wrong. `str` may raise, which ends the run. A text may hold a lone surrogate, which no tokenizer accepts. And many chat
templates drop a list or a part of it: Qwen3's shows no list at all.

Source: trl 1.16, `GRPOTrainer._tool_call_loop` and `_get_tool_suffix_ids`.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a tool's process imports only what it uses
    from .rollout.conversation import Message

logger = logging.getLogger(__name__)

DEPTH = 4
"""Levels of a list at which a template is tried; deeper values count as texts of the last level."""


class UnshowableError(Exception):
    """An error for a tool's result that cannot be shown to the model. Its text says why."""


def as_content(value: Any) -> Any:
    """Return the content of a tool's message: a list as it is, a text for all else.

    Content objects of MCP in a list become blocks: the text of a text or of a resource, and the kind of all others.

    Raises:
        UnshowableError: the result cannot be turned into a text, or it holds an image block without an image.
    """
    try:
        if not isinstance(value, list):
            return str(value)
        blocks = [_block(part) for part in value]
        str(blocks)  # checks that a template can use its text
    except UnshowableError:
        raise
    except Exception as error:
        kind = type(value).__qualname__
        reason = f"the result, a {kind}, cannot be turned into a string: {described(error)}"
        raise UnshowableError(reason) from error
    same = all(block is part for block, part in zip(blocks, value, strict=True))
    return value if same else blocks


def described(error: BaseException) -> str:
    """Return the class and the text of an exception; the class alone where its text cannot be made."""
    kind = type(error).__name__
    try:
        return f"{kind}: {error}"
    except (Exception, SystemExit) as another:  # a foreign __str__ may raise anything
        return f"{kind}, whose text cannot be made: {type(another).__name__}"


def readable(value: Any) -> Any:
    """Return a text, or a list or dict of texts, without lone surrogates; the object itself where it has none.

    Two surrogates that form a pair become their character, any other one becomes U+FFFD.
    """
    if all(_is_unicode(text) for text in _texts(value)):
        return value
    try:
        return _replaced(value)
    except RecursionError:  # `str` of a list escapes surrogates
        return str(value)


def as_text(content: Any) -> str:
    """Return the text of a message's content: for content blocks their texts, line by line, for any other list its
    `str`."""
    if isinstance(content, list) and any(_is_block(part) for part in content):
        return str(readable("\n".join(_text_of(part) for part in content)))
    return str(readable(str(content)))


class Answers:
    """Converts tools' messages to a form in which the chat template shows everything that they say.

    The template is tried with a list of the same shape in which each text is a different word: where a word is missing
    in the result, the list is turned into text. One try serves all lists of a shape. Use one object per batch: the next
    batch may have another template. May be called from several threads at once.

    Args:
        render: returns the text of a conversation that ends with these tool messages.
        template: name of the chat template, for warnings.
        sees_images: whether the model sees images.
    """

    def __init__(self, render: Callable[[list[Message]], str], template: str, *, sees_images: bool) -> None:
        self._render, self._template, self._sees_images = render, template, sees_images
        self._shows: dict[Any, bool] = {}

    def shown(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages in a form that the template shows completely; unchanged where it does already.

        A warning names each tool whose answers the template does not show, once.
        """
        return [self._message({**message, "name": readable(message["name"])}) for message in messages]

    def as_texts(self, messages: Sequence[Message]) -> list[Message]:
        """Return the same messages with text-only contents."""
        return [{**message, "name": readable(message["name"]), "content": _as_one(message)} for message in messages]

    def _message(self, message: Message) -> Message:
        content = readable(message["content"])
        if isinstance(content, list) and not self._shows_all(message["name"], content):
            content = self._mended(message["name"], content)
        return {**message, "content": content}

    def _mended(self, name: str, content: list[Any]) -> Any:
        """Return a list as blocks of texts and images, or as one text where the template shows no such blocks."""
        if any(_is_image(part) for part in content):
            blocks = [p if _is_image(p) else {"type": "text", "text": _text_of(p)} for p in content]
            if self._sees_images and self._shows_all(name, blocks):
                return blocks
            _warn_once(name, self._template, "an image")
        text = as_text(content)
        if not self._finds(name, "text", "", {"qzxtextq"}, "qzxtextq"):
            _warn_once(name, self._template, "a text")
        return text

    def _shows_all(self, name: str, content: list[Any]) -> bool:
        """Return whether the template shows every text in a list, and whether it has images."""
        if not content:
            return self._finds(name, "nothing", "", {"[]"}, [])
        words = _Words()
        probe = _probe(content, words, DEPTH)
        if not self._finds(name, _shape(content, DEPTH), [], words.used, probe):
            return False
        rest = [part for part in probe if not _is_image(part)]
        return len(rest) == len(probe) or self._finds(name, ("images", _shape(content, DEPTH)), rest, set(), probe)

    def _finds(self, name: str, shape: Any, less: Any, words: set[str], content: Any) -> bool:
        """Return whether the rendering of `content` has all words more often than that of `less`, and differs from
        it."""
        if shape not in self._shows:
            try:
                rendered = self._render([{"role": "tool", "name": name, "content": content}])
                beside = self._render([{"role": "tool", "name": name, "content": less}])
                missing = any(rendered.count(word) <= beside.count(word) for word in words)
                self._shows[shape] = rendered != beside and not missing
            except Exception:  # any error means that the template cannot show it
                self._shows[shape] = False
        return self._shows[shape]


class _Words:
    """Hands out words and numbers that occur in no template, a different one at each call."""

    def __init__(self) -> None:
        self.used: set[str] = set()

    def text(self) -> str:
        word = f"qzx{len(self.used)}q"
        self.used.add(word)
        return word

    def number(self) -> int:
        number = 731_000_000 + len(self.used)
        self.used.add(str(number))
        return number


def _probe(value: Any, words: _Words, depth: int) -> Any:
    """Return a value of the same shape with probe words in place of texts."""
    if value is None or _is_image(value):
        return value
    if isinstance(value, int | float):
        return words.number()
    if depth and isinstance(value, list):
        different = {_shape(part, depth - 1): part for part in reversed(value)}
        return [_probe(part, words, depth - 1) for part in reversed(different.values())]
    if _is_text(value):
        return {**value, "text": words.text()}  # its other fields need not be shown
    if depth and isinstance(value, Mapping):
        return {key: part if key == "type" else _probe(part, words, depth - 1) for key, part in value.items()}
    return words.text()


def _shape(value: Any, depth: int) -> Any:
    """Return what a template can tell apart in a value; equal for lists that differ only in their texts and lengths."""
    if value is None:
        return None
    if isinstance(value, int | float):
        return "number"
    if depth and isinstance(value, list):
        return "list", *dict.fromkeys(_shape(part, depth - 1) for part in value)
    if _is_image(value) or _is_text(value):
        return value["type"], *map(str, value)
    if depth and isinstance(value, Mapping):
        kind = str(value.get("type"))
        return "dict", kind, *((str(key), _shape(part, depth - 1)) for key, part in value.items())
    return "text"


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image" and "image" in part


def _is_block(part: Any) -> bool:
    return _is_text(part) or _is_image(part) or _resource(part) is not None


def _text_of(part: Any) -> str:
    """Return the text of a block, or a placeholder for it."""
    if _is_text(part):
        return str(part["text"])
    if _is_image(part):
        return "[image]"
    text = _resource(part)
    return str(part) if text is None else text


def _resource(part: Any) -> str | None:
    """Return the text of an embedded resource, as MCP writes it into JSON; None for anything else."""
    resource = part.get("resource") if isinstance(part, Mapping) and part.get("type") == "resource" else None
    text = resource.get("text") if isinstance(resource, Mapping) else None
    return text if isinstance(text, str) else None


def _block(part: Any) -> Any:
    """Return a list item as a content block where it is an MCP object, or MCP's JSON of an image or audio; else as it
    is.

    Source: the Model Context Protocol's schema of 2025-06-18, `ContentBlock`.
    """
    if isinstance(part, Mapping):
        if part.get("type") in ("image", "audio") and "data" in part and part["type"] not in part:
            return {"type": "text", "text": f"[{part['type']} {part.get('mimeType', '')}".rstrip() + "]"}
        if part.get("type") == "image" and "image" not in part:
            raise UnshowableError("the result holds a block of an image without the image")
        return part
    kind = None if isinstance(part, str | list) else getattr(part, "type", None)
    if not isinstance(kind, str) or kind not in ("text", "image", "audio", "resource", "resource_link"):
        return part
    resource = getattr(part, "resource", part)
    text = getattr(resource, "text", None)
    if isinstance(text, str):
        return {"type": "text", "text": text}
    about = getattr(resource, "uri", None) or getattr(part, "mimeType", None) or getattr(part, "mime_type", None)
    return {"type": "text", "text": f"[{kind} {about or ''}".rstrip() + "]"}


def _as_one(message: Message) -> str:
    content = message["content"]
    return as_text(content) if isinstance(content, list) else str(readable(content))


def _is_unicode(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in nested lists and dicts, to any depth."""
    waiting, seen = [value], set[int]()
    while waiting:
        part = waiting.pop()
        if isinstance(part, str):
            yield part
        elif isinstance(part, list | tuple | Mapping) and id(part) not in seen:
            seen.add(id(part))  # a list may hold itself
            waiting.extend(itertools.chain(*part.items()) if isinstance(part, Mapping) else part)


def _replaced(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, Mapping):
        return {_replaced(key): _replaced(part) for key, part in value.items()}
    return [_replaced(part) for part in value] if isinstance(value, list | tuple) else value


@functools.lru_cache(maxsize=256)
def _warn_once(tool: str, template: str, what: str) -> None:
    logger.warning(
        "Tool %r returned %s, and the chat template of %s shows nothing of it: the model does not see what it asked "
        "for. Return something else, or give the trainer's processing class a template that shows it.",
        tool,
        what,
        template,
    )
