"""An explanation of one prompt as a web page and as lines of text.

The page is one file without scripts or external assets, and all text is escaped, because chunks may contain markup.
Depends on explanations and the templates `explain.html` and `tokens.*`, not on engines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePath
from typing import Any

from ragblend import __version__
from ragblend.corpus.citations import quote_beginning
from ragblend.corpus.folder_scan import display_source
from ragblend.lab.explain import STATES, ExplainedSegment, ExplainedToken, Explanation
from ragblend.lab.tables import Column, format_table

OPEN_TOKENS = 1500  # prompts up to this length show all chunks unfolded
LONG_TEXT = 400  # tokens from which other text than chunks is folded
STEPS = 10  # shades of a color
_BINS = 160  # the most cells in the strip of a folded chunk
_SCALES = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_CLASSES = {"exact": "e", "computed": "c", "recomputed": "r", "reused": "k"}
_TITLES = {"prefix": "Prefix, before the first chunk", "text": "Text", "suffix": "Question, after the last chunk"}


def render_html(explanation: Explanation) -> str:
    """Return the explanation as one self-contained HTML page."""
    return _render(
        "explain.html",
        page=explanation,
        full=explanation.full_report,
        mean_line=_mean_line(explanation),
        advice=_advice(explanation),
        version=__version__,
        **_token_facts(explanation),
    )


def render_tokens(explanation: Explanation) -> str:
    """Return the tokens with their legend as HTML, for a page that includes `tokens_style`."""
    return _render("tokens.html", **_token_facts(explanation))


def tokens_style() -> str:
    """Return the CSS of the tokens and their legend, for light and dark pages."""
    return _render("tokens.css")


def _token_facts(explanation: Explanation) -> dict[str, Any]:
    scale = deviation_scale(explanation)
    facts = {"report": explanation.report, "scale": scale, "long": LONG_TEXT}
    return {**facts, "segments": _blocks(explanation, scale)}


def _render(template: str, **facts: Any) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("ragblend"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters.update(percent=_percent, duration=_duration, count=_count)
    return environment.get_template(template).render(facts)


def deviation_scale(explanation: Explanation) -> float:
    """Return the deviation that has the darkest shade: a round number that 95 % of the deviations do not exceed."""
    values = sorted(token.deviation for token in explanation.tokens if token.deviation is not None)
    top = values[min(len(values) - 1, int(0.95 * len(values)))] if values else 0.0
    return next((scale for scale in _SCALES if top <= scale), _SCALES[-1])


def shade(share: float) -> int:
    """Return the shade, 0 to STEPS - 1, of a deviation that is `share` times `deviation_scale`.

    >>> [shade(share) for share in (0.0, 0.04, 0.05, 0.5, 0.99, 7.0)]
    [0, 0, 1, 5, 9, 9]
    """
    return min(STEPS - 1, math.floor(share * STEPS + 0.5))


def shade_above_even_share(attention: float | None, num_tokens: int) -> int:
    """Return the shade of a token that has this share of the question's `attention`; None counts as 0.

    The even share is 1 / num_tokens, with `num_tokens` the number of all tokens of the prompt. Below it the shade is 0,
    at the even share it is 1, and each doubling adds 1.

    >>> [shade_above_even_share(attention, 100) for attention in (None, 0.009, 0.01, 0.02, 0.5, 1.0)]
    [0, 0, 1, 2, 6, 7]
    """
    multiple = (attention or 0.0) * num_tokens
    return min(STEPS - 1, 1 + math.floor(math.log2(multiple) + 1e-9)) if multiple >= 1 else 0


# -- the page's parts


def _blocks(explanation: Explanation, scale: float) -> list[dict[str, Any]]:
    """Return the segments as the template needs them."""
    num_tokens = explanation.report.prompt_tokens
    return [
        {
            "title": _title(segment, part),
            "source": segment.chunk.source if segment.chunk is not None else "",
            "facts": _facts(segment),
            "missed": _is_missing(segment, explanation),
            "open": num_tokens <= OPEN_TOKENS,
            "chunk": segment.chunk,
            "tokens": [
                _cell(token, segment.start + place, scale, num_tokens) for place, token in enumerate(segment.tokens)
            ],
            "bins": _bins(segment, scale, num_tokens),
        }
        for segment, part in _with_parts(explanation)
    ]


def _with_parts(explanation: Explanation) -> Iterator[tuple[ExplainedSegment, str]]:
    """Yield the segments, each with "part N of M" if its chunk has several runs, else ""."""
    numbers = [segment.number for segment in explanation.segments]
    for place, (segment, number) in enumerate(zip(explanation.segments, numbers, strict=True)):
        num_parts = 0 if number is None else numbers.count(number)
        yield segment, f"part {numbers[: place + 1].count(number)} of {num_parts}" if num_parts > 1 else ""


def _is_missing(segment: ExplainedSegment, explanation: Explanation) -> bool:
    """Return True for a chunk without stored KV. If full prefill ran for another reason, no chunk is missing."""
    return segment.chunk is not None and not segment.chunk.hit and not explanation.report.refused_reason


def _title(segment: ExplainedSegment, part: str) -> str:
    if segment.chunk is None:
        return "Whole prompt" if segment.kind == "suffix" and not segment.start else _TITLES[segment.kind]
    path = display_source(segment.chunk.source)
    name = segment.name.replace(path, PurePath(path).name, 1) if path else segment.name
    return ", ".join(filter(None, (f"{segment.number}. {name}", part)))


def _facts(segment: ExplainedSegment) -> list[str]:
    chunk, facts = segment.chunk, [_tokens(len(segment.tokens))]
    counts = {state: number for state in STATES if (number := segment.count(state))}
    facts += counts if len(counts) == 1 else [f"{_count(number)} {state}" for state, number in counts.items()]
    if chunk is not None and chunk.hit:
        if segment.count("exact") < len(segment.tokens) and segment.deviation is not None:
            facts.append(f"mean deviation {segment.deviation:.2g}")
        if chunk.prefix_match == "approximate":
            facts.append("stored after another prefix")
        if segment.read_s is not None:
            facts.append(f"read in {_duration(segment.read_s)}")
    if segment.attention is not None:
        facts.append(f"{_percent(segment.attention)} of the attention")
    return facts


def _cell(token: ExplainedToken, position: int, scale: float, num_tokens: int) -> dict[str, str]:
    """Return one token on the page: its text, the white space before it, which is not marked, CSS classes, tooltip."""
    step = shade((token.deviation or 0.0) / scale)
    hint = [f"token {position}: {token.state}"]
    if token.deviation is not None:
        hint.append(f"stored KV {token.deviation:.2g} off" if token.deviation > 1e-4 else "stored KV equal")
    if token.state != "exact" and token.state != "reused":
        hint.append(f"KV used {token.remaining:.2g} off" if token.remaining > 1e-4 else "KV used equal")
    if token.attention is not None:
        hint.append(f"attention {100 * token.attention:.2g} %")
    classes = f"{_CLASSES[token.state]} d{step} a{shade_above_even_share(token.attention, num_tokens)}"
    text = token.text.lstrip() or token.text
    space = token.text[: len(token.text) - len(text)]
    return {"space": space, "text": text, "classes": classes, "hint": ", ".join(hint)}


def _bins(segment: ExplainedSegment, scale: float, num_tokens: int) -> list[dict[str, int]]:
    """Return the segment in at most `_BINS` cells, each with the darkest shades of its tokens, and a mark if one of
    them was recomputed."""
    size = math.ceil(len(segment.tokens) / _BINS)
    parts = [segment.tokens[start : start + size] for start in range(0, len(segment.tokens), size)]
    return [
        {
            "deviation": max(shade((token.deviation or 0.0) / scale) for token in part),
            "attention": max(shade_above_even_share(token.attention, num_tokens) for token in part),
            "mark": any(token.state == "recomputed" for token in part),
        }
        for part in parts
    ]


def _mean_line(explanation: Explanation) -> str:
    stored = [token for token in explanation.tokens if token.state == "recomputed" and token.deviation is not None]
    if not stored:
        return "none was chosen"
    before = sum(token.deviation or 0.0 for token in stored) / len(stored)
    after = sum(token.remaining for token in stored) / len(stored)
    return f"deviation {before:.2g} before, {after:.2g} after"


def _percent(share: float) -> str:
    """Return a share as text.

    >>> _percent(0.15), _percent(0.004), _percent(0.0)
    ('15 %', '0.4 %', '0 %')
    """
    percent = 100 * share
    return f"{percent:.0f} %" if percent >= 1 or percent == 0 else f"{percent:.1g} %"


def _duration(seconds: float) -> str:
    """Return seconds as text.

    >>> _duration(0.0004), _duration(0.0123), _duration(2.5)
    ('0.4 ms', '12 ms', '2.50 s')
    """
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.00095 or seconds == 0 else f"{seconds * 1e3:.1g} ms"


def _count(number: int) -> str:
    return f"{number:,}"


def _tokens(number: int) -> str:
    return "1 token" if number == 1 else f"{_count(number)} tokens"


# -- the text


def explanation_lines(explanation: Explanation) -> list[str]:
    """Return the explanation as lines of text: both answers, a table of the prompt's parts, advice, the report."""
    same = "the same, token for token" if explanation.answers_identical else "it differs"
    has_attention = explanation.report.attention_stale is not None
    return [
        f"blend         {explanation.answer}",
        f"full prefill  {explanation.full_answer}  ({same})",
        "",
        *_table(explanation),
        "",
        *(f"{name:<12}{meaning}" for name, meaning in _MEANINGS.items() if name != "attention" or has_attention),
        "",
        *filter(None, (_advice(explanation), explanation.report.summary())),
    ]


