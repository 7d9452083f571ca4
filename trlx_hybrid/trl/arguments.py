"""The translation of TRL's arguments into this package's settings. The module also checks TRL's arguments where TRL
skips its own checks because an engine of this package generates."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from ..blame import blaming
from ..config import HybridConfig
from ..contract.protocols import EnvironmentArguments
from ..contract.types import Sampling
from ..errors import ConfigError, did_you_mean
from ..plugins.builtin import SingleTurnOptions
from ..plugins.selection import Choice, TrainerArguments

VESPO_MODES = ("token_truncate", "token_mask")


def trainer_arguments(
    args: Any, tools: Any = None, rollout_func: Any = None, rollout_options: Mapping[str, Any] | None = None
) -> TrainerArguments:
    """Return the part of TRL's arguments from which this package's components are chosen, with TRL's `vllm_*` arguments
    under the names of the engine's options.

    Engine options that are None are left out, so that the engine's defaults apply. All are left out where `args` is
    None or has no `vllm_*` arguments.

    Args:
        args: TRL's config.
        tools: the trainer's tools or environment factory, if any.
        rollout_func: the trainer's `rollout_func`; its attribute `rollout`, if it has one, names the rollout component
            that it needs.
        rollout_options: `HybridConfig.rollout_options`, which say how many rows are sampled at a time where rows stay
            in flight.
    """
    rollout = getattr(rollout_func, "rollout", None)
    if not hasattr(args, "vllm_mode"):
        return TrainerArguments(engine_options={}, tools=bool(tools), rollout=rollout)
    share = args.vllm_gpu_memory_utilization
    trls = next(f.default for f in dataclasses.fields(args) if f.name == "vllm_gpu_memory_utilization")
    rows, in_flight = rows_of_a_batch(args), rollout_options or {}
    if in_flight.get("max_staleness"):
        asked = SingleTurnOptions(max_staleness=in_flight["max_staleness"], in_flight=in_flight.get("in_flight"))
        rows = asked.rows_at_a_time(rows)
    options = {
        "tensor_parallel_size": args.vllm_tensor_parallel_size,
        "gpu_memory_utilization": None if share == trls else share,  # TRL's default: leave the choice to the engine
        "max_model_len": args.vllm_max_model_length,
        "max_num_seqs": rows * args.vllm_tensor_parallel_size,
        "enable_sleep_mode": args.vllm_enable_sleep_mode,
        "model_impl": args.vllm_model_impl,
        "trust_remote_code": args.trust_remote_code,
    }
    options = {name: value for name, value in options.items() if value is not None}
    given = {"use_vllm": args.use_vllm, "vllm_mode": args.vllm_mode}
    return TrainerArguments(**given, tools=bool(tools), rollout=rollout, engine_options=options)


def rows_of_a_batch(args: Any) -> int:
    """Return the number of rows that a batch has on each rank.

    Args:
        args: TRL's config.
    """
    micro_batches = getattr(args, "steps_per_generation", None) or args.gradient_accumulation_steps
    return int(args.per_device_train_batch_size * micro_batches)


def environment_arguments(choice: Choice, given: Mapping[str, Any], trainer: type[Any]) -> dict[str, Any]:
    """Return the trainer arguments that an environment component supplies and the user did not pass, by name.

    Args:
        choice: the environment component and its options.
        given: the user's arguments of TRL's trainer, by name.
        trainer: TRL's trainer class.

    Raises:
        ConfigError: the user also passes `rollout_func` or `environment_factory`, or this trainer does not take what
            the environment supplies.
    """
    name = choice.component.name
    for argument in ("rollout_func", "environment_factory"):
        if given.get(argument) is not None:
            raise ConfigError(
                f"HybridConfig.environment={name!r} and {argument}= are both set, and either would answer the model. "
                "Drop one of the two."
            )
    built = choice.component.build(None, choice.options)
    brought = {f.name: getattr(built, f.name) for f in dataclasses.fields(EnvironmentArguments)}
    brought = {argument: value for argument, value in brought.items() if value is not None}
    unknown = sorted(brought.keys() - inspect.signature(trainer.__init__).parameters.keys())
    if unknown:
        raise ConfigError(
            f"HybridConfig.environment={name!r} brings {', '.join(unknown)}, which {trainer.__name__} does not take. "
            "Train with GRPOTrainer, or leave the environment out."
        )
    missing = {argument: value for argument, value in brought.items() if given.get(argument) is None}
    for argument in {"train_dataset", "eval_dataset"} & missing.keys():
        with blaming(choice.component, argument):
            missing[argument] = missing[argument]()
    return missing


def refuse_unknown(trainer: str, given: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse an argument that the trainer's `__init__` does not take, for example a setting of HybridConfig.

    Args:
        trainer: name of the trainer's class.
        given: the keyword arguments, by name.
        known: names of the arguments that the trainer takes.

    Raises:
        ConfigError: names the argument, and where it belongs.
    """
    settings = [field.name for field in dataclasses.fields(HybridConfig)]
    for name, value in given.items():
        if name in known:
            continue
        if name in settings:
            way_out = f"It is a setting of HybridConfig: {trainer}(..., hybrid=HybridConfig({name}={value!r:.60}))."
        else:
            way_out = did_you_mean(name, [*known, "hybrid", "plugins"]).strip() or (
                "Settings of a run belong into args=, those of this package into hybrid=HybridConfig(...)."
            )
        raise ConfigError(f"{trainer} takes no argument {name!r}. {way_out}")


