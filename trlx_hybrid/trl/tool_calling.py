"""TRL's tool calling in our terms: its rows as dialogues, and finished conversations as what its tool loop returns.

Knows the attributes that TRL 1.16's `GRPOTrainer` and `DistillationTrainer` keep for it, which
tests/test_trl_internals.py names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from ..errors import ConfigError
from ..rollout.conversation import Conversation, Dialogue, Limits
from ..rollout.tokenizer import own_tokenizer
from ..types import Completion


def dialogues(
    trainer: Any,
    parse_response: Callable[..., dict[str, Any]],
    prompt_ids: Sequence[list[int]],
    images: Sequence[list[Any] | None] | None,
    first: Sequence[Completion] | None = None,
) -> list[Dialogue]:
    """One dialogue per row of the batch.

    Args:
        parse_response: TRL's.
        first: first turns that a custom rollout has sampled.
    """
    observe, environments = observer(trainer), getattr(trainer, "environments", None)
    known = {tool.__name__: tool for tool in trainer.tools or () if not inspect.iscoroutinefunction(tool)}
    return [
        Dialogue(
            prompt_ids=list(prompt_ids[index]),
            parse=_parser(trainer, parse_response, index),
            observe=observe,
            sync_tools=trainer._sync_tool_dicts[index] if _is_grpo(trainer) else trainer._tool_dict,
            async_tools=trainer._async_tool_dicts[index] if _is_grpo(trainer) else {},
            run_tools=known,
            images=images[index] if images is not None else None,
            first=first[index] if first is not None else None,
            event_loop=getattr(trainer, "async_loop", None),
            environment=environments[index] if environments else None,
            discard=_discarding(trainer, index),
        )
        for index in range(len(prompt_ids))
    ]


def limits(trainer: Any, max_model_len: int) -> Limits:
    """Where TRL ends a conversation."""
    return Limits(
        completion_tokens=trainer.max_completion_length,
        model_tokens=max_model_len,
        tool_turns=trainer.max_tool_calling_iterations,
    )


def refuse_text(prompts: Sequence[Any]) -> None:
    """Tools need chat messages; TRL would fail on the first completion, after it was sampled."""
    if prompts and isinstance(prompts[0], str):
        raise ConfigError(
            "The trainer was given tools, but the dataset's prompts are plain text: there is no conversation to put a "
            'call into. Make each prompt a list of messages, [{"role": "user", "content": …}].'
        )


def with_images(trainer: Any, generated: Any) -> Any:
    """What TRL's `_generate` returns, with the images that a `rollout_func` returned in a field `images`: of each row
    those of prompt and completion in their order, or None. TRL itself takes none from it.

    Raises:
        ConfigError: the model sees none.
    """
    if getattr(trainer, "rollout_func", None) is None:
        return generated
    *columns, fields, _, _ = generated
    images = fields.get("images")
    if not any(images or ()):
        return generated
    if not trainer._is_vlm:
        raise ConfigError(
            "rollout_func returned images, and the trainer's processing_class is a tokenizer: this model sees none. "
            "Give the trainer a vision-language model with its processor, or leave the field `images` out."
        )
    return (*columns, fields, images, images)


def show_images(trainer: Any, generated: Any) -> None:
    """Have TRL's loss take images from behind the prompt, as it does for tools that answer with them, in the batch that
    it is about to score. `tools` is to be put back afterwards."""
    *_, tool_images = generated
    if any(tool_images or ()) and not trainer.tools:
        trainer.tools = [trainer.rollout_func]


def refuse_uneven_images(trainer: Any, generated: Any) -> None:
    """Ranks gather a sharded tower together: one whose batch has no image would leave the others waiting. Collective.

    Raises:
        ConfigError: this or another rank has none, and some rank has.
    """
    session = trainer.session
    sharded = session.policy.fsdp_version is not None and session.ranks.world > 1
    if not (sharded and getattr(trainer, "_is_vlm", False)):
        return
    *_, images, _ = generated
    seen = session.ranks.gather(any(images or ()))
    if any(seen) and not all(seen):
        raise ConfigError(
            f"The conversations of rank {seen.index(False)} have no image and those of rank {seen.index(True)} have: "
            "under FSDP every rank needs one in each batch, for the layers that see images are gathered by all of "
            "them. Put an image into each prompt (or into what `reset` shows), or train with DDP."
        )


def first_turns(trainer: Any, conversations: Sequence[Conversation]) -> Any:
    """What TRL's `_generate_single_turn` returns: of every row the first turn."""
    lengths = [c.turns[0].sampled for c in conversations]
    token_ids = [c.completion_ids[:n] for c, n in zip(conversations, lengths, strict=True)]
    if not _is_grpo(trainer):
        return token_ids
    return token_ids, [(c.logprobs or [])[:n] for c, n in zip(conversations, lengths, strict=True)]


def sampled_turns(token_ids: Sequence[list[int]], logprobs: Sequence[list[float]] | None) -> list[Completion]:
    """First turns that a custom rollout sampled, from what it returned."""
    return [
        Completion(token_ids=list(ids), logprobs=[[value] for value in logprobs[i]] if logprobs is not None else None)
        for i, ids in enumerate(token_ids)
    ]


