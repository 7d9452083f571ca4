"""Views lose no token, keep sampled and observed apart, and let no text out of its place."""

import html.parser
import math
import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trlx_hybrid_trajectories.page import as_html
from trlx_hybrid_trajectories.record import Recorded
from trlx_hybrid_trajectories.view import as_text, sections, turns, visible


def recorded(tokens, *, prompt=("ask",), special=(), **fields):
    """A trajectory of (text, sampled) tokens."""
    fields = {
        "line": 1,
        "step": 12,
        "training": True,
        "weight_version": 3,
        "reward": 0.5,
        "prompt_ids": list(range(len(prompt))),
        "prompt_texts": list(prompt),
        "completion_ids": [100 + index for index in range(len(tokens))],
        "completion_texts": [text for text, _ in tokens],
        "loss_mask": [int(sampled) for _, sampled in tokens],
        "logprobs": [-0.25 * index for index in range(len(tokens))],
        "special_ids": frozenset(special),
        "completion": None,
    } | fields
    return Recorded(**fields)


TURNS = recorded(
    [("call", 1), (" tool", 1), ("<end>", 1), ("4", 0), ("2\n", 0), ("It is", 1), (" 42", 1)], special=[102]
)
texts = st.one_of(
    st.none(), st.text(max_size=6), st.sampled_from(["<b>", '"', "&amp;", "\x1b[2J", "\n", "é漢", "</span>"])
)
trajectories = st.builds(
    lambda tokens, prompt, versions: recorded(
        tokens, prompt=prompt, weight_versions=versions and [versions[i % len(versions)] for i in range(len(tokens))]
    ),
    st.lists(st.tuples(texts, st.booleans()), max_size=12),
    st.lists(texts, max_size=4),
    st.none() | st.lists(st.integers(1, 3), min_size=1, max_size=12),
)


