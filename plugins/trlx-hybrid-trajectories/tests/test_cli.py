"""`trlx-hybrid trajectories` shows what is asked for, and says why where there is nothing."""

import argparse
import os
import re
import subprocess
import sys

import pytest
from trlx_hybrid.contract.types import Trajectory
from trlx_hybrid.errors import HybridError
from trlx_hybrid.testing.models import character_tokenizer
from trlx_hybrid_trajectories.cli import add_command

from tests.support.recorded import append


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Runs `trajectories FILE ...` over six trajectories: steps 0 to 2, rewards 0 to 5, one failed, one unscored."""
    monkeypatch.setenv("COLUMNS", "200")
    tokenizer, file = character_tokenizer(), tmp_path / "t.jsonl"
    for index in range(6):
        one = Trajectory(
            prompt_ids=[5],
            completion_ids=[6],
            loss_mask=[int(index != 4)],
            weight_version=0,
            reward=None if index == 5 else float(index),
        )
        append(file, [one], tokenizer, step=index // 2)

    def start(*arguments, file=file):
        parser = argparse.ArgumentParser()
        add_command(parser.add_subparsers())
        options = parser.parse_args(["trajectories", str(file), *map(str, arguments)])
        return options.run(options)

    return start


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        ([], [1, 2, 3, 4, 5, 6]),
        (["--limit", 2], [1, 2]),
        (["--step", 1], [3, 4]),
        (["--failed"], [5]),
        (["--worst", 2], [1, 2]),
        (["--best", 2], [5, 4]),
        (["--best", 2, "--step", 0, "--limit", 1], [2]),
    ],
)
def test_the_command_shows_what_is_asked_for(command, capsys, arguments, lines):
    assert command(*arguments) == 0
    captured = capsys.readouterr()
    assert [int(n) for n in re.findall(r"^trajectory (\d+)", captured.out, re.MULTILINE)] == lines
    assert ("use --limit for more" in captured.err) == ("--limit" in arguments)


def test_the_command_writes_a_page(command, tmp_path, capsys):
    assert command("--html", tmp_path / "new" / "t.html", "--best", 1) == 0
    assert 'id="t5"' in (tmp_path / "new" / "t.html").read_text("utf-8")
    assert capsys.readouterr().out == f"wrote {tmp_path}/new/t.html: 1 of the trajectories in {tmp_path}/t.jsonl\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", 7], "no trajectory of step 7; it has those of steps 0 to 2 (6 in all, 1 failed)."),
        (
            ["--step", 0, "--failed"],
            "no failed trajectory of step 0; it has those of steps 0 to 2 (6 in all, 1 failed)",
        ),
        (["--html", "/dev/null/t.html"], "cannot write --html /dev/null/t.html"),
    ],
)
def test_the_command_says_why_there_is_nothing_to_show(command, arguments, message):
    with pytest.raises(HybridError, match=re.escape(message)):
        command(*arguments)


def test_the_command_names_a_missing_file(command, tmp_path):
    with pytest.raises(HybridError, match=r"cannot read trajectories from .*none\.jsonl"):
        command(file=tmp_path / "none.jsonl")


def test_the_command_survives_a_reader_that_leaves(command, tmp_path):
    script = "import sys; sys.stdin.read(); from trlx_hybrid.commands.main import main; sys.exit(main())"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", script, "trajectories", str(tmp_path / "t.jsonl")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )
    process.stdout.close()
    process.stdin.close()
    with process.stderr as errors:
        assert errors.read() == b""
    assert process.wait() == 1
