"""docs/step.md: the calls of one optimizer step, in order. `python -m tests.step_trace` runs the step anew.

The run is a real one: two processes on a CPU, GRPO with packed rows, joined micro-batches and a tool. Of the calls in
it these are kept: methods that TRL or transformers call or that override one of theirs, and what those call in other
files. `python -m tests.step_trace --page` writes the page from the calls of the last run, with the lines of today.
"""

from __future__ import annotations

import ast
import functools
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from trlx_hybrid.testing.processes import rank_reports

ROOT = Path(__file__).parents[1]
SESSION = "trlx_hybrid/session.py"  # the main loop, whose calls are shown, too
BLAME = "trlx_hybrid/blame.py"  # around each call of a component
SCRIPT = Path(__file__).parent / "scripts" / "step_trace.py"
CALLS, PAGE = Path(__file__).with_suffix(".json"), ROOT / "docs" / "step.md"
HEAD = """# One optimizer step, call by call

In short, between two optimizer steps of a run with an engine:

1. `on_step_begin`: the step's clock starts; the first steps of a run record the weights that they start from
   (`trl/metrics/step_metrics.py`, `policy/first_step.py`).
2. `training_step` (`trl/trainer.py`): TRL asks for a micro-batch (`_prepare_inputs`), and where a rollout is due for a
   whole batch (`_generate_and_score_completions`). A replay gives the recorded one (`trl/replay/replay.py`), and
   steps 3 to 9 do not happen. Algorithms may draw the prompts (`trl/generation/resampling.py`).
3. `session.rollout_phase` begins (`session.py`): hook `trlx_leave_phase`, trainer state leaves the device as far as the
   engine needs the room (`memory/trainer_memory.py`), and the engine's weights wake.
4. The weight sync (`weights/sync.py`): hook `trlx_sync_start`, `WeightSync.sync`, its check, with every check of all
   tensors a probe of log-probs, hook `trlx_sync_end`. Then the KV cache wakes: hook `trlx_enter_phase`.
5. The rollout samples (`trl/generation/vllm_generation.py`, `rollout/sampler.py`): `Rollout.run`, or `Rollout.converse`
   where the model has tools.
6. `session.rollout_phase` ends: hook `trlx_leave_phase`, the engine sleeps, trainer state comes back, hook
   `trlx_enter_phase`. Rows that were cut at their length limit are noted (`trl/generation/truncation.py`). An algorithm
   that filters groups has each round rewarded, and repeats steps 3 to 6 until the batch is full.
7. TRL scores old and reference log-probs (`trl/scoring/scoring_call.py`), unless the old ones come from the first loss
   (`trl/scoring/deferred.py`).
8. Reward functions score the completions (`trl/rewards.py`); algorithms observe the rewards (`algorithms.py`).
9. Engine and trainer are compared, where there are old log-probs (`trl/scoring/agreement.py`). Advantages: TRL's,
   those of an algorithm, or of the hook `trlx_advantages` (`trl/rewards.py`). Hook `trlx_rollout_end`; the numbers in
   `session.metrics` go to TRL's log (`trl/metrics/step_metrics.py`). A scoring may move rows to other
   micro-batches.
10. For each micro-batch (`trl/scoring/loss.py`): `Scoring.score` in TRL's `_compute_loss`, after it the terms of
    algorithms (`Algorithm.loss`), and the backward pass. Where the old log-probs come from the first loss, engine and
    trainer are compared here. Micro-batches that were scored in one forward pass share a backward pass after the last
    of them (`trl/scoring/micro_batches.py`).
11. Gradients are clipped, and the optimizer steps. `on_optimizer_step` (`trl/attach.py`): the weight version grows.
    Where TRL logs, hook `trlx_log`.

Below is a real step, the second of a GRPO run in two processes on a CPU, with packed rows, joined micro-batches and a
tool; rank 0 is shown. A name in bold stands for a method that overrides one of TRL's or transformers', or that they
call; behind the arrow is who calls it. Indented below it are the functions that it calls in other files, without those
that these call in turn, but for those of the session, which is the main loop. Hooks and the methods of components are
shown wherever they are called. A context that was entered before and is left now says so.

`python -m tests.step_trace` runs the step and writes this page.
"""


class Entry(NamedTuple):
    """A call that the page shows.

    Attributes:
        hook: what `Host.call` calls.
        goes_on: whether a context is left that was entered before.
        caller: the function of TRL's or transformers' that makes it; None where one of ours does.
        method: whether it overrides a method of TRL's or transformers', or is called by them.
        inside: the calls below it, each with how often it comes in a row.
    """

    name: str
    file: str
    hook: str | None
    goes_on: bool
    caller: str | None
    method: bool
    inside: tuple[tuple[Entry, int], ...]