def loop_result(trainer: Any, conversations: Sequence[Conversation]) -> tuple[Any, ...]:
    """What TRL's `_tool_call_loop` returns."""
    logprobs = ([c.logprobs or [] for c in conversations],) if _is_grpo(trainer) else ()
    return (
        [c.loss_mask for c in conversations],
        [c.messages for c in conversations],
        [c.completion_ids for c in conversations],
        *logprobs,
        sum(c.calls for c in conversations),
        sum(c.failed_calls for c in conversations),
        [c.images for c in conversations],
    )


def _is_grpo(trainer: Any) -> bool:
    return bool(trainer._base_name == "GRPO")


def _parser(
    trainer: Any, parse_response: Callable[..., dict[str, Any]], index: int
) -> Callable[[list[int], list[int]], dict[str, Any]]:
    """A row's turns are parsed with the tools that its prompt was rendered with."""
    tools = trainer.tools
    if getattr(trainer, "environment_factories", None) is not None:
        tools = trainer._env_tools[trainer._batch_environments[index]]
    return lambda token_ids, prefix: parse_response(trainer._tokenizer, token_ids, prefix=prefix, tools=tools)


def _discarding(trainer: Any, index: int) -> Callable[[], None]:
    """Take a row's environment out of TRL's pool: a call that never came back may still be using it.

    TRL makes another when a batch needs it. Here its factory, which may fail, would end everybody's conversations.
    """

    def discard() -> None:
        if not getattr(trainer, "environments", None):
            return
        environment, name = trainer.environments[index], trainer._batch_environments[index]
        pool = trainer._environment_pool[name]
        pool[:] = [pooled for pooled in pool if pooled is not environment]

    return discard


def observer(trainer: Any) -> Callable[[Sequence[dict[str, Any]]], list[int]]:
    """The ids that follow a turn's tool calls; the opening is rendered once per tool's name, and encoded once.

    Good for one batch: the template, and what it is given, may be others in the next. To be called from several threads
    at once. A trainer that has a method of its own in place of TRL's is asked as it is.
    """
    method = getattr(type(trainer), "_get_tool_suffix_ids", None)
    if method is None or not method.__module__.startswith("trl."):
        return trainer._get_tool_suffix_ids  # type: ignore[no-any-return]
    reads = ("_is_vlm", "chat_template", "chat_template_kwargs", "_tokenizer")
    stand_in = SimpleNamespace(**{name: getattr(trainer, name) for name in reads})
    stand_in.processing_class = _Openings(own_tokenizer(trainer.processing_class))
    return lambda messages: method(stand_in, messages)


@dataclass(frozen=True, slots=True)
class _Opening:
    """A conversation up to where its last turn ended, with the token that ends it."""

    text: str
    ids: list[int]


class _Openings:
    """The tokenizer or processor; remembers the ids of conversations that have no answers yet.

    Of a conversation with answers only what follows the opening is encoded. That gives the same ids where the opening
    ends with a token at which texts are split before anything else happens to them, and which takes no spaces with it.
    What a tokenizer does at a text's beginning alone is seen at the first answer, which is encoded both ways.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._known: dict[str, Any] = {}
        self._openings: dict[str, _Opening | None] = {}
        self._splits = _splits_at_its_end_of_turn(inner)

    def apply_chat_template(self, messages: Sequence[dict[str, Any]], **given: Any) -> Any:
        name = messages[1]["tool_calls"][0]["function"]["name"]
        if not given["add_generation_prompt"]:
            if name not in self._known:
                self._known[name] = self._inner.apply_chat_template(messages, **given)
            return self._known[name]
        opening = self._openings.get(name)
        if opening is not None:
            text = self._inner.apply_chat_template(messages, **given | {"tokenize": False})
            if text.startswith(opening.text):
                return opening.ids + self._encoded(text[len(opening.text) :])
        ids = self._inner.apply_chat_template(messages, **given)
        if self._splits and name not in self._openings:
            self._openings[name] = self._opening(name, messages, ids, given)
        return ids

    def _opening(
        self, name: str, messages: Sequence[dict[str, Any]], ids: list[int], given: dict[str, Any]
    ) -> _Opening | None:
        """What may be left out, if encoding the rest of this conversation gives the rest of its ids."""
        end, end_id = self._inner.eos_token, self._inner.eos_token_id
        as_text = given | {"tokenize": False}
        text = self._inner.apply_chat_template(messages, **as_text)
        before = self._inner.apply_chat_template(messages[:2], **as_text | {"add_generation_prompt": False})
        known = self._known.get(name, [])
        if end not in before or end_id not in known:
            return None
        cut = before.rindex(end) + len(end)
        opening = _Opening(before[:cut], known[: len(known) - known[::-1].index(end_id)])
        same = text.startswith(opening.text) and opening.ids + self._encoded(text[cut:]) == ids
        return opening if same else None

    def _encoded(self, text: str) -> list[int]:
        """Past what transformers does around it: no setting of an earlier call is there."""
        return self._inner.backend_tokenizer.encode(text, add_special_tokens=False).ids  # type: ignore[no-any-return]


def _splits_at_its_end_of_turn(inner: Any) -> bool:
    """Whether this is a tokenizer of the `tokenizers` library that cuts texts at its end-of-sequence token."""
    if not getattr(inner, "is_fast", False) or getattr(inner, "split_special_tokens", False):
        return False
    end = inner.added_tokens_decoder.get(inner.eos_token_id)
    return end is not None and not (end.normalized or end.single_word or end.lstrip or end.rstrip)
