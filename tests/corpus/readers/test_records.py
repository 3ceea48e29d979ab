"""JSON, JSON lines and Parquet: no sentence of a record is lost, and one bad record costs that record."""

from __future__ import annotations

import io
import json
import re
import sys
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragblend.corpus.documents import Document, open_source, read_documents, reader_version
from ragblend.corpus.readers.fields import flatten
from ragblend.corpus.readers.records import read_json, stream_jsonl
from ragblend.corpus.readers.types import ParsedRecord, UnreadableRecord
from ragblend.errors import NotADocumentError, UnreadableDocumentError

PROSE = "The ferry to the island leaves at nine in the morning, and the last one back at six in the evening. "


def read(folder: Path, name: str, content: str | bytes, text_field: str = "") -> list[Document]:
    """Every document of a file; all or nothing."""
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    contents = open_source(str(path), text_field=text_field).read()
    documents = list(contents.documents)
    if contents.failure:
        raise UnreadableDocumentError(contents.failure)
    return documents


def below(folder: Path, source: str) -> str:
    """A source as it is below `folder`; sources are absolute."""
    assert source.startswith(f"{folder}/")
    return source[len(f"{folder}/") :]


def parsed(value: Any, text_field: str = "") -> list[ParsedRecord | UnreadableRecord]:
    return list(read_json(json.dumps(value).encode(), text_field))


def only(value: Any, text_field: str = "") -> ParsedRecord:
    (found,) = parsed(value, text_field)
    assert isinstance(found, ParsedRecord)
    return found


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.json", '["x", "", "y"]', [("a.json#0", "x", {}), ("a.json#2", "y", {})]),
        ("a.json", '{"text": "x", "title": "T"}', [("a.json", "x", {"title": "T"})]),
        ("a.json", '{"page_content": "x", "metadata": {"p": 1}}', [("a.json", "x", {"p": 1})]),
        ("a.json", '{"0": "x", "10": "z", "2": "y", "query": "q", "chunk_num": 3}',
         [("a.json#0", "x", {}), ("a.json#2", "y", {}), ("a.json#10", "z", {})]),
        ("a.json", '[{"question": "q", "answers": ["a"], "ctxs": [{"title": "T", "text": "x"}, {"text": "y"}]}]',
         [("a.json#0.0", "x", {"title": "T"}), ("a.json#0.1", "y", {})]),
        ("a.jsonl", '{"content": "x\u2028y", "n": 1}\n\n"z"\n',
         [("a.jsonl#0", "x\u2028y", {"n": 1}), ("a.jsonl#1", "z", {})]),
        ("a.json", '["lone \\ud800 surrogate"]', [("a.json#0", "lone \ufffd surrogate", {})]),
        ("a.json", '{"text": "a"}\n{"text": "b", "n": 1}\n', [("a.json#0", "a", {}), ("a.json#1", "b", {"n": 1})]),
        ("a.json", '\ufeff[{"city": "Oslo", "title": "N"}]', [("a.json#0", "city: Oslo\ntitle: N", {"title": "N"})]),
    ],
)  # fmt: skip
def test_every_form_of_records_is_read(tmp_path, name, content, expected):
    documents = read(tmp_path, name, content)
    assert [(below(tmp_path, each.source), each.text, dict(each.metadata)) for each in documents] == expected


# --- records without a named text field ---


def test_records_without_a_text_are_lines_of_their_fields():
    cities = [{"country": "Burkina Faso", "city": "Ouagadougou"}, {"country": "Chad", "city": "N'Djamena"}]
    assert parsed(cities) == [
        ParsedRecord("#0", "country: Burkina Faso\ncity: Ouagadougou", {}),
        ParsedRecord("#1", "country: Chad\ncity: N'Djamena", {}),
    ]


def test_nested_text_is_text_and_labels_are_metadata():
    found = only({"text": "label", "sections": [{"heading": "H", "content": "the real content"}]})
    assert found.text == "label\n\nsections.heading: H\nsections.content: the real content"
    found = only(
        {
            "text": "main", "content": "second", "id": 7, "tags": ["a", "b"], "done": True, "none": None,
            "summary": PROSE * 3, "poem": "one\ntwo", "meta": {"set": "Pile"}, "author": {"name": "Ada"},
        }
    )  # fmt: skip
    assert found.metadata == {"id": 7, "tags": ["a", "b"], "done": True, "none": None, "set": "Pile"}
    rest = f"content: second\nsummary: {(PROSE * 3).strip()}\npoem: one\ntwo\nauthor.name: Ada"
    assert found.text == f"main\n\n{rest}"


