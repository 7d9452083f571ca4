"""TRL's copies of chat templates, and whether conversations can be continued token for token with them.

What a model said is what the template renders between the prompt and the end of its message. Prompt, turns and
observations of three exchanges, as token ids, must spell what the template makes of all the messages at once.
"""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from trl.chat_template_utils import get_training_chat_template
from trlx_hybrid.errors import ConfigError
from trlx_hybrid.testing.chat import text_processor
from trlx_hybrid_multiturn.tokens import TemplateTokens, preserving_tokens

FOLDER = files("trl").joinpath("chat_templates")
SOURCES = {
    entry.name.removesuffix(".jinja"): entry.read_text(encoding="utf-8")
    for entry in FOLDER.iterdir()
    if entry.name.endswith(".jinja")
}
PUBLISHED = sorted(name for name in SOURCES if not name.endswith("_training"))
SPECIAL = re.compile(
    r"<[|｜][^<>\s'\"{}]{1,40}[|｜]>|</?s>|<(?:start_of_turn|end_of_turn|end_of_utterance|turn\||\|turn)>|\[gMASK\]|<sop>|<EOS>"
)
EXCHANGES = (("first answer", "higher"), ("second", "lower still"), ("third", "there"))
OWN, TRAINING = "unchanged", "replaced by TRL's training template"
KEPT = "unchanged; what they leave out of earlier turns, the thinking, stays as it was sampled"


def measure(name: str) -> dict[str, str]:
    """A row of the page: the template, and how it is served or why not."""
    source = SOURCES[name]
    given, ends = processing_class(source)
    try:
        tokens = preserving_tokens(given, None, lambda: get_training_chat_template(given), end_ids=ends)
    except ConfigError as error:
        return {"template": name, "how": "refused", "reason": str(error).partition(" What was sampled")[0]}
    how = OWN if tokens._template in (None, source) else TRAINING
    return {"template": name, "how": how if spells_everything(tokens, ends) else KEPT}


def processing_class(source: str) -> tuple[Any, list[int]]:
    """A tokenizer with a template, or a processor where the template takes content blocks; and the tokens that end a
    turn."""
    tokenizer = characters(source)
    blocks = takes_blocks(tokenizer)
    end = SPECIAL.match(rendered(tokenizer, blocks).partition("an answer")[2].lstrip())
    ends = [] if end is None else [tokenizer.convert_tokens_to_ids(end.group())]  # else the next message ends it
    return text_processor(tokenizer, source) if blocks else tokenizer, ends


def characters(source: str) -> PreTrainedTokenizerFast:
    """A token for each character, and for each special token that a template names."""
    letters = sorted({*map(chr, range(32, 127)), "\n", "\t", *source})
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), *((letter, -5.0) for letter in letters)], unk_id=0))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([*sorted(set(SPECIAL.findall(source))), "<EOS>", "<BOS>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<EOS>",
        bos_token="<BOS>",
        unk_token="<unk>",
        chat_template=source,
        clean_up_tokenization_spaces=False,
    )


def rendered(tokenizer: Any, blocks: bool) -> str:
    """A question and its answer."""
    texts = {"user": "a question", "assistant": "an answer"}
    contents = {role: [{"type": "text", "text": text}] if blocks else text for role, text in texts.items()}
    messages = [{"role": role, "content": content} for role, content in contents.items()]
    return str(tokenizer.apply_chat_template(messages, tokenize=False))


def takes_blocks(tokenizer: Any) -> bool:
    """Whether the template wants lists of content blocks, as those of processors do."""
    try:
        return "a question" not in rendered(tokenizer, blocks=False)
    except TemplateError:
        return True


def spells_everything(tokens: TemplateTokens, ends: list[int]) -> bool:
    """Whether the ids of a conversation are the template's text of it; False where its prompt opens what the same
    template leaves out of the message afterwards.

    Raises:
        AssertionError: they are neither.
    """
    tokenizer = tokens._tokenizer
    messages = [{"role": "user", "content": "a question"}]
    ids = tokens.prompt(messages)
    whole = True
    for said, shown in EXCHANGES:
        prompt = tokens._render(messages, speak=True, tokenize=False)
        messages.append({"role": "assistant", "content": said})
        answered = tokens._render(messages, speak=False, tokenize=False)
        whole &= answered.startswith(prompt)
        turn = answered[len(prompt) :] if whole else said
        ids += [*tokenizer(turn[: turn.index(said)] + said, add_special_tokens=False)["input_ids"], *ends]
        messages.append({"role": "user", "content": shown})
        observation = tokens.observation(messages[-1:], ids[-1])
        ids += observation
        rendered = tokens._render(messages, speak=True, tokenize=False)
        assert rendered.endswith(tokenizer.decode(observation)), (rendered, tokenizer.decode(observation))
        assert not whole or tokenizer.decode(ids) == rendered, (rendered, tokenizer.decode(ids))
    return whole
