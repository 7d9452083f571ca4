"""CURE: one model writes programs and unit tests, and both are rewarded from the matrix of who passes what.

Wang et al. 2025, https://arxiv.org/abs/2506.03136; the rewards are those of the authors' code.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from accelerate import PartialState
from accelerate.utils import gather_object
from trlx_hybrid.errors import ConfigError

from .runner import Verdict
from .sandbox import ProgramTests, Sandbox, SandboxError

if TYPE_CHECKING:
    from datasets import Dataset

Matrix = Sequence[Sequence[bool]]
CODER, TESTER = SPEAKERS = ("coder", "tester")
TASK, SPEAKER, TESTS = COLUMNS = ("task_id", "speaker", "tests")
WAY_OUT = (
    "Give the trainer what `two_speakers` returns, as it is, with the GRPOConfig that it was given; for evaluation, "
    "its rows with speaker 'coder'."
)
PYTHON = re.compile(r"```(?:python)?\n(.*?)```", re.DOTALL)


def python_block(text: str) -> str | None:
    """The last block of Python in a completion, or None."""
    blocks = PYTHON.findall(text)
    return blocks[-1] if blocks else None


def two_speakers(
    tasks: Dataset, args: Any, *, coder: Callable[[Mapping[str, Any]], Any], tester: Callable[[Mapping[str, Any]], Any]
) -> Dataset:
    """A dataset in which each task is two rows, one after the other: a prompt for the coder and one for the tester.

    TRL samples a group of completions for each row; in this order, and with an even number of prompts in a batch, both
    groups of a task are in one batch. The order of `tasks` is that of training: shuffle them yourself.

    Args:
        tasks: with a column `tests`, the ground-truth tests of each task: Python sources that raise where a program is
            wrong. All columns are kept, for both speakers.
        args: the `GRPOConfig` of the run.
        coder, tester: the prompt, text or messages, that asks for a program or for a unit test. Given a row of `tasks`.

    Raises:
        ConfigError: `args` would part the two groups of a task, a task has no tests, or a column is in the way.
    """
    if args.shuffle_dataset:
        raise ConfigError("CURE needs the two rows of a task in one batch: set GRPOConfig(shuffle_dataset=False).")
    prompts = args.generation_batch_size // args.num_generations
    if prompts % 2:
        raise ConfigError(
            f"CURE needs two prompts for each task, and a batch has {prompts}: generation_batch_size "
            f"({args.generation_batch_size}) must be a multiple of 2 * num_generations ({2 * args.num_generations})."
        )
    taken = {TASK, SPEAKER} & set(tasks.column_names)
    if taken or TESTS not in tasks.column_names:
        raise ConfigError(
            f"CURE: the tasks need a column {TESTS!r}, and {TASK!r} and {SPEAKER!r} are added: rename "
            f"{' and '.join(map(repr, sorted(taken))) or 'your column of ground-truth tests'}."
        )

    def speak(rows: dict[str, list[Any]], places: list[int]) -> dict[str, list[Any]]:
        spoken = []
        for place, values in zip(places, zip(*rows.values(), strict=True), strict=True):
            row = dict(zip(rows, values, strict=True))
            if not row[TESTS]:
                raise ConfigError(f"CURE: task {place} has no ground-truth tests: every program would be right.")
            for speaker, prompt in ((CODER, coder), (TESTER, tester)):
                spoken.append(row | {"prompt": prompt(row), TASK: place, SPEAKER: speaker})
        return {name: [row[name] for row in spoken] for name in spoken[0]}

    return tasks.map(speak, batched=True, with_indices=True)


def matrix_rewards(
    truth: Sequence[Sequence[bool]], judged: Sequence[Sequence[bool]]
) -> tuple[list[float], list[float]]:
    """Rewards of n programs and m generated tests of one task.

    A program earns the share of ground-truth tests that it passes, and is right if that is all of them. A test that all
    right programs pass earns the share of wrong programs that it rejects; one that rejects a right program loses the
    share of wrong programs that it lets pass. Where no program is wrong, these are 1 and -1; where none is right,
    nothing is known about the tests, and all earn 0. GRPO subtracts each group's mean and divides by its deviation.

    Args:
        truth: (n, t), whether a program passes a ground-truth test.
        judged: (n, m), whether a program passes a generated test.

    Returns:
        (n,) in [0, 1] and (m,) in [-1, 1].
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


class Submission(NamedTuple):
    """A completion: of which task, by whom, and the source in it."""

    task: int
    speaker: str
    source: str | None