def test_an_empty_text_makes_no_document():
    assert only([{"text": None, "id": 4}]).text == ""
    assert only([{"text": "", "id": 4}]).text == ""


def test_nested_values_have_the_names_of_all_levels():
    order = {
        "id": 5,
        "paid": True,
        "note": None,
        "buyer": {"name": "Ada", "address": {"city": "London"}},
        "items": [{"name": "bolt", "sizes": [1, 2]}, {"name": "nut", "sizes": []}],
        "log": ["packed", "sent"],
        "paragraphs": ["One\ntwo.", "Three."],
    }
    assert flatten(order).text == (
        "id: 5\npaid: true\nbuyer.name: Ada\nbuyer.address.city: London\n\n"
        "items.name: bolt\nitems.sizes: 1, 2\n\nitems.name: nut\n\n"
        "log: packed, sent\n\nparagraphs: One\ntwo.\n\nparagraphs: Three."
    )


def test_an_item_more_changes_no_other_item():
    items = [{"name": f"part {number}", "use": PROSE} for number in range(5)]
    before, after = (flatten({"parts": each}).text.split("\n\n") for each in (items, [{"name": "new"}, *items]))
    assert after == ["parts.name: new", *before]


def test_vectors_and_pictures_are_left_out_and_named():
    picture = "iVBORw0KGgoAAAANSUhEUgAA" * 20
    found = only(
        [{"name": "x", "embedding": [0.25] * 768, "shape": [[1, 2], [3, 4]] * 10, "png": picture, "size": [3, 4]}]
    )
    assert found.text == "name: x\nsize: 3, 4"
    assert found.notes == ("lists of numbers and base64 strings are left out",)
    assert "word word" in flatten({"a": "word " * 200}).text


def test_an_object_is_a_document_if_it_has_sentences_or_records():
    for settings in ({"name": "x"}, {"compilerOptions": {"target": "es2022", "strict": True, "lib": ["dom"]}}, {}):
        with pytest.raises(NotADocumentError, match=r"holds settings or data.*`text_field='NAME'`"):
            parsed(settings)
    assert only({"name": "Ferry", "info": {"about": PROSE}}).text == f"name: Ferry\ninfo.about: {PROSE.strip()}"
    assert only({"features": [{"name": "Oslo"}, {"name": "Bergen"}]}).text == (
        "features.name: Oslo\n\nfeatures.name: Bergen"
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(categories=["L", "Zs", "N"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["a", "text", "ctxs", "7"]), inner),
    max_leaves=12,
)


def strings_in(value: Any) -> list[str]:
    if isinstance(value, dict | list):
        return [each for item in (value.values() if isinstance(value, dict) else value) for each in strings_in(item)]
    return [value] if isinstance(value, str) else []


@given(value=st.lists(JSON, max_size=4))
def test_any_record_is_a_text_or_a_reason(value):
    found = parsed(value)
    assert all(isinstance(each, ParsedRecord) or each.reason for each in found)


@given(value=st.dictionaries(st.sampled_from(["a", "b", "text", "meta"]), JSON))
def test_flattening_loses_no_string(value):
    text = flatten(value).text
    for wanted in strings_in(value):
        assert wanted.strip() in text


@pytest.mark.parametrize(
    "text",
    [
        '{"a":' * 300 + "1" + "}" * 300,
        "[" * 300 + '"x"' + "]" * 300,
        '{"' + "k" * 100_000 + '": {' + ",".join(f'"{number}x": "v"' for number in range(1000)) + "}}",
        '{"' + "k" * 1000 + '":' + ('{"' + "k" * 1000 + '":') * 300 + "[{}]" + "}" * 301,
    ],
    ids=["objects", "lists", "a long name", "long names"],
)
def test_deep_nesting_and_long_names_make_no_long_text(text):
    (found,) = read_json(f"[{text}]".encode())
    assert isinstance(found, ParsedRecord)
    assert len(found.text) < len(text) + 200_000


# --- the text field ---


