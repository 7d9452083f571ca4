"""The link between TRL's tool calling and the rollout's conversations: it turns TRL's rows into `Dialogue` objects,
which the rollout component plays, and finished conversations into what TRL's tool loop returns.

The code reads the attributes in which TRL 1.16's `GRPOTrainer` and `DistillationTrainer` keep their tool-calling state;
tests/test_trl_internals.py lists them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ...contract.conversation import Conversation, Dialogue, Limits
from ...contract.types import Completion
from ...episodes.answers import Answers
from ...episodes.tokenizer import own_tokenizer
from ...episodes.unparsed import UNPARSED, ParsingTokenizer, UnparsedTurns
from ...errors import ConfigError
from ...policy.sharded import is_sharded

if TYPE_CHECKING:
    from ..stock import StockTrainer


def dialogues(
    trainer: StockTrainer,
    parse_response: Callable[..., dict[str, Any]],
    prompt_ids: Sequence[list[int]],
    images: Sequence[list[Any] | None] | None,
    first: Sequence[Completion] | None = None,
) -> list[Dialogue]:
    """Return one `Dialogue` per row of the batch: the prompt, tools and parser with which the rollout component runs
    the row's conversation.

    Args:
        parse_response: TRL's function of that name.
        prompt_ids: ids of each row's prompt.
        images: images of each row, or None.
        first: first turns that a custom rollout has sampled; None where the rollout component samples them.
    """
    observe, environments = observer(trainer), getattr(trainer, "environments", None)
    known = {tool.__name__: tool for tool in trainer.tools or () if not inspect.iscoroutinefunction(tool)}
    return [
        Dialogue(
            prompt_ids=list(prompt_ids[index]),
            parse=parser(trainer, parse_response, _tools_of(trainer, index)),
            decode=functools.partial(trainer._tokenizer.decode, skip_special_tokens=True),
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


def limits(trainer: StockTrainer, max_model_len: int) -> Limits:
    """Return the limits at which TRL ends a conversation.

    Args:
        max_model_len: the engine's maximum number of tokens of prompt and completion.
    """
    return Limits(
        completion_tokens=trainer.max_completion_length,
        model_tokens=max_model_len,
        tool_turns=trainer.max_tool_calling_iterations,
    )


def refuse_text(prompts: Sequence[Any]) -> None:
    """Refuse plain-text prompts where there are tools, which need chat messages. TRL would fail only after it has
    sampled the first completion."""
    if prompts and isinstance(prompts[0], str):
        raise ConfigError(
            "The trainer was given tools, but the dataset's prompts are plain text: there is no conversation to put a "
            'call into. Make each prompt a list of messages, [{"role": "user", "content": …}].'
        )


def with_images(trainer: StockTrainer, generated: Any) -> Any:
    """Return the result of TRL's `_generate`, with the images that a `rollout_func` returned in its field `images`: for
    each row, the images of prompt and completion in order, or None.

    TRL itself takes no images from this field. In a run without an engine of ours, the field stays what it is in TRL: a
    column for reward functions.

    Raises:
        ConfigError: TRL's loss would not take the images.
    """
    if getattr(trainer, "rollout_func", None) is None or trainer.session.selection.stock or not trainer._is_vlm:
        return generated
    *columns, fields, _, _ = generated
    images = fields.get("images")
    if not isinstance(images, list) or not any(isinstance(row, list) and row for row in images):
        return generated
    if trainer.tools:
        raise ConfigError(
            "rollout_func returned images, and the trainer has tools, which may answer with others: their order would "
            "be lost. Leave the tools out, or the field `images`."
        )
    if "image_grid_thw" not in trainer.processing_class.image_processor.model_input_names:
        raise ConfigError(
            f"rollout_func returned images, and {type(trainer.processing_class).__name__} does not say where each one "
            "lies (image_grid_thw, as Qwen's do). TRL's loss takes no other ones from it: put images into the dataset."
        )
    return (*columns, fields, images, images)


@contextmanager
def settings_kept(trainer: StockTrainer, *names: str) -> Iterator[None]:
    """Return a context for a batch, which restores some attributes of the trainer at its end, since this package sets
    them for the batch.

    Args:
        names: the attributes; one that the trainer does not have is left out.
    """
    before = {name: getattr(trainer, name) for name in names if hasattr(trainer, name)}
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(trainer, name, value)


def show_images(trainer: StockTrainer, generated: Any) -> None:
    """Make TRL's loss take images that come after the prompt, in the batch that it is about to score. TRL does so only
    where there are tools, so `tools` is set if images were generated; the caller must restore it afterwards.

    Args:
        generated: the result of TRL's `_generate`.
    """
    *_, tool_images = generated
    if any(tool_images or ()) and not trainer.tools:
        trainer.tools = [trainer.rollout_func]


def check_images(trainer: StockTrainer, generated: Any) -> None:
    """Check that all ranks can train on the images of a batch. Collective where the model takes images.

    All ranks gather sharded vision towers together, so a rank that skipped its tower would leave the others waiting.
    And TRL gathers images for its logs only on the ranks that have any, which would also wait for ever. If some ranks
    have images and others have none, `trainer.log_multimodal` is therefore set to False; the caller must restore it.

    Args:
        generated: the result of TRL's `_generate`, whose last item but one is the list of images of each row, or None.

    Raises:
        ConfigError: the tower is sharded, and some rows have images and others have none.
    """
    session = trainer.session
    if not getattr(trainer, "_is_vlm", False) or session.ranks.world == 1:
        return
    *_, images, _ = generated
    seen = session.ranks.gather([bool(row) for row in images or [None]])
    some, every = [any(rows) for rows in seen], [all(rows) for rows in seen]
    if not any(some) or all(every):
        return
    if any(is_sharded(p) for p in session.policy.base.parameters()):
        rank = every.index(False)
        raise ConfigError(
            f"Row {seen[rank].index(False)} of rank {rank} has no image, and others have: where a model is sharded, "
            "each row needs one, for the layers that see images are gathered by all ranks together. Put an image into "
            "each prompt of the dataset, which also rows have whose conversation broke off, or train with DDP."
        )
    if not all(some):
        trainer.log_multimodal = False


def skip_absent_images(model: Any) -> None:
    """Add a hook to a model that computes rows without images as text. TRL splits the images of a batch into
    micro-batches, and passes image tensors of length 0 to a micro-batch that has none, which vision towers reject."""

    def without(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        pixels = kwargs.get("pixel_values")
        if pixels is None or len(pixels) > 0:
            return None
        return args, kwargs | {"pixel_values": None, "image_grid_thw": None}

    getattr(model, "model", model).register_forward_pre_hook(without, with_kwargs=True)


def first_turns(trainer: StockTrainer, conversations: Sequence[Conversation]) -> Any:
    """Return the first turn of every conversation, in the form in which TRL's `_generate_single_turn` returns it: token
    ids, for GRPO with log-probs."""
    lengths = [c.turns[0].sampled for c in conversations]
    token_ids = [c.completion_ids[:n] for c, n in zip(conversations, lengths, strict=True)]
    if not _is_grpo(trainer):
        return token_ids
    return token_ids, [(c.logprobs or [])[:n] for c, n in zip(conversations, lengths, strict=True)]


def sampled_turns(token_ids: Sequence[list[int]], logprobs: Sequence[list[float]] | None) -> list[Completion]:
    """Return the first turns that a custom rollout sampled, as `Completion` objects.

    Args:
        token_ids: ids of each row's turn.
        logprobs: log-probs of each row's tokens, or None.
    """
    return [
        Completion(token_ids=list(ids), logprobs=[[value] for value in logprobs[i]] if logprobs is not None else None)
        for i, ids in enumerate(token_ids)
    ]


def loop_result(trainer: StockTrainer, conversations: Sequence[Conversation]) -> tuple[Any, ...]:
    """Return finished conversations as the tuple that TRL's `_tool_call_loop` returns: loss masks, messages and ids of
    the completions, for GRPO their log-probs, the numbers of tool calls and of failed ones, and the images."""
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


def _is_grpo(trainer: StockTrainer) -> bool:
    return bool(trainer._base_name == "GRPO")


def _tools_of(trainer: StockTrainer, index: int) -> Any:
    """Return the tools with which the prompt of a row of the batch was rendered."""
    if getattr(trainer, "environment_factories", None) is not None:
        return trainer._env_tools[trainer._batch_environments[index]]
    return trainer.tools


def parser(
    trainer: StockTrainer, parse_response: Callable[..., dict[str, Any]], tools: Any
) -> Callable[[list[int], list[int]], dict[str, Any]]:
    """Return a function of a turn's ids and the ids before it, which parses the turn into a message.

    Args:
        parse_response: TRL's function of that name.
        tools: the tools that the row's prompt was rendered with.
    """
    tokenizer = trainer._tokenizer
    if isinstance(tokenizer, ParsingTokenizer):  # the conversation counts what the parser raises
        tokenizer = tokenizer.tokenizer
    return lambda token_ids, prefix: parse_response(tokenizer, token_ids, prefix=prefix, tools=tools)


@contextmanager
def forgiving(trainer: StockTrainer, unparsed: UnparsedTurns, played: Callable[[], object]) -> Iterator[None]:
    """Return a context for a rollout in which a turn that TRL's parser cannot parse counts as plain text; in stock TRL
    the parser's error ends the run.

    Turns that cannot be parsed are counted in the metric UNPARSED. In conversations that the rollout component runs,
    the component counts them itself.

    Args:
        unparsed: the run's counter of such turns.
        played: returns the conversations that the rollout component has run; None where it has run none.

    Raises:
        ConfigError: the parser raised at every turn; raised once everything is sampled.
    """
    tokenizer = getattr(trainer, "_tokenizer", None)
    if trainer.session.selection.stock or tokenizer is None:
        yield
        return
    trainer._tokenizer = ParsingTokenizer(tokenizer)
    try:
        yield
        reasons = trainer._tokenizer.reasons
    finally:
        trainer._tokenizer = tokenizer
    if reasons and played() is None:
        trainer.session.metrics[UNPARSED] = float(unparsed.ended(reasons))


def _discarding(trainer: StockTrainer, index: int) -> Callable[[], None]:
    """Return a function that removes a row's environment from TRL's pool, because a call that never returned may still
    be using it.

    TRL makes another environment when a batch needs one. Making it here could fail, which would end all conversations.

    Args:
        index: the row in the batch.
    """

    def discard() -> None:
        if not getattr(trainer, "environments", None):
            return
        environment, name = trainer.environments[index], trainer._batch_environments[index]
        pool = trainer._environment_pool[name]
        pool[:] = [pooled for pooled in pool if pooled is not environment]

    return discard


def observer(trainer: StockTrainer) -> Callable[[Sequence[dict[str, Any]]], list[int]]:
    """Return a function that takes the tool messages after a model's turn and returns the ids that they add to the
    conversation.

    The function renders and encodes the beginning of the conversation once per tool name. It is valid for one batch,
    since the template and its arguments may change in the next, and several threads may call it at once. A message
    whose content is a list that the template does not show completely is turned into text first; all other messages get
    TRL's ids. If the trainer's class replaces TRL's method for these ids, that method is called directly.
    """
    method = getattr(type(trainer), "_get_tool_suffix_ids", None)
    if method is None or not method.__module__.startswith("trl."):
        return trainer._get_tool_suffix_ids
    reads = ("_is_vlm", "chat_template", "chat_template_kwargs", "_tokenizer")
    stand_in = SimpleNamespace(**{name: getattr(trainer, name) for name in reads})
    inner = own_tokenizer(trainer.processing_class)
    stand_in.processing_class = _Openings(inner)
    named = getattr(inner, "name_or_path", "") or type(inner).__name__
    answers = Answers(functools.partial(_rendered, stand_in, inner), named, sees_images=bool(stand_in._is_vlm))

    def observe(messages: Sequence[dict[str, Any]]) -> list[int]:
        ids: list[int]
        try:
            ids = method(stand_in, answers.shown(messages))
        except Exception:  # from the template or tokenizer, although a trial list passed
            if not any(isinstance(message["content"], list) for message in messages):
                raise
            ids = method(stand_in, answers.as_texts(messages))
        return ids

    return observe


def _rendered(trainer: SimpleNamespace, tokenizer: Any, messages: list[dict[str, Any]]) -> str:
    """Return the text of a short conversation that ends with these tool messages, rendered as TRL renders it to get
    their ids."""
    call = {"type": "function", "function": {"name": messages[0]["name"], "arguments": {}}}
    before: list[dict[str, Any]] = [
        {"role": "user", "content": "dummy"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    conversation = [*before, *messages]
    if trainer._is_vlm:
        texts = [isinstance(message["content"], str) for message in conversation]
        conversation = [
            {**message, "content": [{"type": "text", "text": message["content"]}]} if text else message
            for message, text in zip(conversation, texts, strict=True)
        ]
    text: str = tokenizer.apply_chat_template(
        conversation,
        chat_template=trainer.chat_template,
        add_generation_prompt=True,
        tokenize=False,
        **trainer.chat_template_kwargs,
    )
    return text


@dataclass(frozen=True, slots=True)
class _Opening:
    """The beginning of a conversation, up to and including the token that ends the turn which calls a tool: its text
    and its ids. The tool's answers are not part of it."""

    text: str
    ids: list[int]


