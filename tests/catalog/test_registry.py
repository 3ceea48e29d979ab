from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest
from tier_support import run_threads

from ragblend.catalog.registry import ChunkRegistry, open_registry
from ragblend.catalog.schema import METADATA, SHARED_METADATA, DocumentFacts, DocumentKey
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.tiered import MemoryStore, TieredStore
from ragblend.errors import CorruptError, StoreMismatchError
from ragblend.files.store_folder import CATALOG_FILE

LONG = "This text is longer than an anchor, by far."
DOC, FIRST, SECOND = DocumentKey("notes", "doc"), DocumentKey("notes", "first"), DocumentKey("notes", "second")


@pytest.fixture
def registry(any_place):
    return ChunkRegistry(any_place)


def test_add_counts_new_texts_and_compares_them_stripped(registry):
    assert registry.add([LONG, f"  {LONG}\n", "short", "", "  \n"], DOC) == 2
    assert registry.add([LONG], DOC) == 0
    assert list(registry.texts()) == [LONG, "short"]
    assert len(registry) == 2
    assert f"\n{LONG} " in registry
    assert "other" not in registry


def test_a_text_stays_until_the_last_document_that_has_it_releases_it(registry):
    registry.add([LONG, "both", "index"], FIRST)
    registry.add([LONG, " both\n", "doc"], DOC)
    assert registry.remove_from_documents({DOC: []}, "") == []
    assert registry.texts_of(DOC) == {LONG, "both", "doc"}
    assert registry.remove_from_documents({FIRST: [LONG, "index", "unknown"]}, "") == ["index", "unknown"]
    assert set(registry.texts()) == {LONG, "both", "doc"}
    assert registry.remove_from_documents({DOC: [LONG, " doc"]}, "") == [LONG, "doc"]
    assert registry.remove_from_documents({FIRST: ["both"], DOC: ["both"]}, "") == ["both"]
    assert registry.remove_from_documents({FIRST: ["both"]}, "") == ["both"], "it has no owner"
    assert len(registry) == 0


def test_a_text_that_two_documents_release_together_is_released(registry):
    registry.add([LONG, "other"], FIRST)
    registry.add([LONG, "other"], SECOND)
    assert registry.remove_from_documents({FIRST: ["other"]}, "") == []
    assert registry.remove_from_documents({FIRST: [LONG], SECOND: [LONG]}, "") == [LONG]


def test_a_text_of_another_namespace_is_released_in_this_one(registry):
    mine, other = DocumentKey("notes", "1", "mine"), DocumentKey("notes", "1", "other")
    for name in (mine, other):
        registry.add([LONG, "short"], name)
        registry.add_ids([(LONG, range(9)), ("short", range(8))], "t", name.namespace)
    registry.add(["short"], DocumentKey("index:1"))
    assert registry.find_unowned_texts([LONG, "short"], "mine") == []
    assert registry.remove_from_documents({mine: [LONG, "short"]}, "mine") == [LONG], "an index has the other"
    assert registry.find_unowned_texts([LONG, "short"], "mine") == [LONG]
    assert registry.texts_of(other) == {LONG, "short"}
    assert [registry.has_ids(LONG, "t", namespace) for namespace in ("mine", "other")] == [False, True]
    assert registry.has_ids("short", "t", "mine")


def test_lone_surrogates_are_skipped_not_fatal(registry):
    assert registry.add(["\ud800 is half a character", LONG], DOC) == 1


def test_texts_survive_closing_and_reopening(tmp_path):
    path = tmp_path / "deep" / CATALOG_FILE
    with ChunkRegistry(path) as registry:
        registry.add([LONG], DOC)
    assert list(registry.texts()) == [LONG]  # using a closed one opens it again
    assert list(ChunkRegistry(path).texts()) == [LONG]


def test_another_connection_sees_additions_and_removals_at_once(kept_place):
    one, other = ChunkRegistry(kept_place), ChunkRegistry(kept_place)
    one.add(["first text of the first registry"], DOC)
    assert len(other) == 1
    other.add(["second text, of the other one"], DOC)
    one.remove_from_documents({DOC: ["first text of the first registry"]}, "")
    assert list(one.texts()) == list(other.texts()) == ["second text, of the other one"]


def test_processes_that_write_at_the_same_time_exclude_each_other(kept_place):
    """Each reads a number and writes the next one, 25 times: none is lost."""
    code = (
        "import sys; from ragblend.catalog.registry import ChunkRegistry; from ragblend.catalog.schema import *\n"
        "registry, document = ChunkRegistry(sys.argv[1]), DocumentKey('notes', 'doc')\n"
        "for _ in range(25):\n"
        "    with registry._write():\n"
        "        number = int(registry.facts_of(document).version or 0)\n"
        "        registry.set_facts({document: DocumentFacts(str(number + 1))})\n"
        "        registry.add([f'{sys.argv[2]} {_}', f'both {_}'], document)\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", code, str(kept_place), str(n)]) for n in range(3)]
    assert [process.wait(120) for process in running] == [0, 0, 0]
    with ChunkRegistry(kept_place) as registry:
        assert (registry.facts_of(DOC).version, len(registry)) == ("75", 100)
        assert registry.find_problems() == []


