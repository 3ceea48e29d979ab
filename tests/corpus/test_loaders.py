"""Files are read by a loader of the caller's: a function, a LangChain loader, a LlamaIndex reader."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import CommandRunner

from ragblend.chunker import Document, split
from ragblend.corpus.folder_scan import scan_folders
from ragblend.corpus.loaders import DEFAULT_READER, FileReader, Loader, get_loader_version, import_loader
from ragblend.errors import NotADocumentError, UnreadableDocumentError, UsageError
from ragblend.index import open_index
from ragblend.ingestion.sync import ChunkerConfig, sync_index


def documents(path: Path, loader: Loader) -> list[Document]:
    return list(FileReader(loader=loader).open(str(path)).read().documents)


@pytest.fixture
def notes(tmp_path):
    path = tmp_path / "a.notes"
    path.write_bytes(b"\0\0one\n\0two\n")  # a binary format that no reader here takes
    return path


def lines_of(path: str) -> list[str]:
    return [line.strip(b"\0").decode() for line in Path(path).read_bytes().splitlines()]


# --- what a loader returns ---


def test_metadata_that_are_no_json_fail_their_file(notes, tmp_path):
    given = {"year": np.int64(2024), "day": date(2024, 5, 3), "path": str(notes)}
    (found,) = documents(notes, lambda path: Document("one", metadata=given))
    assert found.metadata == {"year": 2024, "day": "2024-05-03"}
    (tmp_path / "b.notes").write_bytes(b"\0two")
    tags = {"a.notes": {"x"}, "b.notes": ["x"]}
    reader = FileReader(loader=lambda path: Document(Path(path).name, metadata={"tags": tags[Path(path).name]}))
    with open_index(tmp_path / "index", "hashing", create=True) as index:
        cut = ChunkerConfig(lambda document: split(document, len, 100), "1")
        report = sync_index(index, scan_folders([tmp_path], "*.notes", []), cut, lambda *_: None, reader=reader).report
        assert [chunk.metadata["tags"] for chunk in index.chunks()] == [["x"]]
    assert [(Path(failure.path).name, failure.reason.partition(";")[0]) for failure in report.failures] == [
        ("a.notes", "its metadata: 'tags' holds a set, which cannot be stored")
    ]


def test_one_text_has_the_source_of_its_file_and_several_have_numbers(notes):
    assert documents(notes, lambda path: "one\r\ntwo") == [Document("one\ntwo", str(notes))]
    assert documents(notes, lines_of) == [Document("one", f"{notes}#0"), Document("two", f"{notes}#1")]
    assert documents(notes, lambda path: (text for text in (" ", "one"))) == [Document("one", str(notes))]
    assert documents(notes, lambda path: Document("x", "elsewhere", {"page": 3})) == [
        Document("x", str(notes), {"page": 3})
    ]


def test_a_langchain_loader_is_named_by_its_class(notes):
    loaders = pytest.importorskip("langchain_core.document_loaders")
    from langchain_core.documents import Document as LangChainDocument

    class NotesLoader(loaders.BaseLoader):
        def __init__(self, path: str) -> None:
            self.path = path

        def lazy_load(self) -> Iterator[LangChainDocument]:
            for number, line in enumerate(lines_of(self.path)):
                yield LangChainDocument(line, metadata={"source": self.path, "line": number})

    expected = [Document("one", f"{notes}#0", {"line": 0}), Document("two", f"{notes}#1", {"line": 1})]
    assert documents(notes, NotesLoader) == expected
    assert documents(notes, lambda path: NotesLoader(path).load()) == expected
    assert documents(notes, lambda path: NotesLoader(path).load()[0]) == [Document("one", str(notes), {"line": 0})]


def test_a_llamaindex_reader_is_named_by_its_method(notes):
    readers = pytest.importorskip("llama_index.core.readers.base")
    from llama_index.core import SimpleDirectoryReader
    from llama_index.core.schema import Document as LlamaDocument

    class NotesReader(readers.BaseReader):
        def load_data(self, path: str) -> list[LlamaDocument]:
            return [LlamaDocument(text=line, metadata={"file_path": path}) for line in lines_of(path)]

    assert [each.text for each in documents(notes, NotesReader().load_data)] == ["one", "two"]
    plain = notes.with_suffix(".txt")
    plain.write_text("The ferry leaves at nine.")
    (found,) = documents(plain, lambda path: SimpleDirectoryReader(input_files=[path]).load_data())
    assert (found.text, found.source, found.metadata["file_name"]) == (
        "The ferry leaves at nine.",
        str(plain),
        "a.txt",
    )


def broken(path: str) -> Any:
    raise ValueError("no such table")


def slow_to_break(path: str) -> Iterator[str]:
    yield "one"
    yield "two"
    raise KeyError("three")


@pytest.mark.parametrize(
    ("loader", "error", "reason"),
    [
        (broken, UnreadableDocumentError, r"loader test_loaders:broken \(ValueError: no such table\)"),
        (slow_to_break, UnreadableDocumentError, r"loader test_loaders:slow_to_break \(KeyError: 'three'\)"),
        (lambda path: [{"text": "x"}], UnreadableDocumentError, "it returns a dict; return strings"),
        (lambda path: 7, UnreadableDocumentError, "it returns a int"),
        (lambda path: None, NotADocumentError, "holds no text"),
        (lambda path: [" ", "\u200b"], NotADocumentError, "holds no text"),
    ],
)
def test_what_goes_wrong_in_a_loader_is_the_failure_of_that_file(notes, loader, error, reason):
    with pytest.raises(UnreadableDocumentError, match=reason) as raised:
        documents(notes, loader)
    assert type(raised.value) is error


def test_the_limit_of_size_holds_for_loaders(tmp_path):
    (tmp_path / "a.big").write_bytes(b"x" * (2 << 20))
    with pytest.raises(UnreadableDocumentError, match="max_file_mib"):
        FileReader(max_file_mib=1, loader=lines_of).open(str(tmp_path / "a.big"))


# --- finding a loader ---


def test_a_loader_is_imported_from_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_notes_loader.py").write_text(
        "class Notes:\n    def read(path):\n        return 'text of ' + path\n"
    )
    before = list(sys.path)
    loader = import_loader("my_notes_loader:Notes.read")
    assert loader("a") == "text of a"
    assert get_loader_version(loader) == "my_notes_loader:Notes.read"
    assert sys.path == before


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("my_loader", "name it as module:function"),
        ("no_such_module_here:read", "cannot be imported \\(ModuleNotFoundError: No module named"),
        ("pathlib:no_such_function", "cannot be imported \\(AttributeError"),
        ("sys:path", "is a list; name a function"),
    ],
)
def test_a_loader_that_is_none_is_refused_before_anything_is_read(name, reason):
    with pytest.raises(UsageError, match=reason):
        import_loader(name)


def test_the_version_of_a_loader_is_its_attribute_or_else_its_name():
    class Ocr:
        def __init__(self, language: str) -> None:
            self.version = f"ocr {language}"

        def __call__(self, path: str) -> str:
            return path

    assert (get_loader_version(Ocr("de")), get_loader_version(Ocr("en"))) == ("ocr de", "ocr en")
    assert get_loader_version(lines_of) == "test_loaders:lines_of"


# --- ingestion ---


@pytest.fixture
def sync(tmp_path):
    """Bring `docs` into an index, read in some way."""
    with open_index(tmp_path / "index", "hashing", create=True, tokenizer="t") as index:
        chunker = ChunkerConfig(lambda document: split(document, len), "v")
        yield (
            lambda reader: (
                sync_index(index, scan_folders([tmp_path / "docs"]), chunker, lambda *_: None, reader=reader).report
            )
        )


def test_another_loader_and_another_text_field_read_files_again(tmp_path, sync):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.jsonl").write_text('{"text": "one", "body": "two"}\n')
    (tmp_path / "docs" / "b.txt").write_text("three")
    calls: list[str] = []

    def loader(path: str) -> str:
        calls.append(Path(path).name)
        return f"text of {Path(path).name}"

    assert (sync(DEFAULT_READER).num_updated, sync(DEFAULT_READER).num_unchanged) == (0, 2)
    by_body = sync(FileReader(text_field="body"))
    assert (by_body.num_updated, by_body.num_unchanged, by_body.removed) == (1, 1, [])
    assert sync(FileReader(text_field="body")).num_unchanged == 2
    sync(FileReader(loader=loader))
    assert sync(FileReader(loader=loader)).num_unchanged == 2
    assert calls == ["a.jsonl", "b.txt"]


def test_the_command_line_takes_a_loader_and_a_text_field(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.jsonl").write_text('{"body": "The ferry leaves at nine."}\n{"text": "no body"}\n')
    (tmp_path / "loader_of_test.py").write_text("def read(path):\n    return ['The mill stands.', 'It turns.']\n")
    place = ("--embedder", "hashing", "--no-precompute", "--store", "s")
    run = CommandRunner(capsys)
    code, out, err = run("ingest", "docs", "--model", "demo", "--text-field", "body", *place)
    assert (code, "1 document" in out) == (6, True)
    assert "line 2 has no field 'body', but text; name another (--text-field)" in " ".join((out + err).split())
    assert run.facts("ingest", "docs", "--loader", "loader_of_test:read", *place)["num_documents"] == 2
    code, _, err = run("ingest", "docs", "--loader", "loader_of_test:write", *place)
    assert (code, "AttributeError" in err) == (2, True)
