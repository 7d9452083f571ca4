"""Hooks, classes and settings on the pages as Markdown; `python -m tests.api_pages` writes it from the docstrings.

A page says between the marks `<!-- ::: name` and `<!-- :::end -->` what is to be shown, as mkdocstrings reads it. This
module writes Markdown between them, so that the pages can be read in the repository. The site shows mkdocstrings' own
instead, with links between all types: docs/extensions/files.py leaves the written part out.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import griffe
import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
BLOCK = re.compile(r"(<!-- ::: ([\w.]+)\n(.*?)-->\n).*?(<!-- :::end -->)", re.DOTALL)
OPTIONS = {"members": True, "filters": ["!^_"], "heading_level": 3, "show_root_heading": True}
OPTIONS |= {"show_if_no_docstring": False, "merge_init_into_class": True}
WIDTH = 100


@cache
def loader() -> griffe.GriffeLoader:
    """Return what reads the sources of the package and of all plugins, without importing them."""
    folders = [ROOT, *sorted(ROOT.glob("plugins/*/src"))]
    extensions = griffe.load_extensions(str(ROOT / "docs" / "extensions" / "sources.py"))
    return griffe.GriffeLoader(search_paths=folders, extensions=extensions)


def page(text: str) -> str:
    """Return a page's text with the Markdown of today's sources between its marks."""
    return BLOCK.sub(lambda found: found[1] + written(found[2], found[3]) + found[4], text)


def written(name: str, options: str) -> str:
    """Return the Markdown for an object of the sources.

    Args:
        name: full name of a module, class or function.
        options: mkdocstrings' options as on the page, in YAML, or "".
    """
    chosen = OPTIONS | ((yaml.safe_load(textwrap.dedent(options)) or {}).get("options", {}) if options.strip() else {})
    package, _, path = name.partition(".")
    root = loader().modules_collection.members.get(package) or loader().load(package)
    return "\n".join(shown(root[path], chosen, chosen["heading_level"], chosen["show_root_heading"])) + "\n"


def shown(thing: Any, options: Mapping[str, Any], level: int, heading: bool = True) -> Iterator[str]:
    """Yield the lines of an object: heading, signature, docstring, then its members.

    Args:
        options: mkdocstrings' options.
        level: the level of its heading.
        heading: whether it has a heading; a module whose members alone are shown has none.
    """
    members = [] if options["members"] is False else list(of(thing, options))
    listed = {item.name for section in sections(thing) if section.kind.value == "attributes" for item in section.value}
    fields = [m for m in members if m.is_attribute and (m.docstring is not None or m.name not in listed)]
    if heading:
        kinds = "".join(f" · {kind}" for kind in ("historic", "firstresult") if kind in thing.labels)
        yield f'{"#" * level} <a id="{thing.path}"></a>`{thing.name}`{kinds}\n'
        made = thing.is_class and options["merge_init_into_class"] and len(thing.parameters) > 1
        if thing.is_function or (made and not ("dataclass" in thing.labels and fields)):  # else its table says it
            yield f"```py\n{signature(thing)}\n```\n"
    yield from told(thing)
    if fields:
        yield from table(thing, fields)
    inner = {**options, "members": True} if thing.is_module else {**options, "members": False}
    for member in members:
        if not member.is_attribute:
            yield from shown(member, inner, level + heading)


def signature(thing: Any) -> str:
    """Return the signature of a function or class, on one line or with a line for each parameter."""
    parts, star = [], False
    for parameter in thing.parameters:
        if parameter.name in ("self", "cls"):
            continue
        kind = str(parameter.kind.value) if parameter.kind is not None else ""
        if kind == "keyword-only" and not star:
            parts.append("*")
        star = star or kind in ("keyword-only", "variadic positional")
        mark = {"variadic positional": "*", "variadic keyword": "**"}.get(kind, "")
        annotation = f": {parameter.annotation}" if parameter.annotation is not None else ""
        default = parameter.default if kind[:8] != "variadic" else None
        equals = " = " if annotation else "="
        parts.append(f"{mark}{parameter.name}{annotation}" + (f"{equals}{default}" if default is not None else ""))
        if kind == "positional-only" and not any(p.kind == parameter.kind for p in rest_of(thing, parameter)):
            parts.append("/")
    returns = f" -> {thing.returns}" if thing.is_function and thing.returns is not None else ""
    line = f"{thing.name}({', '.join(parts)}){returns}"
    if len(line) <= WIDTH:
        return line
    return f"{thing.name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){returns}"


def rest_of(thing: Any, parameter: Any) -> list[Any]:
    """Return the parameters that stand behind one."""
    all_of = list(thing.parameters)
    return all_of[all_of.index(parameter) + 1 :]


def sections(thing: Any) -> list[Any]:
    """Return the parts of an object's docstring: texts, and lists of parameters, attributes or errors."""
    if thing.docstring is None:
        return []
    found: list[Any] = thing.docstring.parse("google", warn_missing_types=False, warn_unknown_params=False)
    return found


