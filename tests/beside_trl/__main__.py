"""Print what stock TRL and trlx_hybrid make of the same scripts: `python -m tests.beside_trl`, in 90 seconds.

With names of modules of this folder, those only. Ends with 1 where trlx_hybrid is not right.
"""

import importlib
import os
import sys
from pathlib import Path

NAMES = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py") if path.stem != "rig")


def compared(name):
    """A row of the table, and whether what trlx_hybrid makes of it is right."""
    script = importlib.import_module(f".{name}", __package__)
    found = {library: script.measure(library) for library in ("trl", "trlx_hybrid")}
    row = f"| {script.NUMBER} | {shown(found['trl'])} | {shown(found['trlx_hybrid'])} | `{name}` |"
    return row, script.right(found["trlx_hybrid"])


def shown(value):
    if isinstance(value, list):
        return "; ".join(map(shown, value))
    return f"{value:.2g}" if isinstance(value, float) else str(value)


def main(names):
    from trlx_hybrid.testing.stack import models_inspected_here

    wrong = []
    with models_inspected_here():
        for name in names or NAMES:
            row, right = compared(name)
            print(row, flush=True)
            if not right:
                wrong.append(name)
    if wrong:
        sys.exit(f"trlx_hybrid is not right: {', '.join(wrong)}")


if __name__ == "__main__":
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "TRL_EXPERIMENTAL_SILENCE": "1"}
    os.environ.update(quiet | {"TOKENIZERS_PARALLELISM": "false"})
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(sys.argv[1:])
