"""The command `trlx-hybrid train`, which trains from a recipe: a YAML file of settings, each of which can also be given
as a flag."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml  # type: ignore[import-untyped]

from ..config import HybridConfig
from ..errors import ConfigError, HybridError, MemoryPlanError, did_you_mean, nearest
from .recipe import RecipeConfig, RecipeSettings
from .rehearsal import FLAGS, rehearse

TRAINERS = ("grpo", "rloo")
TRUE = ("true", "yes", "on", "t", "y", "1")  # as a flag that is a bool reads them


def add_command(commands: Any) -> None:
    """Add the command `train` to the command line. Parsing it sets the option `run` to the function `run` of this
    module.

    Args:
        commands: what `argparse`'s `add_subparsers` returned.
    """
    parser = commands.add_parser(
        "train",
        help="train from a recipe, a YAML file",
        usage="%(prog)s [-h] RECIPE [--SETTING VALUE ...]",
        description="Train from a recipe, a YAML file. Every setting is a flag as well, and the flag wins: "
        "`trlx-hybrid train RECIPE --help` lists them. On several GPUs: `accelerate launch --module trlx_hybrid train "
        "RECIPE`.",
    )
    parser.add_argument("recipe", metavar="RECIPE", help="YAML file, such as examples/recipes/math-24gb.yaml")
    settings = parser.add_argument(
        "settings", metavar="--SETTING VALUE", nargs=argparse.REMAINDER, help="in the place of the recipe's"
    )
    settings.required = False  # else argparse would name both where RECIPE is missing
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Train or rehearse as a recipe says, or print the forecast of its memory; return the exit status.

    Args:
        options: the command's options: `recipe`, the path, and `settings`, the flags after it.

    Raises:
        ConfigError: something is wrong with the recipe; raised before the model is loaded.
    """
    given = read(Path(options.recipe), options.settings)
    if given.recipe.forecast is None and not given.recipe.rehearse:
        train(given)
    elif given.recipe.forecast is None:
        print("\n".join(rehearse(given, train)))
    else:
        from .forecast import forecast, gpus_of  # here, since these import torch
        from .room import room_for

        functions(given)
        gpus, context = gpus_of(str(given.recipe.forecast)), given.recipe.context
        try:
            print("\n".join(forecast(given, gpus)))
        except MemoryPlanError:
            if context is not None:
                print(room_for(given, gpus, context))
            raise
        if context is not None:
            print(room_for(given, gpus, 2 * context))
    return 0


def read(recipe: Path, flags: Sequence[str]) -> RecipeSettings:
    """Return the settings of a recipe, in which flags take precedence over the file.

    Raises:
        ConfigError: there is no such file, it is no YAML mapping, or it has an unknown setting.
    """
    try:
        settings = yaml.safe_load(recipe.read_text())
    except OSError as error:
        hint = did_you_mean(recipe.name, (file.name for file in recipe.parent.glob("*.y*ml")))
        raise ConfigError(f"The recipe {recipe} cannot be read: {error.strerror}.{hint}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"The recipe {recipe} is not YAML: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"The recipe {recipe} must have lines `setting: value`, and is a {type(settings).__name__}.")
    program, usage = f"trlx-hybrid train {recipe}", "%(prog)s [--SETTING VALUE ...]"
    which = argparse.ArgumentParser(prog=program, usage=usage, add_help=False, allow_abbrev=False)
    which.add_argument("--trainer", default=settings.get("trainer", TRAINERS[0]))
    which.add_argument("--forecast", default=settings.get("forecast"))
    which.add_argument("--rehearse", nargs="?", const="True", default=str(settings.get("rehearse", False)))
    first = which.parse_known_args(flags)[0]
    trainer = first.trainer
    if trainer not in TRAINERS:
        raise ConfigError(
            f"trainer is {trainer!r}.{did_you_mean(str(trainer), TRAINERS)} It takes {' and '.join(TRAINERS)}."
        )

    from ..trl.recipe import MODEL_CONFIG, SCRIPT_ARGUMENTS, TRAINED_BY  # here, since it imports trl
    from ..trl.trainer import TrlParser

    config = TRAINED_BY[trainer].config
    if first.forecast is not None:  # batch sizes depend on the number of ranks
        from .forecast import gpus_of

        config = type(config.__name__, (config,), {"world_size": gpus_of(str(first.forecast)).ranks})
    parser = TrlParser(
        (RecipeConfig, SCRIPT_ARGUMENTS, config, MODEL_CONFIG, HybridConfig),
        prog=program,
        usage=usage,
        allow_abbrev=False,  # an abbreviation could mean two settings
    )
    if first.forecast is not None:
        flags = [*flags, "--use_cpu", "True"]  # transformers refuses `bf16` where there is no GPU
    elif first.rehearse.lower() in TRUE:
        flags = [*FLAGS, *flags]
    try:
        parsed = parser.parse_args_and_config(["--config", str(recipe), *flags])
    except HybridError:
        raise
    except ValueError as error:  # raised by TRL's and transformers' configs
        raise ConfigError(f"TRL refuses the settings of {recipe}: {error}") from error
    own, script, training, model, hybrid = parsed
    if own.context is not None and own.forecast is None:
        raise ConfigError(
            f"context={own.context} is a setting of a forecast: add --forecast 80, the GiB of your GPU. A run takes "
            f"vllm_max_model_length={own.context}."
        )
    if own.context is not None and own.context < 2:
        raise ConfigError(f"context={own.context}: a row has a prompt and a completion, 2 tokens or more.")
    return RecipeSettings(own, script, training, model, hybrid, recipe.resolve().parent)


