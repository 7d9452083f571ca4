"""The registry of components. A slot is one exchangeable part of a run, such as the engine or the weight sync (see
SLOTS). Plugins offer named components for slots, and a run chooses among them."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from ..blame import asked_text, blaming
from ..contract.conversation import Conversation
from ..contract.protocols import Algorithm, Engine, EnvironmentArguments, Rollout, Scoring, WeightSync
from ..contract.types import Completion, Request, Sampling
from ..errors import ComponentError, did_you_mean, nearest
from .checks import accepts, described, missing_members, mistaken_members, wrong_completions, wrong_conversations

if TYPE_CHECKING:
    from ..contract.activations import Activations, PlannedLoss

Slot = Literal["engine", "weights", "rollout", "scoring", "algorithm", "environment", "server"]
SLOTS: tuple[Slot, ...] = get_args(Slot)
BUILTIN = "builtin"
SCRIPT = "this script"  # instead of a distribution

BRINGS: dict[Slot, dict[str, str]] = {
    "engine": {"vllm": "trlx-hybrid-vllm", "remote": "trlx-hybrid-ray"},
    "weights": {
        **dict.fromkeys(("alias", "lora", "copy", "merged", "transfer"), "trlx-hybrid-vllm"),
        "reshard": "trlx-hybrid-reshard",
    },
    "rollout": {"multi_turn": "trlx-hybrid-multiturn"},
    "scoring": {"packed": "trlx-hybrid-training"},
    "algorithm": dict.fromkeys(
        (
            *("dynamic_sampling", "curriculum", "length_reward", "positive_nll"),
            *("leave_one_out", "optimal_baseline", "pass_at_k"),
        ),
        "trlx-hybrid-algorithms",
    ),
    "environment": {},
    "server": {"vllm": "trlx-hybrid-vllm"},
}
"""The distribution to install for each component of this project, by slot ("engine", "weights" and so on) and name.
Messages may name only these: anyone could register another name on a package index."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Component:
    """A component that a plugin offers for a slot (an exchangeable part of a run, such as the engine).

    Attributes:
        factory: called with the session and the validated options; returns the live object. Heavy imports belong here.
            An environment is made before there is a session: its factory is called with None.
        options: dataclass that `HybridConfig.<slot>_options` is validated against; None takes no options.
        order: the position in which `auto` tries it, lowest first (for weight syncs and scorings).
        unavailable: called without arguments; returns the reason why the component cannot work on this machine, or
            None.
        refuses: called with the session and the options when the trainer is built, before the component is built;
            returns why the component cannot serve this model, or None.
        streams: for an engine: whether it serves requests one at a time (`Engine.stream`).
        interrupts: for an engine: whether its streams say what an unfinished request has sampled (`Stream.sampled`), so
            that the request can be interrupted and go on later; after the first call the stream takes no further
            requests and steps. For a server: whether `EngineServer.generate` can be
            interrupted. For a rollout: whether conversations with tools can stay in flight over several rollouts
            (`Rollout.play`).
        routes: for an engine: whether its completions can name the experts of their tokens (`Completion.experts`).
        keeps: for an engine or a server: whether its completions can name the ids that tokens were sampled from
            (`Completion.support`).
        needs: names of features that the engine must have: "streams" (for a rollout: single requests), "lora_slots"
            (for a weight sync: memory in the engine for the policy's adapters), or another name that an engine knows.
            Engines read it before they are built.
        shares_memory: for a weight sync: whether the policy's parameters become the engine's memory where they can.
        reshards: for a weight sync: whether it moves slices between the trainer's layout and the engine's; it is what
            `HybridEngine(enable_reshard=True)` selects.
        converses: for a rollout: whether it runs conversations with tools (`Rollout.converse`), and so is chosen by
            default where the trainer has tools.
        remote: for an engine: whether it computes on its own GPUs, and takes no memory of the trainer's. If its
            requests can be interrupted, a stream may be open while the trainer trains; the engine's `wake("weights")`
            must then interrupt the requests, so that none runs while the weights change.
        by_name: whether it is chosen only by its name: `auto` skips it.
        proves: for a scoring: whether it compares its log-probs with TRL's on a run's first rows, and scores as TRL
            does where they differ. `auto` chooses only among scorings that do.
        activations: for a scoring: called with a `PlannedLoss` and the options; returns the memory that this pass of
            the loss takes (`Activations`), for the forecast of a run, or None where that is not known.
        options_before: for a scoring: the former defaults of options whose defaults have changed. A run gets them if it
            resumes from a checkpoint, or replays a recording, that is so old that it does not name these options.
        plugin: name of the plugin that offered the component.
        distribution: name and version of the distribution that contains this plugin.
    """

    slot: Slot
    name: str
    factory: Callable[..., Any]
    plugin: str
    summary: str = ""
    options: type[Any] | None = None
    order: int = 0
    unavailable: Callable[[], str | None] = lambda: None
    refuses: Callable[[Any, Any], str | None] = lambda session, options: None
    streams: bool = False
    interrupts: bool = False
    routes: bool = False
    keeps: bool = False
    needs: Collection[str] = ()
    shares_memory: bool = False
    reshards: bool = False
    converses: bool = False
    remote: bool = False
    by_name: bool = False
    proves: bool = False
    activations: Callable[[PlannedLoss, Any], Activations | None] = lambda loss, options: None
    options_before: Mapping[str, Any] = field(default_factory=dict)
    distribution: str = BUILTIN

    def __str__(self) -> str:
        return f"{self.slot} {self.name!r} (plugin {self.plugin!r}, {self.distribution})"

    @property
    def way_out(self) -> str:
        """A sentence that says what the user can do about a fault of this component."""
        if self.distribution.startswith(SCRIPT):
            return "Mend it in this script, or leave it out."
        return "Report it to its author, or choose another."

    def out_of_place(self) -> str | None:
        """Return the reason why the component cannot work on this machine, or None if it can.

        Raises:
            ComponentError: its function `unavailable` raised, or returned something else than a text or None.
        """
        return asked_text(self, self, "unavailable")

    def refusal(self, session: Any, options: Any) -> str | None:
        """Return the reason why the component cannot serve this run, as far as it knows before it is built; None if it
        can.

        Args:
            session: the run's session.
            options: the component's validated options.

        Raises:
            ComponentError: its function `refuses` raised, or returned something else than a text or None.
        """
        return asked_text(self, self, "refuses", session, options)

    def forecast(self, loss: PlannedLoss, options: Any) -> Activations | None:
        """Return the memory that a pass of the loss takes with this scoring; None where that is not known.

        Args:
            loss: the pass.
            options: the component's validated options.

        Raises:
            ComponentError: its function `activations` raised.
        """
        with blaming(self, "activations"):
            return self.activations(loss, options)

    def build(self, session: Any, options: Any) -> Any:
        """Build the component: return the live object.

        Raises:
            ComponentError: its factory failed; the object lacks members that the protocol of its kind requires, its
                methods take other arguments, or it has members that nothing would read.
        """
        with blaming(self, "factory"):
            built = self.factory(session, options)
        protocol = _protocol(self.slot)
        missing, name = missing_members(built, protocol), f"`{protocol.__module__}.{protocol.__name__}`"
        if missing:
            raise ComponentError(
                f"The {self} made a {type(built).__name__} without {', '.join(missing)}, which {name} requires. "
                f"{self.way_out}"
            )
        mistake = mistaken_members(built, protocol) if protocol in WRITTEN else None
        if mistake is not None:
            raise ComponentError(f"The {self} made a {type(built).__name__} with {mistake}; see {name}. {self.way_out}")
        return built

    def completions(self, sampled: Any, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Return the completions that this engine or rollout sampled, after checking that there is one per request.

        Raises:
            ComponentError: it returned something else, or the completions in another order.
        """
        problem = wrong_completions(sampled, requests, sampling)
        if problem is not None:
            raise ComponentError(f"The {self} returned {problem} {self.way_out}")
        found: list[Completion] = sampled
        return found

    def conversations(self, returned: Any, dialogues: int) -> list[Conversation]:
        """Return the conversations that this rollout returned, after checking that there is one for each of `dialogues`
        dialogues.

        Raises:
            ComponentError: it returned something else.
        """
        problem = wrong_conversations(returned, dialogues)
        if problem is not None:
            raise ComponentError(f"The {self} returned {problem} {self.way_out}")
        found: list[Conversation] = returned
        return found


WRITTEN = (Engine, WeightSync, Rollout, Scoring, Algorithm)
"""Protocols that plugin authors implement as classes, whose members are therefore checked; for the other slots,
factories return objects of this package's classes."""


def _protocol(slot: Slot) -> type[Any]:
    if slot == "server":
        from ..contract.serving import ServerPlan

        return ServerPlan
    protocols = {"engine": Engine, "weights": WeightSync, "rollout": Rollout, "scoring": Scoring}
    return {**protocols, "algorithm": Algorithm, "environment": EnvironmentArguments}[slot]


IMPORTED = re.compile(r"\w+(\.\w+)*:\w+")
"""The pattern of a factory that is given as text, "module:name", and imported only when it is called."""


def _imported(place: str) -> Callable[[Any, Any], Any]:
    return lambda session, options: pkgutil.resolve_name(place)(session, options)


class Registry:
    """The components that the loaded plugins offer, by slot ("engine", "weights" and so on) and name."""

    def __init__(self) -> None:
        self._components: dict[Slot, dict[str, Component]] = {slot: {} for slot in SLOTS}
        self._offering = self._distribution = BUILTIN

    def offer(self, slot: Slot, name: str, factory: Callable[..., Any] | str, **declared: Any) -> None:
        """Register a component. A plugin calls this in its hook `trlx_register`.

        Args:
            slot: the part of a run that the component can be: "engine", "weights", "rollout", "scoring", "algorithm",
                "environment" or "server".
            name: the name by which users choose it.
            factory: called with the session and the validated options; returns the component's object. As a text,
                "module:name", it is a class or function that is imported only when the component is built.
            declared: further attributes of `Component`.

        Raises:
            ComponentError: the slot is unknown, the factory does not take (session, options) or is a text of another
                form, or another plugin has taken the name.
            TypeError: `declared` has an unknown attribute.
        """
        if slot not in self._components:
            raise ComponentError(
                f"Plugin {self._offering!r} ({self._distribution}) offers {name!r} for a slot {slot!r}, which there is "
                f"not.{did_you_mean(slot, SLOTS)} Slots: {', '.join(SLOTS)}."
            )
        if isinstance(factory, str) and IMPORTED.fullmatch(factory):
            factory = _imported(factory)
        if not callable(factory) or not accepts(factory, None, None):
            found = f"takes {described(factory)}" if callable(factory) else f"is a {type(factory).__name__}"
            raise ComponentError(
                f"Plugin {self._offering!r} ({self._distribution}) offers {slot} {name!r} with a factory that {found}. "
                "It is called with the session and the options, and returns the component: "
                '`lambda session, options: ...`, or "module:Class".'
            )
        taken = self._components[slot].get(name)
        if taken is not None:
            raise ComponentError(
                f"Plugins {taken.plugin!r} and {self._offering!r} both offer {slot} {name!r}. "
                f"Disable one: TRLX_HYBRID_DISABLE={taken.plugin} or TRLX_HYBRID_DISABLE={self._offering}."
            )
        self._components[slot][name] = Component(
            slot=slot,
            name=name,
            factory=factory,
            plugin=self._offering,
            distribution=self._distribution,
            **declared,
        )

    def components(self, slot: Slot) -> list[Component]:
        """Return all components that are offered for a slot, such as "engine", in the order in which `auto` tries
        them."""
        return sorted(self._components[slot].values(), key=lambda c: (c.order, c.name))

    def choose(self, slot: Slot, name: str) -> Component:
        """Return a component by its slot (an exchangeable part of a run, such as "engine") and its name.

        Args:
            name: the component's name, or "auto" for the only one that an installed plugin offers for this slot.

        Raises:
            ComponentError: there is no such component, there are several or none for "auto", or it cannot work here.
                The message says why and what to do.
        """
        offered = self._components[slot]
        if name == "auto":
            external = [c for c in self.components(slot) if c.plugin != BUILTIN and not c.by_name]
            if len(external) != 1:
                found = " and ".join(f"{c.name!r} (plugin {c.plugin!r})" for c in external) or none_offered(slot)
                raise ComponentError(
                    f"{slot}='auto' needs exactly one plugin for this slot; found {found}. "
                    f"Choose with HybridConfig({slot}=...) or --{slot}."
                )
            name = external[0].name
        if name not in offered:
            raise ComponentError(self._missing(slot, name, offered))
        component = offered[name]
        reason = component.out_of_place()
        if reason is not None:
            raise ComponentError(f"{slot} {name!r} (plugin {component.plugin!r}) cannot be used here: {reason}")
        return component

    @staticmethod
    def _missing(slot: Slot, name: str, offered: Iterable[str]) -> str:
        known = {*offered, *BRINGS[slot]}
        meant = name if name in BRINGS[slot] else nearest(name, sorted(known))
        hint = f" Did you mean {meant!r}?" if meant not in ("", name) else ""
        if meant in BRINGS[slot] and meant not in offered:
            brings = BRINGS[slot][meant]
            hint += (
                f" It comes with {brings}: `pip install {brings}`, or its folder of a checkout. Or it is disabled "
                "(TRLX_HYBRID_DISABLE, disable_plugins)."
            )
        return (
            f"No plugin offers {slot} {name!r}.{hint} Offered: {', '.join(sorted(offered)) or none_offered(slot)}. "
            f"`trlx-hybrid plugins` lists what is loaded."
        )


def none_offered(slot: Slot) -> str:
    """Return a text for an error message about a slot (such as "engine") for which no plugin offers a component: which
    of this project's distributions to install."""
    brings: dict[str, list[str]] = {}
    for name, distribution in BRINGS[slot].items():
        brings.setdefault(distribution, []).append(repr(name))
    ours = [f"`pip install {distribution}` brings {', '.join(names)}" for distribution, names in brings.items()]
    return f"none ({'; '.join(ours) or f'`trlx-hybrid new NAME --kind {slot}` writes one'})"
