"""HTML: all text but menus, with headings, lists, tables and code; no page is too odd, too deep or slow to read."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser
from time import process_time

import pytest
from document_files import only
from hypothesis import given
from hypothesis import strategies as st

from ragblend.corpus.readers.html import parse_html, read_html
from ragblend.corpus.readers.html_markup import simplify_markup
from ragblend.corpus.readers.types import ParsedRecord


def read(page: str | bytes) -> ParsedRecord:
    return only(read_html(page if isinstance(page, bytes) else page.encode()))


def assert_marks_point_at_headings(record: ParsedRecord) -> None:
    for mark in record.marks:
        line = record.text[mark.offset :].partition("\n")[0]
        assert line == f"{'#' * mark.level} {mark.value}"
        assert mark.offset == 0 or record.text[mark.offset - 2 : mark.offset] == "\n\n"


# --- blocks ---


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("<p>First <b>bold</b> line.</p><div>Second &amp;<br>line.</div>", "First bold line.\n\nSecond &\nline."),
        ("a<p>b<p>c<blockquote>d<p>e</p>f</blockquote>g", "a\n\nb\n\nc\n\nd\n\ne\n\nf\n\ng"),
        ("<p>a<br><br><br>b", "a\n\nb"),
        ("<ul><li>one<ul><li>in</ul><li>two</ul><ol><li>x</ol>", "- one\n  - in\n- two\n\n- x"),
        ("<ul><li><p>x</p><p>y</p><li>z</ul>", "- x\n\ny\n\n- z"),
        ("<dl><dt>--dry<dd><p>Shows it.</p><dt>-v<dt>-w<dd>a<dd>b</dl>", "--dry\nShows it.\n\n-v\n\n-w\na\nb"),
        ("<table><caption>C<tr><th>a<th>b<tr><td>1<td>2</table>after", "C\n\na | b\n1 | 2\n\nafter"),
        ("<table><tr><td>a<td><ul><li>x<li>y</ul></table>", "a | - x - y"),
        ("<table><tr><td>a<td><td>c</table><table><tr><td>d<td>e</table>", "a |  | c\n\nd | e"),
        ("<table><tr><td><h1>Big</h1><p>x<p>y<td>z</table>", "# Big\n\nx\n\ny\n\nz"),  # it lays out the page
        ("<table><tr><td><table><tr><td>a<td>b</table><td>c</table>", "a | b\n\nc"),
        (f"<table><tr><td>a<td>{'long ' * 600}</table>", f"a\n\n{('long ' * 600).strip()}"),
        ("<p>x</p><pre>\n if a:\n\tb  &lt; <b>c</b>\n</pre>y", "x\n\n```\n if a:\n\tb  < c\n```\n\ny"),
        ("<pre>a\r\n```\nb</pre>", "````\na\n```\nb\n````"),
        ("<pre>one line</pre>", "one line"),
        ("<pre><div>a</div><div>b</div>c<br>d</pre>", "```\na\nb\nc\nd\n```"),
        ("un<b>bold</b>ly H<sub>2</sub>O<my-part>one</my-part><my-part>two</my-part>", "unboldly H_2O one two"),
        ("<p>soft&shy;hyphen 5&nbsp;m\u3000x", "softhyphen 5 m x"),
        ("see <img src=x alt='the pump'>now<img>", "see the pump now"),
        ("<select><option>a<option>b</select><textarea>t &lt; <b></textarea>", "a\n\nb\n\nt < <b>"),
        ("<math><mi>x</mi><annotation>x_1</annotation></math>", "x"),
        ("<ruby>漢<rp>(</rp><rt>kan</rt><rp>)</rp></ruby>", "漢(kan)"),
        ("1 < 2 & 3 <4 <<p>x", "1 < 2 & 3 <4 <\n\nx"),
        ("<XMP><b>code</b></XMP><B>x</B>", "<b>code</b>\n\nx"),
        ("<![CDATA[a < b]]> c", "a < b c"),
        ("a &#xD800; &#0; &nosuch; &#" + "1" * 5000 + ";", "a \ufffd \ufffd &nosuch; \ufffd"),
    ],
)
def test_text_and_blocks(page, text):
    assert read(page).text == text


def test_comments_of_readers_and_text_around_code_stay():
    page = '<main>Before: <pre>seal</pre> then tighten.<div class="comment">Mine leaks.</div><form>Name</form></main>'
    assert read(page).text == "Before:\n\nseal\n\nthen tighten.\n\nMine leaks.\n\nName"


@pytest.mark.parametrize(
    ("page", "headings"),
    [
        ("<h1>A</h1>x<h3>B <i>c</i></h3>", [(1, "A"), (3, "B c")]),
        ('<h2>A<a class="headerlink" href="#a">¶</a></h2>', [(2, "A")]),
        ("<h2>A<br>b<div>c</div></h2>", [(2, "A b c")]),
        ("<h2>Unclosed<p>text<h2>Next", [(2, "Unclosed"), (2, "Next")]),
        ("<h2>Typo</h3>text", [(2, "Typo")]),
        ("<ul><li><h3>In a list</h3>x</ul>", [(3, "In a list")]),
        ("<h1> </h1>x<h1><img alt='Logo'></h1>", [(1, "Logo")]),
        ("<p>a</p><table><tr><td>x<h4>Cell</h4>y<td>z</table>", [(4, "Cell")]),
    ],
)
def test_headings_are_marked_lines(page, headings):
    record = read(page)
    assert [(mark.level, mark.value) for mark in record.marks] == headings
    assert_marks_point_at_headings(record)


# --- what is left out ---


@pytest.mark.parametrize(
    "menu",
    [
        "<nav><a>Home</a></nav>",
        "<div role='navigation'><p>Home</div>",
        "<header>Home</header>",
        "<footer><p>Home</footer>",
        "<aside>Home</aside>",
        "<p hidden>Home</p>",
        "<b hidden>Home</b>",
        "<A HREF=x><span class='x' hidden><i>Ho<span>m</span></i>e</span></A>",
        "<a class='headerlink' href=#a><i>Home</i></a>",
        "<script>Home</script><style>Home</style><noscript>Home</noscript><template>Home</template>",
        "<svg><title>Home</title><text>Home</text></svg><iframe>Home</iframe><object>Home</object>",
        "<!-- Home --><!-- Home --!><!-->",
        "<script src='a>b'>'</p>Home<p>'</script >",
        "<article><nav>Home</nav></article>",
    ],
)
def test_menus_and_invisible_text_leave(menu):
    assert read(f"<p>a</p>{menu}<p>b</p>").text == "a\n\nb"


@pytest.mark.parametrize(
    "part",
    [
        "<article><header>kept</header></article>",
        "<section><div><footer>kept</footer></div></section>",
        "<main><header>kept</header></main>",
        "<header id='title-block-header'>kept</header>",  # pandoc's
        "<p hidden='until-found'>kept</p>",
        "<p aria-hidden='false' class='hidden-xs'>kept</p>",
        "<i class='hidden x' title=\"hidden\">ke</i>pt",
        "<a data-x='not hidden '>kept</a>",
        "<details><summary>kept</summary></details>",
        "<div style='overflow:hidden' id=x>kept</div>",
    ],
)
def test_text_that_resembles_a_menu_stays(part):
    assert read(f"<p>a</p>{part}<p>b</p>").text == "a\n\nkept\n\nb"


def test_a_page_that_is_only_a_menu_is_read_with_it():
    assert read("<nav><ul><li>Home<li>About</ul></nav><footer>2026</footer>").text == "- Home\n- About\n\n2026"
    assert read("<html><script>x</script><p hidden>y").text == ""


# --- title and encoding ---


def test_the_title_is_metadata():
    record = read("<html><head><title>The  <b>\nPage &amp; all</title></head><body><svg><title>no</title></svg>x")
    assert (record.metadata, record.text) == ({"title": "The <b> Page & all"}, "x")
    assert read("<svg><title>no</title></svg><p>x").metadata == {}
    assert read("").text == ""


@pytest.mark.parametrize(
    ("head", "encoding", "text"),
    [
        ('<meta charset="iso-8859-1">', "cp1252", "café “quoted”"),
        ('<meta http-equiv="Content-Type" content="text/html; charset=gb2312">', "gb18030", "朱镕基"),
        ('<?xml version="1.0" encoding="windows-1251"?>', "cp1251", "Договор"),
        ("<META CHARSET = utf-16>", "utf-8", "Lease äß"),
        ('<meta charset="utf-8">', "utf-16", "Länge"),
        ("", "utf-16-le", "Länge"),
        ("", "utf-8-sig", "Länge"),
    ],
)
def test_the_declared_encoding_is_used(head, encoding, text):
    assert read(f"{head}<p>{text}</p>".encode(encoding)).text == text


def test_a_guessed_encoding_is_noted():
    record = read("<p>Käse – gültig für 5 €</p>".encode("cp1252"))
    assert record.text == "Käse – gültig für 5 €"
    assert record.notes == ("read as windows-1252 (guessed); convert the file to UTF-8 if letters are wrong",)


def test_self_closed_tags_of_xhtml_end():
    head = '<?xml version="1.0"?><html xmlns="http://www.w3.org/1999/xhtml"><head><title/><script src="a.js"/></head>'
    body = '<body><a id="p1"/><p>a</p><p hidden="" /><div/><TEXTAREA /><p>b</p></body></html>'
    assert read(head + body).text == "a\n\nb"
    assert read('<script src="a.js"/><p>in HTML this is a script</p></script><p>b').text == "b"  # as browsers do


# --- other parsers ---


class _Words(HTMLParser):
    """The words of a page as the standard library reads it, blocks apart."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text = ""
        self.num_hidden = 0  # open elements whose text is not shown
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.num_hidden += tag in {"script", "style", "title"}
        self.text += "" if tag in {"b", "i", "a", "span"} else " "

    def handle_endtag(self, tag: str) -> None:
        self.num_hidden -= tag in {"script", "style", "title"}
        self.text += "" if tag in {"b", "i", "a", "span"} else " "

    def handle_data(self, data: str) -> None:
        self.text += "" if self.num_hidden else data


