"""The choice of a run's components, one for each slot (engine, weight sync, rollout and so on), with the reason for
each. The choice depends only on the settings and on what plugins offer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..config import AUTO, HybridConfig, NoOptions, build, check_keys
from ..errors import ComponentError, ConfigError
from .registry import Component, Registry, Slot

STOCK = "transformers"
"""The engine name with which TRL's own code generates."""

SINGLE = "single_turn"
"""The name of the rollout component that is used by default: it samples one completion per prompt. A run with tools
uses a component that runs conversations, if there is one."""

PLAYED = "rollout_func"
"""The reason that is shown when the run starts for a rollout component that was chosen because the trainer's
`rollout_func` needs it."""

PADDED = "padded"
"""The name of the scoring component with which TRL computes log-probs, as it does without this package."""

RESUMED = "as in the checkpoint"
"""The reason that is shown for a scoring that `auto` has taken over from the checkpoint that a run resumes from."""

REPLAYED = "as recorded"
"""The reason that is shown for a scoring that `auto` has taken over from the recording that a run replays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerArguments:
    """The part of TRL's own arguments that concerns generation.

    Attributes:
        use_vllm, vllm_mode: as the user set them in TRL.
        tools: whether the trainer was given tools or environments.
        rollout: name of the rollout component that the trainer's `rollout_func` needs; None where it names none.
        engine_options: TRL's `vllm_*` arguments under the names of the engine's options; values in HybridConfig take
            precedence.
        unscored: why only TRL can compute this trainer's log-probs; None where a scoring component can.
    """

    use_vllm: bool = False
    vllm_mode: str = "colocate"
    tools: bool = False
    rollout: str | None = None
    engine_options: Mapping[str, Any]
    unscored: str | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """A chosen component, its validated options, and why it was chosen."""

    component: Component
    options: Any
    why: str

    def __str__(self) -> str:
        return f"{self.component.slot}={self.component.name} ({self.why})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The components that were chosen for one run.

    Attributes:
        engine: the inference engine; None where TRL's own code generates.
        weights: the weight sync; None where the first of `paths` that works is used.
        rollout: turns prompts into completions; None where TRL's own code generates.
        scoring: computes log-probs for the trainer.
        paths: with `weights="auto"`, the weight syncs to try, in order.
        tools: whether the trainer has tools or environments.
        stock_reason: why TRL's own code generates, where it does.
        environment: the environment whose episodes are played; None where the user named none.
        algorithms: the algorithms, in the order in which they act.
        unscored: why only TRL can compute the trainer's log-probs; None where a scoring component can.
    """

    engine: Choice | None
    weights: Choice | None
    rollout: Choice | None
    scoring: Choice
    paths: Sequence[Choice] = ()
    tools: bool = False
    stock_reason: str = ""
    environment: Choice | None = None
    algorithms: Sequence[Choice] = ()
    unscored: str | None = None

    @property
    def stock(self) -> bool:
        """True where TRL's own code generates, without an engine of this package."""
        return self.engine is None

    @property
    def weight_paths(self) -> Sequence[Choice]:
        """The weight syncs that this run may use, in the order in which they are tried."""
        return self.paths if self.weights is None else [self.weights]


def select(config: HybridConfig, arguments: TrainerArguments, registry: Registry) -> Selection:
    """Choose the components of a run. A setting in HybridConfig takes precedence over TRL's arguments; without any
    setting, TRL itself generates.

    Raises:
        ConfigError: settings that contradict each other, or an unknown option.
        ComponentError: a component is missing, ambiguous, or cannot work here.
    """
    if config.replay is not None:  # whichever engine sampled the recording
        why, scoring = "HybridConfig.replay", _scoring(config, registry, None)
        return Selection(engine=None, weights=None, rollout=None, scoring=scoring, stock_reason=why)
    server = arguments.use_vllm and arguments.vllm_mode == "server"
    if config.engine is None:
        name = "vllm" if arguments.use_vllm and not server else STOCK
        why = "TRL's vllm_mode='server'" if server else "use_vllm=True" if name != STOCK else "default"
    else:
        name, why = config.engine, "HybridConfig.engine"
    if name == STOCK:
        if arguments.use_vllm and not server:
            raise ConfigError(
                "HybridConfig.engine='transformers' contradicts use_vllm=True. Remove one of the two: drop use_vllm "
                "for TRL's own generation, or drop the engine setting for the vllm engine."
            )
        _refuse_leftovers(config)
        if arguments.rollout is not None:
            raise ConfigError(
                f"The rollout_func plays on the rollout {arguments.rollout!r}, and TRL's own generation is in use. "
                "Choose an engine: HybridConfig(engine='vllm') or use_vllm=True."
            )
        scoring = _scoring(config, registry, None)
        return Selection(engine=None, weights=None, rollout=None, scoring=scoring, stock_reason=why)
    if server:
        raise ConfigError(
            f"HybridConfig.engine={name!r} contradicts vllm_mode='server': this package starts its own engines. Set "
            "vllm_mode='colocate', or leave HybridConfig.engine out to keep TRL's server path."
        )
    engine = _choice(registry, "engine", name, config.options("engine"), why, defaults=arguments.engine_options)
    weights, paths = None, _paths(registry, config.options("weights")) if config.weights == AUTO else ()
    if config.weights != AUTO:
        weights = _choice(registry, "weights", config.weights, config.options("weights"), "HybridConfig.weights")
    rollout = _rollout(config, arguments, registry, engine.component.streams)
    return Selection(
        engine=engine,
        weights=weights,
        rollout=rollout,
        scoring=_scoring(config, registry, arguments),
        paths=paths,
        tools=arguments.tools,
        unscored=arguments.unscored,
    )


