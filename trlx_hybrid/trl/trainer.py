"""The trainers, as subclasses of TRL 1.16's: the only file that imports trl.

TRL's generating trainers reach vLLM through two methods of `self.vllm_generation`, guarded by `self.use_vllm`. The
subclass makes `use_vllm` a property that is False until our engine is chosen and TRL's `__init__` is over, so TRL
builds no engine of its own. From then on, TRL's own code generates through our engine. The only thing that is patched
is the function of TRL's head, while tokens are scored over a part of the vocabulary (kept_log_probs.py).

TRL must keep the following, which tests/test_trl_internals.py checks: `_generate(prompts)` is one rollout,
`_calculate_rewards` returns gathered rewards (world * B, functions), `_generate_and_score_completions` returns the
batch, and `_metrics` is the log. scoring.py lists what the code relies on for log-probs.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from numbers import Number
from typing import Any, NamedTuple

import trl
import trl.rewards
import trl.trainer.utils
from transformers import TrainerCallback
from trl.chat_template_utils import add_response_schema, get_training_chat_template, parse_response
from trl.distributed import DistributedBackend
from trl.extras.profiling import profiling_context
from trl.models.utils import disable_gradient_checkpointing

from .. import routing
from ..config import HybridConfig
from ..episodes.unparsed import UnparsedTurns
from ..errors import ConfigError, PluginError
from ..interprocess.copies import copied
from ..interprocess.ranks import Ranks
from ..plugins.host import Host, check_ranks_agree
from ..plugins.selection import TrainerArguments, choose_algorithms, choose_environment, select
from ..policy.adapters import adapters_kept
from ..policy.first_step import FirstStep, refuse_idle
from ..policy.policy import Policy, transformers_model
from ..policy.positions import Positions
from ..policy.precision import autocast_dtype
from ..session import Session
from . import resampling, tool_calling, trl_rewards
from .arguments import (
    check_skipped,
    environment_arguments,
    refuse_empty,
    refuse_penalties,
    refuse_reserved,
    sampling_of,
    score_as_sampled,
    selecting,
    suggesting,
    trainer_arguments,
)
from .checkpoint import Checkpointing
from .data_order import Ordered
from .early_rewards import begun_early
from .generation import Generation, trajectories_of
from .prompts import refuse_missing_prompts, reset_that_failed
from .recording import Recording
from .reference import check_reference, reference_of_active, refuse_tied_token_rows
from .replay import Replayed
from .rewards import (
    HOOK,
    checking,
    refuse_missing_package,
    refuse_other_arguments,
    replaced,
    tabulate,
    without_masked,
)
from .scoring import SCORER, Scored, overriding, scores_apart
from .step_metrics import Metered, StepMetrics
from .truncation import BY_TOKEN, MASKS, Truncation, by_last_token, correct_metrics, rule_of, truncated_rows

GENERATING = (trl.GRPOTrainer, trl.RLOOTrainer, trl.DistillationTrainer)
SCORING = ("GRPO", "RLOO")
"""The trainers among GENERATING, by their `_name`, that train on log-probs of single tokens."""

SCORED_BESIDE = ("ref_model", "teacher_model")
"""Attributes of TRL's trainers that hold other models that score the same rows as the policy."""

OWN_ENGINE = {"SDPOTrainer", "SDFTTrainer", "GOLDTrainer", "IWOPDTrainer"}
"""Experimental trainers of TRL that build a VLLMGeneration of their own, which this package cannot replace."""


