"""An HTML page that shows recorded trajectories token by token, in a single file that loads nothing from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources

from .record import Recorded
from .view import FAILED, Section, TokenSpan, facts, messages, number, number_of, sections, turns, visible

# Probabilities at which a sampled token gets one shade deeper; `page.css` has a shade for each level.
SHADES = (0.9, 0.5, 0.2, 0.05, 0.01)
LONG_PROMPT = 400  # tokens; a longer prompt is folded away


def as_html(recorded: Sequence[Recorded], *, title: str = "Trajectories") -> str:
    """Return a complete HTML page that shows the trajectories in the given order.

    Sampled tokens are upright and coloured by their probability; a tooltip shows their log-prob. Observed tokens, the
    ones that a tool or an environment returned, are italic, with a bar beside them. Each section also has a label in
    words, so that the difference is kept if the page is copied as plain text.

    Args:
        recorded: the trajectories to show.
        title: the page's title, plain text.
    """
    body = [
        f'<header class="page">\n<h1>{escape(visible(title))}</h1>\n<p class="lede">{summary(recorded)}</p>',
        *legend(),
        "</header>",
        *(contents(recorded) if len(recorded) > 1 else []),
        "<main>",
        *(line for one in recorded for line in article(one)),
        "</main>",
    ]
    return document(title, body, styles=[packaged("page.css")], scripts=[packaged("page.js")])


def packaged(name: str) -> str:
    """Return the text of a data file of this package, such as a style sheet.

    Args:
        name: path of the file, relative to the package.
    """
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def document(title: str, body: Sequence[str], *, styles: Sequence[str], scripts: Sequence[str]) -> str:
    """Return a complete HTML page.

    Args:
        title: the page's title, plain text.
        body: the lines of HTML inside the page's body.
        styles, scripts: the texts of style sheets and scripts, which the page is to contain.
    """
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(visible(title))}</title>",
        *(f"<style>\n{style}</style>" for style in styles),
        "</head>\n<body>",
        *body,
        '<div id="tip" role="tooltip" hidden></div>',
        *(f"<script>\n{script}</script>" for script in scripts),
        "</body>\n</html>\n",
    ]
    return "\n".join(parts)


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


def legend() -> Iterator[str]:
    """Yield lines of HTML that explain how the page shows tokens: the colours of probabilities, and signs such as line
    breaks."""
    percent = [f"{share:.0%}" for share in SHADES]
    names = [f"≥ {percent[0]}", *(f"≥ {share}" for share in percent[1:]), f"&lt; {percent[-1]}"]
    scale = "".join(f'<span class="t s{level}">{name}</span>' for level, name in enumerate(names))
    yield '<dl class="legend">'
    yield f'<div><dt>sampled</dt><dd class="scale">{scale}<small>probability of the token</small></dd></div>'
    observed = "given by a tool or an environment, not trained on"
    yield f'<div><dt>observed</dt><dd><span class="sample">{observed}</span></dd></div>'
    yield '<div><dt>signs</dt><dd><span class="k">&lt;special&gt;</span> token <i class="nl"></i> line break</dd></div>'
    yield "</dl>"


def contents(recorded: Sequence[Recorded], among: Sequence[Recorded] = ()) -> Iterator[str]:
    """Yield lines of HTML: a table of trajectories that links to each of them on the page. A bar shows each reward,
    relative to the lowest and the highest one.

    Args:
        recorded: the trajectories to list.
        among: the trajectories whose lowest and highest rewards the bars refer to; those of `recorded` if empty.
    """
    finite = [one.reward for one in among or recorded if one.reward is not None and math.isfinite(one.reward)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    heads = "".join(f'<th scope="col">{name}</th>' for name in ("trajectory", "step", "turns", "tokens", "reward", ""))
    yield f"<nav>\n<table>\n<thead><tr>{heads}</tr></thead>\n<tbody>"
    for one in recorded:
        share = 0.0
        if one.reward is not None and math.isfinite(one.reward) and high > low:
            share = (one.reward - low) / (high - low)
        mark = ' <span class="mark">✗ failed</span>' if one.failed else ""
        step = str(one.step) + ("" if one.training else " eval")
        yield (
            f'<tr><th scope="row"><a href="#t{one.line}">{one.line}</a>{mark}</th><td>{step}</td>'
            f"<td>{'–' if one.failed else turns(one)}</td><td>{len(one.completion_ids)}</td>"
            f'<td>{number(one.reward)}</td><td class="bar"><i style="width:{share:.0%}"></i></td></tr>'
        )
    yield "</tbody>\n</table>\n</nav>"


def article(one: Recorded) -> Iterator[str]:
    """Yield lines of HTML that show one trajectory token by token.

    The element's id is "t" and the trajectory's line number in its file. For a completion of chat messages, these are
    listed, too.
    """
    cut, failed = sections(one), ' class="failed"' if one.failed else ""
    yield f'<article id="t{one.line}"{failed}>\n<header>'
    yield f"<h2>Trajectory {one.line}</h2>\n<dl>"
    yield "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts(one))
    yield "</dl>"
    if one.failed:
        yield f'<p class="mark">{FAILED}</p>'
    yield '<div class="strip" aria-hidden="true">' + "".join(map(_strip, cut)) + "</div>\n</header>"
    for section in cut:
        yield from _section(section)
    said = messages(one)
    if said and isinstance(one.completion, list):
        opened = " open" if one.failed else ""  # the mask cannot tell who said what; messages can
        yield f'<details class="messages"{opened}><summary>{number_of(len(said), "message")}</summary>'
        for role, text in said:
            kind = "own" if role == "assistant" else "other"
            yield f'<div class="{kind}"><h4>{escape(role)}</h4><div>{escape(text)}</div></div>'
        yield "</details>"
    yield "</article>"


def _strip(section: Section) -> str:
    name = f"turn {section.turn}, {section.label}" if section.kind == "sampled" else section.label
    return f'<i class="{section.kind}" style="flex-grow:{section.tokens}" title="{escape(name)}"></i>'


def _section(section: Section) -> Iterator[str]:
    """Yield lines of HTML that show one section of a trajectory with a heading; that of a sampled section names the
    turn."""
    folded = section.kind == "prompt" and section.tokens > LONG_PROMPT
    heading = f"<b>turn {section.turn}</b>" if section.kind == "sampled" else ""
    mean = f"<small>{section.mean}</small>" if section.mean else ""
    note = "<small>sampled and observed cannot be distinguished here</small>" if section.kind == "masked" else ""
    tokens = "".join(_span(span, shaded=section.kind == "sampled") for span in section.spans)
    if folded:
        tokens = f"<details><summary>show the prompt</summary>{tokens}</details>"
    yield f'<section class="{section.kind}"><h3>{heading}<span>{section.label}</span>{mean}{note}</h3>'
    yield f'<div class="tokens">{tokens}</div></section>'


def _span(span: TokenSpan, *, shaded: bool) -> str:
    text = escape(span.text).replace("\n", '<i class="nl"></i>\n')
    classes = ["t"] + ([f"s{_shade(span.logprob)}"] if shaded and span.logprob is not None else [])
    classes += ["k"] if span.special else []
    ids = " + ".join(map(str, span.ids))
    if span.logprob is None:
        hover = f"id {ids}"
    else:
        chance = math.exp(min(0.0, span.logprob)) if not math.isnan(span.logprob) else math.nan
        hover = f"log-prob {span.logprob:.3f} · {chance:.1%} · id {ids}".replace("-0.000", "0.000").replace(" -", " −")
    return f'<span class="{" ".join(classes)}" title="{hover}">{text}</span>'


def _shade(logprob: float) -> int:
    """Return the shade in which a sampled token is shown: 0 for an almost certain one, up to 5 for an improbable one or
    NaN.

    Args:
        logprob: the token's log-prob, in nats.
    """
    return sum(not logprob >= math.log(share) for share in SHADES)
