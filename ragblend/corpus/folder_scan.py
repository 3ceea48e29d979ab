"""Finds the files to read in named files and folders, each once and in order, and the reasons why others are left out.

Handles names, links, `.gitignore` and ragblend's own folders. Reads no documents. Read `scan_folders` first.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path, PurePath
from typing import NamedTuple
from urllib.parse import unquote

from ragblend.corpus.gitignore import GitignoreRules
from ragblend.errors import NotFoundError, UsageError
from ragblend.files.places import expand_user_path
from ragblend.files.reading import kind_of_file

logger = logging.getLogger(__name__)

SKIPPED_NAMES = frozenset({"node_modules", "__pycache__", "ragblend-data", "ragblend.toml"})
"""Names that are left out of folders, in addition to hidden ones. A named folder or file of such a name is read."""

_RAGBLEND_FOLDER_FILES = ({"catalog.sqlite", "models"}, {"catalog.sqlite", "vectors.faiss"})
_LINK_OUTSIDE_REASON = "is a link that leads out of the folder; to have that file read, name it too"
_LINKED_FOLDER_REASON = "is a link to a folder elsewhere, which is not followed; to have that folder read, name it too"
BROKEN_LINK_REASON = "is a link to a file that is not there; restore it, or remove the link"
_LINK_LOOP_REASON = "is a link that leads to itself; remove it"
_EVERYTHING = ("**", "*")
_FILE_URI = "file://"
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_RECORD = re.compile(r"#\d+(\.\d+)*$")


class ReadFailure(NamedTuple):
    """A file or folder that was not read, with the reason and what to do."""

    path: str
    reason: str


@dataclass
class FolderScan:
    """The files that `scan_folders` found, and those that it left out. Every path is a `normal_path`."""

    roots: list[str] = field(default_factory=list)  # the named files and folders
    files: dict[str, str] = field(default_factory=dict)  # file to read -> the root that holds it, in reading order
    named_files: set[str] = field(default_factory=set)  # the files of `files` that the caller named
    filtered_out: set[str] = field(default_factory=set)  # files that would be read, but do not match `glob`
    links: set[str] = field(default_factory=set)  # links to files that are read under another name
    ignored: list[str] = field(default_factory=list)  # files and folders that `.gitignore` leaves out
    # Links out of the roots, links to folders, broken links, pipes, devices.
    skipped: list[ReadFailure] = field(default_factory=list)
    unreadable: list[ReadFailure] = field(default_factory=list)

    def is_covered(self, path: str) -> bool:
        """Return True if the file `path` is one of `roots`, or is below a folder of `roots`."""
        return any(each in self._root_set for each in iter_path_and_parents(path))

    def is_below_unreadable(self, path: str) -> bool:
        """Return True if a folder above the file `path` could not be listed."""
        return any(each in self._unlisted for each in iter_path_and_parents(path))

    def has_left_out(self, path: str, top: str) -> bool:
        """Return True if the file `path` is below a folder of `roots`, but the scan left the file out.

        If only `glob` left the file out, return False. Of `roots`, only `top` and the folders below `top` count.
        """
        is_listed = path in self.files or path in self.filtered_out
        return not is_listed and any(
            each in self._root_set and is_same_or_below(each, top)
            for each in iter_path_and_parents(path)
            if each != path
        )

    @cached_property
    def _root_set(self) -> frozenset[str]:
        return frozenset(self.roots)

    @cached_property
    def _unlisted(self) -> frozenset[str]:
        return frozenset(path for path, _ in self.unreadable)


def scan_folders(paths: Iterable[str | Path], glob: str = "*", excluded: Iterable[str | Path] = ()) -> FolderScan:
    """Return the files among `paths`, and the files in the folders among `paths`, recursively and ordered by name.

    A file in `paths` is always returned. Of the files in a folder, the scan leaves out:

    - hidden files, `node_modules`, `__pycache__`, ragblend's own data, and files in the folders `excluded`;
    - files that are excluded by a `.gitignore` file of the folder, of a folder below it, or of a folder above it in the
      same git repository;
    - files that do not match `glob`, a pattern in the syntax of `Path.rglob`;
    - links to folders, and links to files outside of `paths`.

    A link to a file is returned under the link's name, unless the file itself is returned too. Raises NotFoundError for
    a path that does not exist, UsageError for a pattern that can match nothing.
    """
    pattern = _split_glob(glob)
    scan, excluded_folders = FolderScan(), {os.path.realpath(folder) for folder in excluded}
    for path in map(_local, paths):
        if not os.path.lexists(path):
            raise NotFoundError(
                f"{path} does not exist; check the path. If it was deleted, remove its documents: "
                f"ragblend remove {path}"
            )
        scan.roots.append(normal_path(path))
    scan.roots = list(dict.fromkeys(scan.roots))
    for top in scan.roots:
        if not os.path.isdir(top):
            scan.named_files.add(top)
            scan.files.setdefault(top, top)
            continue
        not_files = list[ReadFailure]()
        for path in _files_below(top, excluded_folders, scan, not_files):
            if _is_wanted(path, top, pattern):
                scan.files[path] = min(scan.files.get(path, top), top, key=len)  # the widest of several
            else:
                scan.filtered_out.add(path)
        scan.skipped += [each for each in not_files if _is_wanted(each.path, top, pattern)]
    scan.filtered_out -= scan.files.keys()
    scan.unreadable = list(dict.fromkeys(scan.unreadable))  # a named folder below a named folder is walked twice
    scan.ignored = [path for path in dict.fromkeys(scan.ignored) if path not in scan.roots]
    others = [each for each in dict.fromkeys(scan.skipped) if not _leads_to_folder_of(scan, each.path)]
    scan.skipped = [*_drop_outside_links(scan), *others]
    _deduplicate_links(scan)
    return scan


def _local(path: str | Path) -> str | Path:
    return resolve_source(str(path)) if str(path).startswith(_FILE_URI) else expand_user_path(path, "the path")


def normal_path(path: str | Path) -> str:
    """Return the absolute path of a file or folder, independent of the working folder; it need not exist.

    Links in parent folders are resolved; a link to a file keeps its own name. Names are spelled as their folder lists
    them, also on file systems that ignore case or Unicode form.
    """
    text = os.fspath(path)
    if os.path.isdir(text):
        return _as_listed(os.path.realpath(text))
    folder, name = os.path.split(text)
    return _as_listed(os.path.join(os.path.realpath(folder or os.curdir), name))


def _as_listed(path: str) -> str:
    """Return `path` with every name as its folder lists it; unchanged on file systems that distinguish case."""
    other = path.swapcase()
    if other == path or not (os.path.lexists(path) and os.path.lexists(other) and os.path.samefile(path, other)):
        return path
    listed = Path(path).anchor
    for name in Path(path).parts[1:]:
        plain = unicodedata.normalize("NFC", name).casefold()
        try:
            names = os.listdir(listed)
        except OSError:
            names = []
        same = [each for each in names if unicodedata.normalize("NFC", each).casefold() == plain]
        listed = os.path.join(listed, name if name in names or not same else same[0])
    return listed


def match_sources(name: str, sources: Iterable[tuple[str, str]]) -> list[str]:
    """Return the sources that match `name`, which names a document, a file with all its records, or a folder.

    `sources`: pairs (source, file) to choose from. `name`: a source as `ragblend documents` prints it, a path relative
    to the working folder, an absolute path or a file:// URI, in either Unicode normal form. The files need not exist
    any more. Returns [] if nothing matches. Raises UsageError for an empty name.
    """
    if not name.strip():
        raise UsageError("the name is empty; pass a file, a folder or a record, as `ragblend documents` lists them")
    pairs = list(sources)
    if any(source == name for source, _ in pairs):
        return [name]
    source = resolve_source(name)
    meant = dict.fromkeys((source, os.path.realpath(source)))  # `name` may be a link to the file
    for wanted, spelled in ((spelled(path), spelled) for path in meant for spelled in (str, _normalize_unicode)):
        matches = [source for source, _ in pairs if _RECORD.search(wanted) and spelled(source) == wanted]
        matches = matches or [source for source, file in pairs if wanted in (spelled(source), spelled(file))]
        matches = matches or [source for source, _ in pairs if is_below(spelled(source), wanted)]
        if matches:
            return matches
    return []


def resolve_source(name: str) -> str:
    """Return the source of the document `name`. A path or a file:// URI becomes a `normal_path`; other URIs stay."""
    if name.startswith(_FILE_URI):
        _, slash, path = name.removeprefix(_FILE_URI).partition("/")  # the part between is the host, this one
        return normal_path(unquote(slash + path))
    return name if _URI.match(name) else normal_path(expand_user_path(name, "the document"))


