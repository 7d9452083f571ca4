"""What can go wrong before a script runs. How a script fails is a `Verdict`, not an exception of the launcher."""

from __future__ import annotations

from trlx_hybrid.errors import HybridError


class LaunchError(HybridError):
    """The ranks could not be started. Names the ranks, their nodes and the way out."""


class RankStartError(LaunchError):
    """A rank cannot run the script on its node."""
