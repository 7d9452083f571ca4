"""The encoding of observations, the messages that the model is shown between two of its turns, such as tool results.
The model's turns are not encoded again, so that the conversation keeps the token ids that were sampled.

The chat template renders a short dummy conversation with the observation and without it. The observation's tokens are
those that the first rendering has beyond the second. The second is cut where the model's turn ends, because templates
add a newline there that the model never samples.

Source: trl 1.16, `GRPOTrainer._get_tool_suffix_ids`, which computes the tokens of tool results in this way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from trlx_hybrid.contract.conversation import Message, images_of
from trlx_hybrid.episodes.tokenizer import common_prefix
from trlx_hybrid.errors import ConfigError

BEFORE: tuple[Message, ...] = ({"role": "user", "content": "dummy"}, {"role": "assistant", "content": "dummy"})
PROBES: tuple[Message, ...] = ({"role": "user", "content": "first"}, {"role": "user", "content": "2 and more"})


class TemplateTokens:
    """Encodes prompts, and observations (what the model is shown between its turns), to token ids by one chat template.

    Args:
        tokenizer: a transformers tokenizer, or a processor, whose tokenizer and template are used. Messages then have
            the form that processors take, a list of content blocks each. An image takes as many tokens as the processor
            makes of it.
        chat_template: the template, None for the tokenizer's own.
        options: further arguments of the template, TRL's `chat_template_kwargs`.
        end_ids: tokens that end a turn when the model samples them; the tokenizer's EOS is always one of them.

    Raises:
        ConfigError: the template renders earlier messages differently depending on what follows them, so that an
            observation cannot be encoded by itself.
    """

    def __init__(
        self,
        tokenizer: Any,
        chat_template: str | None = None,
        *,
        options: Mapping[str, object] | None = None,
        end_ids: Collection[int] = (),
    ) -> None:
        self._tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
        self._processor = tokenizer if self._tokenizer is not tokenizer else None
        self._template = chat_template or (tokenizer.chat_template if self._processor is not None else None)
        self._options = dict(options or {})
        self._end_ids = {*end_ids, self._tokenizer.eos_token_id}
        reason = self._refuses()
        if reason is not None:
            raise ConfigError(
                f"The chat template is not prefix-preserving: {reason} What was sampled could not be continued token "
                "for token. Set `processing_class.chat_template` to a template that renders a message the same "
                'whatever follows it; TRL lists its own under "Training templates".'
            )

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a prompt, ending with the tokens by which the template begins the model's turn.

        Args:
            messages: the prompt's chat messages.
        """
        return list(self._render(messages, speak=True))

    def observation(self, messages: Sequence[Message], after: int | None = None, *, cut: bool = False) -> list[int]:
        """Return the token ids that messages add between two turns of the model, from the end of the first turn to the
        tokens that begin the second.

        Args:
            messages: the messages that the model is shown.
            after: the last token that was sampled, or None. Some templates do not end a turn: the model stops at the
                token that opens the next message (GLM's `<|user|>`). The conversation then holds that token already, so
                it is not returned again.
            cut: whether the first turn was cut before the model ended it. The token that ends a turn then comes first,
                if the template has one.

        Raises:
            ConfigError: the template renders earlier messages differently when these messages follow.
        """
        full = self.prompt([*BEFORE, *messages])
        if full[: len(self._prefix)] != self._prefix:
            raise ConfigError("The chat template renders earlier messages differently when these follow them.")
        shown = full[len(self._prefix) :]
        if cut and after not in self._end_ids:
            return shown if self._endless else [self._prefix[-1], *shown]
        return shown[1:] if self._endless and after in self._end_ids and shown[:1] == [after] else shown

    def _refuses(self) -> str | None:
        """Check whether the chat template can be used. This also sets `_prefix`, the tokens of a dummy conversation,
        which `observation` cuts off, and `_endless`, whether the template puts no token at the end of a turn.

        Returns:
            Why the template cannot be used, as the end of a sentence; None if it can.
        """
        try:
            asked, prefix = self.prompt(BEFORE[:1]), list(self._render(BEFORE, speak=False))
            begun = common_prefix(asked, prefix)  # start of the model's message; ends before it belong to others
            ends = [place for place in range(begun, len(prefix)) if prefix[place] in self._end_ids]
            self._endless = not ends
            # Phi-3 adds a second end to the last message.
            shared = common_prefix(prefix, self.prompt([*BEFORE, PROBES[0]]))
            ends = [place for place in ends if place < shared] or ends
            self._prefix = prefix[: ends[-1] + 1] if ends else prefix
            for probe in PROBES:
                self.observation([probe])
                if probe["content"] not in self._render([*BEFORE, probe], speak=True, tokenize=False):
                    return f"a user's message {probe['content']!r} after the model's is not shown in full."
            spoken = self._tokenizer.encode(BEFORE[1]["content"], add_special_tokens=False)
            if self._tokenizer.decode(spoken).strip() not in self._tokenizer.decode(self._prefix[begun:]):
                return "where the model's message ends cannot be told from its tokens."
        except ConfigError:
            return "the model's message is rendered differently once a user's message follows it."
        except Exception as error:  # a template may raise anything, jinja's errors included
            return f"a user's message after the model's cannot be rendered ({type(error).__name__}: {error})."
        return None

    def _shaped(self, messages: Sequence[Message]) -> list[Message]:
        if self._processor is None:
            return list(messages)
        return [
            m if isinstance(m["content"], list) else {**m, "content": [{"type": "text", "text": m["content"]}]}
            for m in messages
        ]

    def _render(self, messages: Sequence[Message], *, speak: bool, tokenize: bool = True) -> Any:
        """Return messages rendered by the chat template, as token ids, or as text.

        Args:
            messages: the chat messages.
            speak: append the tokens that begin the model's turn.
            tokenize: return token ids; else text.
        """
        messages = self._shaped(messages)
        images = images_of(messages) if tokenize and self._processor is not None else []
        rendered = self._tokenizer.apply_chat_template(
            messages,
            chat_template=self._template,
            add_generation_prompt=speak,
            tokenize=tokenize and not images,
            return_dict=False,
            **self._options,
        )
        if not images:
            return rendered
        assert self._processor is not None
        return self._processor(text=[rendered], images=[images], add_special_tokens=False)["input_ids"][0]


