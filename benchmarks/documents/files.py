"""Sample of files from packages of Debian and PyPI. They are downloaded by package name and are not in the repository.

Depends on apt-get, dpkg-deb and pip, not on ragblend. Read `choose_files` first.
"""

from __future__ import annotations

import gzip
import random
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

KINDS: Mapping[str, tuple[str, ...]] = {
    "html": (".html", ".htm", ".xhtml"),
    "pdf": (".pdf",),
    "office": (".docx", ".pptx", ".xlsx", ".xls", ".odt", ".ods", ".odp", ".rtf"),
    "books": (".epub", ".ipynb"),
    "table": (".csv", ".tsv"),
    "json": (".json",),
    "text": (".txt", ".md", ".rst"),
}
_KIND_OF = {suffix: kind for kind, suffixes in KINDS.items() for suffix in suffixes}
MIN_BYTES, MAX_BYTES = 1_000, 8_000_000
"""Sizes of files in the sample. Smaller files are stubs and redirects; larger ones would take most of a run's time."""


class Package(NamedTuple):
    """A package and the number of files to read from it, by kind. `origin`: "debian" or "pypi" (its source archive)."""

    name: str
    num_files: Mapping[str, int]
    origin: str = "debian"


class ChosenFile(NamedTuple):
    """A file of the sample. `name` is the package and the path in it; it is unique and the same on every machine."""

    name: str
    kind: str
    path: Path


PACKAGES: tuple[Package, ...] = (
    Package("abs-guide", {"html": 4}),
    Package("antiword", {"text": 2}),
    Package("apt-doc", {"html": 3, "text": 2}),
    Package("aptitude-doc-ja", {"html": 3}),
    Package("aptitude-doc-ru", {"html": 3}),
    Package("autoconf-doc", {"pdf": 1}),
    Package("bash-doc", {"html": 1, "pdf": 2}),
    Package("debian-edu-doc-de", {"html": 1, "pdf": 1, "books": 1}),
    Package("debian-faq", {"html": 2, "pdf": 1, "text": 1}),
    Package("debian-faq-fr", {"html": 1, "pdf": 1, "text": 1}),
    Package("debian-faq-zh-cn", {"html": 2, "pdf": 1, "text": 1}),
    Package("debian-handbook", {"html": 12, "pdf": 2}),
    Package("debian-history", {"html": 3, "pdf": 4, "books": 3, "text": 2}),
    Package("debian-kernel-handbook", {"html": 2}),
    Package("debian-policy", {"html": 3, "pdf": 2, "books": 1, "text": 3}),
    Package("debian-reference-de", {"html": 1}),
    Package("debian-reference-en", {"html": 2, "pdf": 1}),
    Package("developers-reference", {"html": 2, "pdf": 1, "books": 1, "text": 2}),
    Package("developers-reference-ja", {"html": 1, "pdf": 1, "books": 1}),
    Package("doc-debian", {"text": 3}),
    Package("docutils-doc", {"html": 3, "text": 3}),
    Package("exim4-doc-html", {"html": 3}),
    Package("eyes17-manuals-en", {"pdf": 1, "books": 1}),
    Package("ghostscript-doc", {"html": 3, "pdf": 1, "text": 1}),
    Package("git-doc", {"html": 4, "text": 4}),
    Package("gle-graphics-manual", {"pdf": 1}),
    Package("gnuplot-doc", {"html": 2, "pdf": 1}),
    Package("harden-doc", {"html": 2}),
    Package("iso-codes", {"json": 4}),
    Package("libxml2-doc", {"html": 2}),
    Package("live-manual-epub", {"books": 2}),
    Package("live-manual-html", {"html": 3}),
    Package("live-manual-odf", {"office": 2}),
    Package("live-manual-pdf", {"pdf": 3}),
    Package("live-manual-txt", {"text": 2}),
    Package("maint-guide", {"html": 2, "pdf": 1, "text": 1}),
    Package("maint-guide-ru", {"html": 1, "pdf": 1}),
    Package("octave-doc", {"html": 2, "pdf": 2}),
    Package("packaging-tutorial", {"pdf": 3}),
    Package("png-definitive-guide", {"html": 2}),
    Package("postgresql-doc-15", {"html": 4}),
    Package("python-nbsphinx-doc", {"html": 1, "pdf": 1, "books": 8}),
    Package("python-odf-doc", {"office": 3}),
    Package("python3-vega-datasets", {"table": 7, "json": 8}),
    Package("r-cran-knitr", {"html": 1, "pdf": 1}),
    Package("r-cran-officer", {"html": 1, "office": 8}),
    Package("r-cran-openxlsx", {"office": 5}),
    Package("r-cran-readr", {"html": 1, "table": 3}),
    Package("r-cran-readxl", {"office": 8}),
    Package("r-cran-sampling", {"pdf": 3}),
    Package("r-doc-html", {"html": 1}),
    Package("spamassassin", {"text": 2}),
    Package("sqlite3-doc", {"html": 3, "pdf": 1}),
    Package("ubuntu-packaging-guide-epub-es", {"books": 1}),
    Package("ubuntu-packaging-guide-pdf-ru", {"pdf": 1}),
    Package("writer2latex-manual", {"office": 1}),
    Package("zsh-doc", {"html": 2, "pdf": 1}),
    Package("odfpy", {"office": 5}, "pypi"),
    Package("python-docx", {"office": 8}, "pypi"),
    Package("python-pptx", {"office": 6}, "pypi"),
)
"""Packages of the sample. Their files are in English, German, French, Spanish, Chinese, Japanese, Russian and more."""


