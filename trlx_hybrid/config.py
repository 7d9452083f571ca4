"""What the user chooses: one flat dataclass that TrlParser understands, options checked by their owners."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from .errors import ConfigError, did_you_mean

T = TypeVar("T")

RESUME_VARIABLE = "TRLX_HYBRID_RESUME"
"""Set to 1 by `trlx-hybrid launch --restart N` from the second start on; not set at the first."""


@dataclass(kw_only=True)
class HybridConfig:
    """Which component fills each slot, beside TRL's own arguments.

    Everything may be left out: TRL's arguments then decide (`use_vllm=True` with `vllm_mode="colocate"` takes the
    `vllm` engine), and with nothing given training is stock TRL, bit for bit. Usable in code, as command-line flags
    and in YAML through `TrlParser((ScriptArguments, GRPOConfig, ModelConfig, HybridConfig))`.
    """

    engine: str | None = field(
        default=None,
        metadata={"help": "What generates: 'transformers' (TRL's own path), 'vllm', 'auto' or a plugin's name."},
    )
    engine_options: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Options of the engine, a mapping or its JSON."}
    )
    weights: str = field(
        default="auto",
        metadata={"help": "How weights reach the engine: 'auto' takes the cheapest exact path, or a path's name."},
    )
    weights_options: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Options of the weight sync, a mapping or its JSON; of whichever 'auto' takes."}
    )
    rollout: str | None = field(
        default=None, metadata={"help": "How prompts become trajectories: 'single_turn' or a plugin's name."}
    )
    rollout_options: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Options of the rollout, a mapping or its JSON."}
    )
    scoring: str | None = field(
        default=None,
        metadata={
            "help": "What computes the log-probs that the trainer learns from: 'padded' (TRL's own, the default) or a "
            "plugin's name. GRPO and RLOO."
        },
    )
    scoring_options: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Options of the scoring, a mapping or its JSON."}
    )
    plugin_options: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Options of plugins that are no component, a mapping by plugin's name or its JSON: "
            '\'{"trajectories": {"record": "trajectories.jsonl"}}\'.'
        },
    )
    offload: str = field(
        default="auto",
        metadata={
            "help": "What leaves the device while the engine samples: 'auto' lets optimizer state, gradients and "
            "weights of the policy's own leave for host memory as far as the KV cache needs their place, 'all' always, "
            "'none' never. Only with an engine that sleeps."
        },
    )
    verify_every: int = field(
        default=100,
        metadata={
            "help": "Compare every synced parameter bit for bit at the first and every N-th weight sync, and engine "
            "with policy log-probs; a sample of parameters is compared at each. 0 compares at the first only."
        },
    )
    max_logprob_gap: float | None = field(
        default=None,
        metadata={
            "help": "The run stops at the step at which the engine's log-prob of a sampled token is further from the "
            "trainer's than this, in nats. Compared wherever TRL computes both (GRPO's importance-sampling "
            "correction). By default 0.001 in float32, 0.1 in float16, 0.5 in bfloat16, 2 where the engine quantises. "
            "Up to 1% of a batch's tokens may be further apart in 16 bits, 10% with experts. 'inf' compares nothing."
        },
    )
    disable_plugins: list[str] | None = field(
        default=None, metadata={"help": "Plugins to leave out, besides those in TRLX_HYBRID_DISABLE."}
    )

    def __post_init__(self) -> None:
        for name in ("engine_options", "weights_options", "rollout_options", "scoring_options", "plugin_options"):
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
        for name, options in self.options("plugin").items():
            if not isinstance(options, Mapping):
                raise ConfigError(f"HybridConfig.plugin_options[{name!r}] must be a mapping, got {options!r:.60}.")
        if self.verify_every < 0:
            raise ConfigError(f"HybridConfig.verify_every must be 0 or more, got {self.verify_every}.")
        if self.max_logprob_gap is not None and not self.max_logprob_gap > 0:
            raise ConfigError(f"HybridConfig.max_logprob_gap must be more than 0 nats, got {self.max_logprob_gap}.")

    def options(self, slot: str) -> dict[str, Any]:
        """What the user set for the component of a slot; of "plugin", for plugins by name."""
        value = getattr(self, f"{slot}_options")
        return dict(value) if value is not None else {}

    def options_of(self, plugin: str) -> dict[str, Any]:
        """What the user set for a plugin beside its components, by the name of its entry point. Each plugin checks its
        own in `trlx_configure`, with `build`; settings of one that is not loaded are refused."""
        return dict(self.options("plugin").get(plugin, {}))

    @classmethod
    def coerce(cls, value: HybridConfig | Mapping[str, Any] | None) -> HybridConfig:
        """A config from what a user passes as `hybrid=`: a config, a mapping of its fields, or None."""
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(f"hybrid= takes a HybridConfig or a mapping of its fields, got {type(value).__name__}.")
        return build(cls, value, "HybridConfig")


def build(owner: type[T], values: Mapping[str, Any], where: str) -> T:
    """An instance of the dataclass `owner` from a user's mapping.

    Raises:
        ConfigError: a key the dataclass does not have, with the nearest one that it has.
    """
    check_keys(values, [f.name for f in dataclasses.fields(owner) if f.init], where)  # type: ignore[arg-type]
    return owner(**values)


def check_keys(given: Iterable[str], known: Sequence[str], where: str) -> None:
    """Refuse a setting that is not known, with the nearest one that is."""
    for key in given:
        if key not in known:
            hint = did_you_mean(key, known)
            raise ConfigError(f"{where} has no setting {key!r}.{hint} Settings: {', '.join(known) or 'none'}.")


@dataclass(frozen=True, slots=True)
class NoOptions:
    """Of a component that takes none."""