def make_source(path: str, record: str = "") -> str:
    """Return the source of a file, or of one of its records. `record`: such as "#0"; "" for the file.

    A file may be named like a record, such as `a.json#0`. Then `#` is appended to its source.

    >>> make_source("/a.json", "#0"), make_source("/a.json"), make_source("/a.json#0")
    ('/a.json#0', '/a.json', '/a.json#0#')
    """
    return path + (record or "#" * (path.endswith("#") or _RECORD.search(path) is not None))


def source_path(source: str) -> str:
    """Return the path of the file from which a source was made (`make_source`)."""
    return source[:-1] if source.endswith("#") else _RECORD.sub("", source)


def is_below(path: str, folder: str) -> bool:
    """Return True if `path` lies in `folder` or further down."""
    return path.startswith(folder.rstrip("/") + "/")


def is_same_or_below(path: str, folder: str) -> bool:
    """Return True if `path` is `folder` or lies below it."""
    return path == folder or is_below(path, folder)


def iter_path_and_parents(path: str) -> Iterator[str]:
    """Yield a path, its folder, and every folder above.

    >>> list(iter_path_and_parents("/a/b"))
    ['/a/b', '/a', '/']
    """
    yield path
    while (parent := os.path.dirname(path)) != path:
        yield parent
        path = parent


