"""Measure the models and write docs/models.md: `python -m tests.models`, in four minutes of one core. With names of
models, those only; the other rows stay.
"""

import sys
from importlib.metadata import version

from trlx_hybrid.testing.stack import models_inspected_here

from . import matrix, page, templates


def main(names: list[str]) -> None:
    from trlx_hybrid_vllm.versions import installed_vllm

    rows = {row["model"]: row for row in page.seen()["rows"]} if names else {}
    conversations = [templates.measure(name) for name in templates.PUBLISHED]
    with models_inspected_here():
        for name in names or matrix.MODELS:
            rows[name] = matrix.measure(name)
            print(rows[name], file=sys.stderr, flush=True)
            found = installed_vllm()
            versions = {"transformers": version("transformers"), "vllm": found[1] if found else "?"}
            versions["trl"] = version("trl")
            kept = [rows[name] for name in matrix.MODELS if name in rows]
            page.write(kept, conversations, versions, matrix.PUBLISHED)


if __name__ == "__main__":
    main(sys.argv[1:])
