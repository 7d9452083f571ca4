"""A tool's answer as text: one place that decides how the model is shown whatever a tool returns.

TRL puts a list into the message as it is, since it may hold content blocks, and `str` of all else. Three things go
wrong there. `str` may raise, and the run ends. A text may hold a lone surrogate, which no tokenizer takes. And many
chat templates show nothing of a list, or lose a part of it: Qwen3's shows no list at all.

Source: trl 1.16, `GRPOTrainer._tool_call_loop` and `_get_tool_suffix_ids`.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a tool's process needs no more than it uses
    from .rollout.conversation import Message

logger = logging.getLogger(__name__)

DEPTH = 4
"""Levels of a list at which a template is tried; it shows what lies deeper as it shows a text there."""


class UnshowableError(Exception):
    """A tool's result cannot be shown to the model. The text says why."""


def as_content(value: Any) -> Any:
    """Return the content of a tool's message: a list as it is, a text for all else.

    Content objects of MCP in a list become blocks: the text of a text or of a resource, and the kind of all others.

    Raises:
        UnshowableError: it has no text, or holds a block of an image without the image.
    """
    try:
        if not isinstance(value, list):
            return str(value)
        blocks = [_block(part) for part in value]
        str(blocks)  # so that a template can be given its text
    except UnshowableError:
        raise
    except Exception as error:
        kind = type(value).__qualname__
        reason = f"the result, a {kind}, cannot be turned into a string: {described(error)}"
        raise UnshowableError(reason) from error
    same = all(block is part for block, part in zip(blocks, value, strict=True))
    return value if same else blocks


def described(error: BaseException) -> str:
    """Return class and text of an exception; the class alone where its text cannot be made."""
    kind = type(error).__name__
    try:
        return f"{kind}: {error}"
    except (Exception, SystemExit) as another:  # anybody's __str__
        return f"{kind}, whose text cannot be made: {type(another).__name__}"


def readable(value: Any) -> Any:
    """Return a text, or a list or dict of texts, without lone surrogates; the very object where it has none.

    Two that belong together become the character that they stand for, any other one U+FFFD.
    """
    if all(_is_unicode(text) for text in _texts(value)):
        return value
    try:
        return _replaced(value)
    except RecursionError:  # the text of a list escapes them
        return str(value)


def as_text(content: Any) -> str:
    """Return the text of a message's content: of blocks their texts, line by line, of any other list its own."""
    if isinstance(content, list) and any(_is_block(part) for part in content):
        return str(readable("\n".join(_text_of(part) for part in content)))
    return str(readable(str(content)))


class Answers:
    """Gives the messages of tools a form in which a chat template shows all that they say.

    A template is tried with a list of the same shape in which each text is another word: where one is missing, the list
    is rendered as text. One try serves all lists of a shape, so an object serves one batch: the next may have another
    template. May be called from several threads at once.

    Args:
        render: gives the text of a conversation that ends with these messages of tools.
        template: names the chat template, for warnings.
        sees_images: whether the model does.
    """

    def __init__(self, render: Callable[[list[Message]], str], template: str, *, sees_images: bool) -> None:
        self._render, self._template, self._sees_images = render, template, sees_images
        self._shows: dict[Any, bool] = {}

    def shown(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages of which the template shows everything, themselves where it does already.

        A tool whose answer it does not show is named in a warning, once.
        """
        return [self._message({**message, "name": readable(message["name"])}) for message in messages]

    def as_texts(self, messages: Sequence[Message]) -> list[Message]:
        """Return the same messages with texts alone."""
        return [{**message, "name": readable(message["name"]), "content": _as_one(message)} for message in messages]

    def _message(self, message: Message) -> Message:
        content = readable(message["content"])
        if isinstance(content, list) and not self._shows_all(message["name"], content):
            content = self._mended(message["name"], content)
        return {**message, "content": content}

    def _mended(self, name: str, content: list[Any]) -> Any:
        """Return blocks of texts and images, or one text where the template shows no such blocks."""
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
        """Whether the template shows every text in this list, and that there are images."""
        if not content:
            return self._finds(name, "nothing", "", {"[]"}, [])
        words = _Words()
        probe = _probe(content, words, DEPTH)
        if not self._finds(name, _shape(content, DEPTH), [], words.used, probe):
            return False
        rest = [part for part in probe if not _is_image(part)]
        return len(rest) == len(probe) or self._finds(name, ("images", _shape(content, DEPTH)), rest, set(), probe)

    def _finds(self, name: str, shape: Any, less: Any, words: set[str], content: Any) -> bool:
        """Whether all words of a content are in its rendering, and not in that of something less, from which it must
        differ."""
        if shape not in self._shows:
            try:
                rendered = self._render([{"role": "tool", "name": name, "content": content}])
                beside = self._render([{"role": "tool", "name": name, "content": less}])
                missing = any(rendered.count(word) <= beside.count(word) for word in words)
                self._shows[shape] = rendered != beside and not missing
            except Exception:  # a template may raise whatever it likes: it does not show such a list
                self._shows[shape] = False
        return self._shows[shape]


class _Words:
    """Hands out words and numbers that no template holds, each another one."""

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
    """Return a value of the same shape that holds words in the place of texts."""
    if value is None or _is_image(value):
        return value
    if isinstance(value, int | float):
        return words.number()
    if depth and isinstance(value, list):
        different = {_shape(part, depth - 1): part for part in reversed(value)}
        return [_probe(part, words, depth - 1) for part in reversed(different.values())]
    if _is_text(value):
        return {**value, "text": words.text()}  # what else is in it may stay unsaid
    if depth and isinstance(value, Mapping):
        return {key: part if key == "type" else _probe(part, words, depth - 1) for key, part in value.items()}
    return words.text()


def _shape(value: Any, depth: int) -> Any:
    """Return what templates can tell apart; equal for lists that differ in their texts and lengths alone."""
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
    """Return the text of a block, or what stands for it."""
    if _is_text(part):
        return str(part["text"])
    if _is_image(part):
        return "[image]"
    text = _resource(part)
    return str(part) if text is None else text


def _resource(part: Any) -> str | None:
    """Return the text of a resource that is embedded, as MCP writes it into JSON."""
    resource = part.get("resource") if isinstance(part, Mapping) and part.get("type") == "resource" else None
    text = resource.get("text") if isinstance(resource, Mapping) else None
    return text if isinstance(text, str) else None


def _block(part: Any) -> Any:
    """Return a part of a list, as a block where it is one of MCP's objects, or one of its images in JSON.

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
    """Yield all texts in lists and dicts, to any depth."""
    waiting, seen = [value], set[int]()
    while waiting:
        part = waiting.pop()
        if isinstance(part, str):
            yield part
        elif isinstance(part, list | tuple | Mapping) and id(part) not in seen:
            seen.add(id(part))  # one may hold itself
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
