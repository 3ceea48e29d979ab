"""No file of the package imports, over others, itself. Imports for type checkers and inside functions count."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]


def imports_of(source: str, modules: set[str]) -> set[str]:
    """Return those of `modules` that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & modules or {node.module}
    return found & modules


def find_circle(sources: dict[str, str]) -> list[str]:
    """Return the modules of a circle of imports; none if there is no circle. sources: the files' texts by module."""
    graph = {name: imports_of(source, set(sources)) - {name} for name, source in sources.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_file_imports_itself_over_others():
    paths = sorted((ROOT / "ragblend").rglob("*.py"))
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths}
    sources = {name.removesuffix(".__init__"): path.read_text(encoding="utf-8") for path, name in names.items()}
    assert find_circle(sources) == []


def test_imports_for_type_checkers_count():
    one = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a.two import Two"
    assert set(find_circle({"a": "", "a.one": one, "a.two": "def f():\n    from a import one"})) == {"a.one", "a.two"}
    assert find_circle({"a": "", "a.one": one, "a.two": ""}) == []
