"""What the pages say of each other and of the tree: links lead to files and headings, and the README is short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.pictures import how, idea

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "benchmarks/RESULTS.md"])
LINK = re.compile(r'(?:\]\(|srcset="|src=")([^)"\s]+)')
FENCED = re.compile(r"```.*?```", re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Those of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page):
    for link in LINK.findall(FENCED.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"\w+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_every_page_can_be_found_from_the_readme():
    seen, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        seen.add(page)
        links = (page.parent / link.partition("#")[0] for link in LINK.findall(page.read_text(encoding="utf-8")))
        waiting += {link.resolve() for link in links if link.suffix == ".md" and link.exists()} - seen
    assert {page for page in PAGES if page.parent.name == "docs"} <= seen


def test_the_readme_is_read_in_a_few_minutes():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 140


def test_the_docs_are_few_pages_and_each_begins_with_its_use():
    handwritten = [page for page in PAGES if page.parent.name == "docs" and page.name != "commands.md"]
    texts = {page.name: page.read_text(encoding="utf-8") for page in handwritten}
    assert len(texts) <= 18
    # 150 lines are for paper.md: readers of the paper look for its figures and mechanisms by name, in one place.
    assert sum(len(text.splitlines()) for text in texts.values()) <= 2900
    assert not [name for name, text in texts.items() if not text.split("\n\n")[1].startswith("After this page")]


def test_the_readmes_picture_shows_the_figures_that_are_kept(tmp_path):
    idea.draw(idea.INKS["light"], tmp_path / "idea.svg")
    numbers = re.compile(r">(\d[\d.]*(?: s)?)<")
    drawn, kept = (path.read_text() for path in (tmp_path / "idea.svg", ROOT / "docs/idea-light.svg"))
    assert numbers.findall(drawn) == numbers.findall(kept), "python -m tools.pictures.idea"
    assert len(numbers.findall(kept)) == 6


@pytest.mark.parametrize("name", how.PICTURES)
def test_pictures_of_how_it_works_are_what_their_code_draws(name, tmp_path):
    words = re.compile(r">([^<>\n]+)</text>")
    how.draw(name, idea.INKS["light"], tmp_path / "drawn.svg")
    drawn = words.findall((tmp_path / "drawn.svg").read_text(encoding="utf-8"))
    assert drawn, "nothing was drawn"
    for variant in idea.INKS:
        kept = (ROOT / f"docs/how-{name}-{variant}.svg").read_text(encoding="utf-8")
        assert words.findall(kept) == drawn, "python -m tools.pictures.how"