def suggesting(parser: type[Any]) -> type[Any]:
    """Return a subclass of `TrlParser` that refuses an unknown key of the file which `--config` names, and an unknown
    flag, and names the nearest known one.

    Args:
        parser: TRL's `TrlParser`, or a subclass.
    """

    def parse_args_and_config(
        self: Any,
        args: Any = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
        **others: Any,
    ) -> Any:
        self._refuses_unknown = fail_with_unknown_args and not return_remaining_strings
        return parser.parse_args_and_config(self, args, return_remaining_strings, fail_with_unknown_args, **others)

    def set_defaults_with_config(self: Any, **settings: Any) -> Any:
        unread = parser.set_defaults_with_config(self, **settings)
        if unread and self._refuses_unknown:
            unknown = unread[0].removeprefix("--")
            raise ConfigError(
                f"The config file sets {unknown!r}, which nothing reads.{did_you_mean(unknown, _read_by(self))}"
            )
        return unread

    def parse_args_into_dataclasses(
        self: Any, args: Any = None, return_remaining_strings: bool = False, **others: Any
    ) -> Any:
        unread = (
            [] if return_remaining_strings else self.parse_known_args(args)[1]
        )  # before the config's own check of unknown arguments
        if unread:
            unknown = unread[0].partition("=")[0]
            hint = did_you_mean(unknown, (f"--{name}" for name in _read_by(self)))
            raise ConfigError(f"Nothing reads the argument {unknown!r}.{hint}")
        return parser.parse_args_into_dataclasses(self, args, return_remaining_strings, **others)

    methods = {
        "parse_args_and_config": parse_args_and_config,
        "parse_args_into_dataclasses": parse_args_into_dataclasses,
        "set_defaults_with_config": set_defaults_with_config,
    }
    members = {"__module__": __name__, "__doc__": suggesting.__doc__, "_refuses_unknown": False}
    return type(parser.__name__, (parser,), members | methods)


