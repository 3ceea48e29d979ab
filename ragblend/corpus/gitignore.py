"""Rules of `.gitignore` files. Depends on paths, not on documents."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import NamedTuple

from pathspec import GitIgnoreSpec

from ragblend.files.reading import read_file

logger = logging.getLogger(__name__)

_GITIGNORE_BYTES = 1 << 20


class GitignoreRules(NamedTuple):
    """Rules of `.gitignore` files.

    A rule applies to the paths below its file's folder. The rules of inner folders override those of outer folders.
    """

    rules: tuple[tuple[str, GitIgnoreSpec], ...] = ()  # (folder, rules of its file), outermost folder first

    @staticmethod
    def from_parents(top: str) -> GitignoreRules:
        """Return the rules of the folders above `top` in its git repository.

        Return no rules if `top` is outside of a repository, or if the rules of these folders ignore `top` itself.
        """
        folders, folder = [], top
        while not os.path.exists(os.path.join(folder, ".git")):
            parent = os.path.dirname(folder)
            if parent == folder:
                return GitignoreRules()
            folders.append(folder := parent)
        rules = GitignoreRules()
        for each in reversed(folders):
            rules = rules.add_folder_rules(each)
        return GitignoreRules() if rules.is_ignored(top, True) else rules

    def add_folder_rules(self, folder: str) -> GitignoreRules:
        """Return these rules and those of the folder's own `.gitignore`."""
        path = os.path.join(folder, ".gitignore")
        try:
            lines = read_file(path, _GITIGNORE_BYTES).decode("utf-8-sig", "replace").splitlines()
        except (FileNotFoundError, IsADirectoryError):
            return self
        except OSError as error:
            logger.warning("%s is not followed: %s", path, error.strerror or error)
            return self
        return GitignoreRules((*self.rules, (folder, _parse_patterns(lines, path))))

    def is_ignored(self, path: str, is_folder: bool) -> bool:
        """Return True if a rule ignores `path` itself. Call it only if no rule ignores a parent of `path`."""
        for folder, spec in reversed(self.rules):
            relative = path[len(folder.rstrip("/")) + 1 :]
            verdict = spec.check_file(relative + "/" if is_folder else relative).include
            if verdict is not None:
                return verdict
        return False


def _parse_patterns(lines: Sequence[str], path: str) -> GitIgnoreSpec:
    sound = []
    for line in lines:
        try:
            GitIgnoreSpec.from_lines([line])
            sound.append(line)
        except ValueError as error:  # the other lines still apply
            logger.warning("%s: %s", path, error)
    return GitIgnoreSpec.from_lines(sound)
