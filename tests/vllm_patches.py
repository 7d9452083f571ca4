"""docs/vllm.md: what the vLLM plugin replaces in vLLM, why, and until when; `python -m tests.vllm_patches` writes it.

The table is made from the declarations (`PATCHES`) beside the code that replaces.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PRIVATE = ROOT / "plugins/trlx-hybrid-vllm/src/trlx_hybrid_vllm/private"
PAGE = ROOT / "docs" / "vllm.md"
HEAD = """# What is replaced in vLLM

The vLLM plugin uses vLLM's documented names, which `trlx_hybrid_vllm.private.DOCUMENTED` lists. All else of vLLM is
used in the package `trlx_hybrid_vllm.private` only, and the plugin's `tests/test_vllm_names.py` holds it to that. Some
of it is replaced there while an engine is built or runs. Each line says why, and which change of vLLM would free the
plugin of it.

<!-- `python -m tests.vllm_patches` writes this page from the declarations in private/. -->
"""


def declared() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each file of private/ that replaces something, with the fields of each of its `Patch`es."""
    for file in sorted(PRIVATE.glob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PATCHES":
                assert isinstance(node.value, ast.Tuple)
                for patch in node.value.elts:
                    assert isinstance(patch, ast.Call)
                    yield file.name, {str(k.arg): ast.literal_eval(k.value) for k in patch.keywords}


def page() -> str:
    """Return the page, with a table of all that is declared."""
    lines = ["| replaced | in | when | why | until |", "|---|---|---|---|---|"]
    for file, patch in declared():
        names = ", ".join(f"`{name}`" for name in patch["of"])
        lines.append(f"| {names} | `{file}` | {patch['when']} | {patch['why']} | {patch['until']} |")
    return HEAD + "\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