def train(given: RecipeSettings) -> Any:
    """Train a model as a recipe's settings say, save it, and return the trainer.

    Raises:
        ConfigError: something is wrong with the recipe; raised before the model is loaded.
    """
    from ..trl.recipe import TRAINED_BY, model_arguments
    from ..trl.rewards import refuse_missing_package

    recipe, training = given.recipe, given.training
    trainer = TRAINED_BY[recipe.trainer].trainer
    if given.model.model_name_or_path is None:
        raise ConfigError("model_name_or_path is not set: name a model of the hub, or its folder.")
    _refuse_setup(given)
    rewards, tools, prepare = functions(given)
    refuse_missing_package(rewards)
    arguments: dict[str, Any] = {
        "reward_funcs": [*filter(None, [recipe.reward_model_name_or_path]), *rewards],
        "tools": tools,
    }
    if recipe.tools and "tools" not in inspect.signature(TRAINED_BY[recipe.trainer].base).parameters:
        raise ConfigError(f"tools are set, and trainer={recipe.trainer!r} has none in TRL. Set trainer='grpo'.")
    for name, missing in (
        ("reward_funcs", not arguments["reward_funcs"]),
        ("dataset_name", not given.script.dataset_name),
    ):
        if missing and given.hybrid.environment is None:
            raise ConfigError(
                f"{name} is not set, and there is no environment that would bring it. Set one of the two."
            )
    if given.script.dataset_name:
        arguments["train_dataset"] = dataset(given.script, given.script.dataset_train_split, prepare)
        if training.eval_strategy != "no":
            arguments["eval_dataset"] = dataset(given.script, given.script.dataset_test_split, prepare)
    arguments |= model_arguments(given.model, training)
    arguments = {name: value for name, value in arguments.items() if value not in (None, [])}
    running = trainer(model=given.model.model_name_or_path, args=training, hybrid=given.hybrid, **arguments)
    resume = training.resume_from_checkpoint  # a flag gives text
    running.train(resume_from_checkpoint={"true": True, "false": None}.get(str(resume).lower(), resume))
    running.save_model(training.output_dir)
    if training.push_to_hub:
        running.push_to_hub(dataset_name=given.script.dataset_name)
    return running


def _refuse_setup(given: RecipeSettings) -> None:
    """Raise ConfigError where settings need what this process lacks: other processes for FSDP, bitsandbytes for a model
    in 4 or 8 bits. transformers says so only once the dataset is loaded, and names no way out."""
    training, model = given.training, given.model
    if training.fsdp and training.world_size == 1:
        raise ConfigError(
            "fsdp shards a model over processes, and this is the only one. Start several, or leave fsdp out: "
            "accelerate launch --num_processes 8 --module trlx_hybrid train RECIPE"
        )
    if (model.load_in_4bit or model.load_in_8bit) and importlib.util.find_spec("bitsandbytes") is None:
        bits = "load_in_4bit" if model.load_in_4bit else "load_in_8bit"
        raise ConfigError(f"{bits} needs the package bitsandbytes, which is not installed: pip install bitsandbytes")