Calls = tuple[tuple[Entry, int], ...]


def trace() -> dict[str, Any]:
    """Run the step, and return the calls of rank 0 and the names of methods that override one of TRL's."""
    with tempfile.TemporaryDirectory() as folder:
        first, _ = rank_reports(SCRIPT, Path(folder), count=2)
    return first  # type: ignore[no-any-return]


def entries(traced: dict[str, Any]) -> Calls:
    """Return the calls to show of those that were traced."""
    calls, overrides = traced["calls"], set(traced["overrides"])
    inside = defaultdict(list)
    for number, call in enumerate(calls):
        inside[call["inside"]].append(number)

    def below(number: int | None, parts: bool) -> Iterator[tuple[Entry, int]]:
        for at in inside[number]:
            call = calls[at]
            method = call["stock"] is not None or call["name"] in overrides
            told = call["name"] == "Host.call" or (number is not None and calls[number]["file"] == BLAME)
            other_file = number is None or calls[number]["file"] not in (call["file"], BLAME)
            if call["file"] == BLAME:
                yield from below(at, parts)
            elif shown(call["file"], call["name"]) and (method or told or (parts and other_file)):
                found = counted(below(at, parts=method or call["file"] == SESSION))
                yield (
                    Entry(call["name"], call["file"], call.get("hook"), call["goes_on"], call["stock"], method, found),
                    1,
                )
            else:
                yield from below(at, parts and not other_file)

    return counted(below(None, parts=True))


def counted(found: Iterator[tuple[Entry, int]]) -> Calls:
    """Return calls with how often each comes in a row, or two in turn."""
    rows: list[tuple[Entry, int]] = []
    for entry, times in found:
        if rows and rows[-1][0] == entry:
            rows[-1] = entry, rows[-1][1] + times
        elif len(rows) > 2 and rows[-3][0] == rows[-1][0] and rows[-2][0] == entry:  # two that take turns
            rows[-3:] = (rows[-3][0], rows[-3][1] + rows[-1][1]), (entry, rows[-2][1] + times)
        else:
            rows.append((entry, times))
    return tuple(rows)


def shown(file: str, name: str) -> bool:
    """Return whether a function is a step of its own: no property, no method of Python's protocols, no lambda."""
    last = name.rpartition(".")[2]
    found = functions(file).get(name)
    properties = [] if found is None else [d for d in found.decorator_list if "property" in ast.unparse(d)]
    setter = found is not None and any(ast.unparse(d).endswith(".setter") for d in found.decorator_list)
    return not (last.startswith(("__", "<")) or properties or setter)


@functools.cache
def functions(file: str) -> dict[str, ast.FunctionDef]:
    """Return the functions of a file by their qualified names."""
    found: dict[str, ast.FunctionDef] = {}

    def look(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef):
                found.setdefault(f"{prefix}{child.name}", child)
                look(child, f"{prefix}{child.name}.<locals>.")
            else:
                look(child, f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix)

    look(ast.parse((ROOT / file).read_text()), "")
    return found


def lines(found: Calls, depth: int = 0) -> Iterator[str]:
    """Yield the page's lines for calls and all that stand in them."""
    for entry, times in found:
        function = functions(entry.file)[entry.name]
        said = (ast.get_docstring(function) or "").split("\n\n")[0].replace("\n", " ").partition(". ")[0].rstrip(".")
        name = f"hook `{entry.hook}`" if entry.hook else f"`{entry.name}`"
        name = f"**{name}**" if entry.method else name
        if entry.hook or entry.goes_on:
            said = ""
        name += ", left" if entry.goes_on else ""
        caller = f" ← `{entry.caller}`" if entry.caller else ""
        often = f", {times} times" if times > 1 else ""
        yield f"{'    ' * depth}- {name}{caller}{often}{f': {said}' if said else ''} ({entry.file}:{function.lineno})"
        yield from lines(entry.inside, depth + 1)


def page(found: Calls) -> str:
    """Return docs/step.md."""
    return "\n".join([HEAD, '<div class="calls" markdown>', "", *lines(found), "", "</div>", ""])


def restored(found: Any) -> Calls:
    """Return calls as `entries` gave them, from what JSON holds of them."""
    return tuple((Entry(*entry[:-1], restored(entry[-1])), times) for entry, times in found)


def known() -> Calls:
    """Return the calls of the last run."""
    return restored(json.loads(CALLS.read_text()))


if __name__ == "__main__":
    if "--page" not in sys.argv:
        CALLS.write_text(json.dumps(entries(trace()), indent=1) + "\n")
    PAGE.write_text(page(known()))