def test_the_text_field_names_the_text():
    record = {"id": 3, "body": PROSE, "title": "T", "comments": [{"who": "Ada", "say": "x"}, {"say": "y"}]}
    assert only(record, "body") == ParsedRecord("", PROSE, {"id": 3, "title": "T"})
    assert only([record], "comments.say").text == "x\n\ny"
    assert only(record, "comments").text == "who: Ada\nsay: x\n\nsay: y"
    assert only({"a.b": "exact", "a": {"b": "nested"}}, "a.b").text == "exact"
    assert only({"article": {"body": {"text": "deep"}}}, "article.body.text").text == "deep"
    assert only([{"body": None}], "body").text == ""
    assert only(["a text"], "body").text == "a text"


def test_a_record_without_the_text_field_is_named_with_its_fields():
    good, bad = parsed([{"body": "x"}, {"story": "y", "n": 1}], "body")
    assert isinstance(good, ParsedRecord)
    assert bad == UnreadableRecord("#1", "item 2 has no field 'body', but story, n; name another (`text_field`)")
    with pytest.raises(UnreadableDocumentError, match="has no field 'body', but a;"):
        parsed({"a": PROSE}, "body")


def test_lines_are_read_by_the_text_field_too(tmp_path):
    lines = '{"body": "x", "text": "label"}\n{"body": "y"}\n'
    for name in ("a.jsonl", "a.json"):
        assert [each.text for each in read(tmp_path, name, lines, "body")] == ["x", "y"]
    assert [each.text for each in read(tmp_path, "b.jsonl", lines.encode("utf-16"), "body")] == ["x", "y"]


def test_another_text_field_changes_the_version_of_record_files_only():
    assert reader_version("/a.json", "body") != reader_version("/a.json") != reader_version("/a.json", "text")
    assert reader_version("/a.md", "body") == reader_version("/a.md")


# --- JSON lines ---


def test_one_bad_line_costs_that_line_and_is_counted_as_editors_do(tmp_path):
    (tmp_path / "a.jsonl").write_text('"one"\n\n{"text": \n"three"\n17\n"five"\n')
    contents = open_source(str(tmp_path / "a.jsonl")).read()
    sources = [below(tmp_path, document.source) for document in contents.documents]
    assert sources == ["a.jsonl#0", "a.jsonl#2", "a.jsonl#4"]
    assert contents.failure.startswith("2 of 5 records could not be read and are left out: line 3 is not JSON")
    assert "line 5 is 17, which is neither a text" in contents.failure


def test_lines_in_an_old_encoding_are_read_and_a_note_names_it(tmp_path):
    lines = "".join(json.dumps({"text": f"Käse für {n} €, gültig bis März"}, ensure_ascii=False) + "\n" for n in "1234")
    data = lines.encode("cp1252")
    assert read(tmp_path, "a.jsonl", data)[0].text == "Käse für 1 €, gültig bis März"
    first, *others = stream_jsonl(io.BytesIO(data))
    assert isinstance(first, ParsedRecord)
    assert "windows-1252" in first.notes[0]
    assert not any(each.notes for each in others if isinstance(each, ParsedRecord))
    (japanese,) = read(tmp_path, "b.jsonl", '{"text": "契約"}\n'.encode("iso-2022-jp"))
    assert japanese.text == "契約"


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.json", b'{"text": ', "not JSON"),
        ("a.json", b"[" * 100_000, "not JSON"),
        ("a.json", b'{"text": "x"} and more', "not JSON"),
        ("a.txt", b"", "empty \\(0 bytes\\)"),
        ("a.txt", b"  \n\t", "holds no text"),
        ("a.txt", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "binary file"),
        ("a.txt", bytes(range(1, 32)) * 3, "control or unassigned"),
        ("a.html", b"<html><script>x</script></html>", "holds no text"),
        ("a.json", b"[1]", "item 1 is 1, which is neither a text nor an object"),
        ("a.json", b"17", "its value is 17"),
        ("a.json", b'{"ctxs": [{"text": "x"}, null]}', "passage 2 that is null"),
        ("a.jsonl", b'"x"\n\nnonsense\n', "1 of 2 records .* left out: line 3 is not JSON"),
    ],
)
def test_unreadable_files_are_refused_with_a_reason(tmp_path, name, content, reason):
    with pytest.raises(UnreadableDocumentError, match=reason):
        read(tmp_path, name, content)


