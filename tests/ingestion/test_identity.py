"""A document that is passed again replaces its earlier version, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_text_splitters import RecursiveCharacterTextSplitter
from llama_index.core import Document as LlamaDocument
from llama_index.core import SimpleDirectoryReader
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import TextNode

from ragblend import load_engine
from ragblend.catalog.ledger import open_ledger
from ragblend.catalog.schema import text_id
from ragblend.catalog.stored_documents import list_added
from ragblend.corpus.documents import Document as FileDocument
from ragblend.engine.store.disk import DiskStore
from ragblend.ingestion.identity import Identity, as_chunk, identify
from ragblend.llamaindex import BlendIngestion
from ragblend.precompute import precompute_documents
from ragblend.prompt.types import Chunk

RANDOM, STABLE = "2c9f3f0e-8a57-4d5c-9f6e-0d7a2f6f1b11", "7d444840-9dc0-11d1-b245-5ffdce74fad2"  # UUIDs of version 4, 1


def node(ref_doc_id: str, **metadata: str) -> Any:
    (made,) = SentenceSplitter().get_nodes_from_documents([LlamaDocument(text="t", id_=ref_doc_id, metadata=metadata)])
    return made


BY_TEXT = Identity(text_id("t"), is_text=True)


@pytest.mark.parametrize(
    ("document", "given", "expected"),
    [
        ("t", "", BY_TEXT),
        (" t\n", "7", Identity("7")),
        (Chunk("t"), "", BY_TEXT),
        (Chunk("t", "a.txt", 9, metadata={"page": 2}), "", Identity("a.txt", "a.txt", start=9)),
        (Chunk("t", "7"), "7", Identity("7")),
        (FileDocument("t", "a.txt"), "", Identity("a.txt", "a.txt")),
        (Document("t"), "", BY_TEXT),
        (Document("t", metadata={"source": "a.txt"}), "", Identity("a.txt", "a.txt")),
        (Document("t", metadata={"source": "a.txt"}, id=RANDOM), "", Identity(RANDOM, "a.txt")),
        (Document("t", metadata={"source": "a.txt"}), "7", Identity("7", "a.txt")),
        (Document("t", metadata={"source": "a.txt", "start_index": 9}), "", Identity("a.txt", "a.txt", start=9)),
        (Document("t", metadata={"source": "a.pdf", "page": 0}), "", Identity("a.pdf#page=0", "a.pdf")),
        (
            Document("t", metadata={"source": "a.pdf", "page": 1, "total_pages": 3, "start_index": 9}),
            "",
            Identity("a.pdf#page=1", "a.pdf", start=9, num_pages=3),
        ),
        (Document("t", metadata={"source": "caf\udce9.txt"}), "", Identity("caf\\udce9.txt", "caf\\udce9.txt")),
        (node("7"), "", Identity("7")),
        (node(STABLE, file_path="a.txt"), "", Identity(STABLE, "a.txt")),
        (node(RANDOM), "", BY_TEXT),
        (node(RANDOM, file_path="a.txt"), "", Identity("a.txt", "a.txt")),
        (node(RANDOM, file_path="a.pdf", page_label="ii"), "", Identity("a.pdf#page=ii", "a.pdf")),
        (node(RANDOM, file_path="a.pdf", source="4"), "", Identity("a.pdf", "a.pdf")),
        (node(RANDOM, source="a.txt"), "", Identity("a.txt", "a.txt")),
        (TextNode(text="t"), "", BY_TEXT),
        (TextNode(text="t", id_="7"), "", Identity("7")),
        (LlamaDocument(text="t", metadata={"file_path": "a.txt"}), "", Identity("a.txt", "a.txt")),
    ],
)
def test_the_identity_is_the_id_else_the_source_else_the_text(document, given, expected):
    assert identify(document, as_chunk(document), given)._replace(version="") == expected


@pytest.fixture
def engine(tmp_path):
    with load_engine("demo", tmp_path / "store", on_miss="inline") as opened:
        yield opened


def stored(engine: Any, collection: str = "langchain") -> dict[str, list[str]]:
    """Return the sorted texts of each document. Also check that nothing else is stored."""
    with open_ledger(engine.store) as ledger:
        found = {each.key.id: each.key for each in list_added(ledger) if each.key.collection == collection}
        texts = {name: sorted(ledger.texts_of(key)) for name, key in found.items()}
        every = {text for held in texts.values() for text in held}
        assert set(ledger.texts()) == every
    assert {*engine.store.find_tier(DiskStore).keys()} == set(map(engine.key, every))
    return texts


def sentences(count: int, what: str) -> str:
    return " ".join(f"Number {number} of {what} sells lamps in Dorn." for number in range(count))


VERSIONS = [
    (sentences(9, "a"), sentences(6, "b")),
    ("A new first line.\n\n" + sentences(7, "a"), sentences(6, "b")),
    ("\n\n  " + sentences(1, "c"), sentences(2, "b")),
]


@pytest.mark.parametrize("batch", [99, 2])
@pytest.mark.parametrize("overlap", [0, 40])
def test_files_that_change_leave_nothing_of_what_they_were_in_langchain(engine, batch, overlap):
    splitter = RecursiveCharacterTextSplitter(chunk_size=120, chunk_overlap=overlap, add_start_index=batch == 2)
    for texts in VERSIONS:
        loaded = [Document(text, metadata={"source": f"{name}.txt"}) for name, text in zip("ab", texts, strict=True)]
        pieces = splitter.split_documents(loaded)
        for first in range(0, len(pieces), batch):
            report = precompute_documents(pieces[first : first + batch], engine)
            assert [note for note in report.notes if "neither an id" in note.reason] == []
        expected = {f"{name}.txt": set[str]() for name in "ab"}
        for piece in pieces:
            expected[piece.metadata["source"]].add(piece.page_content)
        assert stored(engine) == {name: sorted(held) for name, held in expected.items()}


def test_files_that_change_leave_nothing_of_what_they_were_in_llama_index(engine, tmp_path):
    (tmp_path / "files").mkdir()
    splitter = SentenceSplitter(chunk_size=40, chunk_overlap=0)
    for texts in VERSIONS:
        for name, text in zip("ab", texts, strict=True):
            (tmp_path / "files" / f"{name}.txt").write_text(text)
        documents = SimpleDirectoryReader(tmp_path / "files").load_data()
        nodes = IngestionPipeline(transformations=[splitter, BlendIngestion(llm=engine)]).run(documents=documents)
        expected: dict[str, list[str]] = {}
        for each in nodes:
            expected.setdefault(each.metadata["file_path"], []).append(each.get_content().strip())
        assert stored(engine, "llamaindex") == {name: sorted(held) for name, held in expected.items()}


def pages(texts: Sequence[str], *, counted: bool = True) -> list[Document]:
    more = {"total_pages": len(texts)} if counted else {}
    return [
        Document(text, metadata={"source": "a.pdf", "page": page, **more}) for page, text in enumerate(texts) if text
    ]


def test_a_page_is_replaced_alone_and_deleted_with_its_file(engine):
    one, two, three, other = (f"{sentences(1, name)}" for name in ("one", "two", "three", "other"))
    for page in pages([one, two, three]):
        precompute_documents([page], engine)
    assert stored(engine) == {"a.pdf#page=0": [one], "a.pdf#page=1": [two], "a.pdf#page=2": [three]}
    precompute_documents(pages(["", other, ""]), engine)
    assert stored(engine) == {"a.pdf#page=0": [one], "a.pdf#page=1": [other], "a.pdf#page=2": [three]}
    precompute_documents(pages([one]), engine, collection="another")
    assert len(list(open_ledger(engine.store).texts())) == 3
    precompute_documents([], engine)
    precompute_documents(pages([one], counted=False), engine)
    assert len(stored(engine)) == 3, "it does not say how many there are"
    precompute_documents(pages([one, other]), engine)
    assert stored(engine) == {"a.pdf#page=0": [one], "a.pdf#page=1": [other]}


def test_several_documents_of_one_file_in_llama_index_are_replaced_together(engine):
    def run(*texts: str) -> None:
        documents = [LlamaDocument(text=text, metadata={"file_path": "a.md"}) for text in texts]
        IngestionPipeline(transformations=[SentenceSplitter(), BlendIngestion(llm=engine)]).run(documents=documents)

    one, two, three = (sentences(1, name) for name in ("one", "two", "three"))
    run(one, two)
    assert stored(engine, "llamaindex") == {"a.md": sorted((one, two))}
    run(three, two)
    assert stored(engine, "llamaindex") == {"a.md": sorted((three, two))}


def test_a_report_notes_what_is_stored_by_its_text(engine):
    given = ["a text", Document("a text"), Document("another"), Document("with a source", metadata={"source": "a"})]
    report = precompute_documents(given, engine)
    label, reason = report.notes[0]
    assert label == "'a text'"
    assert reason.startswith("documents with neither an id nor a source: 2. Each is stored by its text")
    assert "metadata['source']" in reason
    assert (report.num_documents, report.num_chunks) == (3, 4)
    assert precompute_documents(given[:1], engine).num_removed_kv == 0
    assert stored(engine) == {text_id("a text"): ["a text"], text_id("another"): ["another"], "a": ["with a source"]}
