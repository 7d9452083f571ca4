"""The session of one trainer's run: its components, and its phase, which says whether the engine or the trainer owns
the device memory."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import json
import sys
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch

from .algorithms import Algorithms
from .blame import asked, asked_text, fault
from .config import AUTO, HybridConfig
from .contract.types import Completion, Phase, Request, Sampling
from .errors import ComponentError, PluginError, StaleWeightsError
from .memory.trainer_memory import TrainerMemory, optimizer_name
from .plugins.registry import BUILTIN
from .plugins.selection import RESUMED, continued, described
from .policy.positions import Positions, check_positions
from .policy.precision import autocast_dtype
from .policy.sharded import fsdp_note
from .rollout.sampler import Sampler
from .rollout.seeding import preserved_generators
from .rollout.turns import Endings, Supports
from .versions import package_version
from .weights.sync import WeightVersions, choose

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from transformers import TrainingArguments

    from .contract.conversation import Conversation, Dialogue, Limits
    from .contract.protocols import Engine, Rollout, Scoring, WeightSync
    from .interprocess.ranks import Ranks
    from .plugins.host import Host, PluginInfo
    from .plugins.selection import Choice, Selection
    from .policy.policy import Policy
    from .routing import RouterReplay

STATE_FILE = "hybrid_state.json"


class Session:
    """The live objects of one run: engine, weight sync, rollout, scoring, algorithms, and what they share.

    Attributes:
        host: holds the loaded plugins and calls their hooks.
        config: the user's settings, this run's own copy.
        selection: the components that were chosen for the run, such as the engine.
        args: the trainer's arguments (TRL's config), for components that need more than their options.
        policy: the model being trained; ranks: the processes that train it; optimizer: returns the optimizer.
        engine, weights, rollout: the engine that samples, what syncs the policy's weights to it, and what turns prompts
            into completions; None before `open`, and for the whole run where TRL itself generates.
        weights_why: why this weight sync was chosen, and why cheaper ones were not.
        scores_apart: why this run needs a separate forward pass for the old log-probs (of the policy that sampled),
            rather than take them from the first loss's forward pass; None if it needs none.
        phase: the current phase: the engine owns the device memory in ROLLOUT, the trainer in TRAIN.
        memory: moves the trainer's tensors out of the device memory and back, and records how much each owner holds.
        versions: the versions of the weights of policy and engine, numbers that grow with each change.
        training: whether the current rollout is for training (or for evaluation).
        rows: the dataset's rows of this rank's batch, as TRL gave them, in the order of its prompts.
        on_completion: called as soon as a completion of the current rollout is finished, with the index of its prompt
            among this rank's prompts, its request and the completion; None where nobody needs to know early. Set on all
            ranks or on none.
        on_conversation: called as soon as a conversation has ended, with the index of its prompt and the conversation;
            None where nobody needs to know early.
        router_replay: makes the trainer's routers take the engine's experts (MoE); None where the config does not ask
            for it.
        positions: adds position ids, counted without left padding, to the models' forward passes; None where stock TRL
            scores.
        experts: with router replay, one int16 array (tokens, layers, experts per token) for each row sampled last: the
            experts that the engine routed its tokens to.
        sampled: rows of the batch that TRL is about to ask for, where rows stay in flight.
        endings: how the completions of the current rollout ended.
        over_support: whether log-probs are computed over only those token ids that top-k, top-p and the like have left:
            completions must then list these ids (`Completion.support`).
        supports: with `over_support`, these ids for each token that was sampled in the current rollout.
        metrics: values of the last rollout, by names `hybrid/…`, for the trainer's logs. A value is a number or a list
            of numbers. The logs show the mean of all numbers since their last line.
        algorithms: the algorithms, which change what completions are trained on, and how much they count.
        advantages_plugin: the plugin whose advantages the trainer uses, or None.
        notes: further lines to print when the run starts.
        header_lines: the lines that were printed when the run started; empty before.
    """

    advantages_plugin: PluginInfo | None = None
    _holder: weakref.ref[Session] | None = None  # the session with this process's only colocated engine
    _open: ClassVar[weakref.WeakSet[Session]] = weakref.WeakSet()  # sessions that are not closed

    def __init__(
        self,
        host: Host,
        config: HybridConfig,
        selection: Selection,
        *,
        args: TrainingArguments,
        sampling: Sampling,
        policy: Policy,
        ranks: Ranks,
        step: Callable[[], int],
        over_support: bool = False,
        optimizer: Callable[[], Any] = lambda: None,
    ) -> None:
        self.host, self.config, self.selection = host, dataclasses.replace(config), selection
        self.args, self.policy, self.ranks, self.optimizer = args, policy, ranks, optimizer
        self.engine: Engine | None = None
        self.weights: WeightSync | None = None
        self.rollout: Rollout | None = None
        self.weights_why = ""
        self.scores_apart: str | None = None
        self.notes: list[str] = []
        self.header_lines: list[str] = []
        self._scoring: Scoring | None = None
        self._scoring_state: dict[str, Any] = {}  # as in the checkpoint that the run resumes from
        self.phase = Phase.TRAIN
        engine, rollout = selection.engine, selection.rollout
        self._engine_source = engine.component if engine else None
        self._half_closed: list[Engine] = []
        self.memory = TrainerMemory(
            policy,
            optimizer,
            optimizer_name=optimizer_name(args),
            offload=config.offload,
            phase=lambda: self.phase,
            source=self._engine_source,
        )
        built_in = rollout is None or rollout.component.plugin == BUILTIN
        source = engine if built_in else rollout
        self.sampler = Sampler(ranks, sampling, args.seed, source.component if source else None)
        self.versions = WeightVersions(
            policy,
            ranks,
            self.memory,
            config,
            engine=self._engine_source,
            sampling=lambda: self.sampler.sampling,
            autocast=autocast_dtype(args),
            call=functools.partial(host.call, session=self),
        )
        self.training = True
        self.rows: list[dict[str, Any]] = []
        self.on_completion: Callable[[int, Request, Completion], None] | None = None
        self.on_conversation: Callable[[int, Conversation], None] | None = None
        self.router_replay: RouterReplay | None = None
        self.positions: Positions | None = None
        self.experts: list[npt.NDArray[np.int16]] = []
        self.sampled: list[Any] | None = None
        self.endings = Endings()
        self.over_support, self.supports = over_support, Supports()
        self._left = False
        self.metrics: dict[str, float | list[float]] = {}
        self._step = step
        self._announced = False
        self._stack = ExitStack()
        self._refuse_early()
        self.algorithms = Algorithms(selection.algorithms, self)
        host.require(config.options("plugin"), "HybridConfig.plugin_options")
        host.call("trlx_configure", session=self)
        self._stack.callback(host.call, "trlx_unconfigure", session=self)
        self._leave_at_exit()

    # --- the rollout: the main loop of the package ------------------------------------------------------------------

    @contextmanager
    def rollout_phase(self, training: bool) -> Iterator[None]:
        """Give the device memory to the engine inside the context, and back to the trainer on exit; everything sampled
        inside is one batch. Collective.

        The steps are: wake the engine's weights, copy the policy's into them, wake the KV cache, sample, and put the
        engine to sleep. However many turns are sampled, the other steps happen once per phase.

        Args:
            training: True where the batch is for training, False for evaluation.

        Raises:
            StaleWeightsError: a rollout phase is running already: rollout_phase() cannot be nested.
        """
        self.training, self.metrics, self.sampled = training, {}, None
        self.endings.clear()
        self.supports.clear()
        if self.selection.stock:
            yield
            return
        if self.phase is Phase.ROLLOUT:
            raise StaleWeightsError(
                "rollout_phase() cannot be nested. Leave the first phase before you enter the next."
            )
        self.open()
        engine, started = self.live_engine, time.perf_counter()
        with self.memory.reporting():
            self._cross_to(Phase.ROLLOUT, lambda: self._bring_up(engine))
            self.sampler.begin("train" if training else "eval", self.versions.version)
            try:
                yield
            finally:
                self._cross_to(Phase.TRAIN, lambda: self._put_down(engine))
        self.sampler.end()
        self.metrics["hybrid/rollout_seconds"] = time.perf_counter() - started

    def _cross_to(self, phase: Phase, hand_over: Callable[[], None]) -> None:
        """Change the phase: call all plugins' `trlx_leave_phase` hooks, then `hand_over`, which moves the device
        memory, then the `trlx_enter_phase` hooks. Where something fails, for instance a hook, the phase is TRAIN
        afterwards, and the trainer has the memory."""
        step = self._step()
        try:
            self.host.call("trlx_leave_phase", session=self, phase=self.phase, step=step)
            hand_over()
            self.phase = phase
            self.host.call("trlx_enter_phase", session=self, phase=phase, step=step)
        except BaseException:
            self.phase = Phase.TRAIN
            self._put_down(self.live_engine)
            raise

    def _bring_up(self, engine: Engine) -> None:
        assert self.weights is not None
        self.memory.make_room()
        asked(self._engine_source, engine, "wake", "weights")
        if engine.weights_lost:
            self.versions.forget()
        report = self.versions.sync(engine, self.weights)
        self.memory.make_room(["policy"])
        asked(self._engine_source, engine, "wake", "kv_cache")
        self.metrics["hybrid/weight_version"] = float(self.versions.version)
        self.metrics["hybrid/fingerprint_seconds"] = self.versions.fingerprint_seconds
        self.metrics |= self.memory.ledger.metrics(Phase.ROLLOUT)
        if report is not None:
            self.metrics |= {"hybrid/sync_seconds": report.seconds, "hybrid/sync_bytes": float(report.bytes)}

    def _put_down(self, engine: Engine) -> None:
        assert self.weights is not None
        lost = asked(self.versions.source, self.weights, "put_back")
        if not isinstance(lost, bool):
            raise fault(self.versions.source, "put_back", f"{lost!r:.80}", "a bool, whether the engine lost weights,")
        if lost:
            self.versions.forget()
        asked(self._engine_source, engine, "sleep", keep_weights=self.weights.keeps_weights)
        self.memory.come_back()
        self.metrics |= self.memory.ledger.metrics(Phase.TRAIN)

    def generate(
        self,
        prompts: Sequence[list[int]],
        images: Sequence[list[Any] | None] | None = None,
        num_generations: int = 1,
        timer: AbstractContextManager[Any] | None = None,
        sampling: Sampling | None = None,
    ) -> list[Completion]:
        """Sample one completion per prompt of this rank, and return them in order.

        Args:
            prompts: token ids; the copies of one prompt's group follow each other.
            images: images of each prompt; None where no prompt has any.
            num_generations: size of a group.
            timer: a context that is entered around the engine's work, such as TRL's profiler.
            sampling: sampling parameters of this call; None for the run's.

        Raises:
            StaleWeightsError: outside of a rollout phase, or the policy changed within it.
        """
        known, self.sampled = self.sampled, None
        completions = cast("list[Completion]", known)
        if known is None:
            self._require_current()
            assert self.rollout is not None
            run = functools.partial(self.rollout.run, self)
            completions = self.sampler.sample(self.live_engine, run, prompts, images, num_generations, timer, sampling)
        if self.config.router_replay:
            self.experts = self.sampler.experts(completions)
        for prompt_ids, completion in zip(prompts, completions, strict=True):
            self.endings.add(prompt_ids, completion.token_ids, completion.finish_reason)
            self.supports.add(prompt_ids, completion.token_ids, completion.support)
        return completions

    def converse(self, dialogues: Sequence[Dialogue], limits: Limits, num_generations: int = 1) -> list[Conversation]:
        """Run every dialogue of this rank to its end and return the conversations in order. Only where the rollout
        component can run conversations with tools (`session.rollout.converses`).

        Args:
            dialogues: for each row, its prompt and the tools that answer the model.
            limits: the limits of each conversation, such as its number of tokens.
            num_generations: size of a group.

        Raises:
            StaleWeightsError: outside of a rollout phase, or the policy changed within it.
            ComponentError: the rollout failed, or did not return a conversation per dialogue.
        """
        known, self.sampled = self.sampled, None
        conversations = cast("list[Conversation]", known)
        if known is None:
            self._require_current()
            source = self.sampler.source
            assert source is not None
            request = self.sampler.converse(self.live_engine, [d.prompt_ids for d in dialogues], num_generations)
            returned = asked(source, self.rollout, "converse", self, dialogues, limits, request)
            conversations = source.conversations(returned, len(dialogues))
        for dialogue, conversation in zip(dialogues, conversations, strict=True):
            self.endings.add(dialogue.prompt_ids, conversation.completion_ids, conversation.finish_reason)
            self.supports.add(dialogue.prompt_ids, conversation.completion_ids, conversation.support)
        return conversations

    def _require_current(self) -> None:
        versions = self.versions
        if self.phase is not Phase.ROLLOUT or versions.engine_version != versions.version:
            raise StaleWeightsError(
                f"The engine holds weight version {versions.engine_version}, the policy is at {versions.version}, and "
                f"the phase is {self.phase.value}. Generate inside `session.rollout_phase(...)`, which syncs first, "
                "and change no weights in it."
            )

    @property
    def sampling(self) -> Sampling:
        """The run's sampling parameters."""
        return self.sampler.sampling

    @property
    def weight_version(self) -> int:
        """The version of the policy's weights, which grows with each change of them, such as an optimizer step."""
        return self.versions.version

    # --- components -------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The number of optimizer steps done."""
        return self._step()

    @property
    def adviser(self) -> PluginInfo | None:
        """The former name of `advantages_plugin`, which tests written by `trlx-hybrid new` read."""
        warnings.warn("session.adviser is session.advantages_plugin now.", FutureWarning, stacklevel=2)
        return self.advantages_plugin

    @property
    def live_engine(self) -> Engine:
        """The engine. Raises ComponentError where it is not built yet (see `open`)."""
        if self.engine is None:
            raise ComponentError("The engine is not built yet: call `session.open()`, or start training.")
        return self.engine

    @property
    def scoring(self) -> Scoring:
        """The component that computes the trainer's log-probs; built when it is first needed, with the model
        prepared."""
        if self._scoring is None:
            choice = self.selection.scoring
            self._scoring = choice.component.build(self, choice.options)
            if self._scoring_state:
                asked(choice.component, self._scoring, "load_state", self._scoring_state)
        return self._scoring

    def open(self) -> None:
        """Build the engine and the rollout component, choose the weight sync, and print what was chosen. Called when
        Accelerate has prepared the policy. Does nothing the second time."""
        if self.rollout is None and self.selection.engine is not None and self.selection.rollout is not None:
            if self.engine is not None:  # a later step of the last `open` failed
                self.release_engine()
            if self.positions is not None:
                check_positions(self.policy, autocast_dtype(self.args))
            self._evict_other()
            engine, rollout = self.selection.engine, self.selection.rollout
            # Weights that the engine shares could never be trained if they were made in a caller's `inference_mode`.
            with torch.inference_mode(False), torch.no_grad():
                try:
                    with preserved_generators():
                        self.engine = self.memory.engine = engine.component.build(self, engine.options)
                    Session._holder = weakref.ref(self)
                    self._leave_at_exit()
                    self.memory.return_after_build(self.engine)
                    self.weights, self.weights_why = choose(self.selection, self._weights_of)
                    asked(self.versions.source, self.weights, "open")
                finally:
                    self.memory.unpark_policy()
            self.memory.predict_live(self.live_engine, self.weights.keeps_weights)
            self.rollout = rollout.component.build(self, rollout.options)
        if not self._announced:
            self._announced = True
            self._announce()

    def _weights_of(self, choice: Choice) -> WeightSync:
        """Build a candidate for the run's weight sync, and record its component in `versions.source`: the last
        candidate that is built is the one that the run uses."""
        self.versions.source = choice.component
        made: WeightSync = choice.component.build(self, choice.options)
        return made

    def header(self) -> list[str]:
        """Return the lines that are printed when the run starts: the chosen components and why; the memory prediction;
        notes of the components and of plugins. Collective."""
        selection = self.selection
        plugins = ", ".join(str(p) for p in self.host.plugins) or "none"
        if self.config.replay is not None:
            slots = [f"engine=none ({selection.stock_reason}): nothing is sampled"]
        elif selection.engine is None or selection.rollout is None:
            slots = [f"engine=transformers ({selection.stock_reason}): generation is TRL's own"]
        else:
            weights = f"weights={self.weights.name if self.weights else '?'} ({self.weights_why})"
            slots = [str(selection.engine), weights, str(selection.rollout)]
        slots += map(str, filter(None, (selection.scoring, *selection.algorithms, selection.environment)))
        if self.advantages_plugin is not None:
            slots.append(f"advantages=plugin {self.advantages_plugin.name} ({self.advantages_plugin.distribution})")
        lines = [" · ".join([f"trlx_hybrid {package_version()}", f"plugins: {plugins}", *slots]), *self.memory.table()]
        if self.weights is not None:
            lines += filter(None, [asked_text(self.versions.source, self.weights, "note")])
        lines += filter(None, [asked_text(selection.scoring.component, self.scoring, "note")])
        if self.scoring.deferred and self.scores_apart is not None:
            lines.append(f"scoring: old log-probs take a forward pass of their own: {self.scores_apart}")
        unsharded = fsdp_note(self.policy.module, self.policy.fsdp_version, self.ranks.world, self.args)
        lines += filter(None, [*self.algorithms.notes(), *self.notes, unsharded, self.ranks.alone])
        for added in self.host.call("trlx_report_header", session=self):
            lines += self._added(added)
        return lines

    def _added(self, lines: Any) -> list[str]:
        """Return as a list of lines what a plugin's hook `trlx_report_header` returned, which is a line or a list of
        lines.

        Raises:
            PluginError: it returned something else.
        """
        if isinstance(lines, str):
            return [lines]
        if isinstance(lines, list) and all(isinstance(line, str) for line in lines):
            return lines
        hook = "trlx_report_header"
        plugins = ", ".join(plugin.name for plugin in self.host.plugins if hook in plugin.hooks)
        raise PluginError(
            f"A plugin returned {lines!r:.80} from {hook}: one of {plugins}. Return a line, a list of lines, or None.",
            hook=hook,
        )

    def _announce(self) -> None:
        """Print the lines of `header`, on rank 0, to stderr, since stdout belongs to the script."""
        self.header_lines = lines = self.header()
        if self.ranks.rank == 0:
            print("\n".join(lines), file=sys.stderr, flush=True)

    def _refuse_early(self) -> None:
        """Raise ComponentError where a chosen component says that it cannot serve this run, before anything is
        built."""
        for choice in filter(
            None, (self.selection.engine, self.selection.rollout, self.selection.scoring, *self.selection.algorithms)
        ):
            component = choice.component
            reason = component.refusal(self, choice.options)
            if reason is not None:
                raise ComponentError(f"{component.slot} {component.name!r} cannot serve this run: {reason}")

    def _evict_other(self) -> None:
        """Close another session's engine, since a process holds only one. That session rebuilds it to generate."""
        other = Session._holder() if Session._holder is not None else None
        if other is not None and other is not self:
            other.release_engine()

    @property
    def held_bytes(self) -> dict[Phase, dict[str, int]]:
        """The bytes on this rank's device by phase and owner, such as "policy" or "KV cache", as measured when the
        phase last began; empty where TRL itself generates."""
        return self.memory.ledger.held

    def free_bytes(self) -> int:
        """Return how many bytes of the policy's device are free now, including those that torch caches for later."""
        return self.memory.free_bytes()

    def weights_changed(self) -> None:
        """Record, on every rank, that code outside of the optimizer changed weights: the next rollout syncs all."""
        self.versions.changed()
        if self.weights is not None:
            asked(self.versions.source, self.weights, "forget")

    # --- life -------------------------------------------------------------------------------------------------------

    def save_state(self, folder: Path) -> None:
        """Write the session's state into a checkpoint's folder, so that a resumed run goes on as if it had not been
        interrupted. Rank 0 only."""
        file = folder / f"{STATE_FILE}.part"  # renamed when complete, so that a kill leaves no partial file
        state: dict[str, Any] = {"weight_version": self.versions.version, "step": self.step}
        if self.selection.unscored is None:
            kept: Mapping[str, Any] = getattr(self._scoring, "state", dict)()
            state["scoring"] = described(self.selection.scoring) | {"state": kept}
        if self.config.replay is None:  # in a replay, algorithms see nothing
            state["algorithms"] = self.algorithms.state()
        file.write_text(json.dumps(state, default=str))  # options set in code may be anything
        file.replace(folder / STATE_FILE)

    def load_state(self, folder: Path, step: int) -> int:
        """Restore the state that `save_state` wrote into a folder, and return its optimizer steps. Collective.

        Args:
            step: number of optimizer steps at the checkpoint; taken as the weight version where the folder has no such
                state, because stock TRL wrote the checkpoint.
        """
        file = folder / STATE_FILE
        state: Any = self.ranks.broadcast(json.loads(file.read_text()) if file.exists() else {"weight_version": step})
        self.versions.version = state["weight_version"]
        self._score_on(state.get("scoring"))
        self.algorithms.load_state(state.get("algorithms", {}))
        self.versions.forget()
        self.sampler.forget()
        return int(state.get("step", self.versions.version))

    def _score_on(self, earlier: dict[str, Any] | None) -> None:
        """Use the scoring of a checkpoint's run, unless the user chose one: another scoring would round differently.

        Args:
            earlier: the scoring that the checkpoint names, `described`; None where it names none.
        """
        selection = self.selection
        if self._scoring is not None:
            asked(selection.scoring.component, self._scoring, "close")
            self._scoring = None
        if selection.unscored is None and not (selection.stock and self.config.scoring == AUTO):  # else TRL scores
            choice = continued(selection.scoring, earlier, self.config, self.host.registry, RESUMED)
            self.selection = dataclasses.replace(selection, scoring=choice)
        if earlier is not None and earlier["name"] == self.selection.scoring.component.name:
            self._scoring_state = earlier.get("state", {})

    def release_engine(self) -> None:
        """Close the engine and free its memory; the next rollout builds it again."""
        self.memory.settle()
        with ExitStack() as ending:  # in reverse order, and each, even if one fails
            ending.callback(self._forget_engine)
            if self.weights is not None:
                ending.callback(asked, self.versions.source, self.weights, "release")
            if self.engine is not None:
                ending.callback(self._close_engine, self.engine)
            self._end_rollout(ending)

    def _close_engine(self, engine: Engine) -> None:
        try:
            asked(self._engine_source, engine, "close")
        except BaseException:
            self._half_closed.append(engine)  # `leave` releases the rest at the end of the process
            raise

    def _end_rollout(self, ending: ExitStack) -> None:
        if self.rollout is not None and self.selection.rollout is not None:
            ending.callback(asked, self.selection.rollout.component, self.rollout, "close")

    def _forget_engine(self) -> None:
        self.engine = self.memory.engine = self.weights = self.rollout = None
        self.memory.reclaim()
        self.versions.forget()

    def _leave_at_exit(self) -> None:
        """Register `leave_all` to run at the end of the process before everything registered so far, such as vLLM's
        allocator."""
        Session._open.add(self)
        atexit.unregister(leave_all)
        atexit.register(leave_all)

    def close(self) -> None:
        """End the run: call the plugins' `trlx_unconfigure` and free the engine. May be called twice. After `leave` it
        does nothing, for instance when the interpreter collects the session at the end of the process."""
        Session._open.discard(self)
        if self._left:
            return
        with ExitStack() as ending:  # as in `release_engine`
            ending.callback(self.memory.close)
            ending.callback(self.release_engine)
            for part in (self.positions, self.router_replay):
                if part is not None:
                    ending.callback(part.close)
            if self._scoring is not None:
                ending.callback(asked, self.selection.scoring.component, self._scoring, "close")
            ending.callback(self._stack.close)

    def leave(self) -> None:
        """Leave a run that nobody closed, at the end of the process, perhaps after an error: call the plugins'
        `trlx_unconfigure`, release what would keep the process alive, and wait for no other rank. Memory is freed with
        the process."""
        self._left = True
        with ExitStack() as ending:
            for engine in (*self._half_closed, *filter(None, [self.engine])):
                method = "leave" if hasattr(engine, "leave") else "close"
                ending.callback(asked, self._engine_source, engine, method)
            self._end_rollout(ending)
            ending.callback(self._stack.close)


def leave_all() -> None:
    """Call `leave` on each open session of this process, at its end. An error of one session is only printed."""
    for session in list(Session._open):
        Session._open.discard(session)
        try:
            session.leave()
        except Exception:
            traceback.print_exc(file=sys.stderr)