def test_threads_share_a_registry(registry):
    def work(n: int) -> None:
        for i in range(20):
            registry.add([f"text {i} of thread {n}, long enough"], DOC)
            assert f"text {i} of thread {n}, long enough" in registry

    run_threads(4, work)
    assert len(registry) == 80


def test_damaged_file_is_corrupt(tmp_path):
    path = tmp_path / "r"
    path.write_bytes(b"not a database at all, but long enough to be read as one" * 20)
    with pytest.raises(CorruptError, match=r"Repair it: ragblend verify --repair.*or delete "):
        ChunkRegistry(path)


def test_another_database_is_refused(tmp_path):
    with closing(sqlite3.connect(tmp_path / CATALOG_FILE, isolation_level=None)) as file:
        file.execute("CREATE TABLE recipes (name TEXT)")
        file.execute("PRAGMA user_version = 2")
    with pytest.raises(StoreMismatchError, match="choose another folder"):
        ChunkRegistry(tmp_path / CATALOG_FILE)


@pytest.mark.parametrize(
    "damage",
    [
        "PRAGMA user_version = 4",
        "PRAGMA user_version = 2",
        "UPDATE sqlite_master SET name = 'teXts' WHERE name = 'texts'",
    ],
)
def test_a_changed_version_or_table_is_damage_and_not_another_program(damage, tmp_path):
    with ChunkRegistry(tmp_path / CATALOG_FILE) as registry:
        registry.add([LONG], DOC)
    with closing(sqlite3.connect(tmp_path / CATALOG_FILE, isolation_level=None)) as file:
        file.execute("PRAGMA writable_schema = 1")
        file.execute(damage)
    with pytest.raises(CorruptError, match="verify --repair"):
        ChunkRegistry(tmp_path / CATALOG_FILE)


def test_a_failed_write_leaves_the_registry_usable(registry):

    def failing() -> object:
        yield LONG
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        registry.add(failing(), DOC)
    assert registry.add([LONG], DOC) == 1


def test_format_of_the_file_is_stable(tmp_path):
    ChunkRegistry(tmp_path / "r").add([LONG], DOC)
    rows = sqlite3.connect(tmp_path / "r").execute("SELECT number, hex(key), text FROM texts").fetchall()
    assert rows == [(1, "510457CD45FEF69128E52BF5A14897BF", LONG)]


def test_only_the_owner_reads_the_file(tmp_path):
    with ChunkRegistry(tmp_path / CATALOG_FILE) as registry:
        registry.add([LONG], DOC)
        assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_registry_of_a_store(tmp_path):
    memory = MemoryStore(1 << 20)
    assert open_registry(memory) is open_registry(memory)
    assert open_registry(memory) is not open_registry(MemoryStore(1 << 20))
    registry = open_registry(TieredStore(MemoryStore(1 << 20), DiskStore(tmp_path)))
    assert registry.key == tmp_path / CATALOG_FILE


def test_alternating_writes_of_two_processes_are_kept(kept_place):
    path = kept_place
    code = (
        "import sys; from ragblend.catalog.registry import ChunkRegistry; from ragblend.catalog.schema import *\n"
        "ChunkRegistry(sys.argv[1]).add(sys.argv[2:], DocumentKey('notes', 'doc'))"
    )
    first, second = ChunkRegistry(path), ChunkRegistry(path)
    first.add(["of the first"], DOC)
    second.close()
    for text in ("of another process", "of one after it"):
        subprocess.run([sys.executable, "-c", code, str(path), text], check=True)
        first.add([f"behind that {text}"], DOC)
    first.close()
    assert len(ChunkRegistry(path)) == 5


def test_entries_are_found_by_their_chunk_and_namespace(registry):
    registry.record_entry_chunk("alone", (1, 2), "")
    for _ in range(2):
        registry.record_entry_chunk("neutral", (1, 2), "")
    registry.record_entry_chunk("another", (3, 4), "")
    registry.record_entry_chunk("theirs", (1, 2), "tenant")
    assert registry.entries_of_chunks([(1, 2), (3, 4), (3,)], "") == [["alone", "neutral"], ["another"], []]
    assert registry.entries_of_chunks([(1, 2)], "tenant") == [["theirs"]]
    registry.remove_entries(["neutral", "unknown", ""])
    assert registry.entries_of_chunks([(1, 2), (3, 4)], "") == [["alone"], ["another"]]


def test_a_document_has_one_version_and_one_source(registry):
    assert registry.facts_of(DOC) == ("", "")
    for facts in (DocumentFacts("1", "a.txt"), DocumentFacts("2"), DocumentFacts("", "b.txt"), DocumentFacts()):
        registry.set_facts({DOC: facts})
        assert registry.facts_of(DOC) == facts


def test_a_catalogue_has_at_most_nine_tables():
    assert len({*METADATA.tables, *SHARED_METADATA.tables}) <= 9
