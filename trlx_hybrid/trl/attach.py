"""Construction of a trainer: its arguments choose components before TRL's `__init__`; afterwards the session, the
callbacks and the run's state are attached to it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from transformers import TrainerCallback
from trl.distributed import DistributedBackend

from ..config import AUTO, HybridConfig
from ..contract.types import Sampling
from ..errors import ConfigError
from ..interprocess.ranks import Ranks
from ..plugins.host import Host, check_ranks_agree
from ..plugins.selection import (
    REPLAYED,
    Selection,
    TrainerArguments,
    choose_algorithms,
    choose_environment,
    continued,
    select,
)
from ..policy.first_step import FirstStep, refuse_idle
from ..policy.policy import Policy, transformers_model
from ..policy.positions import Positions
from ..routing import RouterReplay
from ..session import Session
from .arguments import (
    check_skipped,
    environment_arguments,
    refuse_checkpointing,
    refuse_empty,
    refuse_penalties,
    refuse_reserved,
    sampling_of,
    score_as_sampled,
    trainer_arguments,
)
from .borrowed import BORROWED, GENERATING, SCORED_BESIDE
from .checkpoint.checkpoints import Checkpoints
from .checkpoint.data_order import DataOrder
from .generation import tool_calling
from .generation.in_flight import BY_TOKEN_RATIO, InFlight, in_flight_of
from .generation.prompts import refuse_missing_prompts
from .generation.truncation_rule import BY_TOKEN, MASKS, rule_of
from .generation.vllm_generation import Generation
from .metrics.step_metrics import SessionMetrics, StepMetrics
from .refusals import DEFERRED, KEPT_IDS, OTHER_PROMPTS, ROUTER_REPLAY, SCORING, SCORING_COMPONENT, Facts, overriding
from .replay.recording import Recording, scored_by
from .replay.replay import Recorder, Replay
from .rewards import HOOK, refuse_missing_package, refuse_other_arguments
from .scoring import kept_ids
from .scoring.reference import reference_of_active, refuse_tied_token_rows
from .state import RunState
from .stock import StockTrainer

STOCK = select(HybridConfig(), TrainerArguments(engine_options={}), Host().registry)
"""The selection of components where the user chooses nothing: TRL does everything itself."""


@dataclass(slots=True, eq=False)
class Chosen:
    """The choices for a run, made before TRL's `__init__`.

    Attributes:
        config: the run's settings.
        host: holds the loaded plugins and calls their hooks.
        selection: the chosen components; STOCK before they are chosen.
        complete: whether the components are chosen.
        replayed: the recording that the run replays; None where it samples.
    """

    config: HybridConfig
    host: Host
    selection: Selection = STOCK
    complete: bool = False
    replayed: Recording | None = None

    @classmethod
    def of(cls, config: HybridConfig | Mapping[str, Any] | None, plugins: Sequence[object]) -> Chosen:
        """Return an object with a run's settings and its loaded plugins: the installed plugins and the given ones.
        `choose` adds the components later.

        Args:
            config: the run's settings, a mapping of them, or None for the defaults.
            plugins: objects with hook implementations.
        """
        coerced = HybridConfig.coerce(config)
        return cls(coerced, Host.load(coerced.disable_plugins or (), plugins))

    @property
    def facts(self) -> Mapping[str, Any] | None:
        """The facts that the replayed recording states of its own run, such as versions, model and settings; None where
        this run samples."""
        return None if self.replayed is None else self.replayed.facts or {}


# --- before TRL's `__init__` ------------------------------------------------------------------------------------------


def choose(trainer: StockTrainer, chosen: Chosen, given: Mapping[str, Any]) -> dict[str, Any]:
    """Choose the run's components before TRL's own `__init__` loads the model, so that a wrong setting fails first.

    Args:
        given: the arguments of TRL's `__init__`, by name.

    Returns:
        The arguments that the component named by `HybridConfig.environment` adds to `given`, such as datasets and
        reward functions.

    Raises:
        ConfigError: settings that contradict each other or do not fit this trainer.
    """
    config, registry, name = chosen.config, chosen.host.registry, type(trainer).__name__
    environment = choose_environment(config, registry)
    base = next(c for c in type(trainer).__mro__ if c in GENERATING)
    brought = environment_arguments(environment, given, base) if environment is not None else {}
    given = {**given, **brought}
    if config.replay is not None:
        chosen.replayed = Recording(config.replay)
        if chosen.replayed.facts is None:
            raise ConfigError(f"HybridConfig.replay: {config.replay} holds no recording (recording.json).")
    tools = given.get("tools") or given.get("environment_factory")
    unscored = SCORING_COMPONENT.refused(Facts(trainer))
    arguments = trainer_arguments(given.get("args"), tools, given.get("rollout_func"), config.options("rollout"))
    arguments = replace(arguments, unscored=unscored)
    algorithms = choose_algorithms(config, registry)
    if algorithms and trainer._base_name != "GRPO":
        raise ConfigError(
            f"HybridConfig.algorithm={algorithms[0].component.name!r} cannot serve {name}: only GRPOTrainer leaves "
            "rows out and takes other advantages. Leave it out."
        )
    selection = replace(select(config, arguments, registry), environment=environment, algorithms=algorithms)
    if chosen.facts is not None and unscored is None:
        scoring = continued(selection.scoring, scored_by(chosen.facts), config, registry, REPLAYED)
        selection = replace(selection, scoring=scoring)
    chosen.selection, chosen.complete = selection, True
    if unscored is not None and config.scoring != AUTO:
        way_out = SCORING_COMPONENT.way_out
        raise ConfigError(f"HybridConfig.scoring={config.scoring!r} cannot serve {name}: {unscored}. {way_out}")
    if not selection.stock:
        _refuse(trainer, given)
    return brought


def _refuse(trainer: StockTrainer, given: Mapping[str, Any]) -> None:
    """Refuse arguments of TRL's `__init__` with which a run with an engine of this package would fail later
    (ConfigError or RewardError), and set the temperature that the trainer scores at to the one that the engine samples
    at."""
    args, dataset, custom = given.get("args"), given.get("train_dataset"), given.get("rollout_func")
    refuse_empty(dataset)
    refuse_reserved(getattr(args, "generation_kwargs", None))
    refuse_checkpointing(getattr(args, "gradient_checkpointing_kwargs", None))
    if args is not None and trainer._base_name in SCORING:
        score_as_sampled(args)
        refuse_penalties(sampling_of(args, trainer._base_name), args)
    refuse_missing_package(given.get("reward_funcs"))
    refuse_other_arguments(given.get("reward_funcs"), dataset, custom is not None)
    refuse_missing_prompts(dataset, "train_dataset")


def building(chosen: Chosen, given: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Return the context in which TRL's `__init__` must run with the arguments `given`: TRL then builds its reference
    model from all active adapters of a PEFT model, not from one."""
    return nullcontext() if chosen.selection.stock else reference_of_active(given.get("model"), given.get("args"))


