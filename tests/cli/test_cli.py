"""The command line, run in process: output on stdout, log on stderr, one JSON object, the right exit codes."""

import io
import json
import logging
import os
import re
import shlex
import shutil
import socket
import sqlite3
import subprocess
import sys
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from commands import INGEST, PLACE
from langchain_core.documents import Document
from servers import RedisServer, running_redis

from ragblend import __version__, load_engine
from ragblend.cli import app as cli
from ragblend.cli import printing
from ragblend.cli.options import parse_workers
from ragblend.cli.session import make_terminal_handler
from ragblend.demo import WEIGHTS
from ragblend.errors import UsageError
from ragblend.precompute import precompute_documents

MODES = ("full", "prefix", "reuse", "blend")
SHORT = ("-k", "4", "--max-tokens", "8")


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize(
    ("logger", "level", "quiet"),
    [
        ("ragblend.index", logging.WARNING, True),
        ("bitsandbytes.backends.cpu.ops", logging.WARNING, False),
        ("bitsandbytes.backends.cpu.ops", logging.ERROR, True),
    ],
)
def test_warnings_of_other_packages_are_written_with_verbose_only(logger, level, quiet, verbose):
    record = logging.LogRecord(logger, level, "file.py", 1, "a line", None, None)
    assert bool(make_terminal_handler(verbose).filter(record)) == (quiet or verbose)


@pytest.fixture(scope="module")
def questions(ingested):
    return [json.loads(line) for line in (ingested / "docs" / "questions.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("mode", MODES)
def test_ask_answers_in_every_mode_with_the_documented_json(run, questions, mode):
    answer = run.facts("ask", questions[0]["question"], "--mode", mode, *SHORT, *PLACE)
    assert answer["schema_version"] == 1
    assert answer["mode"] == mode
    assert answer["answer"]
    assert {"source", "start", "end", "text"} <= set(answer["sources"][0])
    names = "ttft_s load_s fuse_s prompt_tokens num_chunks num_chunk_hits num_reused_tokens num_recomputed_tokens "
    names += "charged_budget charged_budget_32 rule mode"
    assert set(names.split()) <= set(answer["report"])


def test_ask_streams_the_same_answer_and_lists_sources(run, questions, monkeypatch):
    question = questions[0]["question"]
    plain = run("ask", question, "-k", "2", "--max-tokens", "8", *PLACE)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    streamed = run("ask", question, "-k", "2", "--max-tokens", "8", "--show-sources", *PLACE)
    assert streamed[1].splitlines()[0] == plain[1].strip()
    assert streamed[1].count(".md") == 2
    assert "chunks from the store" in streamed[2]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_ask_streams_in_a_terminal(run, questions, monkeypatch, is_terminal):
    pieces = []
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    monkeypatch.setattr("builtins.print", lambda *text, end="\n", **more: pieces.append(end))
    run("ask", questions[0]["question"], "-k", "2", "--max-tokens", "8", *PLACE)
    assert ("" in pieces) is is_terminal


def test_search_and_stats_describe_the_index(run, questions):
    assert len(run.facts("search", questions[0]["question"], "-k", "3", "--store", "s")["sources"]) == 3
    facts = run.facts("stats", *PLACE)
    assert (facts["num_documents"], facts["tokenizer"]) == (4, "demo")
    assert facts["num_stored_kv"] == facts["num_chunks"]


@pytest.mark.parametrize("flags", [("-k", "2", *PLACE), ("--demo",)], ids=["own corpus", "demo"])
def test_chat_answers_every_line_until_an_empty_one(run, questions, monkeypatch, flags):
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(item["question"] for item in questions[:3]) + "\n\n"))
    code, out, err = run("chat", *flags, "--max-tokens", "8")
    assert code == 0
    assert len([line for line in out.splitlines() if line.strip()]) == 3
    assert err.count("chunks from the store") == 3


