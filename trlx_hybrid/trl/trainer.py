"""The trainers, as subclasses of TRL 1.16's. One class overrides each method of TRL's and transformers' once, in the
order in which a run calls them; what each does beside TRL lies in the modules that it calls.

TRL's generating trainers reach vLLM through two methods of `self.vllm_generation`, guarded by `self.use_vllm`. The
subclass makes `use_vllm` a property that is False until our engine is chosen and TRL's `__init__` is over, so TRL
builds no engine of its own. From then on, TRL's own code generates through our engine. The only function of TRL's that
is replaced is that of its LM head, while tokens are scored over the ids that top-k and the like kept
(kept_log_probs.py).

TRL must keep the following, which tests/test_trl_internals.py checks: `_generate(prompts)` is one rollout,
`_calculate_rewards` returns gathered rewards (world * B, functions), `_generate_and_score_completions` returns the
batch, and `_metrics` collects the numbers to log. scoring/deferred.py lists what the code relies on for log-probs,
stock.py all attributes and methods that it uses.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import trl
from accelerate.utils import load_fsdp_model, save_fsdp_model
from trl.chat_template_utils import get_training_chat_template
from trl.extras.profiling import profiling_context

from ..config import HybridConfig
from ..errors import ConfigError
from ..interprocess.copies import copied
from ..policy.adapters import adapters_kept
from ..policy.precision import autocast_dtype
from ..routing import EXPERTS
from ..session import Session
from . import attach, rewards
from .arguments import refuse_unknown, suggesting
from .borrowed import GENERATING, OWN_ENGINE
from .checkpoint.adapters import load_adapters, load_default
from .checkpoint.checkpoints import all_adapters
from .generation import in_flight, repeated_batches, resampling, tool_calling, truncation, unseen_parts
from .generation.early_rewards import begun_early
from .generation.prompts import naming_resets, plain, tokenised
from .generation.truncation_rule import MASKS
from .generation.vllm_generation import trajectories_of
from .scoring import agreement, kept_ids, loss, shape
from .scoring.deferred import NUMBER, defers, reads_old
from .scoring.divergence import leave_out_unscored
from .scoring.reference import active_adapters, check_reference, scored_by_policy
from .scoring.scoring_call import ScoringCall, kept_in_rollout, rollout_experts
from .state import Batch, MicroBatch, RunState, Window
from .stock import StockTrainer

if TYPE_CHECKING:
    from torch import Tensor

    from .stock import Rows

    Base = StockTrainer
else:
    Base = object


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
    own = () if trainer_class is base else (trainer_class,)
    namespace = {"__module__": __name__, "__doc__": trainer_class.__doc__, "__qualname__": trainer_class.__name__}
    return type(trainer_class.__name__, (HybridTrainer, *own, _choosing(base)), namespace | {"_base_name": base._name})


@functools.cache
def _choosing(base: type[Any]) -> type[Any]:
    """Return a subclass of `base`, a trainer of TRL's, whose `__init__` chooses the components before TRL's own.

    It comes right before `base` in the method resolution order, behind a user's subclasses. These may change arguments
    before they pass them on, so `__init__` sees the arguments as TRL is going to read them.
    """

    def initialize(self: HybridTrainer, *args: Any, **kwargs: Any) -> None:
        start = functools.partial(base.__init__, self)
        taken = inspect.signature(start)
        refuse_unknown(type(self).__name__, kwargs, taken.parameters)
        given = taken.bind_partial(*args, **kwargs)
        given.arguments |= attach.choose(self, self._chosen, given.arguments)
        with attach.building(self._chosen, given.arguments):
            start(*given.args, **given.kwargs)

    return type(base.__name__, (base,), {"__module__": __name__, "__init__": initialize})


class HybridTrainer(Base):
    """The base class that `hybrid` puts before a TRL trainer in the method resolution order. It makes the trainer
    sample with the session's engine, and call the components and plugins of the run.

    As long as `__init__` has not finished, or was never called, as in TRL's tests of single methods, the methods that
    sample, score and compute losses do what TRL's do.

    Attributes:
        session: the live objects of this run.
    """

    session: Session
    _chosen: attach.Chosen
    _run: RunState | None = None  # None until `__init__` is over
    _trl_use_vllm: bool

    # --- construction: `__init__` in front of a user's subclass, and behind it (`_choosing`) --------------------------

    def __init__(
        self,
        *args: Any,
        hybrid: HybridConfig | Mapping[str, Any] | None = None,
        plugins: Sequence[object] = (),
        **kwargs: Any,
    ) -> None:
        self._chosen = attach.Chosen.of(hybrid, plugins)
        super().__init__(*args, **kwargs)
        this = attach.weakly(self)  # callbacks must not keep the trainer alive
        self._run = attach.attach(self, self._chosen, lambda step: this()._starts(step))

    @property
    def use_vllm(self) -> bool:
        """True where an engine generates, rather than transformers. With an engine of this package, False while TRL's
        `__init__` runs, so that TRL builds no engine. In a replay, this says whether an engine generated when the run
        was recorded, since TRL's loss corrects for the engine."""
        chosen, attached = self.__dict__.get("_chosen"), "session" in self.__dict__
        if chosen is None:
            return self._trl_use_vllm
        if chosen.facts is not None:
            return attached and bool(chosen.facts["sampler"])
        return self._trl_use_vllm if chosen.selection.stock else attached

    @use_vllm.setter
    def use_vllm(self, value: bool) -> None:
        chosen = self.__dict__.get("_chosen")
        if chosen is not None and not chosen.complete:
            attach.choose(self, chosen, {})
            if value or not chosen.selection.stock or chosen.selection.environment is not None:
                name = type(self).__name__
                raise ConfigError(
                    f"{name}, or a class below it, calls the `__init__` of TRL's trainer by that class's name, past "
                    "ours, so TRL would generate by itself whatever was chosen. Call `super().__init__(...)` there."
                )
        self._trl_use_vllm = value

    def training_chat_template(self) -> str | None:
        """Return TRL's chat template for training, which is prefix-preserving: it renders the beginning of a
        conversation as it renders the same messages within a longer one. None where the tokenizer's own template is
        prefix-preserving. Raise ValueError where TRL has no such template."""
        template: str | None = get_training_chat_template(self.processing_class)
        return template

    # --- training -----------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL does. After `evaluate()`, the model is prepared for training again (with DDP). If a launcher has
        started the run again and no checkpoint is named here, resume from the run's last checkpoint."""
        run = self._running
        attach.forget_evaluation(self)
        run.window = Window()
        start = run.checkpoints.start(self, resume_from_checkpoint)
        try:
            return super().train(start, *args, **kwargs)
        finally:
            run.window.joined = None

    def _get_dataloader(self, dataset: Any, *args: Any, is_training: bool = False, **kwargs: Any) -> Any:
        run = self._run if is_training else None
        if run is not None:
            repeated_batches.warn_of_shards(self, run, dataset)
        with repeated_batches.read_once(self, run, dataset) as read:
            return super()._get_dataloader(read, *args, is_training=is_training, **kwargs)

    def _init_training_state(
        self, max_steps: Any, steps_per_epoch: Any, epochs: Any, resume_from_checkpoint: Any, trial: Any
    ) -> tuple[int, int]:
        skipped = super()._init_training_state(max_steps, steps_per_epoch, epochs, resume_from_checkpoint, trial)
        in_flight.start(self._running.in_flight, resume_from_checkpoint)
        return self._running.order.resumed(self, resume_from_checkpoint, skipped)

    def _starts(self, step: int) -> None:
        """Begin the recording or replay when training starts, drop a rollout that an earlier `train()` left unfinished,
        and check the reference at the run's first step. Called after a checkpoint is loaded, before the engine starts.

        Args:
            step: number of optimizer steps done.
        """
        run, session = self._running, self.session
        if run.replay is not None:
            run.replay.starts(self, step)
        if run.recorder is not None:
            run.recorder.starts(self, step)
        if run.deferred.outlived(session.weight_version):  # an earlier `train()` stopped within a rollout
            self._buffered_inputs, self._step = None, 0
        fresh = step == 0 and session.weight_version == 0 and not session.config.rollout_only
        if fresh and scored_by_policy(self):
            check_reference(session.policy, session.ranks, autocast_dtype(self.args))

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True  # transformers 5.17 would take a step more in a run that had ended
            return
        trained = kwargs["steps_trained_in_current_epoch"]
        run, loader = self._running, kwargs["train_dataloader"]
        repeated_batches.begin_epoch(loader)
        run.order.begin_epoch(self, kwargs["epoch"], loader, trained)
        if run.in_flight is not None:
            run.in_flight.begin_epoch(self, kwargs["epoch"], loader, trained)
        super()._run_epoch(*args, **kwargs)

    # --- an optimizer step --------------------------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run TRL's training step on one micro-batch and, after the last of several micro-batches that share a forward
        pass, their backward pass. An out-of-memory error names the rows, and how much memory each owner held."""
        run, session = self._running, self.session
        if run.window.step != self.state.global_step:
            run.window = Window(self.state.global_step)
        run.terms_added = False
        timed = nullcontext() if run.step_metrics is None else run.step_metrics.micro_batch()
        with session.memory.reporting(), loss.naming_rows(self, run):
            if session.config.rollout_only:
                with timed:
                    result = self._only_sampled(model, inputs)
            else:
                with loss.in_training(model, None if session.selection.stock else session.policy.modules), timed:
                    result = super().training_step(model, inputs, *args, **kwargs)
                loss.end_micro_batch(self, run)
            run.window.done += 1
        if run.replay is not None:
            run.replay.ends(self)
        run.metrics.log(self._metrics["train"])
        return result

    def _only_sampled(self, model: Any, inputs: Any) -> Tensor:
        """Sample and score a batch where one is due, and train nothing (`rollout_only`); return a loss of 0."""
        model.train()
        self._prepare_inputs(inputs)
        self._step += 1
        self.accelerator.gradient_state._set_sync_gradients(False)  # so optimizer and scheduler take no step
        return torch.zeros((), device=self.args.device)

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        run = self._run
        if run is None:
            return super()._prepare_inputs(generation_batch)
        known = self._buffered_inputs
        with nullcontext() if run.replay is None else run.replay.in_place(self, run.window.place):
            inputs = super()._prepare_inputs(generation_batch)
        drawn = self._buffered_inputs
        if drawn is not known and drawn is not None:
            run.sampled_at = self.session.weight_version
            self._buffered_inputs = loss.regrouped(self, run, drawn)
            if self._buffered_inputs is not drawn:
                inputs = self._buffered_inputs[self._step % len(drawn)]
        if run.step_metrics is not None:
            run.step_metrics.prepared(inputs)
        return inputs

    # --- a batch: sampled, rewarded, scored ---------------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs: Rows) -> dict[str, Any]:
        run, inputs = self._run, repeated_batches.whole(inputs, self.accelerator.device)
        if run is None:
            return super()._generate_and_score_completions(inputs)
        if run.replay is not None:
            values = run.replay.batch(self, run.window.place)
            if NUMBER in values:
                run.deferred.begin(values, self.model.training, self.session.weight_version)
            return values
        if run.recorder is not None:
            return run.recorder.recorded(
                self, run.window.place, lambda: (self._rolled_out(run, inputs), run.batch.rewards)
            )
        return self._rolled_out(run, inputs)

    def _rolled_out(self, run: RunState, inputs: Rows) -> dict[str, Any]:
        """Sample a batch, reward and score it as TRL does, and return it with the advantages that this run's algorithms
        or plugins compute.

        Args:
            inputs: this rank's dataset rows.
        """
        session, training = run.session, self.model.training
        session.policy.look()
        run.left_out_by = session.sampling.truncated_by() if session.over_support else None
        kept = tool_calling.settings_kept(self, "tools", "log_multimodal", MASKS)
        with run.scored_batch() as batch, kept, naming_resets(), active_adapters(self):
            rows = session.rows = self._chosen_rows(run, list(inputs), training)
            batch.scores_old = session.router_replay is not None and reads_old(self)
            in_one_step = functools.partial(loss.in_one_step, self, run)
            deferred = batch.skips_old = defers(self, session, in_one_step, run.say_apart)
            with run.deferred.rolled_out(self) if deferred else nullcontext():
                values = super()._generate_and_score_completions(rows)
        truncation.exclude(batch, values)
        if batch.staleness is not None:
            values[shape.STALENESS] = in_flight.stale(batch.staleness, values["completion_mask"])
        if deferred:
            run.deferred.begin(values, training, session.weight_version)
        values |= kept_in_rollout(self, batch, values["completion_ids"].shape[1])
        if not session.selection.stock:
            leave_out_unscored(self, session.ranks, values)
        if session.router_replay is not None:
            values[EXPERTS] = rollout_experts(run, values["prompt_mask"], values["completion_ids"].shape[1])
            session.experts = []  # frees the memory of a rollout's experts
        batch.supports = batch.kept = None
        agreement.check(self, run, values)
        rewards.advise(self, run, values)
        session.host.call("trlx_rollout_end", session=session, trajectories=trajectories_of(self, batch))
        run.metrics.begin()
        run.metrics.log(self._metrics["train" if session.training else "eval"])
        return values

    def _chosen_rows(self, run: RunState, rows: Rows, training: bool) -> Rows:
        """Return the dataset rows of the batch that TRL is going to score: those of its data loader, those that an
        algorithm draws or that were sampled in rounds, or those of complete groups where rows stay in flight.

        Args:
            rows: this rank's rows from the data loader.
            training: False for an evaluation, in which the data loader's rows are returned.
        """
        if training and run.in_flight is not None:
            with run.part("rollout"):
                rows, run.batch.staleness = run.in_flight.batch(self, rows)
        if training and run.session.algorithms.draws:
            rows = resampling.drawn(self, run, rows)
        if training and run.session.algorithms.filters:
            rows = resampling.resampled(self, run, rows, functools.partial(self._sample, run))
        return rows

    def _generate(self, prompts: list[Any]) -> Any:
        run = self._run
        if run is None:
            return super()._generate(prompts)
        if not run.batch.to_be_scored:
            run.batch = Batch()  # a script samples by itself
        batch = run.batch
        if not batch.known:
            self._sample(run, prompts)
        if self._base_name == "GRPO":
            tool_calling.check_images(self, batch.generated)
            if batch.to_be_scored:
                tool_calling.show_images(self, batch.generated)
        return truncation.handed_on(self, batch) if batch.to_be_scored else batch.generated

    def _sample(self, run: RunState, prompts: list[Any]) -> Any:
        """Sample one round's completions of `prompts` into the run's batch, and return them in the form of TRL's
        `_generate`."""
        session, batch, stock = run.session, run.batch, run.session.selection.stock
        if not stock and getattr(self, "tools", None):
            tool_calling.refuse_text(prompts)
        batch.conversations = None
        early = begun_early(self, run, run.borrowed.parse_response, prompts)
        phase = session.rollout_phase(self.model.training) if session.sampled is None else nullcontext()
        forgiving = tool_calling.forgiving(self, run.unparsed, lambda: batch.conversations)
        with run.generation(), run.part("rollout"), phase, forgiving, early:
            batch.generated = tool_calling.with_images(self, super()._generate(prompts))
        truncation.note_truncated(self, run)
        if batch.to_be_scored and run.left_out_by is not None:
            batch.supports = kept_ids.rows_of(self, batch.generated)
        if "reward functions" not in run.said and not stock and session.ranks.rank == 0:
            functions, tools = getattr(self, "reward_funcs", ()), bool(getattr(self, "tools", None))
            unseen_parts.warn(functions, batch.generated[0], self.processing_class, run.borrowed.parse_response, tools)
        run.said.add("reward functions")
        return batch.generated

    def _tokenize_prompts(self, prompts: list[Any]) -> tuple[Any, ...]:
        tokenise, by_row = super()._tokenize_prompts, getattr(self, "environment_factories", None) is not None
        if self._run is None or self._is_vlm or by_row or not plain(prompts):
            return tokenise(prompts)
        return tokenised(tokenise, prompts)

    def _generate_single_turn(
        self, prompt_ids: Any, images: Any, multimodal_fields: Any, *rest: Any, **kwargs: Any
    ) -> Any:
        """Sample the first turn of each row. Where the rollout component runs conversations with tools, it samples all
        further turns too, and they are stored for `_tool_call_loop`."""
        run = self._run
        if run is None or not self._converses(run):
            return super()._generate_single_turn(prompt_ids, images, multimodal_fields, *rest, **kwargs)
        num_generations = rest[0] if rest else kwargs.get("num_generations", 1)
        conversations = self._converse(run, prompt_ids, images, None, num_generations)
        return tool_calling.first_turns(self, conversations)

    def _tool_call_loop(self, prompts: Any, prompt_ids: Any, completion_ids: Any, completions: Any, *rest: Any) -> Any:
        run = self._run
        if run is None or not self._converses(run):
            return super()._tool_call_loop(prompts, prompt_ids, completion_ids, completions, *rest)
        conversations = run.batch.conversations
        if conversations is None:  # a custom rollout sampled the first turns
            *logprobs, images, _ = rest
            first = tool_calling.sampled_turns(completion_ids, logprobs[0] if logprobs else None)
            mode = "num_generations" if self.session.training else "num_generations_eval"
            conversations = self._converse(run, prompt_ids, images, first, getattr(self, mode, 1))
        return tool_calling.loop_result(self, conversations)

    def _converses(self, run: RunState) -> bool:
        """Return whether this package's rollout component runs conversations with tools, instead of TRL's tool loop."""
        rollout = run.session.rollout
        return rollout is not None and rollout.converses and bool(getattr(self, "tools", None))

    def _converse(self, run: RunState, prompt_ids: Any, images: Any, first: Any, num_generations: int) -> Any:
        rows = tool_calling.dialogues(self, run.borrowed.parse_response, prompt_ids, images, first)
        limits = tool_calling.limits(self, run.session.live_engine.max_model_len)
        with profiling_context(self, "multi_turn"):
            run.batch.conversations = run.session.converse(rows, limits, num_generations)
        return run.batch.conversations

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        run = self._run
        if run is None:
            return super()._calculate_rewards(*args, **kwargs)
        batch = run.batch
        known, batch.known_rewards = batch.known_rewards, None
        found = known
        if found is None:
            # Reward functions may modify their arguments. So they get copies: one copy of everything, which all
            # functions share, as in TRL. Where TRL's own generation is used, they get TRL's lists, from which TRL has
            # already made its tensors. There the result of `_generate` is copied, as trajectories are made from it.
            stock = run.session.selection.stock
            if batch.in_rounds or not stock:
                args, kwargs = copied(args), copied(kwargs)
            else:
                batch.generated = copied(batch.generated)
            with nullcontext() if stock else rewards.checking(self):
                found = super()._calculate_rewards(*args, **kwargs)
            if self._base_name == "GRPO" and run.session.rollout is not None and run.session.rollout.converses:
                found = rewards.without_masked(found, batch.generated[2], run.session)
        batch.rewards = rewards.judged(self, run, found, observed=known is not None)
        return batch.rewards

    # --- log-probs and loss -------------------------------------------------------------------------------------------

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **images: Any,
    ) -> Any:
        run, stock = self._run, super()._get_per_token_logps_and_entropies
        if run is None:
            given = input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, compute_aux_loss
            return stock(model, *given, **images)
        call = ScoringCall(
            trainer=self,
            run=run,
            stock=stock,
            model=model,
            input_ids=input_ids,
            attention_mask=attention_mask,
            completion_length=logits_to_keep,
            at_once=batch_size,
            entropies=compute_entropy,
            router_loss=compute_aux_loss,
            images=images,
        )
        with run.part("scoring"):
            return call.scores()

    def _compute_loss(self, model: Any, inputs: dict[str, Any], *others: Any) -> Any:
        run = self._run
        if run is None:
            return super()._compute_loss(model, inputs, *others)
        run.window.rows, run.micro_batch = inputs, (micro_batch := MicroBatch(inputs))
        try:
            found = super()._compute_loss(model, inputs, *others)
            loss.log_as_drawn(self, run, micro_batch, functools.partial(super()._compute_loss, model))
            agreement.note(self, run, inputs)
            return loss.with_terms(self, run, found, micro_batch)
        finally:
            run.micro_batch = None

    def _clip_grad_norm(self, model: Any) -> Any:
        return None if self.session.config.rollout_only else super()._clip_grad_norm(model)

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        return None if self.session.config.rollout_only else super()._get_grad_norm(*args, **kwargs)

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Log as TRL does, after the metrics of all finished steps were added: TRL logs the mean over the steps since
        the last line."""
        if self._run is not None and self._run.step_metrics is not None:
            self._run.step_metrics.settle(wait=True)
        super().log(*args, **kwargs)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        run = self._run
        if run is None:
            super()._save_checkpoint(model, trial)
            return
        with run.checkpoints.saving(self, Path(self._get_output_dir(trial=trial))) as folder:
            with run.checkpoints.held():
                run.order.save(self, folder)
                if run.in_flight is not None:
                    run.in_flight.save(folder)
            super()._save_checkpoint(model, trial)

    def _save(self, *args: Any, **kwargs: Any) -> None:
        with self._running.checkpoints.with_limit(self.args):
            super()._save(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save optimizer and scheduler as transformers does. With FSDP, transformers' method also saves the model's
        shards, but only the first active adapter's; this override also saves the other active adapters' shards."""
        meets = self.is_fsdp_enabled or self.is_deepspeed_enabled  # ranks meet within this write
        with self._running.checkpoints.held(meets), all_adapters(self, save_fsdp_model, self.model, output_dir):
            super()._save_optimizer_and_scheduler(output_dir)

    def _save_scaler(self, output_dir: str) -> None:
        with self._running.checkpoints.held():
            super()._save_scaler(output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        with self._running.checkpoints.held():
            super()._save_rng_state(output_dir)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Create TRL's model card. Within a checkpoint's save, an error of writing it is stored and raised at the
        save's end."""
        with self._running.checkpoints.held():
            super().create_model_card(*args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push a checkpoint to the Hub as transformers does, after its manifest, the list of its files, is
        completed."""
        self._running.checkpoints.complete(self.args)
        super()._push_from_checkpoint(checkpoint_folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the weights of a checkpoint as transformers does. Of a PEFT model, load all adapters and keep the active
        ones active: transformers loads only some, and leaves one active."""
        adapted = self.model if model is None else model
        with adapters_kept(adapted), all_adapters(self, load_fsdp_model, adapted, resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            if not self.is_fsdp_enabled:
                load_default(adapted, Path(resume_from_checkpoint))
        self.session.weights_changed()

    def _load_best_model(self) -> None:
        """Load the best model at the end of training as transformers does. Of a PEFT model, load all adapters:
        transformers looks only for the adapter "default", and loads only one of several adapters."""
        model, best = self.model, self.state.best_model_checkpoint
        with adapters_kept(model), all_adapters(self, load_fsdp_model, model, best):
            apart = self.is_fsdp_enabled or self.is_deepspeed_enabled
            if apart or not load_adapters(model, Path(best)):
                super()._load_best_model()
        self.session.weights_changed()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.session.load_state(Path(checkpoint), self.state.global_step)

    @property
    def _running(self) -> RunState:
        """The state of the run. Raises ConfigError where `__init__` was not called or has failed."""
        if self._run is None:
            raise ConfigError(f"{type(self).__name__}.__init__ was not called, or has failed: build the trainer anew.")
        return self._run


GRPOTrainer = hybrid(trl.GRPOTrainer)
RLOOTrainer = hybrid(trl.RLOOTrainer)
DistillationTrainer = hybrid(trl.DistillationTrainer)
TrlParser = suggesting(trl.TrlParser)