def preserving_tokens(
    tokenizer: Any,
    chat_template: str | None,
    training_template: Callable[[], str | None],
    *,
    options: Mapping[str, object] | None = None,
    end_ids: Collection[int] = (),
) -> TemplateTokens:
    """Return an encoder of prompts and observations that uses the given chat template if this preserves prefixes, else
    TRL's training template.

    A template preserves prefixes if it renders messages the same whatever follows them.

    Args:
        tokenizer: a transformers tokenizer, or a processor.
        chat_template: the template to prefer; None for the tokenizer's own.
        training_template: returns TRL's training template. It returns None if TRL takes the tokenizer's own template
            for prefix-preserving, and raises ValueError if TRL has no training template for this tokenizer.
        options: further arguments of the template, TRL's `chat_template_kwargs`.
        end_ids: tokens that end a turn when the model samples them, besides the tokenizer's EOS.

    Raises:
        ConfigError: neither template preserves prefixes.
    """
    try:
        return TemplateTokens(tokenizer, chat_template, options=options, end_ids=end_ids)
    except ConfigError as refused:
        try:
            training = training_template()
        except ValueError:  # TRL has no training template for this tokenizer
            training = None
        if training is None:
            raise
        try:
            return TemplateTokens(tokenizer, training, options=options, end_ids=end_ids)
        except ConfigError as too:
            raise ConfigError(f"{refused} TRL's training template for this tokenizer does not serve either.") from too
