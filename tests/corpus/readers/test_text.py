"""Text files: read as they are, with marks of their headings; XML without markup; minified files are passed over."""

from __future__ import annotations

from collections.abc import Callable
from time import process_time

import pytest
from document_files import only
from hypothesis import given
from hypothesis import strategies as st

from ragblend.corpus.documents import read_documents
from ragblend.corpus.readers.text import read_markdown, read_restructured_text, read_text
from ragblend.corpus.readers.text_headings import find_markdown_headings, find_underlined_headings
from ragblend.corpus.readers.types import Mark, ParsedRecord, ParsedRecords
from ragblend.corpus.readers.xml_text import read_xml, strip_markup
from ragblend.errors import NotADocumentError


def read(reader: Callable[[bytes], ParsedRecords], text: str | bytes) -> ParsedRecord:
    return only(reader(text if isinstance(text, bytes) else text.encode()))


def headings(marks: tuple[Mark, ...]) -> list[tuple[int, str]]:
    return [(mark.level, mark.value) for mark in marks]


# --- Markdown ---


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("# One\ntext\n### Three ###\n  ## Two", [(1, "One"), (3, "Three"), (2, "Two")]),
        ("# C#\n# A `b` **c** [d](http://e) ![f](g) {#id}\n#hash\n####### seven\n#\n", [(1, "C#"), (1, "A b c d f")]),
        ("```py\n# no\n````\n# yes\n~~~\n# no\n```\n# no\n~~~\n# end", [(1, "yes"), (1, "end")]),
        ("```\n# never closed", []),
        ("`` ` `` # no\n``` a` b\n# yes", [(1, "yes")]),
        ("    # code\n\t# code\n> # quote\n- # item", []),
        ("Title\n=====\n\nSub\n---\nsome\ntext\n---\n\n- item\n---\n\ntwo\nlines\n===", [(1, "Title"), (2, "Sub")]),
        ("---\ntitle: T\n---\n# H", [(1, "H")]),
        ("text\n\n---\n# H\n\n***\nS\n-", [(1, "H"), (2, "S")]),
        ("a | b\n--|--\nc | d\n\n| x |\n---\n\n    code\n---", []),
    ],
)
def test_headings_of_markdown(text, found):
    marks = list(find_markdown_headings(text))
    assert headings(marks) == found
    assert all(mark.offset == 0 or text[mark.offset - 1] == "\n" for mark in marks)
    assert all(mark.value[0] in text[mark.offset :].partition("\n")[0] for mark in marks)


def test_marks_fit_the_text_with_line_breaks_of_any_kind():
    record = read(read_markdown, b"\xef\xbb\xbfa\r\n\r\n# B\r\rC\r\n---\r\nd")
    assert record.text == "a\n\n# B\n\nC\n---\nd"
    assert record.marks == (Mark(3, "heading", "B", 1), Mark(8, "heading", "C", 2))
    assert read(read_text, "a\r\nb").text == "a\nb"


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ('---\nlayout: x\ntitle: "A: b"\n---\ntext', "A: b"),
        ("---\ntitle:\n...\ntitle: no", ""),
        ("---\ntitle: never closed\n", ""),
        ("text\n---\ntitle: T\n---", ""),
    ],
)
def test_the_title_in_front_matter_is_metadata(text, title):
    record = read(read_markdown, text)
    assert record.metadata == ({"title": title} if title else {})
    assert record.text == text


# --- underlined titles ---


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("====\nDoc\n====\n\nPart\n====\ntext\n\nSub ``x``\n---------\n\nNext\n====", "1 Doc|2 Part|3 Sub x|2 Next"),
        (" Padded\n=======\n\n=======\n Inner\n=======", "1 Inner"),
        ("Too long a title\n===\n\nline one\nline two\n--------", ""),
        ("Name  Qty\n---------\na     1\n\na | b\n=====", ""),
        ("=====\n=====\n\n-----\n\n+++\n---\n", ""),
        ("::\n\n  Code\n  ----\n\n契約\n====", "1 契約"),
    ],
)
def test_titles_with_a_line_of_marks_below_are_headings(text, found):
    marks = list(find_underlined_headings(text))
    assert "|".join(f"{mark.level} {mark.value}" for mark in marks) == found
    assert all(text[mark.offset :].strip().startswith(mark.value[:3]) for mark in marks)