@pytest.mark.parametrize("condense", [None, "--condense", "--no-condense"])
def test_chat_searches_for_what_a_follow_up_means_and_shows_it(run, questions, monkeypatch, condense):
    """The embedded model cannot rewrite questions: it does so with --condense only, and its text is searched for."""
    asked = [questions[0]["question"], "And where is that?"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(asked) + "\n\n"))
    flags = [condense] if condense else []
    code, out, err = run("chat", "-k", "2", "--max-tokens", "8", "--show-sources", *flags, *PLACE)
    assert code == 0
    shown = [line.removeprefix("searching for: ") for line in err.splitlines() if line.startswith("searching for: ")]
    assert len(shown) == (condense == "--condense")
    assert ("cannot rewrite" in err) == (condense is None)
    searched = shown[0] if shown else asked[1]
    found = run("search", searched, "-k", "2", "--store", "s")[1]
    assert found.strip() in out


def test_full_prefill_beside_requests_is_counted_by_ask_and_chat(run, questions, monkeypatch):
    question = questions[0]["question"]
    common = ("-k", "3", "--max-tokens", "8", *PLACE)
    monkeypatch.setenv("RAGBLEND_SHADOW", "1")
    code, out, err = run("ask", question, "--json", *common)
    monkeypatch.delenv("RAGBLEND_SHADOW")
    found = json.loads(out)
    full = run.facts("ask", question, "--mode", "full", *common)
    assert code == 0
    assert found["report"]["shadow"]["answers_identical"] == (found["answer"] == full["answer"])
    assert "full prefill also ran for 1 of 1 answers" in err
    assert run.facts("ask", question, *common)["report"]["shadow"] is None
    monkeypatch.setenv("RAGBLEND_SHADOW", "1.0")
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(item["question"] for item in questions[:2]) + "\n\n"))
    code, _, err = run("chat", *common)
    assert code == 0
    assert "full prefill also ran for 2 of 2 answers: first token the same in" in err.splitlines()[-1]


def test_precompute_fills_the_store_for_another_dtype(run, monkeypatch):
    with monkeypatch.context() as changed:
        changed.setenv("RAGBLEND_DTYPE", "bfloat16")
        code, _, err = run("ask", "Who?", *PLACE)
    assert code == 1
    assert "ragblend precompute --model demo" in err
    assert run.facts("precompute", "--dtype", "bfloat16", *PLACE)["num_new_kv"] > 0
    monkeypatch.setenv("RAGBLEND_DTYPE", "bfloat16")
    assert run.facts("ask", "Who?", "--max-tokens", "2", *PLACE)["report"]["num_chunk_hits"] > 0


def test_precompute_names_the_chunks_beyond_the_models_context_length(run, home):
    """Exit code 6, as of an ingestion that left a file out; the other chunks are stored."""
    shorter = Path(shutil.copytree(WEIGHTS, home / "shorter"))
    config = json.loads((shorter / "config.json").read_text())
    (shorter / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 70}))
    facts = run.facts("precompute", "--model", str(shorter), "--context", "none", *PLACE, code=6)
    assert 0 < facts["num_new_kv"] < facts["num_chunks"]
    assert all("reads 70" in failure["reason"] for failure in facts["failures"])
    assert len(facts["failures"]) == facts["num_chunks"] - facts["num_new_kv"]


@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        (("ask", "Who?", "--device", "cpu"), "RAGBLEND_DEVICE=..., or device in ragblend.toml"),
        (("chat", "--trust-remote-code"), "RAGBLEND_TRUST_REMOTE_CODE="),
        (("search", "Who?", "--embedder", "minilm"), "RAGBLEND_EMBEDDER="),
        (("remove", "a.md", "--namespace", "mine"), "RAGBLEND_NAMESPACE="),
        (("serve", "demo", "--kv-dtype=int8", "--dry-run"), "RAGBLEND_KV_DTYPE="),
    ],
)
def test_a_flag_that_a_command_lacks_names_the_variable_of_its_setting(run, arguments, setting):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert setting in " ".join(err.split())
    assert "Traceback" not in err


