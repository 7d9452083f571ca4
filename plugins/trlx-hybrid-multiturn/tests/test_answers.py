"""Lists that tools return, in every chat template of TRL that calls tools: the model sees all that they say."""

import re
from importlib.resources import files
from types import SimpleNamespace

import pytest
from mcp.types import EmbeddedResource, ImageContent, TextContent, TextResourceContents
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import GRPOTrainer
from trl.chat_template_utils import (
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    supports_tool_calling,
)
from trlx_hybrid.contract.conversation import Conversation, Dialogue
from trlx_hybrid.trl.generation.tool_calling import observer
from trlx_hybrid_multiturn.loop import Loop
from trlx_hybrid_multiturn.options import MultiTurnOptions
from trlx_hybrid_multiturn.tool_calls import run_calls
from trlx_hybrid_multiturn.tools.runner import ToolRunner

FOLDER = files("trl").joinpath("chat_templates")
SOURCES = {
    entry.name.removesuffix(".jinja"): entry.read_text(encoding="utf-8")
    for entry in sorted(FOLDER.iterdir(), key=lambda entry: entry.name)
    if entry.name.endswith(".jinja") and "training" not in entry.name
}
ENDS = {
    "deepseek_r1_distill": "<｜end▁of▁sentence｜>",
    "deepseekv3": "<｜end▁of▁sentence｜>",
    "glm4moe": "<|endoftext|>",
    "gptoss": "<|return|>",
    "llama3_1": "<|eot_id|>",
    "llama3_2": "<|eot_id|>",
}
RESOURCE = {"type": "resource", "resource": {"uri": "file://a", "text": "alpha", "mimeType": "text/plain"}}
# What a tool returns, and what the model must be able to read of it.
RESULTS = {
    "texts": (["alpha", "beta"], ["alpha", "beta"]),
    "dicts": ([{"title": "alpha", "url": "beta"}], ["alpha", "beta"]),
    "numbers": ([12345, 2.5], ["12345", "2.5"]),
    "booleans": ([True, False], ["true", "false"]),
    "nothing": ([], ["[]"]),
    "a list in a list": ([["alpha", 12345]], ["alpha", "12345"]),
    "blocks": ([{"type": "text", "text": "alpha"}, {"type": "text", "text": "beta"}], ["alpha", "beta"]),
    "a block and a text": ([{"type": "text", "text": "alpha"}, "beta"], ["alpha", "beta"]),
    "a block and a dict": ([{"type": "text", "text": "alpha"}, {"type": "json", "value": "beta"}], ["alpha", "beta"]),
    "a resource": ([RESOURCE], ["alpha"]),
    "quotes and lines": ([{"type": "text", "text": "al'pha\nbeta"}], ["pha", "beta"]),
    "half a surrogate": (["alpha \ud83d", "beta"], ["alpha", "beta"]),
    "content of MCP": (
        [
            TextContent(type="text", text="alpha"),
            EmbeddedResource(type="resource", resource=TextResourceContents(uri="file://a", text="beta")),
            ImageContent(type="image", data="AAAA", mimeType="image/png"),
        ],
        ["alpha", "beta", "image/png"],
    ),
    "content of MCP as JSON": (
        [TextContent(type="text", text="alpha").model_dump(), {"type": "image", "data": "AA", "mimeType": "image/png"}],
        ["alpha", "image/png"],
    ),
}


def bytes_tokenizer(template, end):
    """A token for each byte, and for each special token of a template."""
    named = re.findall(r"<[|｜]?[A-Za-z_▁|｜/]+[|｜]?>|\[[A-Z_/a-z]+\]", template)
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(letters, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token=end,
        pad_token="<pad>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": sorted({*named, end, "<pad>"}, key=len, reverse=True)})
    return tokenizer


def tokenizer_of(name):
    """One with this template, or None where TRL calls no tools with it."""
    source = SOURCES[name]
    usual = next((end for end in ("<|im_end|>", "<turn|>", "</s>") if end in source), "</s>")
    tokenizer = bytes_tokenizer(source, ENDS.get(name, usual))
    try:
        return tokenizer if supports_tool_calling(tokenizer) else None
    except Exception:
        return None


