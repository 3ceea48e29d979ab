"""The documentation site: every page is in it, and a link that leads nowhere is found."""

import re

import pytest

from tools import site

SETTINGS = (site.ROOT / "mkdocs.yml").read_text(encoding="utf-8")
SOUND = '<h1 id="top">A</h1><a href="sub/b.html#x">b</a><a href="#top">up</a><a href="https://example.org">out</a>'


def test_every_page_is_in_the_navigation_once():
    listed = re.findall(r": (\S+\.md)$", SETTINGS, re.MULTILINE)
    assert sorted(listed) == sorted(str(page.relative_to(site.ROOT)) for page in site.pages())


def test_pages_keep_their_folders_and_bring_what_they_link_to(tmp_path):
    site.lay_out(tmp_path)
    for page in site.pages():
        text = page.read_text(encoding="utf-8")
        assert (tmp_path / page.relative_to(site.ROOT)).read_text(encoding="utf-8") == text
    for name in ("docs/idea-light.svg", "docs/idea-dark.svg", "data/results/drift.json", "deploy/compose.yaml"):
        assert (tmp_path / name).is_file(), name


def test_the_reference_names_everything_that_is_exported():
    from ragblend import __all__ as exported

    named = re.findall(r"^::: ([\w.]+)$", (site.ROOT / "docs/api.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {f"ragblend.{name}" for name in exported if not name.startswith("__")} <= set(named)


@pytest.fixture
def built(tmp_path):
    """A sound site of two pages."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.html").write_text(SOUND)
    (tmp_path / "sub/b.html").write_text('<h2 id="x">B</h2><img src="../p.svg"><a href="../a.html">back</a>')
    (tmp_path / "p.svg").write_text("<svg/>")
    assert list(site.dead_links(tmp_path)) == []
    return tmp_path


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        ('<a href="c.html">', "a.html: c.html does not exist"),
        ('<a href="sub/b.html#y">', "a.html: sub/b.html#y has no such heading"),
        ('<a href="#nowhere">', "a.html: #nowhere has no such heading"),
        ('<img src="p.png">', "a.html: p.png does not exist"),
        ('<source srcset="dark.svg">', "a.html: dark.svg does not exist"),
        ('<script src="https://cdn.example/x.js">', "a.html loads https://cdn.example/x.js"),
        ('<link href="//fonts.example/f.css">', "a.html loads //fonts.example/f.css"),
    ],
)
def test_dead_links_and_what_is_loaded_from_elsewhere_are_named(built, planted, found):
    (built / "a.html").write_text(SOUND + planted)
    assert list(site.dead_links(built)) == [found]


def test_a_style_that_loads_from_elsewhere_is_named(built):
    (built / "s.css").write_text('@font-face{src:url("https://fonts.example/f.woff2")} a{background:url(p.svg)}')
    assert list(site.dead_links(built)) == ["s.css loads https://fonts.example/f.woff2"]
