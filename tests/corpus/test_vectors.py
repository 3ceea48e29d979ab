"""Vectors in any place give the answers that FAISS gives, follow the catalogue, and show no password."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from postgres import PASSWORD, running_postgres

from ragblend.config import Settings, load_settings
from ragblend.corpus.embedders import HashingEmbedder
from ragblend.corpus.vectors.choice import choose
from ragblend.corpus.vectors.places import open_place
from ragblend.errors import BackendUnreachableError, RagblendError, UsageError
from ragblend.index import VECTORS, ChunkIndex, open_index
from ragblend.prompt.prompt import Chunk

DIM = 16
RNG = np.random.default_rng(5)
KINDS = ("faiss:HNSW16", "faiss:IVF4,Flat?nprobe=4", "qdrant", "pgvector", "pgvector-hnsw")
OUTSIDE = ("qdrant", "pgvector")


@pytest.fixture(scope="module", autouse=True)
def own_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The user's configuration folder, in which places that were named are noted."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("config")
        patch.setenv("XDG_CONFIG_HOME", str(folder))
        yield folder


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    with running_postgres() as url:
        yield url


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Where vectors are, by the name of a kind; its password is where a user would have it."""

    def of(kind: str) -> str:
        if kind == "qdrant":
            pytest.importorskip("qdrant_client", reason="no qdrant-client: pip install 'ragblend[qdrant]'")
            return f"qdrant://{tmp_path}/qdrant"
        if kind.startswith("pgvector"):
            url = request.getfixturevalue("postgres") + ("?index=hnsw" if kind.endswith("hnsw") else "")
            monkeypatch.setenv("RAGBLEND_VECTORS", url)
            return url
        return kind

    return of


def embedder() -> HashingEmbedder:
    return HashingEmbedder(DIM)


def chunks_of(source: str, count: int) -> list[Chunk]:
    return [Chunk(f"{source} {number}", source, number * 100) for number in range(count)]


def rows_of(count: int) -> np.ndarray:
    return RNG.standard_normal((count, DIM)).astype(np.float32)


def answers(index: ChunkIndex, questions: np.ndarray, k: int = 6) -> list[list[tuple[str, float]]]:
    return [[(hit.chunk.id, hit.score) for hit in index.search(question, k)] for question in questions]


def assert_alike(found: list[list[tuple[str, float]]], wanted: list[list[tuple[str, float]]]) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        assert [name for name, _ in ours] == [name for name, _ in theirs]
        np.testing.assert_allclose([score for _, score in ours], [score for _, score in theirs], atol=2e-6)


# --- the same answers ---


@pytest.mark.parametrize("kind", KINDS)
def test_a_place_answers_as_flat_faiss_does_through_changes_and_reopening(kind, place, tmp_path):
    questions, where = rows_of(10), place(kind)
    vectors = {source: rows_of(16) for source in ("abcdefghijklmnop" if "IVF" in kind else "abcdef")}
    vectors["f"][:8] = vectors["a"][:8]  # equals: which are taken is not left to chance
    plain = open_index(tmp_path / "plain", embedder(), create=True)
    other = open_index(tmp_path / "other", embedder(), create=True, vectors=where)

    def both(change: Callable[[ChunkIndex], object]) -> None:
        for index in (plain, other):
            change(index)
        assert_alike(answers(other, questions), answers(plain, questions))

    for source, rows in vectors.items():
        both(lambda index, source=source, rows=rows: index.add_document(source, "1", chunks_of(source, 16), rows))
    both(lambda index: index.remove_document("b"))
    both(lambda index: index.add_document("c", "2", chunks_of("c", 12), vectors["d"][:12]))
    both(ChunkIndex.save)
    both(ChunkIndex.rebuild)
    for index in (plain, other):
        index.save()
        index.close()
    with open_index(tmp_path / "plain") as plain, open_index(tmp_path / "other") as other:
        assert other.is_saved
        assert (tmp_path / "other" / VECTORS).exists() == kind.startswith("faiss")
        if other._vectors.is_exact:
            assert_alike(answers(other, questions, 300), answers(plain, questions, 300))
        assert other.check() == []
        both(lambda index: index.add_document("g", "1", chunks_of("g", 9), rows_of(9) * 0 + vectors["a"][0]))
        both(lambda index: index.remove_document("a"))  # what was mapped is changed


@pytest.fixture(scope="module")
def shared(postgres: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ChunkIndex]]:
    """An index of each place that compares all vectors, empty."""
    pytest.importorskip("qdrant_client", reason="no qdrant-client: pip install 'ragblend[qdrant]'")
    folder = tmp_path_factory.mktemp("shared")
    places = {"faiss": "faiss", "qdrant": f"qdrant://{folder}/q", "pgvector": postgres}
    made = {
        name: open_index(folder / name, HashingEmbedder(4), create=True, vectors=where)
        for name, where in places.items()
    }
    yield made
    for index in made.values():
        index.close()


