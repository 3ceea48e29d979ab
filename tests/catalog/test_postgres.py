"""A catalogue in a real PostgreSQL: what stops, refuses or slows the server down loses nothing and stops no request."""

from __future__ import annotations

import logging
import multiprocessing
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing

import psycopg
import pytest
from postgres import PASSWORD, fresh_schema, start_postgres
from tier_support import run_threads

from ragblend import Prompt, load_engine
from ragblend.catalog.database import resolve_catalog
from ragblend.catalog.ledger import Ledger
from ragblend.catalog.schema import SCHEMA_VERSION, DocumentKey
from ragblend.engine import matching
from ragblend.engine.matching import KnownChunks
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.vllm.config import ConnectorConfig
from ragblend.engine.vllm.scheduler_side.lookup import ChunkLookup
from ragblend.errors import (
    BackendUnreachableError,
    StoreFullError,
    StoreMismatchError,
    StoreNotWritableError,
    UsageError,
)
from ragblend.files.store_folder import CATALOG_FILE

DOC = DocumentKey("notes", "1")
IDS = tuple(range(100, 140))
PIECES = [PASSWORD, PASSWORD.replace("/", "%2F"), *PASSWORD.split("/")]


@pytest.fixture
def own_server():
    """A server that a test may stop."""
    with start_postgres() as server:
        yield server


def execute(url: str, *statements: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)


def write_and_interrupt(ledger: Ledger) -> None:
    with ledger.write_transaction():
        ledger.add_texts({DOC: {"b": 0}})
        raise KeyboardInterrupt


def refused(kind: type[BaseException], call: Callable[[], object], *words: str) -> str:
    """The message of the error that `call` raises, which names the words and no part of a password."""
    with pytest.raises(kind) as caught:
        call()
    chain, error = [], caught.value
    while error is not None:
        chain.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    shown = "\n".join(map(repr, chain))
    assert not [piece for piece in PIECES if piece in shown], shown
    assert all(word in str(caught.value) for word in words), str(caught.value)
    return str(caught.value)


def test_the_version_changes_with_every_commit_and_with_nothing_else(shared_catalog):
    one, other = Ledger(shared_catalog), Ledger(shared_catalog)
    versions = [one.change_counter()]
    for change in (
        lambda: other.add_texts({DOC: {"a": 0}}),
        lambda: other.add_ids([("a", IDS)], "t", ""),
        lambda: other.record_entry_chunk("0" * 32, IDS, ""),
        lambda: one.remove_texts({DOC: ["a"]}, ""),
    ):
        change()
        versions.append(one.change_counter())
        assert one.change_counter() == versions[-1]
    assert len({*versions}) == 5
    refused(KeyboardInterrupt, lambda: write_and_interrupt(other))
    assert (one.change_counter(), list(one.texts())) == (versions[-1], [])


def test_a_killed_writer_leaves_nothing_half_written_and_no_lock(shared_catalog):
    ledger = Ledger(shared_catalog)
    code = (
        "import sys, time; from ragblend.catalog.ledger import Ledger\n"
        "from ragblend.catalog.schema import DocumentKey\n"
        "with (r := Ledger(sys.argv[1])).write_transaction():\n"
        "    r.add_texts({DocumentKey('notes', '1'): {'half': 0}}); print('in', flush=True); time.sleep(60)\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, shared_catalog], stdout=subprocess.PIPE)
    assert writer.stdout.readline() == b"in\n"
    writer.kill()
    writer.wait()
    assert ledger.add_texts({DOC: {"whole": 0}}) == 1
    assert list(ledger.texts()) == ["whole"]


def test_a_forked_process_has_connections_of_its_own(shared_catalog):
    ledger = Ledger(shared_catalog)
    ledger.add_texts({DOC: {"parent": 0}})
    child = multiprocessing.get_context("fork").Process(target=ledger.add_texts, args=({DOC: {"child": 0}},))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    ledger.add_texts({DOC: {"parent again": 0}})
    assert list(ledger.texts()) == ["parent", "child", "parent again"]


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGQUIT, signal.SIGKILL])
def test_a_server_that_was_restarted_is_found_again_by_the_next_call(own_server, stop):
    ledger = Ledger(own_server.url)
    ledger.add_texts({DOC: {"before": 0}})
    own_server.stop(stop)
    for _ in range(2):
        refused(
            BackendUnreachableError,
            lambda: ledger.add_texts({DOC: {"during the outage": 0}}),
            "127.0.0.1",
            "/postgres",
            "refused",
        )
    own_server.start()
    assert ledger.add_texts({DOC: {"after": 0}}) == 1
    assert list(ledger.texts()) == ["before", "after"]


