"""Versions of installed packages."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version


def release_of(package: str) -> str | None:
    """Return the installed version of a Python package, or None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def series(release: str) -> tuple[int, ...]:
    """Return the first two numbers of a version, its release series: (1, 16) for "1.16.3", (1, 0) for "1.0rc1"."""
    found = re.match(r"(\d+)(?:\.(\d+))?", release)
    if found is None:
        raise ValueError(f"{release!r} does not begin with a number, and is no version.")
    return tuple(int(part) for part in found.groups() if part is not None)


def package_version() -> str:
    """Return the version of the installed package trlx-hybrid; "0+source" where only its source is on sys.path."""
    return release_of("trlx-hybrid") or "0+source"  # a source tree on sys.path
