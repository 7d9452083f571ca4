"""The user's settings: one flat dataclass that TrlParser understands. The options of a component in it are checked by
that component."""

from __future__ import annotations

import dataclasses
import json
import numbers
import types
import typing
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, TypeVar

from .errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

AUTO = "auto"
"""The value of `HybridConfig.weights` and `HybridConfig.scoring` that leaves the choice to this package."""

OFFLOAD = ("auto", "all", "none")
"""The values of `HybridConfig.offload`."""

RESUME_VARIABLE = "TRLX_HYBRID_RESUME"
"""An environment variable that `trlx-hybrid launch --restart N` sets to 1 from the second start on; not set at the
first."""

STARTS_VARIABLE = "TRLX_HYBRID_RESTART_COUNT"
"""An environment variable that `trlx-hybrid launch` sets to the number of starts before this one."""

LAUNCH_VARIABLE = "TRLX_HYBRID_LAUNCH"
"""An environment variable that `trlx-hybrid launch` sets to an id of the launch, the same at all its starts; not set
where the launch itself is to resume a run."""


@dataclass(kw_only=True)
class HybridConfig:
    """The settings of trlx-hybrid, beside TRL's own arguments: which engine, weight sync, rollout and so on a run uses,
    and their options.

    Every setting is optional: without it, TRL's arguments decide (`use_vllm=True` with `vllm_mode="colocate"` takes the
    `vllm` engine). Without any setting, training is stock TRL, bit for bit. The settings can be passed in code, as
    command-line flags and in YAML through `TrlParser((ScriptArguments, GRPOConfig, ModelConfig, HybridConfig))`.
    """

    engine: str | None = field(
        default=None,
        metadata={
            "help": "Generation backend: 'transformers' (TRL's own generation), 'vllm', 'auto' (the only one that "
            "plugins offer, 'remote' aside) or another one that `trlx-hybrid plugins` lists. Default: as use_vllm says."
        },
    )
    engine_options: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Options of the engine, as a dict or JSON string."}
    )
    weights: str = field(
        default="auto",
        metadata={
            "help": "How weights are synced to the engine: 'auto' (the cheapest that serves the model), 'alias', "
            "'lora', 'copy', 'reshard', 'transfer', 'gather', 'merged' (LoRA, rounded, never by 'auto') or another one "
            "that `trlx-hybrid plugins` lists."
        },
    )
    weights_options: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "Options of the weight sync, as a dict or JSON string; applied to the one 'auto' chooses."},
    )
    rollout: str | None = field(
        default=None,
        metadata={
            "help": "How prompts become trajectories: 'single_turn', 'multi_turn' (the default where the trainer has "
            "tools and it is installed) or another one that `trlx-hybrid plugins` lists."
        },
    )
    rollout_options: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Options of the rollout, as a dict or JSON string."}
    )
    scoring: str = field(
        default="auto",
        metadata={
            "help": "What computes the log-probs that the trainer learns from: 'auto' ('packed' where it is installed, "
            "an engine of this package samples and the model's first rows prove it, else 'padded'), 'padded' (TRL's "
            "own), 'packed' or another one that `trlx-hybrid plugins` lists. GRPO and RLOO only."
        },
    )
    scoring_options: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Options of the scoring, as a dict or JSON string."}
    )
    algorithm: list[str] | None = field(
        default=None,
        metadata={
            "help": "What changes which completions are trained on and how much they count, one name or several: "
            "'dynamic_sampling', 'leave_one_out' or another one that `trlx-hybrid plugins` lists. GRPO only."
        },
    )
    algorithm_options: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Options of the algorithms, by name, as a dict or JSON string: "
            '\'{"dynamic_sampling": {"rounds": 5}}\'.'
        },
    )
    environment: str | None = field(
        default=None,
        metadata={
            "help": "What answers the model, and brings rewards and datasets where the script has none: an environment "
            "that `trlx-hybrid environments` lists. GRPO only."
        },
    )
    environment_options: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Options of the environment, as a dict or JSON string."}
    )
    plugin_options: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Options of plugins, beside those of their components, by plugin name, as a dict or JSON string: "
            '\'{"trajectories": {"record": "trajectories.jsonl"}}\'.'
        },
    )
    offload: str = field(
        default="auto",
        metadata={
            "help": "What is offloaded to host memory during rollout: 'auto' (optimizer state, gradients and unshared "
            "policy weights, as far as the KV cache needs the memory), 'all' or 'none'. Only with an engine in sleep "
            "mode (vllm_enable_sleep_mode)."
        },
    )
    verify_every: int = field(
        default=100,
        metadata={
            "help": "At the first and every N-th weight sync compare all synced parameters bit for bit, and the "
            "engine's log-probs with the policy's. Other syncs check a sample of the parameters. 0: only the first."
        },
    )
    max_logprob_gap: float | None = field(
        default=None,
        metadata={
            "help": "Stop when the log-prob of a sampled token differs between engine and trainer by more than this "
            "(nats). Default: 0.001 in float32, 0.1 in float16, 0.5 in bfloat16, 2 where the engine quantises. In 16 "
            "bits one token in 100 of a batch may differ by more, with mixture-of-experts models (in any dtype) one in "
            "10. Compared where TRL computes both (GRPO's importance-sampling correction). 'inf': no check."
        },
    )
    record: str | None = field(
        default=None,
        metadata={
            "help": "A folder to keep every batch in, as it is trained on: tokens, masks, log-probs, rewards, "
            "advantages. On several nodes, one that all of them share."
        },
    )
    replay: str | None = field(
        default=None,
        metadata={
            "help": "A folder that `record` filled, whose batches are trained on. No engine is built, nothing is "
            "sampled, and no reward function is called."
        },
    )
    router_replay: bool = field(
        default=False,
        metadata={
            "help": "Mixture-of-experts models: the trainer computes each token with the experts that the engine chose "
            "for it. GRPO and RLOO with engine 'vllm', one turn, no tools."
        },
    )
    rollout_only: bool = field(
        default=False, metadata={"help": "Sample and score batches, and train on none of them: no loss, no step."}
    )
    disable_plugins: list[str] | None = field(
        default=None, metadata={"help": "Plugins to disable, besides those in TRLX_HYBRID_DISABLE."}
    )

    def __new__(cls, *args: Any, **given: Any) -> Self:
        """Raise ConfigError for unknown settings, and name the nearest known one."""
        if args:
            raise ConfigError(f"HybridConfig takes its settings by name, as engine='vllm'; got {args[0]!r:.60}.")
        check_keys(given, [f.name for f in dataclasses.fields(cls)], cls.__name__)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self.scoring = self.scoring or AUTO  # None was the default once
        slots = ("engine", "weights", "rollout", "scoring", "algorithm", "environment", "plugin")
        for name in (f"{slot}_options" for slot in slots):
            value = getattr(self, name)
            if isinstance(value, str):
                try:
                    value = json.loads(value)
                except json.JSONDecodeError as error:
                    raise ConfigError(
                        f"HybridConfig.{name} is not valid JSON: {error}. Write it as --{name} '{{\"key\": value}}'."
                    ) from error
                setattr(self, name, value)
            if value is not None and not isinstance(value, Mapping):
                raise ConfigError(f"HybridConfig.{name} must be a mapping, got {type(value).__name__}.")
        for slot in ("plugin", "algorithm"):
            for name, options in self.options(slot).items():
                if not isinstance(options, Mapping):
                    raise ConfigError(f"HybridConfig.{slot}_options[{name!r}] must be a mapping, got {options!r:.60}.")
        if isinstance(self.algorithm, str):
            self.algorithm = [self.algorithm]
        if self.environment is None and self.environment_options:
            raise ConfigError("HybridConfig.environment_options is set, and no environment: choose one, or drop them.")
        if self.offload not in OFFLOAD:
            raise ConfigError(f"HybridConfig.offload is {self.offload!r}; it takes {', '.join(OFFLOAD)}.")
        if self.verify_every < 0:
            raise ConfigError(f"HybridConfig.verify_every must be 0 or more, got {self.verify_every}.")
        if self.max_logprob_gap is not None and not self.max_logprob_gap > 0:
            raise ConfigError(f"HybridConfig.max_logprob_gap must be more than 0 nats, got {self.max_logprob_gap}.")

        if self.replay is not None and (self.record is not None or self.rollout_only):
            other = "record" if self.record is not None else "rollout_only"
            raise ConfigError(f"HybridConfig.replay samples nothing, and {other} is about what is sampled: drop one.")

    def options(self, slot: str) -> dict[str, Any]:
        """Return the user's options for one kind of component, an empty dict where there are none.

        Args:
            slot: "engine", "weights", "rollout", "scoring" or "environment"; or "algorithm" or "plugin", for which the
                result has the options of each by name.
        """
        value = getattr(self, f"{slot}_options")
        return dict(value) if value is not None else {}

    def options_of(self, plugin: str, owner: type[T]) -> T:
        """Return the user's options for a plugin itself, beside those of its components (`plugin_options`). A plugin
        calls this in `trlx_configure`, before anything is sampled; options for a plugin that is not loaded are refused.

        Args:
            plugin: name of the plugin's entry point.
            owner: the plugin's dataclass of options.

        Raises:
            ConfigError: the user set a key that the dataclass does not have.
        """
        return build(owner, self.options("plugin").get(plugin, {}), f"HybridConfig.plugin_options[{plugin!r}]")

    @classmethod
    def coerce(cls, value: HybridConfig | Mapping[str, Any] | None) -> HybridConfig:
        """Return a config from what a user passes as `hybrid=`: a config, a mapping of its fields, or None for
        the defaults. Raises ConfigError for anything else."""
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(f"hybrid= takes a HybridConfig or a mapping of its fields, got {type(value).__name__}.")
        return build(cls, value, "HybridConfig")