class _Openings:
    """A wrapper of the tokenizer or processor that tokenizes the beginning of a conversation only once per tool name.

    That beginning, called the opening, is everything up to the end-of-turn token of the assistant's tool call. TRL
    renders a dummy conversation with and without the tool's answers, to get the ids that the answers add. The wrapper
    caches the ids of the conversation without answers. In a conversation with answers, it encodes only the text after
    the opening. That gives the same ids if the opening ends with a token at which the tokenizer splits texts before any
    other step, and which absorbs no spaces. The first answer is encoded both ways, to detect tokenizers that treat the
    beginning of a text differently.
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
        """Return the opening of a tool's conversations: their text and ids up to the end of the turn that calls the
        tool, which need not be encoded again. None if opening and separately encoded rest give other ids than `ids`.

        Args:
            name: name of the tool that the conversation calls.
            messages: the dummy conversation, with the tool's answers.
            ids: the ids of the whole conversation, as the tokenizer encodes it.
            given: the arguments of `apply_chat_template`.
        """
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
        """Encode text with the tokenizers library directly, past transformers' wrapper: no setting of an earlier call
        applies."""
        ids: list[int] = self._inner.backend_tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def _splits_at_its_end_of_turn(inner: Any) -> bool:
    """Return whether `inner` is a tokenizer of the `tokenizers` library that splits texts at its end-of-sequence
    token."""
    if not getattr(inner, "is_fast", False) or getattr(inner, "split_special_tokens", False):
        return False
    end = inner.added_tokens_decoder.get(inner.eos_token_id)
    return end is not None and not (end.normalized or end.single_word or end.lstrip or end.rstrip)