@given(
    documents=st.dictionaries(
        st.sampled_from("abcd"),
        st.lists(st.tuples(*[st.integers(-2, 2)] * 4), max_size=6),
        min_size=1,
    ),
    question=st.tuples(*[st.integers(-2, 2)] * 4),
    k=st.integers(1, 9),
)
@settings(max_examples=15)
def test_ties_and_zeros_come_out_the_same_everywhere(shared, documents, question, k):
    found = {}
    for name, index in shared.items():
        with index.holding():
            for source in index.sources():
                index.remove_document(source)
            for source, rows in documents.items():
                index.add_document(source, "1", chunks_of(source, len(rows)), np.array(rows).reshape(-1, 4))
        hits = index.search(np.array(question, np.float32), k)
        found[name] = {(hit.chunk.id, round(hit.score, 5)) for hit in hits}
        assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
    scores = {name: sorted(score for _, score in each) for name, each in found.items()}
    assert scores["qdrant"] == scores["pgvector"] == pytest.approx(scores["faiss"], abs=2e-5)
    assert found["qdrant"] == found["pgvector"]


# --- FAISS's other kinds ---


@pytest.mark.parametrize("kind", ["faiss:IVF8,Flat?nprobe=8", "faiss:IVF8,SQ8?nprobe=8", "faiss:HNSW16,SQ8"])
def test_what_has_to_be_trained_is_flat_until_there_is_enough_and_then_finds_most(kind, tmp_path):
    questions = rows_of(20)
    with open_index(tmp_path / "index", embedder(), create=True, vectors=kind) as index:
        index.add_document("a", "1", chunks_of("a", 20), rows_of(20))
        index.search(questions[0])
        assert index._vectors.is_exact
        index.add_document("b", "1", chunks_of("b", 1000), rows_of(1000))
        index.search(questions[0])
        assert not index._vectors.is_exact
    with open_index(tmp_path / "index") as index:
        assert not index._vectors.is_exact
        assert index.manifest.vectors == kind
        stored = {row.id: np.frombuffer(row.vector, "<f4") for row in index.rows(index.ids().tolist())}
        ids, matrix = np.array([*stored]), np.stack([*stored.values()])
        hits = 0
        for question in questions:
            best = ids[np.argsort(-(matrix @ question))[:10]]
            hits += len({*best.tolist()} & {int(hit.chunk.id, 16) - 2**63 for hit in index.search(question, 10)})
        assert hits / 200 > 0.8


def test_a_removed_chunk_is_not_found_in_a_graph_and_a_quarter_rebuilds_it(tmp_path):
    rows = rows_of(100)
    with open_index(tmp_path, embedder(), create=True, vectors="faiss:HNSW16") as index:
        for number in range(100):
            index.add_document(str(number), "1", chunks_of(str(number), 1), rows[number : number + 1])
        index.search(rows[0])
        for number in range(40):
            index.remove_document(str(number))
            found = index.search(rows[number], 10)
            assert len(found) == 10
            assert str(number) not in {hit.chunk.source for hit in found}
        assert index._vectors.faiss.ntotal < 100


def test_a_damaged_file_of_any_kind_is_made_again(tmp_path, caplog):
    with open_index(tmp_path, embedder(), create=True, vectors="faiss:HNSW16") as index:
        index.add_document("a", "1", chunks_of("a", 50), rows := rows_of(50))
    data = bytearray((tmp_path / VECTORS).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / VECTORS).write_bytes(data)
    with open_index(tmp_path) as index:
        assert index.search(rows[7], 1)[0].chunk.text == "a 7"
    assert "does not match its checksum" in caplog.text


# --- places outside ---


@pytest.mark.parametrize("kind", OUTSIDE)
def test_two_indexes_in_one_place_never_mix(kind, place, tmp_path):
    where, rows = place(kind), rows_of(20)
    for name in ("one", "two"):
        with open_index(tmp_path / name, embedder(), create=True, vectors=where) as index:
            index.add_document("same", "1", chunks_of("same", 20), rows)  # the same ids
            index.add_document(name, "1", chunks_of(name, 20), rows)
    with open_index(tmp_path / "one") as one:
        assert {hit.chunk.source for hit in one.search(rows[0], 100)} == {"same", "one"}
        one.remove_document("same")
    with open_index(tmp_path / "two") as two:
        assert two.check() == []
        assert len(two.search(rows[0], 100)) == 40