_PARTS = (
    "<p>|</p>|<b>|</b>|<div class='x>y'>|</div>|<a href=\"q>\" b>|</a>|<br/>|<ul><li>|</ul>|<h2>|</h2>|<table><tr><td>"
    "|</table>|</td><td>|alpha|beta |gamma; | 12|&amp;|&lt;b&gt;|<!-- c -->|<script>d</script>|<style>e</style>"
    "|<pre>f\n g</pre>|<title>t</title>|<i x=1 y='2' z=\"3\">|</i>|<hr>|1 < 2|<x:y>|</x:y>|<dl><dt>|<dd>|</dl>"
)


@given(page=st.lists(st.sampled_from(_PARTS.split("|")), max_size=30).map("".join))
def test_no_character_of_a_word_is_lost_or_added(page):
    record = read(page)
    assert "\r" not in record.text
    assert_marks_point_at_headings(record)
    assert Counter(re.findall(r"\w", record.text)) == Counter(re.findall(r"\w", _Words(page).text))


@given(page=st.text(alphabet="<>/=\"'!-&;#pbh1 \n[]?x", max_size=200))
def test_any_characters_are_a_page(page):
    assert_marks_point_at_headings(read(page))


# --- size and depth ---


def seconds_per_mb(page: str) -> float:
    start = process_time()
    parse_html(page)
    return (process_time() - start) / len(page) * 1e6