_LABEL_CHARS = 64
_SHORT_TEXT = 8  # tokens up to which texts between chunks share a row
_MEANINGS = {
    "exact": "full prefill's own KV, stored or in memory: of the prefix, and of the chunk directly after it",
    "reused": "stored KV, kept; the report counts exact tokens as reused, too",
    "recomputed": "stored KV, replaced, because the rule selected the token",
    "computed": "no KV was there: text around the chunks, and chunks that are not in the store",
    "attention": "share of the question's attention that this part gets",
}


def _table(explanation: Explanation) -> list[str]:
    """Return a line of titles, a line per run and per text, one for all short texts between chunks, and their sum."""
    rows, question = list[dict[str, Any]](), list[dict[str, Any]]()
    short: list[ExplainedSegment] = []
    for segment, part in _with_parts(explanation):
        notes = [part]
        if segment.chunk is not None:
            notes.append("not in the store" if _is_missing(segment, explanation) else "")
            notes.append("stored after another prefix" if segment.chunk.prefix_match == "approximate" else "")
        if segment.kind == "text" and len(segment.tokens) <= _SHORT_TEXT:
            short.append(segment)
        else:
            (question if segment.kind == "suffix" else rows).append(_row(_label(segment), [segment], notes))
    if short:
        rows.append(_row(f"between chunks, in {len(short)} place{'s' * (len(short) > 1)}", short))
    rows += [*question, _row("all", explanation.segments)]
    title = "part of the prompt"
    width = max(len(label) for label in (title, *(row["label"] for row in rows)))
    columns: list[Column] = [(title, f"<{width + 1}s", "label"), ("tokens", ">7,d", "tokens")]
    columns += [(state, f">{len(state) + 2},d", state) for state in ("exact", "reused", "recomputed", "computed")]
    if explanation.report.attention_stale is not None:
        columns.append(("attention", ">11s", "attention"))
    columns += [("", "<3s", lambda row: ""), ("", "<1s", "notes")]
    return format_table(columns, rows)