@pytest.mark.parametrize("kind", OUTSIDE)
def test_what_a_place_lost_is_put_there_again_and_what_it_has_too_much_goes(kind, place, tmp_path):
    where, rows = place(kind), rows_of(30)
    with open_index(tmp_path / "index", embedder(), create=True, vectors=where) as index:
        index.add_document("a", "1", chunks_of("a", 30), rows)
        wanted, outside, ids = answers(index, rows), index._vectors.place, index.ids()
        outside.remove(ids[:10])
        outside.put(np.array([1, 2]), np.array([3, 4]), rows[:2])
        outside.put(ids[10:11], np.array([99]), rows[:1])  # another row's vector, as a stale one would be
        problem = " ".join(index.check())
        assert "lacks 11 of 30 vectors, and holds 2 too many" in problem
    with open_index(tmp_path / "index") as index:
        assert index.check() == []
        assert answers(index, rows) == wanted


@pytest.mark.parametrize("kind", OUTSIDE)
def test_moving_takes_every_vector_along_and_leaves_none_behind(kind, place, tmp_path, caplog):
    where, rows, index_folder = place(kind), rows_of(25), tmp_path / "index"
    with open_index(index_folder, embedder(), create=True) as index:
        index.add_document("a", "1", chunks_of("a", 25), rows)
        wanted = answers(index, rows)
    with open_index(index_folder, vectors=where) as index:
        assert_alike(answers(index, rows), wanted)
        old = index._vectors.place
        assert old.count() == 25
        number = index.facts()["vectors_number"]
    with open_index(index_folder, vectors="faiss:HNSW16") as index:  # no password was given this time
        assert_alike(answers(index, rows), wanted)
    left = open_place(choose(where), number, DIM)
    assert (left.count(), left.state()) == (0, "")
    left.close()
    with open_index(index_folder, vectors="faiss") as index:
        assert answers(index, rows) == wanted


def test_a_reader_that_was_open_sees_what_another_process_committed(place, tmp_path):
    where, rows = place("pgvector"), rows_of(4)
    with open_index(tmp_path / "i", embedder(), create=True, vectors=where) as writer:
        writer.add_document("a", "1", chunks_of("a", 2), rows[:2])
        writer.save()
        with open_index(tmp_path / "i") as reader:
            writer.add_document("b", "1", chunks_of("b", 2), rows[2:])
            assert len(reader.search(rows[0], 9)) == 4
            writer.remove_document("a")
            assert {hit.chunk.source for hit in reader.search(rows[0], 9)} == {"b"}


def test_threads_share_an_index_in_postgres(place, tmp_path):
    rows, problems = rows_of(40), []
    with open_index(tmp_path, embedder(), create=True, vectors=place("pgvector")) as index:

        def work(name: str) -> None:
            try:
                for number in range(5):
                    index.add_document(f"{name}{number}", "1", chunks_of(f"{name}{number}", 2), rows[:2])
                    assert index.search(rows[0], 3)
            except BaseException as error:
                problems.append(error)

        threads = [threading.Thread(target=work, args=(name,)) for name in "xyz"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not problems
        assert len(index.search(rows[0], 100)) == 30


def test_a_copied_index_folder_gives_its_own_answers(place, tmp_path):
    rows = rows_of(6)
    with open_index(tmp_path / "one", embedder(), create=True, vectors=place("pgvector")) as index:
        index.add_document("a", "1", chunks_of("a", 3), rows[:3])
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    with open_index(tmp_path / "one") as one, open_index(tmp_path / "two") as two:
        one.add_document("b", "1", chunks_of("b", 3), rows[3:])
        two.remove_document("a")
        for _ in range(2):
            assert len(one.search(rows[0], 9)) == 6
            assert two.search(rows[0], 9) == []


# --- secrets, refusals ---


def test_a_password_is_in_no_file_no_message_and_no_log(place, tmp_path, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    url = place("pgvector")
    with open_index(tmp_path / "i", embedder(), create=True, vectors=url) as index:
        index.add_document("a", "1", chunks_of("a", 2), rows_of(2))
        shown = index.vectors_shown + repr(index._choice) + repr(Settings(vectors=url)) + repr(index.manifest)
    wrong = url.replace("hush%2F", "wrong%2F").replace("ragblend:", "nobody:")
    with pytest.raises(BackendUnreachableError) as caught:
        open_index(tmp_path / "i", vectors=wrong)
    for spelled in (PASSWORD, PASSWORD.replace("/", "%2F"), "wrong/hush", "wrong%2Fhush"):
        assert spelled not in shown + str(caught.value) + caplog.text + "".join(capfd.readouterr())
        assert not [path for path in (tmp_path / "i").iterdir() if spelled.encode() in path.read_bytes()]
    with open_index(tmp_path / "i") as index:  # a place that did not answer is not remembered
        assert (index.num_chunks, index.is_saved) == (2, True)


@pytest.mark.parametrize("kind", OUTSIDE)
def test_an_index_that_came_from_elsewhere_has_nobody_ask_its_place(kind, place, tmp_path, monkeypatch):
    where, rows = place(kind), rows_of(3)
    with open_index(tmp_path / "i", embedder(), create=True, vectors=where) as index:
        index.add_document("a", "1", chunks_of("a", 3), rows)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "another user"))
    monkeypatch.delenv("RAGBLEND_VECTORS", raising=False)
    with pytest.raises(UsageError, match="which you have not named") as caught:
        open_index(tmp_path / "i")
    assert PASSWORD not in str(caught.value)
    monkeypatch.setenv("RAGBLEND_VECTORS", where)
    with open_index(tmp_path / "i") as index:
        assert len(index.search(rows[0])) == 3
    monkeypatch.delenv("RAGBLEND_VECTORS")
    with open_index(tmp_path / "i", vectors="faiss") as index:
        assert len(index.search(rows[0])) == 3


