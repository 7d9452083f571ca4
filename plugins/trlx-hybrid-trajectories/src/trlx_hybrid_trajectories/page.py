"""An HTML page that shows recorded trajectories token by token, in a single file that loads nothing from elsewhere."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from importlib import resources

from jinja2 import Environment, PackageLoader, StrictUndefined

from .record import Recorded
from .view import FAILED, TokenSpan, facts, messages, number, number_of, sections, turns, visible

# Probabilities at which a sampled token gets one shade deeper; `page.css` has a shade for each level.
SHADES = (0.9, 0.5, 0.2, 0.05, 0.01)
LONG_PROMPT = 400  # tokens; a longer prompt is folded away


def as_html(recorded: Sequence[Recorded], *, title: str = "Trajectories") -> str:
    """Return a complete HTML page that shows the trajectories in the given order.

    Sampled tokens are upright and coloured by their probability; a tooltip shows their log-prob. Observed tokens, which
    a tool or an environment returned, are italic, with a bar beside them. Each section also has a label in words, so
    that the difference is kept if the page is copied as plain text.

    Args:
        recorded: the trajectories to show.
        title: the page's title, plain text.
    """
    listed = [contents(recorded)] if len(recorded) > 1 else []
    head = ['<header class="page">', part("heading", title=title, lede=summary(recorded)), legend(), "</header>"]
    body = [*head, *listed, "<main>", *map(article, recorded), "</main>"]
    return document(title, body, styles=[packaged("page.css")], scripts=[packaged("page.js")])


def packaged(name: str) -> str:
    """Return the text of a data file of this package, such as a style sheet.

    Args:
        name: path of the file, relative to the package.
    """
    return resources.files(__package__).joinpath(name).read_text("utf-8")


@functools.cache
def _templates() -> Environment:
    loader = PackageLoader(__package__, "")
    found = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    for of in (facts, number, number_of, turns, visible, hover, shade):
        found.filters[of.__name__] = of
    return found


def part(name: str, **given: object) -> str:
    """Return a part of a page as HTML, made by a Jinja macro.

    Args:
        name: name of the macro in the template `page.html`.
        given: the macro's arguments. Texts are escaped, unless the macro says otherwise.
    """
    return str(getattr(_templates().get_template("page.html").module, name)(**given))


def document(title: str, body: Sequence[str], *, styles: Sequence[str], scripts: Sequence[str]) -> str:
    """Return a complete HTML page.

    Args:
        title: the page's title, plain text.
        body: the lines of HTML inside the page's body.
        styles: the texts of the style sheets that the page contains.
        scripts: the texts of the scripts that the page contains.
    """
    return part("document", title=title, body=body, styles=styles, scripts=scripts)


def summary(recorded: Sequence[Recorded]) -> str:
    """Return one line of text about trajectories: their number, steps and rewards, and how many failed."""
    if not recorded:
        return "No trajectories."
    steps = sorted({one.step for one in recorded})
    rewards = [one.reward for one in recorded if one.reward is not None]
    failed = sum(one.failed for one in recorded)
    span = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    parts = [number_of(len(recorded), "trajectory", "trajectories"), span]
    if len(rewards) > 1:
        mean = sum(rewards) / len(rewards)
        parts.append(f"reward {number(min(rewards))} to {number(max(rewards))}, mean {number(mean)}")
    return " · ".join(parts + ([f"{failed} failed"] if failed else []))


def legend() -> str:
    """Return the HTML that explains how the page shows tokens: the colours of probabilities, and signs such as line
    breaks."""
    percent = [f"{share:.0%}" for share in SHADES]
    return part("legend", shades=[*(f"≥ {share}" for share in percent), f"< {percent[-1]}"])


def contents(recorded: Sequence[Recorded], among: Sequence[Recorded] = ()) -> str:
    """Return the HTML of a table of trajectories that links to each of them on the page. A bar shows each reward,
    relative to the lowest and the highest one.

    Args:
        recorded: the trajectories to list.
        among: the trajectories whose lowest and highest rewards are the ends of the bars' scale; `recorded` if empty.
    """
    finite = [one.reward for one in among or recorded if one.reward is not None and math.isfinite(one.reward)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)

    def share(reward: float | None) -> float:
        return 0.0 if reward is None or not math.isfinite(reward) or low == high else (reward - low) / (high - low)

    return part("contents", rows=[(one, f"{share(one.reward):.0%}") for one in recorded])


def article(one: Recorded) -> str:
    """Return the HTML that shows one trajectory token by token; if its completion is a list of chat messages, these are
    listed as well.

    The id of the HTML element is "t" followed by the number of the trajectory's line in its file, such as "t12".
    """
    said = messages(one) if isinstance(one.completion, list) else []
    return part("article", one=one, sections=sections(one), messages=said, failed=FAILED, long_prompt=LONG_PROMPT)


def hover(span: TokenSpan) -> str:
    """Return the text of the tooltip over a token: its log-prob in nats, its probability, and its id. For tokens that
    form a character together, the text has the sum of their log-probs, and all ids."""
    ids = " + ".join(map(str, span.ids))
    if span.logprob is None:
        return f"id {ids}"
    chance = math.exp(min(0.0, span.logprob)) if not math.isnan(span.logprob) else math.nan
    return f"log-prob {span.logprob:.3f} · {chance:.1%} · id {ids}".replace("-0.000", "0.000").replace(" -", " −")


def shade(logprob: float) -> int:
    """Return the number of the colour in which a sampled token is shown, from 0 to 5. A token has colour 0 if its
    probability is at least 90%, and colour 5 if it is below 1% or the log-prob is NaN. `SHADES` has all limits.

    Args:
        logprob: the token's log-prob, in nats.
    """
    return sum(not logprob >= math.log(share) for share in SHADES)