@functools.cache
def hybrid(trainer_class: type[Any]) -> type[Any]:
    """Return a subclass of `trainer_class` that samples with the engine and other components that plugins offer, and
    otherwise behaves like `trainer_class`.

    The class takes two more keyword arguments: `hybrid`, a HybridConfig (or mapping of its fields), and `plugins`,
    objects with hook implementations to register beside the installed ones.

    Args:
        trainer_class: GRPOTrainer, RLOOTrainer or DistillationTrainer of TRL, or a subclass of one.

    Raises:
        ConfigError: the class does not generate, or builds an engine of its own.
    """
    if issubclass(trainer_class, HybridTrainer):
        return trainer_class
    if any(base.__name__ in OWN_ENGINE for base in trainer_class.__mro__):
        raise ConfigError(
            f"{trainer_class.__name__} builds a vLLM of its own, which cannot be replaced without patching TRL. "
            "Use it from TRL directly; GRPOTrainer, RLOOTrainer and DistillationTrainer are supported."
        )
    if not issubclass(trainer_class, GENERATING):
        raise ConfigError(
            f"{trainer_class.__name__} does not generate as TRL's GRPO trainer does, so there is nothing to extend. "
            "Supported: GRPOTrainer, RLOOTrainer, DistillationTrainer, and their subclasses."
        )
    base: Any = next(c for c in trainer_class.__mro__ if c in GENERATING)
    below = selecting(base)
    bases = (HybridTrainer, below) if trainer_class is base else (HybridTrainer, trainer_class, below)
    namespace = {"__module__": __name__, "__doc__": trainer_class.__doc__, "__qualname__": trainer_class.__name__}
    namespace["_base_name"] = base._name
    return type(trainer_class.__name__, bases, namespace)


