"""docs/tested.md is what its generator makes of the results."""

import importlib.util
from pathlib import Path

FOLDER = Path(__file__).parent / "whole_runs"


def generator():
    spec = importlib.util.spec_from_file_location("tested_page", FOLDER / "page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date():
    page = generator()
    assert page.PAGE.read_text() == page.page(page.seen()), "python tests/whole_runs/page.py writes it anew"


def test_of_a_case_the_last_run_counts_and_a_failure_says_why():
    run = {"returncode": 0, "hung": False, "seconds": 35.4, "leaving": None}
    row = {"case": "tools", "passed": False, "gpus": 1, "device": "X", "commit": "a", "runs": [run], "note": "because"}
    page = generator().page([{**row, "passed": True, "commit": "b"}, row])
    assert "| 1 | `tools` | X | a | **failed** | 35 | – |" in page
    assert "| b |" not in page
    assert "- `tools`: because" in page
