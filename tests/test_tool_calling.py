"""Tools' answers as token ids: TRL's method with less work gives TRL's ids, whatever the answer says."""

import random
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import GRPOTrainer
from trl.chat_template_utils import get_training_chat_template, is_chat_template_prefix_preserving
from trlx_hybrid.testing.chat import CHAT_TEMPLATES, chat_tokenizer
from trlx_hybrid.trl.generation.tool_calling import observer

ANSWERS = [
    "",
    " ",
    "\n",
    "42",
    " two words ",
    "\n\n# Title\n",
    "<eos>",
    "a <eos> b",
    "ünï çødé 🙂",
    "  \t<eos>\n",
    "x" * 300,
]
PLAIN = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %} {{ c.function.name }}{% endfor %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def bytes_tokenizer(template=PLAIN, prefix_space=False, normalizer=None, scheme=None, **end):
    """Every byte is a token, or every character where a Metaspace is asked for."""
    if scheme is None:
        letters = pre_tokenizers.ByteLevel.alphabet()
        tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(sorted(letters))}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    else:
        pieces = [
            ("<unk>", 0.0),
            *((chr(c), -2.0) for c in range(32, 127)),
            ("▁", -2.0),
            ("▁tool", -1.0),
            ("tool", -1.5),
        ]
        tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.normalizer = normalizer
    eos = AddedToken("<eos>", special=True, **{"normalized": False} | end)
    tokenizer.add_special_tokens([eos])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, pad_token=eos, chat_template=template)


TOKENIZERS = {
    **{name: lambda name=name: chat_tokenizer(["plain answer"], name) for name in CHAT_TEMPLATES},
    "bytes": bytes_tokenizer,
    "a space before each piece": lambda: bytes_tokenizer(prefix_space=True),
    "normalised": lambda: bytes_tokenizer(normalizer=normalizers.NFKC()),
    "a space at the beginning": lambda: bytes_tokenizer(scheme="first"),
    "spaces everywhere": lambda: bytes_tokenizer(scheme="always"),
    "an end that takes spaces": lambda: bytes_tokenizer(rstrip=True),
    "an end that is text": lambda: bytes_tokenizer(normalized=True),
    "an end that is its own word": lambda: bytes_tokenizer(single_word=True),
    "no end of turn": lambda: bytes_tokenizer(PLAIN.replace("<eos>", "\n")),
}


def trainer_of(tokenizer):
    trainer = object.__new__(GRPOTrainer)
    template = None if is_chat_template_prefix_preserving(tokenizer) else get_training_chat_template(tokenizer)
    vars(trainer).update(_is_vlm=False, chat_template=template, chat_template_kwargs={}, _tokenizer=tokenizer)
    trainer.processing_class = tokenizer
    return trainer


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_ids_are_trls(kind):
    trainer, draw = trainer_of(TOKENIZERS[kind]()), random.Random(0)
    observe = observer(trainer)
    for _ in range(60):
        messages = [
            {"role": "tool", "name": draw.choice(["add", "look_up"]), "content": draw.choice(ANSWERS)}
            for _ in range(draw.randint(1, 3))
        ]
        assert observe(messages) == trainer._get_tool_suffix_ids(messages)


def test_openings_are_encoded_once_where_that_is_sound():
    def long_calls(kind):
        tokenizer = TOKENIZERS[kind]()
        observe = observer(trainer_of(tokenizer))
        with patch.object(type(tokenizer), "__call__", autospec=True, side_effect=type(tokenizer).__call__) as calls:
            for answer in ANSWERS:
                observe([{"role": "tool", "name": "add", "content": answer}])
        return calls.call_count

    assert {kind: long_calls(kind) for kind in ("qwen3", "llama3_1", "bytes")} == dict.fromkeys(
        ("qwen3", "llama3_1", "bytes"), 2
    )
    assert long_calls("a space at the beginning") > len(ANSWERS)
    assert long_calls("an end that takes spaces") > len(ANSWERS)


def test_what_tools_set_on_the_tokenizer_cuts_nothing_and_stays_as_they_set_it():
    """Truncation and padding are state of the backend, and tools use the same tokenizer at the same time."""
    tokenizer = bytes_tokenizer()
    trainer = trainer_of(tokenizer)
    messages = [{"role": "tool", "name": "add", "content": "a long answer"}]
    wanted, observe = observer(trainer)(messages), observer(trainer)
    backend = tokenizer.backend_tokenizer
    backend.enable_truncation(max_length=3)
    backend.enable_padding(length=64)
    assert observe(messages) == observe(messages) == observer(trainer)(messages) == wanted
    assert (backend.truncation["max_length"], backend.padding["length"]) == (3, 64)
    assert trainer._get_tool_suffix_ids(messages) == wanted
    tokenizer.add_tokens(["long"])
    assert observer(trainer)(messages) == trainer._get_tool_suffix_ids(messages) != wanted


def test_a_trainers_own_method_is_asked():
    class Own:
        def _get_tool_suffix_ids(self, messages):
            return [len(messages)]

    assert observer(Own())([1, 2]) == [2]
    assert observer(SimpleNamespace(_get_tool_suffix_ids=lambda messages: [7]))([]) == [7]
