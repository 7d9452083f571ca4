"""Errors that users can meet. Each message names the culprit and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

TROUBLESHOOTING = "docs/troubleshooting.md"
"""The page of this project's repository with a section for each error class."""


class HybridError(Exception):
    """The base of all errors raised by this package. A note names the documentation section on the class, so that a
    traceback ends with it; the message stays as it is.

    Attributes:
        page: the section, as `file#anchor`. A class of another project has the section of its nearest base class here.
    """

    page = f"{TROUBLESHOOTING}#hybriderror"

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        if cls.__module__.startswith("trlx_hybrid"):
            cls.page = f"{TROUBLESHOOTING}#{cls.__name__.lower()}"

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.add_note(f"See {self.page} in the repository of trlx-hybrid.")


class ConfigError(HybridError, ValueError):
    """An error for a setting that is unknown, contradicts another one, or cannot be fulfilled here."""


class PluginError(HybridError):
    """An error for a plugin that failed. The message names the plugin, its distribution and version, the hook, and what
    to do.

    Attributes:
        plugin: entry-point name of the plugin, as `TRLX_HYBRID_DISABLE` takes it.
        hook: name of the hook that failed, or None when the plugin did not even load.
    """

    def __init__(self, message: str, *, plugin: str = "", hook: str | None = None) -> None:
        # The default is for pickle, which passes the message alone and sets the attributes afterwards.
        super().__init__(message)
        self.plugin = plugin
        self.hook = hook


class ComponentError(HybridError):
    """An error for a component (an engine, weight sync, rollout, algorithm and so on) that is missing, ambiguous, does
    not keep its protocol, or cannot work in this run."""


class EngineError(HybridError):
    """An error for an engine that could not be built, was asked for something that it cannot do, or failed."""


class SyncError(HybridError):
    """An error for a weight sync that left the engine with other weights than the policy's."""


class PeerLostError(SyncError):
    """An error for a rank that has died, or does something else than the others; the message names the rank. Without
    this error, the other ranks would wait for it for ever."""


class StaleWeightsError(SyncError):
    """An error for generation with an engine whose weights are not the policy's."""


class PolicyError(HybridError):
    """An error for a policy whose own log-probs are NaN, because an optimizer step or an overflow broke it, or depend
    on the other rows of a micro-batch."""


class RewardError(HybridError, ValueError):
    """An error for a reward function whose result cannot be turned into advantages."""


class MemoryPlanError(HybridError):
    """An error for memory that does not suffice, on the device or on the host. The message names the largest owner and
    the setting to change.

    Attributes:
        owner: the largest owner of memory that cannot be offloaded, such as "policy" or "KV cache", as the memory
            ledger names it; "host arena" for host memory.
    """

    def __init__(self, message: str, *, owner: str = "") -> None:  # the default is for pickle
        super().__init__(message)
        self.owner = owner


def listed(names: Sequence[str], limit: int = 5) -> str:
    """Return names for a message: the first `limit`, and how many more there are."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def nearest(name: str, known: Iterable[str], alike: float = 0.6) -> str:
    """Return the known name most similar to the given one, or "" where none has a similarity (from 0 to 1) of at least
    `alike`."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=alike)), "")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a sentence with the nearest of the known names, to be added to a message, or "" where none is near."""
    close = nearest(name, known)
    return f" Did you mean {close!r}?" if close else ""