def test_an_error_names_the_variable_of_a_setting_without_a_flag(run, monkeypatch):
    code, _, err = run("search", "Who?", *PLACE)
    assert code == 0, err
    monkeypatch.setenv("RAGBLEND_EMBEDDER", "other/embedder")
    code, _, err = run("search", "Who?", *PLACE)
    assert code != 0
    assert "--embedder" not in err
    assert "RAGBLEND_EMBEDDER" in err


@pytest.mark.parametrize(
    ("text", "expected"), [("4", (4, False)), ("ray:64", (64, True)), ("0", None), ("ray:", None), ("dask:2", None)]
)
def test_workers_are_a_number_here_or_on_a_ray_cluster(text, expected):
    if expected is None:
        with pytest.raises(
            UsageError, match=f"--workers is '{text}'; choose a number of processes, such as 4, or ray:4"
        ):
            parse_workers(text)
    else:
        assert parse_workers(text) == expected


def test_verify_repairs_what_it_finds_damaged(run, home):
    assert run("verify", *PLACE)[0] == 0
    path = sorted((home / "s").glob("kv/??/*.safetensors"))[0]
    broken = bytearray(path.read_bytes())
    broken[-1] ^= 1
    path.write_bytes(broken)
    report = run.facts("verify", *PLACE, code=4)
    assert (report["damaged"], list(report["damaged_keys"])) == (1, [path.stem])
    assert report["checked"] > 1
    assert run("verify", "--repair", *PLACE)[0] == 0
    assert run.facts("verify", *PLACE)["damaged"] == 0


@pytest.mark.parametrize(
    "damage",
    [
        ("PRAGMA writable_schema = 1", "DELETE FROM sqlite_master WHERE name = 'chunks_by_text'"),
        ("UPDATE entries SET key = '../' || key WHERE key = (SELECT min(key) FROM entries)",),
    ],
    ids=["structure", "key"],
)
def test_verify_repairs_a_damaged_catalogue_and_every_text_is_there_again(run, home, damage):
    path = home / "s" / "catalog.sqlite"

    def rows():
        with closing(sqlite3.connect(path)) as file:
            columns = (
                "key, text FROM texts",
                "key FROM chunks",
                "key, fingerprint FROM entries",
                "key, ids FROM token_ids",
            )
            return [sorted(file.execute(f"SELECT {each}")) for each in columns]

    whole = rows()
    with closing(sqlite3.connect(path, isolation_level=None)) as file:
        for statement in damage:
            file.execute(statement)
    assert list(run.facts("verify", *PLACE, code=4)["damaged_files"]) == ["catalog.sqlite"]
    code, _, err = run("verify", "--repair", *PLACE)
    assert (code, "ingest the documents again" in err) == (3, True)
    assert run.facts(*INGEST, *PLACE)["num_new_kv"] == 0
    assert run("verify", *PLACE)[0] == 0
    assert rows() == whole


def test_remove_and_gc_drop_kv(run, home):
    sources = run.facts("stats", *PLACE)["sources"]
    assert run.facts("remove", sources[-1], *PLACE)["num_kv"] > 0
    before = run.facts("stats", *PLACE)["num_stored_kv"]
    assert run.facts("gc", "--max-size", "100KiB", "--dry-run", *PLACE)["evicted"]
    assert run.facts("stats", *PLACE)["num_stored_kv"] == before
    run("gc", "--orphans", *PLACE)
    assert run.facts("verify", *PLACE)["orphans"] == 0
    assert run(*INGEST, *PLACE)[0] == 0


def test_what_an_ingestion_evicts_is_in_its_report_the_log_and_stats(run, monkeypatch, caplog):
    options = ("--store", "small")
    monkeypatch.setenv("RAGBLEND_DISK_GIB", "0.0005")
    report = run.facts(*INGEST, *options)
    assert report["num_evicted_kv"] > 0
    facts = run.facts("stats", *options)
    assert facts["num_evicted_kv"] == report["num_evicted_kv"] == report["num_new_kv"] - facts["num_stored_kv"]
    assert caplog.text.count("has reached its budget of") == 1
    assert f"{report['num_evicted_kv']} ingested KV caches evicted" in run("stats", *options)[1]


