"""What tools answered as token ids, by TRL's own method, which renders the same opening again for every answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any


def observer(trainer: Any) -> Callable[[Sequence[dict[str, Any]]], list[int]]:
    """The ids that follow a turn's tool calls; the opening is rendered once per tool's name.

    Good for one batch: the template, and what it is given, may be others in the next. A trainer that has a method of
    its own in place of TRL's is asked as it is.
    """
    method = getattr(type(trainer), "_get_tool_suffix_ids", None)
    if method is None or not method.__module__.startswith("trl."):
        return trainer._get_tool_suffix_ids  # type: ignore[no-any-return]
    reads = ("_is_vlm", "chat_template", "chat_template_kwargs", "_tokenizer")
    stand_in = SimpleNamespace(**{name: getattr(trainer, name) for name in reads})
    stand_in.processing_class = _Openings(trainer.processing_class)
    return lambda messages: method(stand_in, messages)


class _Openings:
    """The tokenizer or processor; remembers the ids of conversations that have no answers yet."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._known: dict[str, Any] = {}

    def apply_chat_template(self, messages: Sequence[dict[str, Any]], **given: Any) -> Any:
        if given["add_generation_prompt"]:
            return self._inner.apply_chat_template(messages, **given)
        name = messages[-1]["tool_calls"][0]["function"]["name"]
        if name not in self._known:
            self._known[name] = self._inner.apply_chat_template(messages, **given)
        return self._known[name]
