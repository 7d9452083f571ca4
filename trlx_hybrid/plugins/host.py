"""The plugin host: loads plugins, calls their hooks, and names the plugin when a hook fails. It depends neither on trl
nor on any backend."""

from __future__ import annotations

import inspect
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from traceback import walk_tb
from types import TracebackType
from typing import Any

import pluggy

from ..errors import ConfigError, HybridError, PluginError, did_you_mean
from . import builtin, hookspecs
from .registry import BUILTIN, SCRIPT, Registry

API_VERSION = 1
"""Version of the plugin API: hooks, protocols and the types that they mention; see docs/compatibility.md."""

ENTRY_POINT_GROUP = "trlx_hybrid"
"""Entry-point group of plugins for version 1 of the API; the group of a later version N is `trlx_hybrid.vN`."""

OTHER_VERSION = re.compile(rf"{ENTRY_POINT_GROUP}\.v(?!{API_VERSION}$)\d+")

DISABLE_VARIABLE = "TRLX_HYBRID_DISABLE"


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """A loaded plugin: its entry-point name, its distribution and version, and the hooks that it implements."""

    name: str
    distribution: str
    version: str
    hooks: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


class Host:
    """The plugins that are loaded in this process, and the registry of the components (engines, weight syncs and so on)
    that they offer.

    Args:
        disable: plugin names to leave out, besides those in the environment variable TRLX_HYBRID_DISABLE.
    """

    def __init__(self, disable: Iterable[str] = ()) -> None:
        self.registry = Registry()
        self.plugins: list[PluginInfo] = []
        self.disabled = sorted({*disable, *filter(None, os.environ.get(DISABLE_VARIABLE, "").split(","))})
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._manager.hook.trlx_register.call_historic(kwargs={"registry": self.registry})
        self._manager.register(builtin, BUILTIN)

    @classmethod
    def load(cls, disable: Iterable[str] = (), plugins: Iterable[object] = ()) -> Host:
        """Return a host with every installed plugin, in the order of their names, followed by the given ones.

        Args:
            disable: names of installed plugins to leave out.
            plugins: the script's own plugins, the trainer's argument `plugins`: objects with hook implementations.

        Raises:
            PluginError: a plugin does not load, is for another version of the API, or two distributions claim one name.
            ConfigError: `disable` names a plugin that is not installed.
        """
        host, disable = cls(disable), list(disable)
        installed = entry_points()
        claims: defaultdict[str, list[EntryPoint]] = defaultdict(list)
        for group in (ENTRY_POINT_GROUP, f"{ENTRY_POINT_GROUP}.v{API_VERSION}"):
            for entry_point in installed.select(group=group):
                if entry_point not in claims[entry_point.name]:  # one distribution found twice on sys.path
                    claims[entry_point.name].append(entry_point)
        others = host._refuse_other_versions(installed, claims)
        for name in disable:  # TRLX_HYBRID_DISABLE may be for several installations
            if name not in claims and name not in others:
                raise ConfigError(
                    f"HybridConfig.disable_plugins has {name!r}, and no plugin of that name is installed."
                    f"{did_you_mean(name, claims)} Installed: {', '.join(sorted(claims)) or 'none'}."
                )
        for name in sorted(set(claims) - set(host.disabled)):
            host._load(name, claims[name])
        if not isinstance(plugins, Iterable) or isinstance(plugins, str):
            raise ConfigError(
                f"plugins= takes a list of objects with hook implementations, got {plugins!r:.80}. Put it into a list."
            )
        for index, plugin in enumerate(plugins):
            name = f"{type(plugin).__name__}-{index}"
            if name not in host.disabled:
                _refuse_without_hooks(plugin, index)
                host.register(plugin, name)
        return host

    def _refuse_other_versions(self, installed: Any, claims: Collection[str]) -> set[str]:
        """Refuse plugins that are only for another version of the API, unless they are disabled: such a plugin might
        load and behave differently than described.

        Args:
            installed: all installed entry points.
            claims: names of plugins for this version; a plugin that is also for other versions is loaded for this one.

        Returns:
            The names of plugins that are for other versions only, all of them disabled.

        Raises:
            PluginError: such a plugin is not disabled.
        """
        groups = [group for group in installed.groups if OTHER_VERSION.fullmatch(group)]
        found = [claim for group in groups for claim in installed.select(group=group) if claim.name not in claims]
        for claim in sorted(found, key=lambda claim: claim.name):
            if claim.name not in self.disabled:
                version = claim.group.rpartition(".v")[2]
                raise PluginError(
                    f"Plugin {claim.name!r} ({_origin(claim)}) is written for version {version} of the plugin API, and "
                    f"this trlx-hybrid has version {API_VERSION}. Upgrade trlx-hybrid, install another release of the "
                    f"plugin, or start without it: {DISABLE_VARIABLE}={claim.name}.",
                    plugin=claim.name,
                )
        return {claim.name for claim in found}

    def _load(self, name: str, claims: Sequence[EntryPoint]) -> None:
        if len({_origin(claim) for claim in claims}) > 1:
            raise PluginError(
                f"Plugin name {name!r} is claimed by {' and by '.join(_origin(c) for c in claims)}. Uninstall one.",
                plugin=name,
            )
        entry_point = claims[0]
        try:
            plugin = entry_point.load()
        except Exception as error:
            raise PluginError(
                f"Plugin {name!r} ({_origin(entry_point)}) does not import: {type(error).__name__}: {error}. "
                f"Repair or uninstall it, or start without it: {DISABLE_VARIABLE}={name}.",
                plugin=name,
            ) from error
        dist = entry_point.dist
        self.register(
            plugin, name, distribution=dist.name if dist else "unknown", version=dist.version if dist else "unknown"
        )

    def register(self, plugin: object, name: str, *, distribution: str = SCRIPT, version: str = "-") -> None:
        """Add a plugin, and call its hook `trlx_register`, if it has one.

        Args:
            plugin: a module, or any object with hook implementations.
            name: the plugin's name, for messages.
            distribution, version: the package that it comes from, for messages; by default the user's script.

        Raises:
            PluginError: one of its hooks does not exist, has other arguments or lacks the decorator `@hookimpl`, or its
                `trlx_register` failed.
        """
        hooks = tuple(n for n in dir(plugin) if self._manager.parse_hookimpl_opts(plugin, n) is not None)
        info = PluginInfo(name, distribution, version, hooks)
        unknown = [hook for hook in info.hooks if not hasattr(hookspecs, hook)]
        if unknown:
            hint = did_you_mean(unknown[0], [h for h in dir(hookspecs) if h.startswith("trlx_")])
            raise PluginError(
                f"Plugin {name!r} ({distribution} {version}) implements {unknown[0]!r}, which is no hook.{hint} "
                f"`trlx_hybrid.plugins.hookspecs` lists them all.",
                plugin=name,
                hook=unknown[0],
            )
        ours = [name for name in dir(plugin) if name.startswith("trlx_") and name not in info.hooks]
        unmarked = [name for name in ours if inspect.isroutine(getattr(plugin, name, None))]
        if unmarked:
            raise PluginError(
                f"Plugin {name!r} ({distribution} {version}) has a function {unmarked[0]!r} without the marker "
                "`@trlx_hybrid.hookimpl`, so it would never be called. Mark it, or, if it is no hook, rename it.",
                plugin=name,
                hook=unmarked[0],
            )
        self.registry._offering, self.registry._distribution = name, f"{distribution} {version}"
        try:
            self._manager.register(plugin, name)
        except Exception as error:
            if isinstance(error, HybridError) and not isinstance(error, PluginError):
                raise
            hook = "trlx_register"
            if isinstance(error, pluggy.PluginValidationError):
                hook = next((h for h in info.hooks if repr(h) in str(error)), hook)
            raise self.fault(info, hook, error) from error
        finally:
            self.registry._offering = self.registry._distribution = BUILTIN
        self.plugins.append(info)

    def call(self, hook: str, **arguments: Any) -> Any:
        """Call a hook on every plugin, and return what pluggy returns: the results in a list, or a single one for a
        hook of which only the first result is used.

        Errors of this package pass through unchanged: they already say what to do.

        Raises:
            PluginError: an implementation raised another error; names its plugin.
        """
        caller = getattr(self._manager.hook, hook)
        try:
            return caller(**arguments)
        except HybridError:
            raise
        except Exception as error:
            info = self._culprit(hook, error.__traceback__)
            if info is None:
                raise
            raise self.fault(info, hook, error) from error

    def _culprit(self, hook: str, traceback: TracebackType | None) -> PluginInfo | None:
        """Return the plugin whose implementation of `hook` raised an error, found in the error's traceback; None if
        there is none. The traceback is searched only after an error, so other calls take no longer."""
        frames = {frame.f_code for frame, _ in walk_tb(traceback)}
        for implementation in getattr(self._manager.hook, hook).get_hookimpls():
            function = getattr(implementation.function, "__func__", implementation.function)
            if getattr(function, "__code__", None) in frames:
                return next((p for p in self.plugins if p.name == implementation.plugin_name), None)
        return None

    def require(self, names: Iterable[str], where: str) -> None:
        """Refuse settings for plugins that are not loaded, because nothing would read these settings.

        Args:
            names: names of the plugins that have settings.
            where: the setting that contains them, for the message.

        Raises:
            ConfigError: a plugin of one of the names is not loaded.
        """
        loaded = [p.name for p in self.plugins]
        for name in names:
            if name not in loaded:
                off = f" It is disabled by {DISABLE_VARIABLE} or disable_plugins." if name in self.disabled else ""
                raise ConfigError(
                    f"{where} has settings of plugin {name!r}, which is not loaded.{off}{did_you_mean(name, loaded)} "
                    f"Install it, or remove the settings. Loaded: {', '.join(loaded) or 'none'}."
                )

    def only(self, hook: str) -> PluginInfo | None:
        """Return the plugin that implements a hook which only one plugin may implement, such as `trlx_advantages`; None
        if there is none.

        Raises:
            PluginError: several plugins implement it.
        """
        found = [p for p in self.plugins if hook in p.hooks]
        if len(found) > 1:
            names = " and ".join(f"{p.name!r} ({p.distribution} {p.version})" for p in found)
            raise PluginError(
                f"Plugins {names} all implement {hook}, and only one answer is used. Disable all but one, for "
                f"example {DISABLE_VARIABLE}={found[-1].name}.",
                plugin=found[-1].name,
                hook=hook,
            )
        return found[0] if found else None

    @staticmethod
    def fault(info: PluginInfo, hook: str, error: Exception) -> PluginError:
        """Return the error to be raised for a hook that failed: it says which plugin failed in which hook, and what to
        do."""
        if info.distribution == SCRIPT:
            where, way_out = f"plugins=, {SCRIPT}", "Mend it there, or leave it out."
        else:
            where = f"{info.distribution} {info.version}"
            way_out = f"Report it to its author, or start without it: {DISABLE_VARIABLE}={info.name}."
        return PluginError(
            f"Plugin {info.name!r} ({where}) failed in {hook}: {type(error).__name__}: {' '.join(str(error).split())}. "
            f"{way_out}",
            plugin=info.name,
            hook=hook,
        )


