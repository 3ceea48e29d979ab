"""Paths that a user names: `~` is the home, a URL is answered with the option that takes it, "" is an error."""

from pathlib import Path

import pytest

from benchmarks.load import LoadConfig
from ragblend.catalog.ledger import Ledger
from ragblend.catalog.schema import DocumentKey
from ragblend.config import Settings, load_settings
from ragblend.corpus.folder_scan import match_sources, scan_folders
from ragblend.engine.load import load_engine
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.open import open_store
from ragblend.engine.transformers.checkpoints import find_model
from ragblend.engine.vllm.config import ConnectorConfig
from ragblend.errors import NotFoundError, UsageError
from ragblend.files.places import expand_user_path
from ragblend.frameworks.engines import share_engine
from ragblend.index import open_index
from ragblend.lab.plan import read_profile
from ragblend.lab.plots import check_plot
from ragblend.lab.quality.data import find_data
from ragblend.lab.traffic.logs import RequestLog
from ragblend.prompt.types import Chunk

MAKERS = {
    "DiskStore": lambda place: DiskStore(place, fsync=False),
    "open_store": lambda place: open_store(place, fsync=False),
    "open_index": lambda place: open_index(place, "hashing", create=True).close(),
    "Ledger": lambda place: Ledger(place).close(),
}
READERS = {
    "settings' store": lambda place: Settings(store=place),
    "settings' file": lambda place: load_settings({"store": place}),
    "load_engine": lambda place: load_engine("demo", place),
    "share_engine": lambda place: share_engine("demo", place),
    "vLLM's connector": lambda place: ConnectorConfig.from_extra_config({"store": place}),
    "ingest": lambda place: scan_folders([place]),
    "model": find_model,
    "bench --store": lambda place: LoadConfig(store=place),
    "bench --data": find_data,
    "analyze": lambda place: RequestLog([place]),
    "--profile": read_profile,
    "--plot": check_plot,
}

NO_PATHS = ["", " ", "s3://bucket/kv", "redis://:geheim@host:6379/0", "$HOME/kv", "~no-such-user/kv", "\0"]


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The user's home; the working folder is another, empty one."""
    for name in ("home", "work"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize("make", MAKERS)
def test_a_tilde_is_the_home(home, make):
    MAKERS[make]("~/made")
    assert (home / "made").exists()
    assert list(Path().iterdir()) == []


def test_a_tilde_in_settings_and_names_of_documents_is_the_home(home):
    (home / "docs").mkdir()
    (home / "docs" / "a.md").write_text("text")
    assert Settings(store="~/kv").store == str(home / "kv")
    assert ConnectorConfig.from_extra_config({"store": "~/kv"}).store == str(home / "kv")
    assert list(scan_folders(["~/docs"]).files) == [str(home / "docs" / "a.md")]
    assert match_sources("~/docs/a.md", [(f"{home}/docs/a.md", f"{home}/docs/a.md")]) == [f"{home}/docs/a.md"]


@pytest.mark.parametrize("opened", [*MAKERS, *READERS])
@pytest.mark.parametrize("place", NO_PATHS)
def test_what_is_no_path_is_an_error_and_makes_no_folder(home, opened, place):
    with pytest.raises(UsageError) as raised:
        {**MAKERS, **READERS}[opened](place)
    assert "geheim" not in str(raised.value)
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("name", "url", "fix"),
    [
        ("store", "redis://host:6379/0", "`remote`"),
        ("store", Path("s3://bucket/kv"), "`remote`"),
        ("store", "http://host:8000", "`backend`"),
        ("store", "file:///mnt/my%20kv", "write the path itself: /mnt/my kv"),
        ("index", "s3://bucket/index", "an index is a folder"),
        ("model", "https://huggingface.co/Qwen/Qwen3-8B", "a Hugging Face id"),
        ("--html", "https://host/page", "download it"),
    ],
)  # fmt: skip
def test_a_url_is_answered_with_the_option_that_takes_it(name, url, fix):
    with pytest.raises(UsageError, match=f"{name} is .*, a URL, .*{fix}"):
        expand_user_path(url, name)


def test_a_file_that_is_really_named_so_is_read(home):
    for name in ("~$report.docx", "$price.md"):
        Path(name).write_text("text")
        assert expand_user_path(name, "the path") == Path(name)
    assert expand_user_path("./s3:/x", "store") == Path("s3:/x")


def test_what_is_opened_by_a_relative_path_stays_where_it_is(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    index, store = open_index("index", "hashing", create=True), DiskStore("kv", fsync=False)
    ledger = Ledger("catalog.sqlite")
    monkeypatch.chdir("elsewhere")
    with index:
        index.add_document("a", "1", [Chunk("text", "a")])
    store.put_model("f" * 32, {"model": "m"})
    ledger.close()  # the next call opens the file again
    ledger.add_texts({DocumentKey("notes", "1"): {"text": 0}})
    ledger.close()
    assert list(Path().iterdir()) == []
    with open_index(tmp_path / "index") as again:
        assert again.sources() == ["a"]
    with pytest.raises(NotFoundError, match="index has no documents; add some: ragblend ingest DOCS --store index"):
        open_index("index")