def test_a_remote_tier_answers_without_a_local_store(run, tmp_path, questions):
    remote = ["--remote", f"file://{tmp_path}/shared"]
    place = ["--store", str(tmp_path / "s")]
    assert run(*INGEST, *place, *remote)[0] == 0
    stats = run.facts("stats", *place, *remote)
    assert stats["remote"]["reachable"]
    assert stats["remote"]["num_stored_kv"] == stats["num_stored_kv"] > 0
    assert stats["remote"]["store_bytes"] == stats["store_bytes"]
    assert "answers in" in run("stats", *place, *remote)[1]
    checks = run.facts("doctor", *place, *remote)["checks"]
    assert [check["ok"] for check in checks if check["name"] == "remote"] == [True]
    assert run("gc", "--max-size", "0", *place)[0] == 0
    question = questions[0]["question"]
    assert run.facts("ask", question, "-k", "4", "--max-tokens", "8", *place, *remote)["report"]["num_chunk_hits"] == 4


@pytest.mark.slow
def test_ask_with_another_system_text_prints_the_command_that_fixes_it(run, home, questions, caplog):
    system = ["--system", "Answer in one word; don't explain."]
    ask = ["ask", questions[0]["question"], "-k", "3", "--max-tokens", "8", *PLACE, *system]
    command = [sys.executable, "-m", "ragblend", *ask, "--json"]
    path = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[2])}
    shown = subprocess.run(command, cwd=home, env=path, capture_output=True, text=True, check=True)
    assert json.loads(shown.stdout)["report"]["num_chunk_hits"] == 0
    (line,) = (line for line in shown.stderr.splitlines() if line.startswith("WARNING"))
    assert "the store holds KV after other prefixes, none after this one" in line
    command = shlex.split(line[line.index("ragblend precompute") : line.index(", or from Python")])
    assert run(*command[1:])[0] == 0
    assert run.facts(*ask)["report"]["num_chunk_hits"] == 3
    assert not caplog.records


def test_doctor_names_an_unreachable_remote_tier_and_answers_continue(run, questions):
    with socket.socket() as taken:  # bound, not listening: no server answers
        taken.bind(("127.0.0.1", 0))
        remote = ["--remote", f"redis://:geheim@127.0.0.1:{taken.getsockname()[1]}/0"]
        question = questions[0]["question"]
        assert run.facts("ask", question, *SHORT, *PLACE, *remote)["report"]["num_chunk_hits"] == 4
        code, out, _ = run("doctor", *PLACE, *remote)
        assert code == 1
        assert "NO  remote" in out
        assert "geheim" not in out
        assert "not reachable" in run("stats", *PLACE, *remote)[1]


def test_push_fills_a_remote_tier_from_a_store_that_was_there_before(run, tmp_path):
    remote = ["--remote", f"file://{tmp_path}/shared"]
    num_stored = run.facts("stats", *PLACE)["num_stored_kv"]
    for expected in ((num_stored, 0), (0, num_stored)):
        facts = run.facts("push", "--store", "s", *remote)
        assert (facts["num_sent"], facts["num_known"], facts["num_dropped"]) == (*expected, 0)
    assert run.facts("stats", *PLACE, *remote)["remote"]["num_stored_kv"] == num_stored
    assert run("push", "--store", "s")[0] == 2
    assert run("push", "--store", "s", "--remote", "redis://127.0.0.1:1/0")[0] == 5


@pytest.mark.slow
def test_entries_that_could_not_be_uploaded_are_reported_and_pushed_later(run, tmp_path):
    server = RedisServer(tmp_path)
    place, remote = ["--store", str(tmp_path / "s")], ["--remote", server.url]
    code, out, _ = run(*INGEST, *place, *remote)
    assert code == 5
    assert f"send them: ragblend push --remote {server.url}" in out
    server.start()
    try:
        stats = run.facts("stats", *place, *remote)
        assert stats["remote"]["num_missing"] == stats["num_stored_kv"] > 0
        assert f"ragblend push --remote {server.url}" in run("stats", *place, *remote)[1]
        assert run("push", *place, *remote)[0] == 0
        assert run.facts("stats", *place, *remote)["remote"]["num_missing"] == 0
    finally:
        server.kill()