class HybridTrainer(Metered, Scored, Replayed, Checkpointing, Ordered, Truncation):
    """The base class that `hybrid` puts before a TRL trainer in the method resolution order.

    An instance made without `__init__`, as TRL's tests of single methods make it, behaves as TRL's own.

    Attributes:
        session: the live objects of this run.
    """

    session: Session
    _trl = trl.trainer.utils
    _rolls_out = False  # a batch is being sampled and scored
    _in_rounds = False  # a batch is being sampled in rounds
    _sampled_before = False
    _known_rewards: Any = None  # rewards of a batch sampled in rounds, until TRL asks for them
    _logged: dict[str, Any]  # values of `session.metrics` that TRL has, by name
    _to_log: dict[str, Any]  # the `session.metrics` of the trainer's last rollout
    _row_numbers: Any = None  # dataset rows of the batch's groups, if an algorithm chose them
    _groups: Any = None  # the batch's groups, with the rewards that are trained on
    _base_name: str  # `_name` of TRL's trainer; a user's class may have a `_name` of its own, for model cards
    _selection = select(HybridConfig(), TrainerArguments(engine_options={}), Host().registry)

    def __init__(
        self,
        *args: Any,
        hybrid: HybridConfig | Mapping[str, Any] | None = None,
        plugins: Sequence[object] = (),
        **kwargs: Any,
    ) -> None:
        self._config = HybridConfig.coerce(hybrid)
        self._host = Host.load(self._config.disable_plugins or (), plugins)
        super().__init__(*args, **kwargs)
        self._attach()

    def _select(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Choose the run's components before TRL's own `__init__` loads the model, so that a wrong setting fails first.
        The choice is stored as `_selection`.

        Args:
            given: the arguments of TRL's `__init__`, by name.

        Returns:
            The arguments that the component named by `HybridConfig.environment` adds to `given`, such as datasets and
            reward functions.

        Raises:
            ConfigError: settings that contradict each other or do not fit this trainer.
        """
        environment = choose_environment(self._config, self._host.registry)
        base = next(c for c in type(self).__mro__ if c in GENERATING)
        brought = environment_arguments(environment, given, base) if environment is not None else {}
        given = {**given, **brought}
        if self._config.replay is not None:
            self._replay = Recording(self._config.replay)
            if self._replay.facts is None:
                raise ConfigError(f"HybridConfig.replay: {self._config.replay} holds no recording (recording.json).")
        tools = given.get("tools") or given.get("environment_factory")
        arguments = trainer_arguments(given.get("args"), tools, given.get("rollout_func"))
        algorithms = choose_algorithms(self._config, self._host.registry)
        if algorithms and self._base_name != "GRPO":
            raise ConfigError(
                f"HybridConfig.algorithm={algorithms[0].component.name!r} cannot serve {type(self).__name__}: only "
                "GRPOTrainer leaves rows out and takes other advantages. Leave it out."
            )
        selection = select(self._config, arguments, self._host.registry)
        self._selection = replace(selection, environment=environment, algorithms=algorithms)
        if self._config.scoring is not None:
            own = overriding(self, (SCORER,))
            if own is not None or self._base_name not in SCORING:
                raise ConfigError(
                    f"HybridConfig.scoring={self._config.scoring!r} cannot serve {type(self).__name__}: "
                    f"{f'{own} computes its log-probs' if own else 'it is none of ' + ' and '.join(SCORING)}. "
                    "Leave it out."
                )
        if not self._selection.stock:
            refuse_empty(given.get("train_dataset"))
            refuse_reserved(getattr(given.get("args"), "generation_kwargs", None))
            self._check_sampling(given.get("args"))
            refuse_missing_package(given.get("reward_funcs"))
            refuse_other_arguments(
                given.get("reward_funcs"), given.get("train_dataset"), given.get("rollout_func") is not None
            )
            refuse_missing_prompts(given.get("train_dataset"), "train_dataset")
        return brought

    def _referring(self, given: Mapping[str, Any]) -> Any:
        """Return the context in which TRL's `__init__` must run with the arguments `given`: TRL then builds its
        reference model from all active adapters of a PEFT model, not from one."""
        return nullcontext() if self._selection.stock else reference_of_active(given.get("model"), given.get("args"))

    @property
    def _refers(self) -> bool:
        """True where TRL scores rows with a reference model that is no separate model, but the policy with other
        adapters or with none."""
        trainer: Any = self
        without = getattr(trainer, "ref_model", None) is None and getattr(trainer, "beta", 0) != 0
        return not self._selection.stock and without and trainer._base_name in SCORING

    def _adapters_kept(self) -> Any:
        """Return a context that restores the policy's active adapters at its end, for a rollout in which TRL switches
        them to score the reference."""
        if not self._refers:
            return nullcontext()
        policy = self.session.policy
        policy.look()
        return adapters_kept(policy.module, policy.modules)

    def _starts(self, step: int) -> None:
        """Handle the start of training: before the engine starts, check that a fresh run's reference equals its
        policy."""
        super()._starts(step)
        trainer: Any = self
        session = self.session
        if step == 0 and session.weight_version == 0 and self._refers and not session.config.rollout_only:
            check_reference(session.policy, session.ranks, autocast_dtype(trainer.args))

    def _check_sampling(self, args: Any) -> None:
        """Set the trainer's temperature to the one that the engine samples at, and refuse sampling settings whose
        probabilities the trainer cannot compute. Runs before TRL reads the temperature.

        Args:
            args: TRL's config.
        """
        if args is not None and self._base_name in SCORING:
            score_as_sampled(args)
            refuse_penalties(sampling_of(args, self._base_name), args)

    def _attach(self) -> None:
        """Create the session once TRL has built the trainer, and connect both: check the settings that need the model,
        add the callbacks, and put this package's engine in place of TRL's."""
        trainer: Any = self
        args, selection, host = trainer.args, self._selection, self._host
        ranks = Ranks(trainer.accelerator)
        check_ranks_agree(ranks.gather(host.plugins))
        this: Callable[[], Any] = weakref.ref(trainer)  # the session must not keep its trainer alive
        backend = DistributedBackend(trainer.accelerator)
        policy = Policy(
            lambda: this().model,
            trainer.processing_class,
            trainer.accelerator.device,
            fsdp_version=backend.fsdp_version,
            gather=backend.gather_params,
        )
        if trainer._base_name in SCORING:
            refuse_tied_token_rows(policy)
        over_support, note = self._scores_over_support(sampling := sampling_of(args, trainer._base_name))
        self.session = Session(
            host,
            self._config,
            selection,
            args=args,
            sampling=sampling,
            policy=policy,
            ranks=ranks,
            step=lambda: this().state.global_step,
            over_support=over_support,
            optimizer=lambda: this().optimizer,
        )
        self._logged, self._to_log = {}, self.session.metrics
        self.session.notes += filter(None, [note])
        if hasattr(trainer, "reward_funcs") and self._replay is None:
            self.session.advantages_plugin = host.only(HOOK)
            self._check_algorithms()
        if getattr(trainer, "_is_vlm", False) and not selection.stock:
            tool_calling.skip_absent_images(policy.base)
        if trainer._base_name in SCORING:
            self.session.scores_apart = scores_apart(trainer, self.session.advantages_plugin)
        if self._config.router_replay:
            self._replay_routers()
        sampled = self._replay is not None and bool((self._replay.facts or {})["sampler"])
        if not selection.stock or self._config.scoring is not None or sampled:
            others = (getattr(trainer, name, None) for name in SCORED_BESIDE)
            models = (policy.base, *(transformers_model(model) for model in others if model is not None))
            self.session.positions = Positions(models)
        weakref.finalize(trainer, self.session.close).atexit = False  # at exit, the session closes itself
        ours = not selection.stock or self._config.scoring is not None or self._replay is not None
        if ours and policy.device.type in ("cpu", "cuda"):
            self._steps = StepMetrics(self.session, this, flops=trainer._base_name in SCORING)
            trainer.add_callback(self._steps)  # first, so that it times the optimizer's step alone
        trainer.add_callback(SessionCallback(self.session, lambda step: this()._starts(step)))
        if not selection.stock:
            check_skipped(args)
            args.use_vllm, args.vllm_mode = True, "colocate"  # so that checkpoints record what ran
            trainer.vllm_mode = "colocate"
            trainer.vllm_generation = Generation(self.session)
            trainer._last_loaded_step = -1
            if getattr(args, MASKS, False) and rule_of(self) == BY_TOKEN:
                self.session.notes.append(f"truncated completions: {BY_TOKEN}, for the rollout_func does not say")
        self._attach_recording()

    def _check_algorithms(self) -> None:
        algorithms, plugin = self.session.algorithms, self.session.advantages_plugin
        named = algorithms.advantages_by
        if named is not None and plugin is not None:
            raise ConfigError(
                f"HybridConfig.algorithm={named!r} and plugin {plugin.name!r} ({plugin.distribution}) "
                "both have advantages of their own. Leave the one out, or disable the other: "
                f"disable_plugins=[{plugin.name!r}]."
            )
        own = overriding(self, ("_generate_and_score_completions",)) if named is not None else None
        if own is not None:
            raise ConfigError(
                f"HybridConfig.algorithm={named!r} has advantages of its own, and {own} may change which "
                "rows they are of. Leave it out."
            )
        reason = resampling.refuses(self) if algorithms.filters or algorithms.draws else None
        if reason is not None:
            names = ", ".join(self._config.algorithm or ())
            raise ConfigError(f"HybridConfig.algorithm ({names}) cannot sample other prompts: {reason}.")

    def _replay_routers(self) -> None:
        session, own = self.session, overriding(self, (SCORER,))
        engine = session.selection.engine.component if session.selection.engine is not None else None
        replays = session.config.replay is not None
        refused = routing.refuses(self, session.policy, engine, SCORING, replays)
        if reason := f"{own} computes its log-probs" if own else refused:
            raise ConfigError(f"HybridConfig.router_replay cannot serve this run: {reason}. Leave it out.")
        session.router_replay = routing.RouterReplay(session.policy.base)

    @property
    def use_vllm(self) -> bool:
        """True where an engine generates, rather than transformers. If the engine is this package's, it is False while
        TRL's `__init__` runs, so that TRL builds none. In a replay, it says whether an engine generated when the run
        was recorded, since TRL's loss corrects for the engine."""
        if self._replay is not None:
            return self._attached and bool((self._replay.facts or {})["sampler"])
        return self._trl_use_vllm if self._selection.stock else self._attached

    @use_vllm.setter
    def use_vllm(self, value: bool) -> None:
        if "_config" in self.__dict__ and "_selection" not in self.__dict__:
            self._select({})
            if value or not self._selection.stock or self._selection.environment is not None:
                name = type(self).__name__
                raise ConfigError(
                    f"{name}, or a class below it, calls the `__init__` of TRL's trainer by that class's name, past "
                    "ours, so TRL would generate by itself whatever was chosen. Call `super().__init__(...)` there."
                )
        self._trl_use_vllm = value

    @property
    def _attached(self) -> bool:
        """True once `__init__` has finished and the session exists."""
        return "session" in self.__dict__

    # --- one rollout ------------------------------------------------------------------------------------------------

    def _generate(self, prompts: list[Any]) -> Any:
        if not self._attached:
            return super()._generate(prompts)  # type: ignore[misc]
        self._generating = True
        try:
            return self._sampled(prompts)
        finally:
            self._generating = False

    def _sampled(self, prompts: list[Any]) -> Any:
        """Sample the completions of `prompts` and return the result in the form of TRL's `_generate`. If algorithms
        filter groups (dynamic sampling), sample in several rounds."""
        if self._learns and self._rolls_out and self.session.algorithms.filters:
            self._in_rounds = True
            try:
                self._generated = resampling.resampled(self, prompts, self._one_round)
            finally:
                self._in_rounds = False
        else:
            self._one_round(prompts)
        if self._base_name == "GRPO":
            tool_calling.check_images(self, self._generated)
            if self._rolls_out:
                tool_calling.show_images(self, self._generated)
        return self._hands_on(self._generated) if self._rolls_out else self._generated

    @property
    def _learns(self) -> bool:
        """True where the rows that are sampled now will be trained on; False in an evaluation."""
        return bool(self.model.training)  # type: ignore[attr-defined]

    def _one_round(self, prompts: list[Any]) -> Any:
        trainer: Any = self
        if not self._selection.stock and getattr(trainer, "tools", None):
            tool_calling.refuse_text(prompts)
        self._conversations: Any = None
        phase = self.session.rollout_phase(trainer.model.training)
        with self._part("rollout"), phase, tool_calling.forgiving(self), begun_early(self, parse_response, prompts):
            self._generated = tool_calling.with_images(self, super()._generate(prompts))  # type: ignore[misc]
        self._note_truncated()
        self._note_supports(self._generated)
        if not self._sampled_before and not self._selection.stock and self.session.ranks.rank == 0:
            functions, tools = getattr(trainer, "reward_funcs", ()), bool(getattr(trainer, "tools", None))
            trl_rewards.warn(functions, self._generated[0], trainer.processing_class, parse_response, tools)
        self._sampled_before = True
        return self._generated

    def _note_truncated(self) -> None:
        """Store which rows of the rollout were cut at their length limit, and correct TRL's metrics of truncated rows.
        Collective."""
        if not hasattr(self, "eos_token_ids"):
            return
        prompt_ids, ids, *rest = self._generated
        self._truncated = truncated_rows(self, prompt_ids, ids)
        if not self._selection.stock:
            mask = rest[0] if self._base_name != "RLOO" else None
            lengths = [len(row) for row in ids] if mask is None else [sum(row) for row in mask]
            correct_metrics(self, lengths, by_last_token(self, ids), self._truncated)

    @functools.cached_property
    def _unparsed(self) -> UnparsedTurns:
        """A counter of the assistant turns that could not be parsed, among the turns that TRL itself parses."""
        return UnparsedTurns()

    @property
    def _converses(self) -> bool:
        """True where this package's rollout component runs conversations with tools, instead of TRL's tool loop."""
        rollout = self.session.rollout if self._attached else None
        return rollout is not None and rollout.converses and bool(getattr(self, "tools", None))

    def _generate_single_turn(
        self, prompt_ids: Any, images: Any, multimodal_fields: Any, *rest: Any, **kwargs: Any
    ) -> Any:
        """Sample the first turn of each row. Where the rollout component runs conversations with tools, it samples all
        further turns too, and they are stored for `_tool_call_loop`."""
        if not self._converses:
            stock = super()._generate_single_turn  # type: ignore[misc]
            return stock(prompt_ids, images, multimodal_fields, *rest, **kwargs)
        num_generations = rest[0] if rest else kwargs.get("num_generations", 1)
        self._conversations = self._converse(prompt_ids, images, None, num_generations)
        return tool_calling.first_turns(self, self._conversations)

    def _tool_call_loop(self, prompts: Any, prompt_ids: Any, completion_ids: Any, completions: Any, *rest: Any) -> Any:
        if not self._converses:
            stock = super()._tool_call_loop  # type: ignore[misc]
            return stock(prompts, prompt_ids, completion_ids, completions, *rest)
        if self._conversations is None:  # a custom rollout sampled the first turns
            *logprobs, images, _ = rest
            first = tool_calling.sampled_turns(completion_ids, logprobs[0] if logprobs else None)
            mode = "num_generations" if self.session.training else "num_generations_eval"
            self._conversations = self._converse(prompt_ids, images, first, getattr(self, mode, 1))
        return tool_calling.loop_result(self, self._conversations)

    def _converse(self, prompt_ids: Any, images: Any, first: Any, num_generations: int) -> Any:
        rows = tool_calling.dialogues(self, parse_response, prompt_ids, images, first)
        limits = tool_calling.limits(self, self.session.live_engine.max_model_len)
        with profiling_context(self, "multi_turn"):
            return self.session.converse(rows, limits, num_generations)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        known, self._known_rewards = self._known_rewards, None
        self._rewards = self._all_rewards(*args, **kwargs) if known is None else known
        if self._rolls_out and self._learns and self.session.algorithms.judges and not self._in_rounds:
            groups = resampling.sampled_groups(self, self._rewards, self._row_numbers)
            if known is None:
                self.session.algorithms.observe(groups)
            self._groups = self.session.algorithms.rewards(groups)
            self._rewards = self._groups.rewards.flatten(0, 1).to(self._rewards)
        return self._rewards

    def _all_rewards(self, *args: Any, **kwargs: Any) -> Any:
        """Return the rewards of all ranks, (world * B, functions), as TRL's reward functions return them.

        Reward functions may modify their arguments. So they get copies: one copy of everything, which all functions
        share, as in TRL. Where TRL's own generation is used, they get TRL's lists, from which TRL has already made its
        tensors. There the result of `_generate` is copied, since trajectories are made from it later.
        """
        if self._in_rounds or not self._selection.stock:
            args, kwargs = copied(args), copied(kwargs)
        elif "_generated" in self.__dict__:
            self._generated = copied(self._generated)
        with nullcontext() if self._selection.stock else checking(self):
            rewards = super()._calculate_rewards(*args, **kwargs)  # type: ignore[misc]
        rollout = self.session.rollout if self._attached else None
        if rollout is not None and rollout.converses and self._base_name == "GRPO":
            rewards = without_masked(rewards, self._generated[2], self.session)
        return rewards

    def _generate_and_score_completions(self, inputs: list[Any]) -> Any:
        if not self._attached:
            return super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        return self._batch(functools.partial(self._roll_out, inputs))

    def _roll_out(self, inputs: list[Any]) -> Any:
        trainer: Any = self
        session, self._rewards, self._row_numbers, self._groups = self.session, None, None, None
        self._known_rewards = None  # an interrupted batch may have left them
        inputs = list(inputs)  # a copy, since rounds replace the rows
        drawn = resampling.drawn(self, inputs) if session.algorithms.draws and self._learns else None
        if drawn is not None:
            inputs, self._row_numbers = drawn
        session.rows = inputs
        changed = {
            name: getattr(trainer, name) for name in ("tools", "log_multimodal", MASKS) if hasattr(trainer, name)
        }
        self._rolls_out = True
        try:
            with self._adapters_kept():
                batch = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        except Exception as error:
            if (note := reset_that_failed(error)) is not None:
                error.add_note(note)
            raise
        finally:
            self._rolls_out = False
            for name, value in changed.items():
                setattr(trainer, name, value)
        self._check_sampled(batch)
        if "advantages" in batch:
            batch["advantages"] = self._advised(batch["advantages"])
            batch["advantages"] = replaced(session, batch, self._rewards)
            if self._groups is not None or session.advantages_plugin is not None:
                tabulate(trainer, batch["advantages"])
        session.host.call("trlx_rollout_end", session=session, trajectories=self._trajectories())
        self._logged, self._to_log = {}, session.metrics
        self._log_metrics("train" if session.training else "eval")
        return batch

    def _log_metrics(self, mode: str) -> None:
        """Hand TRL the numbers that the rollout's `session.metrics` has got since the last call.

        Components may add some after the rollout: a scoring, or an algorithm's term of the loss.
        """
        for name, value in self._to_log.items():
            if self._logged.get(name) is not value:
                self._logged[name] = value
                values = value if isinstance(value, list) else [value]
                _refuse_other_than_numbers(name, values, self.session.host)
                if values:  # TRL cannot take the mean of nothing
                    self._metrics[mode][name] += values  # type: ignore[attr-defined]

    def _advised(self, stock: Any) -> Any:
        """Return the advantages, (B,), that the run's algorithms give this rank's rows; TRL's advantages where the
        algorithms give none."""
        advantages = self.session.algorithms.advantages(self._groups) if self._groups is not None else None
        if advantages is None:
            return stock
        first = self.session.ranks.rank * len(stock)
        return advantages.flatten()[first : first + len(stock)].to(stock)

    def _check_sampled(self, batch: Mapping[str, Any], whole: Mapping[str, Any] | None = None) -> None:
        """Compare the engine's log-probs with the trainer's, and raise if they differ by more than rounding; if a
        user's `rollout_func` returned them, only warn. Does nothing unless the batch has both.

        Args:
            batch: this rank's rows, as TRL trains on them.
            whole: rows of the batch with everything needed to score them again; by default the rows of `batch`.

        Raises:
            SyncError: engine and trainer differ.
        """
        trainer: Any = self
        session = self.session
        if session.selection.stock or not {"old_per_token_logps", "sampling_per_token_logps"} <= batch.keys():
            return
        source = session.sampler.source
        session.versions.check_batch(
            session.live_engine,
            batch["sampling_per_token_logps"],
            batch["old_per_token_logps"],
            batch["completion_mask"] * batch.get("tool_mask", 1),
            batch["completion_ids"],
            temperature=trainer.temperature,
            step=session.step,
            own_sampler=self._names_own_log_probs,
            over_support=self._left_out_by is not None,
            rollout=source if source is not None and source.slot == "rollout" else None,
            again=self._rescoring(batch if whole is None else whole),
        )

    @property
    def _names_own_log_probs(self) -> bool:
        """True where a user's `rollout_func` samples the tokens and returns their log-probs."""
        custom = getattr(self, "rollout_func", None)
        return custom is not None and not getattr(custom, "samples_from_session", False)

    def _without_checkpointing(self) -> AbstractContextManager[None]:
        """Return a context without gradient checkpointing, as TRL uses it for passes without gradients."""
        trainer: Any = self
        return disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs)  # type: ignore[no-any-return]

    def _trajectories(self) -> Any:
        trainer: Any = self
        return trajectories_of(
            trainer._base_name,
            self._generated,
            rewards=self._rewards,
            reward_weights=getattr(trainer, "reward_weights", None),
            rank=self.session.ranks.rank,
            weight_version=self.session.versions.version,
        )

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL does, also after an evaluation. accelerate prepares a model for evaluation without DDP, and
        would take it for one that is ready for training; each rank would then train on its own."""
        if self.model_wrapped is self.model and self.accelerator.distributed_type.startswith("MULTI_"):  # type: ignore[attr-defined]
            self.model._is_accelerate_prepared = False  # type: ignore[attr-defined]
        if self.is_deepspeed_enabled and self.deepspeed is not None and self.optimizer is None:  # type: ignore[attr-defined]
            raise ConfigError(
                "evaluate() before train() has made a DeepSpeed engine without an optimizer, which transformers would "
                "go on with. Set eval_on_start=True instead: it evaluates before the first step."
            )
        return super().train(*args, **kwargs)  # type: ignore[misc]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run TRL's training step; an out-of-memory error names how much memory each owner held."""
        with self.session.memory.reporting():
            loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
        self._log_metrics("train")
        return loss

    def training_chat_template(self) -> str | None:
        """Return TRL's prefix-preserving template; None where the tokenizer's own template preserves prefixes. Raise
        ValueError where TRL has none."""
        return get_training_chat_template(self.processing_class)  # type: ignore[attr-defined, no-any-return]