def test_a_server_that_is_away_says_so_and_loses_nothing(tmp_path):
    pytest.importorskip("psycopg", reason="psycopg is not installed: pip install 'ragblend[pgvector]'")
    pytest.importorskip("qdrant_client", reason="no qdrant-client: pip install 'ragblend[qdrant]'")
    with open_index(tmp_path / "i", embedder(), create=True) as index:
        index.add_document("a", "1", chunks_of("a", 2), rows := rows_of(2))
    for url in ("postgresql://me:secret@127.0.0.1:9/db", "qdrant://secret@127.0.0.1:9/docs"):
        for folder, create in ((tmp_path / "i", False), (tmp_path / "new", True)):
            with pytest.raises(BackendUnreachableError, match="does not answer") as caught:
                open_index(folder, embedder(), create, vectors=url)
            assert "secret" not in str(caught.value)
    assert not (tmp_path / "new").exists()
    with open_index(tmp_path / "i") as index:
        assert len(index.search(rows[0])) == 2


def test_qdrant_in_a_folder_is_for_one_at_a_time(place, tmp_path):
    where = place("qdrant")
    with (
        open_index(tmp_path / "i", embedder(), create=True, vectors=where),
        pytest.raises(RagblendError, match="one at"),
    ):
        open_index(tmp_path / "j", embedder(), create=True, vectors=where)


@pytest.mark.parametrize(
    "text",
    ["", "hnsw", "faiss:NOPE", "faiss:IDMap,Flat", "faiss:IVF0,Flat", "faiss:Flat?nprobe=3", "faiss:HNSW32?x=1",
     "faiss:HNSW32?efSearch=-1", "qdrant://", "qdrant:///", "qdrant://host", "qdrant://host/a/b", "redis://me:secret@host",
     "postgresql://me:sec#ret@host/db", "postgresql://me:secret@host:x/db", "postgresql://h/db?index=ivf"],
)  # fmt: skip
def test_what_is_no_place_is_refused_without_its_secret_and_makes_no_folder(text, tmp_path):
    with pytest.raises(UsageError, match="choose") as caught:
        open_index(tmp_path / "i", embedder(), create=True, vectors=text)
    assert not {"secret", "sec#ret"} & set(str(caught.value).replace("@", ":").split(":"))
    assert not (tmp_path / "i").exists()


@given(user=st.text(min_size=1, max_size=8), password=st.text(min_size=3, max_size=12))
def test_any_password_leaves_what_is_remembered(user, password):
    try:
        url = f"postgresql://{quote(user, safe='')}:{quote(password, safe='')}@db.example:5432/rag?sslmode=require"
    except UnicodeEncodeError:
        return
    chosen = choose(url)
    assert chosen.remembered == f"postgresql://{quote(user, safe='')}@db.example:5432/rag?sslmode=require"
    assert choose(chosen.remembered).remembered == chosen.remembered
    assert quote(password, safe="") in chosen.target


def test_a_folders_file_may_not_say_where_vectors_go(tmp_path, caplog, monkeypatch):
    monkeypatch.delenv("RAGBLEND_VECTORS", raising=False)
    (tmp_path / "ragblend.toml").write_text('vectors = "postgresql://evil.example/db"\n')
    assert load_settings({}, tmp_path).vectors is None
    assert "your documents' vectors would go there" in caplog.text
    monkeypatch.setenv("RAGBLEND_VECTORS", "faiss:HNSW32")
    assert load_settings({}, tmp_path).vectors == "faiss:HNSW32"
