"""docs/models.md from what `python -m tests.models` measured: `python tests/models/page.py` writes it anew."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results.json"
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
CASES = {"all weights": "", "LoRA": "all linear layers: "}
CASES |= {f"LoRA on {part}": f"{part}: " for part in ("attention", "text model")}

HEAD = """# Models

Tiny random shapes of each architecture, built by transformers {transformers} from a config, served by vLLM {vllm} on a
CPU in float32. *All weights* is full fine-tuning, *LoRA* an adapter on all linear layers. Each cell has the
[weight path](hybrid-engine.md#how-weights-reach-the-engine) that `auto` takes, and the largest difference between the
log-probs that the engine samples with and the trainer's, in nats, before and after a change of all trained weights. It
may be 1e-5. A note says why not a cheaper path, or what refuses the model. *Template* names TRL's copies of the chat
templates that the published models have, and what becomes of them in conversations with a user; see
[below](#chat-templates).

Models that see images are asked about one, and their towers' weights are changed with the others; with *text alone*
where a note says that vLLM does not compute their images as they do.

GPUs have other kernels. Most of vLLM's backends for experts lay the weights out anew there, which a path that shares
them notices and says. What ran whole on GPUs is in [another table](tested.md). vLLM's classes of Qwen3.5, and of models
that see images, need torchvision.
"""


CHATS = """
## Chat templates

TRL {trl}'s copies of the templates that models come with, and whether conversations can go on with them in which a user
answers the model, as in [`episodes`](multi-turn.md#environments-that-are-no-tools). Prompt, turns and observations of
three exchanges, as token ids, spell what the template makes of the whole conversation. What a model has sampled is
never rendered again. A template of which TRL has no copy goes through the same check at start: one that renders a
message the same whatever follows it is used unchanged, any other is refused, with the reason.

The table does not show which templates can call tools. With `tools`, TRL asks for the same of a call and its answer,
and takes its training template where they change what stands before them.
[Another model's template](chat-templates.md) says how to try both with a model of yours, and what to change.
"""


def page(results: Mapping[str, Any]) -> str:
    """The page: tables, and the reasons in the first once each."""
    notes: dict[str, int] = {}
    verdicts = {row["template"]: row["how"].partition(";")[0] for row in results["templates"]}
    lines = [HEAD.format(**results["versions"])]
    lines += ["| model | class | template | all weights | LoRA |", "|---|---|---|---|---|"]
    for row in results["rows"]:
        adapters = [case for case in CASES if case.startswith("LoRA") and case in row]
        weights = cell(row["all weights"], "", notes)
        given = [cell(row[case], CASES[case] if len(adapters) > 1 else "", notes) for case in adapters]
        template = conversations(results["published"][row["model"]], verdicts)
        lines.append(f"| {row['model']} | `{row['class']}` | {template} | {weights} | {'<br>'.join(given)} |")
    lines += ["", *(f"{number}. {reason}" for reason, number in notes.items())]
    lines += [CHATS.format(**results["versions"]), "| templates | conversations |", "|---|---|"]
    templates: dict[str, list[str]] = {}
    for row in results["templates"]:
        said = f"refused: {escaped(row['reason'])}" if "reason" in row else row["how"]
        templates.setdefault(said, []).append(f"`{row['template']}`")
    lines += [f"| {', '.join(names)} | {said} |" for said, names in templates.items()]
    return "\n".join(lines) + "\n"


def conversations(published: Mapping[str, str], verdicts: Mapping[str, str]) -> str:
    """The templates of a row's models, those with one verdict together; a name that is no template is its verdict."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, of in published.items():
        groups.setdefault((verdicts.get(name, name), of), []).append(f"`{name}` ")
    return "<br>".join(
        (f"{of}: " if of else "") + ("" if verdict in published else ", ".join(names).replace(" ,", ",")) + verdict
        for (verdict, of), names in groups.items()
    )


def cell(case: Mapping[str, Any], of: str, notes: dict[str, int]) -> str:
    """What one case shows, with the number of its note."""
    reasons = {key: case[key] for key in ("refused", "reason", "pictures") if key in case}
    marks = {key: f" ({notes.setdefault(escaped(reason), len(notes) + 1)})" for key, reason in reasons.items()}
    if "refused" in case:
        return f"{of}refused{marks['refused']}"
    alone = f", text alone{marks['pictures']}" if "pictures" in case else ""
    return f"{of}`{case['weights']}` {case['gap']:.1e}{marks.get('reason', '')}{alone}"


def escaped(text: str) -> str:
    """A message as a line of Markdown."""
    return " ".join(text.split()).replace("_", "\\_").replace("*", "\\*").replace("<", "&lt;")


def seen() -> dict[str, Any]:
    """What was measured last."""
    found: dict[str, Any] = json.loads(RESULTS.read_text())
    return found


def write(
    rows: Sequence[Mapping[str, Any]],
    templates: Sequence[Mapping[str, str]],
    versions: Mapping[str, str],
    published: Mapping[str, Mapping[str, str]],
) -> None:
    """Keep what was measured, and the templates that each model is published with, and write the page."""
    results = {"versions": versions, "rows": rows, "templates": templates, "published": published}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(page(seen()))


if __name__ == "__main__":
    PAGE.write_text(page(seen()))
