"""`python -m tests.refusals_page` writes docs/refusals.md from trlx_hybrid/trl/refusals.py."""

from __future__ import annotations

from pathlib import Path

from trlx_hybrid.trl.refusals import OPTIONS

PAGE = Path(__file__).parents[1] / "docs" / "refusals.md"
HEAD = """# What does not go together

Some options of a run rule each other out, or need something of the model, the engine or the trainer's class. Where you
have chosen the option, the run is refused at its start, with the reason. Where a component would choose it by itself,
it does the second best, and the run's header says why.

The trainer reads the same table, `trlx_hybrid/trl/refusals.py`. `python -m tests.refusals_page` writes this page.

"""


def page() -> str:
    """Return the page: for each option the runs that cannot have it, and what happens or what to do instead."""
    parts = []
    for option in OPTIONS:
        conditions = "\n".join(f"- {refusal.when}" for refusal in option.refusals)
        parts.append(f"## {option.name[0].upper()}{option.name[1:]}\n\n{option.way_out} Not with:\n\n{conditions}\n")
    return HEAD + "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
