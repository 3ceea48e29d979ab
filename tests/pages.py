"""Code blocks and commands in README.md, docs/ and RESULTS.md, for the tests that run them."""

from __future__ import annotations

import shlex
from itertools import groupby, takewhile
from pathlib import Path
from typing import NamedTuple

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
SMOLLM2 = ROOT / "models" / "smollm2"
NEEDS_SMOLLM2 = [
    pytest.mark.real_model,
    pytest.mark.skipif(not (SMOLLM2 / "config.json").exists(), reason="no real model: make real-model"),
]
MODELS = [pytest.param("demo", id="demo"), pytest.param(str(SMOLLM2), marks=NEEDS_SMOLLM2, id="smollm2")]
"""Models that replace those in the pages' programs: the embedded model, and SmolLM2 for `make test-real`."""
SHOWN = ("*.md", "docs/*.md", "benchmarks/RESULTS.md", "data/*/README.md")
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in sorted(path for glob in SHOWN for path in ROOT.glob(glob))
}


class Block(NamedTuple):
    """A fenced code block of a page. line: number of its first line of code, from 1."""

    page: str
    line: int
    language: str
    text: str


def blocks(*languages: str) -> list[Block]:
    """Return the code blocks in these languages, in the order of the pages."""
    return [
        Block(page, token.map[0] + 2, token.info.strip(), token.content)
        for page, text in PAGES.items()
        for token in MarkdownIt().parse(text)
        if token.type == "fence" and token.map and token.info.strip() in languages
    ]


def run_python(page: str, names: dict[str, object], replaced: dict[str, str]) -> None:
    """Execute a page's Python blocks in order, in the namespace `names`. replaced: {word: replacement}."""
    for block in blocks("python"):
        if block.page != page:
            continue
        text = block.text
        for word, other in replaced.items():
            text = text.replace(word, other)
        placed = "\n" * (block.line - 1) + text  # so that tracebacks have the page's line numbers
        exec(compile(placed, str(ROOT / page), "exec", dont_inherit=True), names)


def command_lines() -> list[tuple[str, list[str]]]:
    """Return ("page:line", words) of every command in the bash blocks. Splits pipes, and drops redirections."""
    found = []
    for block in blocks("bash"):
        begun, start = "", block.line
        for number, line in enumerate(block.text.splitlines(), block.line):
            start = start if begun else number
            begun += line.removesuffix("\\")
            if not line.endswith("\\"):
                words = shlex.split(begun, comments=True)
                for is_pipe, command in groupby(words, key=lambda word: word == "|"):
                    if not is_pipe:
                        found.append((f"{block.page}:{start}", list(takewhile(lambda word: word != ">", command))))
                begun = ""
    return found


def inline_commands() -> list[tuple[str, list[str]]]:
    """Return (page, words) of every inline code that begins with `ragblend`."""
    found = []
    for page, text in PAGES.items():
        for token in MarkdownIt().enable("table").parse(text):
            for child in token.children or ():
                if child.type == "code_inline" and child.content.startswith("ragblend "):
                    found.append((page, child.content.split()))
    return found
