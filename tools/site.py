"""Build the documentation site in build/site, and check all of its links.

    python -m tools.site

The pages keep their folders, so links between them are the same on GitHub, in the site and in a checkout. Zensical
builds them by `mkdocs.yml` and fails at dead links and anchors between pages. This module checks what Zensical does
not: images, HTML in Markdown, links to other files, and resources that a page loads from other sites.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parents[1]
PAGES, SITE = ROOT / "build/pages", ROOT / "build/site"
LINK = re.compile(r'(?:\]\(|srcset="|src=")([^)"\s]+)')
LOADED = {"script", "img", "source", "iframe", "link"}  # tags whose address a browser loads without a click


def pages() -> list[Path]:
    """Return the paths of the site's pages."""
    globs = ("*.md", "docs/*.md", "benchmarks/RESULTS.md", "data/*/README.md")
    return sorted(path for glob in globs for path in ROOT.glob(glob))


def lay_out(out: Path = PAGES) -> None:
    """Copy the pages, and every file that they link to, to `out` with the folders of the repository."""
    shutil.rmtree(out, ignore_errors=True)
    wanted = set(pages())
    for page in pages():
        links = (link.partition("#")[0] for link in LINK.findall(page.read_text(encoding="utf-8")))
        targets = ((page.parent / link).resolve() for link in links if link and ":" not in link)
        wanted |= {target for target in targets if target.is_file()}
    for path in wanted:
        target = out / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


class Page(HTMLParser):
    """Anchors and links of one HTML page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record the anchor and the links of a tag."""
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            elif name in ("href", "src", "srcset") and value and (tag, name) != ("base", "href"):
                self.links.append((tag, value))


def dead_links(site: Path = SITE) -> Iterator[str]:
    """Yield a line for each dead link of the site, and for each resource that a page loads from another site."""
    read = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    for path, page in read.items():
        for tag, link in page.links:
            parts, where = urlsplit(link), path.relative_to(site)
            if parts.scheme or parts.netloc:
                if tag in LOADED and parts.scheme != "data":
                    yield f"{where} loads {link}"
                continue
            named = unquote(parts.path)
            target = site / named.lstrip("/") if named.startswith("/") else path.parent / named if named else path
            target = (target / "index.html" if target.is_dir() else target).resolve()
            if not target.is_file():
                yield f"{where}: {link} does not exist"
            elif parts.fragment and target in read and unquote(parts.fragment) not in read[target].anchors:
                yield f"{where}: {link} has no such heading"
    for path in site.rglob("*.css"):
        for link in re.findall(r"(?:url\(|@import\s+)[\"']?(https?:[^\"')]+)", path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(site)} loads {link}"


def main() -> None:
    """Build the site and check its links. Exit with code 1 and a line per dead link if there is one."""
    lay_out()
    shutil.rmtree(SITE, ignore_errors=True)
    zensical = Path(sys.executable).with_name("zensical")
    if subprocess.run([zensical, "build", "--strict", "--clean"], cwd=ROOT).returncode:
        sys.exit("the site was not built; correct the errors above and run: make docs")
    if dead := list(dead_links()):
        sys.exit("\n".join(dead))
    print(f"{len(list(SITE.rglob('*.html')))} pages in {SITE.relative_to(ROOT)}, no dead links")


if __name__ == "__main__":
    main()