def functions(given: RecipeSettings) -> tuple[list[Any], list[Any], Any]:
    """Return the reward functions, the tools, and the function that prepares the dataset (None without one) that a
    recipe names.

    Raises:
        ConfigError: one of them does not exist.
    """
    from ..trl.recipe import REWARDS

    recipe, folder = given.recipe, given.folder
    rewards = [function(name, folder, "reward_funcs", REWARDS) for name in recipe.reward_funcs or ()]
    tools = [function(name, folder, "tools") for name in recipe.tools or ()]
    return rewards, tools, function(recipe.prepare, folder, "prepare") if recipe.prepare is not None else None


def function(name: str, folder: Path, setting: str, known: Mapping[str, Callable[..., Any]] | None = None) -> Any:
    """Import a function that a recipe names.

    Args:
        name: the function as `module:function`, `module.function` or `file.py:function`, or a key of `known`.
        folder: the recipe's folder.
        setting: the setting that names the function, for error messages.
        known: functions that may be named without a module, by name.

    Raises:
        ConfigError: there is no such file, module or function. If a function of the module has a similar name, the
            message suggests it.
    """
    if known and name in known:
        return known[name]
    separator = ":" if ":" in name else "."
    place, _, attribute = name.rpartition(separator)
    if not place:
        names = f" It takes {', '.join(known)}, or" if known else " Write"
        raise ConfigError(
            f"{setting}: no function {name!r}.{did_you_mean(name, known or ())}{names} 'module:function' or "
            "'file.py:function'."
        )
    module = _file(place, folder, setting) if place.endswith(".py") else _module(place, setting)
    found = getattr(module, attribute, None)
    if not callable(found):
        there = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        problem = "no function" if found is None else f"a {type(found).__name__} and no function"
        raise ConfigError(f"{setting}: {place} has {problem} {attribute!r}.{did_you_mean(attribute, there)}")
    return found


def _file(place: str, folder: Path, setting: str) -> ModuleType:
    """Import a Python file as the module `recipe_NAME`, once, and return the module.

    Args:
        place: path of the file, in the recipe's folder or in the working directory.
        folder: the recipe's folder.
        setting: the setting that names the file, for error messages.
    """
    file = next((path for path in (folder / place, Path(place)) if path.is_file()), None)
    if file is None:
        near = nearest(Path(place).name, (path.name for path in folder.glob("*.py")))
        hint = f" Did you mean {near!r}?" if near else ""
        raise ConfigError(f"{setting}: no file {place} in {folder} or in the working directory.{hint}")
    name = f"recipe_{file.resolve().stem}"
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__file__ == str(file.resolve()):
        return loaded
    spec = importlib.util.spec_from_file_location(name, file.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _module(place: str, setting: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as in TRL's own command line
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise  # for an import inside the module
        raise ConfigError(
            f"{setting}: no module {error.name!r}. Install it, or write 'file.py:function' for a file of your own."
        ) from error


def dataset(script: Any, split: str, prepare: Callable[[Any], Any] | None) -> Any:
    """Load one split of a recipe's dataset, and return it with the column `prompt`, as the trainer needs it.

    Args:
        script: TRL's `ScriptArguments`.
        prepare: the recipe's function that prepares the dataset, or None.

    Raises:
        ConfigError: the split cannot be loaded, or has no column `prompt`.
    """
    from datasets import load_dataset

    try:
        rows = load_dataset(
            script.dataset_name, name=script.dataset_config, split=split, streaming=script.dataset_streaming
        )
    except (OSError, ValueError) as error:  # no such name or folder, configuration or split, or no network
        raise ConfigError(
            f"dataset_name: {script.dataset_name!r}, split {split!r}, cannot be loaded: {error}"
        ) from error
    rows = prepare(rows) if prepare is not None else rows
    columns = getattr(rows, "column_names", None)
    if columns is not None and "prompt" not in columns:
        raise ConfigError(
            f"dataset_name: {script.dataset_name!r} has no column 'prompt', but {', '.join(columns)}. Set `prepare` "
            "to a function that makes it."
        )
    return rows
