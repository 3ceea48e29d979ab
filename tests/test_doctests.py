"""Every example in a docstring of the package is true."""

import doctest
import importlib
from pathlib import Path

import pytest

import ragblend

ROOT = Path(ragblend.__file__).parents[1]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in Path(ragblend.__file__).parent.rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_are_true(name):
    try:
        module = importlib.import_module(name.removesuffix(".__init__"))
    except ImportError as error:
        pytest.skip(f"needs an extra that is not installed: {error}")
    failed, tried = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert tried > 0, "the examples are not in docstrings, so nothing ran them"
    assert failed == 0


def test_the_modules_known_to_have_examples_are_found():
    for name in (
        "fusion.rules",
        "fusion.attention",
        "decoding",
        "store.format.kv",
        "store.format.keys",
        "store.format.sizes",
    ):
        assert f"ragblend.engine.{name}" in MODULES