def test_restarts_under_use_lose_nothing_that_was_written(own_server):
    """Threads add numbered texts, and each again until it is written, while the server is killed five times."""
    ledger, stopped, failures = Ledger(own_server.url), threading.Event(), [0]
    done: list[str] = []

    def work(thread: int) -> None:
        number = 0
        while not stopped.is_set():
            text = f"text {number} of thread {thread}"
            try:
                ledger.add_texts({DocumentKey("notes", str(thread)): {text: 0}})
            except BackendUnreachableError:
                failures[0] += 1
                time.sleep(0.05)
            else:
                done.append(text)
                number += 1

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for kind in (signal.SIGINT, signal.SIGKILL, signal.SIGQUIT, signal.SIGKILL, signal.SIGINT):
        time.sleep(0.4)
        own_server.stop(kind)
        time.sleep(0.1)
        own_server.start()
    stopped.set()
    for thread in threads:
        thread.join()
    assert set(done) <= {*ledger.texts()}
    assert len({*ledger.texts()}) <= len(done) + 3, "one may be written whose answer was lost"
    assert failures[0] >= 5
    assert ledger.find_problems() == []
    print(f"{len(done)} texts written, {failures[0]} failed calls, 5 restarts, 0 lost")


def test_prompts_are_matched_again_after_an_outage_and_meanwhile_wait_for_nothing(own_server, caplog, monkeypatch):
    monkeypatch.setattr(matching, "_OUTAGE_PAUSE_S", 0.5)
    known = KnownChunks(Ledger(own_server.url), "t", "")
    known.add(["text"], lambda _: IDS)
    assert len(known.find_runs(IDS)) == 1
    own_server.stop(signal.SIGKILL)
    start_s = time.monotonic()
    assert all(known.find_runs(IDS) == [] and "text" not in known for _ in range(20))
    assert time.monotonic() - start_s < 0.4
    own_server.start()
    time.sleep(0.5)
    assert len(known.find_runs(IDS)) == 1
    assert "text" in known
    said = [record.getMessage() for record in caplog.records if record.name == matching.__name__]
    assert [message.partition(":")[0] for message in said] == [
        "no stored chunk is found, so prompts are prefilled without stored KV until the catalogue answers",
        "the catalogue answers again, so stored chunks are found in prompts",
    ]


