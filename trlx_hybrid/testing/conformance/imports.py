"""The conformance check of what a plugin imports when it is loaded."""

from __future__ import annotations

import subprocess
import sys

from .findings import require

HEAVY = ("torch", "transformers", "trl", "vllm", "ray", "datasets")
CODE = """
import sys
import trlx_hybrid.plugins.host
before = set(sys.modules)
import {module}
print("\\nfound:", *[name for name in {heavy} if name in sys.modules and name not in before])
"""


def check_imports(module: str) -> None:
    """Check that a plugin's module imports none of the large libraries, such as torch, because every process imports
    every plugin.

    The module is imported in a new Python process.

    Args:
        module: the module's full name.

    Raises:
        ConformanceError: the module imports a large library, or cannot be imported.
    """
    code = CODE.format(module=module, heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    require(
        done.returncode == 0,
        f"plugin {module} does not import: {done.stderr.strip().splitlines()[-1:]}.",
        "Install what it needs, or import that where it is used.",
    )
    heavy = done.stdout.rpartition("found:")[2].split()
    require(
        not heavy,
        f"plugin {module} imports {', '.join(heavy)} when it is loaded.",
        "Import these inside the factory or the hook: every process loads every plugin, those of the CLI too.",
    )