def _paths(registry: Registry, options: Mapping[str, Any]) -> list[Choice]:
    """Return the weight syncs that `auto` tries, in order.

    Args:
        options: `HybridConfig.weights_options`; each weight sync gets only the options that it knows.

    Raises:
        ConfigError: no weight sync knows one of the options.
    """
    owners = {c: c.options or NoOptions for c in registry.components("weights") if not c.by_name}
    known = {c: {f.name for f in dataclasses.fields(owner)} for c, owner in owners.items()}
    check_keys(options, sorted(set().union(*known.values())), "HybridConfig.weights_options")
    given = {c: {k: v for k, v in options.items() if k in known[c]} for c in owners}
    return [Choice(c, owner(**given[c]), "auto") for c, owner in owners.items()]


def _rollout(config: HybridConfig, arguments: TrainerArguments, registry: Registry, streams: bool) -> Choice:
    """Choose the rollout component. The first of these rules that applies decides:

    1. The user has set `HybridConfig.rollout`: that component.
    2. The trainer's `rollout_func` names the component that it needs: that component.
    3. The trainer has tools, and an installed component runs conversations on this engine: that component.
    4. Otherwise `single_turn`.

    Args:
        streams: whether the engine takes requests one at a time.

    Raises:
        ComponentError: rule 3 applies to several components.
        ConfigError: the component needs an engine that takes requests one at a time, and this engine does not.
    """
    offered = registry.components("rollout")
    conversing = [c for c in offered if c.converses and not c.by_name and c.out_of_place() is None]
    served = [c for c in conversing if streams or "streams" not in c.needs]
    why = "default"
    if config.rollout is not None:
        name, why = config.rollout, "HybridConfig.rollout"
    elif arguments.rollout is not None:
        name, why = arguments.rollout, PLAYED
    elif not arguments.tools:
        name = SINGLE
    elif not conversing:
        name, why = SINGLE, "tools run turn by turn, as in TRL: `pip install trlx-hybrid-multiturn` frees them"
    elif not served:
        name, why = SINGLE, "tools run turn by turn, as in TRL: the engine takes no single requests"
    elif len(served) > 1:
        found = " and ".join(f"{c.name!r} (plugin {c.plugin!r})" for c in served)
        raise ComponentError(f"{found} both converse with tools. Choose with HybridConfig(rollout=...) or --rollout.")
    else:
        name, why = served[0].name, "tools"
    choice = _choice(registry, "rollout", name, config.options("rollout"), why)
    if "streams" in choice.component.needs and not streams:
        raise ConfigError(
            f"HybridConfig.rollout={name!r} needs an engine that takes requests one at a time, which this one does "
            f"not. Choose engine='vllm', or leave the rollout out: tools then run turn by turn, as in TRL."
        )
    return choice


def choose_environment(config: HybridConfig, registry: Registry) -> Choice | None:
    """Return the environment that the user named, or None. It is chosen first, because its arguments affect the other
    choices.

    Raises:
        ConfigError: an option is unknown.
        ComponentError: there is no such environment, or it cannot work here.
    """
    if config.environment is None:
        return None
    given = config.options("environment")
    return _choice(registry, "environment", config.environment, given, "HybridConfig.environment")


def choose_algorithms(config: HybridConfig, registry: Registry) -> list[Choice]:
    """Return the algorithms that the user named, in the order in which they are named.

    Raises:
        ConfigError: an option is unknown, an algorithm is named twice, or the user has set options of an algorithm that
            is not named.
        ComponentError: there is no such algorithm, or it cannot work here.
    """
    names, given = config.algorithm or [], config.options("algorithm")
    check_keys(given, names, "HybridConfig.algorithm_options, for those in HybridConfig.algorithm,")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"HybridConfig.algorithm names {twice!r} twice. Name it once.")
    return [_choice(registry, "algorithm", name, given.get(name, {}), "HybridConfig.algorithm") for name in names]


