"""The settings of a recipe, the YAML file of `trlx-hybrid train`, beside those that TRL and `HybridConfig` read."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..config import HybridConfig


@dataclass(kw_only=True)
class RecipeConfig:
    """The settings of a recipe beside those of `HybridConfig` and TRL's `GRPOConfig` or `RLOOConfig`, `ModelConfig` and
    `ScriptArguments`.

    A function is named `module:function`, `module.function`, or `file.py:function` where the file is in the folder of
    the recipe or in the working directory.
    """

    trainer: str = field(default="grpo", metadata={"help": "Trainer of TRL's: 'grpo' or 'rloo'."})
    reward_funcs: list[str] | None = field(
        default=None,
        metadata={
            "help": "Reward functions: names in `trl.rewards`, as 'accuracy_reward', 'module:function' or "
            "'file.py:function'."
        },
    )
    reward_model_name_or_path: str | None = field(
        default=None, metadata={"help": "A reward model, before the reward functions: hub name or folder."}
    )
    tools: list[str] | None = field(
        default=None, metadata={"help": "Tools of the model: 'module:function' or 'file.py:function'. GRPO only."}
    )
    prepare: str | None = field(
        default=None,
        metadata={
            "help": "Function that takes the dataset and returns one with the column `prompt`, and those that rewards "
            "and environments read: 'module:function' or 'file.py:function'."
        },
    )
    forecast: str | None = field(
        default=None,
        metadata={
            "help": "Print what the run is going to need in memory on GPUs of so many GiB, as '24', or '8x80' for "
            "eight of 80 GiB, and end. Reads the model's config, and no weights."
        },
    )
    context: int | None = field(
        default=None,
        metadata={
            "help": "With forecast: the tokens of a row, prompt and completion, in the place of "
            "vllm_max_model_length. The last line says what makes room for twice as many, or for these where they do "
            "not fit."
        },
    )
    rehearse: bool = field(
        default=False,
        metadata={
            "help": "Run two short steps on a CPU, with a small model of the same architecture and random weights, and "
            "end: the dataset, the rewards and the tokenizer are the run's own. Nothing is saved."
        },
    )

    def __post_init__(self) -> None:
        for name in ("reward_funcs", "tools"):
            if isinstance(getattr(self, name), str):  # YAML with one name instead of a list
                setattr(self, name, [getattr(self, name)])


class RecipeSettings(NamedTuple):
    """The settings of a recipe and of the command line's flags, parsed into the configs of TRL and of this package.

    Attributes:
        recipe: settings that only recipes have.
        script: TRL's `ScriptArguments`.
        training: TRL's `GRPOConfig` or `RLOOConfig`.
        model: TRL's `ModelConfig`.
        hybrid: this package's settings.
        folder: the folder of the recipe's file.
    """

    recipe: RecipeConfig
    script: Any
    training: Any
    model: Any
    hybrid: HybridConfig
    folder: Path