class CureReward:
    """TRL reward function for the rows of `two_speakers`. Collective: the groups of a task may lie on several ranks.

    Every program is run with the ground-truth tests of its task and with all generated ones, each rank runs its share,
    and both are paid by `matrix_rewards`. A completion without a program passes nothing, one without a test lets
    nothing pass.

    Logs `cure/pass@1`, the share of programs that are right; of tasks that have a right program, `cure/precision`, the
    share of generated tests that all right ones pass; and `cure/seconds`, of the sandbox.

    Args:
        program, test: the Python source in the text of a completion, or None. A test is executed with the program's
            names and fails it by raising.
        sandbox: its limits and walls.
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
        """The rewards of this rank's rows.

        Raises:
            ConfigError: a row is none of `two_speakers`, or a batch has tests of a task and none of its programs.
            SandboxError: on all ranks; programs could not be run on one of them.
        """
        absent = [name for name in COLUMNS if name not in columns]
        if absent:
            raise ConfigError(f"CURE: the rows have no column {absent[0]!r}. {WAY_OUT}")
        texts = [done if isinstance(done, str) else done[-1]["content"] or "" for done in completions]
        mine = [
            Submission(task, speaker, self._source[speaker](text))
            for task, speaker, text in zip(columns[TASK], columns[SPEAKER], texts, strict=True)
        ]
        ranks = gathered((mine, dict(zip(columns[TASK], columns[TESTS], strict=True))))
        rows = [row for of_rank, _ in ranks for row in of_rank]
        truth = {task: list(tests) for _, of_rank in ranks for task, tests in of_rank.items()}
        first = sum(len(of_rank) for of_rank, _ in ranks[: PartialState().process_index])
        rewards = self._rewards(rows, truth, log_metric or (lambda name, value: None))
        return rewards[first : first + len(mine)]

    def _rewards(
        self, rows: list[Submission], truth: dict[int, list[str]], log: Callable[[str, float], None]
    ) -> list[float]:
        """Of all ranks' rows, the same on all ranks."""
        groups: dict[int, dict[str, list[int]]] = {task: {speaker: [] for speaker in SPEAKERS} for task in truth}
        for place, row in enumerate(rows):
            groups[row.task][row.speaker].append(place)
        jobs: dict[tuple[int, str | None], ProgramTests] = {}  # what was sampled more than once is run once
        for task, group in groups.items():
            if not group[CODER]:
                raise ConfigError(f"CURE: a batch has tests of task {task} and none of its programs. {WAY_OUT}")
            tests = unique([*truth[task], *(rows[i].source for i in group[TESTER])])
            for program in unique(rows[i].source for i in group[CODER]):
                jobs[task, program] = ProgramTests(program, tests, len(unique(truth[task])))
        started = time.perf_counter()
        passed = {
            key: {test for test, verdict in zip(jobs[key].tests, verdicts, strict=True) if verdict is Verdict.PASSED}
            for key, verdicts in zip(jobs, self._run(list(jobs.values())), strict=True)
        }
        log("cure/seconds", time.perf_counter() - started)

        rewards = [0.0] * len(rows)
        correct, precise = list[bool](), list[bool]()
        for task, group in groups.items():
            of_programs = [passed.get((task, rows[i].source), set()) for i in group[CODER]]
            judged = [[rows[i].source in of for i in group[TESTER]] for of in of_programs]
            programs, tested = matrix_rewards([[test in of for test in truth[task]] for of in of_programs], judged)
            for place, reward in zip([*group[CODER], *group[TESTER]], [*programs, *tested], strict=True):
                rewards[place] = reward
            correct += [reward == 1.0 for reward in programs]
            right = [row for row, reward in zip(judged, programs, strict=True) if reward == 1.0]
            precise += [all(column) for column in zip(*right, strict=True)]
        log("cure/pass@1", sum(correct) / len(correct))
        if precise:
            log("cure/precision", sum(precise) / len(precise))
        return rewards

    def _run(self, jobs: list[ProgramTests]) -> list[list[Verdict]]:
        """The verdicts on all jobs, of which this rank runs its share."""
        state = PartialState()
        try:
            share: Any = self.sandbox.run(jobs[state.process_index :: state.num_processes])
        except SandboxError as error:  # the others wait
            share = error
        shares = gathered(share)
        for rank, of_rank in enumerate(shares):
            if isinstance(of_rank, SandboxError):
                raise SandboxError(f"Rank {rank}: {of_rank}")
        return [shares[i % len(shares)][i // len(shares)] for i in range(len(jobs))]


def unique(sources: Iterable[str | None]) -> list[str]:
    """Each source once, in their order."""
    return [source for source in dict.fromkeys(sources) if source is not None]


def gathered(value: Any) -> list[Any]:
    """One value per rank, in their order. Collective."""
    return list(gather_object([value]))