def _read_by(parser: argparse.ArgumentParser) -> list[str]:
    """Return the names of a parser's settings, including those of its subcommands."""
    names = {action.dest for action in parser._actions} - {"help"}
    commands = [action.choices.values() for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return sorted(names.union(*(_read_by(command) for choices in commands for command in choices)))


COLDEST = 0.01
"""The lowest sampling temperature above 0. vLLM raises lower temperatures to it (`vllm/sampling_params.py`)."""


def sampling_of(args: Any, trainer: str) -> Sampling:
    """Return TRL's sampling settings as a `Sampling`. It asks the engine for the sampled tokens' log-probs only if the
    trainer is GRPO, whose importance-sampling correction reads them.

    Args:
        args: TRL's config.
        trainer: the name that TRL gives its trainer: "GRPO", "RLOO" or "Distillation".
    """
    return Sampling(
        max_tokens=args.max_completion_length,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=0.0 if args.min_p is None else args.min_p,
        repetition_penalty=args.repetition_penalty,
        logprobs=0 if trainer == "GRPO" else None,
        extra={name: value for name, value in (args.generation_kwargs or {}).items() if value is not None},
        regex=args.vllm_structured_outputs_regex,
    )


def score_as_sampled(args: Any) -> None:
    """Set `args.temperature`, at which the trainer scores tokens, to the temperature at which the engine samples them.

    The two may differ for two reasons. `generation_kwargs` may name another temperature, which the engine then uses.
    And an engine samples at 0.01 if the temperature is between 0 and 0.01. Without this function, TRL would score at
    the original temperature, and its importance-sampling correction would react to the difference.
    """
    temperature = (args.generation_kwargs or {}).get("temperature", args.temperature)
    if temperature:
        args.temperature = max(temperature, COLDEST)


def refuse_penalties(sampling: Sampling, args: Any) -> None:
    """Refuse sampling settings, such as penalties, that change the sampling probabilities in a way that the trainer
    does not compute, where TRL corrects for the sampler.

    Args:
        args: TRL's config.

    Raises:
        ConfigError: names the setting. It would make each token's importance ratio differ from 1, so that the product
            of the ratios would fall toward 0 with the length of a completion.
    """
    reason = sampling.reweighted_by() if getattr(args, "vllm_importance_sampling_correction", False) else None
    if reason is not None:
        raise ConfigError(
            f"{reason} changes the probabilities that tokens are sampled with; the trainer does not compute "
            "them: the importance-sampling correction would multiply the loss of long completions by almost 0. Leave "
            "the setting out, or set vllm_importance_sampling_correction=False to train without the correction."
        )


def refuse_empty(dataset: Any) -> None:
    """Refuse an empty dataset. Without this, the Trainer's sampler would fail with a message about num_samples."""
    if hasattr(dataset, "__len__") and len(dataset) == 0:
        raise ConfigError("train_dataset is empty. Check the split and any filter applied to it.")


def refuse_reserved(generation_kwargs: dict[str, Any] | None) -> None:
    """Refuse `generation_kwargs` with `n` or `logprobs`, which the trainer sets by itself: it reads one completion per
    request, and one log-prob per token.

    Raises:
        ConfigError: names the setting.
    """
    for name in {"n", "logprobs"} & (generation_kwargs or {}).keys():
        raise ConfigError(f"generation_kwargs has {name!r}, which the trainer decides by itself. Leave it out.")


def refuse_checkpointing(checkpointing_kwargs: dict[str, Any] | None) -> None:
    """Refuse `gradient_checkpointing_kwargs` with `offload` or `every_n_layers`, which transformers' Trainer takes: TRL
    switches gradient checkpointing off in each rollout, and hands both to torch when it switches it on again.

    Raises:
        ConfigError: names the setting.
    """
    for name in sorted({"offload", "every_n_layers"} & (checkpointing_kwargs or {}).keys()):
        raise ConfigError(
            f"gradient_checkpointing_kwargs has {name!r}, which TRL hands to torch after the first rollout, where it "
            "fails or has no effect. Leave it out: scoring='packed', the default with an engine, recomputes the layers "
            "that memory asks for, and keeps their inputs in host memory where it must."
        )


def check_skipped(args: Any) -> None:
    """Run the checks of TRL's `__init__` that TRL skips because this package sets `use_vllm` to False there.

    Raises:
        ConfigError: the loss is VESPO, and does not support the mode of importance sampling.
    """
    mode = getattr(args, "vllm_importance_sampling_mode", None)
    corrects = getattr(args, "loss_type", None) == "vespo" and args.vllm_importance_sampling_correction
    if corrects and mode not in VESPO_MODES:
        raise ConfigError(f"VESPO loss needs vllm_importance_sampling_mode to be one of {VESPO_MODES}, got {mode!r}.")
