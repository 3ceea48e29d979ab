"""Write the repository's address into pyproject.toml, README.md and CITATION.cff, before the first publication.

    python -m tools.release.address https://github.com/OWNER/NAME

pyproject.toml gets the project's URLs, and the rules that make README.md's relative links absolute on PyPI. README.md
gets badges, CITATION.cff its `repository-code`. Another run with another address replaces all of them.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tools.release.contents import ROOT

ADDRESS = re.compile(r"https://github\.com/([\w.-]+)/([\w.-]+)")
BADGES_BEGIN = "[![tests]("


def write(address: str, root: Path = ROOT) -> list[str]:
    """Write the address into the files under `root`. Return the names of the changed files.

    Raises ValueError if `address` is not a GitHub repository.
    """
    found = ADDRESS.fullmatch(address.removesuffix("/").removesuffix(".git"))
    if found is None:
        raise ValueError(f"{address!r} is not a GitHub repository; write it as https://github.com/OWNER/NAME")
    owner, name = found.groups()
    writers = {"pyproject.toml": _project, "README.md": _readme, "CITATION.cff": _citation}
    changed = []
    for file, write_address in writers.items():
        path = root / file
        before = path.read_text(encoding="utf-8")
        after = write_address(before, owner, name)
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
    # PyPI shows README.md without the repository, so relative links would be dead there.
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