def test_the_first_prompt_during_an_outage_is_prefilled_in_full(own_server, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(matching, "_OUTAGE_PAUSE_S", 0.5)
    text = "Zenco sells lamps in many shapes."
    prompt = Prompt.from_text(f"{text} What does Zenco sell?")
    with load_engine("demo", tmp_path, catalog=own_server.url) as engine:
        engine.precompute(text)
    with load_engine("demo", tmp_path, catalog=own_server.url) as engine:
        own_server.stop()
        outage = engine.generate(prompt, max_tokens=1).report
        assert (outage.num_chunk_hits, outage.num_reused_tokens) == (0, 0)
        (said,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert "postgresql://***@127.0.0.1" in said
        assert "Check that PostgreSQL runs there" in said
        own_server.start()
        time.sleep(0.5)
        assert engine.generate(prompt, max_tokens=1).report.num_chunk_hits == 1


def test_a_vllm_scheduler_started_during_an_outage_finds_chunks_after_it(own_server, tmp_path, monkeypatch):
    monkeypatch.setattr(matching, "_OUTAGE_PAUSE_S", 0.5)
    text = "Zenco sells lamps in many shapes."
    with load_engine("demo", tmp_path, catalog=own_server.url) as engine:
        engine.precompute(text)
        renderer, ids = engine.renderer, (*engine.renderer.chunk_ids(text), 1)
    disk = DiskStore(tmp_path, catalog=own_server.url)
    with closing(ChunkLookup(disk, ConnectorConfig(store=str(tmp_path)), "model", renderer)) as lookup:
        own_server.stop()
        assert lookup.candidate_keys(ids, "") == []
        own_server.start()
        time.sleep(0.5)
        assert len(lookup.candidate_keys(ids, "")) == 1


def test_a_silent_server_delays_one_prompt_by_a_second(own_server, caplog):
    known = KnownChunks(Ledger(own_server.url), "t", "")
    known.add(["text"], lambda _: IDS)
    assert len(known.find_runs(IDS)) == 1
    with own_server.frozen():
        start_s = time.monotonic()
        run_threads(8, lambda _: known.find_runs(IDS))
        first_s = time.monotonic() - start_s
        assert 0.9 < first_s < 2.0
        assert all(known.find_runs(IDS) == [] for _ in range(100))
        assert time.monotonic() - start_s < first_s + 0.2
    (said,) = [record.getMessage() for record in caplog.records if record.name == matching.__name__]
    assert "no answer within 1 s" in said
    ledger = Ledger(own_server.url)
    assert ledger.has_ids("text", "t", "")


def test_a_writer_that_does_not_end_is_reported(shared_catalog, monkeypatch):
    from ragblend.catalog import postgres

    monkeypatch.setattr(postgres, "LOCK_TIMEOUT_S", 0.5)
    holder, ledger = Ledger(shared_catalog), Ledger(shared_catalog)
    for engine in postgres._ENGINES:
        engine.dispose()  # connections know their time limit
    with holder.write_transaction():
        refused(
            BackendUnreachableError,
            lambda: ledger.add_texts({DOC: {"text": 0}}),
            "another process is writing the catalogue",
        )
        assert not {*ledger.texts()}, "reads do not wait"
    assert ledger.add_texts({DOC: {"text": 0}}) == 1


def test_who_may_not_open_it_is_told_what_to_correct(postgres):
    wrong = postgres.replace("hush%2Fhush", "other%2Fsecret")
    PIECES.extend(["other/secret", "other%2Fsecret", "secret"])
    text = refused(BackendUnreachableError, lambda: Ledger(wrong), "rejects the connection", "password")
    assert "postgresql://***@127.0.0.1" in text
    missing = postgres.removesuffix("/postgres") + "/nowhere"
    refused(BackendUnreachableError, lambda: Ledger(missing), "rejects the connection", "nowhere")
    unused_port = "postgresql://user:hush%2Fhush@127.0.0.1:1/postgres"
    refused(BackendUnreachableError, lambda: Ledger(unused_port), "does not answer", "refused", "127.0.0.1:1")
    unknown = "postgresql://user:hush%2Fhush@nowhere.invalid/postgres"
    refused(BackendUnreachableError, lambda: Ledger(unknown), "nowhere.invalid")
    refused(UsageError, lambda: Ledger(postgres + "?foo=hush"), "cannot be read", "postgresql://USER")


def test_errors_tell_a_read_only_user_from_a_full_database(own_server):
    ledger = Ledger(own_server.url)
    ledger.add_texts({DOC: {"text": 0}})
    execute(
        own_server.url,
        f"CREATE ROLE reader LOGIN PASSWORD '{PASSWORD}'",
        "GRANT SELECT ON ALL TABLES IN SCHEMA public TO reader",
    )
    reader = Ledger(own_server.url.replace("://ragblend:", "://reader:"))
    assert list(reader.texts()) == ["text"]
    refused(StoreNotWritableError, lambda: reader.add_texts({DOC: {"more": 0}}), "cannot be written")
    execute(own_server.url, "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE "
        "'could not extend file: No space left on device' USING ERRCODE = '53100'; END $$",
        "CREATE TRIGGER full_disk BEFORE INSERT ON texts EXECUTE FUNCTION full_disk()")  # fmt: skip
    refused(StoreFullError, lambda: ledger.add_texts({DOC: {"more": 0}}), "has no free space", "No space left")
    execute(own_server.url, "DROP TRIGGER full_disk ON texts")
    assert ledger.add_texts({DOC: {"more": 0}}) == 1


def test_all_connections_taken_is_named(own_server):
    execute(
        own_server.url,
        "CREATE ROLE one LOGIN PASSWORD 'hush/hush' CONNECTION LIMIT 1",
        "GRANT ALL ON SCHEMA public TO one",
    )
    url = own_server.url.replace("://ragblend:", "://one:")
    with psycopg.connect(url):
        refused(BackendUnreachableError, lambda: Ledger(url), "rejects the connection", "max_connections")


def test_tables_of_another_version_or_of_others_are_refused(postgres):
    with fresh_schema(postgres) as url:
        Ledger(url)
        execute(url, "UPDATE facts SET value = '0' WHERE name = 'schema'")
        from ragblend.catalog import postgres as dialect

        refused(StoreMismatchError, lambda: Ledger(url), "a catalogue of version 0")
        made = f"UPDATE facts SET value = '{SCHEMA_VERSION}' WHERE name = 'schema'"
        execute(url, made, "DROP TABLE texts CASCADE")
        refused(StoreMismatchError, lambda: Ledger(url).text_keys(), "not a catalogue, its tables differ")
        assert dialect.is_postgres_url(url)
    refused(StoreNotWritableError, lambda: Ledger(f"{postgres}?options=-csearch_path%3Dnone"), "schema")


def test_two_schemas_of_a_database_are_two_catalogues(postgres):
    with fresh_schema(postgres) as one, fresh_schema(postgres) as other:
        Ledger(one).add_texts({DOC: {"of one": 0}})
        Ledger(other).add_texts({DOC: {"of the other": 0}})
        assert list(Ledger(one).texts()) == ["of one"]
        assert list(Ledger(other).texts()) == ["of the other"]


def test_a_catalogue_has_the_documents_of_one_model_unless_another_is_added(shared_catalog, tmp_path):
    with load_engine("demo", tmp_path / "one", catalog=shared_catalog):
        pass
    with Ledger(shared_catalog) as ledger:
        refused(StoreMismatchError, lambda: ledger.add_model("f" * 8, "other", new_model=False), "demo", "other")
        ledger.add_model("f" * 8, "other", new_model=True)
        ledger.add_model("f" * 8, "other", new_model=False)
    with load_engine("demo", tmp_path / "two", catalog=shared_catalog) as engine:
        engine.precompute("A text.")
        assert list(engine.known_chunks._ledger.fingerprints_by_key()) == []
    assert not (tmp_path / "two" / CATALOG_FILE).exists()


def test_a_catalogue_is_where_settings_say(tmp_path, monkeypatch):
    assert resolve_catalog(tmp_path) == tmp_path / CATALOG_FILE
    assert resolve_catalog(tmp_path, "postgresql://a@b/c") == "postgresql://a@b/c"
    monkeypatch.setenv("RAGBLEND_CATALOG", "postgres://d@e/f")
    assert resolve_catalog(tmp_path) == "postgres://d@e/f"
    monkeypatch.setenv("RAGBLEND_CATALOG", "mysql://d:hush@e/f")
    with pytest.raises(UsageError, match=r"catalog is 'mysql://.*choose postgresql://") as caught:
        resolve_catalog(tmp_path)
    assert "hush" not in str(caught.value)


def test_a_text_that_differs_from_its_key_is_found(shared_catalog):
    ledger = Ledger(shared_catalog)
    ledger.add_texts({DOC: {"text": 0}})
    execute(shared_catalog, "UPDATE texts SET text = 'another'")
    assert [problem.rpartition(": ")[2] for problem in ledger.find_problems()] == ["1 texts differ from their keys"]
