"""Conversion of tools' results to text: this module alone decides how the model is shown what a tool returns.

TRL puts a result that is a list into the message as it is, since it may hold content blocks; of any other result it
takes the `str`. Three errors can follow. `str` may raise, which ends the run. A text may hold a lone surrogate, which
no tokenizer accepts. A chat template may leave out a list or a part of it, as many templates do; Qwen3's template shows
no list at all. This module avoids all three. If a result is too long, the model is shown only its beginning, with a
note that says how much is shown.

Source: trl 1.16, `GRPOTrainer._tool_call_loop` and `_get_tool_suffix_ids`.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a tool's process imports only what it uses
    from ..contract.conversation import Message

logger = logging.getLogger(__name__)

DEPTH = 4
"""The number of nested levels of a tool's result for which it is tested whether a chat template shows them; deeper
values count as texts."""


class UnshowableError(Exception):
    """An error for a tool's result that cannot be shown to the model. Its text says why."""


def as_content(value: Any) -> Any:
    """Return a tool's result as the content of its chat message: a list stays a list, anything else becomes a text.

    Content objects of MCP (Model Context Protocol) in a list become text blocks: with the text of a text or a resource,
    and with the kind of any other object, such as "[audio …]".

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
    """Return "class: text" of an exception; only its class and a note where its `__str__` raises."""
    kind = type(error).__name__
    try:
        return f"{kind}: {error}"
    except (Exception, SystemExit) as another:  # a foreign __str__ may raise anything
        return f"{kind}, whose text cannot be made: {type(another).__name__}"


def readable(value: Any) -> Any:
    """Return a text, or nested lists and dicts of texts, with lone surrogates replaced, because no tokenizer accepts
    them. If there are none, the same object is returned.

    Two surrogates that form a pair become their character. Any other surrogate becomes U+FFFD.
    """
    if all(_is_unicode(text) for text in _texts(value)):
        return value
    try:
        return _replaced(value)
    except RecursionError:  # `str` of a list escapes surrogates
        return str(value)


def as_text(content: Any) -> str:
    """Return a message's content as one text: the texts of content blocks, one per line, or the `str` of anything
    else."""
    if isinstance(content, list) and any(_is_block(part) for part in content):
        return str(readable("\n".join(_text_of(part) for part in content)))
    return str(readable(str(content)))


class Answers:
    """Converts tool messages to a form that the chat template renders completely.

    A template may leave out parts of a list. To find out, it is rendered with a list of the same structure in which
    each text is a made-up word. Where a word is missing in the rendered text, lists of this structure are turned into
    text. The finding is kept for later lists of the structure. Use one object per batch: the next batch may have
    another template. May be called from several threads at once.

    Args:
        render: takes tool messages; returns the rendered text of a conversation that ends with them.
        template: name of the chat template, for warnings.
        sees_images: whether the model sees images.
    """

    def __init__(self, render: Callable[[list[Message]], str], template: str, *, sees_images: bool) -> None:
        self._render, self._template, self._sees_images = render, template, sees_images
        self._shows: dict[Any, bool] = {}

    def shown(self, messages: Sequence[Message]) -> list[Message]:
        """Return tool messages in a form that the template shows completely. Messages that it already shows completely
        are returned unchanged.

        A warning names each tool whose images or texts the template cannot show, once.
        """
        return [self._message({**message, "name": readable(message["name"])}) for message in messages]

    def as_texts(self, messages: Sequence[Message]) -> list[Message]:
        """Return tool messages with their contents turned into plain texts."""
        return [{**message, "name": readable(message["name"]), "content": _as_one(message)} for message in messages]

    def _message(self, message: Message) -> Message:
        content = readable(message["content"])
        if isinstance(content, list) and not self._shows_all(message["name"], content):
            content = self._mended(message["name"], content)
        return {**message, "content": content}

    def _mended(self, name: str, content: list[Any]) -> Any:
        """Return the content of a tool message in another form, if it is a list that the template does not show
        completely: as text and image blocks if the template shows such blocks, else as one text.

        Args:
            name: the tool's name.
        """
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
        """Return whether the template shows every text and number in a list, and shows its images in some way.

        Args:
            name: the tool's name.
        """
        if not content:
            return self._finds(name, "nothing", "", {"[]"}, [])
        words = _Words()
        probe = _probe(content, words, DEPTH)
        if not self._finds(name, _shape(content, DEPTH), [], words.used, probe):
            return False
        rest = [part for part in probe if not _is_image(part)]
        return len(rest) == len(probe) or self._finds(name, ("images", _shape(content, DEPTH)), rest, set(), probe)

    def _finds(self, name: str, shape: Any, less: Any, words: set[str], content: Any) -> bool:
        """Return whether the template shows a tool message's content. It does if the rendered text contains every word
        more often than the text of a message with the content `less`, and the two texts differ.

        Args:
            name: the tool's name.
            shape: the key under which the finding is kept.
            less: a content without the words, to compare with.
            words: the made-up words and numbers in `content`.
            content: the content of the tool message.
        """
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
    """A source of made-up words and numbers that occur in no chat template. Each call returns a new word or number;
    `used` holds all that were returned, as texts."""

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
    """Return a copy of a tool's result with a made-up word or number in place of each text or number, to be searched
    for in the rendered template. Of list items with the same structure only one is kept.

    Args:
        words: makes the words, and remembers them.
        depth: how many nested levels are copied; a deeper value becomes one word.
    """
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
    """Return a hashable description of a value's structure: types and keys, but no texts, numbers or lengths of lists.
    Values that a chat template is likely to treat alike have equal descriptions, e.g. two lists that hold only texts.

    Args:
        depth: how many nested levels are described; a deeper value counts as a text.
    """
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
    """Return one item of a message's content as text: the text of a text block or an MCP resource, "[image]" for an
    image, and the `str` of anything else."""
    if _is_text(part):
        return str(part["text"])
    if _is_image(part):
        return "[image]"
    text = _resource(part)
    return str(part) if text is None else text


def _resource(part: Any) -> str | None:
    """Return the text of an MCP resource block in its JSON form; None for anything else."""
    resource = part.get("resource") if isinstance(part, Mapping) and part.get("type") == "resource" else None
    text = resource.get("text") if isinstance(resource, Mapping) else None
    return text if isinstance(text, str) else None


def _block(part: Any) -> Any:
    """Convert one item of a list that a tool returned. A content object of MCP (Model Context Protocol), or the dict of
    an MCP image or audio, becomes a text block: with its text, or with its kind, such as "[image image/png]". Any other
    item is returned unchanged.

    Raises:
        UnshowableError: the item is a dict of type "image" without an image.

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
    """Yield all texts in nested lists, tuples and dicts, keys included, to any depth."""
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


