"""MBPP for a trainer: prompts of google-research-datasets/mbpp, and a reward that runs the tests in a sandbox."""

from trlx_hybrid_cure import Sandbox
from trlx_hybrid_cure.cure import python_block
from trlx_hybrid_cure.sandbox import ProgramTests
from trlx_hybrid_cure.verdict import Verdict

SANDBOX = Sandbox()


def with_prompts(dataset):
    """Return the columns `prompt` and `tests`, made of `text`, `test_list` and `test_setup_code`."""

    def prepared(row):
        asked = f"{row['text']} It must pass this test:\n\n{row['test_list'][0]}\n\nAnswer with a block of Python."
        tests = [f"{row['test_setup_code']}\n{test}" for test in row["test_list"]]
        return {"prompt": [{"role": "user", "content": asked}], "tests": tests}

    return dataset.map(prepared, remove_columns=dataset.column_names)


def tests_passed(completions, tests, **columns):
    """Return the share of the tests that the last block of Python in a completion passes."""
    programs = [python_block(messages[-1]["content"] or "") for messages in completions]
    jobs = [ProgramTests(program or "", of_task) for program, of_task in zip(programs, tests, strict=True)]
    return [verdicts.count(Verdict.PASSED) / len(verdicts) for verdicts in SANDBOX.run(jobs)]
