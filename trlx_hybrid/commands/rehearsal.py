"""The rehearsal of `trlx-hybrid train RECIPE --rehearse`: a few steps of the whole run on a CPU, with a small model of
the recipe's architecture whose weights are random."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from .recipe import RecipeSettings

STEPS = 2
FLAGS = (
    f"--use_cpu True --bf16 False --fp16 False --dtype float32 --max_steps {STEPS} --logging_steps 1 "
    "--save_strategy no --report_to none --per_device_train_batch_size 4 --gradient_accumulation_steps 1 "
    "--num_generations 2 --max_completion_length 32 --load_in_4bit False --load_in_8bit False --fsdp="
).split()
"""Flags that stand in the place of a recipe's settings in a rehearsal. The user's flags win."""

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
"""The sizes of the small model, by the name of the config's field. A config that lacks a field does not get it."""


def rehearse(given: RecipeSettings, train: Callable[[RecipeSettings], Any]) -> list[str]:
    """Train as a recipe says, on a small model in the place of its own, and return the lines to print at the end.

    The dataset, the rewards, the tokenizer and the chat template are the recipe's own. Nothing is saved in its
    `output_dir`.

    Args:
        train: the function that trains as a recipe's settings say, and returns the trainer.

    Raises:
        ConfigError: something is wrong with the recipe, or the model is of a kind that is not made small.
    """
    name = given.model.model_name_or_path
    with tempfile.TemporaryDirectory(prefix="trlx-hybrid-rehearsal-") as folder:
        given.training.output_dir = folder
        if name is not None:  # else train() says that it is missing
            parameters = _write_small(name, f"{folder}/model", given)
            given.model.model_name_or_path, given.model.model_revision = f"{folder}/model", "main"
        trainer = train(given)
        trainer.session.close()
    return [
        f"rehearsed: {trainer.state.global_step} steps on a CPU, with a {trainer.model.config.model_type} of "
        f"{parameters / 1e6:.1f} million random weights in the place of {name}.",
        "Its rewards say nothing. Now see if the whole run fits, with --forecast, or start it without --rehearse.",
    ]


def _write_small(name: str, folder: str, given: RecipeSettings) -> int:
    """Write a small model with random weights, and the tokenizer of the recipe's model; return its number of weights.

    Args:
        name: the recipe's model, a name of the hub or a folder.
        folder: where to write.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    trusted = {"trust_remote_code": given.training.trust_remote_code}
    source = {"revision": given.model.model_revision or "main", **trusted}
    try:
        config = AutoConfig.from_pretrained(name, **source)
        tokenizer = AutoTokenizer.from_pretrained(name, **source)
    except OSError as error:  # no such model, or no network
        raise ConfigError(f"model_name_or_path: config and tokenizer of {name!r} cannot be read: {error}") from error
    _shrink(config, len(tokenizer))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(given.training.seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **trusted)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return int(model.num_parameters())


def _shrink(config: PretrainedConfig, vocabulary: int) -> None:
    """Set a config's sizes to those of a small model, in place.

    Raises:
        ConfigError: the model is not one of text alone, which has further sizes.
    """
    if config.get_text_config() is not config:
        raise ConfigError(
            f"--rehearse makes no small {config.model_type}, a model of more than text. Leave --rehearse out and name "
            "a small model of this kind: --model_name_or_path FOLDER --use_cpu --bf16 False --max_steps 2"
        )
    fields: dict[str, Any] = {field: size for field, size in SIZES.items() if getattr(config, field, None) is not None}
    kinds = getattr(config, "layer_types", None)
    if kinds:  # one of each kind, in the order of the model's layers
        fields["layer_types"] = list(dict.fromkeys(kinds))
        fields["num_hidden_layers"] = len(fields["layer_types"])
    for field, value in (fields | {"vocab_size": vocabulary, "quantization_config": None}).items():
        if hasattr(config, field):
            setattr(config, field, value)