CHARACTERS = 1 << 20  # the default limit of an answer
NOTE = 200  # the largest number of characters of a note


def excerpt(content: Any, characters: int) -> Any:
    """Return a text, or a list of content blocks, as it is if it has at most `characters` characters; else its
    beginning, with a note.

    The note is the last line of a text or the last item of a list, and counts towards the limit. In a list only texts
    and text blocks are cut; the first other item that exceeds the limit is left out, with all that follow it.

    Args:
        content: a tool's result. A result that is neither a text nor a list is returned as it is.
        characters: the largest number of characters, more than `NOTE`.
    """
    kept = characters - NOTE
    if isinstance(content, str) and len(content) > characters:
        return f"{content[:kept]}\n[This answer was cut: {kept:,} of its {len(content):,} characters are shown.]"
    if not isinstance(content, list) or _size(content, characters) <= characters:
        return content
    items, left = [], kept
    for item in content:
        if (size := _size(item, left)) > left:
            items += _cut(item, left)
            break
        items.append(item)
        left -= size
    note = f"[This answer was cut: its first {kept:,} characters are shown.]"
    return [*items, note if items and isinstance(items[-1], str) else {"type": "text", "text": note}]


def _cut(item: Any, characters: int) -> list[Any]:
    """Return the first `characters` characters of a text or a text block, as a list of one item; an empty list for any
    other item."""
    if isinstance(item, str):
        return [item[:characters]]
    if isinstance(item, Mapping) and isinstance(item.get("text"), str):
        return [{**item, "text": item["text"][:characters]}]
    return []


def _size(value: Any, enough: int) -> int:
    """Return the number of characters of all texts in a value, to any depth; anything else counts as one character. The
    count stops above `enough`, since a list may contain itself."""
    size, inside = 0, [iter((value,))]
    while inside and size <= enough:
        item = next(inside[-1], inside)
        if item is inside:
            inside.pop()
            continue
        size += len(item) if isinstance(item, str | bytes) else 1
        if isinstance(item, Mapping):
            inside.append(itertools.chain.from_iterable(item.items()))
        elif isinstance(item, list | tuple | set | frozenset):
            inside.append(iter(item))
    return size
