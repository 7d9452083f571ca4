"""docs/step.md shows the calls of a step as they are."""

from tests import step_trace


def test_the_page_shows_the_calls_that_a_step_makes():
    assert step_trace.entries(step_trace.trace()) == step_trace.known(), "`python -m tests.step_trace` writes it anew"


def test_the_page_names_the_lines_of_today():
    page = step_trace.page(step_trace.known())
    assert step_trace.PAGE.read_text() == page, "`python -m tests.step_trace --page` writes it anew"
