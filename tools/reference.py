"""Generate docs/commands.md from the CLI: usage, options and examples of every command.

python -m tools.reference
"""

from __future__ import annotations

import re
from pathlib import Path

import typer
from typer.cli import get_docs_for_click
from typer.main import get_command

from ragblend.cli.app import app
from ragblend.cli.groups import GROUPS, SectionedHelpGroup

PAGE = Path(__file__).parents[1] / "docs" / "commands.md"
HEAD = """# Every command

Written from the commands themselves by `python -m tools.reference`. Settings and exit codes: [cli.md](cli.md).
`ragblend --install-completion` completes commands and options in bash, zsh, fish and PowerShell.
"""
EXAMPLES = re.compile(r"\x08\nExamples:\n((?:  .*\n?)+)")
SUBCOMMANDS = re.compile(r"\*\*Commands\*\*:\n\n(?:\* .*\n)+\n")  # summaries, which repeat the commands' own sections


def page() -> str:
    """Return the text of the page."""
    root = get_command(app)
    assert isinstance(root, SectionedHelpGroup)
    context = typer.Context(root, info_name="ragblend")
    parts = [HEAD]
    for heading, group in GROUPS.items():
        parts.append(f"## {heading}\n")
        for name in group:
            command = root.get_command(context, name)
            assert command is not None
            text = get_docs_for_click(obj=command, ctx=context, indent=2, name=name, call_prefix="ragblend")
            parts.append(EXAMPLES.sub(_as_block, SUBCOMMANDS.sub("", text)).rstrip() + "\n")
    return "\n".join(parts)


def _as_block(examples: re.Match[str]) -> str:
    lines = (line.strip() for line in examples[1].splitlines())
    return "\n".join(("```bash", *lines, "```", ""))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
