"""Keys and signatures as a user meets them: made, shown, checked, changed; and pipes, folders and loops as files."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import PLACE, CommandRunner
from forgery import remove

from ragblend.corpus.embedders import SentenceTransformerEmbedder
from ragblend.engine.load import load_engine
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.format.chunk_file import encode_chunk
from ragblend.engine.store.format.kv import load_into_memory
from ragblend.engine.store.format.signing import StoreKey, find_process_key, read_key, write_key
from ragblend.engine.store.open import open_store
from ragblend.engine.transformers import checkpoints
from ragblend.errors import CorruptError, NotFoundError, UsageError

CHUNKS = ("Nora Adler works for Paxara.", "The company is based in Oston.")
QUESTION = "Where is Paxara based?"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs commands in a separate folder, for a user with a separate configuration."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    return CommandRunner(capsys)


def ingest(run: CommandRunner) -> list[str]:
    """Two documents in `docs`, in `i` and `s`; keys of the entries."""
    Path("docs").mkdir(exist_ok=True)
    for number, text in enumerate(CHUNKS):
        Path(f"docs/{number}.txt").write_text(text)
    run.facts("ingest", "docs", "--model", "demo", *PLACE, "--embedder", "hashing")
    return sorted(DiskStore("s", store_key=None).keys())


def test_a_key_is_made_once_for_its_user_and_never_printed(run, tmp_path):
    code, out, _ = run("init-key", "--json")
    path = Path(json.loads(out)["path"])
    assert (code, path) == (0, tmp_path / "config" / "ragblend" / "store.key")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    key = find_process_key()
    assert key is not None
    secret = path.read_text().strip()
    assert json.loads(out)["id"] == key.id
    assert secret not in out + repr(key) + str(vars(type(key)))
    with pytest.raises(TypeError, match="RAGBLEND_STORE_KEY"):
        pickle.dumps(key)
    assert run("init-key")[0] == 2
    assert path.read_text().strip() == secret, "the first stays"


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o660, 0o606])
def test_a_key_that_others_may_read_is_refused(tmp_path, mode):
    path = tmp_path / "store.key"
    write_key(path)
    path.chmod(mode)
    if mode == 0o640:
        assert read_key(path).id  # a group of services may share one
        return
    with pytest.raises(UsageError, match=f"chmod 600 {path}"):
        read_key(path)


@pytest.mark.parametrize("text", ["", "short", "0" * 15])
def test_a_key_that_can_be_guessed_is_refused_without_being_shown(text, monkeypatch, tmp_path):
    monkeypatch.setenv("RAGBLEND_STORE_KEY", text)
    with pytest.raises(UsageError, match="64 hex digits") as caught:
        open_store(tmp_path)
    assert not text or f"'{text}'" not in str(caught.value)


def test_the_environments_key_overrides_the_files_and_may_be_long_text(run, monkeypatch):
    run("init-key")
    own = find_process_key()
    monkeypatch.setenv("RAGBLEND_STORE_KEY", "correct horse battery staple")
    said = find_process_key()
    assert said is not None
    assert said != own
    assert said == StoreKey.parse("correct horse battery staple")


def test_only_the_user_names_the_key_file_and_never_a_folder(run, tmp_path, monkeypatch):
    made = write_key(tmp_path / "k.key")
    Path("ragblend.toml").write_text('store_key_file = "k.key"\n')
    assert find_process_key() is None
    own = tmp_path / "config" / "ragblend" / "config.toml"
    own.parent.mkdir(parents=True)
    own.write_text(f'store_key_file = "{tmp_path}/k.key"\n')
    assert find_process_key() == made
    monkeypatch.setenv("RAGBLEND_STORE_KEY_FILE", str(tmp_path / "gone.key"))
    with pytest.raises(NotFoundError, match="init-key --key-file"):  # never "no key"
        find_process_key()


def test_a_store_from_before_its_key_is_unused_until_signed(run):
    keys = ingest(run)
    assert run("verify", *PLACE)[0] == 0
    run("init-key")
    damaged = run.facts("verify", *PLACE, code=4)["damaged_keys"]
    assert sorted(damaged) == keys
    assert all("not signed" in reason for reason in damaged.values())
    assert not DiskStore("s").contains(keys[0])
    report = run.facts("sign", "--store", "s")
    assert (report["num_signed"], report["num_notes"]) == (len(keys), 2)
    assert run("verify", *PLACE)[0] == 0
    report = run.facts("sign", "--store", "s")
    assert (report["num_signed"], report["num_known"]) == (0, len(keys))
    assert run.facts("ingest", "docs", *PLACE)["num_new_kv"] == 0


def test_a_new_key_does_not_trust_what_the_old_did_not_sign(run, tmp_path):
    run("init-key")
    keys = ingest(run)
    path = tmp_path / "config" / "ragblend" / "store.key"
    old = read_key(path)
    path.rename("old.key")
    plain = DiskStore("s", store_key=None)
    kv = load_into_memory(plain.get(keys[0]))
    (Path("s") / "kv" / keys[0][:2] / f"{keys[0]}.safetensors").write_bytes(encode_chunk(kv))
    run("init-key")
    assert find_process_key() != old
    report = run.facts("sign", "--store", "s", "--old-key-file", "old.key", code=4)
    assert (report["num_signed"], list(report["refused_keys"])) == (len(keys) - 1, keys[:1])


def test_verify_repair_puts_signed_entries_in_the_place_of_planted_ones(run):
    keys = ingest(run)
    run("init-key")
    assert run("verify", "--repair", *PLACE, "--model", "demo")[0] == 0, "what no key has signed names no model"
    assert run.facts("verify", *PLACE)["checked"] == len(keys)


def test_verify_reads_the_remote_tier_and_repair_replaces_its_damaged_entries(run, tmp_path):
    url = f"file://{tmp_path}/shared"
    run("init-key")
    keys = ingest(run)
    assert run("push", "--store", "s", "--remote", url)[0] == 0
    place = tmp_path / "shared" / keys[0][:2] / f"{keys[0]}.safetensors"
    place.write_bytes(encode_chunk(load_into_memory(DiskStore("s").get(keys[0]))))
    common = (*PLACE, "--remote", url)
    assert list(run.facts("verify", *common, code=4)["damaged_remote_keys"]) == keys[:1]
    assert run("verify", "--repair", *common)[0] == 0
    assert run("verify", *common)[0] == 0


def test_doctor_reports_whether_the_store_is_signed(run):
    def finding() -> dict[str, Any]:
        checks = json.loads(run("doctor", "--json")[1])["checks"]  # this machine may fail other checks
        return next(check for check in checks if check["name"] == "store key")

    assert (finding()["ok"], finding()["optional"], finding()["remedy"]) == (False, True, "ragblend init-key")
    run("init-key")
    assert finding()["ok"]
    assert Path("config/ragblend/store.key").read_text().strip() not in str(finding())


def test_metadata_of_a_store_is_used_only_if_it_is_signed(tmp_path):
    key, other = StoreKey(b"k" * 32), StoreKey(b"o" * 32)
    signed = DiskStore(tmp_path, store_key=key)
    signed.put_model("f" * 32, {"model": "m"})
    assert signed.models() == {"f" * 32: {"model": "m"}}
    assert DiskStore(tmp_path, store_key=other).models() == {}
    note = json.loads((tmp_path / "models" / f"{'f' * 32}.json").read_text())
    (tmp_path / "models" / f"{'e' * 32}.json").write_text(json.dumps(note))  # another model's name on it
    assert list(signed.models()) == ["f" * 32]
    assert [result.key for result in signed.verify_metadata()] == [f"models/{'e' * 32}.json"]


def test_what_a_model_computes_as_nan_is_not_stored(tmp_path, caplog):
    with load_engine("demo", tmp_path / "s", on_miss="inline") as engine:
        engine.precompute(CHUNKS[0])
        store = DiskStore(tmp_path / "s")
        kv = load_into_memory(next(store.get(key) for key in store.keys()))  # noqa: SIM118
        kv.layers[2].values[0, 0, 0] = float("nan")
        store.delete(kv.header.key)
        engine.store.delete(kv.header.key)
        engine.store.put(kv)
        assert not engine.store.contains(kv.header.key)
    assert "holds infinity or NaN" in caplog.text


KINDS: dict[str, Callable[[Path], Any]] = {
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "loop": lambda path: path.symlink_to(path.name),
}


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "place",
    ["i/catalog.sqlite", "i/vectors.faiss", "s/catalog.sqlite", "ragblend.toml",
     "docs/.gitignore", "s/models/{}.json", "s/calibrations/x.json", "s/machines/x.json", "config/ragblend/store.key"],
)  # fmt: skip
def test_a_key_file_that_is_no_file_is_an_error_without_hanging(run, kind, place):
    ingest(run)
    model = next(iter(DiskStore("s").models()))
    path = Path(place.format(model))
    path.parent.mkdir(parents=True, exist_ok=True)
    remove(path)
    KINDS[kind](path)
    for command in (
        ("ask", QUESTION, *PLACE, "--max-tokens", "2"),
        ("verify", *PLACE),
        ("stats", *PLACE),
        ("ingest", "docs", *PLACE),
        ("gc", "--store", "s"),
    ):
        code, out, err = run(*command)
        assert "Traceback" not in out + err, (command, err)
        assert code in (0, 1, 2, 3, 4), (command, code, err)
        if code:
            assert path.name in out + err, (command, err)


def test_an_embedders_folder_runs_no_code(tmp_path):
    modules = [{"idx": 0, "name": "0", "path": "", "type": "evil.Module"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "evil.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(UsageError, match="names custom code"):
        SentenceTransformerEmbedder(tmp_path).embed(["x"])


def test_the_embedded_model_is_the_one_that_was_shipped(tmp_path, monkeypatch):
    place = tmp_path / "demo" / "weights"
    shutil.copytree(checkpoints.find_model("demo"), place)
    monkeypatch.setattr(checkpoints, "files", lambda package: tmp_path)
    checkpoints._demo_checkpoint.cache_clear()
    assert checkpoints.find_model("demo") == place
    with (place / "model.safetensors").open("ab") as file:
        file.write(b"!")
    checkpoints._demo_checkpoint.cache_clear()
    with pytest.raises(CorruptError, match=r"model\.safetensors.*--force-reinstall"):
        checkpoints.find_model("demo")
    checkpoints._demo_checkpoint.cache_clear()


def test_doctor_runs_no_code_of_a_model_that_the_folder_names(run, caplog):
    folder = Path("model")
    folder.mkdir()
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (folder / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": auto_map}))
    (folder / "evil.py").write_text("from pathlib import Path\nPath('it-ran').touch()\n")
    Path("ragblend.toml").write_text('model = "./model"\ntrust_remote_code = true\n')
    assert run("doctor", *PLACE)[0] == 1
    assert not list(Path().rglob("it-ran"))
    assert "ragblend.toml sets trust_remote_code, which is ignored" in caplog.text