def fetch_packages(packages: Iterable[Package], cache: Path) -> dict[str, str]:
    """Download and unpack packages into `cache`/NAME. Return the failed packages by name, each with the error."""
    failures = {}
    for package in packages:
        folder = cache / package.name
        if folder.exists():
            continue
        unpacking = cache / f"{package.name}.unpacking"
        shutil.rmtree(unpacking, ignore_errors=True)
        unpacking.mkdir(parents=True)
        try:
            (_fetch_pypi if package.origin == "pypi" else _fetch_debian)(package.name, unpacking)
        except (OSError, subprocess.SubprocessError, tarfile.TarError, IndexError) as error:
            stderr = getattr(error, "stderr", None) or str(error)
            failures[package.name] = stderr.strip().splitlines()[-1] if stderr.strip() else type(error).__name__
            shutil.rmtree(unpacking)
        else:
            unpacking.rename(folder)
    return failures


def _fetch_debian(name: str, folder: Path) -> None:
    _run("apt-get", "download", "-qq", name, cwd=folder)
    archive = next(iter(folder.glob("*.deb")), None)
    if archive is None:
        raise OSError(f"apt-get downloaded no package {name}; run: apt-get update")
    _run("dpkg-deb", "-x", archive.name, ".", cwd=folder)
    archive.unlink()


def _fetch_pypi(name: str, folder: Path) -> None:
    _run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", name, name, cwd=folder)
    archive = next(folder.glob("*.tar.gz"))
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    archive.unlink()


def _run(*command: str, cwd: Path) -> None:
    subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True, timeout=300)


def choose_files(packages: Sequence[Package], cache: Path) -> list[ChosenFile]:
    """Return the sample, sorted by name: from each package at most `num_files` files per kind, by a seeded choice.

    A gzip file is first decompressed into its own folder.
    """
    return sorted(file for package in packages for file in _choose(package, cache / package.name))


def _choose(package: Package, folder: Path) -> Iterable[ChosenFile]:
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*")):
        plain = path.with_suffix("") if path.suffix == ".gz" else path
        kind = _KIND_OF.get(plain.suffix.lower())
        if kind is not None and kind in package.num_files and path.is_file() and not path.is_symlink():
            found.setdefault(kind, []).append(_unpacked(path, plain))
    for kind, paths in found.items():
        sized = sorted({path for path in paths if MIN_BYTES <= path.stat().st_size <= MAX_BYTES})
        draw = random.Random(f"{package.name} {kind}")
        for path in draw.sample(sized, min(package.num_files[kind], len(sized))):
            yield ChosenFile(f"{package.name}/{path.relative_to(folder)}", kind, path)


def _unpacked(path: Path, plain: Path) -> Path:
    if path != plain and not plain.exists():
        plain.write_bytes(gzip.decompress(path.read_bytes()))
    return plain
