"""A table of the options that some runs cannot have, with the reason and a way out.

An option that the user has chosen is refused with the reason and a way out; one that a component would choose by itself
is left out, and a line that is printed when the run starts says why. docs/refusals.md prints the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ..plugins.registry import Component
    from ..plugins.selection import Selection
    from .stock import StockTrainer

SCORING = ("GRPO", "RLOO")
"""Names (`_name`) of TRL's trainers that train on log-probs of single tokens."""

SCORER = "_get_per_token_logps_and_entropies"
"""TRL's method that computes log-probs."""

LOSS = ("_prepare_inputs", "compute_loss", "_compute_loss")
"""TRL's methods that receive a micro-batch before or when its loss is computed."""

READERS = ("_generate_and_score_completions", *LOSS)
"""TRL's methods whose overrides in a user's class could read the old log-probs of a rollout."""


def overriding(trainer: StockTrainer, *methods: str) -> str | None:
    """Return the first of a user's methods that overrides one of TRL's, as "Class.method"; None if there is none. The
    user's class lies between this package's and TRL's trainer, or is derived from this package's.

    Args:
        methods: names of TRL's methods.
    """
    package = __name__.partition(".")[0]
    for owner in type(trainer).__mro__:
        if owner.__dict__.get("_name") == trainer._base_name and owner.__module__.startswith("trl.trainer."):
            return None
        found = [name for name in methods if name in owner.__dict__]
        if found and owner.__module__.partition(".")[0] != package:
            return f"{owner.__qualname__}.{found[0]}"
    return None


