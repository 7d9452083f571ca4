"""What the pages read off the sources besides docstrings: the kind of each hook, and the text of config fields."""

from __future__ import annotations

import ast
import re
from typing import Any

from griffe import Attribute, Class, Docstring, ExprCall, ExprKeyword, Extension, Function

KINDS = ("historic", "firstresult")
NAMES = re.compile(r"^ +\w+(, \w+)+:", re.MULTILINE)


class Sources(Extension):
    """What the parser cannot know of this package's conventions."""

    def on_function(self, *, func: Function, **kwargs: Any) -> None:
        """`@hookspec(firstresult=True)` gets the label `firstresult`, and so on."""
        for decorator in func.decorators:
            if isinstance(decorator.value, ExprCall) and str(decorator.value.function) == "hookspec":
                given = _keywords(decorator.value)
                func.labels |= {kind for kind in KINDS if str(given.get(kind)) == "True"}

    def on_attribute(self, *, attr: Attribute, **kwargs: Any) -> None:
        """`field(default=..., metadata={"help": ...})` becomes the default with that text."""
        if not isinstance(attr.value, ExprCall) or str(attr.value.function) != "field":
            return
        given = _keywords(attr.value)
        if "metadata" in given:
            text = ast.literal_eval(str(given["metadata"]))["help"]
            attr.docstring = Docstring(text, parent=attr, parser="google")
            attr.value = given.get("default")

    def on_class(self, *, cls: Class, **kwargs: Any) -> None:
        """`top_p, top_k: as in TRL` stays one item: the parser would take what follows a space for a type."""
        if cls.docstring is not None:
            text = NAMES.sub(lambda match: match.group().replace(", ", ",\N{NO-BREAK SPACE}"), cls.docstring.value)
            cls.docstring.value = text


def _keywords(call: ExprCall) -> dict[str, Any]:
    return {argument.name: argument.value for argument in call.arguments if isinstance(argument, ExprKeyword)}
