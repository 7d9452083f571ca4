"""Seconds of a GRPO step with rows in flight, for several limits of staleness.

    python -m benchmarks.in_flight --kind full --staleness 0 --staleness 2

A rollout ends with its longest completion. With `max_staleness` above 0, a step trains on the groups that are complete,
and the other rows go on in the next rollout. Each arm is a training of its own, in a process of its own, with the same
prompts and the same drawn lengths of completions. Its time is the mean of the steps after the pool is full, since
single steps differ. At the end of each run, no row may be left over.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .child import answer, ask
from .harness import Measurement
from .lengths import Lengths, batches, prescribe_hybrid
from .real_run import clock
from .result import Result, accelerator, file_of
from .rollout import SCALES, write_model
from .scale import Variant
from .step import BATCH, KINDS, LENGTHS

STALENESS = (0, 1, 2, 4)
LIMIT = 580.0
"""Seconds of one training, its start included."""


def measure(given: Mapping[str, Any]) -> dict[str, Any]:
    """Train in this process, and return the seconds of each step, the lengths of all completions in sorted order, and
    the metrics of rows in flight.

    Args:
        given: `folder`, `model`, `kind`, `lengths` (a key of LENGTHS), `staleness` and `steps`.
    """
    from .building import adapter, load, prepare_process

    prepare_process(given["folder"])
    from trlx_hybrid import GRPOTrainer

    from .contestants import GROUP
    from .stepping import arguments_of, prompts_of

    lengths, variant = LENGTHS[given["model"]][given["lengths"]], KINDS[given["kind"]]
    scale = dataclasses.replace(SCALES[given["model"]], cases=(lengths,))
    model, tokenizer = load(given["folder"], Variant(model_dtype=variant.model_dtype))
    seen: list[int] = []

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        seen.extend(len(ids) for ids in completion_ids)
        return [sum(ids) % 7 / 7 for ids in completion_ids]

    steps = clock()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=arguments_of(Path(given["folder"]) / "run", scale, variant, BATCH, given["steps"]),
        train_dataset=prompts_of(scale, given["steps"]),
        processing_class=tokenizer,
        peft_config=adapter(variant) if variant.lora_rank else None,
        callbacks=[steps],
        hybrid={
            "engine": "vllm",
            "engine_options": {"kv_cache_memory_bytes": scale.kv_cache_bytes},
            "rollout_options": {"max_staleness": given["staleness"]},
        },
    )
    if given["staleness"]:
        _prescribe(trainer._run.in_flight, lengths, GROUP)
    else:
        prescribe_hybrid(trainer.session.sampler, batches(lengths))
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    logged = ("hybrid/in_flight/occupancy", "hybrid/staleness/mean", "hybrid/rollout_seconds")
    found = {name: [entry[name] for entry in log if name in entry] for name in logged}
    return {"seconds": steps.seconds, "lengths": sorted(seen), **found}


def _prescribe(in_flight: Any, lengths: Lengths, group: int) -> None:
    """Give each row in flight the length that `prescribe_hybrid` gives it where no row stays in flight."""
    request = in_flight._request

    def limited(of: Any, place: int) -> Any:
        batch, begun = divmod(of.number, lengths.sequences // group)
        whole = lengths.draw(batch)[begun * group + place]
        return dataclasses.replace(request(of, place), max_tokens=whole - len(of.rows[place].token_ids))

    in_flight._request = limited


Curves = dict[str, dict[str, Any]]
"""The trainings of a case by `max_staleness`, as `measure` returns them."""


def run(given: Mapping[str, Any], staleness: Sequence[int], warm: int, curves: Curves) -> Iterator[Result]:
    """Train the arms of one case, a kind and a distribution of lengths; yield the result so far after each.

    Args:
        given: what `measure` takes, but for `folder` and `staleness`.
        staleness: the arms.
        warm: first and last steps that are not counted: the pool fills up and empties in them.
        curves: trainings of this case that the result has already. Those of the same `max_staleness` are replaced.

    Raises:
        ValueError: two arms trained on completions of other lengths.
    """
    case = case_of(given)
    with tempfile.TemporaryDirectory(prefix="benchmark-in-flight-", ignore_cleanup_errors=True) as folder:
        write_model(Path(folder), SCALES[given["model"]])
        for limit in staleness:
            found = ask("benchmarks.in_flight", {**given, "folder": folder, "staleness": limit}, LIMIT)
            curves = curves | {str(limit): found}
            print(f"{case}: max_staleness={limit} took {statistics.fmean(found['seconds'][warm:-warm]):.2f} s a step")
            yield _result(given["model"], case, warm, {limit: curves[limit] for limit in sorted(curves, key=int)})


def _result(model: str, case: str, warm: int, curves: Curves) -> Result:
    """Return the result of one case's trainings, in the order of their `max_staleness`."""
    if len({tuple(found["lengths"]) for found in curves.values()}) > 1:
        raise ValueError("The arms trained on completions of other lengths.")
    steady = {limit: tuple(found["seconds"][warm:-warm]) for limit, found in curves.items()}
    means = {f"staleness-{limit}_{case}": statistics.fmean(seconds) for limit, seconds in steady.items()}
    metrics = {f"step_seconds_{name}": mean for name, mean in means.items()}
    if first := means.get(f"staleness-0_{case}"):
        metrics |= {f"step_speedup_{name}": first / mean for name, mean in means.items()}
    return Result(
        benchmark=named(model),
        device=accelerator(),
        peer="staleness-0",
        measurements=[Measurement(f"staleness-{limit}", seconds, case) for limit, seconds in steady.items()],
        metrics=metrics,
        settings={"model": model, "warm": warm, "curves": {case: curves}},
    )


def case_of(given: Mapping[str, Any]) -> str:
    """Return the name of the case of a training: its kind and the distribution of its lengths."""
    return f"{given['kind']}-{given['lengths']}"


def named(model: str) -> str:
    """Return the name of a model's results: that of the benchmark, for the larger model, with nothing behind it."""
    return "in_flight" if model == "1.5b" else f"in_flight_{model}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.in_flight", description=__doc__)
    parser.add_argument("--model", choices=sorted(LENGTHS), default="1.5b", help="tiny is for trying it on a CPU")
    parser.add_argument("--kind", choices=list(KINDS), default="full")
    parser.add_argument("--lengths", choices=list(LENGTHS["1.5b"]), default="lognormal")
    parser.add_argument("--staleness", type=int, action="append", help="may be repeated; default: 0, 1, 2, 4")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps of a training (default: 40)")
    parser.add_argument("--warm", type=int, default=5, help="first and last steps left out (default: 5)")
    parser.add_argument("--add", action="store_true", help="keep the other cases and arms of the result file")
    given = vars(parser.parse_args())
    add, warm, staleness = given.pop("add"), given.pop("warm"), given.pop("staleness") or STALENESS
    file, curves = file_of(named(given["model"]), accelerator()), {}
    if add and file.exists():
        curves = json.loads(file.read_text())["settings"]["curves"].get(case_of(given), {})
    for place, result in enumerate(run(given, staleness, warm, curves)):
        result.publish(add=add or place > 0)


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("{"):
        answer(measure(json.loads(sys.argv[1])))
    else:
        main()
