"""Seconds of `import trlx_hybrid` over a bare Python; neither it nor loading all plugins may import a backend."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence

from .harness import Arm, alternate
from .result import Result, cpu

HEAVY = ("torch", "vllm", "ray")
BACKENDS = ("vllm", "ray")
IMPORT = "import trlx_hybrid"
LOAD = "from trlx_hybrid.plugins.host import Host; Host.load()"


def python(code: str) -> str:
    """Run code in a fresh interpreter and return what it prints."""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def arm(name: str, code: str) -> Arm:
    return Arm(name, lambda turn: python(code))


def heavy_modules_after(code: str) -> list[str]:
    """Return the heavy modules that a fresh interpreter holds after `code`."""
    listing = f"{code}; import json, sys; print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    return list(json.loads(python(listing)))


def check_absent(unwanted: Sequence[str], code: str) -> list[str]:
    """Return the heavy modules that `code` imports.

    Raises:
        RuntimeError: one of them is in `unwanted`.
    """
    found = heavy_modules_after(code)
    if set(found) & set(unwanted):
        raise RuntimeError(f"{code!r} imports {', '.join(found)}; it must stay free of {', '.join(unwanted)}.")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.import_cost", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=20, help="of each arm (default: 20)")
    arguments = parser.parse_args(argv)
    settings = {
        "heavy_modules_after_import": check_absent(HEAVY, IMPORT),
        "heavy_modules_after_loading_all_plugins": check_absent(BACKENDS, LOAD),
    }
    measurements = alternate([arm("bare", "pass"), arm(IMPORT, IMPORT)], warmup=2, repetitions=arguments.repetitions)
    bare, imported = measurements
    Result(
        benchmark="import_cost",
        device=cpu(),
        peer="bare",
        measurements=measurements,
        metrics={"import_seconds": imported.median - bare.median},
        settings=settings,
    ).publish()


if __name__ == "__main__":
    main()