def _scoring(config: HybridConfig, registry: Registry, arguments: TrainerArguments | None) -> Choice:
    """Choose the scoring component, which computes log-probs: the component that the user has set. With `auto`, it is
    the first component that compares its log-probs with TRL's on a run's first rows (`Component.proves`). If there is
    none, or no engine of this package samples, or only TRL can score this trainer's rows, it is TRL's own scoring.

    Args:
        arguments: TRL's arguments; None where no engine of this package samples.
    """
    name, why, given = config.scoring, "HybridConfig.scoring", config.options("scoring")
    if name == AUTO:
        proving = (c for c in registry.components("scoring") if c.proves and not c.by_name and c.out_of_place() is None)
        found = next(proving, None)
        if arguments is None:
            name, why = PADDED, "default"
        elif arguments.unscored is not None:
            name, why = PADDED, arguments.unscored
        elif found is None:
            why = "default; `pip install trlx-hybrid-training` leaves out padding and what TRL computes twice"
            name = PADDED
        else:
            name, why = found.name, AUTO
    return _choice(registry, "scoring", name, given, why)


def continued(
    choice: Choice, earlier: Mapping[str, Any] | None, config: HybridConfig, registry: Registry, why: str
) -> Choice:
    """Return the scoring for a run that continues an earlier run from a checkpoint or a recording. If the user's
    setting is `auto`, it is the scoring of the earlier run. Options that the user did not set have the values of the
    earlier run, if both runs use the same scoring.

    Args:
        choice: the scoring that this run would take otherwise.
        earlier: the earlier run's scoring, as `described` returned it; None for a run that had no scoring of its own,
            or was made before that was stored.
        config: the user's settings.
        registry: the components to choose from.
        why: the reason to show: RESUMED or REPLAYED.

    Raises:
        ComponentError: the earlier run's scoring is not installed.
    """
    component, auto = choice.component, config.scoring == AUTO
    name = (PADDED if auto else component.name) if earlier is None else str(earlier["name"])
    if auto and name != component.name:
        component = registry.choose("scoring", name)
    elif name != component.name:
        return choice
    owner = component.options or NoOptions
    options = {**component.options_before, **(earlier["options"] if earlier is not None else {})}
    known = {f.name for f in dataclasses.fields(owner)}
    given = config.options("scoring")
    options = {key: value for key, value in options.items() if key in known} | given
    return Choice(component, build(owner, options, "HybridConfig.scoring_options"), why if auto else choice.why)


def described(choice: Choice) -> dict[str, Any]:
    """Return the name and the options of a chosen component for checkpoints and recordings."""
    options = {field.name: getattr(choice.options, field.name) for field in dataclasses.fields(choice.options)}
    return {"name": choice.component.name, "options": options}


def _choice(
    registry: Registry,
    slot: Slot,
    name: str,
    options: Mapping[str, Any],
    why: str,
    defaults: Mapping[str, Any] | None = None,
) -> Choice:
    """Return a slot's component with its validated options, as a `Choice`.

    Args:
        slot: the kind of component, such as "engine".
        name: the component's name.
        options: the user's options, all of which the component must know.
        why: the reason for the choice, which is printed when the run starts.
        defaults: options with lower priority; those that the component does not know are left out.

    Raises:
        ConfigError: an option is unknown.
        ComponentError: there is no such component, or it cannot work here.
    """
    component = registry.choose(slot, name)
    owner = component.options or NoOptions
    known = {f.name for f in dataclasses.fields(owner)}
    options = {k: v for k, v in (defaults or {}).items() if k in known} | dict(options)
    return Choice(component, build(owner, options, f"HybridConfig.{slot}_options for {slot} {component.name!r}"), why)


READ_ANYWAY = {
    *("engine", "scoring", "scoring_options", "environment", "environment_options", "algorithm", "algorithm_options"),
    *("record", "replay", "rollout_only", "plugin_options", "disable_plugins"),
}
"""Settings of HybridConfig that have an effect even where TRL's own code generates."""


def _refuse_leftovers(config: HybridConfig) -> None:
    """Refuse settings that have no effect where TRL's own code generates, instead of ignoring them silently.

    Raises:
        ConfigError: names the setting.
    """
    for field in dataclasses.fields(config):
        if field.name not in READ_ANYWAY and getattr(config, field.name) != field.default:
            raise ConfigError(
                f"HybridConfig.{field.name} is set, but TRL's own generation path is in use, which ignores it. "
                "Choose an engine (HybridConfig(engine='vllm') or use_vllm=True), or remove the setting."
            )