def test_a_push_to_a_full_remote_names_the_reason(run, tmp_path):
    for server in running_redis(tmp_path, "--maxmemory", "1", "--maxmemory-policy", "noeviction"):
        code, out, _ = run("push", "--store", "s", "--remote", server.url)
        assert (code, out[:16]) == (1, "0 KV caches sent")  # it answers: not 5
        assert "allkeys-lru" in out


@pytest.mark.parametrize(
    ("disk_gib", "limit", "said"),
    [
        (None, None, "half of the free space"),
        ("3", 3 << 30, "3.0 GiB"),
        ("0", None, "without a limit"),
    ],
)
def test_stats_and_doctor_report_the_limit_in_effect(run, monkeypatch, disk_gib, limit, said):
    if disk_gib is not None:
        monkeypatch.setenv("RAGBLEND_DISK_GIB", disk_gib)
    stats = run.facts("stats", *PLACE)
    assert stats["disk_gib"] == (float(disk_gib) if disk_gib else "auto")
    if disk_gib is None:
        half = (shutil.disk_usage(PLACE[1]).free + stats["store_bytes"]) / 2
        assert stats["limit_bytes"] == pytest.approx(half, rel=0.05)
    else:
        assert stats["limit_bytes"] == limit
    assert ("limit: none" if disk_gib == "0" else said) in run("stats", *PLACE)[1]
    checks = run.facts("doctor", *PLACE)["checks"]
    assert said in next(check["finding"] for check in checks if check["name"] == "store")


def test_doctor_names_what_is_missing_and_the_fix(run):
    checks = {check["name"]: check for check in run.facts("doctor", *PLACE)["checks"]}
    assert checks["model"]["ok"]
    assert "LlamaForCausalLM" in checks["model"]["finding"]
    code, out, _ = run("doctor", "--model", "./nowhere", *PLACE)
    assert code == 1
    assert "NO  model" in out
    assert "to fix, model: choose another --model" in out


@pytest.fixture
def docs(run, tmp_path, monkeypatch):
    """A separate working folder, with documents for every way to name one."""
    folder = tmp_path / "work" / "docs"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.md").write_text("Alice Kern works for Nexon.")
    (folder / "r.jsonl").write_text('"Bob Fox lives in Norburg."\n"Tara Kern sings."\n')
    (folder / "sub" / "b.md").write_text("James Bell plays chess.")
    (folder / "logo.png").write_bytes(bytes(range(256)))
    monkeypatch.chdir(folder.parent)
    return folder


