"""docs/models.md is what runs of its models show: their weight paths, within 1e-5, and their refusals."""

import importlib.util
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "models"


def module(name):
    spec = importlib.util.spec_from_file_location(f"models_{name}", FOLDER / f"{name}.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


matrix, page, templates = module("matrix"), module("page"), module("templates")
FAST = ("DeepSeek-V3, DeepSeek-R1", "GPT-2", "gpt-oss", "Qwen1.5-MoE, Qwen2-MoE", "Qwen3-Next")
"""Latent attention and a routing's bias; transposed weights; rearranged experts; an adapter called past; states."""
NAMES = [
    name if name in FAST else pytest.param(name, marks=pytest.mark.slow)
    for name in matrix.MODELS
    if name not in matrix.WITH_TORCHVISION
]


def test_the_page_is_up_to_date():
    results = page.seen()
    assert [row["model"] for row in results["rows"]] == list(matrix.MODELS), "`python -m tests.models` measures all"
    assert page.PAGE.read_text() == page.page(results), "python tests/models/page.py writes it anew"


@pytest.mark.parametrize("name", templates.TEMPLATES)
def test_a_chat_template_is_what_its_conversations_show(name):
    (expected,) = (row for row in page.seen()["templates"] if row["template"] == name)
    assert templates.measure(name) == expected


@pytest.mark.parametrize("name", NAMES)
def test_a_row_is_what_a_run_shows(name, started_once):
    check_row(name)


@pytest.mark.parametrize("name", matrix.WITH_TORCHVISION)
def test_a_row_with_torchvision(name, started_once):
    pytest.importorskip("torchvision", reason="in `make test-vision`: vLLM has these beside models that see images")
    check_row(name)


def check_row(name):
    (expected,) = (row for row in page.seen()["rows"] if row["model"] == name)
    row = matrix.measure(name)
    assert without_gaps(row) == without_gaps(expected)
    assert all(gap < 1e-5 for gap in (*gaps(row), *gaps(expected)))


def gaps(row):
    return [case["gap"] for case in row.values() if isinstance(case, dict) and "gap" in case]


def without_gaps(row):
    return {
        key: {k: v for k, v in value.items() if k != "gap"} if isinstance(value, dict) else value
        for key, value in row.items()
    }