# --- after TRL's `__init__` -------------------------------------------------------------------------------------------


def attach(trainer: StockTrainer, chosen: Chosen, starts: Callable[[int], None]) -> RunState:
    """Create the session once TRL has built the trainer, and connect both: check the settings that need the model, add
    the callbacks, and put this package's engine in place of TRL's. Collective.

    Args:
        starts: called with the number of finished optimizer steps when training starts.
    """
    session, left_out_by = _session(trainer, chosen)
    trainer.session = session
    weakref.finalize(trainer, session.close).atexit = False  # at exit, the session closes itself
    config, selection = chosen.config, chosen.selection
    if hasattr(trainer, "reward_funcs") and chosen.replayed is None:
        session.advantages_plugin = chosen.host.only(HOOK)
        _check_algorithms(trainer, config)
    if getattr(trainer, "_is_vlm", False) and not selection.stock:
        tool_calling.skip_absent_images(session.policy.base)
    if trainer._base_name in SCORING:
        session.scores_apart = DEFERRED.refused(Facts(trainer))
    if config.router_replay:
        _replay_routers(trainer, chosen)
    sampled = bool((chosen.facts or {}).get("sampler"))
    if not selection.stock or config.scoring != AUTO or sampled:
        others = (getattr(trainer, name, None) for name in SCORED_BESIDE)
        models = (session.policy.base, *(transformers_model(model) for model in others if model is not None))
        session.positions = Positions(models)
    steps = None
    ours = not selection.stock or config.scoring != AUTO or chosen.replayed is not None
    if ours and session.policy.device.type in ("cpu", "cuda"):
        steps = StepMetrics(session, weakly(trainer), flops=trainer._base_name in SCORING)
        trainer.add_callback(steps)  # first, so that it times the optimizer's step alone
    trainer.add_callback(SessionCallback(session, starts))
    if not selection.stock:
        _put_engine(trainer, session)
    if config.rollout_only:
        session.notes.append("rollout_only: batches are sampled and scored, and nothing is trained")
    in_flight = _rows_in_flight(trainer, session, chosen)  # before a replay compares the settings
    return RunState(
        session=session,
        checkpoints=Checkpoints(session),
        order=DataOrder(session),
        metrics=SessionMetrics(session),
        recorder=None if config.record is None else Recorder(session, config.record),
        replay=None if chosen.replayed is None else Replay(trainer, chosen.replayed),
        step_metrics=steps,
        in_flight=in_flight,
        left_out_by=left_out_by,
        borrowed=BORROWED,
    )