def display_source(source: str) -> str:
    """Return a source for display, with control characters escaped. Paths below the working folder become relative."""
    try:
        here = os.getcwd().rstrip("/") + "/"
    except OSError:  # the working folder was deleted
        here = "/"
    return escape_control(source[len(here) :] if len(here) > 1 and source.startswith(here) else source)


def escape_control(text: str) -> str:
    """Return `text` with its control characters escaped, so that it does not affect a terminal.

    >>> escape_control("a\\x1b[2J")
    'a\\\\x1b[2J'
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def printable(path: str) -> str:
    """Return a path that can be printed and stored: bytes that are not UTF-8 are escaped."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _normalize_unicode(text: str) -> str:
    return unicodedata.normalize("NFC", text)


# --- folders ---


def _files_below(top: str, excluded: set[str], scan: FolderScan, not_files: list[ReadFailure]) -> Iterator[str]:
    """Yield the files below `top` in order of the parts of their paths.

    Adds folders that cannot be listed, names that are not UTF-8, and ignored paths to `scan`. Adds pipes, devices,
    links to folders and broken links to `not_files`.
    """
    waiting: list[tuple[str, bool, GitignoreRules]] = [(top, True, GitignoreRules.from_parents(top))]
    while waiting:  # a stack, because folders may be nested deeper than Python's recursion limit
        path, is_folder, ignored = waiting.pop()
        if not is_folder:
            yield path
            continue
        try:
            entries = list(os.scandir(path))
        except (FileNotFoundError, NotADirectoryError):
            continue  # deleted since its folder was listed
        except OSError as error:
            scan.unreadable.append(ReadFailure(path, f"{error.strerror or error}; check its permissions"))
            continue
        names = {entry.name for entry in entries}
        if path != top and any(ours <= names for ours in _RAGBLEND_FOLDER_FILES):
            continue
        inside = ignored.add_folder_rules(path) if ".gitignore" in names else ignored
        for entry in sorted(entries, key=lambda entry: entry.name, reverse=True):
            kind = _kind(entry, scan.unreadable)
            if not kind or (kind == "folder" and entry.path in excluded):
                continue
            if inside.is_ignored(entry.path, kind == "folder"):
                scan.ignored.append(entry.path)
            elif kind == "other":
                not_files.append(ReadFailure(entry.path, _reason_no_file(entry.path)))
            else:
                waiting.append((entry.path, kind == "folder", inside))


