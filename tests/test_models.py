"""docs/models.md is what runs of its models show: their weight paths, within 1e-5, and their refusals."""

import importlib.util
import re
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from trl.chat_template_utils import add_response_schema, supports_tool_calling
from trlx_hybrid import HybridConfig, HybridEngine
from trlx_hybrid.errors import HybridError
from trlx_hybrid.testing.conformance import ConformanceError, check_template

FOLDER = Path(__file__).parent / "models"


def module(name):
    spec = importlib.util.spec_from_file_location(f"models_{name}", FOLDER / f"{name}.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


matrix, page, templates = module("matrix"), module("page"), module("templates")
FAST = ("DeepSeek-V3, DeepSeek-R1", "GPT-2", "gpt-oss", "Qwen1.5-MoE, Qwen2-MoE", "Qwen3-Next")
"""Latent attention and a routing's bias; transposed weights; rearranged experts; an adapter called past; states."""
UNPARSED = ("deepseekv3", "diffusion_gemma", "muse_glimmer")
"""Templates that show calls, which TRL cannot read from what a model samples."""
NAMES = [
    name if name in FAST else pytest.param(name, marks=pytest.mark.slow)
    for name in matrix.MODELS
    if name not in matrix.WITH_TORCHVISION
]


def notes():
    """Of each note on the page that says why a path refuses: its number, the first model that has it, whether for an
    adapter, and the reason. The others are errors that `auto` ends with, or that pictures do: rows are measured so."""
    text = page.PAGE.read_text()
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    for number, reason in re.findall(r"^(\d+)\. (.*)$", text, re.MULTILINE):
        mark = f"({number})"
        name, adapted = next((row[0], mark in row[-1]) for row in cells if mark in "".join(row[-2:]))
        others = f"refused {mark}", f"text alone {mark}"
        if not any(other in cell for row in cells for cell in row for other in others):
            yield number, name, adapted, reason


NOTES = list(notes())


def test_the_page_is_up_to_date():
    results = page.seen()
    assert [row["model"] for row in results["rows"]] == list(matrix.MODELS), "`python -m tests.models` measures all"
    assert page.PAGE.read_text() == page.page(results), "python tests/models/page.py writes it anew"
    cases = (case for row in results["rows"] for case in row.values() if isinstance(case, dict))
    assert len(NOTES) == len({case["reason"] for case in cases if "reason" in case})


@pytest.mark.parametrize("name", templates.PUBLISHED)
def test_a_chat_template_is_what_its_conversations_show(name):
    (expected,) = (row for row in page.seen()["templates"] if row["template"] == name)
    assert templates.measure(name) == expected


@pytest.mark.parametrize("name", templates.PUBLISHED)
def test_the_check_of_a_template_says_what_conversations_show(name):
    """One that is used unchanged passes; one that is refused, or that TRL's training template replaces, does not."""
    (expected,) = (row for row in page.seen()["templates"] if row["template"] == name)
    given, ends = templates.processing_class(templates.SOURCES[name])
    if expected["how"].startswith(templates.OWN):
        check_template(given, end_ids=ends)
    else:
        with pytest.raises(ConformanceError, match="changes what stands before it"):
            check_template(given, end_ids=ends)


@pytest.mark.parametrize("name", templates.PUBLISHED)
def test_the_check_of_a_template_finds_tools_where_trl_does(name):
    given, ends = templates.processing_class(templates.SOURCES[name])
    try:
        add_response_schema(given)
        check_template(given, end_ids=ends, tools=True)
    except (ValueError, ConformanceError):
        expected = {row["template"]: row["how"] for row in page.seen()["templates"]}[name]
        assert not supports_tool_calling(given) or not expected.startswith(templates.OWN) or name in UNPARSED
    else:
        assert supports_tool_calling(given)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_is_what_a_run_shows(name, started_once):
    check_row(name)


@pytest.mark.parametrize("name", matrix.WITH_TORCHVISION)
def test_a_row_with_torchvision(name, started_once):
    pytest.importorskip("torchvision", reason="in `make test-vision`: vLLM has these beside models that see images")
    check_row(name)
    for _, having, adapted, reason in NOTES:
        if having == name:
            check_refusal(name, adapted, reason)


@pytest.mark.parametrize("number", [note[0] for note in NOTES if note[1] not in matrix.WITH_TORCHVISION])
def test_who_asks_for_a_path_that_refuses_reads_what_the_page_says(number, started_once):
    ((name, adapted, reason),) = (said for its, *said in NOTES if its == number)
    check_refusal(name, adapted, reason)


def check_refusal(name, adapted, reason):
    """The error that a user gets who asks for the path that this note is about."""
    (model, tokenizer), path = matrix.built(name), "alias"
    if adapted:
        model, path = get_peft_model(model, LoraConfig(target_modules="all-linear", **matrix.ADAPTER)), "lora"
    config = HybridConfig(engine_options={"max_model_len": 128}, weights=path)
    with (
        HybridEngine(model, tokenizer, max_tokens=8, config=config) as engine,
        pytest.raises(HybridError) as refused,
        engine.rollout_context(),
    ):
        pass
    told = f"weights='{path}' cannot serve this run: {reason.rstrip('.')}. Or let weights='auto' choose."
    assert page.escaped(str(refused.value)) == told


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