def trainer_of(tokenizer):
    trainer = object.__new__(GRPOTrainer)
    template = None if is_chat_template_prefix_preserving(tokenizer) else get_training_chat_template(tokenizer)
    vars(trainer).update(_is_vlm=False, chat_template=template, chat_template_kwargs={}, _tokenizer=tokenizer)
    trainer.processing_class = tokenizer
    return trainer


def answered(runner, value):
    """The messages of a tool that returns this."""
    conversation, found = Conversation(), []

    async def one():
        call = {"type": "function", "function": {"name": "search", "arguments": {}}}
        dialogue = Dialogue(
            prompt_ids=[1], parse=None, observe=None, sync_tools={"search": lambda: value}, async_tools={}
        )
        found.extend(await run_calls([call], dialogue, conversation, runner))

    idle = SimpleNamespace(shared=False, busy=False, step=lambda more: ([], more), moved=lambda *numbers: None)
    Loop(idle, idle, width=1).run([one()])
    assert conversation.failed_calls == 0
    return found


def seen(observe, tokenizer, messages):
    """The observation as text; what the template raised where it raised."""
    try:
        return tokenizer.decode(observe(messages))
    except Exception as error:
        return f"(raised {type(error).__name__})"


@pytest.fixture(scope="module")
def here():
    return ToolRunner(MultiTurnOptions(tools="main"))


@pytest.fixture(scope="module")
def tokenizers():
    """By template, where TRL renders a plain text."""
    found = {name: tokenizer_of(name) for name, source in SOURCES.items() if "tool" in source}
    found = {name: tokenizer for name, tokenizer in found.items() if tokenizer is not None}
    plain = [{"role": "tool", "name": "search", "content": "alpha"}]
    return {name: t for name, t in found.items() if "alpha" in seen(observer(trainer_of(t)), t, plain)}


def test_the_model_sees_every_list_that_a_tool_returns(here, tokenizers):
    assert len(tokenizers) > 20
    missing = {}
    messages = {kind: answered(here, value) for kind, (value, _) in RESULTS.items()}
    for name, tokenizer in tokenizers.items():
        observe = observer(trainer_of(tokenizer))
        for kind, (_, words) in RESULTS.items():
            text = seen(observe, tokenizer, messages[kind])
            if not all(word.lower() in text.lower() for word in words):  # JSON writes true
                missing[name, kind] = text
    assert missing == {}


def test_a_template_that_shows_a_list_keeps_trls_ids(here, tokenizers):
    """Of the templates that show blocks, and of those that show any list."""
    kept = 0
    for tokenizer in tokenizers.values():
        trainer = trainer_of(tokenizer)
        observe = observer(trainer)
        for kind in ("texts", "dicts", "blocks"):
            value, words = RESULTS[kind]
            messages = answered(here, value)
            stock = seen(trainer._get_tool_suffix_ids, tokenizer, messages)
            if all(word in stock for word in words):
                kept += 1
                assert observe(messages) == trainer._get_tool_suffix_ids(messages)
    assert kept > 20


def test_a_process_sends_the_same_answers(here):
    runner = ToolRunner(MultiTurnOptions(tools="process", max_processes=1))
    try:
        for value, _ in RESULTS.values():
            assert answered(runner, value) == answered(here, value)
    finally:
        runner.close()


def test_an_image_that_no_template_shows_is_named_once(here, caplog):
    """Qwen3's takes texts alone: the model reads that there was an image, and the log names the tool and the model."""
    tokenizer = tokenizer_of("qwen3")
    tokenizer.name_or_path = "a model without eyes"
    messages = answered(here, [{"type": "image", "image": Image.new("RGB", (2, 2))}, {"type": "text", "text": "alpha"}])
    for _ in range(2):
        assert "[image]\nalpha" in seen(observer(trainer_of(tokenizer)), tokenizer, messages)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "'search' returned an image" in warning
    assert "a model without eyes" in warning