def _row(label: str, segments: Sequence[ExplainedSegment], notes: Iterable[str] = ()) -> dict[str, Any]:
    attention = [segment.attention for segment in segments if segment.attention is not None]
    return {
        "label": label if len(label) <= _LABEL_CHARS else f"{label[:18]}...{label[21 - _LABEL_CHARS :]}",
        "tokens": sum(len(segment.tokens) for segment in segments),
        **{state: sum(segment.count(state) for segment in segments) for state in STATES},
        "attention": _percent(sum(attention)) if attention else None,
        "notes": ", ".join(filter(None, notes)),
    }


def _label(segment: ExplainedSegment) -> str:
    if segment.number is not None:
        return f"{segment.number}. {segment.name}"
    if segment.kind == "text":
        return f"text {quote_beginning(''.join(token.text for token in segment.tokens))}"
    return _title(segment, "").lower()


def _advice(explanation: Explanation) -> str:
    """Return what brings a differing answer closer to full prefill's; "" if the answers are the same."""
    kept, attended = _tokens(explanation.count("reused")), explanation.attention_on("reused")
    if explanation.answers_identical or not explanation.count("reused"):
        return ""
    stale = f"Of {kept} the stored KV was kept."
    if attended is not None:
        stale = f"{_percent(attended)} of the question's attention goes to the {kept} whose stored KV was kept."
    return f"{stale} A higher --ratio recomputes more of them; `ragblend calibrate` finds the ratio for your questions."
