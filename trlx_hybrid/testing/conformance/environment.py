"""The conformance check of environments. It plays them itself, without an engine or a rollout."""

from __future__ import annotations

import asyncio
import inspect
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...commands.environments import wrong_observation, wrong_step
from .findings import ConformanceError, require

TURNS = 100


def check_environment(
    factory: Callable[[], Any], rows: Sequence[Mapping[str, Any]], answers: Sequence[str], turns: int = TURNS
) -> None:
    """Play an episode for each row twice, and then the episodes of all rows at the same time. Check that the three
    episodes of a row show the same observations and rewards.

    Args:
        factory: makes an environment, an object with `reset(row)` and `step(completion)`; usually its class.
        rows: two or more rows of a dataset, with the columns that `reset` reads.
        answers: texts that stand for the model's answers, one per turn; after the last, the first one follows again.
        turns: the number of turns within which every episode must end.

    Raises:
        ConformanceError: the environment does something else than the protocol `trlx_hybrid_multiturn.Environment`
            says.
    """
    name = f"environment {getattr(factory, '__name__', type(factory).__name__)!r}"
    require(bool(rows) and bool(answers), f"{name} was given no rows or no answers.", "Give two rows or more.")
    try:
        pickle.loads(pickle.dumps(factory))
    except Exception as error:
        require(
            False,
            f"{name} cannot be pickled: {error}.",
            "Define its class in a module, not in a function: processes and Ray actors are handed a copy.",
        )
    with asyncio.Runner() as loop:  # one loop for all episodes, as in a run
        alone = [_play(loop, name, [factory()], [row], answers, turns)[0] for row in rows]
        again = [_play(loop, name, [factory()], [row], answers, turns)[0] for row in rows]
        together = _play(loop, name, [factory() for _ in rows], rows, answers, turns)
    for row, (first, second) in enumerate(zip(alone, again, strict=True)):
        require(
            first == second,
            f"{name}: row {row} was played twice with the same answers, and went otherwise the second time: "
            f"{_first_difference(first, second)}.",
            "Draw from the row, or from random.Random(row[...]): a group's completions must meet the same task.",
        )
    for row, (first, second) in enumerate(zip(alone, together, strict=True)):
        require(
            first == second,
            f"{name}: row {row} went otherwise while other rows were played: {_first_difference(first, second)}.",
            "Keep an episode's state in the object, not in its class or module: many episodes run at once.",
        )


def _play(
    loop: asyncio.Runner,
    name: str,
    environments: Sequence[Any],
    rows: Sequence[Mapping[str, Any]],
    answers: Sequence[str],
    turns: int,
) -> list[list[Any]]:
    """Play an episode in each environment, turn by turn: all environments take a turn before any takes the next one.

    Args:
        loop: runs the environments' coroutines.
        name: what is checked, for messages.
        environments: new environments, one for each of `rows`.
        rows: the row of a dataset that each environment is reset with.
        answers: texts used in place of the model's answers, one per turn; after the last one, the first is used again.
        turns: the number of turns within which every episode must end.

    Returns:
        For each environment its first observation, and then (observation, done, reward) of each step.

    Raises:
        ConformanceError: a result is unusable, or an episode did not end.
    """
    shown: list[list[Any]] = [
        [_called(loop, env.reset, dict(row))] for env, row in zip(environments, rows, strict=True)
    ]
    for observations in shown:
        _refuse(name, "reset", wrong_observation(observations[0]))
    going = list(range(len(environments)))
    for turn in range(turns):
        for index in list(going):
            step = _called(loop, environments[index].step, answers[turn % len(answers)])
            _refuse(name, "step", wrong_step(step))
            shown[index].append((step.observation, step.done, step.reward))
            if step.done:
                going.remove(index)
        if not going:
            break
    require(
        not going,
        f"{name}: row {going[:1]} was not done after {turns} turns.",
        "End an episode by itself: max_turns is the user's limit, and one that hits it may have no reward.",
    )
    for environment in environments:
        close = getattr(environment, "close", None)
        if close is not None:
            _called(loop, close)
    return shown


def _called(loop: asyncio.Runner, method: Callable[..., Any], *arguments: Any) -> Any:
    found = method(*arguments)
    return loop.run(found) if inspect.iscoroutine(found) else found


def _refuse(name: str, method: str, wrong: str | None) -> None:
    if wrong is not None:
        raise ConformanceError(f"{name}: `{method}` {wrong}")


def _first_difference(first: Sequence[Any], second: Sequence[Any]) -> str:
    for turn, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return f"turn {turn} showed {one!r:.80} and then {other!r:.80}"
    return f"it took {len(first) - 1} turns and then {len(second) - 1}"
