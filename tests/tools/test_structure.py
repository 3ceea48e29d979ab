"""What docs/structure.md shows is drawn from the package, and a request's way through it does not grow unseen."""

import re
from collections import Counter
from pathlib import Path

from tools.structure.draw import draw
from tools.structure.walk import blended_call

ROOT = Path(__file__).parents[2]
MOST_FILES, MOST_FUNCTIONS = 35, 209


def test_a_blended_call_runs_through_no_more_files_than_the_page_lists():
    seen = blended_call()
    page = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \d+ \| `([a-z_/]+\.py)` \|", page, re.MULTILINE)
    assert len(rows) == 10
    assert set(rows) <= set(seen)
    assert len(seen) <= MOST_FILES
    assert sum(map(len, seen.values())) <= MOST_FUNCTIONS


def test_every_file_that_the_page_names_is_there():
    folders = ("ragblend", "tests", "tools", "benchmarks", "scripts", "notebooks")
    files = [f"/{path.relative_to(ROOT).as_posix()}" for folder in folders for path in (ROOT / folder).rglob("*.py")]
    for page in ("docs/structure.md", "CONTRIBUTING.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        for name in re.findall(r"`(?:ragblend/)?((?:[a-z_0-9]+/)*[a-z_0-9]+\.py)(?::[^`]*)?`", text):
            assert any(file.endswith(f"/{name}") for file in files), f"{page} names {name}"


def test_the_picture_is_written(tmp_path):
    draw(tmp_path / "structure.png")
    assert (tmp_path / "structure.png").stat().st_size > 10_000


def test_no_two_test_files_that_run_together_have_one_name():
    # pytest imports them by this name, and stops a run of both.
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if "inside_vllm" not in path.parts]
    assert [name for name, count in Counter(path.name for path in files).items() if count > 1] == []
