"""A scan lists each file of a folder once, in order, without excluded ones; names of sources match documents."""

from __future__ import annotations

import os
import subprocess
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragblend.corpus.folder_scan import (
    SKIPPED_NAMES,
    FolderScan,
    display_source,
    match_sources,
    normal_path,
    scan_folders,
)
from ragblend.errors import NotFoundError, UsageError


def make(folder: Path, *names: str) -> Path:
    """Files with their own names in them."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def seen(folder: Path, found: FolderScan) -> list[str]:
    return [path.removeprefix(f"{folder}/") for path in found.files]


def test_a_folder_shows_its_files_in_order_of_their_names(tmp_path):
    make(tmp_path, "b.txt", "a/z.txt", "a/b/c.txt", "a.txt", "A.txt", "a/.hidden", ".git/config", "node_modules/x/y.md")
    assert seen(tmp_path, scan_folders([tmp_path])) == ["A.txt", "a/b/c.txt", "a/z.txt", "a.txt", "b.txt"]


def test_a_source_is_the_same_from_every_working_folder(tmp_path, monkeypatch):
    make(tmp_path, "docs/a.txt", "docs/deep/b.txt")
    (tmp_path / "way in").symlink_to(tmp_path / "docs")
    ways = [
        (".", "docs"),
        ("docs", "."),
        ("docs/deep", ".."),
        ("way in", "."),
        (".", "way in"),
        ("docs", "../docs/deep/.."),
    ]
    for place, name in ways:
        monkeypatch.chdir(tmp_path / place)
        assert seen(tmp_path, scan_folders([name])) == ["docs/a.txt", "docs/deep/b.txt"], (place, name)
    monkeypatch.chdir(tmp_path)
    for name in ("docs/a.txt", "./docs/../docs/a.txt", "way in/a.txt", f"file://{tmp_path}/docs/a.txt"):
        assert seen(tmp_path, scan_folders([name])) == ["docs/a.txt"]


def test_gitignore_is_followed_as_git_does(tmp_path):
    """Nested, negated, anchored, from above; git itself is the judge."""
    make(
        tmp_path,
        *(
            "a.log",
            "keep.log",
            "build/out.txt",
            "docs/build/x.txt",
            "docs/a.tmp",
            "docs/keep/b.tmp",
            "docs/only/here.md",
        ),
        *(
            "only/here.md",
            "x/only/here.md",
            "doc s/ü.txt",
            "doc s/secret.txt",
            "foo/bar/baz.txt",
            "foo/baz.txt",
            "#odd.txt",
        ),
    )
    (tmp_path / ".gitignore").write_text("*.log\n!keep.log\n/build/\nsecret.*\n/only\nfoo/*\n!foo/bar/\n\\#odd.txt\n")
    (tmp_path / "docs" / ".gitignore").write_text("# mine\n*.tmp\nbuild\n")
    (tmp_path / "docs" / "keep" / ".gitignore").write_text("!b.tmp\n")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    listed = subprocess.run(
        ["git", "-C", str(tmp_path), "ls-files", "-z", "--others", "--exclude-standard"],
        capture_output=True, check=True,
    )  # fmt: skip
    expected = {name for name in listed.stdout.decode().split("\0") if name and not Path(name).name.startswith(".")}
    assert set(seen(tmp_path, scan_folders([tmp_path]))) == expected
    below = {name for name in expected if name.startswith("docs/")}
    assert set(seen(tmp_path, scan_folders([tmp_path / "docs"]))) == below, "the rules of the folders above hold too"


def test_who_names_an_ignored_folder_or_file_gets_it(tmp_path):
    make(tmp_path, "build/a.md", "build/b.log", "c.log", "node_modules/x/README.md")
    (tmp_path / ".gitignore").write_text("build/\n*.log\n")
    (tmp_path / ".git").mkdir()
    assert seen(tmp_path, scan_folders([tmp_path])) == []
    assert seen(tmp_path, scan_folders([tmp_path / "build"])) == ["build/a.md", "build/b.log"]
    assert seen(tmp_path, scan_folders([tmp_path / "c.log"])) == ["c.log"]
    assert seen(tmp_path, scan_folders([tmp_path / "node_modules" / "x"])) == ["node_modules/x/README.md"]


def test_a_home_whose_gitignore_names_everything_hides_no_folder(tmp_path):
    make(tmp_path, "work/docs/a.md")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".gitignore").write_text("*\n")
    assert seen(tmp_path, scan_folders([tmp_path / "work" / "docs"])) == ["work/docs/a.md"]


def test_a_line_that_is_no_pattern_is_said_and_the_others_hold(tmp_path, caplog):
    make(tmp_path, "a.log", "b.txt")
    (tmp_path / ".gitignore").write_bytes(b"*.log\n!\n\xff\xfe\n")
    assert seen(tmp_path, scan_folders([tmp_path])) == ["b.txt"]
    assert ".gitignore" in caplog.text


def test_our_own_data_is_left_out_wherever_it_is(tmp_path):
    make(
        tmp_path,
        "a.md",
        "mine/catalog.sqlite",
        "mine/vectors.faiss",
        "store/catalog.sqlite",
        "store/models/x.json",
        "store/p/q.json",
    )
    make(tmp_path, "new/index.md", "ragblend-data/demo/corpus/x.md", "ragblend.toml", "other/catalog.sqlite")
    assert seen(tmp_path, scan_folders([tmp_path], excluded=[tmp_path / "new"])) == ["a.md", "other/catalog.sqlite"]
    assert seen(tmp_path, scan_folders([tmp_path / "ragblend-data"])) == ["ragblend-data/demo/corpus/x.md"]


def test_a_link_is_read_once_and_never_leads_in_circles(tmp_path):
    make(tmp_path, "docs/a.txt", "docs/.kept/v2.txt", "outside/o.txt", "outside/p.txt")
    docs = tmp_path / "docs"
    links = {
        "0-again.txt": "a.txt",
        "z-again.txt": "a.txt",
        "current.txt": ".kept/v2.txt",
        "latest.txt": ".kept/v2.txt",
    }
    links |= {
        "out.txt": "../outside/o.txt",
        "up": "..",
        "self": ".",
        "outside": "../outside",
        "loop": "loop",
        "gone": "no",
    }
    for name, target in links.items():
        (docs / name).symlink_to(target)
    found = scan_folders([docs])
    assert seen(docs, found) == ["a.txt", "current.txt"]
    assert [path for path, reason in found.skipped if "leads out of" in reason] == [str(docs / "out.txt")]
    assert seen(docs, scan_folders([docs, docs / "out.txt"])) == ["a.txt", "current.txt", "out.txt"], (
        "who names it wants it"
    )
    assert seen(tmp_path, scan_folders([docs, tmp_path / "outside"])) == [
        "docs/a.txt",
        "docs/current.txt",
        "outside/o.txt",
        "outside/p.txt",
    ]
    assert seen(tmp_path, scan_folders([docs / "up" / "docs" / "self"])) == seen(tmp_path, scan_folders([docs]))


def test_what_is_no_file_is_named_with_the_reason(tmp_path):
    make(tmp_path, "docs/a.txt", "docs/sub/b.txt", "outside/o.txt")
    docs = tmp_path / "docs"
    os.mkfifo(docs / "pipe.md")
    for name, target in {"gone": "no", "loop": "loop", "out": "../outside", "in": "sub", "gone.md": "no"}.items():
        (docs / name).symlink_to(target)
    found = scan_folders([docs])
    assert seen(docs, found) == ["a.txt", "sub/b.txt"]
    reasons = {Path(path).name: reason.partition(";")[0] for path, reason in found.skipped}
    assert reasons == {
        "gone": "is a link to a file that is not there",
        "gone.md": "is a link to a file that is not there",
        "loop": "is a link that leads to itself",
        "out": "is a link to a folder elsewhere, which is not followed",
        "pipe.md": "is a named pipe, not a file",
    }
    assert {Path(path).name for path, _ in scan_folders([docs], "*.md").skipped} == {"gone.md", "pipe.md"}
    (docs / ".gitignore").write_text("pipe.md\ngone*\n")
    (docs / ".git").mkdir()
    assert {Path(path).name for path, _ in scan_folders([docs, tmp_path / "outside"]).skipped} == {"loop"}


def test_deeper_than_calls_may_nest(tmp_path, monkeypatch):
    make(tmp_path, "a.txt")
    monkeypatch.chdir(tmp_path)
    for _ in range(1500):
        Path("d").mkdir()
        os.chdir("d")
    try:
        assert seen(tmp_path, scan_folders([tmp_path])) == ["a.txt"]
    finally:
        os.chdir(tmp_path)
        subprocess.run(["rm", "-r", "d"], check=True)  # pytest's own cleaning nests calls


def test_a_folder_that_cannot_be_listed_is_said(tmp_path, monkeypatch):
    make(tmp_path, "a.txt", "shut/b.txt")
    original = os.scandir

    def scandir(path):
        if str(path).endswith("shut"):
            raise PermissionError(13, "Permission denied")
        return original(path)

    monkeypatch.setattr(os, "scandir", scandir)
    found = scan_folders([tmp_path])
    assert seen(tmp_path, found) == ["a.txt"]
    assert [(failure.path, "permissions" in failure.reason) for failure in found.unreadable] == [
        (str(tmp_path / "shut"), True)
    ]


def test_a_name_that_is_no_text_is_said_and_can_be_printed(tmp_path):
    make(tmp_path, "a.txt")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt")).write_text("x")
    found = scan_folders([tmp_path])
    assert seen(tmp_path, found) == ["a.txt"]
    (failure,) = found.unreadable
    assert failure.path.endswith("/caf\\xe9.txt")
    assert "rename it" in failure.reason


@pytest.mark.parametrize("glob", ["*", "*.md", "b/*.md", "**/*.md", "b/**/*", "*/*", "b*/*.[mt]*", "x"])
def test_a_pattern_means_what_rglob_means(tmp_path, glob):
    make(tmp_path, "a.md", "b/c.md", "b/d/e.md", "b/f.txt", "x/b/g.md", "b.md")
    found = scan_folders([tmp_path], glob)
    expected = {str(path) for path in tmp_path.rglob(glob) if path.is_file()}
    assert set(found.files) == expected
    assert found.filtered_out == {str(path) for path in tmp_path.rglob("*") if path.is_file()} - expected


@pytest.mark.parametrize("glob", ["", "/etc/*", "../*"])
def test_a_pattern_that_can_match_nothing_is_refused(tmp_path, glob):
    with pytest.raises(UsageError, match="relative pattern"):
        scan_folders([tmp_path], glob)


def test_a_missing_path_is_an_error_that_says_how_to_forget_it(tmp_path):
    with pytest.raises(NotFoundError, match="ragblend remove"):
        scan_folders([tmp_path / "gone"])


# --- names ---


def test_people_may_name_a_file_a_folder_or_a_record(tmp_path, monkeypatch):
    make(tmp_path, "docs/a.jsonl", "docs/b b.txt", "docs/c", "docs/c#/x.txt", "docsx/d.txt")
    docs = tmp_path / "docs"
    sources = {f"{docs}/a.jsonl#0": f"{docs}/a.jsonl", f"{docs}/a.jsonl#1": f"{docs}/a.jsonl"}
    sources |= {path: path for path in (f"{docs}/b b.txt", f"{docs}/c", f"{docs}/c#/x.txt", f"{tmp_path}/docsx/d.txt")}
    sources |= {"langchain/7": "", "https://example.org/a": "", f"{docs}/no suffix#1": f"{docs}/no suffix#1"}
    records = [f"{docs}/a.jsonl#0", f"{docs}/a.jsonl#1"]
    meant = {
        "docs/a.jsonl": records,
        "./docs/a.jsonl#1": records[1:],
        f"{docs}/a.jsonl#1": records[1:],
        f"file://{docs}/a.jsonl#0": records[:1],
        f"file://localhost{docs}/b%20b.txt": [f"{docs}/b b.txt"],
        "docs/c": [f"{docs}/c"],
        "docs/c#": [f"{docs}/c#/x.txt"],
        "docs/": [source for source in sources if source.startswith(f"{docs}/")],
        "docs/../docsx": [f"{tmp_path}/docsx/d.txt"],
        ".": [source for source in sources if source.startswith("/")],
        "langchain/7": ["langchain/7"],
        "https://example.org/a": ["https://example.org/a"],
        "docs/a": [],
        "docs/no suffix": [],
        "nothing": [],
    }
    monkeypatch.chdir(tmp_path)
    for name, expected in meant.items():
        assert match_sources(name, sources.items()) == expected, name
    monkeypatch.chdir(docs)
    assert match_sources("a.jsonl", sources.items()) == records
    with pytest.raises(UsageError, match="name is empty"):
        match_sources(" ", sources.items())


def test_a_link_names_the_file_that_was_read(tmp_path, monkeypatch):
    make(tmp_path, "docs/a.txt")
    (tmp_path / "docs" / "link.txt").symlink_to("a.txt")
    (tmp_path / "way in").symlink_to("docs")
    monkeypatch.chdir(tmp_path)
    source = f"{tmp_path}/docs/a.txt"
    for name in ("docs/link.txt", "way in/link.txt", "way in"):
        assert match_sources(name, [(source, source)]) == [source]


def test_folders_in_folders_that_are_named_too_count_once(tmp_path):
    make(tmp_path, "a.txt", "build/b.txt", "sub/c.txt", "sub/x.log")
    (tmp_path / ".gitignore").write_text("build\n*.log\n")
    (tmp_path / ".git").mkdir()
    found = scan_folders([tmp_path, tmp_path / "build", tmp_path / "sub", tmp_path])
    assert seen(tmp_path, found) == ["a.txt", "sub/c.txt", "build/b.txt"]
    assert found.ignored == [f"{tmp_path}/sub/x.log"]


def test_what_is_gone_from_the_disk_can_still_be_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = f"{tmp_path}/gone/deep/a.txt"
    for name in ("gone", "gone/deep/a.txt", "./gone/deep"):
        assert match_sources(name, [(source, source)]) == [source]


def test_either_unicode_form_names_a_file_and_two_files_stay_two(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    composed, decomposed = (unicodedata.normalize(form, "é.txt") for form in ("NFC", "NFD"))
    make(tmp_path, decomposed)
    stored = f"{tmp_path}/{decomposed}"
    assert match_sources(composed, [(stored, stored)]) == [stored]
    make(tmp_path, composed)
    if len(list(tmp_path.iterdir())) == 2:  # file systems that do not compare the forms
        other = f"{tmp_path}/{composed}"
        assert set(scan_folders([tmp_path]).files) == {stored, other}
        assert match_sources(composed, [(stored, stored), (other, other)]) == [other]


def test_a_file_system_that_knows_no_case_gives_one_name(tmp_path, monkeypatch):
    """Simulated: every spelling finds the file, the folder lists one."""
    make(tmp_path, "Docs/ReadMe.md")
    listed = f"{tmp_path}/Docs/ReadMe.md"
    monkeypatch.setattr(os.path, "samefile", lambda one, other: str(one).lower() == str(other).lower())
    monkeypatch.setattr(os.path, "lexists", lambda path: str(path).lower().startswith(str(tmp_path).lower()))
    assert normal_path(f"{tmp_path}/docs/README.md") == listed
    assert normal_path(listed) == listed


def test_sources_are_shown_as_one_would_type_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert display_source(f"{tmp_path}/docs/a.jsonl#3") == "docs/a.jsonl#3"
    assert display_source("/elsewhere/a.txt") == "/elsewhere/a.txt"
    assert display_source(f"{tmp_path}x/a.txt") == f"{tmp_path}x/a.txt"
    assert display_source("https://example.org/a") == "https://example.org/a"
    assert display_source(f"{tmp_path}/a\n\x1b[31m.txt") == "a\\n\\x1b[31m.txt"


@settings(max_examples=60)
@given(st.text(min_size=1, max_size=20).filter(lambda text: "/" not in text and "\0" not in text))
def test_any_name_that_a_file_can_have_is_found_by_that_name(tmp_path_factory, name):
    folder = tmp_path_factory.mktemp("names")
    try:
        (folder / name).write_text("x")
    except (OSError, UnicodeEncodeError, IsADirectoryError):
        return  # the file system has none of that name
    found = scan_folders([folder])
    (source,) = found.files or [None]
    if source is not None:
        assert match_sources(str(folder / name), [(source, source)]) == [source]
    else:
        assert name.startswith(".") or name in SKIPPED_NAMES or found.unreadable
