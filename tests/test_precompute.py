"""Ingestion: idempotent, resumable, honest about what it could not read, and exact about what it stored."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from tier_support import DictValues, make_kv

from ragblend import load_engine
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.remote.tier import RemoteStore
from ragblend.engine.store.tiered import MemoryStore, TieredStore
from ragblend.errors import EmptyCorpusError, StoreFullError, StoreMismatchError, UsageError
from ragblend.index import open_index
from ragblend.ingestion import report
from ragblend.ingestion.capacity import describe_capacity
from ragblend.ingestion.identity import as_chunk
from ragblend.precompute import ingest, open_engine_index, precompute_chunks, precompute_documents, precompute_index
from ragblend.prompt.types import Chunk, Prompt

TEXTS = {
    "kern.md": "Alice Kern works for Nexon.\n\nThe company sells drones. The firm is based in Halford.\n",
    "fox.txt": "Bob Fox lives in Norburg. He plays the flute.\n",
    "list.jsonl": '{"text": "Tara Kern has a job at Nexex."}\n{"text": "Nexex is based in Oston."}\n',
}


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "docs"
    folder.mkdir()
    for name, text in TEXTS.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def engine(tmp_path):
    with load_engine("demo", tmp_path / "kv") as engine:
        yield engine


def run(corpus: Path, engine, tmp_path: Path, **options):
    return ingest(corpus, engine, tmp_path / "index", chunk_size=32, embedder="hashing", **options)


def test_ingest_stores_the_kv_of_every_chunk(corpus, engine, tmp_path):
    report = run(corpus, engine, tmp_path)
    with open_index(tmp_path / "index") as index:
        chunks = list(index.chunks())
    assert report.num_documents == 4
    assert report.num_chunks == report.num_new_kv == len(chunks)
    assert all(engine.is_stored(chunk) for chunk in chunks)
    num_tokens = sum(len(engine.renderer.chunk_ids(chunk.text)) for chunk in chunks)
    assert report.new_kv_bytes == num_tokens * engine.bytes_per_token


@pytest.mark.parametrize("texts", [TEXTS, {"empty.txt": " "}], ids=["documents", "nothing"])
def test_an_index_opened_for_ingestion_is_saved_and_closed(texts, corpus, engine, tmp_path):
    for path in corpus.iterdir():
        path.unlink()
    for name, text in texts.items():
        (corpus / name).write_text(text)
    with suppress(EmptyCorpusError):
        run(corpus, engine, tmp_path)
    found = sorted(path.name for path in (tmp_path / "index").iterdir())
    assert found == ["catalog.sqlite", "vectors.faiss"]
    with open_index(tmp_path / "index") as index:
        assert index.is_saved


def test_interrupted_ingestion_goes_on_where_it_stopped(corpus, engine, tmp_path, monkeypatch):
    original, calls = engine._prefill_chunks, []

    def interrupted(context, chunks):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(chunks)
        return original(context, chunks)

    monkeypatch.setattr("ragblend.engine.transformers.engine.CPU_PASS_TOKENS", 1)  # a pass per chunk
    monkeypatch.setattr(engine, "_prefill_chunks", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(corpus, engine, tmp_path)
    monkeypatch.setattr(engine, "_prefill_chunks", original)
    report = run(corpus, engine, tmp_path)
    assert (report.num_known_kv, report.num_new_kv) == (2, report.num_chunks - 2)


def test_the_forecast_is_checked_against_the_disk_before_prefilling(corpus, engine, tmp_path, monkeypatch):
    import ragblend.ingestion.capacity as module

    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000, "total": 10**9})())
    with pytest.raises(StoreFullError, match=r"needs .* has 1000 B free"):
        run(corpus, engine, tmp_path)
    assert list(DiskStore(tmp_path / "kv").keys()) == []


def test_chunk_size_beyond_the_context_is_refused(corpus, engine, tmp_path):
    with pytest.raises(UsageError, match="chunk size is 100000"):
        ingest(corpus, engine, tmp_path / "index", chunk_size=100_000)


def test_an_index_of_another_tokenizer_is_refused(corpus, engine, tmp_path, monkeypatch):
    run(corpus, engine, tmp_path)
    monkeypatch.setattr(type(engine.renderer), "fingerprint", property(lambda self: "another"))
    with pytest.raises(StoreMismatchError, match="was chunked for demo"):
        open_engine_index(tmp_path / "index", engine, create=False)


def test_precompute_documents_takes_what_frameworks_hand_over(engine):
    documents = pytest.importorskip("langchain_core.documents")
    document = documents.Document(page_content=" a document. ", metadata={"source": "s"})
    given = ["plain text.", Chunk("a chunk."), document]
    report = precompute_documents(given, engine)
    assert report.num_new_kv == 3
    assert engine.is_stored("a document.")
    assert as_chunk(given[2]).source == "s"
    with pytest.raises(UsageError, match="a document is a int"):
        precompute_documents([3], engine)


def _document(text, **fields):
    return pytest.importorskip("langchain_core.documents").Document(text, **fields)


def _node(text, **fields):
    return pytest.importorskip("llama_index.core.schema").TextNode(text=text, **fields)


LONG, SURROGATE = "a lamp " * 5000, "half \ud83d emoji"
TOO_LONG = r"it has \d+ tokens with the system text, but demo reads \d+; split it"


@pytest.mark.parametrize(
    ("make", "fields", "text", "reason"),
    [
        (_document, {"id": "7", "metadata": {"source": "b.pdf"}}, LONG, f"7 of b.pdf: {TOO_LONG}"),
        (_node, {"id_": "7", "metadata": {"file_path": "b.pdf"}}, LONG, f"7 of b.pdf: {TOO_LONG}"),
        (Chunk, {"source": "b.pdf"}, LONG, f"b.pdf: {TOO_LONG}"),
        (str, {}, LONG, f"'a lamp a lamp .*': {TOO_LONG}"),
        (_document, {"id": "7"}, SURROGATE, r"7: its text holds a lone surrogate, U\+D83D"),
        (_document, {"id": "7"}, " \u200b\ufeff\n", "7: it has no visible text"),
    ],
)
def test_a_document_that_cannot_be_prefilled_is_named_and_stops_no_other(make, fields, text, reason, engine, caplog):
    report = precompute_documents(["first.", make(text, **fields), "last."], engine)
    assert (report.num_chunks, report.num_new_kv) == (2, 2)
    assert [engine.is_stored(each) for each in ("first.", "last.")] == [True, True]
    (problem,) = (*report.failures, *report.skipped)
    said = f"{problem.path}: {problem.reason}"
    assert re.fullmatch(f"(?s){reason}.*", said)
    assert [record.getMessage() for record in caplog.records] == [f"not prefilled: {said}"]
    assert "-k" not in said


def test_notes_name_the_texts_that_are_too_short_to_be_found(engine, tmp_path):
    texts = [" ".join(["lamp"] * number) for number in range(1, 12)]
    report = precompute_documents([*texts, "lamp"], engine, ids=[str(number) for number in range(12)])
    noted = [note.path for note in report.notes]
    found = [text for text in texts if engine.match(Prompt(question=f"{text}\n\nWhat is it?")).runs]
    assert noted == [repr(text) for text in texts if text not in found]
    assert all(re.match(f"{note.path} has [1-7] tokens; .* fewer than 8", note.reason) for note in report.notes)
    for number, text in enumerate(texts[-5:]):
        (tmp_path / f"{number}.txt").write_text(text)
    (tmp_path / "short.txt").write_text("So it is.")
    report = ingest(tmp_path, engine, tmp_path / "index", embedder="hashing")
    assert [Path(note.path).name for note in report.notes] == ["short.txt"]


def test_a_document_that_became_too_long_loses_what_it_had(engine):
    precompute_documents([_document("short.", id="7")], engine)
    precompute_documents([_document(LONG, id="7")], engine)
    assert not engine.is_stored("short.")


def test_an_overlong_chunk_of_a_splitter_stops_no_other(corpus, engine, tmp_path):
    (corpus / "long.txt").write_text(LONG)
    report = run(corpus, engine, tmp_path, splitter=lambda document: [Chunk(document.text, document.source)])
    assert report.num_new_kv == report.num_chunks - 1 == 4
    ((path, reason),) = report.failures
    assert Path(path).name == "long.txt"
    assert re.match(TOO_LONG, reason)
    with open_index(tmp_path / "index") as index:
        again = precompute_index(engine, index)
    assert (again.failures, again.num_known_kv) == (report.failures, 4)


# --- storage dtypes ---


def stored_dtypes(place: Path) -> set[str]:
    return {entry.header.stored_dtype for entry in DiskStore(place).entries()}


@pytest.fixture
def chunks(corpus, tmp_path):
    """Chunks of the corpus, after their KV was computed in another store, which is deleted."""
    with load_engine("demo", tmp_path / "first") as engine:
        run(corpus, engine, tmp_path)
    with open_index(tmp_path / "index") as index:
        return list(index.chunks())


def test_ingesting_again_in_another_dtype_keeps_what_is_stored_and_says_so(chunks, tmp_path, monkeypatch):
    for first, second, said in (("auto", "int8", True), ("int8", "auto", False), ("fp8", "int8", True)):
        place, lines = tmp_path / f"{first}-{second}", []
        with load_engine("demo", place, kv_dtype=first) as engine:
            precompute_chunks(chunks, engine)
        before = stored_dtypes(place)
        with load_engine("demo", place, kv_dtype=second) as engine:
            monkeypatch.setattr(engine, "_prefill_chunks", lambda *_: pytest.fail("prefilled a known chunk"))
            report = precompute_chunks(chunks, engine, notify=lines.append)
        assert stored_dtypes(place) == before
        assert (report.num_new_kv, report.num_rewritten_kv) == (0, 0)
        assert report.num_other_kv == (len(chunks) if said else 0)
        assert any("--kv-dtype int8" in line for line in lines) == said


def test_rewriting_to_eight_bits_prefills_nothing(chunks, tmp_path, monkeypatch):
    with load_engine("demo", tmp_path / "kv") as engine:
        precompute_chunks(chunks[:-1], engine)
    with load_engine("demo", tmp_path / "kv", kv_dtype="fp8") as engine:
        prefilled, original, missing = [], engine._prefill_chunks, engine.renderer.chunk_ids(chunks[-1].text)
        spied = lambda context, ids: prefilled.extend(ids) or original(context, ids)  # noqa: E731
        monkeypatch.setattr(engine, "_prefill_chunks", spied)
        report = precompute_chunks(chunks, engine, rewrite=True)
    assert prefilled == [missing], "only what was missing"
    assert (report.num_rewritten_kv, report.num_new_kv) == (len(chunks) - 1, 1)
    assert stored_dtypes(tmp_path / "kv") == {"fp8"}
    with load_engine("demo", tmp_path / "kv", kv_dtype="fp8") as engine:
        assert precompute_chunks(chunks, engine, rewrite=True).num_rewritten_kv == 0


@pytest.mark.parametrize("wanted", ["auto", "int8"])
def test_rewriting_eight_bits_prefills_them_again(chunks, tmp_path, wanted):
    """Back to what was computed, bit for bit; fp8 to int8 without rounding twice."""
    for place, kv_dtype in (("reference", wanted), ("kv", "fp8")):
        with load_engine("demo", tmp_path / place, kv_dtype=kv_dtype) as engine:
            precompute_chunks(chunks, engine)
    with load_engine("demo", tmp_path / "kv", kv_dtype=wanted) as engine:
        report = precompute_chunks(chunks, engine, rewrite=True)
    assert (report.num_rewritten_kv, report.num_new_kv) == (len(chunks), 0)
    assert_same_files(tmp_path / "kv", tmp_path / "reference")


def test_damage_met_while_rewriting_is_prefilled(chunks, tmp_path, monkeypatch):
    # A pass per chunk: on some processors the last bit of a product depends on how many rows there are.
    monkeypatch.setattr("ragblend.engine.transformers.engine.CPU_PASS_TOKENS", 1)
    for place, kv_dtype in (("reference", "int8"), ("kv", "auto")):
        with load_engine("demo", tmp_path / place, kv_dtype=kv_dtype) as engine:
            # One chunk per pass, like the repair of the victim: some CPUs round differently if chunks share a pass.
            assert all(engine.precompute(chunk) for chunk in chunks)
    victim = next((tmp_path / "kv").glob("kv/??/*.safetensors"))
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    with load_engine("demo", tmp_path / "kv", kv_dtype="int8") as engine:
        report = precompute_chunks(chunks, engine, rewrite=True)
    assert report.num_rewritten_kv == len(chunks)
    assert_same_files(tmp_path / "kv", tmp_path / "reference")


def test_the_store_of_another_process_is_not_rewritten(chunks):
    store = MemoryStore(1 << 20)
    store.is_remote = True  # as the store of a server's client
    with load_engine("demo", store) as engine, pytest.raises(UsageError, match="server's machine"):
        precompute_chunks(chunks, engine, rewrite=True)


def assert_same_files(one: Path, other: Path) -> None:
    stores = [{path.name: path.read_bytes() for path in place.glob("kv/??/*.safetensors")} for place in (one, other)]
    assert stores[0] == stores[1]
    assert stores[0]


def test_what_the_default_limit_means_is_said_before_prefilling(tmp_path):
    """A real file system: more than half of it is refused, what pushes out other KV is announced."""
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(small)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    try:
        store = DiskStore(small / "kv", fsync=False, capacity_bytes="auto")
        assert describe_capacity(store, 3 << 20) == "8.0 MiB free"
        with pytest.raises(StoreFullError, match=r"may hold 4.0 MiB: half of the free space.*`disk_gib="):
            describe_capacity(store, 5 << 20)
        for seed in range(3):
            store.put(make_kv(seed, tokens=8192))
        assert re.search(
            r"holds 3\..* may hold 4\..*least recently used KV is evicted", describe_capacity(store, 2 << 20)
        )
        chosen = DiskStore(small / "kv", fsync=False, capacity_bytes=2 << 20)
        assert "may hold 2.0 MiB" in describe_capacity(chosen, 4 << 20), "a configured limit may evict"
        assert describe_capacity(DiskStore(small / "kv", fsync=False), 4 << 20).endswith("free"), "and so is no limit"
    finally:
        subprocess.run(["umount", "--lazy", str(small)], check=True)


def test_what_is_stored_far_away_is_asked_for_in_few_round_trips():
    values, chunks = DictValues(), [Chunk(f"Fact {number} is about number {number}.") for number in range(30)]
    with load_engine("demo", TieredStore(MemoryStore(1 << 30), RemoteStore(values))) as engine:
        assert precompute_chunks(chunks, engine).num_new_kv == 30
    values.calls.clear()
    with load_engine("demo", TieredStore(MemoryStore(1 << 30), RemoteStore(values))) as engine:
        report = precompute_chunks(chunks, engine)
    assert (report.num_new_kv, report.num_known_kv) == (0, 30)
    assert (values.calls.count("contains_many"), values.calls.count("contains")) == (1, 0)


def test_a_report_says_what_was_given_and_how_long_it_took(engine):
    texts = ["Bob Fox plays the flute.", "Ann Gray paints.", "Velora."]
    given = [_document(text, id=name) for text, name in zip(texts, ("1", "1", ""), strict=True)]
    report = precompute_documents(given, engine, ids=["1", "1", ""])
    assert (report.num_documents, report.num_chunks) == (2, 3)
    assert report.num_tokens == sum(map(engine.renderer.count_tokens, texts))
    assert report.elapsed_s >= report.prefill_s > 0


class _Stderr(io.StringIO):
    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.isatty = lambda: is_terminal  # type: ignore[method-assign]


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("takes", ["documents", "a folder"])
def test_long_work_is_shown_on_a_terminal_unless_a_callback_is_given(
    takes, is_terminal, corpus, engine, tmp_path, monkeypatch
):
    def work(**options):
        engine.store.delete_everywhere(list(engine.store.keys()))
        if takes == "documents":
            return precompute_documents(TEXTS.values(), engine, **options)
        return run(corpus, engine, tmp_path, **options)

    for least_s, has_callback in ((0.0, False), (60.0, False), (0.0, True)):
        seen, stderr = list[tuple[str, int, int | None]](), _Stderr(is_terminal)
        monkeypatch.setattr(report, "_LONG_S", least_s)
        monkeypatch.setattr(sys, "stderr", stderr)
        work(progress=(lambda *facts, seen=seen: seen.append(facts)) if has_callback else None)
        assert ("prefill" in stderr.getvalue()) == (is_terminal and not least_s and not has_callback)
        assert (("prefill", 1) in {facts[:2] for facts in seen}) == has_callback