class Page(html.parser.HTMLParser):
    """Reads a page as a browser would: open tags, the texts of token spans by their section, all titles."""

    def __init__(self, page):
        super().__init__()
        self.open, self.sections, self.titles, self.tags = [], [], [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append((tag, attributes))
        if tag not in ("meta", "link", "img"):
            self.open.append((tag, attributes.get("class", "")))
        if tag == "section":
            self.sections.append((attributes["class"], []))
        elif tag == "span" and self.sections and attributes.get("class", "").startswith("t"):
            self.sections[-1][1].append("")
            self.titles.append(attributes["title"])

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if any(kind == ("div", "tokens") for kind in self.open) and "span" in [tag for tag, _ in self.open]:
            self.sections[-1][1][-1] += data


def expected(one):
    return [(section.kind, [span.text for span in section.spans]) for section in sections(one)]


@given(trajectories)
def test_sections_hold_every_token_in_order_and_respect_the_mask(one):
    cut = sections(one)
    shown = [token for section in cut for span in section.spans for token in span.ids]
    assert shown == one.prompt_ids + one.completion_ids
    kinds = [section.kind for section in cut if section.kind != "prompt" for span in section.spans for _ in span.ids]
    if one.failed:
        assert set(kinds) <= {"masked"}
    else:
        assert kinds == ["sampled" if m else "observed" for m in one.loss_mask]
        spoken = list(dict.fromkeys(section.turn for section in cut if section.kind == "sampled"))
        assert spoken == list(range(1, turns(one) + 1))
    assert all(span.text for section in cut for span in section.spans)


@given(trajectories)
def test_the_page_is_well_formed_and_has_every_token_in_its_block(one):
    page = Page(as_html([one]))
    assert page.open == []
    assert page.sections == expected(one)
    assert len(page.titles) == sum(len(section.spans) for section in sections(one))


def columns(line):
    """Without what stands on, or in, another character's place."""
    seen = [c for c in line if unicodedata.category(c) not in ("Mn", "Me", "Cf") or c == "\xad"]
    return len(seen) + sum(unicodedata.east_asian_width(c) in "WF" for c in seen)


@given(trajectories, st.integers(4, 60), st.booleans())
def test_lines_fit_the_width_and_lose_nothing(one, width, colour):
    text = as_text(one, colour=colour, width=width)
    if not colour:
        assert "\x1b" not in text
    lines = re.sub(r"\x1b\[\d*m", "", text).split("\n")
    assert all(columns(line) <= width for line in lines)
    shown = "".join(line[2:] for line in lines if line.startswith(("  ", "│")))
    for section in sections(one):
        for span in section.spans:
            assert all(sign in shown for sign in span.text if not sign.isspace())


@given(st.text(st.characters(exclude_categories=())))
def test_nothing_visible_steers_a_terminal_or_breaks_an_encoding(text):
    signs = visible(text)
    signs.encode()
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", signs)
    assert visible(signs) == signs


def test_the_terminal_tells_observed_from_sampled_without_colour():
    assert as_text(TURNS, colour=False, width=80).split("\n") == [
        "trajectory 1 · reward 0.5 · step 12 · weights version 3 · turns 2 · tokens 1",
        "prompt, 5 sampled, 2 observed",
        "",
        "prompt · 1 token",
        "│ ask",
        "",
        "turn 1 · sampled · 3 tokens · mean log-prob −0.25",
        "  call tool<end>",
        "",
        "observed · 2 tokens",
        "│ 42",
        "",
        "turn 2 · sampled · 2 tokens · mean log-prob −1.38",
        "  It is 42",
    ]


OF_TWO_VERSIONS = recorded(
    [("It", 1), (" is", 1), ("4", 0), ("é", 1), (None, 1), ("!", 1)], weight_versions=[1, 3, 3, 1, 3, 3]
)


def test_text_is_shown_under_the_weights_that_sampled_it():
    text = as_text(OF_TWO_VERSIONS, colour=False, width=120)
    assert "weights version 3, sampled with 1 to 3 · turns 2" in text
    assert text.split("\n")[6:] == [
        "turn 1 · sampled · 1 token · weights version 1 · mean log-prob 0.00",
        "  It",
        "",
        "turn 1 · sampled · 1 token · weights version 3 · mean log-prob −0.25",
        "   is",
        "",
        "observed · 1 token",
        "│ 4",
        "",
        "turn 2 · sampled · 2 tokens · weights version 1 · mean log-prob −0.88",
        "  é",
        "",
        "turn 2 · sampled · 1 token · weights version 3 · mean log-prob −1.25",
        "  !",
    ]
    page = Page(as_html([OF_TWO_VERSIONS]))
    assert page.sections == expected(OF_TWO_VERSIONS)
    strip = [attributes["title"] for tag, attributes in page.tags if tag == "i" and "title" in attributes]
    assert strip[1] == "turn 1, sampled · 1 token · weights version 1"


@pytest.mark.parametrize(("versions", "shown"), [([3, 3], "version 3"), ([2, 2], "version 3, sampled with 2")])
def test_weights_are_named_where_they_are_not_those_of_the_batch(versions, shown):
    text = as_text(recorded([("a", 1), ("b", 1)], weight_versions=versions), colour=False, width=120)
    assert f"weights {shown} · turns 1" in text
    assert ("2 tokens · weights version 2" in text) == (versions == [2, 2])


def test_the_terminal_dims_what_was_observed():
    lines = as_text(TURNS, colour=True, width=80).split("\n")
    assert "\x1b[2m│ 42\x1b[0m" in lines
    assert "  It is 42" in lines


def test_wide_characters_count_twice():
    lines = as_text(recorded([("漢字漢字漢字", 1)]), colour=False, width=8).split("\n")
    assert "  漢字漢" in lines


def test_a_character_of_several_tokens_is_one_span_with_all_their_numbers():
    one = recorded([("é", 1), (None, 1), ("a", 1)], logprobs=[-1.0, -0.5, 0.0])
    spans = sections(one)[1].spans
    assert [(span.text, span.ids, span.logprob) for span in spans] == [("é", (100, 101), -1.5), ("a", (102,), 0.0)]
    assert "log-prob −1.500 · 22.3% · id 100 + 101" in Page(as_html([one])).titles


def test_shades_follow_the_log_prob_and_only_sampled_tokens_have_one():
    chances = [1.0, 0.6, 0.3, 0.1, 0.02, 0.001]
    one = recorded([("x", 1)] * 6 + [("y", 0)], logprobs=[*map(math.log, chances), -9.0])
    page = as_html([one]).split("<main>")[1]
    assert re.findall(r'class="t (s\d)"', page) == ["s0", "s1", "s2", "s3", "s4", "s5"]


@pytest.mark.parametrize("logprobs", [None, [None, math.nan, -math.inf]])
def test_missing_and_broken_log_probs_can_be_seen(logprobs):
    titles = Page(as_html([recorded([("x", 1)] * 3, logprobs=logprobs)])).titles[1:]
    shown = ["id 100", "id 101", "id 102"]
    if logprobs:
        shown = ["id 100", "log-prob nan · nan% · id 101", "log-prob −inf · 0.0% · id 102"]
    assert titles == shown


def test_special_tokens_and_tokens_without_text_are_chips():
    one = recorded([("<end>", 1), ("", 1)], special=[100], logprobs=None)
    page = as_html([one])
    assert '<span class="t k" title="id 100">&lt;end&gt;</span>' in page
    assert '<span class="t k" title="id 101">⟨101⟩</span>' in page


def test_a_failed_trajectory_is_marked_and_shows_its_messages():
    said = [
        {"role": "assistant", "content": "let me", "tool_calls": [{"function": {"name": "<b>"}}]},
        {"role": "tool", "content": "4"},
    ]
    one = recorded([("let me", 0), ("4", 0)], completion=said, reward=None)
    text = as_text(one, colour=False, width=80)
    assert "✗ failed" in text
    assert 'tool_calls: [{"function": {"name": "<b>"}}]' in text
    assert "│ tool:\n│ 4" in text
    page = as_html([one])
    assert '<article id="t1" class="failed">' in page
    assert "{&#34;name&#34;: &#34;&lt;b&gt;&#34;}" in page


def test_the_page_needs_nothing_from_elsewhere():
    page = as_html([TURNS, recorded([], line=2, reward=None, training=False)], title="<run>")
    assert "<title>&lt;run&gt;</title>" in page
    assert not re.search(r"(?i)https?:|@import|url\(|src=", page)
    assert "prefers-color-scheme: dark" in page
    assert [tag for tag, _ in Page(page).tags].count("article") == 2
    assert '<a href="#t2">' in page


def test_a_page_of_nothing_is_a_page():
    assert "No trajectories." in as_html([])