def weakly(trainer: StockTrainer) -> Callable[[], Any]:
    """Return a function that returns the trainer from a weak reference, for objects that the trainer holds and that
    must not keep it alive."""
    return weakref.ref(trainer)


def _session(trainer: StockTrainer, chosen: Chosen) -> tuple[Session, str | None]:
    """Create the session of a trainer.

    Returns:
        The session; and the sampling setting that leaves ids out, such as "top_k", if log-probs are computed over only
        those ids that it keeps, else None.
    """
    args, ranks = trainer.args, Ranks(trainer.accelerator)
    check_ranks_agree(ranks.gather(chosen.host.plugins))
    this, backend = weakly(trainer), DistributedBackend(trainer.accelerator)
    policy = Policy(
        lambda: this().model,
        trainer.processing_class,
        trainer.accelerator.device,
        fsdp_version=backend.fsdp_version,
        gather=backend.gather_params,
    )
    if trainer._base_name in SCORING:
        refuse_tied_token_rows(policy)
    sampling = sampling_of(args, trainer._base_name)
    over, left_out_by, note = _kept_ids(trainer, chosen, sampling)
    session = Session(
        chosen.host,
        chosen.config,
        chosen.selection,
        args=args,
        sampling=sampling,
        policy=policy,
        ranks=ranks,
        step=lambda: this().state.global_step,
        over_support=over,
        optimizer=lambda: this().optimizer,
    )
    session.notes += filter(None, [note])
    return session, left_out_by


def _kept_ids(trainer: StockTrainer, chosen: Chosen, sampling: Sampling) -> tuple[bool, str | None, str | None]:
    """Decide whether this run computes a token's log-prob over the ids that the engine could sample (after top-k, top-p
    and the like) instead of the whole vocabulary.

    Returns:
        Whether it does; the sampling setting that leaves ids out, if it does, else None; and a line to print when the
        run starts, or None. The line says what this costs in memory, or why it is impossible although the sampling
        leaves ids out.

    Raises:
        ConfigError: the replayed recording was scored in this way, and this run cannot be.
    """
    selection, replays = chosen.selection, chosen.replayed is not None
    corrected = getattr(trainer, "vllm_importance_sampling_correction", False)
    recorded = bool((chosen.facts or {}).get(kept_ids.FACT))
    if trainer._base_name != "GRPO" or not corrected or (replays and not recorded) or (selection.stock and not replays):
        return False, None, None
    setting, reason = sampling.truncated_by(), KEPT_IDS.refused(Facts.of(trainer, selection, recorded))
    if setting is None:
        return reason is None, None, None
    if reason is None:
        size = trainer.args.generation_batch_size // trainer.accelerator.num_processes
        vocabulary = trainer.model.config.get_text_config().vocab_size
        return True, setting, kept_ids.forecast(sampling, size, vocabulary)
    if recorded:
        raise ConfigError(f"The recording was scored over the ids that {setting} kept, and {reason}. Leave it out.")
    told = f"{setting} leaves ids out, and {reason}: long completions will count for almost nothing"
    return False, None, f"importance sampling: {told}. {kept_ids.WAY_OUT}"


def _check_algorithms(trainer: StockTrainer, config: HybridConfig) -> None:
    """Refuse an algorithm that computes advantages, if a plugin or the user's trainer class may change them too. Refuse
    an algorithm that chooses the prompts to sample, if this run can take them from TRL's data loader only.

    Raises:
        ConfigError: names the algorithm, what conflicts with it, and the way out.
    """
    algorithms, plugin = trainer.session.algorithms, trainer.session.advantages_plugin
    named = algorithms.advantages_by
    if named is not None and plugin is not None:
        raise ConfigError(
            f"HybridConfig.algorithm={named!r} and plugin {plugin.name!r} ({plugin.distribution}) "
            "both have advantages of their own. Leave the one out, or disable the other: "
            f"disable_plugins=[{plugin.name!r}]."
        )
    own = overriding(trainer, "_generate_and_score_completions") if named is not None else None
    if own is not None:
        raise ConfigError(
            f"HybridConfig.algorithm={named!r} has advantages of its own, and {own} may change which "
            "rows they are of. Leave it out."
        )
    reason = OTHER_PROMPTS.refused(Facts(trainer)) if algorithms.filters or algorithms.draws else None
    if reason is not None:
        names = ", ".join(config.algorithm or ())
        raise ConfigError(f"HybridConfig.algorithm ({names}) cannot sample other prompts: {reason}.")


