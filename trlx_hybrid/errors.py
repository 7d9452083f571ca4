"""Every error a user can meet. Each message names the culprit and the way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

TROUBLESHOOTING = "docs/troubleshooting.md"
"""The page with a section for each class, in the repository of this project."""


class HybridError(Exception):
    """Base of all errors raised by this package. A note names the section of the documentation on its class, so that
    a traceback ends with it; the message stays as it is.

    Attributes:
        page: that section. A class of another project has the one of the nearest class above it.
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
    """A setting is unknown, contradicts another one, or cannot be met here."""


class PluginError(HybridError):
    """A plugin failed. Names the plugin, its distribution and version, the hook, and the way out.

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
    """A slot's component is missing, ambiguous, or cannot work here."""


class EngineError(HybridError):
    """The engine could not be built, was asked for what it cannot do, or failed."""


class SyncError(HybridError):
    """A weight sync left the engine with something else than the policy's weights."""


class PeerLostError(SyncError):
    """A rank is gone, or does something else than the others; names it. What waits for all would wait for ever."""


class StaleWeightsError(SyncError):
    """Generation was asked of an engine whose weights are not the policy's."""


class PolicyError(HybridError):
    """The policy's own log-probs are no numbers, since an optimizer step or its arithmetic broke it; or they are others
    beside other rows than alone."""


class RewardError(HybridError, ValueError):
    """A reward function returned something no advantage can be computed from."""


class MemoryPlanError(HybridError):
    """Memory does not suffice, on the device or on the host. Names the largest owner and the setting to change.

    Attributes:
        owner: the largest owner that stays, as the ledger names it; "host arena" for host memory.
    """

    def __init__(self, message: str, *, owner: str = "") -> None:  # the default is for pickle
        super().__init__(message)
        self.owner = owner


def listed(names: Sequence[str], limit: int = 5) -> str:
    """Names for a message: the first `limit`, and how many more there are."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def nearest(name: str, known: Iterable[str], alike: float = 0.6) -> str:
    """The nearest of the known names, or "" where none is as much `alike` as that, from 0 to 1."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=alike)), "")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence with the nearest of the known names, to be added to a message, or nothing where none is near."""
    close = nearest(name, known)
    return f" Did you mean {close!r}?" if close else ""
