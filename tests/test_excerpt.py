"""Long answers of tools: what is kept of them, and what is said of the rest."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trlx_hybrid.episodes.answers import NOTE, excerpt

LIMIT = NOTE + 50

texts = st.integers(0, 3 * LIMIT).map(lambda length: "x" * length)
items = texts | st.fixed_dictionaries({"type": st.just("text"), "text": texts}) | st.none() | st.lists(texts)


def characters(content):
    if isinstance(content, str):
        return len(content)
    if isinstance(content, dict):
        return 1 + sum(map(characters, [*content, *content.values()]))
    return 1 + sum(map(characters, content)) if isinstance(content, list) else 1


@given(texts | st.lists(items))
def test_an_excerpt_is_within_the_limit_and_its_own_excerpt(content):
    shown = excerpt(content, LIMIT)
    assert characters(shown) <= max(LIMIT, 0)
    assert excerpt(shown, LIMIT) is shown
    assert (shown is content) == (characters(content) <= LIMIT)


def test_a_text_says_how_much_of_it_is_shown():
    shown = excerpt("a" * 10_000, LIMIT)
    assert shown == "a" * 50 + "\n[This answer was cut: 50 of its 10,000 characters are shown.]"


def test_a_list_keeps_what_comes_first_and_ends_with_a_note():
    image = {"type": "image", "image": object()}
    note = "[This answer was cut: its first 50 characters are shown.]"
    assert excerpt(["a" * 40, "b" * 400, "c"], LIMIT) == ["a" * 40, "b" * 10, note]
    shown = excerpt([image, {"type": "text", "text": "b" * 400}, image], LIMIT)
    assert shown[0] is image
    assert set(shown[1]["text"]) == {"b"}
    assert shown[2:] == [{"type": "text", "text": note}]
    assert excerpt([{"rows": ["x" * 400]}, "after"], LIMIT) == [{"type": "text", "text": note}]


def test_a_list_that_holds_itself_has_an_end():
    content = []
    content.append(content)
    assert excerpt(content, LIMIT)[-1]["text"].startswith("[This answer was cut")


@pytest.mark.parametrize("content", [None, 3, {"text": "x" * 1000}])
def test_what_is_no_text_and_no_list_stays_as_it_is(content):
    assert excerpt(content, LIMIT) is content