def _replay_routers(trainer: StockTrainer, chosen: Chosen) -> None:
    """Make the MoE routers of the policy use the experts that the engine chose. Raise ConfigError where this run
    cannot."""
    reason = ROUTER_REPLAY.refused(Facts.of(trainer, chosen.selection, chosen.replayed is not None))
    if reason is not None:
        raise ConfigError(f"HybridConfig.router_replay cannot serve this run: {reason}. {ROUTER_REPLAY.way_out}")
    trainer.session.router_replay = RouterReplay(trainer.session.policy.base)


def _rows_in_flight(trainer: StockTrainer, session: Session, chosen: Chosen) -> InFlight | None:
    """Return the rows in flight of the run, or None. TRL's default correction masks whole sequences by the product of
    their tokens' ratios, which is far from 1 where the weights have changed; so it becomes one by token, also in a
    replay of rows that were in flight, which has no rows in flight itself.

    Source: AReaL (arXiv:2505.24298, section 5.2), the decoupled objective.
    """
    found, args = in_flight_of(trainer, session), trainer.args
    replays = chosen.replayed is not None and trainer._base_name == "GRPO"
    if found is None and not (replays and session.config.options("rollout").get("max_staleness")):
        return None
    session.notes.append("a replay of rows in flight" if found is None else found.note)
    default = type(args).__dataclass_fields__["vllm_importance_sampling_mode"].default
    if trainer.vllm_importance_sampling_mode == default:
        args.vllm_importance_sampling_mode = trainer.vllm_importance_sampling_mode = BY_TOKEN_RATIO
        session.notes[-1] += f"; vllm_importance_sampling_mode={BY_TOKEN_RATIO!r}, not {default!r}"
    return found


def _put_engine(trainer: StockTrainer, session: Session) -> None:
    """Put the session's engine where TRL looks for its own (`vllm_generation`), and set TRL's arguments to say so."""
    args = trainer.args
    check_skipped(args)
    args.use_vllm, args.vllm_mode = True, "colocate"  # so that checkpoints record what ran
    trainer.vllm_mode = "colocate"
    trainer.vllm_generation = Generation(session)
    trainer._last_loaded_step = -1
    if getattr(args, MASKS, False) and rule_of(trainer) == BY_TOKEN:
        session.notes.append(f"truncated completions: {BY_TOKEN}, for the rollout_func does not say")


def forget_evaluation(trainer: StockTrainer) -> None:
    """Make accelerate prepare the model for training even if an evaluation has prepared it before. The evaluation
    leaves out DDP, and without DDP each rank would train on its own.

    Raises:
        ConfigError: the evaluation made a DeepSpeed engine without an optimizer.
    """
    if trainer.model_wrapped is trainer.model and trainer.accelerator.distributed_type.startswith("MULTI_"):
        trainer.model._is_accelerate_prepared = False
    if trainer.is_deepspeed_enabled and trainer.deepspeed is not None and trainer.optimizer is None:
        raise ConfigError(
            "evaluate() before train() has made a DeepSpeed engine without an optimizer, which transformers would "
            "go on with. Set eval_on_start=True instead: it evaluates before the first step."
        )


class SessionCallback(TrainerCallback):  # type: ignore[misc]
    """A callback that tells the session when training starts, steps and logs.

    Args:
        starts: called with the number of finished optimizer steps when training starts, before the session is opened.
    """

    def __init__(self, session: Session, starts: Callable[[int], None]) -> None:
        self._session, self._starts = session, starts
        self._first: FirstStep | None = None

    def on_train_begin(self, args: Any, state: Any, *others: Any, **kwargs: Any) -> None:
        """Open the session, which starts the engine: by now the model is prepared and sharded, and its checkpoint is
        loaded."""
        session = self._session
        trains = not session.config.rollout_only
        if trains:
            refuse_idle(session.policy, kwargs["optimizer"])
        self._starts(state.global_step)
        session.open()
        followed = trains and not session.selection.stock
        self._first = FirstStep(session.policy, session.ranks) if followed else None

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Record the weights before each of the first steps, so that `on_optimizer_step` can check that they
        changed."""
        if self._first is not None:
            self._first.begins(kwargs["optimizer"])

    def on_log(self, *args: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Pass the log line to the plugins' hook `trlx_log`."""
        self._session.host.call("trlx_log", session=self._session, metrics=dict(logs or {}))

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Increase the weight version, so that the next rollout begins with a weight sync, and check that the first
        steps changed some weights."""
        if not self._session.config.rollout_only:
            self._session.versions.changed()
        if self._first is not None:
            self._first.ended(self._session.step, kwargs["optimizer"])
