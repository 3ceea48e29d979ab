"""Write where the repository is into every file that should say so, once that is known: one step before publishing.

    python -m tools.release.address https://github.com/OWNER/NAME

pyproject.toml gets its URLs, README.md its badges, CITATION.cff its `repository-code`; and what PyPI shows of README.md
gets whole addresses in place of links into the tree. Running it again with another address changes them all.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tools.release.contents import ROOT

ADDRESS = re.compile(r"https://github\.com/([\w.-]+)/([\w.-]+)")
BADGES_BEGIN = "[![tests]("


def write(address: str, root: Path = ROOT) -> list[str]:
    """Change the files under `root`; the names of those that changed. Raises ValueError for what is no address."""
    found = ADDRESS.fullmatch(address.removesuffix("/").removesuffix(".git"))
    if found is None:
        raise ValueError(f"{address!r} is no repository on GitHub; it is of the form https://github.com/OWNER/NAME")
    owner, name = found.groups()
    ways = {"pyproject.toml": _project, "README.md": _readme, "CITATION.cff": _citation}
    changed = []
    for file, way in ways.items():
        path = root / file
        before = path.read_text(encoding="utf-8")
        after = way(before, owner, name)
        if after != before:
            path.write_text(after, encoding="utf-8")
            changed.append(file)
    return changed


def _project(text: str, owner: str, name: str) -> str:
    at, site = f"https://github.com/{owner}/{name}", f"https://{owner.lower()}.github.io/{name}/"
    urls = {
        "Documentation": site,
        "Repository": at,
        "Issues": f"{at}/issues",
        "Changelog": f"{at}/blob/main/CHANGELOG.md",
        "Paper": "https://arxiv.org/abs/2405.16444",
    }
    lines = "".join(f'{label} = "{url}"\n' for label, url in urls.items())
    text = re.sub(r"(?<=\[project\.urls\]\n)(?:\w+ = .*\n)+", lines, text)
    # PyPI shows README.md without the tree that its links lead into.
    blob, raw = f"{at}/blob/main/", f"https://raw.githubusercontent.com/{owner}/{name}/main/"
    links = (
        (r"\]\((?!\w+:|#)([^)]+)\)", rf"]({blob}\1)"),
        (r'(srcset|src)="(?!\w+:)([^"]+)"', rf'\1="{raw}\2"'),
    )
    text = re.sub(
        r"\n\[\[tool\.hatch\.metadata\.hooks\.fancy-pypi-readme\.substitutions\]\]\n(?:\w+ = .*\n)+", "", text
    )
    table = "[[tool.hatch.metadata.hooks.fancy-pypi-readme.substitutions]]"
    added = "".join(f"\n{table}\npattern = '{pattern}'\nreplacement = '{put}'\n" for pattern, put in links)
    after_fragment = r'(?<=\[\[tool\.hatch\.metadata\.hooks\.fancy-pypi-readme\.fragments\]\]\npath = "README\.md"\n)'
    return re.sub(after_fragment, lambda _: added, text)


def _readme(text: str, owner: str, name: str) -> str:
    at, shield = f"https://github.com/{owner}/{name}", "https://img.shields.io"
    badges = (
        f"{BADGES_BEGIN}{at}/actions/workflows/test.yml/badge.svg)]({at}/actions/workflows/test.yml)",
        f"[![docs]({at}/actions/workflows/docs.yml/badge.svg)](https://{owner.lower()}.github.io/{name}/)",
        f"[![PyPI]({shield}/pypi/v/ragblend)](https://pypi.org/project/ragblend/)",
        f"[![Python]({shield}/pypi/pyversions/ragblend)](https://pypi.org/project/ragblend/)",
        f"[![licence]({shield}/pypi/l/ragblend)](LICENSE)",
    )
    lines = [line for line in text.splitlines() if not line.startswith(BADGES_BEGIN)]
    return "\n".join([lines[0], " ".join(badges), *lines[1:]]) + "\n"


def _citation(text: str, owner: str, name: str) -> str:
    lines = [line for line in text.splitlines() if not line.startswith("repository-code:")]
    place = next(number for number, line in enumerate(lines) if line.startswith("license:"))
    return "\n".join([*lines[:place], f"repository-code: https://github.com/{owner}/{name}", *lines[place:]]) + "\n"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tools.release.address https://github.com/OWNER/NAME")
    try:
        print(f"changed: {', '.join(write(sys.argv[1])) or 'nothing'}")
    except ValueError as error:
        sys.exit(str(error))
