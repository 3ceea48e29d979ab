"""Stored results: each file in data/results is cited by a page, a test or code, and each cited file exists."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "data" / "results"
FOLDERS = ("benchmarks", "data/questions", "docs", "notebooks", "ragblend", "tests", "tools")
NAME = re.compile(r"(?<![\w*/-])(?:data/results/)?([a-z0-9][\w.*-]*\.(?:json|png))(?!\w)")
IN_RESULTS = re.compile(r"data/results/([a-z0-9][\w.*-]*\.\w+)")


def texts(*folders: str) -> dict[str, str]:
    """Return the text of each page, module and notebook in `folders`, and of the pages in the root, by path."""
    paths = [*ROOT.glob("*.md"), *(path for folder in folders for path in (ROOT / folder).rglob("*"))]
    wanted = (path for path in paths if path.suffix in (".md", ".py", ".ipynb") and path != Path(__file__))
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in wanted}


def test_every_stored_result_is_cited():
    cited = {name for text in texts(*FOLDERS).values() for name in NAME.findall(text)}
    patterns = {name for name in cited if "*" in name and not name.startswith("*")}
    stored = sorted(path.name for path in RESULTS.iterdir())
    uncited = [name for name in stored if name not in cited and not any(fnmatch(name, each) for each in patterns)]
    assert uncited == [], "delete them, or cite them where their figures are"


def test_every_cited_result_is_stored():
    stored = {path.name for path in RESULTS.iterdir()}
    missing = [
        f"{place} cites {name}"
        for place, text in texts(*(folder for folder in FOLDERS if folder != "tests")).items()
        for name in [*IN_RESULTS.findall(text), *(NAME.findall(text) if place == "benchmarks/RESULTS.md" else [])]
        if not any(fnmatch(each, name) for each in stored)
    ]
    assert missing == []
