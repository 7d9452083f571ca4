"""Observations as the template's difference, and templates that allow none."""

from importlib.resources import files

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from trl.chat_template_utils import get_training_chat_template
from trlx_hybrid.episodes.tokenizer import own_tokenizer
from trlx_hybrid.errors import ConfigError
from trlx_hybrid.testing.chat import chat_tokenizer, text_processor
from trlx_hybrid_multiturn.tokens import TemplateTokens, preserving_tokens

CHAT_TEMPLATES = ("qwen3", "llama3_1")
TEXT = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=12)
TOKENIZERS = {name: chat_tokenizer([], name) for name in CHAT_TEMPLATES}


def tokens_of(name: str, **options: object) -> TemplateTokens:
    tokenizer = TOKENIZERS[name]
    return preserving_tokens(tokenizer, None, lambda: get_training_chat_template(tokenizer), options=options)


def rendered(tokenizer: PreTrainedTokenizerFast, name: str, messages: list) -> str:
    training = get_training_chat_template(tokenizer) if name == "qwen3" else None
    options = {"enable_thinking": False} if name == "qwen3" else {}
    return tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, chat_template=training, **options
    )


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
@settings(max_examples=60, deadline=None)
@given(question=TEXT, answers=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4))
def test_turns_and_observations_spell_the_whole_conversation(name: str, question: str, answers: list) -> None:
    """Prompt, what was said, what was shown: together the text that the template makes of all messages."""
    tokenizer = TOKENIZERS[name]
    tokens = tokens_of(name, **({"enable_thinking": False} if name == "qwen3" else {}))
    messages = [{"role": "user", "content": question}]
    ids = tokens.prompt(messages)
    for said, shown in answers:
        ids += [*tokenizer(said, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        ids += tokens.observation([{"role": "user", "content": shown}])
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": shown}]
    assert tokenizer.decode(ids) == rendered(tokenizer, name, messages)


def test_qwen3_takes_trls_training_template() -> None:
    tokenizer = TOKENIZERS["qwen3"]
    with pytest.raises(ConfigError, match=r"not prefix-preserving.*rendered differently once a user's message follows"):
        TemplateTokens(tokenizer)
    shown = tokens_of("qwen3").observation([{"role": "user", "content": "higher"}])
    assert tokenizer.decode(shown) == "\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_observations_begin_after_the_end_of_a_turn(name: str) -> None:
    """The model samples the end of its turn itself: it is not inserted a second time."""
    tokenizer = TOKENIZERS[name]
    shown = tokens_of(name).observation([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    assert tokenizer.decode(shown).count(tokenizer.eos_token) == 2  # those of the two messages


@pytest.fixture(scope="module")
def glm() -> PreTrainedTokenizerFast:
    """Characters, and the special tokens of GLM-4.x: the models stop at `<|user|>`, which opens a user's message."""
    specials = ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"]
    pieces = [("<unk>", 0.0), ("\n", -5.0), *((chr(c), -5.0) for c in range(32, 127))]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(specials)
    template = files("trl").joinpath("chat_templates", "glm4moe.jinja").read_text(encoding="utf-8")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", chat_template=template)


def test_a_token_that_ends_a_turn_and_opens_the_next_message_stands_there_once(glm: PreTrainedTokenizerFast) -> None:
    user, observation = glm.convert_tokens_to_ids(["<|user|>", "<|observation|>"])
    tokens = TemplateTokens(glm, end_ids=[glm.eos_token_id, user, observation])
    messages = [{"role": "user", "content": "guess"}]
    ids = tokens.prompt(messages)
    for said, shown in (("4", "higher"), ("6", "lower")):
        ids += [*glm(f"\n<think></think>\n{said}", add_special_tokens=False)["input_ids"], user]
        ids += tokens.observation([{"role": "user", "content": shown}], ids[-1])
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": shown}]
    assert glm.decode(ids) == glm.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert glm.decode(tokens.observation(messages[-1:], observation)) == "<|user|>\nlower<|assistant|>"


BLOCKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}{{ part.text }}{% endfor %}<|im_end|>"
    "\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_processors_template_and_tokenizer_serve() -> None:
    """Its template may want lists of content blocks, and is not the tokenizer's."""
    tokenizer = TOKENIZERS["qwen3"]
    tokens = TemplateTokens(own_tokenizer(text_processor(tokenizer, BLOCKS)))
    prompt = tokens.prompt([{"role": "user", "content": [{"type": "text", "text": "guess"}]}])
    assert tokenizer.decode(prompt) == "<|im_start|>user\nguess<|im_end|>\n<|im_start|>assistant\n"
    shown = tokens.observation([{"role": "user", "content": "higher"}])
    assert tokenizer.decode(shown) == "\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n"


LAST_ONLY = "{% for m in messages %}{% if loop.last %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
STRICT = "{% for m in messages %}{% if loop.index > 2 %}{{ raise_exception('too long') }}{% endif %}x{% endfor %}"
SILENT = "{% for m in messages %}{% if loop.index < 3 %}{{ m.role }}<|im_end|>{% endif %}{% endfor %}"

MUTE = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (LAST_ONLY, "rendered differently once a user's message follows"),
        (STRICT, "cannot be rendered .*too long"),
        (SILENT, "'first' after the model's is not shown in full"),
        (MUTE, "where the model's message ends cannot be told"),
    ],
)
def test_a_template_that_cannot_serve_is_refused_with_the_reason(template: str, reason: str) -> None:
    def none() -> str:
        raise ValueError("TRL has no such template")

    with pytest.raises(ConfigError, match=reason) as caught:
        preserving_tokens(TOKENIZERS["qwen3"], template, none)
    assert "processing_class.chat_template" in str(caught.value)