def test_a_folder_ingested_again_from_elsewhere_is_followed_and_deletions_are_listed(docs, run, monkeypatch):
    place = ["--store", str(docs.parent / "s")]
    code, out, _ = run("ingest", ".", "--model", "demo", "--embedder", "hashing", *place)
    assert (code, "1 file skipped: docs/logo.png is a picture" in out) == (0, True)
    (docs / "a.md").unlink()
    (docs / "r.jsonl").write_text('"Bob Fox lives in Norburg."\n')
    monkeypatch.chdir(docs / "sub")
    assert run.facts("ingest", "..", "--keep-missing", *place)["removed"] == []
    code, out, _ = run("ingest", "..", *place)
    assert code == 0
    assert f"gone: {docs}/r.jsonl#1, {docs}/a.md" in out
    assert "2 KV caches of changed or removed documents removed" in out
    stats = run.facts("stats", *place)
    assert stats["sources"] == [f"{docs}/r.jsonl#0", f"{docs}/sub/b.md"]
    assert stats["num_stored_kv"] == 2
    monkeypatch.chdir(docs.parent)
    (docs / "sub" / "b.md").rename(docs / "c.md")
    code, out, _ = run("ingest", "docs", *place)
    assert (code, "renamed: docs/sub/b.md -> docs/c.md\n" in out, "gone" in out) == (0, True, False)
    (docs / "c.md").rename(docs / "sub" / "b.md")
    run("ingest", "docs", *place)
    assert "  docs/r.jsonl#0\n" in run("stats", *place)[1]
    assert "docs/sub/b.md, characters 0-23" in run("search", "Who plays chess?", "--store", "s")[1]


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("docs", []),
        ("./docs/sub/", ["a.md", "r.jsonl#0", "r.jsonl#1"]),
        ("docs/r.jsonl", ["a.md", "sub/b.md"]),
        ("docs/r.jsonl#1", ["a.md", "r.jsonl#0", "sub/b.md"]),
        ("{docs}/a.md", ["r.jsonl#0", "r.jsonl#1", "sub/b.md"]),
        ("docs/sub/../a.md", ["r.jsonl#0", "r.jsonl#1", "sub/b.md"]),
    ],
)
def test_remove_takes_a_file_a_folder_or_a_record(docs, run, name, left):
    name = name.format(docs=docs)
    assert run("ingest", "docs", "--model", "demo", "--embedder", "hashing", *PLACE)[0] == 0
    every = run.facts("stats", *PLACE)["sources"]
    named = [source for source in every if source.removeprefix(f"{docs}/") not in left]
    assert run.facts("remove", name, *PLACE)["sources"] == named
    stats = run.facts("stats", *PLACE)
    assert stats["sources"] == [f"{docs}/{name}" for name in left]
    assert stats["num_stored_kv"] == len(left)


def test_commands_see_what_frameworks_have_added(home, run, tmp_path):
    place = ("--store", str(tmp_path / "added"))
    with load_engine("demo", place[1]) as engine:
        texts = {"1": "Alice Kern works for Nexon.", "2": "Bob Stahl lives in Wesstad."}
        documents = [Document(text, id=name) for name, text in texts.items()]
        precompute_documents(documents, engine, collection="people")
        precompute_documents(documents[:1], engine, collection="staff")
    facts = run.facts("stats", *place)
    assert facts["collections"] == {
        "people": {"num_documents": 2, "num_chunks": 2},
        "staff": {"num_documents": 1, "num_chunks": 1},
    }
    assert (facts["num_documents"], facts["embedder"], facts["num_stored_kv"]) == (0, None, 2)
    assert "collection people: 2 documents, 2 chunks" in run("stats", *place)[1]
    explained = run.facts("explain", "Where does Bob Stahl live?", "-k", "2", "--max-tokens", "2", *place)
    assert {each["source"] for each in explained["sources"]} == {"people/1", "people/2"}
    assert run("remove", "1", *place)[0] == 2, "two collections have it"
    code, _, said = run("remove", "nosuch", *place)
    assert (code, "has no document 'nosuch'; list them: ragblend documents" in said) == (3, True)
    assert run.facts("remove", "staff/1", *place)["num_kv"] == 0
    assert run.facts("remove", "people", *place)["num_kv"] == 2
    assert run("stats", *place)[0] == 3


def test_an_unknown_document_is_refused_before_the_model_is_loaded(run, monkeypatch):
    def load(*arguments, **keywords):
        raise AssertionError("the model is loaded")

    monkeypatch.setattr("ragblend.engine.load.load_engine", load)
    code, _, err = run("remove", "nosuch.md", *PLACE)
    assert (code, "the index has no document 'nosuch.md'" in err) == (3, True)
    code, _, err = run("remove", "nosuch.md", "--store", "gone")
    assert (code, "gone" in err) == (3, True)


def test_remove_counts_both_variants_and_leaves_those_of_other_documents(docs, run):
    ingest = ("ingest", "docs", "--model", "demo", "--embedder", "hashing", "--context", "neutral", *PLACE)
    assert run(*ingest)[0] == 0
    code, out, _ = run("remove", "docs/a.md", *PLACE)
    assert (code, "1 chunk and 2 KV caches removed\n" in out) == (0, True)
    assert "1 removed file is still on disk: the next `ragblend ingest` adds it again" in out
    assert run.facts("precompute", *PLACE)["num_new_kv"] == 0
    (docs / "a.md").unlink()
    assert run.facts(*ingest)["num_new_kv"] == 0


