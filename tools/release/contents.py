"""Check of the files in the sdist and the wheel: all files that git tracks, and no others.

Read `find_problems` first.
"""

from __future__ import annotations

import re
import subprocess
import tarfile
import tomllib
import zipfile
from datetime import date
from pathlib import Path

import ragblend

ROOT = Path(__file__).parents[2]
ADDED_BY_BUILD = {"PKG-INFO"}
ATTRIBUTED = (  # licence, and attributions of the content by others
    "LICENSE",
    "data/questions/README.md",
    "ragblend/demo/weights/README.md",
)


def tracked(*, others: bool = False) -> set[str]:
    """Return the paths of all tracked files, relative to the root. others: also untracked, but not ignored files."""
    wanted = ["--cached", *(["--others", "--exclude-standard"] if others else [])]
    listed = subprocess.run(["git", "ls-files", "-z", *wanted], cwd=ROOT, capture_output=True, text=True, check=True)
    return {name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()}


def in_sdist(sdist: Path) -> set[str]:
    """Return the paths of the sdist's files, relative to its top folder."""
    with tarfile.open(sdist) as archive:
        return {name.name.partition("/")[2] for name in archive.getmembers() if name.isfile()} - ADDED_BY_BUILD


def in_wheel(wheel: Path) -> set[str]:
    """Return the paths of the wheel's files, without its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def find_problems(sdist: Path, wheel: Path, kept: set[str]) -> list[str]:
    """Return a sentence for each problem of the two distributions. kept: the paths that they should have."""
    package = {name for name in kept if name.startswith("ragblend/")}
    found = [
        *_difference("the sdist", in_sdist(sdist), kept),
        *_difference("the wheel", in_wheel(wheel), package),
    ]
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in names):
        found.append("the wheel has no LICENSE")
    found += [f"the sdist has no {name}" for name in ATTRIBUTED if name not in in_sdist(sdist)]
    version = f"-{ragblend.__version__}"
    found += [f"{path.name} is not of version {version[1:]}" for path in (sdist, wheel) if version not in path.name]
    return found


def _difference(what: str, held: set[str], wanted: set[str]) -> list[str]:
    return [
        *(f"{what} lacks {name}" for name in sorted(wanted - held)),
        *(f"{what} has {name}, which git does not track" for name in sorted(held - wanted)),
    ]


def find_tag_problems(tag: str, repository: str | None, changelog: str, today: date) -> list[str]:
    """Return the reasons why `tag` must not be released.

    repository: its address, or None if unknown. changelog: text of CHANGELOG.md.
    """
    version = ragblend.__version__
    found = []
    if tag != f"v{version}":
        found.append(f"the tag is {tag}, the version {version} (ragblend/__init__.py): tag v{version}, or change it")
    dated = re.search(rf"^## \[{re.escape(version)}\] - (\S+)$", changelog, re.MULTILINE)
    if dated is None or not re.fullmatch(r"\d{4}-\d{2}-\d{2}", dated[1]) or date.fromisoformat(dated[1]) > today:
        found.append(f"CHANGELOG.md has no dated heading: ## [{version}] - {today.isoformat()}")
    if repository is not None:
        urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
        if urls.get("Repository") != repository:
            found.append(f"pyproject.toml names no such repository: python -m tools.release.address {repository}")
    return found


def notes(changelog: str, version: str) -> str:
    """Return the changelog's section of one version; "" if it has none."""
    found = re.search(rf"^## \[{re.escape(version)}\].*?$(.*?)(?=^## \[|^\[|\Z)", changelog, re.MULTILINE | re.DOTALL)
    return found[1].strip() if found else ""
