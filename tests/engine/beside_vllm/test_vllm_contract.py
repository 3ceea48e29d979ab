"""What ragblend uses of vLLM is in the newest release, which needs a GPU to run: its wheel is read, never imported."""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ragblend.engine.vllm.releases.contract import ATTRIBUTES, CONNECTOR_BASE, calls, connector_methods, imports

NEWEST = "0.33.0"


class Source:
    """The Python files of a vLLM wheel."""

    def __init__(self, wheel: Path) -> None:
        self._files = zipfile.ZipFile(wheel)
        self._names = frozenset(self._files.namelist())

    def module(self, name: str) -> ast.Module | None:
        """Return the parsed module or package; None if the wheel has none of that name."""
        path = name.replace(".", "/")
        found = next((each for each in (f"{path}.py", f"{path}/__init__.py") if each in self._names), None)
        return ast.parse(self._files.read(found)) if found else None

    def has_name(self, module: str, name: str) -> bool:
        """Whether `from module import name` finds something, a submodule or a lazily loaded name included."""
        tree = self.module(module)
        if tree is None:
            return False
        if self.module(f"{module}.{name}") is not None or name in set(_names_in(tree)):
            return True
        return any(self.has_name(origin, name) for origin in self._star_imports(module, tree))

    def definition(self, module: str, name: str) -> ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef:
        """Return the class or function that `from module import name` gives, through re-exports."""
        tree = self.module(module)
        assert tree is not None, f"vLLM {NEWEST} has no module {module}"
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
                return node
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
                return self.definition(self._origin(module, node), name)
            if isinstance(node, ast.Dict):  # vLLM's lazy names: {"LLM": ".entrypoints.llm:LLM"}
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == name and isinstance(value, ast.Constant):
                        return self.definition(module + str(value.value).partition(":")[0], name)
        for origin in self._star_imports(module, tree):
            if self.has_name(origin, name):
                return self.definition(origin, name)
        raise AssertionError(f"vLLM {NEWEST} has no {name} in {module}")

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        """Return the module that `node`, an import in `module`, imports from."""
        steps = node.level - (f"{module.replace('.', '/')}/__init__.py" in self._names)
        parent = ".".join(module.split(".")[: -steps or None]) if node.level else ""
        return ".".join(filter(None, (parent, node.module)))

    def _star_imports(self, module: str, tree: ast.Module) -> Iterator[str]:
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
                yield self._origin(module, node)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    place = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(place),
    ]
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (28, 31, 35)]
    fetched = subprocess.run([*command, *platforms, f"vllm=={NEWEST}"], capture_output=True, text=True, check=False)
    wheels = list(place.glob("vllm-*.whl"))
    if not wheels:
        pytest.skip(f"the wheel of vLLM {NEWEST} cannot be had here: {fetched.stderr[-200:]}")
    yield Source(wheels[0])
    wheels[0].unlink()  # 340 MB


def test_every_import_is_there(source):
    used = {(module, name) for module, name, _ in imports()}
    assert len(used) > 20
    assert [each for each in sorted(used) if not source.has_name(*each)] == []


def test_every_keyword_is_a_parameter(source):
    checked = 0
    for module, name, keywords in calls():
        accepted, takes_any = _parameters(source.definition(module, name))
        checked += len(keywords)
        assert takes_any or keywords <= accepted, (module, name, keywords - accepted)
    assert checked > 20


def test_the_connector_implements_the_base_class_with_its_parameters(source):
    base = source.definition(CONNECTOR_BASE, "KVConnectorBase_V1")
    assert isinstance(base, ast.ClassDef)
    theirs = _methods(base)
    ours = connector_methods()
    demanded = {name for name, method in theirs.items() if "abstractmethod" in map(ast.unparse, method.decorator_list)}
    assert demanded
    assert demanded <= ours.keys()
    shared = theirs.keys() & ours.keys() - {"__init__"}
    assert len(shared) > 15
    for name in shared:
        expected = _positional(theirs[name])
        assert ours[name][: len(expected)] == expected, name


@pytest.mark.parametrize(("module", "name"), ATTRIBUTES, ids=[name for _, name in ATTRIBUTES])
def test_every_attribute_is_there(source, module, name):
    assert [each for each in ATTRIBUTES[module, name] if each not in _attributes(source, module, name)] == []


def _names_in(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom | ast.Import):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Dict):
            yield from (str(key.value) for key in node.keys if isinstance(key, ast.Constant))


def _methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}


def _positional(method: ast.FunctionDef) -> list[str]:
    return [each.arg for each in method.args.posonlyargs + method.args.args]


def _parameters(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[set[str], bool]:
    """Return what the function, or the class's constructor, takes by keyword, and whether it takes any."""
    if isinstance(node, ast.ClassDef):
        fields = {
            each.target.id
            for each in node.body
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        }
        init = _methods(node).get("__init__")
        if init is None:
            return fields, False
        node = init
    arguments = node.args
    named = {each.arg for each in arguments.posonlyargs + arguments.args + arguments.kwonlyargs}
    return named, arguments.kwarg is not None


def _attributes(source: Source, module: str, name: str) -> set[str]:
    """Return the methods, fields and `self.x` of a class and of its bases in vLLM."""
    node = source.definition(module, name)
    assert isinstance(node, ast.ClassDef)
    found = set()
    for each in ast.walk(node):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(each.name)
        elif isinstance(each, ast.AnnAssign | ast.Assign):
            for target in each.targets if isinstance(each, ast.Assign) else [each.target]:
                found |= {part.id for part in ast.walk(target) if isinstance(part, ast.Name)}
                found |= {part.attr for part in ast.walk(target) if isinstance(part, ast.Attribute)}
    for base in node.bases:
        kind = base.value if isinstance(base, ast.Subscript) else base
        if isinstance(kind, ast.Name) and kind.id not in ("ABC", "Generic", "Protocol", "object"):
            tree = source.module(module)
            if tree is not None and kind.id in set(_names_in(tree)):
                try:
                    found |= _attributes(source, module, kind.id)
                except AssertionError:  # a class of torch or of Python
                    continue
    return found