def build(owner: type[T], values: Mapping[str, Any], where: str) -> T:
    """Return an instance of the dataclass `owner` from a user's mapping of its fields.

    Args:
        where: the setting that holds the mapping, for messages.

    Raises:
        ConfigError: a key is unknown (the message names the nearest known one), or a value is no number or boolean
            where the dataclass's field is one.
    """
    check_keys(values, [f.name for f in dataclasses.fields(owner) if f.init], where)
    _check_numbers(owner, values, where)
    return owner(**values)


def _check_numbers(owner: type[Any], values: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError where a field for a number or a boolean has a value of another type. A quoted number, as JSON
    and YAML make easy to write, would fail much later, and "false" would count as true."""
    try:
        hints = typing.get_type_hints(owner)
    except NameError:  # a plugin may import its types for type checkers only
        return
    for name, value in values.items():
        union = typing.get_origin(hints[name]) in (typing.Union, types.UnionType)
        kinds = set(typing.get_args(hints[name]) if union else [hints[name]])
        plain = kinds - {type(None)}
        if plain and plain <= {bool, int, float} and not _is_one_of(value, kinds):
            wanted = "True or False" if plain == {bool} else " or ".join(sorted(kind.__name__ for kind in plain))
            hint = " Write it without quotes." if isinstance(value, str) else ""
            raise ConfigError(f"{where}: {name} is {wanted}, got {value!r}.{hint}")


def _is_one_of(value: Any, kinds: Container[type]) -> bool:
    """Return whether a value is of one of the given types, as users understand bool, int and float: an int is also a
    float, and True is neither an int nor a float."""
    if value is None or isinstance(value, bool):
        return type(value) in kinds
    return (isinstance(value, numbers.Integral) and int in kinds) or (
        isinstance(value, numbers.Real) and float in kinds
    )


def check_keys(given: Iterable[str], known: Sequence[str], where: str) -> None:
    """Raise ConfigError where a given setting is not among the known ones, and name the nearest known one.

    Args:
        where: what holds the settings, for the message.
    """
    for key in given:
        if key not in known:
            hint = did_you_mean(key, known)
            raise ConfigError(f"{where} has no setting {key!r}.{hint} Settings: {', '.join(known) or 'none'}.")


@dataclass(frozen=True, slots=True)
class NoOptions:
    """The options of a component that has none."""