def test_progress_lines_name_model_loading_and_then_each_step(docs, run, monkeypatch):
    monkeypatch.setattr(printing, "progress_lines", partial(printing.progress_lines, every_s=0.001))
    _, _, err = run("ingest", "docs", "--model", "demo", "--embedder", "hashing", *PLACE)
    assert err.startswith("opening the store: 0 s\n")
    assert "working" not in err
    _, _, err = run("ask", "Who plays chess?", *SHORT, *PLACE)
    assert err.index("loading the model: ") < err.index("answering: 0 s")


def test_the_documents_of_a_store_belong_to_one_namespace(docs, run):
    run("ingest", "docs", "--model", "demo", "--embedder", "hashing", "--namespace", "acme", *PLACE)
    for arguments in (("ingest", "docs", "--namespace", "globex"), ("ask", "Who?")):
        code, _, err = run(*arguments, *PLACE)
        assert code != 0
        assert "ingested for namespace 'acme', but the namespace is" in err
        assert "RAGBLEND_NAMESPACE='acme'" in err
    assert run.facts("stats", *PLACE)["num_stored_kv"] > 0
    assert run("remove", "docs", *PLACE)[0] == 0, "only documents of that namespace have the name"
    assert run.facts("stats", *PLACE)["num_stored_kv"] == 0


