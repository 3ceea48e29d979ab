"""`benchmarks.documents` on files made here: words, edits and questions are measured as documented."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from document_files import SENTENCES, WHOLE
from typer.testing import CliRunner

from benchmarks.documents import __main__ as command
from benchmarks.documents.files import MIN_BYTES, PACKAGES, ChosenFile, Package, choose_files, fetch_packages
from benchmarks.documents.questions import Question, ask_questions, load_questions
from benchmarks.documents.reading import measure_kind
from benchmarks.documents.references import TEXT_CELLS, compare_words, count_words, html_text, reference_texts
from benchmarks.documents.reingest import EDITS, measure_edit, measure_edits
from ragblend.corpus.embedders import HashingEmbedder

app = typer.Typer()
app.command()(command.main)


def chosen(folder: Path, name: str, data: bytes, kind: str) -> ChosenFile:
    path = folder / name
    path.write_bytes(data)
    return ChosenFile(f"made/{name}", kind, path)


# --- words ---


def test_words_are_case_folded_dehyphenated_and_single_characters_without_blanks():
    assert count_words("Käse, KÄSE: re-\n  enter ﬁne 40 Nm 契約") == {
        "käse": 2, "reenter": 1, "fine": 1, "40": 1, "nm": 1, "契": 1, "約": 1,
    }  # fmt: skip


def test_the_nearest_reference_determines_the_share_of_differing_words():
    found = compare_words("a b b x", {"far": "q r s t", "near": "a b b b", "empty": ""})
    assert (found.reference, found.missing_percent, found.extra_percent) == ("near", 25.0, 25.0)
    assert (found.missing, found.extra) == (("b",), ("x",))
    assert compare_words("a", {"empty": " "}) is None


def test_numbers_of_workbooks_are_not_compared():
    found = compare_words("bolt 2026-11-26", {TEXT_CELLS: "bolt 46352 nut"})
    assert (found.missing_percent, found.extra_percent) == (50.0, 0.0)
    assert compare_words("1 2", {TEXT_CELLS: "1 3"}) is None


def test_menus_are_no_words_of_the_page_but_an_articles_header_is():
    page = (
        b"<title>T</title><nav>Home</nav><header>Shop</header><article><header>Pump</header>un<b>bold</b>ly"
        b"<ul><li>one<li>two</ul><img alt=drawing></article><aside>Ads</aside><script>x</script>"
    )
    assert sorted(count_words(html_text(page))) == ["drawing", "one", "pump", "two", "unboldly"]


@pytest.mark.parametrize("kind", ["html", "csv", "ipynb", "json", "pptx", "xlsx", "odp", "ods", "txt"])
def test_a_reference_finds_the_words_of_each_kind(kind, tmp_path):
    (tmp_path / f"file.{kind}").write_bytes(WHOLE[kind])
    texts = reference_texts(tmp_path / f"file.{kind}")
    assert any({"rent", "bolt", "ouagadougou"}.intersection(count_words(text)) for text in texts.values())


def test_a_reader_process_tells_failures_from_files_without_text(tmp_path):
    files = [
        chosen(tmp_path, "whole.txt", SENTENCES.encode(), "text"),
        chosen(tmp_path, "binary.txt", b"\x00\x01words and more\x00" * 100, "text"),
        chosen(tmp_path, "blank.txt", b" " * 5000, "text"),
    ]
    found = measure_kind("text", files)
    assert (found.num_files, found.num_compared) == (3, 2)
    assert (list(found.failures), list(found.without_text)) == (["made/binary.txt"], ["made/blank.txt"])
    assert (found.missing_mean, found.missing_worst) == (50.0, 100.0)
    assert found.cpu_s_per_mb > 0
    assert found.as_dict()["files"][0]["name"] == "made/blank.txt"  # the largest


def test_what_is_over_a_bar_is_named(tmp_path):
    found = measure_kind("html", [chosen(tmp_path, "whole.html", WHOLE["html"], "html")])
    within = replace(found, cpu_s_per_mb=0.15)
    assert (within.missing_mean, within.over_bars()) == (0.0, [])
    assert replace(within, missing_mean=1.6).over_bars() == [
        "html: 1.6 % of the words are missing, but the limit is 1.5 %"
    ]
    assert replace(within, cpu_s_per_mb=0.16).over_bars() == ["html: 0.16 s/MB, but the limit is 0.15 s/MB"]


# --- files ---


def test_the_choice_is_the_same_each_time_and_holds_what_is_packed(tmp_path):
    folder = tmp_path / "manual"
    folder.mkdir()
    for number in range(9):
        (folder / f"page{number}.html").write_bytes(b"a" * (MIN_BYTES + number))
    (folder / "stub.html").write_bytes(b"a")
    (folder / "page.html").symlink_to(folder / "page1.html")
    (folder / "notes.txt").write_bytes(b"a" * 5000)
    subprocess.run(["gzip", "notes.txt"], cwd=folder, check=True)
    packages = [Package("manual", {"html": 3, "text": 2})]
    first = choose_files(packages, tmp_path)
    assert first == choose_files(packages, tmp_path)
    assert [file.kind for file in first] == ["text", "html", "html", "html"]
    assert [file.name for file in first if file.kind == "text"] == ["manual/notes.txt"]
    assert first[0].path.read_bytes() == b"a" * 5000


def test_a_package_that_cannot_be_downloaded_is_named_and_leaves_nothing(tmp_path, monkeypatch):
    def refuse(name: str, folder: Path) -> None:
        (folder / "half").write_text("a")
        raise subprocess.CalledProcessError(100, "apt-get", stderr="W: a\nE: no package nosuch-doc\n")

    monkeypatch.setattr("benchmarks.documents.files._fetch_debian", refuse)
    (tmp_path / "there").mkdir()
    failures = fetch_packages([Package("nosuch-doc", {"html": 1}), Package("there", {"html": 1})], tmp_path)
    assert failures == {"nosuch-doc": "E: no package nosuch-doc"}
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_packages_are_named_once():
    names = [package.name for package in PACKAGES]
    assert len(names) == len(set(names))
    assert sum(sum(package.num_files.values()) for package in PACKAGES) >= 120


# --- questions ---


def test_there_are_40_questions_eight_of_each_kind_about_chosen_packages():
    questions = load_questions()
    assert len({each.question for each in questions}) == 40
    assert {kind: sum(each.kind == kind for each in questions) for kind in {each.kind for each in questions}} == {
        "html": 8, "pdf": 8, "office": 8, "table": 8, "text": 8,
    }  # fmt: skip
    packages = {package.name for package in PACKAGES}
    assert {name.split("/")[0] for each in questions for name in each.files} <= packages


def test_a_question_is_found_in_its_file_alone(tmp_path):
    names = ("ferry", "mill", "bridge", "harbour", "tower", "garden", "market", "station")
    files = [
        chosen(tmp_path, f"{name}.txt", f"The {name} opens at {at} and is closed on Sundays.\n".encode(), "text")
        for at, name in enumerate(names)
    ]
    questions = [
        Question("When does the ferry open?", "text", "text", ("made/ferry.txt",)),
        Question("What about the zeppelin?", "pdf", "text", ("made/unread.pdf",)),
        Question("Is a quarry open?", "office", "text", ("other/quarry.docx",)),
    ]
    files.append(chosen(tmp_path, "unread.pdf", b"%PDF-1.4 damaged", "pdf"))
    found = ask_questions(files, questions, HashingEmbedder())
    assert (found["found"], found["asked"], found["num_chunks"]) == (1, 2, 8)
    assert found["by_kind"] == {"text": {"found": 1, "asked": 1}, "pdf": {"found": 0, "asked": 1}}
    assert found["missed"] == ["What about the zeppelin?"]


# --- edits ---


def test_an_edit_costs_the_chunks_it_changes_and_a_touch_costs_none(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("\n\n".join(f"Paragraph {at} says that the rent number {at} is due." * 5 for at in range(60)))
    cost = {edit.name: measure_edit(path, edit) for edit in EDITS if edit.kind == "text"}
    num_chunks = cost["nothing"][0]
    assert num_chunks > 5
    assert {cost[name] for name in ("nothing", "touched", "renamed")} == {(num_chunks, 0)}
    assert 0 < cost["a line on top"][1] <= num_chunks


def test_kinds_without_a_file_are_left_out(tmp_path):
    found = measure_edits([chosen(tmp_path, "rows.csv", WHOLE["csv"] * 20, "table")])
    assert {each["kind"] for each in found} == {"table"}
    assert [each["edit"] for each in found] == [edit.name for edit in EDITS if edit.kind == "table"]


# --- the command ---


def test_the_command_writes_what_it_found(tmp_path, monkeypatch):
    package = Package("manual", {"html": 5, "text": 5, "table": 5})
    folder = tmp_path / "cache" / "manual"
    folder.mkdir(parents=True)
    for name in ("html", "txt", "csv"):
        (folder / f"file.{name}").write_bytes(WHOLE[name] * 2)
    monkeypatch.setattr(command, "PACKAGES", (package,))
    monkeypatch.setattr(command, "ask_questions", lambda files: {"asked": len(files)})
    out = tmp_path / "found.json"
    ran = CliRunner().invoke(app, ["--cache", str(folder.parent), "--out", str(out)])
    assert ran.exit_code == 0, ran.output
    facts = json.loads(out.read_text())
    assert facts["hardware"]["cpu"]
    assert (facts["num_files"], facts["questions"]) == (3, {"asked": 3})
    assert [each["kind"] for each in facts["words"]] == ["html", "table", "text"]
    assert {each["missing_mean"] for each in facts["words"]} == {0.0}
    assert {each["kind"] for each in facts["edits"]} == {"html", "table", "text"}


def test_an_unknown_part_is_named():
    ran = CliRunner().invoke(app, ["--part", "speed"])
    assert ran.exit_code == 2
    assert "'speed' is not a part" in ran.output