GRPOTrainer = hybrid(trl.GRPOTrainer)
RLOOTrainer = hybrid(trl.RLOOTrainer)
DistillationTrainer = hybrid(trl.DistillationTrainer)
TrlParser = suggesting(trl.TrlParser)


class Trained(NamedTuple):
    """The classes that the setting `trainer` of a recipe (a YAML file that describes a run) selects: this package's
    trainer, TRL's trainer below it, and TRL's config."""

    trainer: type[Any]
    base: type[Any]
    config: type[Any]


TRAINED_BY = {
    "grpo": Trained(GRPOTrainer, trl.GRPOTrainer, trl.GRPOConfig),
    "rloo": Trained(RLOOTrainer, trl.RLOOTrainer, trl.RLOOConfig),
}
SCRIPT_ARGUMENTS, MODEL_CONFIG = trl.ScriptArguments, trl.ModelConfig
REWARDS: dict[str, Callable[..., Any]] = {
    "accuracy_reward": trl.rewards.accuracy_reward,
    "reasoning_accuracy_reward": trl.rewards.reasoning_accuracy_reward,
    "think_format_reward": trl.rewards.think_format_reward,
    "get_soft_overlong_punishment": trl.rewards.get_soft_overlong_punishment(1280, 256),
}
"""Reward functions by the names that TRL's own command line gives them."""