BAD_INPUT = {
    "missing path": (["ingest", "nowhere", "--model", "demo"], 3, "nowhere"),
    "missing store": (["ask", "Who?", "--store", "gone"], 3, "ragblend ingest"),
    "missing model": (["ask", "Who?", "--model", "./gone", *PLACE], 3, "--model demo|local path"),
    "ratio": (["ask", "Who?", "--ratio", "1.5", *PLACE], 2, "0 .* to 1.*auto|auto.*0 .* to 1"),
    "a ratio that is no number": (["ask", "Who?", "--ratio", "all", *PLACE], 2, "auto"),
    "mode": (["ask", "Who?", "--mode", "fast", *PLACE], 2, "blend, full"),
    "remote": (["ask", "Who?", "--remote", "cache:6379", *PLACE], 2, "redis://HOST"),
    "rule": (["ask", "Who?", "--rule", "best", *PLACE], 2, "cacheblend"),
    "flag": (["ask", "Who?", "--no-such-flag"], 2, "no-such-flag"),
    "empty question": (["ask", " ", *PLACE], 2, "question is empty"),
    "prompt too long": (["ask", "Who? " * 3000, *PLACE], 1, "reads .*-k"),
    "bytes that are no text": (["ask", "Where is the caf\udce9?", *PLACE], 2, "lone surrogate.*'Where is the caf"),
    "a system text that is none": (["ask", "Who?", "--system", "caf\udce9", *PLACE], 2, "the system text holds"),
    "a namespace that is none": (["precompute", "--namespace", "caf\udce9", *PLACE], 2, "the namespace holds"),
    "no such device": (["precompute", "--device", "quantum", *PLACE], 2, "device is 'quantum'"),
    "workers": (["precompute", "--workers", "many", *PLACE], 2, "ray:4 on a running Ray cluster"),
    "unknown document": (["remove", "gone.md", *PLACE], 3, "gone.md"),
    "no document": (["remove", "", *PLACE], 2, "name is empty"),
    "nothing named": (["ingest", "docs", "--model", "demo", "--glob", "/etc/*", *PLACE], 2, "relative pattern"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_gives_one_clear_line_and_its_exit_code(run, case):
    arguments, expected, message = BAD_INPUT[case]
    code, out, err = run(*arguments)
    assert code == expected, err
    assert re.search(message, err.replace("\n", " ")), err
    assert "Traceback" not in err
    assert out == ""


@pytest.mark.parametrize(
    ("name", "content", "code", "message"),
    [
        ("binary.txt", bytes(range(256)) * 10, 1, r"binary\.txt is a binary file"),
        ("garbage.md", bytes(0x80 + i % 97 for i in range(9000)), 1, r"garbage\.md is not text"),
        (
            "docs.jsonl", b'"Alice Kern works for Nexon."\n{"text": "cut\n"Bob Fox lives in Norburg."\n', 6,
            r"(?s)2 documents \(0 unchanged\), 2 chunks.*failed: .*docs\.jsonl: .* left out: line 2 is not JSON",
        ),
        (".hidden", b"", 1, "no documents that match"),
    ],
)  # fmt: skip
def test_unreadable_files_of_a_corpus_are_named_and_change_the_exit_code(run, tmp_path, name, content, code, message):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / name).write_bytes(content)
    place = ("--store", str(tmp_path / "s"))
    ended, out, err = run("ingest", str(tmp_path / "docs"), "--model", "demo", *place)
    assert ended == code
    assert re.search(message, out + err)


def test_demo_prints_answers_of_all_modes_side_by_side(run, tmp_path, monkeypatch):
    from ragblend.demo import show

    monkeypatch.setattr(show, "NUM_QUESTIONS", 7)
    code, out, _ = run("demo", "--dir", str(tmp_path / "demo"))
    assert code == 0
    shown, total = out.split("All 7 questions")
    for mode in MODES:
        lines = [line for line in shown.splitlines() if line.split()[:1] == [mode] and "ms" in line]
        assert len(lines) == show.NUM_SHOWN
        assert all((" right " in line) != (" WRONG " in line) for line in lines)
        assert f"  {mode}" in total
    assert shown.count("chunks from the store") == show.NUM_SHOWN
    facts = run.facts("demo", "--dir", str(tmp_path / "demo"), "--question", "Where is Borics based?")
    assert facts["ingest"]["num_new_kv"] == 0
    assert facts["totals"]["full"]["num_questions"] == 0
    assert set(facts["questions"][0]["modes"]) == set(MODES)
    assert all(found["answer"] for found in facts["questions"][0]["modes"].values())


def test_the_kv_dtype_of_ingest_persists_until_precompute_changes_it(run, questions, monkeypatch, tmp_path):
    place = ["--store", str(tmp_path / "kv")]
    found = run.facts(*INGEST, *place, "--kv-dtype", "int8")
    num_chunks, nbytes = found["num_new_kv"], found["store_bytes"]
    assert run.facts("stats", *place)["kv_dtypes"] == {"int8": num_chunks}
    ask = ("ask", questions[0]["question"], *SHORT, *place)
    full, answer = run.facts(*ask, "--mode", "full"), run.facts(*ask, "--ratio", "1.0")
    assert answer["answer"] == full["answer"]
    assert {chunk["kv_dtype"] for chunk in answer["report"]["chunks"]} == {"int8"}
    monkeypatch.setenv("RAGBLEND_KV_DTYPE", "fp8")
    code, out, err = run(*INGEST, *place, "--json")
    assert (code, json.loads(out)["num_other_kv"], json.loads(out)["num_new_kv"]) == (0, num_chunks, 0)
    assert "ragblend precompute --kv-dtype fp8" in err
    assert run.facts("precompute", *place)["num_rewritten_kv"] == 0, "only the flag rewrites"
    found = run.facts("precompute", "--kv-dtype", "auto", *place)
    assert found["num_rewritten_kv"] == num_chunks
    assert found["store_bytes"] > 2 * nbytes
    assert run.facts("stats", *place)["kv_dtypes"] == {"float32": num_chunks}
    code, _, err = run("precompute", "--kv-dtype", "int4", *place)
    assert (code, "auto, int8, fp8" in err) == (2, True)


def test_version(run):
    assert run("--version")[1].strip() == __version__


def test_import_ragblend_loads_nothing_heavy():
    heavy = [
        "torch",
        "transformers",
        "langchain_core",
        "llama_index",
        "vllm",
        "faiss",
        "sentence_transformers",
        "sqlalchemy",
    ]
    script = f"import sys, ragblend, ragblend.cli.app; print(sorted(set({heavy}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
