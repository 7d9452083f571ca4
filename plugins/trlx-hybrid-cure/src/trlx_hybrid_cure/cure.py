"""Rewards for CURE, in which one model writes programs and unit tests. A matrix of which program passes which test
gives the rewards of both.

Source: Wang et al. 2025, https://arxiv.org/abs/2506.03136. The rewards are computed as in the authors' code.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from accelerate import PartialState
from trlx_hybrid.errors import ConfigError
from trlx_hybrid.interprocess.ranks import gathered
from trlx_hybrid.speakers import SPEAKER, TASK, BatchByTask, by_task, with_speakers

from .sandbox import ProgramTests, Sandbox, SandboxError
from .verdict import Verdict

if TYPE_CHECKING:
    from datasets import Dataset

Matrix = Sequence[Sequence[bool]]
CODER, TESTER, TESTS = "coder", "tester", "tests"
WAY_OUT = (
    "Give the trainer what `two_speakers` returns, as it is, with the GRPOConfig that it was given; for evaluation, "
    "its rows with speaker 'coder'."
)
PYTHON = re.compile(r"```(?:python)?\n(.*?)```", re.DOTALL)


def python_block(text: str) -> str | None:
    """Return the source in the last fenced block of Python in a completion, or None if there is no block."""
    blocks = PYTHON.findall(text)
    return blocks[-1] if blocks else None


def two_speakers(
    tasks: Dataset, args: Any, *, coder: Callable[[Mapping[str, Any]], Any], tester: Callable[[Mapping[str, Any]], Any]
) -> Dataset:
    """Build a dataset in which each task is two consecutive rows: a prompt for the coder and one for the tester.

    First checks that every task has ground-truth tests, then calls
    [`with_speakers`][trlx_hybrid.speakers.with_speakers].

    Args:
        tasks: with a column `tests`, the ground-truth tests of each task: Python sources that raise where a program is
            wrong. All columns are kept, for both speakers. Training keeps their order: shuffle them yourself.
        args: the `GRPOConfig` of the run.
        coder: returns the prompt (a text or chat messages) that asks for a program, given a row of `tasks`.
        tester: returns the prompt that asks for a unit test, given a row of `tasks`.

    Raises:
        ConfigError: `args` would put the completions of a task's two prompts into different batches, a task has no
            tests, or `tasks` already has a column `task_id` or `speaker`, which this function adds.
    """
    if TESTS not in tasks.column_names:
        raise ConfigError(f"CURE: the tasks need a column {TESTS!r}: rename your column of ground-truth tests.")
    for place, tests in enumerate(tasks[TESTS]):
        if not tests:
            raise ConfigError(f"CURE: task {place} has no ground-truth tests: every program would be right.")
    return with_speakers(tasks, args, coder=coder, tester=tester)


def matrix_rewards(
    truth: Sequence[Sequence[bool]], judged: Sequence[Sequence[bool]]
) -> tuple[list[float], list[float]]:
    """Compute the rewards of n programs and m generated tests of one task.

    A program earns the share of ground-truth tests that it passes, and is right if it passes all of them. A test that
    all right programs pass earns the share of wrong programs that it rejects. A test that rejects a right program loses
    the share of wrong programs that it lets pass. Where no program is wrong, tests earn 1 and -1. Where no program is
    right, nothing is known about the tests, and all earn 0. GRPO subtracts each group's mean and divides by its
    deviation.

    Args:
        truth: n rows of t values, whether a program passes a ground-truth test.
        judged: n rows of m values, whether a program passes a generated test.

    Returns:
        The rewards of the n programs, in [0, 1], and those of the m generated tests, in [-1, 1].
    """
    programs = [sum(row) / len(row) for row in truth]
    right = [row for row, reward in zip(judged, programs, strict=True) if reward == 1.0]
    wrong = [row for row, reward in zip(judged, programs, strict=True) if reward < 1.0]
    tests = []
    for k in range(len(judged[0])):
        accepted = all(row[k] for row in right)
        let_pass = sum(row[k] for row in wrong) / len(wrong) if wrong else float(not accepted)
        tests.append((1.0 - let_pass if accepted else -let_pass) if right else 0.0)
    return programs, tests


class CureReward:
    """A TRL reward function for a model that writes both programs and unit tests. It needs the dataset that
    `two_speakers` builds, with two rows per task: a prompt for a program and a prompt for a test.

    Collective: all ranks must call it, because the completions of a task may be on several ranks.

    Every program is run with the ground-truth tests of its task and with all tests generated for this task, and each
    rank runs its share of the programs. A program is rewarded for the ground-truth tests that it passes; a test is
    rewarded if it rejects wrong programs and passes right programs (`matrix_rewards` has the formulas). A completion
    without a program passes no test; a completion without a test passes no program.

    Logs `cure/pass@1`, the share of programs that are right; `cure/precision`, the share of generated tests that all
    right programs pass, over tasks that have a right program; `cure/seconds`, the time of the sandbox; and
    `cure/unfinished`, the share of tests that were not run to their end within the sandbox's `batch_seconds`, where
    there are any.

    Args:
        program: returns the Python source of the program in the text of a completion; None if it has none.
        test: returns the Python source of the test in the text of a completion; None if it has none. A test is executed
            with the program's global names, and rejects the program by raising.
        sandbox: runs the programs, isolated and within its limits.
    """

    __name__ = "cure"

    def __init__(
        self,
        *,
        program: Callable[[str], str | None] = python_block,
        test: Callable[[str], str | None] = python_block,
        sandbox: Sandbox | None = None,
    ) -> None:
        self._source = {CODER: program, TESTER: test}
        self.sandbox = sandbox or Sandbox()

    def __call__(self, completions: Sequence[Any], log_metric: Any = None, **columns: Any) -> list[float]:
        """Return the rewards of this rank's rows.

        Args:
            completions: the completions, texts or lists of messages.
            log_metric: TRL's function that logs a metric, by name and value; None logs nothing.
            columns: the dataset's columns for these rows; `task_id`, `speaker` and `tests` are used.

        Raises:
            ConfigError: a row does not come from `two_speakers`, or a batch has tests of a task but no programs of it.
            SandboxError: on all ranks, if any of them could not run programs.
        """
        absent = [name for name in (TASK, SPEAKER, TESTS) if name not in columns]
        if absent:
            raise ConfigError(f"CURE: the rows have no column {absent[0]!r}. {WAY_OUT}")
        texts = [done if isinstance(done, str) else done[-1]["content"] or "" for done in completions]
        spoken = [(self._source.get(speaker), text) for speaker, text in zip(columns[SPEAKER], texts, strict=True)]
        sources = [source(text) if source is not None else None for source, text in spoken]
        said = by_task(columns[TASK], columns[SPEAKER], sources, required=())  # missing speakers are reported below
        for task, group in said.places.items():  # on all ranks alike
            if odd := sorted(map(repr, group.keys() - self._source.keys())):
                raise ConfigError(
                    f"CURE: task {task} has the speaker {odd[0]}, and CURE has {CODER!r} and {TESTER!r}. {WAY_OUT}"
                )
        truth: dict[int, list[str]] = {}
        for of_rank in gathered(dict(zip(columns[TASK], columns[TESTS], strict=True))):
            truth |= of_rank
        return said.own(self._rewards(said, truth, log_metric or (lambda name, value: None)))

    def _rewards(
        self, said: BatchByTask[str | None], truth: dict[int, list[str]], log: Callable[[str, float], None]
    ) -> list[float]:
        """Return the rewards of the rows of all ranks, in the order of `said.values`; all ranks get the same list.

        Args:
            said: the Python source in each completion of all ranks, None where it has none, grouped by task and by
                speaker ("coder" or "tester").
            truth: the ground-truth tests of each task, by the task's id.
            log: logs a metric, given its name and value.
        """
        jobs: dict[tuple[int, str | None], ProgramTests] = {}  # what was sampled more than once is run once
        for task, group in said.places.items():
            if not group[CODER]:
                raise ConfigError(f"CURE: a batch has tests of task {task} and none of its programs. {WAY_OUT}")
            tests = unique([*truth[task], *(said.values[i] for i in group[TESTER])])
            for program in unique(said.values[i] for i in group[CODER]):
                jobs[task, program] = ProgramTests(program, tests, len(unique(truth[task])))
        started = time.perf_counter()
        judged = self._run(list(jobs.values()))
        passed = {
            key: {test for test, verdict in zip(jobs[key].tests, verdicts, strict=True) if verdict is Verdict.PASSED}
            for key, verdicts in zip(jobs, judged, strict=True)
        }
        log("cure/seconds", time.perf_counter() - started)
        if unfinished := sum(verdicts.count(Verdict.BUDGET) for verdicts in judged):
            log("cure/unfinished", unfinished / sum(map(len, judged)))

        rewards = [0.0] * len(said.values)
        correct, precise = list[bool](), list[bool]()
        for task, group in said.places.items():
            of_programs = [passed.get((task, said.values[i]), set()) for i in group[CODER]]
            matrix = [[said.values[i] in of for i in group[TESTER]] for of in of_programs]
            programs, tested = matrix_rewards([[test in of for test in truth[task]] for of in of_programs], matrix)
            for place, reward in zip([*group[CODER], *group[TESTER]], [*programs, *tested], strict=True):
                rewards[place] = reward
            correct += [reward == 1.0 for reward in programs]
            right = [row for row, reward in zip(matrix, programs, strict=True) if reward == 1.0]
            precise += [all(column) for column in zip(*right, strict=True)]
        log("cure/pass@1", sum(correct) / len(correct))
        if precise:
            log("cure/precision", sum(precise) / len(precise))
        return rewards

    def _run(self, jobs: list[ProgramTests]) -> list[list[Verdict]]:
        """Return the verdicts on the tests of each job. Collective: each rank runs a part of the jobs, and all ranks
        get all verdicts.

        Args:
            jobs: programs with their tests, the same list on every rank.

        Raises:
            SandboxError: on all ranks, if any of them could not run programs.
        """
        state = PartialState()
        try:
            share: Any = self.sandbox.run(jobs[state.process_index :: state.num_processes])
        except SandboxError as error:  # the other ranks wait for this rank's answer
            share = error
        shares = gathered(share)
        for rank, of_rank in enumerate(shares):
            if isinstance(of_rank, SandboxError):
                raise SandboxError(f"Rank {rank}: {of_rank}")
        return [shares[i % len(shares)][i // len(shares)] for i in range(len(jobs))]


def unique(sources: Iterable[str | None]) -> list[str]:
    """Return the sources without None and without repetitions, in the order of their first appearance."""
    return [source for source in dict.fromkeys(sources) if source is not None]
