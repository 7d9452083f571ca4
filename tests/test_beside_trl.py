"""Faults that stock TRL has, too: the same script with both trainers. Ours has to be right; TRL's number is printed."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from beside_trl.__main__ import NAMES, compared


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_where_trl_is_wrong_this_project_is_right(name, started_once):
    row, right = compared(name)
    print(row)
    assert right, row


def test_the_page_shows_each_of_these_scripts():
    page = (Path(__file__).parents[1] / "docs" / "checks.md").read_text()
    assert [name for name in NAMES if f"| `{name}` |" not in page] == []