@given(text=st.text(alphabet="#=-~`*ab \n\t", max_size=120))
def test_marks_are_in_order_at_the_beginning_of_lines(text):
    for record in (read(read_markdown, text or "x"), read(read_restructured_text, text or "x")):
        offsets = [mark.offset for mark in record.marks]
        assert offsets == sorted(set(offsets))
        assert all(offset == 0 or record.text[offset - 1] == "\n" for offset in offsets)
        assert all(mark.value.strip() and 1 <= mark.level <= 6 for mark in record.marks)


# --- XML ---


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ("<para>See <emphasis>the</emphasis> pump.</para>\n  <para>Oil\n     it.</para>", "See the pump.\nOil\nit."),
        ("<r><n>A</n><p>3</p></r><r><n>B</n><p>4</p></r>", "A\n3\n\nB\n4"),
        ("<r><n>A</n> <p>3</p></r>", "A\n3"),
        ('<?xml version="1.0"?><!DOCTYPE a [<!ENTITY x "y">\n]><a b="c>d">e &amp; &#228; &x;</a>', "e & ä &x;"),
        ("<a>&#99999999;</a>", "&#99999999;"),
        ("<a><!-- <b>no</b> --><![CDATA[x < <y>]]></a>", "x < <y>"),
        ("<a>cut <b", "cut <b"),
        ("a < b > c", "a < b > c"),
    ],
)  # fmt: skip
def test_xml_is_read_without_markup(markup, text):
    assert read(read_xml, markup).text == text


def test_xml_with_text_in_attributes_alone_is_read_as_it_is():
    markup = '<strings><string name="save" value="Speichern"/></strings>'
    assert read(read_xml, markup).text == markup
    encoded = '<?xml version="1.0" encoding="koi8-r"?><a>Договор</a>'.encode("koi8-r")
    assert read(read_xml, encoded).text == "Договор"


def test_entities_of_xml_are_not_resolved():
    laughs = "".join(f'<!ENTITY l{level} "{f"&l{level - 1};" * 10}">' for level in range(1, 12))
    page = f'<!DOCTYPE a [<!ENTITY l0 "ha">{laughs}<!ENTITY f SYSTEM "file:///etc/passwd">]><a>&l11; &f; end</a>'
    assert read(read_xml, page).text == "&l11; &f; end"


# --- kinds of files ---


@pytest.mark.parametrize("name", ["a.yaml", "a.log", "a.py", "a.js", "a.css", "a.toml", "README", "a.xml", "a.unknown"])
def test_source_code_and_other_text_is_read(name):
    (document,) = read_documents(f"/{name}", b"key: value\n# comment\n").documents
    assert (document.text, document.marks) == ("key: value\n# comment\n", ()) if name != "a.xml" else ("key: value", ())


@pytest.mark.parametrize("name", ["app.min.js", "app.js", "style.css", "app.js.map"])
def test_minified_files_are_passed_over(name):
    with pytest.raises(NotADocumentError, match=r"minified \(a line of 30,000 characters\); add the source code"):
        read_documents(f"/{name}", b"// licence\n" + b"a" * 30_000)
    assert list(read_documents(f"/{name}", b"a" * 20_000 + b"\n" + b"b" * 20_000).documents)


def test_a_guessed_encoding_is_noted():
    contents = read_documents("/a.txt", "Die Käse sind gültig – 5 €".encode("cp1252"))
    assert [document.text for document in contents.documents] == ["Die Käse sind gültig – 5 €"]
    assert "windows-1252 (guessed)" in next(iter(contents.notes))


@pytest.mark.parametrize(
    "piece",
    [
        *("# ", "#", "a\n---\n", "`", "```", "[", "[a](", "{", "- ", " ", "=\n", "---\ntitle:", "**"),
        *("<", "<a ", "<!--", "<![CDATA[", "<!A [", "] ", "<a b='", "&", "&a", "</", "<a>", "<a> ", "<?"),
    ],
)  # fmt: skip
def test_time_grows_with_the_text(piece):
    text = piece * (100_000 // len(piece))
    for line in (text, f"# {text}\n"):
        start = process_time()
        list(find_markdown_headings(line))
        list(find_underlined_headings(line))
        strip_markup(line)
        assert process_time() - start < 2