def told(thing: Any) -> Iterator[str]:
    """Yield the docstring of an object as Markdown."""
    for section in sections(thing):
        if section.kind.value == "text":
            yield section.value.replace("```python\n", "```py\n") + "\n"  # no sample of the page, which tests would run
        elif section.kind.value in ("returns", "yields"):  # whole, since a colon in it says nothing of a type
            name = section.kind.value.capitalize()
            (text,) = re.findall(rf"^{name}:\n((?: +.*\n?|\n)+)", thing.docstring.value, re.MULTILINE)
            yield f"{name}:\n\n- {one_line(text)}\n"
        elif isinstance(section.value, list):
            yield f"{(section.title or section.kind.value).capitalize()}:\n"
            for item in section.value:
                yield f"- {label(item)}{one_line(item.description)}"
            yield ""
        else:
            yield f"{section.value.description}\n"


def label(item: Any) -> str:
    """Return how an item of a list begins: the name of a parameter or attribute, or the type of an error."""
    kind = str(item.annotation) if item.annotation is not None else ""
    name = getattr(item, "name", None) or ""
    if not name:
        return f"`{kind}`: " if kind else ""
    typed = f" (`{kind}`)" if kind and isinstance(item, griffe.DocstringAttribute) else ""
    return f"`{name}`{typed}: ".replace("\N{NO-BREAK SPACE}", " ")


def table(thing: Any, fields: list[Any]) -> Iterator[str]:
    """Yield a table of the attributes of a class or module: name, type, default and docstring."""
    given = {parameter.name: parameter.default for parameter in thing.parameters} if thing.is_class else {}
    yield "| name | type | default | |"
    yield "|---|---|---|---|"
    for field in fields:
        kind = str(field.annotation) if field.annotation is not None else ""
        default = str(given[field.name]) if given.get(field.name) is not None else ""
        cells = [f"`{text}`" if text else "" for text in (field.name, kind, default)]
        said = one_line(field.docstring.value) if field.docstring is not None else ""
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in [*cells, said]) + " |"
    yield ""


def one_line(text: str) -> str:
    """Return a text without its line breaks."""
    return " ".join(text.split())


def of(thing: Any, options: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the members of a module or class that are shown, in the order of the source."""
    if thing.is_function or thing.is_attribute:
        return
    wanted = options["members"]
    for name, member in thing.members.items():
        if member.is_alias and not (thing.is_module and name in (thing.exports or ())):
            continue
        if member.is_module or (isinstance(wanted, list) and name not in wanted):
            continue
        if not isinstance(wanted, list) and not public(name, options["filters"]):
            continue
        target = member.final_target if member.is_alias else member
        if target.docstring is not None or options["show_if_no_docstring"]:
            yield target


def public(name: str, filters: list[str]) -> bool:
    """Return whether mkdocstrings' filters let a name pass: `!` drops what matches, and all else must match."""
    keep = [pattern for pattern in filters if not pattern.startswith("!")]
    if any(re.search(pattern[1:], name) for pattern in filters if pattern.startswith("!")):
        return False
    return not keep or any(re.search(pattern, name) for pattern in keep)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    for file in PAGES:
        text = file.read_text(encoding="utf-8")
        if BLOCK.search(text):
            file.write_text(page(text), encoding="utf-8")