@pytest.mark.parametrize(
    "piece",
    [
        *("<div>", "<font>", "<b><p>", "<ul><li>", "<dd><li>", "<h1><li>", "<table><tr><td>", "<svg>"),
        *(
            "<section><header>",
            "<a ",
            "<a",
            "</a ",
            "<!-- >",
            "<![CDATA[ >",
            "<? ",
            "<a x='",
            "<a x='>",
            "<script></",
            "<",
            "</",
        ),
        *(
            "<svg></x>",
            "<x y='<a z=\"",
            "<title>",
            "<textarea>",
            "<img alt='",
            "&#1",
            "&",
            "<pre>",
            "<br>",
            "<p>`",
            "<i></p>",
        ),
        *("<div><span></div>", "<span></x>", "<select><option>x", "<table>x", "<p hidden ", "<form>", "<button>"),
    ],
)
def test_repeated_markup_costs_time_that_grows_with_the_page(piece):
    page = piece * (100_000 // len(piece))
    assert min(seconds_per_mb(page) for _ in range(2)) < 8  # about 1; what grows with the square has 20 and more


@pytest.mark.parametrize(
    "page",
    [
        "<p>" + "".join(f"<b id={number}>" for number in range(200)) + "</p>" + "<p>x</p>" * 5000,  # reopened in each
        "<p " + " ".join(f"a{number}=1" for number in range(40_000)) + ">x",
        "<p hidden " + " ".join(f"a{number}" for number in range(40_000)) + ">x",
        "<div>" * 990 + "</span>" * 30_000,
        ("<div>" * 1500 + "</div>" * 1500) * 6,
        "<table><tr><td>y<td>z" * 300 + "<p>x" * 20_000,
    ],
    ids=["formatting", "attributes", "hidden", "ends", "often", "tables"],
)
def test_pages_that_parsers_need_long_for(page):
    assert min(seconds_per_mb(page) for _ in range(2)) < 8


def test_fifty_thousand_nested_elements_keep_their_text():
    start = process_time()
    record = read("<div>" * 50_000 + "the end is <b>40</b>mm" + "</div>" * 50_000 + "<h2>B</h2>tail")
    assert process_time() - start < 2
    assert record.text == "the end is 40mm\n\n## B\n\ntail"
    assert read("<font>" * 3000 + "<p>the end is 40 Nm</p>").text == "the end is 40 Nm"
    assert read("<font>" * 900 + "<table><tr><td>a<td>b</table>").text == "a | b"


def test_a_large_flat_page_keeps_its_structure():
    row = "<tr><td><div><span>a</span></div><td>b</tr>"
    page = f"<nav>Home</nav><div><table>{row * 3000}</table></div>"
    assert read(page).text == "\n".join(["a | b"] * 3000)


def test_markup_is_cleaned_of_what_the_text_does_not_depend_on():
    assert simplify_markup('<P Class="a>b" id=c><FONT size=1>x</FONT><br/>') == "<p>x<br>"
    assert simplify_markup("<a class='x'>b</a><i hidden>c</I>") == "<a>b</a><span hidden>c</span>"
    assert simplify_markup("<img src='data:" + "A" * 5000 + "' alt='x>y'>") == "<img alt='x>y'>"
    assert simplify_markup("<nav role=navigation data-x=1>") == "<nav role=navigation data-x=1>"