def _refuse_without_hooks(plugin: object, index: int) -> None:
    """Refuse an object in a script's `plugins=` that is no plugin, or has no hooks and would have no effect.

    Raises:
        PluginError: names the object, and what to hand over instead.
    """
    where, name = f"plugins[{index}]", getattr(plugin, "__name__", type(plugin).__name__)
    problem = None
    if inspect.isclass(plugin):
        problem = f"{where} is the class {name}, whose hooks have no object to be called on. Hand over one: {name}()"
    elif inspect.isroutine(plugin):
        problem = (
            f"{where} is the function {name}, and a hook is found by its name on an object or a module. Hand over an "
            f"object that has it: types.SimpleNamespace({name}={name}), with {name} marked by @trlx_hybrid.hookimpl"
        )
    elif isinstance(plugin, str):
        problem = (
            f"{where} is the text {plugin!r:.60}, and takes an object with hook implementations. Installed plugins "
            "take part without being named"
        )
    elif not any(member.startswith("trlx_") for member in dir(plugin)):
        problem = (
            f"{where}, a {name}, has no hook, so it would take part in nothing. Its methods that are hooks have their "
            "names (trlx_register, trlx_rollout_end, ...; `trlx_hybrid.plugins.hookspecs` lists them) and the marker "
            "@trlx_hybrid.hookimpl"
        )
    if problem is not None:
        raise PluginError(f"{problem}.", plugin=name)


def _origin(entry_point: EntryPoint) -> str:
    dist = entry_point.dist
    return f"{dist.name} {dist.version}" if dist else entry_point.value


def check_ranks_agree(plugins_per_rank: Sequence[Sequence[PluginInfo]]) -> None:
    """Check that every rank runs the same plugins: if one rank lacked a hook, the others would wait in a collective.

    Args:
        plugins_per_rank: the loaded plugins of each rank.

    Raises:
        PluginError: names the first rank that differs from rank 0, and the plugin.
    """
    reference = {(p.name, p.version) for p in plugins_per_rank[0]}
    for rank, plugins in enumerate(plugins_per_rank):
        differing = sorted(reference ^ {(p.name, p.version) for p in plugins})
        if differing:
            name = differing[0][0]
            here = next((str(p) for p in plugins if p.name == name), f"no {name}")
            there = next((str(p) for p in plugins_per_rank[0] if p.name == name), f"no {name}")
            raise PluginError(
                f"Rank {rank} has {here}, rank 0 has {there}. Install the same plugins in every process's "
                f"environment, or disable it on all: {DISABLE_VARIABLE}={name}.",
                plugin=name,
            )