def _kind(entry: os.DirEntry[str], unreadable: list[ReadFailure]) -> str:
    """Return "file", "folder", or "other" (a pipe, a device, a link to a folder, a broken link); "" to leave it out."""
    if entry.name.startswith(".") or entry.name in SKIPPED_NAMES:
        return ""
    try:
        entry.name.encode()
        if entry.is_dir(follow_symlinks=False):
            return "folder"
        return "file" if entry.is_file() else "other"
    except UnicodeEncodeError:
        unreadable.append(ReadFailure(printable(entry.path), "its name is not UTF-8; rename it"))
        return ""
    except OSError as error:  # reading it reports the error; a link to itself is a broken link
        return "other" if error.errno == errno.ELOOP else "file"


def _reason_no_file(path: str) -> str:
    """Return why something in a folder is not read, with the fix."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        return _LINK_LOOP_REASON if error.errno == errno.ELOOP else BROKEN_LINK_REASON
    return _LINKED_FOLDER_REASON if stat.S_ISDIR(mode) else f"is {kind_of_file(mode)}, not a file; remove it"


def _leads_to_folder_of(scan: FolderScan, path: str) -> bool:
    """Return True for a link to a folder whose files are read under their own names."""
    return os.path.isdir(path) and any(is_same_or_below(os.path.realpath(path), top) for top in scan.roots)


def _drop_outside_links(scan: FolderScan) -> list[ReadFailure]:
    """Drop links to files outside of the roots, and return them: a folder's writers may not be allowed to read those
    files.
    """
    dropped = []
    for path in [each for each in scan.files if each not in scan.named_files and os.path.islink(each)]:
        target = os.path.realpath(path)
        if not any(is_same_or_below(target, top) for top in scan.roots):
            dropped.append(ReadFailure(path, _LINK_OUTSIDE_REASON))
            del scan.files[path]
    return dropped


def _deduplicate_links(scan: FolderScan) -> None:
    """Keep one name of every file that has several: its own, else the first."""
    names: dict[str, str] = {}
    for path in sorted(scan.files, key=os.path.islink):
        if names.setdefault(os.path.realpath(path) if os.path.islink(path) else path, path) != path:
            scan.links.add(path)
    for path in scan.links:
        del scan.files[path]


# --- patterns ---


def _split_glob(glob: str) -> tuple[str, ...]:
    parts = PurePath(glob).parts
    if not parts or PurePath(glob).is_absolute() or ".." in parts:
        raise UsageError(f"glob is {glob!r}; pass a relative pattern such as '*.md'")
    return ("**", *parts)


def _is_wanted(path: str, top: str, pattern: Sequence[str]) -> bool:
    """Return True if a file in the folder `top` matches the pattern."""
    return pattern == _EVERYTHING or _matches(path[len(top.rstrip("/")) + 1 :].split("/"), pattern)


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return True if a path's parts match a pattern's; `**` matches any number of parts.

    >>> [_matches(("a", "b.md"), ("**", *each)) for each in (("*.md",), ("a", "*.md"), ("x", "*.md"), ("a", "**", "*"))]
    [True, True, False, True]
    """
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_matches(parts[start:], pattern[1:]) for start in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])
