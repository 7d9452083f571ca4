"""Further tiny vision-language models with random weights, and pictures for them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from trlx_hybrid.testing.chat import chat_tokenizer, made_chatty
from trlx_hybrid.testing.models import MARKS, PATCHES, SLIDING, TINY, character_tokenizer, tiny_vision_model


def other_vision_model(architecture: str, seed: int = 0, **fields: Any) -> tuple[Any, Any]:
    """Return a model like `tiny_vision_model` and its processor, of Gemma 3 or 4 or Mistral 3, without a chat template.

    Args:
        architecture: `gemma3`, `gemma4` or `mistral3`.
        fields: fields of the text model's config to change.
    """
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    tower: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    tower |= {"num_attention_heads": 2, "initializer_range": 0.1, "image_size": 56, "patch_size": 14}
    parts = {"gemma3": _gemma3, "gemma4": _gemma4, "mistral3": _mistral3}[architecture]
    processor, config = parts(TINY | fields, tower)
    config = AutoConfig.for_model(architecture, **config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config)
        for name, p in model.named_parameters():
            if name.endswith("mm_input_projection_weight"):  # zeros until a checkpoint fills it: no picture would count
                torch.nn.init.normal_(p.data, std=0.1)
    if architecture == "gemma3":  # published names, which vLLM reads, have one more part
        old, new = "vision_tower.", "vision_tower.vision_model."
        state = {name.replace(old, new): p for name, p in model.state_dict().items() if name != "lm_head.weight"}
        model = type(model).from_pretrained(None, config=config, state_dict=state)
    embeddings, head = (of().weight.data for of in (model.get_input_embeddings, model.get_output_embeddings))
    for layer in model.model.language_model.layers:
        layer.self_attn.o_proj.weight.data[0] = layer.mlp.down_proj.weight.data[0] = 0
    embeddings[:, 0] = head[:, 0] = 1
    placeholders = (getattr(config, f"{kind}_token_id", None) for kind in ("image", "video"))
    head[[token for token in placeholders if token is not None], 0] = -30  # hardly ever sampled, as after pretraining
    return model.eval(), processor


def _gemma3(text: dict[str, Any], tower: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    from transformers import Gemma3ImageProcessor, Gemma3Processor

    special = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = character_tokenizer(**special)
    tokenizer.add_tokens(["\n" * lines for lines in range(1, 5)])  # vLLM puts these around an image
    images = Gemma3ImageProcessor(size={"height": 56, "width": 56})
    return Gemma3Processor(images, tokenizer, image_seq_length=4), {
        "text_config": text | SLIDING | {"vocab_size": len(tokenizer)},
        "vision_config": tower,
        "mm_tokens_per_image": 4,
        "boi_token_index": tokenizer.boi_token_id,
        "eoi_token_index": tokenizer.eoi_token_id,
        "image_token_index": tokenizer.image_token_id,
    }


def _gemma4(text: dict[str, Any], tower: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    from transformers import Gemma4ImageProcessor, Gemma4Processor
    from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
    from transformers.models.gemma4.video_processing_gemma4 import Gemma4VideoProcessor

    special = {"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>"}
    special |= {"boa_token": "<|audio>", "eoa_token": "<audio|>", "audio_token": "<|audio|>"}
    tokenizer = character_tokenizer(**special)
    images = Gemma4ImageProcessor(max_soft_tokens=70)  # the fewest that it makes
    processor = Gemma4Processor(Gemma4AudioFeatureExtractor(), images, tokenizer, Gemma4VideoProcessor(), None, 70)
    sizes = {"vocab_size": len(tokenizer), "vocab_size_per_layer_input": len(tokenizer)}
    sizes |= {"global_head_dim": 32, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
    parts = "boi", "eoi", "boa", "image", "audio"
    tower = tower | {"num_key_value_heads": 2, "head_dim": 32, "patch_size": 16}
    return processor, {
        "text_config": text | SLIDING | sizes,
        "vision_config": tower | {"position_embedding_size": 1024, "default_output_length": 70},
        **{f"{part}_token_id": tokenizer.convert_tokens_to_ids(special[f"{part}_token"]) for part in parts},
        "eoa_token_index": tokenizer.eoa_token_id,
        "video_token_id": processor.video_token_id,
    }


def _mistral3(text: dict[str, Any], tower: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    from transformers import PixtralImageProcessor, PixtralProcessor

    tokenizer = character_tokenizer(image="[IMG]", image_break="[IMG_BREAK]", image_end="[IMG_END]")
    images = PixtralImageProcessor(size={"longest_edge": 56}, patch_size=14)
    processor = PixtralProcessor(images, tokenizer, patch_size=14, spatial_merge_size=2)
    text = text | {"model_type": "mistral", "vocab_size": len(tokenizer), "tie_word_embeddings": False}
    return processor, {
        "text_config": text,
        "vision_config": tower | {"model_type": "pixtral", "head_dim": 32},
        "image_token_index": processor.image_token_id,
        "tie_word_embeddings": False,
    }


def chatty_vision_model(turns: Sequence[str]) -> tuple[Any, Any]:
    """Return a Qwen3-VL that samples whole turns, the last one with the highest probability, and its processor with
    TRL's copy of the template. See `trlx_hybrid.testing.chat`."""
    tokenizer = chat_tokenizer(turns, "qwen3_vl")
    model, processor = tiny_vision_model("qwen3_vl", tokenizer=tokenizer)
    made_chatty(model, processor.tokenizer, turns)
    spoken, marks = (tokenizer.convert_tokens_to_ids(list(words)) for words in (turns, MARKS.values()))
    head = model.get_output_embeddings().weight.data
    head[spoken] *= 3
    model.get_input_embeddings().weight.data[:, 0] = 1
    head[:, 0] = 0
    head[spoken[:-1], 0], head[marks, 0] = 20, -30
    return model, processor


def picture(architecture: str, squares: int, seed: int = 0) -> Any:
    """Return a white PIL image of four by four patches with `squares` dark squares, at most 16, each in its own
    patch."""
    from PIL import Image

    patch = PATCHES[architecture]
    image = Image.new("RGB", (4 * patch, 4 * patch), "white")
    for place in random.Random(seed).sample(range(16), squares):
        left, top = place % 4 * patch + 2, place // 4 * patch + 2
        image.paste((0, 0, 0), (left, top, left + patch - 4, top + patch - 4))
    return image


def counted_squares(architecture: str, rows: int = 16) -> Any:
    """Return a TRL dataset for such a model: pictures with up to three squares, and the number of squares in each."""
    from datasets import Dataset

    prompt = [{"role": "user", "content": "how many? "}]
    numbers = [row % 4 for row in range(rows)]
    return Dataset.from_list(
        [{"prompt": prompt, "image": picture(architecture, n, seed), "squares": n} for seed, n in enumerate(numbers)]
    )
