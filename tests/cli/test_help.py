"""What `--help` and docs/commands.md say: every command in a group, examples that can be typed."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from ragblend.cli.app import app
from ragblend.cli.groups import GROUPS, SectionedHelpGroup
from tools import reference

ROOT = get_command(app)
assert isinstance(ROOT, SectionedHelpGroup)
CONTEXT = typer.Context(ROOT, info_name="ragblend")
MOST_COMMANDS, MOST_OPTIONS = 28, 260
EXAMPLES = [(name, line) for group in GROUPS.values() for name, lines in group.items() for line in lines]


def test_every_command_is_in_one_group_and_listed_with_its_first_sentence() -> None:
    grouped = [name for group in GROUPS.values() for name in group]
    assert sorted(grouped) == sorted(ROOT.commands)
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "100"}).output
    assert [heading for heading in re.findall(r"^(\w+):$", shown, re.MULTILINE) if heading != "Options"] == list(GROUPS)
    assert all(re.search(rf"^  {name} ", shown, re.MULTILINE) for name in grouped)
    assert "..." not in shown.replace("[ARGS]...", ""), "no sentence is cut"


@pytest.mark.parametrize(("name", "line"), EXAMPLES, ids=lambda value: value)
def test_examples_are_understood_by_the_command_they_show(name: str, line: str) -> None:
    first, *arguments = shlex.split(line, comments=True)
    assert first == name
    command = ROOT.get_command(CONTEXT, name)
    assert command is not None
    command.make_context(name, arguments, parent=CONTEXT)  # parses, and does not run
    shown = CliRunner().invoke(app, [name, "--help"]).output
    assert f"  ragblend {line}\n" in shown


def commands_below(command: Any) -> list[Any]:
    below = getattr(command, "commands", None)
    return [command] if below is None else [each for sub in below.values() for each in commands_below(sub)]


def test_there_are_no_more_commands_and_options_than_agreed() -> None:
    commands = commands_below(ROOT)
    options = [each for command in (ROOT, *commands) for each in command.params if each.param_type_name == "option"]
    assert len(commands) <= MOST_COMMANDS
    assert len([option for option in options if option.name != "help"]) <= MOST_OPTIONS


def test_the_reference_is_what_the_commands_say() -> None:
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page(), "python -m tools.reference"