def own_rollout(trainer: StockTrainer) -> bool:
    """Return whether a user's `rollout_func` brings tokens, with their log-probs, that this package has not sampled."""
    custom = getattr(trainer, "rollout_func", None)
    return custom is not None and not getattr(custom, "samples_from_session", False)


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of a run by which each `Refusal` in this module's table decides whether it applies to the run, which
    then cannot have the option.

    Attributes:
        trainer: the trainer.
        engine: the engine that samples; None where TRL does.
        replays: whether batches come from a recording.
    """

    trainer: StockTrainer
    engine: Component | None = None
    replays: bool = False

    @classmethod
    def of(cls, trainer: StockTrainer, selection: Selection, replays: bool = False) -> Facts:
        """Return the facts of a run.

        Args:
            selection: the chosen components.
            replays: whether batches come from a recording.
        """
        return cls(trainer, None if selection.engine is None else selection.engine.component, replays)

    @property
    def sampler(self) -> str:
        """The quoted name of the engine that samples, for messages; 'transformers' where TRL samples."""
        return repr(self.engine.name if self.engine is not None else "transformers")

    @property
    def streamed(self) -> bool:
        """True where the training dataset is iterable, so that no row can be asked for by its number."""
        return not all(hasattr(self.trainer.train_dataset, name) for name in ("__getitem__", "__len__"))

    def over(self, *methods: str) -> str:
        """Return the first of the user's methods that overrides one of TRL's `methods`, as "Class.method"; "" if there
        is none."""
        return overriding(self.trainer, *methods) or ""


class Refusal(NamedTuple):
    """A row of the table: one kind of run that cannot have an option.

    Attributes:
        when: the kind of run, as text for docs/refusals.md.
        why: returns the reason as text, with this run's names and numbers; "" where it does not apply.
    """

    when: str
    why: Callable[[Facts], str]


def _where(applies: object, reason: str) -> str:
    return reason if applies else ""


class Option(NamedTuple):
    """An option that some runs cannot have.

    Attributes:
        name: its name in docs/refusals.md.
        way_out: what a user does where the option is refused, or what happens instead, as text.
        refusals: the kinds of runs that cannot have it; the first that applies gives the reason.
    """

    name: str
    way_out: str
    refusals: tuple[Refusal, ...]

    def refused(self, facts: Facts) -> str | None:
        """Return the reason why a run cannot have the option; None where it can."""
        return next(filter(None, (refusal.why(facts) for refusal in self.refusals)), None)


SCORING_COMPONENT = Option(
    "a scoring by name (`HybridConfig.scoring`)",
    "Leave it out.",
    (
        Refusal(f"a class overrides `{SCORER}`", lambda f: (own := f.over(SCORER)) and f"{own} computes its log-probs"),
        Refusal(
            "another trainer than " + " and ".join(SCORING),
            lambda f: _where(f.trainer._base_name not in SCORING, "it is none of " + " and ".join(SCORING)),
        ),
    ),
)

DEFERRED = Option(
    "old log-probs from the first loss (`scoring_options={'deferred': True}`)",
    "They take a forward pass of their own.",
    (
        Refusal(
            "a class overrides a method in which they can be read: " + ", ".join(f"`{name}`" for name in READERS),
            lambda f: (own := f.over(*READERS)) and f"{own} may read them.",
        ),
        Refusal(
            "a plugin implements `trlx_advantages`",
            lambda f: (
                f"trlx_advantages of plugin {plugin.name!r} may read them."
                if (plugin := f.trainer.session.advantages_plugin) is not None
                else ""
            ),
        ),
        Refusal(
            "RLOO with `beta`",
            lambda f: _where(
                f.trainer._base_name == "RLOO" and f.trainer.beta != 0,
                f"RLOO takes the KL divergence, with beta={getattr(f.trainer, 'beta', 0):g}, out of the rewards.",
            ),
        ),
        Refusal(
            "a rollout is longer than an optimizer step",
            lambda f: _where(
                f.trainer.args.steps_per_generation > f.trainer.args.gradient_accumulation_steps,
                f"a rollout is {f.trainer.args.steps_per_generation} micro-batches (steps_per_generation) and the "
                f"weights change after {f.trainer.args.gradient_accumulation_steps} (gradient_accumulation_steps).",
            ),
        ),
    ),
)

REGROUPED = Option(
    "rows moved to other micro-batches (`scoring_options={'balanced': True}`)",
    "Rows stay in the micro-batches that TRL draws.",
    # TRL sums over tokens or rows and divides by numbers that are the same for each micro-batch of a step, as long as
    # all micro-batches have equally many rows. These divide by the tokens of one, or compare its tokens.
    (
        Refusal(
            "a class overrides a method on the way to the loss: " + ", ".join(f"`{name}`" for name in LOSS),
            lambda f: (own := f.over(*LOSS)) and f"{own} may depend on which rows share a micro-batch.",
        ),
        Refusal(
            "`loss_type='bnpo'`",
            lambda f: _where(
                getattr(f.trainer.args, "loss_type", None) == "bnpo",
                "loss_type='bnpo' divides by the tokens of each micro-batch.",
            ),
        ),
        Refusal(
            "`top_entropy_quantile` below 1",
            lambda f: _where(
                getattr(f.trainer, "top_entropy_quantile", 1.0) < 1.0,
                "top_entropy_quantile compares the tokens of a micro-batch.",
            ),
        ),
        Refusal(
            "an entropy bonus",
            lambda f: _where(
                getattr(f.trainer, "_entropy_bonus_enabled", False),
                "the entropy bonus is a mean over the tokens of a micro-batch.",
            ),
        ),
        Refusal(
            "an algorithm adds a term to the loss",
            lambda f: _where(
                f.trainer.session.algorithms.loss_terms_by is not None,
                f"algorithm {f.trainer.session.algorithms.loss_terms_by!r} may add a mean over the tokens of a "
                "micro-batch.",
            ),
        ),
        Refusal(
            "the model's loss balances its experts",
            lambda f: _where(
                f.trainer.aux_loss_enabled, "the load balance of experts is one of the tokens of a micro-batch."
            ),
        ),
        Refusal(
            "a rollout begins within an optimizer step",
            lambda f: _where(
                f.trainer.args.gradient_accumulation_steps % f.trainer.args.steps_per_generation,
                "two optimizer steps share a rollout.",
            ),
        ),
    ),
)

KEPT_IDS = Option(
    "log-probs over the ids that `top_k`, `top_p` or `min_p` keep",
    "Log-probs are computed over all ids, and the header warns.",
    (
        Refusal(
            "an engine that does not return the kept ids",
            lambda f: _where(
                not f.replays and (f.engine is None or not f.engine.keeps),
                f"engine {f.sampler} does not say which ids it kept",
            ),
        ),
        Refusal(
            "a `rollout_func` of one's own",
            lambda f: _where(
                own_rollout(f.trainer), "a rollout_func brings tokens without the ids that they were sampled from"
            ),
        ),
        Refusal(f"a class overrides `{SCORER}`", lambda f: (own := f.over(SCORER)) and f"{own} computes log-probs"),
        Refusal(
            "`torch_compile`",
            lambda f: _where(getattr(f.trainer.args, "torch_compile", False), "torch_compile compiles TRL's head"),
        ),
    ),
)

ROUTER_REPLAY = Option(
    "`HybridConfig.router_replay`",
    "Leave it out.",
    (
        Refusal(f"a class overrides `{SCORER}`", lambda f: (own := f.over(SCORER)) and f"{own} computes its log-probs"),
        Refusal(
            "a model without experts",
            lambda f: _where(
                not f.trainer.session.policy.has_experts,
                f"{f.trainer.session.policy.architecture} routes no tokens to experts",
            ),
        ),
        Refusal(
            "another trainer than " + " and ".join(SCORING),
            lambda f: _where(
                f.trainer._base_name not in SCORING,
                f"it is for {' and '.join(SCORING)}, and this is {type(f.trainer).__name__}",
            ),
        ),
        Refusal(
            "an engine that does not return the experts",
            lambda f: _where(
                not f.replays and (f.engine is None or not f.engine.routes),
                f"engine {f.sampler} does not say which experts it chose; 'vllm' does",
            ),
        ),
        Refusal(
            "a `rollout_func`",
            lambda f: _where(
                getattr(f.trainer, "rollout_func", None) is not None,
                "a rollout_func brings tokens without the experts that they were routed to",
            ),
        ),
        Refusal(
            "tools or environments",
            lambda f: _where(
                getattr(f.trainer, "tools", None) or getattr(f.trainer, "environment_factories", None),
                "the turns of a conversation are prompts of their own, whose experts are not put together",
            ),
        ),
        Refusal(
            "a model with images",
            lambda f: _where(
                (config := f.trainer.session.policy.base.config).get_text_config() is not config,
                "prompts with images are not covered",
            ),
        ),
        Refusal(
            "`torch_compile`",
            lambda f: _where(getattr(f.trainer.args, "torch_compile", False), "torch_compile compiles the routers"),
        ),
    ),
)

OTHER_PROMPTS = Option(
    "an algorithm that samples other prompts (`HybridConfig.algorithm`)",
    "Leave it out, or do as the reason says.",
    (
        Refusal(
            "an iterable training dataset",
            lambda f: _where(
                f.streamed,
                "its training dataset is iterable, so no row can be asked for. Load it as a `datasets.Dataset`",
            ),
        ),
        Refusal(
            "images in the dataset, where it filters groups",
            lambda f: _where(
                f.trainer.session.algorithms.filters
                and {"image", "images"} & set(getattr(f.trainer.train_dataset, "column_names", None) or ()),
                "its dataset has images, which TRL puts into prompts before they are sampled. Leave these out",
            ),
        ),
        Refusal(
            "`environment_factory`, where it filters groups",
            lambda f: _where(
                f.trainer.session.algorithms.filters and f.trainer.environment_factories is not None,
                "TRL resets the environments of `environment_factory` once in each batch. Play them with "
                "rollout_func=episodes(...)",
            ),
        ),
    ),
)


def _silent_rollout(facts: Facts) -> str:
    selection, rollout = facts.trainer.session.selection, facts.trainer.session.rollout
    named = None if selection.rollout is None else selection.rollout.component
    if getattr(facts.trainer, "tools", None) and not (rollout is not None and rollout.converses):
        return f"TRL runs the tools, turn by turn, where the {named} samples"
    return "" if rollout is not None and rollout.tells else f"the {named} does not tell what it has sampled (`tells`)"


EARLY_REWARDS = Option(
    "rewards that begin before all rows are sampled (`begins_early`)",
    "They begin when all is sampled.",
    (
        Refusal("TRL samples", lambda f: _where(f.engine is None, "TRL generates")),
        Refusal(
            "rows in flight, with reward functions that cannot begin before their batch is known (`placed`)",
            lambda f: _where(f.trainer.session.sampled is not None, "rows are sampled before their batch is known"),
        ),
        Refusal(
            "a `rollout_func`",
            lambda f: _where(getattr(f.trainer, "rollout_func", None) is not None, "rollout_func samples"),
        ),
        Refusal("a rollout that runs no tools, or does not report what it has sampled (`tells`)", _silent_rollout),
        Refusal(
            "an engine that returns all completions at once",
            lambda f: _where(
                f.engine is not None and not f.engine.streams, f"the {f.engine} returns all completions at once"
            ),
        ),
    ),
)

UNSPLIT = ("stop", "min_tokens", "max_tokens", "detokenize")
"""Sampling settings in TRL's `generation_kwargs` that count or match tokens from a request's beginning, so that a row
cannot go on in another request."""


def _uninterrupted(facts: Facts) -> str:
    rollout = facts.trainer.session.selection.rollout
    if not getattr(facts.trainer, "tools", None) or (rollout is not None and rollout.component.interrupts):
        return ""
    named = "rollout" if rollout is None else str(rollout.component)
    return f"conversations of the {named} cannot be interrupted"


def _unsplit(facts: Facts) -> str:
    sampling = facts.trainer.session.sampling
    setting = sampling.truncated_by() or sampling.reweighted_by() or next(filter(sampling.extra.get, UNSPLIT), "")
    return setting and f"its sampling has {setting}"


IN_FLIGHT = Option(
    "rows in flight over several optimizer steps (`rollout_options={'max_staleness': ...}`)",
    "Leave it out, or do as the reason says.",
    (
        Refusal(
            "another trainer than GRPO",
            lambda f: _where(f.trainer._base_name != "GRPO", f"{type(f.trainer).__name__} does not correct for it"),
        ),
        Refusal(
            "`vllm_importance_sampling_correction=False`",
            lambda f: _where(
                not getattr(f.trainer, "vllm_importance_sampling_correction", False),
                "vllm_importance_sampling_correction is off, so nothing would correct for weights that have changed",
            ),
        ),
        Refusal(
            "an engine whose requests cannot be interrupted",
            lambda f: _where(
                f.engine is None or not f.engine.interrupts, f"requests of engine {f.sampler} cannot be interrupted"
            ),
        ),
        Refusal(
            "a `rollout_func` whose episodes cannot be interrupted (`interrupts`)",
            lambda f: _where(
                (custom := getattr(f.trainer, "rollout_func", None)) and not getattr(custom, "interrupts", False),
                "a rollout_func samples its rows",
            ),
        ),
        Refusal(
            "environments",
            lambda f: _where(
                getattr(f.trainer, "environment_factories", None), "TRL resets its environments before each batch"
            ),
        ),
        Refusal("tools, with a rollout whose conversations cannot be interrupted", _uninterrupted),
        Refusal(
            "a model with images", lambda f: _where(getattr(f.trainer, "_is_vlm", False), "its model takes images")
        ),
        Refusal(
            "an algorithm that samples other prompts",
            lambda f: _where(
                f.trainer.session.algorithms.filters or f.trainer.session.algorithms.draws,
                "its algorithm chooses the prompts",
            ),
        ),
        Refusal(
            "`HybridConfig.router_replay`",
            lambda f: _where(f.trainer.session.config.router_replay, "router_replay needs the experts of whole rows"),
        ),
        Refusal(
            "sampling that excludes or reweights tokens, or that depends on the row's beginning: "
            + ", ".join(f"`{name}`" for name in UNSPLIT),
            _unsplit,
        ),
        Refusal(
            "a rollout that begins within an optimizer step",
            lambda f: _where(
                f.trainer.args.steps_per_generation % f.trainer.args.gradient_accumulation_steps,
                "steps_per_generation is no multiple of gradient_accumulation_steps",
            ),
        ),
        Refusal(
            "groups that lie on several ranks",
            lambda f: _where(
                f.trainer.args.per_device_train_batch_size
                * f.trainer.args.steps_per_generation
                % f.trainer.num_generations,
                "the rows of a batch on each rank (per_device_train_batch_size x steps_per_generation) are no multiple "
                "of num_generations",
            ),
        ),
    ),
)

OPTIONS = (SCORING_COMPONENT, DEFERRED, REGROUPED, KEPT_IDS, ROUTER_REPLAY, OTHER_PROMPTS, EARLY_REWARDS, IN_FLIGHT)
