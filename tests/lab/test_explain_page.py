"""The page as a browser reads it: every token once and in order, untrusted text as text, nothing from elsewhere."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser

import pytest
from tiny_prompts import CHUNKS

from ragblend import open_store
from ragblend.lab.explain import explain
from ragblend.lab.explain_page import deviation_scale, explanation_lines, render_html
from ragblend.prompt.types import Chunk, Prompt

EVIL = "</p><script>alert('1')</script> & \"quoted\" <b onclick=x>$\\frac{1}$ {{ 7 * 7 }}"
EVIL_CHUNKS = [replace(CHUNKS[0], source="a<i>.md"), Chunk(EVIL, source="b&.md"), CHUNKS[2]]
VOID = {"meta", "input", "rect", "link", "br", "img"}


class Page(HTMLParser):
    """Reads a page: the elements, what tokens say, and whether everything that opens also closes."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.tokens: list[str] = []
        self.hints: list[str] = []
        self.running = ""  # all text in the prompt's paragraphs, spaces between tokens included
        self._open: list[str] = []
        self._paragraph = self._token = False
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.elements.append((tag, given))
        if tag not in VOID:
            self._open.append(tag)
        classes = (given.get("class") or "").split()
        self._paragraph |= "tokens" in classes
        if self._paragraph and tag == "span":
            assert "t" in classes
            self._token = True
            self.tokens.append("")
            self.hints.append(given["title"] or "")

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag
        self._token &= tag != "span"
        self._paragraph &= tag != "p"

    def handle_data(self, data):
        if self._token:
            self.tokens[-1] += data
        if self._paragraph:
            self.running += data


@pytest.fixture
def explanation(tiny_engine):
    engine = tiny_engine("llama")
    for chunk in EVIL_CHUNKS[:2]:
        engine.precompute(chunk)
    return explain(engine, Prompt(EVIL_CHUNKS, f"what? {EVIL}"), rule="ask", max_tokens=4)


def test_every_token_is_there_once_and_in_order(explanation):
    page = Page(render_html(explanation))
    assert [token.strip() for token in page.tokens] == [token.text.strip() for token in explanation.tokens]
    assert page.running == "".join(token.text for token in explanation.tokens)
    assert EVIL in page.running


def test_untrusted_text_stays_text(explanation):
    explanation = replace(explanation, answer=EVIL, full_answer=EVIL, model=EVIL)
    html = render_html(explanation)
    page = Page(html)
    assert {tag for tag, _ in page.elements}.isdisjoint({"script", "b onclick", "iframe", "img", "link", "object"})
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert "<script" not in html
    assert "49" not in page.running  # no template in a text is run


def test_the_page_needs_nothing_from_elsewhere(explanation):
    html = render_html(explanation)
    page = Page(html)
    assert not any({"src", "href"} & set(attributes) for _, attributes in page.elements)
    assert "http://" not in html
    assert "https://" not in html
    assert "url(" not in html
    policy = [given["content"] for tag, given in page.elements if given.get("http-equiv") == "Content-Security-Policy"]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_it_shows_states_figures_and_what_was_missed(explanation):
    html = render_html(explanation)
    page = Page(html)
    marks = [given["class"].split() for tag, given in page.elements if tag == "span" and given.get("title")]
    letters = {"exact": "e", "computed": "c", "recomputed": "r", "reused": "k"}
    assert [mark[1] for mark in marks] == [letters[token.state] for token in explanation.tokens]
    assert all(f"token {place}: {token.state}" in page.hints[place] for place, token in enumerate(explanation.tokens))
    assert "attention" in page.hints[0]
    assert html.count("not in the store</span>") == 1
    assert "1. a&lt;i&gt;.md" in html
    assert "prefers-color-scheme: dark" in html
    assert "@media print" in html


def test_without_attention_the_page_gives_the_reason(tiny_engine):
    engine = tiny_engine("llama")
    engine.precompute(EVIL_CHUNKS[0])
    page = render_html(explain(engine, Prompt(EVIL_CHUNKS, "what?"), rule="random", max_tokens=2))
    assert "does not probe the question" in page
    assert 'type="radio"' not in page
    assert "Where the question looked" not in page


def test_attention_on_the_page_is_that_of_its_tokens(tiny_engine, tmp_path):
    engine = tiny_engine("llama", open_store(tmp_path, kv_dtype="int8"))
    list(engine.precompute_all(CHUNKS))
    found = explain(engine, Prompt(CHUNKS, "what?"), rule="ask", max_tokens=2)
    assert found.segments[1].count("exact") == 0
    reused = found.attention_on("reused")
    assert reused > found.report.attention_stale
    assert f"{round(100 * reused)} % on reused ones" in render_html(found)


def test_twenty_thousand_tokens_make_a_page_of_a_few_megabytes(explanation):
    chunks = [segment for segment in explanation.segments if segment.kind == "chunk"]
    many = -(-20_000 // sum(len(segment.tokens) for segment in chunks))
    segments = (explanation.segments[0], *(chunks * many), explanation.segments[-1])
    long = replace(explanation, segments=segments, report=replace(explanation.report, prompt_tokens=20_000))
    html = render_html(long)
    assert len(Page(html).tokens) == len(long.tokens) >= 20_000
    assert len(html) < 5 << 20


def test_the_deviation_scale_is_a_round_number_above_nearly_all_tokens(explanation):
    scale = deviation_scale(explanation)
    known = [token.deviation for token in explanation.tokens if token.deviation is not None]
    assert scale in (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
    assert sum(value > scale for value in known) <= 0.05 * len(known)
    assert deviation_scale(replace(explanation, segments=())) == 0.05


def test_the_terminal_has_a_line_per_run_and_per_gap(explanation):
    lines = explanation_lines(explanation)
    assert lines[0].endswith(explanation.answer)
    assert sum(line.endswith("   not in the store") for line in lines) == 1
    first = lines.index(next(line for line in lines if line.startswith("part of the prompt")))
    labels = [line[:40].rstrip() for line in lines[first + 1 : lines.index("", first)]]
    assert [label.partition(" ")[0] for label in labels] == [
        "prefix,",
        "1.",
        "2.",
        "3.",
        "4.",
        "between",
        "question,",
        "all",
    ]
    assert labels[1].startswith('1. a<i>.md, "the theory of')


def test_advice_is_given_for_another_answer_only(explanation):
    for is_same in (True, False):
        judged = replace(explanation, answers_identical=is_same)
        for shown in ("\n".join(explanation_lines(judged)), render_html(judged)):
            assert ("--ratio" in shown) == (not is_same)
