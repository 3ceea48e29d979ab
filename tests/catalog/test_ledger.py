from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest
from tier_support import run_threads

from ragblend.catalog.ledger import Ledger, open_ledger
from ragblend.catalog.schema import METADATA, SHARED_METADATA, DocumentFacts, DocumentKey
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.tiered import MemoryStore, TieredStore
from ragblend.errors import CorruptError, StoreMismatchError
from ragblend.files.store_folder import CATALOG_FILE

LONG = "This text is longer than an anchor, by far."
DOC = DocumentKey("notes", "doc")


@pytest.fixture
def ledger(any_place):
    return Ledger(any_place)


def test_add_counts_new_texts_and_compares_them_stripped(ledger):
    assert ledger.add_texts({DOC: {LONG: 0, f"  {LONG}\n": 0, "short": 0, "": 0, "  \n": 0}}) == 2
    assert ledger.add_texts({DOC: {LONG: 0}}) == 0
    assert list(ledger.texts()) == [LONG, "short"]


def test_processes_that_write_at_the_same_time_exclude_each_other(kept_place):
    """Each reads a number and writes the next one, 25 times: none is lost."""
    code = (
        "import sys; from ragblend.catalog.ledger import Ledger; from ragblend.catalog.schema import *\n"
        "ledger, document = Ledger(sys.argv[1]), DocumentKey('notes', 'doc')\n"
        "for _ in range(25):\n"
        "    with ledger.write_transaction():\n"
        "        number = int(ledger.facts_of(document).version or 0)\n"
        "        ledger.set_facts({document: DocumentFacts(str(number + 1))})\n"
        "        ledger.add_texts({document: dict.fromkeys([f'{sys.argv[2]} {_}', f'both {_}'], 0)})\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", code, str(kept_place), str(n)]) for n in range(3)]
    assert [process.wait(120) for process in running] == [0, 0, 0]
    with Ledger(kept_place) as ledger:
        assert (ledger.facts_of(DOC).version, len({*ledger.texts()})) == ("75", 100)
        assert ledger.find_problems() == []


def test_threads_share_a_registry(ledger):
    def work(n: int) -> None:
        for i in range(20):
            ledger.add_texts({DOC: {f"text {i} of thread {n}, long enough": 0}})
            assert f"text {i} of thread {n}, long enough" in ledger.texts()

    run_threads(4, work)
    assert len({*ledger.texts()}) == 80


def test_another_database_is_refused(tmp_path):
    with closing(sqlite3.connect(tmp_path / CATALOG_FILE, isolation_level=None)) as file:
        file.execute("CREATE TABLE recipes (name TEXT)")
        file.execute("PRAGMA user_version = 2")
    with pytest.raises(StoreMismatchError, match="choose another folder"):
        Ledger(tmp_path / CATALOG_FILE)


@pytest.mark.parametrize(
    "damage",
    [
        "PRAGMA user_version = 4",
        "PRAGMA user_version = 2",
        "UPDATE sqlite_master SET name = 'teXts' WHERE name = 'texts'",
    ],
)
def test_a_ledger_whose_version_or_table_was_changed_is_damaged(damage, tmp_path):
    with Ledger(tmp_path / CATALOG_FILE) as ledger:
        ledger.add_texts({DOC: {LONG: 0}})
    with closing(sqlite3.connect(tmp_path / CATALOG_FILE, isolation_level=None)) as file:
        file.execute("PRAGMA writable_schema = 1")
        file.execute(damage)
    with pytest.raises(CorruptError, match="verify --repair"):
        Ledger(tmp_path / CATALOG_FILE)


def test_a_failed_write_leaves_the_registry_usable(ledger):

    def failing() -> object:
        yield LONG
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ledger.add_texts({DOC: dict.fromkeys(failing(), 0)})
    assert ledger.add_texts({DOC: {LONG: 0}}) == 1


def test_format_of_the_file_is_stable(tmp_path):
    Ledger(tmp_path / "r").add_texts({DOC: {LONG: 0}})
    rows = sqlite3.connect(tmp_path / "r").execute("SELECT number, hex(key), text FROM texts").fetchall()
    assert rows == [(1, "510457CD45FEF69128E52BF5A14897BF", LONG)]


def test_only_the_owner_reads_the_file(tmp_path):
    with Ledger(tmp_path / CATALOG_FILE) as ledger:
        ledger.add_texts({DOC: {LONG: 0}})
        assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_registry_of_a_store(tmp_path):
    memory = MemoryStore(1 << 20)
    assert open_ledger(memory) is open_ledger(memory)
    assert open_ledger(memory) is not open_ledger(MemoryStore(1 << 20))
    ledger = open_ledger(TieredStore(MemoryStore(1 << 20), DiskStore(tmp_path)))
    assert ledger.key == tmp_path / CATALOG_FILE


def test_rows_of_two_processes_are_kept_if_one_opened_the_file_twice(kept_place):
    path = kept_place
    code = (
        "import sys; from ragblend.catalog.ledger import Ledger; from ragblend.catalog.schema import *\n"
        "Ledger(sys.argv[1]).add_texts({DocumentKey('notes', 'doc'): dict.fromkeys(sys.argv[2:], 0)})"
    )
    first, second = Ledger(path), Ledger(path)
    first.add_texts({DOC: {"of the first": 0}})
    second.close()
    for text in ("of another process", "of one after it"):
        subprocess.run([sys.executable, "-c", code, str(path), text], check=True)
        first.add_texts({DOC: {f"behind that {text}": 0}})
    first.close()
    assert len({*Ledger(path).texts()}) == 5


def test_entries_are_found_by_their_chunk_and_namespace(ledger):
    ledger.record_entry_chunk("alone", (1, 2), "")
    for _ in range(2):
        ledger.record_entry_chunk("neutral", (1, 2), "")
    ledger.record_entry_chunk("another", (3, 4), "")
    ledger.record_entry_chunk("theirs", (1, 2), "tenant")
    assert ledger.entries_of_chunks([(1, 2), (3, 4), (3,)], "") == [["alone", "neutral"], ["another"], []]
    assert ledger.entries_of_chunks([(1, 2)], "tenant") == [["theirs"]]
    ledger.remove_entries(["neutral", "unknown", ""])
    assert ledger.entries_of_chunks([(1, 2), (3, 4)], "") == [["alone"], ["another"]]


def test_a_document_has_one_version_and_one_source(ledger):
    assert ledger.facts_of(DOC) == ("", "")
    for facts in (DocumentFacts("1", "a.txt"), DocumentFacts("2"), DocumentFacts("", "b.txt"), DocumentFacts()):
        ledger.set_facts({DOC: facts})
        assert ledger.facts_of(DOC) == facts


def test_a_catalogue_has_at_most_nine_tables():
    assert len({*METADATA.tables, *SHARED_METADATA.tables}) <= 9
