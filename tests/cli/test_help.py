"""What `--help` and docs/commands.md say: every command in a group, examples that can be typed."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import typer
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from ragblend.cli.app import app
from ragblend.cli.groups import GROUPS, HELP_WIDTH, RARE_OPTIONS, SectionedHelpGroup
from tools import reference

ROOT = get_command(app)
assert isinstance(ROOT, SectionedHelpGroup)
CONTEXT = typer.Context(ROOT, info_name="ragblend")
MOST_COMMANDS, MOST_OPTIONS, MOST_LINES = 29, 260, 46
BENCHMARKS = [("bench", name) for name in ROOT.commands["bench"].commands]
EXAMPLES = [(name, line) for group in GROUPS.values() for name, lines in group.items() for line in lines]


def test_every_command_is_in_one_group_and_listed_with_its_first_sentence():
    grouped = [name for group in GROUPS.values() for name in group]
    assert sorted(grouped) == sorted(ROOT.commands)
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "100"}).output
    assert [heading for heading in re.findall(r"^(\w+):$", shown, re.MULTILINE) if heading != "Options"] == list(GROUPS)
    assert all(re.search(rf"^  {name} ", shown, re.MULTILINE) for name in grouped)
    assert "..." not in shown.replace("[ARGS]...", ""), "no sentence is cut"


@pytest.mark.parametrize(("name", "line"), EXAMPLES, ids=lambda value: value)
def test_examples_are_understood_by_the_command_they_show(name, line):
    first, *arguments = shlex.split(line, comments=True)
    assert first == name
    command, context = ROOT.get_command(CONTEXT, name), CONTEXT
    names = [name]
    while isinstance(command, TyperGroup):  # bench
        context = typer.Context(command, info_name=names[-1], parent=context)
        names.append(arguments.pop(0))
        command = command.get_command(context, names[-1])
    command.make_context(names[-1], arguments, parent=context)  # parses, and does not run
    shown = CliRunner().invoke(app, [*names, "--help"]).output
    assert f"  ragblend {line}\n" in shown


@pytest.mark.parametrize("names", [(), *((name,) for name in ROOT.commands), *BENCHMARKS], ids=" ".join)
def test_help_fits_a_screen_and_ends_with_an_example(names):
    command, context = ROOT, typer.Context(ROOT, info_name="ragblend", terminal_width=HELP_WIDTH - 2)
    for name in names:
        command = command.commands[name]
        context = typer.Context(command, info_name=name, parent=context)
    shown = command.get_help(context).rstrip().splitlines()
    assert len(shown) <= MOST_LINES
    assert not names or shown[-1].startswith(f"    ragblend {' '.join(names)}")
    if "More options:" in shown:
        common, rare = shown[: shown.index("More options:")], shown[shown.index("More options:") :]
        assert any("--help " in line for line in common)
        assert len(rare) > 1


def commands_below(command: Any) -> list[Any]:
    below = getattr(command, "commands", None)
    return [command] if below is None else [each for sub in below.values() for each in commands_below(sub)]


def test_there_are_no_more_commands_and_options_than_agreed():
    commands = commands_below(ROOT)
    options = [each for command in (ROOT, *commands) for each in command.params if each.param_type_name == "option"]
    assert len(commands) <= MOST_COMMANDS
    assert len([option for option in options if option.name != "help"]) <= MOST_OPTIONS


def test_every_rare_option_is_an_option():
    flags = {flag for command in commands_below(ROOT) for param in command.params for flag in param.opts}
    assert flags >= RARE_OPTIONS


def test_the_reference_page_equals_the_commands_help():
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page(), "python -m tools.reference"
