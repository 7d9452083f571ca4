"""Find docstrings that begin with neither a verb nor a noun: `python -m tests.first_words FOLDER...`.

A docstring is read apart from its code, in a page or a hint of an editor. One that begins with a preposition, a
conjunction, a question word or a pronoun leaves its subject to the code.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

WORDS = """
about above across after against along also although always among and around as asked at because before behind
below beneath beside besides between beyond but by despite down during either even everything except for from
given here his how however if in inside instead into it its itself just less like likewise mine more moreover
most near neither never nor not nothing now of off often on once only onto or other otherwise our out outside
over per perhaps rather since so some something somebody still such than that their them then there these they
this those though through throughout till to together too toward towards under underneath unless until up upon
us very was we were what whatever when whenever where wherever whether which whichever while who whoever whom
whose why with within without yet you your
"""
BARRED = frozenset(WORDS.split())


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring of a module, those of its attributes included."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        before: ast.stmt | None = None
        for statement in node.body:
            described = before is None or isinstance(before, ast.Assign | ast.AnnAssign)
            text = statement.value if described and isinstance(statement, ast.Expr) else None
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                yield statement.lineno, text.value
            before = statement


def barred(text: str) -> bool:
    """Return whether a docstring begins with a word that is neither a verb nor a noun."""
    words = text.split()
    return not words or words[0].strip(",.:;()").lower() in BARRED


def main(folders: list[str]) -> int:
    count, found = 0, []
    for path in sorted(path for folder in folders for path in Path(folder).rglob("*.py")):
        for line, text in docstrings(ast.parse(path.read_text())):
            count += 1
            if barred(text):
                found.append(f"{path}:{line}: {' '.join(text.split())[:90]}")
    print("\n".join(found), file=sys.stderr)
    print(f"{len(found)} of {count} docstrings begin with neither a verb nor a noun", file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