def test_numbers_may_have_any_number_of_digits():
    (found,) = read_json(b'[{"big": ' + b"7" * 5000 + b"}]")
    assert isinstance(found, ParsedRecord)
    assert found.text == "big: " + "7" * 5000


# --- Parquet ---


def make_parquet(rows: list[dict[str, Any]], **options: Any) -> bytes:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    out = io.BytesIO()
    parquet.write_table(arrow.Table.from_pylist(rows), out, **options)
    return out.getvalue()


def test_rows_of_parquet_are_documents(tmp_path):
    day, price = date(2026, 3, 1), Decimal("1.50")
    rows = [
        {
            "text": f"Text {at} 東京",
            "title": "T",
            "day": day,
            "price": price,
            "emb": [0.5] * 3,
            "raw": b"x",
            "tags": ["a"],
        }
        for at in range(700)  # of several batches and row groups
    ]
    documents = read(tmp_path, "a.parquet", make_parquet(rows, row_group_size=300))
    assert [document.text for document in documents] == [row["text"] for row in rows]
    assert below(tmp_path, documents[699].source) == "a.parquet#699"
    assert dict(documents[3].metadata) == {"title": "T", "day": day, "price": price, "tags": ["a"]}
    asked = [{"question": "q", "ctxs": [{"title": "T", "text": "x"}, {"title": "U", "text": "y"}]}]
    nested = read(tmp_path, "b.parquet", make_parquet(asked))
    assert [(below(tmp_path, one.source), one.text, dict(one.metadata)) for one in nested] == [
        ("b.parquet#0.0", "x", {"title": "T"}),
        ("b.parquet#0.1", "y", {"title": "U"}),
    ]


def test_columns_of_parquet_without_a_text_are_lines(tmp_path):
    rows: list[dict[str, Any]] = [
        {"body": PROSE, "place": {"city": "Oslo"}, "emb": [0.5]},
        {"body": None, "place": {"city": "Bergen"}},
    ]
    first, second = read(tmp_path, "a.parquet", make_parquet(rows))
    assert (first.text, second.text) == (f"body: {PROSE.strip()}\nplace.city: Oslo", "place.city: Bergen")
    (only_body,) = read(tmp_path, "a.parquet", make_parquet(rows), "body")
    assert (only_body.text, below(tmp_path, only_body.source)) == (PROSE, "a.parquet#0")
    assert [each.text for each in read(tmp_path, "a.parquet", make_parquet(rows), "place.city")] == ["Oslo", "Bergen"]
    with pytest.raises(UnreadableDocumentError, match="no column 'emb' of texts, but body, place; name another"):
        read(tmp_path, "a.parquet", make_parquet(rows), "emb")


def test_parquet_files_that_cannot_be_read_are_named(tmp_path, monkeypatch):
    texts = [each.text for each in read(tmp_path, "a.parquet", make_parquet([{"text": "x"}, {"text": None}]))]
    assert texts == ["x"]
    with pytest.raises(NotADocumentError, match="holds no text"):
        read(tmp_path, "a.parquet", make_parquet([{"text": " "}]))
    data = make_parquet([{"text": "x" * 1000}])
    for damaged in (data[:-30], b"PAR1 and nothing else", data[:20] + b"\0" * 20 + data[40:]):
        with pytest.raises(UnreadableDocumentError, match="damaged Parquet file"):
            read(tmp_path, "a.parquet", damaged)
    (tmp_path / "a.parquet").write_bytes(data)
    contents = open_source(str(tmp_path / "a.parquet")).read()
    (tmp_path / "a.parquet").write_bytes(make_parquet([{"text": "another"}]))
    with pytest.raises(UnreadableDocumentError, match="changed while it was read"):
        list(contents.documents)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UnreadableDocumentError, match=re.escape("pip install 'ragblend[parquet]'")):
        read(tmp_path, "a.parquet", data)


def test_a_file_in_memory_is_read_as_one_on_disk(tmp_path):
    data = b'{"body": "x"}\n{"body": "y", "n": 1}\n'
    path = tmp_path / "a.jsonl"
    path.write_bytes(data)
    on_disk = open_source(str(path), text_field="body").read()
    assert list(on_disk.documents) == list(read_documents(str(path), data, "body").documents)
