"""A tiny chat model that calls tools without any training: each token that it samples stands for a whole turn's
text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from .models import CHARACTERS, tiny_model

QWENS = "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATES = {"qwen3": QWENS, "qwen3_vl": QWENS, "llama3_1": ("<|begin_of_text|>", "<|eot_id|>")}
"""TRL's chat templates by name, each with the token that begins a text and the token that ends a turn."""

SCHEMA = "type function parameters properties description integer string object required array items return"
SPOKEN = 30.0  # strength of the direction that makes a turn end


def chat_tokenizer(turns: Sequence[str], template: str = "qwen3") -> Any:
    """Return a tokenizer with a chat template of TRL. Its tokens are characters, words of the template, and one token
    for each of `turns`.

    Only sampling produces the tokens of `turns`; encoding the same text gives other tokens. So tests notice if sampled
    text is encoded again.

    Args:
        turns: texts of whole turns, each of which becomes one token.
        template: name of the chat template, a key of `CHAT_TEMPLATES`.
    """
    from importlib.resources import files

    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    begin, end = CHAT_TEMPLATES[template]
    source = files("trl").joinpath("chat_templates", f"{template}.jinja").read_text(encoding="utf-8")
    words = sorted(set(re.findall(r"[A-Za-z]{3,}", source + SCHEMA)))
    pieces = [("<pad>", 0.0), (begin, 0.0), (end, 0.0)]
    pieces += [(text, -10.0) for text in [*CHARACTERS, "\n", "\t"]]
    pieces += [(text, -1.0) for text in words]
    pieces += [(text, -1e6) for text in turns]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token=begin,
        eos_token=end,
        chat_template=source,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def text_processor(tokenizer: Any, chat_template: str) -> Any:
    """Return a processor that takes text only, like the one that TRL loads for a multimodal checkpoint.

    Args:
        tokenizer: the tokenizer that the processor wraps.
        chat_template: the processor's chat template, which takes messages whose content is a list of blocks.
    """
    from transformers import ProcessorMixin

    class TextProcessor(ProcessorMixin):  # type: ignore[misc]
        attributes = ["tokenizer"]  # noqa: RUF012 - transformers' own
        tokenizer_class = "PreTrainedTokenizerFast"

        def __init__(self, tokenizer: Any, chat_template: str) -> None:
            super().__init__(tokenizer, chat_template=chat_template)

    return TextProcessor(tokenizer, chat_template)


def chatty_model(tokenizer: Any, turns: Sequence[str], architecture: str = "qwen3", **config: Any) -> Any:
    """Return a tiny model that mostly answers with one of `turns`, which is a single token of the tokenizer, and then
    ends the turn; which one depends on the prompt.

    Args:
        tokenizer: what `chat_tokenizer` returned.
        turns: the texts that `chat_tokenizer` was called with.
        architecture: transformers' model type, such as "qwen3".
        config: further fields of the model's config.
    """
    model = tiny_model(
        architecture,
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
        **{"max_position_embeddings": 4096} | config,
    )
    return made_chatty(model, tokenizer, turns)


def made_chatty(model: Any, tokenizer: Any, turns: Sequence[str]) -> Any:
    """Change a model's weights in place so that it mostly samples one of `turns`, which is a single token of the
    tokenizer, and then the end of the turn. Returns the model.

    Args:
        model: a causal language model whose vocabulary is that of `tokenizer`.
        tokenizer: what `chat_tokenizer` returned.
        turns: the texts that `chat_tokenizer` was called with.
    """
    import torch

    spoken = torch.tensor(tokenizer.convert_tokens_to_ids(list(turns)))
    with torch.no_grad():
        words, logits = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        over = torch.nn.functional.normalize(
            torch.randn(words.shape[1], generator=torch.Generator().manual_seed(1)), dim=0
        )
        words[spoken] += SPOKEN * over  # after a turn's token, mostly sample the end
        logits *= 0.1
        logits[spoken] *= 16.0
        for name, parameter in model.named_parameters():
            if "q_proj.weight" in name or "q_norm.weight" in name:
                parameter *= 2.0  # attend to few tokens, so that the question matters
        logits[tokenizer.eos_token_id] = 0.6 * over
    return model
