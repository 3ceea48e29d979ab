"""The command line in the tests' own process."""

from __future__ import annotations

import sys

import pytest

from ragblend.cli import app as cli


def run_command(*arguments: str) -> int:
    """The exit code of `ragblend ARGUMENTS`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["ragblend", *arguments])
        try:
            cli.main()
        except SystemExit as ended:
            return int(ended.code or 0)
    return 0
