"""What the site has in other words than the files of docs/: the table of all files, and mkdocstrings in the place of
the Markdown that `tests/api_pages.py` writes.

`python docs/extensions/files.py` prints the table that `make docs` puts on the page of all files.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PLACE = "<!-- files -->"
WRITTEN = re.compile(r"<!-- (::: .*?)-->\n.*?<!-- :::end -->", re.DOTALL)
END = re.compile(r"(?<=[.])(?<!e\.g\.)\s")


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Put the table of all files where a page asks for it, and have mkdocstrings show what a page has between marks;
    mkdocs calls this with each page."""
    markdown = WRITTEN.sub(r"\1", markdown)
    return markdown.replace(PLACE, table()) if PLACE in markdown else markdown


def table() -> str:
    """Return a heading and a table for each folder with Python files: a file, and how its docstring begins."""
    lines: list[str] = []
    for folder in folders():
        lines += [f"\n## {folder.relative_to(ROOT)}\n", "| file | what it has |", "|---|---|"]
        for file in sorted(folder.glob("*.py")):
            said = sentence(file)
            if said and file.stem not in ("__init__", "__main__"):
                lines.append(f"| `{file.name}` | {said.replace('|', '&#124;')} |")
    return "\n".join(lines)


def folders() -> Iterator[Path]:
    """Yield the folders of the package, then those of the plugins, each before what it contains."""
    for root in (ROOT / "trlx_hybrid", *sorted(ROOT.glob("plugins/*/src/*"))):
        for folder in sorted({file.parent for file in root.rglob("*.py")}):
            if any(file.name != "__init__.py" for file in folder.glob("*.py")):
                yield folder


def sentence(file: Path) -> str:
    """Return the first sentence of a module's docstring, on one line."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return END.split(" ".join(text.partition("\n\n")[0].split()))[0]


if __name__ == "__main__":
    print(table())