def model_arguments(model: Any, args: Any) -> dict[str, Any]:
    """Return the trainer arguments `peft_config` and `quantization_config` that TRL's `ModelConfig` specifies, and put
    its settings for loading the model into `args.model_init_kwargs`.

    Args:
        model: a `trl.ModelConfig`.
        args: the run's `GRPOConfig` or `RLOOConfig`.
    """
    said = {
        "revision": model.model_revision,
        "trust_remote_code": args.trust_remote_code,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
    }
    args.model_init_kwargs = said | (args.model_init_kwargs or {})
    return {
        "peft_config": trl.get_peft_config(model),
        "quantization_config": trl.get_quantization_config(model),
    }


def assistant_message(tokenizer: Any, token_ids: list[int], prefix: list[int], tools: Sequence[Any]) -> dict[str, Any]:
    """Parse the ids that a model generated into an assistant message as TRL does, with its tool calls.

    Args:
        token_ids: the generated ids.
        prefix: all ids before them.
        tools: the functions that the model may call.
    """
    if getattr(tokenizer, "response_template", None) is None:
        add_response_schema(tokenizer)
    return parse_response(tokenizer, token_ids, prefix=prefix, tools=list(tools))  # type: ignore[no-any-return]


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


def _refuse_other_than_numbers(name: str, values: Sequence[object], host: Host) -> None:
    """Raise a PluginError if a metric of a plugin is not a number: TRL would fail on its mean without naming a plugin.

    Args:
        name: name of the metric.
        values: its values.
    """
    for value in values:
        if not isinstance(value, Number) and getattr(value, "shape", None) != ():
            plugins = ", ".join(str(plugin) for plugin in host.plugins)
            raise PluginError(
                f"session.metrics[{name!r}] is {value!r:.80}, and a metric is a number, or a list of them. A plugin "
                f"has set it: one of {plugins}."
            )
